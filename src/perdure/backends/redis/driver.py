"""The driver, redis-py: how it is found, how a client is made, and what its errors mean here.

No text of a URL reaches an error or a repr, except host, port and database.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from perdure.errors import PersistenceError

_SCHEMES: Final = ("redis", "rediss", "unix")
_FORMS: Final = "redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/socket"
# A server that does not answer for so long counts as gone.
_ANSWERS_WITHIN: Final = 10.0
_CONNECTS_WITHIN: Final = 5.0
_HEALTH_CHECK_EVERY: Final = 30
# Errors by which a server says that it did not run the script, and that asking again may help.
_PASSING: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")


class RedisAddress(NamedTuple):
    """Which database a client talks to, without credentials."""

    host: str
    port: str
    db: str

    def __str__(self) -> str:
        return f"Redis store {self.host}:{self.port}/{self.db}" if self.port else f"Redis store {self.host}/{self.db}"


def driver() -> Any:
    """The module `redis.asyncio`. Raises `ImportError` that says what to install."""
    try:
        import redis.asyncio
    except ImportError as missing:
        raise ImportError("the Redis store needs the driver redis-py 6 or later: pip install perdure[redis]") from missing
    return redis.asyncio


def parse_address(url: str) -> RedisAddress:
    """Where the URL leads. Raises `ValueError`, without the URL's text, when nobody can tell."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise ValueError(
            f"this is no URL of a Redis server; write {_FORMS} (its text is not shown: it may hold a password)"
        ) from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"a Redis URL reads {_FORMS}, not {parts.scheme + ':' if parts.scheme.isalnum() else 'this'}")
    db = parse_qs(parts.query).get("db", ["0"])[0]
    if parts.scheme == "unix":
        return RedisAddress(unquote(parts.path), "", db)
    return RedisAddress(parts.hostname or "localhost", str(port), parts.path.strip("/") or db)


def address_of_client(client: Any) -> RedisAddress:
    """Where a borrowed client leads. Raises `ValueError` when it would give text instead of bytes."""
    kwargs = getattr(getattr(client, "connection_pool", None), "connection_kwargs", None)
    if kwargs is None:  # a cluster's client has no single pool
        node = getattr(client, "get_default_node", lambda: None)()
        if node is not None and getattr(node, "host", None):
            return RedisAddress(str(node.host), str(node.port), "0")
        return RedisAddress(f"client {id(client)}", "", "0")
    if kwargs.get("decode_responses"):
        raise ValueError("client= was made with decode_responses=True, but runs are bytes; make it without")
    if "path" in kwargs:
        return RedisAddress(str(kwargs["path"]), "", str(kwargs.get("db") or 0))
    return RedisAddress(str(kwargs.get("host", "localhost")), str(kwargs.get("port", 6379)), str(kwargs.get("db") or 0))


def open_client(url: str, *, cluster: bool) -> Any:
    """A client of our own. It sends nothing twice by itself: what may be repeated is known to the lane alone."""
    redis_asyncio = driver()
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    make = (redis_asyncio.RedisCluster if cluster else redis_asyncio.Redis).from_url
    try:
        return make(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_ANSWERS_WITHIN,
            socket_connect_timeout=_CONNECTS_WITHIN,
            health_check_interval=_HEALTH_CHECK_EVERY,
            **_without_name(),
        )
    except (ValueError, TypeError):
        raise ValueError(
            f"redis-py cannot read this URL; write {_FORMS} (its text is not shown: it may hold a password)"
        ) from None


def _without_name() -> dict[str, None]:
    """Not to tell the server the driver's version: redis-py looks it up on the disk for every connection."""
    try:
        import redis.driver_info  # noqa: F401 - since redis-py 7
    except ImportError:
        return {"lib_name": None, "lib_version": None}
    return {"driver_info": None}


def is_unknown_script(error: BaseException) -> bool:
    """Whether the server does not know the script, and so has not run it."""
    from redis.exceptions import NoScriptError

    return isinstance(error, NoScriptError)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    from redis.exceptions import ConnectionError as Disconnected
    from redis.exceptions import RedisError
    from redis.exceptions import TimeoutError as TimedOut

    if isinstance(error, Disconnected | TimedOut | OSError):
        return not _is_refusal(error)
    # redis-py leaves the first word out of some messages and makes it a class instead.
    return isinstance(error, RedisError) and (
        str(error).startswith(_PASSING) or type(error).__name__ in {"ReadOnlyError", "BusyLoadingError", "TryAgainError"}
    )


def _is_refusal(error: BaseException) -> bool:
    return type(error).__name__ in {"AuthenticationError", "AuthorizationError", "AuthenticationWrongNumberOfArgsError"}


def map_error(error: BaseException, where: RedisAddress) -> BaseException:
    """The error as a caller shall see it: the driver's own become `PersistenceError`."""
    from redis.exceptions import RedisError

    if not isinstance(error, RedisError | OSError):
        return error
    told = PersistenceError(str(where), str(error) or type(error).__name__)
    told.__cause__ = error
    return told
