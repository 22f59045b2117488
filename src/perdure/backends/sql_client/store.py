"""SqlClientStore: the contract through any object that runs SQL, such as the database client that a program has already."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

from perdure.backends.sql.dialect import Dialect, Tables, dialect_named
from perdure.backends.sql.rows import TEXT
from perdure.backends.sql.store import SqlStore
from perdure.backends.sql_client.connections import ClientConnections, SqlClient
from perdure.backends.sql_client.unfenced import SqlWorkflowStore
from perdure.errors import PerdureWarning


class SqlClientStore(SqlStore[ClientConnections]):
    """A store through a caller's database client, which is not closed with it.

    A client may have a `key`, text that says which database it leads to: clients with equal keys make stores that are the same.
    """

    def __init__(
        self, client: SqlClient, dialect: Dialect, *, table: str = "perdure", prefix: str = "", auto_migrate: bool = True
    ) -> None:
        connections = ClientConnections(client, Tables(table, dialect, TEXT))
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def __repr__(self) -> str:
        tables = self._connections.tables
        return f"SqlClientStore({tables.dialect.name!r}, table={tables.stem!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store through a client cannot be pickled: make a client in the other process, and a store of that")

    @property
    def key(self) -> tuple[str, ...]:
        """The client's own `key`, or else the identity of the client; table stem and prefix."""
        connections, tables = self._connections, self._connections.tables
        database = str(getattr(connections.client, "key", id(connections.client)))
        return ("sql_client", tables.dialect.name, database, tables.stem, self._namespace)


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
        stacklevel=4,  # the caller of stores.sql_client
    )
    return SqlWorkflowStore(client, known, table=table, prefix=prefix, auto_migrate=auto_migrate)
