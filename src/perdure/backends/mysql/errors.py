"""What errors of the driver and the server mean: the one place where they become errors of perdure, or another attempt."""

from __future__ import annotations

from typing import Any, Final

from perdure.backends.base.failures import WriteFailure
from perdure.errors import PerdureError, PersistenceError


def driver() -> Any:
    """asyncmy, imported by the first use. Raises `ImportError` that says what to install."""
    try:
        import asyncmy
    except ImportError as missing:
        raise ImportError("the MySQL store needs asyncmy: pip install perdure[mysql]") from missing
    return asyncmy


DUPLICATE: Final = 1062
LOCKED: Final = 1205  # waited too long for a lock

_UNDONE: Final = frozenset({
    DUPLICATE,  # somebody wrote the same at this moment, and can be seen now
    1020,  # the row has changed since it was read
    1040, 1203,  # too many connections
    1047,  # a node of a cluster that is not ready
    LOCKED,
    1206,  # no room for more locks
    1213,  # deadlock
    1290, 1792, 1836,  # read only: a replica, or a primary that has just become one
    1412,  # the table was altered meanwhile
    2003,  # nobody listens there
})  # fmt: skip
_READ_ONLY: Final = frozenset({1290, 1792, 1836})
_UNKNOWN: Final = frozenset({
    0,  # the driver found its connection closed
    1053,  # the server was told to stop
    1158, 1159, 1160, 1161,  # the network failed while it read or wrote
    1317, 1927,  # an operator, or the server on its way down, killed the statement or the connection
    2006, 2013, 2014, 2055,  # the connection is gone
})  # fmt: skip


def code_of(error: BaseException) -> int | None:
    """The number of the server's or the driver's error, or None."""
    is_numbered = isinstance(error, driver().errors.MySQLError) and error.args and isinstance(error.args[0], int)
    return int(error.args[0]) if is_numbered else None


def classify_failure(error: BaseException) -> WriteFailure:
    """What to make of an error that a statement met."""
    code = code_of(error)
    if code in _UNDONE:
        return WriteFailure.RETRY
    # Without a number the driver has lost track of the connection.
    is_lost = isinstance(error, driver().errors.InternalError) and code is None
    return (
        WriteFailure.UNKNOWN
        if code in _UNKNOWN or is_lost or isinstance(error, OSError | TimeoutError)
        else WriteFailure.PERMANENT
    )


def is_stale(error: BaseException) -> bool:
    """Whether the connection should not be used again: its server takes no writes, or nobody knows what comes next on it."""
    return code_of(error) in _READ_ONLY or (
        not isinstance(error, PerdureError) and classify_failure(error) is WriteFailure.UNKNOWN
    )


def map_error(error: BaseException, label: str, secret: str = "") -> BaseException:
    """What the caller gets: `PersistenceError` for what the driver, the server and the system say, without the password."""
    if isinstance(error, PerdureError) or not isinstance(error, driver().errors.MySQLError | OSError | TimeoutError):
        return error
    said = f"{type(error).__name__}: {': '.join(str(part) for part in error.args)}"
    if secret and secret in said:
        return PersistenceError(label, said.replace(secret, "***"))
    result = PersistenceError(label, said)
    result.__cause__ = error
    return result
