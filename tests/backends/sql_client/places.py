"""Empty databases of each kind, and clients for them."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from perdure.backends.sql.dialect import dialect_named
from perdure.backends.sql_client.store import SqlClientStore
from tests.backends.sql_client.clients import MysqlClient, PostgresClient, SqliteClient
from tests.servers import mysql, postgres

CLIENTS: Final[dict[str, Any]] = {"sqlite": SqliteClient, "postgres": PostgresClient, "mysql": MysqlClient}


@dataclass
class Place:
    """A database, by its dialect and address. `close` closes the clients and stores that were made here."""

    dialect: str
    where: str
    opened: list[Any] = field(default_factory=list)

    def client(self, **options: Any) -> Any:
        client = CLIENTS[self.dialect](self.where, **options)
        self.opened.append(client)
        return client

    def store(self, client: Any = None, **options: Any) -> SqlClientStore:
        store = SqlClientStore(self.client() if client is None else client, dialect_named(self.dialect), **options)
        self.opened.insert(0, store)
        return store

    async def close(self) -> None:
        for one in self.opened:
            await one.close()


@asynccontextmanager
async def place(dialect: str) -> AsyncIterator[Place]:
    """An empty database, removed when the context is left."""
    name = f"test_{secrets.token_hex(6)}"
    where, server = await asyncio.to_thread(_place, dialect, name)  # it may start a server
    if dialect == "sqlite":
        await asyncio.to_thread(Path(where).parent.mkdir)
    else:
        await _run(dialect, server, f"CREATE {'SCHEMA' if dialect == 'postgres' else 'DATABASE'} {name}")
    here = Place(dialect, where)
    try:
        yield here
    finally:
        await here.close()
        if dialect == "sqlite":
            await asyncio.to_thread(shutil.rmtree, Path(where).parent)
        else:
            await _run(dialect, server, f"DROP SCHEMA {name} CASCADE" if dialect == "postgres" else f"DROP DATABASE {name}")


def _place(dialect: str, name: str) -> tuple[str, str]:
    if dialect == "postgres":
        server = postgres.shared_server().dsn
        return postgres.with_search_path(server, name), server
    if dialect == "mysql":
        server = mysql.shared_server().dsn
        return mysql.with_database(server, name), server
    return str(Path(tempfile.gettempdir()) / name / "runs.db"), ""


async def _run(dialect: str, server: str, sql: str) -> None:
    client = CLIENTS[dialect](server)
    try:
        await client.query(sql, ())
    finally:
        await client.close()
