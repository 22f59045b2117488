"""Which database a Redis URL or client names. No text of a URL reaches an error or a repr, except host, port and database."""

from __future__ import annotations

import inspect
from typing import Any, Final, NamedTuple

from perdure.backends.base.address import ServerUrl, check_options, kind_of, parse_server_url

URL_FORMS: Final = "redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/socket"
_SCHEMES: Final = ("redis", "rediss", "unix")
_DEFAULT_PORT: Final = 6379


class RedisAddress(NamedTuple):
    """Which database a client talks to, without credentials. A socket has no port."""

    host: str
    port: str
    db: str

    def __str__(self) -> str:
        return f"Redis store {self.host}:{self.port}/{self.db}" if self.port else f"Redis store {self.host}/{self.db}"


def parse_address(url: str) -> RedisAddress:
    """Where the URL leads. Raises `ValueError`, without the URL's text, when it cannot be read."""
    parts = _parse(url)
    db = parts.options.get("db") or "0"
    if parts.scheme == "unix":
        return RedisAddress(parts.path, "", db)
    return RedisAddress(parts.host or "localhost", str(parts.port or _DEFAULT_PORT), parts.path.strip("/") or db)


def secrets_in(url: str) -> tuple[str, ...]:
    """The texts in the URL that no message may show."""
    return _parse(url).secrets


def _parse(url: str) -> ServerUrl:
    return parse_server_url(url, "Redis", _SCHEMES, URL_FORMS, strict=False)


def check_source(url: object, client: object, *, cluster: bool) -> None:
    """Raise TypeError or ValueError, with what to pass instead, unless there is a sound URL or an asynchronous client."""
    if url is not None and not isinstance(url, str):
        raise TypeError(
            f"the first argument is the URL of a Redis server, not {kind_of(url)}; pass a client as client=, or {URL_FORMS}"
        )
    if url is not None and client is not None:
        raise ValueError("pass either the URL of a Redis server or client=, not both: a client has its server already")
    if url is None and client is None:
        raise ValueError(f"pass either the URL of a Redis server or client=; a URL reads {URL_FORMS}")
    import redis

    if isinstance(url, str):
        parts = _parse(url)
        check_options(parts.options, _known_options(parts.scheme, cluster=cluster), "Redis")
    if isinstance(client, redis.Redis | redis.RedisCluster):
        kind = type(client).__name__
        raise TypeError(f"redis.{kind} is synchronous; pass redis.asyncio.{kind}.from_url(url), or the URL itself")


def _known_options(scheme: str, *, cluster: bool) -> set[str]:
    """Return the options that redis-py takes: the arguments of the client of a cluster, or of the connection and its pool."""
    from redis.asyncio import RedisCluster, connection

    kinds = {"unix": connection.UnixDomainSocketConnection, "rediss": connection.SSLConnection}
    classes = (RedisCluster,) if cluster else (*kinds.get(scheme, connection.Connection).__mro__, connection.ConnectionPool)
    makers = [vars(each)["__init__"] for each in classes if "__init__" in vars(each)]
    names = {name for make in makers for name in inspect.signature(make).parameters}
    return names - {"self", "args", "kwargs", "connection_class", "connection_kwargs"}


def address_of_client(client: Any) -> RedisAddress:
    """Where a borrowed client leads. Raises `ValueError` when the client would give text instead of bytes."""
    # A cluster's client has no single pool, and the settings itself.
    pool = getattr(client, "connection_pool", None)
    kwargs = getattr(pool, "connection_kwargs", None)
    if (kwargs or getattr(client, "connection_kwargs", {})).get("decode_responses"):
        raise ValueError("client= was made with decode_responses=True, but runs are bytes; make it without")
    if kwargs is None:
        node = getattr(client, "get_default_node", lambda: None)()
        if node is not None and getattr(node, "host", None):
            return RedisAddress(str(node.host), str(node.port), "0")
        return RedisAddress(f"client {id(client)}", "", "0")
    if "path" in kwargs:
        return RedisAddress(str(kwargs["path"]), "", str(kwargs.get("db") or 0))
    return RedisAddress(str(kwargs.get("host", "localhost")), str(kwargs.get("port", 6379)), str(kwargs.get("db") or 0))
