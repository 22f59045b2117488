"""Stores as a user might write them: over a dict, with a lease, and over an SQLite file that several processes share."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from perdure import Snapshot
from perdure.simple_stores import StoredRun

T = TypeVar("T")


class DictStore:
    """Four async methods over a dict of texts. Two on one dict are two processes, one after the other."""

    def __init__(self, rows: dict[str, dict[str, Any]] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.asked: list[str] = []

    async def save(self, run: StoredRun) -> None:
        await asyncio.sleep(0)
        assert isinstance(run.snapshot, Snapshot)
        snapshot = json.dumps(run.snapshot.to_dict())
        columns = {name: getattr(run, name) for name in ("workflow", "status", "wake_at", "event_name", "updated_at")}
        self.rows[run.run_id] = {**columns, "snapshot": snapshot}

    async def load(self, run_id: str) -> StoredRun | None:
        await asyncio.sleep(0)
        self.asked.append(run_id)
        return StoredRun(run_id=run_id, **self.rows[run_id]) if run_id in self.rows else None

    async def delete(self, run_id: str) -> None:
        self.rows.pop(run_id, None)

    async def due(self, now: datetime, limit: int) -> list[str]:
        timed = [(row["wake_at"], run_id) for run_id, row in self.rows.items() if row["wake_at"] is not None]
        return [run_id for wake_at, run_id in sorted(timed) if wake_at <= now][:limit]


class PlainStore:
    """The same without a single await, and with runs instead of ids from `due`."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}

    def save(self, run: StoredRun) -> None:
        self.runs[run.run_id] = run

    def load(self, run_id: str) -> StoredRun | None:
        return self.runs.get(run_id)

    def delete(self, run_id: str) -> None:
        self.runs.pop(run_id, None)

    def due(self, now: datetime, limit: int) -> list[StoredRun]:
        due = [(run.wake_at, run.run_id) for run in self.runs.values() if run.wake_at is not None and run.wake_at <= now]
        return [self.runs[run_id] for _, run_id in sorted(due)[:limit]]


class LeasedStore(DictStore):
    """A store with leases like those of SET NX: one that is held is refused, even to the token that holds it."""

    def __init__(self, rows: dict[str, dict[str, Any]] | None = None, leases: dict[str, str] | None = None) -> None:
        super().__init__(rows)
        self.leases = {} if leases is None else leases
        self.ttls: list[float] = []

    async def acquire(self, run_id: str, token: str, ttl: float) -> bool:
        await asyncio.sleep(0)
        self.ttls.append(ttl)
        if run_id in self.leases:
            return False
        self.leases[run_id] = token
        return True

    async def release(self, run_id: str, token: str) -> None:
        if self.leases.get(run_id) == token:
            del self.leases[run_id]


class RowLeasedStore(LeasedStore):
    """A store with leases in the row of the run: there is none before the run was saved."""

    async def acquire(self, run_id: str, token: str, ttl: float) -> bool:
        return run_id in self.rows and await super().acquire(run_id, token, ttl)


class SqliteOwnStore:
    """A user's table in SQLite, with leases, for any number of processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def save(self, run: StoredRun) -> None:
        assert isinstance(run.snapshot, Snapshot)
        wake_at = None if run.wake_at is None else run.wake_at.timestamp()
        row = (run.run_id, run.workflow, json.dumps(run.snapshot.to_dict()), run.status, wake_at)
        columns = (
            "workflow = excluded.workflow, snapshot = excluded.snapshot, status = excluded.status, wake_at = excluded.wake_at"
        )
        await self._do(
            "INSERT INTO runs (id, workflow, snapshot, status, wake_at) VALUES (?, ?, ?, ?, ?)"
            f" ON CONFLICT (id) DO UPDATE SET {columns}",
            row,
        )

    async def load(self, run_id: str) -> StoredRun | None:
        for workflow, snapshot, status in await self._do("SELECT workflow, snapshot, status FROM runs WHERE id = ?", (run_id,)):
            return StoredRun(run_id, workflow, snapshot, status, None, None, datetime.now(UTC))
        return None

    async def delete(self, run_id: str) -> None:
        await self._do("DELETE FROM runs WHERE id = ?", (run_id,))

    async def due(self, now: datetime, limit: int) -> list[str]:
        found = await self._do("SELECT id FROM runs WHERE wake_at <= ? ORDER BY wake_at, id LIMIT ?", (now.timestamp(), limit))
        return [run_id for (run_id,) in found]

    async def acquire(self, run_id: str, token: str, ttl: float) -> bool:
        now = datetime.now(UTC).timestamp()
        await self._do(
            "INSERT INTO leases (id, token, until) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE"
            " SET token = excluded.token, until = excluded.until WHERE until < ? OR token = excluded.token",
            (run_id, token, now + ttl, now),
        )
        return await self._do("SELECT 1 FROM leases WHERE id = ? AND token = ?", (run_id, token)) != []

    async def release(self, run_id: str, token: str) -> None:
        await self._do("DELETE FROM leases WHERE id = ? AND token = ?", (run_id, token))

    async def _do(self, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._with_database, lambda database: database.execute(sql, parameters).fetchall())

    def _with_database(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with closing(sqlite3.connect(self._path, timeout=30)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS runs (id PRIMARY KEY, workflow, snapshot, status, wake_at)")
            database.execute("CREATE TABLE IF NOT EXISTS leases (id PRIMARY KEY, token, until)")
            return work(database)
