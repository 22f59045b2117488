"""Where a store is: what is no place for it is refused at once, with what to pass instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from perdure import open_store, stores
from perdure.kv import FilesKeyValueStore, SQLiteKeyValueStore, open_key_value_store
from perdure.kv.mongo import MongoKeyValueStore
from perdure.kv.postgres import PostgresKeyValueStore
from perdure.kv.redis import RedisKeyValueStore

_POSTGRES: Final = "postgresql://user:password@host:port/database"
_MYSQL: Final = "mysql://user:password@host:port/database"
_MONGO: Final = "mongodb://user:password@host/database"
_REDIS: Final = "redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/socket"

# What each takes, as its error has it. Of a server None is no URL, and not a wrong one.
TAKES: Final[dict[Callable[..., Any], tuple[str, str]]] = {
    stores.sqlite: ('an SQLite store takes the path of a file, such as "app.db", not {}',) * 2,
    SQLiteKeyValueStore: ('an SQLite key-value store takes the path of a file, such as "app.db", not {}',) * 2,
    FilesKeyValueStore: ('a key-value store in files takes the path of a directory, such as "values", not {}',) * 2,
    stores.libsql: ('a libSQL store takes "libsql://host", or the path of a file as "file:app.db", not {}',) * 2,
    stores.postgres: (f"a PostgreSQL DSN is text that reads {_POSTGRES}, not {{}}", f"{_POSTGRES}, or a pool of yours as pool="),
    PostgresKeyValueStore: (
        f"a PostgreSQL DSN is text that reads {_POSTGRES}, not {{}}",
        f"{_POSTGRES}, or a pool of yours as pool=",
    ),
    stores.mysql: (f"a MySQL DSN is text that reads {_MYSQL}, not {{}}", f"{_MYSQL}, or a pool of yours as pool="),
    stores.mongo: (f"not {{}}; pass a client as client=, or {_MONGO}", f"a URL that reads {_MONGO}, or client="),
    MongoKeyValueStore: (f"not {{}}; pass a client as client=, or {_MONGO}", f"a URL that reads {_MONGO}, or client="),
    stores.redis: (f"not {{}}; pass a client as client=, or {_REDIS}", f"or client=; a URL reads {_REDIS}"),
    RedisKeyValueStore: (f"not {{}}; pass a client as client=, or {_REDIS}", f"or client=; a URL reads {_REDIS}"),
    stores.key_value: ("a {} is no key-value store: it needs get, set and delete",) * 2,
    open_store: ("a DSN is a str like sqlite:///relative.db",) * 2,
    open_key_value_store: ("a DSN is a str like memory:, files:directory",) * 2,
}
WRONG: Final = {"None": None, "an int": 7, "a dict": {"host": "h", "password": "hunter2"}, "a bytes": b"app.db"}


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("make", TAKES, ids=lambda make: make.__name__)
def test_what_is_no_place_is_refused_with_what_to_pass(make: Callable[..., Any], given: str) -> None:
    expected = TAKES[make][given == "None"]
    kind = given if make is not stores.key_value else type(WRONG[given]).__name__
    with pytest.raises((TypeError, ValueError), match=re.escape(expected.format(kind))) as refusal:
        make(WRONG[given])
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "make", [stores.redis, RedisKeyValueStore, open_store, open_key_value_store], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        (
            "redis://h/0?max_connection=5",
            "option 1 of the Redis URL is none that the driver knows; did you mean 'max_connections'?",
        ),
        (
            "redis://h/0?foo=1",
            "option 1 of the Redis URL is none that the driver knows; see the driver's documentation for those it has (it",
        ),
        ("redis://h/0?ssl_ca_certs=ca.pem", "option 1 of the Redis URL is none that the driver knows"),
        ("rediss://h/0?ssl_ca_certs=ca.pem&max_connections=5&client_name=x&protocol=3", None),
        ("redis://h?db=3&socket_timeout=5&health_check_interval=7", None),
        ("unix:///tmp/socket?db=3&username=ada", None),
    ],
)
def test_an_option_that_redis_py_does_not_know_is_refused_at_once(
    make: Callable[..., Any], url: str, refusal: str | None
) -> None:
    _makes_or_refuses(make, url, refusal)


@pytest.mark.parametrize(
    "make", [stores.mongo, MongoKeyValueStore, open_store, open_key_value_store], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        (
            "mongodb://h/shop?replicaset=rs0&retryWrite=true",
            "option 2 of the MongoDB URL is none that the driver knows; did you mean 'retrywrites'?",
        ),
        ("mongodb://h/shop?foo=1", "option 1 of the MongoDB URL is none that the driver knows; see the driver's documentation"),
        ("mongodb://h/shop?replicaSet=rs0&ssl=true&tlsCAFile=ca.pem&w=majority&journal=true&wTimeoutMS=5&authSource=admin", None),
        ("mongodb+srv://h.example/shop?maxPoolSize=5&srvServiceName=x&retryWrites=true", None),
    ],
)
def test_an_option_that_pymongo_does_not_know_is_refused_at_once(make: Callable[..., Any], url: str, refusal: str | None) -> None:
    _makes_or_refuses(make, url, refusal)


def _makes_or_refuses(make: Callable[..., Any], url: str, refusal: str | None) -> None:
    if refusal is None:
        make(url)
        return
    with pytest.raises(ValueError, match=re.escape(refusal)):
        make(url)
