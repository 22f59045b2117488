"""The contract on a libSQL server (sqld, Turso), over HTTP with a client of our own."""

from __future__ import annotations

from perdure.stores.libsql_store.opening import opened
from perdure.stores.libsql_store.store import LibsqlStore

__all__ = ["LibsqlStore", "opened"]
