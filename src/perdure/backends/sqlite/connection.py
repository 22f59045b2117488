"""Opening the database file, and what its errors mean.

The file is never opened except through SQLite: closing any other descriptor of it would drop this process's locks. Only a
file that is not there yet is created by hand, to give it mode 0600.
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Final, TypeAlias

from perdure.errors import PersistenceError, ValueNotStorable

BUSY_TIMEOUT: Final = 15.0
# What the WAL file is cut back to after a burst (it is reused in place otherwise).
_WAL_SIZE_LIMIT: Final = 64 << 20
_PRIMARY_CODE: Final = 0xFF

# Device and inode.
_Identity: TypeAlias = tuple[int, int]
_Logs: TypeAlias = tuple[_Identity | None, _Identity | None]

_REASONS: Final = {
    sqlite3.SQLITE_BUSY: "another connection kept the database locked for too long",
    sqlite3.SQLITE_LOCKED: "another connection of this process keeps the database locked",
    sqlite3.SQLITE_FULL: "the disk is full, or the file may not grow; free some space",
    sqlite3.SQLITE_IOERR: "the disk reported an input/output error",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; keep it, and restore it from a backup",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check the directory and its permissions",
    sqlite3.SQLITE_PERM: "the file cannot be opened; check its permissions",
    sqlite3.SQLITE_AUTH: "the file cannot be opened; check its permissions",
    sqlite3.SQLITE_TOOBIG: "a value is larger than SQLite can hold",
}


def code_of(error: BaseException) -> int:
    """SQLite's primary result code, or 0."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & _PRIMARY_CODE


def is_fault(error: BaseException) -> bool:
    """Whether the error is the database's or the disk's, not the statement's."""
    return code_of(error) in _REASONS


def map_error(error: BaseException, path: str) -> BaseException:
    """What the caller gets for an error met while working on the file: `PersistenceError` for SQLite's and the system's.

    `ValueNotStorable` for a value that is too long.
    """
    if isinstance(error, PersistenceError):
        return PersistenceError(*error.args)  # one for each caller, as each adds its own traceback
    if code_of(error) == sqlite3.SQLITE_TOOBIG:
        refusal = ValueNotStorable("value", f"{_REASONS[sqlite3.SQLITE_TOOBIG]} ({error})")
        refusal.__cause__ = error
        return refusal
    if not isinstance(error, sqlite3.Error | OSError):
        return error
    reason = _REASONS.get(code_of(error))
    result = PersistenceError(f"SQLite store {path!r}", f"{reason} ({error})" if reason else str(error))
    result.__cause__ = error
    return result


class DatabaseFile:
    """One database file of this process, and the promise that it stays the same file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.full = False
        """synchronous=FULL; set once any store of this file asks for it."""
        self.may_create = False
        self.busy_timeout = BUSY_TIMEOUT
        self.lost_in_fork = False
        self._identity: _Identity | None = None
        # The log and its index, `-wal` and `-shm`, of each open connection, by its owner. While a connection is open, SQLite
        # removes neither, whatever other processes do.
        self._logs: dict[object, _Logs] = {}

    def check(self, owner: object = None) -> None:
        """Raise `PersistenceError` when the files that were opened are not those at the path.

        With the owner of a connection, the log that it has is looked at too.
        """
        if self._identity is not None and self._identity != self._stat():
            raise self._error(
                "the file was deleted or replaced while it was open; put it back, or close the store and open it again"
            )
        if owner is not None and self._logs[owner] != self._stat_logs():
            raise self._log_error()

    def _check_logs(self) -> _Logs:
        """The log and its index, if they are those of all open connections."""
        logs = self._stat_logs()
        if any(opened != logs for opened in list(self._logs.values())):  # a copy: other threads open connections too
            raise self._log_error()
        return logs

    def _log_error(self) -> PersistenceError:
        name = os.path.basename(self.path)
        return self._error(
            f"{name}-wal or {name}-shm was deleted or replaced while the database was open. This call wrote nothing, and its run "
            "is tried again. End every program that has the database open, but not with SIGKILL: the last one to close it saves "
            "what only the deleted log has. Then start them again"
        )

    def forget(self, owner: object) -> None:
        """Note that this owner is about to close its connection: the last one to be closed removes the log."""
        self._logs.pop(owner, None)

    def connect(self, owner: object, *, read_only: bool = False, of_any_thread: bool = False) -> sqlite3.Connection:
        """A connection of the calling thread, or of any: WAL in force, committing to disk as asked for. Each owner has one."""
        if self.lost_in_fork:
            raise self._error("this process was forked while a transaction was open; use start method 'spawn', or fork earlier")
        self.check()
        self._check_logs()
        if self._identity is None:
            self._create_if_missing()
        identity = self._stat()
        connection = sqlite3.connect(
            self.path,
            timeout=self.busy_timeout,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=not of_any_thread,
        )
        try:
            self._configure(connection)
            if read_only:
                connection.execute("PRAGMA query_only = ON")
            if self._stat() != identity:
                raise self._error("the file was replaced while it was being opened")
            logs = self._check_logs()
        except BaseException:
            connection.close()
            raise
        self._identity = identity
        self._logs[owner] = logs
        return connection

    def _configure(self, connection: sqlite3.Connection) -> None:
        mode = _use_wal(connection)
        if mode != "wal":
            raise self._error(f"write-ahead logging is not available here (journal mode is {mode!r}); use a file on a local disk")
        connection.execute(f"PRAGMA synchronous = {'FULL' if self.full else 'NORMAL'}")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone does not reach the disk
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_SIZE_LIMIT}")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA data_version").fetchall()  # opens the log, also that of a new file
        (encoding,) = connection.execute("PRAGMA encoding").fetchall()[0]
        if encoding != "UTF-8":
            raise self._error(f"the database's encoding is {encoding}, in which ids do not sort by their bytes; use a UTF-8 one")

    def _create_if_missing(self) -> None:
        if os.path.exists(self.path):
            return
        if not self.may_create:
            raise self._error("there is no such file; check the path, or make the store with `await store.setup()`")
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            return
        except FileNotFoundError:
            raise self._error(f"the directory {os.path.dirname(self.path)!r} does not exist; create it first") from None

    def _stat(self, suffix: str = "") -> _Identity | None:
        try:
            status = os.stat(self.path + suffix)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _stat_logs(self) -> _Logs:
        return self._stat("-wal"), self._stat("-shm")

    def _error(self, reason: str) -> PersistenceError:
        return PersistenceError(f"SQLite store {self.path!r}", reason)


def _use_wal(connection: sqlite3.Connection) -> str:
    """Switch to WAL and give the mode now in force. SQLite does not wait where the switch needs the file alone, so this does."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0])
        except sqlite3.OperationalError as busy:
            if code_of(busy) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)
