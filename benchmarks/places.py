"""Where contenders keep their data: a fresh database for every sample, all on one disk and one server.

A database is prepared once for each contender, with its tables and, where that is asked, many finished runs. Every sample gets a
copy, so that what it measures does not depend on what was measured before.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from benchmarks.contenders import CONTENDERS, Contender
from tests.servers.postgres import PostgresServer

# Durable as PostgreSQL is by default. Only its checkpoints are ours, between rounds: one that fell into a sample would be counted
# in its time, and make it write whole pages for the first change to each.
SETTINGS: Final = ("synchronous_commit=on", "full_page_writes=on", "checkpoint_timeout=1d", "max_wal_size=16GB")
# Makes the tables at a place by working there a little.
Prepare = Callable[[str, str], Awaitable[None]]
_RUN_TABLES: Final = {"perdure_runs": "id", "perdure_steps": "run_id"}


class Places:
    """Gives out places. The server is started when the first contender needs it."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._directory = Path(tempfile.mkdtemp(prefix="perdure-benchmarks-"))
        self._server: PostgresServer | None = None
        self._prepared: dict[tuple[str, int], str] = {}
        self._names = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.remove()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def fresh(self, name: str, stored: int = 0) -> str:
        """A new place for this contender, with so many finished runs in it."""
        contender = CONTENDERS[name]
        if contender.kind == "nowhere":
            return ""
        if (name, stored) not in self._prepared:
            self._prepared[name, stored] = await self._prepared_place(name, contender, stored)
        prepared = self._prepared[name, stored]
        if contender.kind == "sqlite":
            return self._copied_file(prepared)
        place = await self._new_database(urlsplit(prepared).path[1:])
        if stored:
            # The copy of a large database would still be on its way to the disk while the sample is taken.
            await self.checkpoint()
        return place

    async def forget(self, place: str) -> None:
        """Remove a place whose sample was taken."""
        if place.startswith("postgresql:"):
            await self._execute(f'DROP DATABASE "{urlsplit(place).path[1:]}" WITH (FORCE)')
        elif place:
            remove_sqlite(place)

    async def checkpoint(self) -> None:
        """Let the server write what it put off, while nothing is measured."""
        if self._server is not None:
            await self._execute("CHECKPOINT")

    async def _prepared_place(self, name: str, contender: Contender, stored: int) -> str:
        if contender.kind == "sqlite":
            place = str(self._directory / self._new_name())
            await self._prepare(name, place)
            if stored:
                fill_sqlite(place, stored)
            empty_log(place)
            return place
        if self._server is None:
            self._server = PostgresServer(*SETTINGS, own=True)
            self._server.start()
        place = await self._new_database("template1")
        await self._prepare(name, place)
        if stored:
            await fill_postgres(place, stored)
        return place

    def _new_name(self) -> str:
        self._names += 1
        return f"place{self._names}"

    def _copied_file(self, prepared: str) -> str:
        """Written through to the disk, which the sample would otherwise have to wait for."""
        place = str(self._directory / self._new_name())
        shutil.copy(prepared, place)
        with Path(place).open("rb") as file:
            os.fsync(file.fileno())
        return place

    async def _new_database(self, template: str) -> str:
        name = self._new_name()
        await self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{name}"))

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    @property
    def _dsn(self) -> str:
        if self._server is None:
            raise RuntimeError("the PostgreSQL server was not started")
        return self._server.dsn


def remove_sqlite(path: str) -> None:
    """Delete a database and its log."""
    for suffix in ("", "-wal", "-shm"):
        Path(path + suffix).unlink(missing_ok=True)


def empty_log(path: str) -> None:
    """Bring everything into the file itself, so that a copy of it is whole."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def fill_sqlite(path: str, count: int) -> None:
    """Copy the finished run that is there so many times, with other ids."""
    connection = sqlite3.connect(path)
    ((run,),) = connection.execute("SELECT id FROM perdure_runs").fetchall()
    for table, column in _RUN_TABLES.items():
        names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        connection.execute(
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)"
            f" INSERT INTO {table} SELECT {_columns(names, column)} FROM {table}, numbers WHERE {column} = ?",
            (count, run),
        )
    connection.commit()
    connection.close()


async def fill_postgres(dsn: str, count: int) -> None:
    """Copy the finished run that is there so many times, with other ids."""
    connection = await asyncpg.connect(dsn)
    (run,) = await connection.fetchrow("SELECT id FROM perdure_runs")
    for table, column in _RUN_TABLES.items():
        rows = await connection.fetch(
            "SELECT column_name FROM information_schema.columns WHERE table_name = $1 ORDER BY ordinal_position", table
        )
        names = [row["column_name"] for row in rows]
        await connection.execute(
            f"INSERT INTO {table} SELECT {_columns(names, column)} FROM {table}, generate_series(1, $1) AS n WHERE {column} = $2",
            count,
            run,
        )
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


def _columns(names: list[str], identifier: str) -> str:
    """Every column as it is, but the id with a number behind it."""
    return ", ".join(f"{name} || '-' || n" if name == identifier else f'"{name}"' for name in names)
