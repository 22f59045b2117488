"""The whole contract in portable SQL, for every database that can be reached by a statement and its values."""

from __future__ import annotations

from perdure.stores.sql_store.dialect import MYSQL, POSTGRES, SQLITE, Dialect
from perdure.stores.sql_store.home import SqlHome
from perdure.stores.sql_store.schema import Tables
from perdure.stores.sql_store.session import Channel, Result, Session, Statement
from perdure.stores.sql_store.store import SqlStore
from perdure.stores.sql_store.values import BYTES, TEXT, Values

__all__ = [
    "BYTES",
    "MYSQL",
    "POSTGRES",
    "SQLITE",
    "TEXT",
    "Channel",
    "Dialect",
    "Result",
    "Session",
    "SqlHome",
    "SqlStore",
    "Statement",
    "Tables",
    "Values",
]
