"""The whole contract in portable SQL, for every database that can be reached by a statement and its values."""

from __future__ import annotations

from perdure.backends.sql.connections import SqlConnections
from perdure.backends.sql.dialect import MYSQL, POSTGRES, SQLITE, Dialect
from perdure.backends.sql.session import Channel, Result, Session, Statement
from perdure.backends.sql.store import SqlStore
from perdure.backends.sql.tables import Tables
from perdure.backends.sql.values import BYTES, TEXT, Values

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
    "SqlConnections",
    "SqlStore",
    "Statement",
    "Tables",
    "Values",
]
