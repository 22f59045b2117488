"""The contract on a libSQL server (sqld, Turso), over HTTP with a client of our own."""

from __future__ import annotations

from perdure.backends.libsql.address import is_remote
from perdure.backends.libsql.store import LibsqlStore

__all__ = ["LibsqlStore", "is_remote"]
