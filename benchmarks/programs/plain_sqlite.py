"""The floor for SQLite: a loop that awaits a future, and a writer thread that resolves it after each commit of one row.

With the settings that perdure has: a log (WAL), written through to the disk at every commit (FULL).
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import uuid
from typing import Final

from benchmarks.program import Program, result
from benchmarks.work import RESULT_BYTES

_TABLE: Final = "CREATE TABLE IF NOT EXISTS steps (run TEXT, n INTEGER, value TEXT, PRIMARY KEY (run, n)) STRICT, WITHOUT ROWID"


class PlainSqlite(Program):
    """One row for each step, in the same order as a workflow would write them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[asyncio.Future[None], str, int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self, place: str) -> None:
        """Make the table and start the thread."""
        connection = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(_TABLE)
        self._thread = threading.Thread(target=self._write, args=(connection,))
        self._thread.start()

    async def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def run(self, steps: int, size: int) -> None:
        """Row after row."""
        name = uuid.uuid4().hex
        for n in range(steps):
            await self._commit(name, n, size)

    async def fan_out(self, steps: int) -> None:
        """All rows at once."""
        name = uuid.uuid4().hex
        await asyncio.gather(*(self._commit(name, n, RESULT_BYTES) for n in range(steps)))

    async def _commit(self, name: str, n: int, size: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._queue.put((future, name, n, result(n, size)))
        await future

    def _write(self, connection: sqlite3.Connection) -> None:
        while (row := self._queue.get()) is not None:
            future, *values = row
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO steps VALUES (?, ?, ?)", values)
            connection.execute("COMMIT")
            future.get_loop().call_soon_threadsafe(future.set_result, None)
        connection.close()


PROGRAM = PlainSqlite()
