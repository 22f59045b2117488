"""Which store a libSQL URL means: one on a server, or one in a local file."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from perdure.stores.libsql_store.place import is_remote
from perdure.stores.libsql_store.store import LibsqlStore
from perdure.stores.sqlite_store import SQLiteStore


def opened(
    url: str | os.PathLike[str],
    auth_token: str | None = None,
    *,
    tls: bool | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> LibsqlStore | SQLiteStore:
    """The store on the server, or in the file: `file:./x.db` or a path, which is an SQLite file like any other."""
    place = os.fspath(url)
    if is_remote(place):
        return LibsqlStore(place, auth_token=auth_token, tls=tls, table=table, prefix=prefix, auto_migrate=auto_migrate)
    if auth_token or tls is not None:
        raise ValueError("auth_token and tls are for a server, and this is the path of a file; leave them out")
    return SQLiteStore(_path(place), table=table, prefix=prefix, auto_migrate=auto_migrate)


def _path(url: str) -> str:
    if not url.startswith("file:"):
        return url
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment or not parts.path:
        raise ValueError(f"{url!r} must be file:relative.db, file:./relative.db or file:///absolute.db, without options")
    return unquote(parts.path)
