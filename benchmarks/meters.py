"""What work writes, counted exactly from outside: in the log of SQLite and of PostgreSQL.

SQLite: a reader that began before the work keeps the log from being emptied, so that afterwards every frame is still in it. Each
commit marks its last frame. PostgreSQL: transactions that write take a number, and the log has a position.
"""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24


class Written(NamedTuple):
    """What was written between `start` and `stop`."""

    commits: int
    bytes_written: int
    bytes_stored: int


class Meter(Protocol):
    """Counts from `start` to `stop`."""

    async def start(self) -> None: ...
    async def stop(self) -> Written: ...


class SqliteMeter:
    """Counts in a file that is in WAL mode."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._log = Path(f"{path}-wal")
        self._reader = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
        self._size = 0

    async def start(self) -> None:
        """Empty the log, and keep it from being emptied."""
        await asyncio.to_thread(self._start)

    async def stop(self) -> Written:
        """Count the log, and let go of it."""
        return await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        self._empty_log()
        self._size = self._path.stat().st_size
        self._reader.execute("BEGIN")
        self._reader.execute("SELECT count(*) FROM sqlite_master").fetchall()

    def _stop(self) -> Written:
        commits = commits_in(self._log.read_bytes())
        written = self._log.stat().st_size
        self._reader.execute("COMMIT")
        self._empty_log()
        self._reader.close()
        return Written(commits, written, self._path.stat().st_size - self._size)

    def _empty_log(self) -> None:
        (busy, _, _) = self._reader.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise RuntimeError(f"{self._path}: another connection holds the log, so what is written cannot be counted")


def commits_in(log: bytes) -> int:
    """How many commits a whole log of SQLite holds: a frame that ends one says how large the database is then."""
    if not log:
        return 0
    (page_bytes,) = struct.unpack_from(">I", log, 8)
    salts = log[16:24]
    commits = 0
    for frame in range(_HEADER_BYTES, len(log), _FRAME_HEADER_BYTES + page_bytes):
        (pages_after_commit,) = struct.unpack_from(">I", log, frame + 4)
        if log[frame + 8 : frame + 16] != salts:
            raise RuntimeError("the log began anew while it was watched")
        commits += pages_after_commit != 0
    return commits


class PostgresMeter:
    """Counts on a server that has no other user."""

    _POSITION: Final = """
        SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS commits,
               pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS bytes_written,
               pg_database_size(current_database()) AS bytes_stored
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Any = None
        self._before = Written(0, 0, 0)

    async def start(self) -> None:
        """Note where everything stands."""
        import asyncpg  # type: ignore[import-untyped]  # it ships no types

        self._connection = await asyncpg.connect(self._dsn)
        self._before = await self._position()

    async def stop(self) -> Written:
        """What has changed since."""
        now = await self._position()
        await self._connection.close()
        return Written(*(after - before for after, before in zip(now, self._before, strict=True)))

    async def _position(self) -> Written:
        return Written(*await self._connection.fetchrow(self._POSITION))


def meter_for(place: str) -> Meter:
    """The meter for what is at this place."""
    return PostgresMeter(place) if place.startswith("postgresql:") else SqliteMeter(place)
