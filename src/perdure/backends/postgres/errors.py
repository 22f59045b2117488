"""What errors of the driver and the server mean: the one place where they become errors of perdure, or another attempt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from perdure.backends.base.retries import WriteFailure, wrap_error
from perdure.errors import PerdureError


def driver() -> Any:
    """asyncpg, imported by the first use. Raises `ImportError` that says what to install."""
    try:
        import asyncpg  # type: ignore[import-untyped]  # it ships no types
    except ImportError as missing:
        raise ImportError("the PostgreSQL store needs asyncpg: pip install 'perdure[postgres]'") from missing
    return asyncpg


UNIQUE_VIOLATION: Final = "23505"
_UNDONE: Final = frozenset(
    {
        UNIQUE_VIOLATION,  # unique violation: another transaction wrote the same at this moment, and can be seen now
        "25006",  # read only: a standby, or a primary that has just become one
        "40001",  # serialization failure
        "40P01",  # deadlock
        "53300",  # too many connections
        "55P03",  # lock not available
        "57P03",  # the server is starting up or shutting down
    }
)
_UNKNOWN: Final = frozenset({
    "08000", "08003", "08006", "08001", "08004", "08007",
    "57P01",  # an administrator stopped the server or the session
    "57P02",  # another backend crashed
    "57P05",
})  # fmt: skip


def classify_failure(error: BaseException) -> WriteFailure:
    """What to make of an error that a statement met."""
    code = getattr(error, "sqlstate", None)
    if code in _UNDONE:
        return WriteFailure.RETRY
    if code in _UNKNOWN or isinstance(error, OSError | driver().InternalClientError):
        return WriteFailure.UNKNOWN
    is_closed = isinstance(error, driver().InterfaceError) and "clos" in str(error)
    return WriteFailure.UNKNOWN if is_closed else WriteFailure.PERMANENT


def is_stale(error: BaseException) -> bool:
    """Whether the connection, good as it seems, should not be used again.

    It leads to a server that takes no writes, the driver has lost track of it as the server closed it while it was idle, or it
    gave no reply: then asyncpg would wait for the end of the statement, which it has asked the server to cancel.
    """
    return getattr(error, "sqlstate", None) == "25006" or isinstance(error, driver().InternalClientError | TimeoutError)


def map_error(error: BaseException, label: str, secrets: Collection[str] = ()) -> BaseException:
    """What the caller gets: `PersistenceError` for what the driver, the server and the system say, without the password."""
    if isinstance(error, PerdureError):
        return error
    asyncpg = driver()
    if not isinstance(
        error, asyncpg.PostgresError | asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | TimeoutError
    ):
        return error
    return wrap_error(error, label, f"{type(error).__name__}: {error}", secrets)
