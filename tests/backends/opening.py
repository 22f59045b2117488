"""Opens the store of a DSN, in any process.

Some stores have no DSN, since a program makes them from an object of its own. This suite gives them DSNs and makes the object:

    sql_client+postgresql://...     sql_client through a program's own client, in the dialect of the DSN that follows
    sql_client+mysql://...
    sql_client+sqlite:////path
    s3+http://host/bucket/folder    key_value on a folder of a bucket
    key_value+files:directory       key_value on the key-value store that the rest names

They take `prefix=` after a `?`, as all DSNs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from obstore.store import S3Store

from perdure import open_store
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.dsn import split_options
from perdure.backends.key_value import KeyValueRunStore
from perdure.kv import open_key_value_store
from perdure.store import FullStore
from tests.backends.sql_client.places import Place
from tests.servers import s3

_DIALECTS: Final = {"postgresql": "postgres", "mysql": "mysql", "sqlite": "sqlite"}


@asynccontextmanager
async def store_at(dsn: str) -> AsyncIterator[FullStore]:
    """The store of this DSN. It is closed when the context is left, with the client it was made from."""
    store, closed_by = await _make_store(dsn)
    try:
        yield store
    finally:
        await closed_by.close()


async def _make_store(dsn: str) -> tuple[FullStore, FullStore | Place]:
    """The store, and the object that closes it."""
    kind, _, rest = dsn.partition("+")
    url, options = split_options(rest, {"prefix"})
    if kind == "sql_client":
        database = _database(url)
        return database.store(**options), database
    if kind == "s3":
        store: FullStore = KeyValueRunStore(_folder(url), **options)
    elif kind == "key_value":
        store = KeyValueRunStore(await asyncio.to_thread(open_key_value_store, url), **options)
    else:
        store = await asyncio.to_thread(open_store, dsn)
    return store, store


def _database(url: str) -> Place:
    scheme, _, rest = url.partition(":")
    return Place(_DIALECTS[scheme], unquote(rest.removeprefix("///")) if scheme == "sqlite" else url)


def _folder(url: str) -> S3Store:
    where = urlsplit(url)
    bucket, _, folder = where.path.strip("/").partition("/")
    return S3Store(bucket, prefix=folder, **s3.options_for(f"{where.scheme}://{where.netloc}"))


def connections_of(store: Any) -> ServerConnections:
    """The connections of a store on a server. Tests shorten the patience of their class."""
    connections: ServerConnections = store._connections
    return connections
