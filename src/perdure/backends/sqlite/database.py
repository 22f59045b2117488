"""The databases of this process: one per file, shared and counted by the stores on it, and safe over a fork.

SQLite keeps its locks per process and file in memory, and a forked child inherits that memory but not the locks. So a child
must inherit no open connection at all, not even an unused one: before a fork the threads close theirs and stand still;
afterwards both sides open anew, each when it needs to. Where that was impossible (a transaction was open, or a thread was busy
for too long) the child refuses to touch the file.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from typing import Final

from perdure.backends.base.lifecycle import Watcher
from perdure.backends.sqlite.connection import DatabaseFile
from perdure.backends.sqlite.connection_thread import ConnectionThread
from perdure.backends.sqlite.writer import Writer

_FORK_PATIENCE: Final = 5.0


class Database:
    """A database file with its writer and its reader.

    `ready` has the table stems whose schema is known to be there. `users` and `transactions` are guarded by the registry's lock.
    """

    def __init__(self, path: str) -> None:
        self.file = DatabaseFile(path)
        self.writer = Writer(self.file)
        self.reader = ConnectionThread(self.file, "reader", read_only=True)
        self.ready: set[str] = set()
        self.transactions: set[ConnectionThread] = set()
        self.users = 0

    @property
    def threads(self) -> tuple[ConnectionThread, ConnectionThread]:
        """The two threads that every store of the file shares."""
        return self.writer, self.reader

    def add_transaction(self, thread: ConnectionThread) -> None:
        """Remember the thread of a transaction until it has ended."""
        _registry.add_transaction(self, thread)

    def open_transactions(self) -> set[ConnectionThread]:
        """The threads of transactions that have not ended."""
        return {thread for thread in self.transactions if not thread.has_ended(0)}

    async def close(self) -> None:
        """One store less; the last one waits until the threads have ended and their connections are closed."""
        if not _registry.release(self):
            return
        reader_ended, writer_ended = Watcher(), Watcher()
        self.reader.stop(reader_ended)
        try:
            await asyncio.wait([reader_ended.future])
        finally:
            self.writer.stop(writer_ended)  # last: the last connection to close removes the log, and only a writing one can
        await asyncio.wait([writer_ended.future])

    def abandon(self) -> None:
        """One store less, without waiting for anything. A collection may call this anywhere."""
        _registry.abandon(self)


class _Registry:
    """The open databases by real path. `_lock` guards everything here but `_abandoned`, and is held over a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._databases: dict[str, Database] = {}
        # Threads that were asked to end and may still have a connection.
        self._ending: list[ConnectionThread] = []
        # What collected stores have left. They wait for no lock, as a collection may run in any thread, also one that has it.
        self._abandoned: deque[Database] = deque()

    def use(self, path: str, *, full: bool) -> Database:
        """The database of the file, with one user more."""
        with self._lock:
            database = self._databases.get(path)
            if database is None:
                database = self._databases[path] = Database(path)
            database.users += 1
            database.file.full |= full
        self._sweep()
        return database

    def release(self, database: Database) -> bool:
        """One user less. True for the last one, which must then stop the threads."""
        with self._lock:
            return self._release(database)

    def _release(self, database: Database) -> bool:
        database.users -= 1
        if database.users > 0:
            return False
        self._databases.pop(database.file.path, None)
        self._ending = [thread for thread in self._ending if not thread.has_ended(0)]
        self._ending += [thread for thread in database.threads if thread.is_started]
        return True

    def add_transaction(self, database: Database, thread: ConnectionThread) -> None:
        """Start the thread of a transaction and remember it. Waits for a fork to be over: the child must inherit nothing."""
        with self._lock:
            thread.start()
            database.transactions = {*database.open_transactions(), thread}

    def abandon(self, database: Database) -> None:
        """One user less, now or when the lock is free next time."""
        self._abandoned.append(database)
        self._sweep()

    def _sweep(self) -> None:
        if not self._abandoned or not self._lock.acquire(blocking=False):
            return
        try:
            while self._abandoned:
                database = self._abandoned.popleft()
                if self._release(database):
                    for thread in database.threads:
                        thread.stop()
        finally:
            self._lock.release()

    def before_fork(self) -> None:
        """Have every connection closed, and keep the lock so that none is opened."""
        self._lock.acquire()
        for thread in self._threads():
            thread.begin_pause()
        deadline = time.monotonic() + _FORK_PATIENCE
        self._ending = [thread for thread in self._ending if not thread.has_ended(deadline)]
        in_use = {thread.file.path for thread in [*self._threads(), *self._ending] if not thread.is_paused(deadline)}
        for path, database in self._databases.items():
            database.file.lost_in_fork = path in in_use or bool(database.open_transactions())

    def after_fork_in_parent(self) -> None:
        """Go on."""
        for thread in self._threads():
            thread.end_pause()
        for database in self._databases.values():
            database.file.lost_in_fork = False
        self._lock.release()
        self._sweep()

    def after_fork_in_child(self) -> None:
        """Begin with no threads and an empty queue: what was in flight belongs to the parent."""
        self._lock = threading.Lock()
        self._ending = []
        for database in self._databases.values():
            for thread in (*database.threads, *database.transactions):
                thread.start_over()
            database.transactions = set()

    def _threads(self) -> list[ConnectionThread]:
        return [thread for database in self._databases.values() for thread in database.threads]


_registry: Final = _Registry()


def database_at(path: str, *, full: bool) -> Database:
    """The database of the file at this real path, with one user more."""
    return _registry.use(path, full=full)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_registry.before_fork,
        after_in_parent=_registry.after_fork_in_parent,
        after_in_child=_registry.after_fork_in_child,
    )
