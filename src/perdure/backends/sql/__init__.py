"""The whole contract in portable SQL, for every database that can be reached by a statement and its values."""

from __future__ import annotations

from perdure.backends.sql.dialect import MYSQL, POSTGRES, SQLITE, Dialect, Statement, Tables
from perdure.backends.sql.rows import BYTES, TEXT, Values
from perdure.backends.sql.session import Channel, Result, Session, SqlConnections
from perdure.backends.sql.store import SqlStore

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
