"""The floor: what SQLite and a thread cost without perdure.

An asyncio loop awaits a future that a writer thread resolves with `call_soon_threadsafe` after each one-row commit, with the
pragmas that perdure uses.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from pathlib import Path


class Floor:
    """One writer thread, one row for each commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[tuple[asyncio.Future[None], str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    async def write(self, run: str, n: int) -> None:
        """Return when the row is committed."""
        future = asyncio.get_running_loop().create_future()
        self._queue.put((future, run, n))
        await future

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE rows (run TEXT, n INTEGER, value TEXT, PRIMARY KEY (run, n)) STRICT, WITHOUT ROWID")
        while (work := self._queue.get()) is not None:
            future, run, n = work
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO rows VALUES (?, ?, ?)", (run, n, f"result number {n:06}"))
            connection.execute("COMMIT")
            future.get_loop().call_soon_threadsafe(future.set_result, None)
        connection.close()
