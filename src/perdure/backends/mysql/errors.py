"""Errors of the driver and the server: which of them are retried, and which errors of perdure the others become."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from perdure.backends.base.retries import WriteFailure, is_untrusted, wrap_error
from perdure.errors import PerdureError


def driver() -> Any:
    """asyncmy, imported by the first use. Raises `ImportError` that says what to install."""
    try:
        import asyncmy
    except ImportError as missing:
        raise ImportError("the MySQL store needs asyncmy: pip install 'perdure[mysql]'") from missing
    return asyncmy


DUPLICATE: Final = 1062
LOCK_TIMEOUT: Final = 1205

_ROLLED_BACK: Final = frozenset({
    DUPLICATE,  # another transaction wrote the same at this moment, and is visible now
    1020,  # the row has changed since it was read
    1040, 1203,  # too many connections
    1047,  # a node of a cluster that is not ready
    LOCK_TIMEOUT,
    1206,  # the lock table is full
    1213,  # deadlock
    1290, 1792, 1836,  # read only: a replica, or a primary that has just become one
    1412,  # the table was altered meanwhile
    2003,  # nothing listens there
})  # fmt: skip
_READ_ONLY: Final = frozenset({1290, 1792, 1836})
_UNKNOWN: Final = frozenset({
    0,  # the driver found its connection closed
    1053,  # the server is shutting down
    1158, 1159, 1160, 1161,  # the network failed while it read or wrote
    1317, 1927,  # an operator, or the server on its way down, killed the statement or the connection
    2006, 2013, 2014, 2055,  # the connection was lost
})  # fmt: skip


def code_of(error: BaseException) -> int | None:
    """The number of the server's or the driver's error, or None."""
    is_numbered = isinstance(error, driver().errors.MySQLError) and error.args and isinstance(error.args[0], int)
    return int(error.args[0]) if is_numbered else None


def classify_failure(error: BaseException) -> WriteFailure:
    """What an error of a statement means for what was sent."""
    code = code_of(error)
    if code in _ROLLED_BACK:
        return WriteFailure.RETRY
    # Without a number: the driver has lost track of the connection.
    is_lost = isinstance(error, driver().errors.InternalError) and code is None
    return (
        WriteFailure.UNKNOWN
        if code in _UNKNOWN or is_lost or isinstance(error, OSError | TimeoutError)
        else WriteFailure.PERMANENT
    )


def is_stale(error: BaseException) -> bool:
    """Whether the connection must not be used again: its server is read only, or its next reply may belong to this statement."""
    return code_of(error) in _READ_ONLY or (
        not isinstance(error, PerdureError) and classify_failure(error) is WriteFailure.UNKNOWN
    )


def map_error(error: BaseException, label: str, secrets: Collection[str] = ()) -> BaseException:
    """The error that the caller gets: `PersistenceError` for errors of driver, server and system, without the password."""
    if isinstance(error, PerdureError) or not isinstance(error, driver().errors.MySQLError | OSError | TimeoutError):
        return error
    text = f"{type(error).__name__}: {': '.join(str(part) for part in error.args)}"
    if is_untrusted(error):
        text += "; pass the certificate of its authority as ssl_ca=, or ssl_mode=REQUIRED to encrypt without knowing who it is"
    return wrap_error(error, label, text, secrets)
