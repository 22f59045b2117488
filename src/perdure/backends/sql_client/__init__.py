"""Runs through a SQL client that the program has already: fenced if the client has transactions."""

from __future__ import annotations

import warnings
from typing import Any

from perdure.backends.sql.dialect import dialect_named
from perdure.backends.sql_client.store import SqlClientStore
from perdure.backends.sql_client.unfenced import SqlWorkflowStore
from perdure.errors import PerdureWarning

__all__ = ["SqlClientStore", "SqlWorkflowStore", "sql_client"]


def sql_client(
    client: Any, dialect: str, *, table: str = "perdure", prefix: str = "", auto_migrate: bool = True
) -> SqlClientStore | SqlWorkflowStore:
    """The whole contract through the client, or whole runs, unfenced and with a warning, when it has no `transaction()`."""
    if not callable(getattr(client, "query", None)):
        kind = type(client).__name__
        raise TypeError(f"sql_client takes an object with `async query(sql, params) -> (rows, rowcount)`, not a {kind}")
    known = dialect_named(dialect)
    if callable(getattr(client, "transaction", None)):
        return SqlClientStore(client, known, table=table, prefix=prefix, auto_migrate=auto_migrate)
    warnings.warn(
        f"a {type(client).__name__} has no transaction(), so its store is unfenced and for one process only; give it an async "
        "context manager transaction() that yields an object with query()",
        PerdureWarning,
        stacklevel=4,  # whoever called stores.sql_client
    )
    return SqlWorkflowStore(client, known, table=table, prefix=prefix, auto_migrate=auto_migrate)
