"""The driver, redis-py: how it is imported, how a client is made, and what its errors mean here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from perdure.backends.base.address import HIDDEN
from perdure.backends.base.retries import WriteFailure, wrap_error
from perdure.backends.redis.address import URL_FORMS

# A server that does not answer within this many seconds counts as lost.
REPLY_WITHIN: Final = 10.0
_CONNECTS_WITHIN: Final = 5.0
# Errors by which a server says that it did not run the script, and that it may run it later.
_PASSING: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")
# redis-py leaves the first word out of some messages and makes it a class instead.
_PASSING_CLASSES: Final = frozenset({"ReadOnlyError", "BusyLoadingError", "TryAgainError"})
_REFUSALS: Final = frozenset({"AuthenticationError", "AuthorizationError", "AuthenticationWrongNumberOfArgsError"})


def driver() -> Any:
    """The module `redis.asyncio`. Raises `ImportError` that says what to install."""
    try:
        import redis.asyncio
    except ImportError as missing:
        raise ImportError("the Redis store needs the driver redis-py 6 or later: pip install 'perdure[redis]'") from missing
    return redis.asyncio


def open_client(url: str, *, cluster: bool) -> Any:
    """A client of our own. It repeats nothing by itself: only `ServerConnections` knows what may be repeated."""
    redis_asyncio = driver()
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    make = (redis_asyncio.RedisCluster if cluster else redis_asyncio.Redis).from_url
    try:
        return make(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=REPLY_WITHIN,
            socket_connect_timeout=_CONNECTS_WITHIN,
            health_check_interval=0,  # a PING finds out no more than the script that would follow it
            **_without_name(),
        )
    except (ValueError, TypeError):
        raise ValueError(f"redis-py cannot read this URL; write {URL_FORMS} {HIDDEN}") from None


def _without_name() -> dict[str, None]:
    """Keeps redis-py from sending its version, which it reads from the disk for every connection."""
    try:
        import redis.driver_info  # noqa: F401 - since redis-py 7
    except ImportError:
        return {"lib_name": None, "lib_version": None}
    return {"driver_info": None}


def is_unknown_script(reply: object) -> bool:
    """Whether the server does not know the script, and so has not run it."""
    from redis.exceptions import NoScriptError

    return isinstance(reply, NoScriptError)


def classify_failure(error: BaseException) -> WriteFailure:
    """What became of a command that met this error."""
    from redis.exceptions import ConnectionError as Disconnected
    from redis.exceptions import RedisError
    from redis.exceptions import TimeoutError as TimedOut

    if isinstance(error, RedisError) and (type(error).__name__ in _PASSING_CLASSES or str(error).startswith(_PASSING)):
        return WriteFailure.RETRY
    if isinstance(error, Disconnected | TimedOut | OSError) and type(error).__name__ not in _REFUSALS:
        return WriteFailure.UNKNOWN
    return WriteFailure.PERMANENT


def is_silence(error: BaseException) -> bool:
    """Whether no reply came in time."""
    from redis.exceptions import TimeoutError as TimedOut

    return isinstance(error, TimedOut | TimeoutError)


def map_error(error: BaseException, label: str, secrets: Collection[str] = ()) -> BaseException:
    """The error that a caller gets: the driver's own become `PersistenceError`."""
    from redis.exceptions import RedisError

    if not isinstance(error, RedisError | OSError):
        return error
    return wrap_error(error, label, str(error) or type(error).__name__, secrets)
