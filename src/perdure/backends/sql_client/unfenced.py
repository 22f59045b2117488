"""Whole runs through a client without transactions: the four methods of a `WorkflowStore`, one statement each.

Without transactions nothing can be fenced, so this is driven like any `WorkflowStore` of a user: in one process, unfenced. The
row with an empty id, which no run has, names the process that has the store open, and a second one is refused.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any, Final, cast

from perdure.backends.base.single_process import refuse_second_process
from perdure.backends.sql.dialect import Dialect, Tables
from perdure.backends.sql.rows import TEXT, Row
from perdure.backends.sql.session import Session
from perdure.backends.sql_client.connections import ClientChannel, Queries
from perdure.errors import PersistenceError
from perdure.model.durations import instant, moment
from perdure.model.ids import check_namespace
from perdure.model.records import Status
from perdure.simple_stores import StoredRun
from perdure.snapshots.snapshot import Snapshot

_CREATE: Final = {
    "sqlite": """
        CREATE TABLE IF NOT EXISTS $snapshots (
            namespace TEXT NOT NULL, run_id TEXT NOT NULL, workflow TEXT NOT NULL, status TEXT NOT NULL, wake_at INTEGER,
            event_name TEXT, updated_at INTEGER NOT NULL, snapshot TEXT NOT NULL, PRIMARY KEY (namespace, run_id)
        ) WITHOUT ROWID;
        CREATE INDEX IF NOT EXISTS $snapshots_due ON $snapshots (namespace, wake_at, run_id) WHERE wake_at IS NOT NULL
    """,
    "postgres": """
        CREATE TABLE IF NOT EXISTS $snapshots (
            namespace text COLLATE "C" NOT NULL, run_id text COLLATE "C" NOT NULL, workflow text COLLATE "C" NOT NULL,
            status text NOT NULL, wake_at bigint, event_name text COLLATE "C", updated_at bigint NOT NULL,
            snapshot text NOT NULL, PRIMARY KEY (namespace, run_id)
        );
        CREATE INDEX IF NOT EXISTS $snapshots_due ON $snapshots (namespace, wake_at, run_id) WHERE wake_at IS NOT NULL
    """,
    "mysql": """
        CREATE TABLE IF NOT EXISTS $snapshots (
            namespace VARBINARY(255) NOT NULL, run_id VARBINARY(1024) NOT NULL, workflow LONGBLOB NOT NULL,
            status VARBINARY(16) NOT NULL, wake_at BIGINT, event_name LONGBLOB, updated_at BIGINT NOT NULL,
            snapshot LONGBLOB NOT NULL, PRIMARY KEY (namespace, run_id),
            INDEX $snapshots_due (namespace, wake_at, run_id)
        ) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
    """,
}
_COLUMNS: Final = ("workflow", "status", "wake_at", "event_name", "updated_at", "snapshot")
_INSERT: Final = f"""
    INSERT INTO $snapshots (namespace, run_id, {", ".join(_COLUMNS)}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
"""
_OR_REPLACE: Final = {
    "mysql": "ON DUPLICATE KEY UPDATE " + ", ".join(f"{column} = VALUES({column})" for column in _COLUMNS),
    "sqlite": "ON CONFLICT (namespace, run_id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _COLUMNS),
}
_LOAD: Final = f"SELECT {', '.join(_COLUMNS)} FROM $snapshots WHERE namespace = ?1 AND run_id = ?2"
_OWNER_ID: Final = ""
_DELETE: Final = "DELETE FROM $snapshots WHERE namespace = ?1 AND run_id = ?2"
_DUE: Final = "SELECT run_id FROM $snapshots WHERE namespace = ?1 AND wake_at <= ?2 ORDER BY wake_at, run_id LIMIT ?3"


class SqlWorkflowStore:
    """A `WorkflowStore` over a client's `query`: for one process, and unfenced, since the client has no transactions."""

    def __init__(
        self, client: Queries, dialect: Dialect, *, table: str = "perdure", prefix: str = "", auto_migrate: bool = True
    ) -> None:
        self._tables = Tables(table, dialect, TEXT)
        self._label = f"sql_client ({dialect.label}, without transactions)"
        self._db = Session(ClientChannel(client, self._label), self._tables, check_namespace(prefix))
        self._auto_migrate = auto_migrate
        # The process that found the table and is its only user. A forked child is another.
        self._ready_in: int | None = None

    def __repr__(self) -> str:
        name, stem = self._tables.dialect.name, self._tables.stem
        return f"SqlWorkflowStore({name!r}, table={stem!r}, unfenced: its client has no transaction())"

    async def setup(self) -> None:
        """Create the table, also with `auto_migrate=False`."""
        for statement in _CREATE[self._tables.dialect.name].split(";\n"):
            await self._db.run(statement)
        await self._own()

    async def save(self, run: StoredRun) -> None:
        """Write the run, in place of one with the same id."""
        db = await self._open()
        wake_at = None if run.wake_at is None else instant(run.wake_at)
        columns = (
            run.run_id,
            run.workflow,
            run.status,
            wake_at,
            run.event_name,
            instant(run.updated_at),
            _snapshot_text(run.snapshot),
        )
        await db.run(self._insert_or_replace, *columns)

    async def load(self, run_id: str) -> StoredRun | None:
        """The run that was saved last under this id, or None."""
        row = await (await self._open()).one(_LOAD, run_id)
        return None if row is None else _stored_run(run_id, row)

    async def delete(self, run_id: str) -> None:
        """Delete the run."""
        await (await self._open()).run(_DELETE, run_id)

    async def due(self, now: datetime, limit: int) -> list[str]:
        """Ids whose `wake_at` is not after `now`, earliest first."""
        rows = await (await self._open()).all(_DUE, instant(now), max(limit, 0))
        return [TEXT.name_from(row[0]) for row in rows]

    @property
    def _insert_or_replace(self) -> str:
        return _INSERT + _OR_REPLACE.get(self._tables.dialect.name, _OR_REPLACE["sqlite"])

    async def _open(self) -> Session:
        if self._ready_in != os.getpid():
            await self._find_or_create_table()
        return self._db

    async def _own(self) -> None:
        """Enter this process as the user of the table. Raises `StoreCapabilityError` if another one of this machine is."""

        async def read() -> str:
            row = await self._db.one(_LOAD, _OWNER_ID)
            return "" if row is None else TEXT.name_from(row[0])

        async def write(owner: str) -> None:
            await self._db.run(self._insert_or_replace, _OWNER_ID, owner, "owner", None, None, 0, "")

        await refuse_second_process("sql_client", "transaction()", read, write)
        self._ready_in = os.getpid()

    async def _find_or_create_table(self) -> None:
        has_table = self._tables.statement(self._tables.dialect.has_table, f"{self._tables.stem}_snapshots")
        (result,) = await self._db.send([has_table])
        if int(result.rows[0][0]):
            await self._own()
        elif self._auto_migrate:
            await self.setup()
        else:
            raise PersistenceError(
                self._label,
                f"there is no {self._tables.stem}_snapshots table; "
                "check the database and table=, or make it with `await store.setup()`",
            )


def _snapshot_text(snapshot: Snapshot | dict[str, Any] | str | bytes) -> str:
    if isinstance(snapshot, str | bytes):
        return snapshot if isinstance(snapshot, str) else snapshot.decode()
    return json.dumps(snapshot.to_dict() if isinstance(snapshot, Snapshot) else snapshot)


def _stored_run(run_id: str, row: Row) -> StoredRun:
    workflow, status, wake_at, event_name, updated_at, snapshot = row
    return StoredRun(
        run_id=run_id,
        workflow=TEXT.name_from(workflow),
        snapshot=TEXT.name_from(snapshot),
        status=cast("Status", TEXT.name_from(status)),
        wake_at=None if wake_at is None else moment(int(wake_at)),
        event_name=None if event_name is None else TEXT.name_from(event_name),
        updated_at=moment(int(updated_at)),
    )
