from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.errors import LeaseHeld, LeaseLost, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Pulse, Signal
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, inbox, journal, pending_row
from tests.backends.disk_processes import STRACE, StartChild, integrity, kill_unreaped
from tests.backends.sqlite.test_commits import _FailingCommit, commits
from tests.campaign import times
from tests.patience import PATIENCE


async def _state(store: SQLiteStore, run_id: str) -> tuple[Any, ...]:
    return (await store.get(run_id), await store.journal(run_id), await store.inbox(run_id), await store.items(run_id, "log"))


# Both commits together make some 139 writes; a short campaign tries some all the way through.
@pytest.mark.parametrize("when", range(3, 143, 140 // times(140)))
def test_a_process_killed_at_any_write_leaves_the_whole_run_or_none(
    path: Path, dsn: str, start_child: StartChild, when: int
) -> None:
    async def prepare() -> None:
        store = SQLiteStore(path)
        await store.restore(pending_row("replaced", input=b"old"), journal("old"), inbox("old"))
        await store.close()

    async def look() -> None:
        store = SQLiteStore(path)
        row, entries, _, _ = await _state(store, "created")
        assert entries == (journal("created") if row is not None else [])
        row, entries, rows, _ = await _state(store, "replaced")
        name = row.input.decode()
        assert (entries, rows) == (journal(name), inbox(name))
        await store.close()

    asyncio.run(prepare())
    calls = "pwrite64,fdatasync,fsync"
    process = start_child(
        "create_and_restore", dsn, under=(*STRACE, f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={when}")
    )
    process.communicate("\n", timeout=60)
    asyncio.run(look())
    assert integrity(path) == "ok"


async def test_a_commit_that_failed_leaves_the_run_as_it_was(store: SQLiteStore) -> None:
    await store.restore(pending_row("replaced"), journal("old"), inbox("old"))
    before = await _state(store, "replaced")
    writer = store._database.writer
    assert writer._connection is not None
    failing: Any = _FailingCommit(writer._connection.connection)
    writer._connection.connection = failing
    with pytest.raises(PersistenceError):
        await store.restore(pending_row("replaced", input=b"new"), journal("new"), inbox("new"))
    assert await _state(store, "replaced") == before
    await store.restore(pending_row("replaced", input=b"new"), journal("new"), inbox("new"))
    assert (await _state(store, "replaced"))[1] == journal("new")


async def test_a_hundred_restores_at_once_share_commits(store: SQLiteStore) -> None:
    await store.setup()
    before = commits(store)
    await asyncio.gather(*(store.restore(pending_row(f"run-{n}"), journal("step")) for n in range(100)))
    assert 0 < commits(store) - before < 20
    assert await store.count() == 100


async def test_a_restore_that_is_refused_leaves_its_batch_one_commit(store: SQLiteStore) -> None:
    lease = await create_leased(store, "leased")
    await store.record(lease, [Entry(seq=1, key="step")])
    before = commits(store)

    async def recorded() -> Pulse:
        return await store.record(lease, [Entry(seq=2, key="next")])  # called in the same turn as the others, not before

    answers = await asyncio.gather(
        store.restore(pending_row("leased"), []),
        store.restore(pending_row("other"), journal("step")),
        recorded(),
        return_exceptions=True,
    )
    assert [type(answer).__name__ for answer in answers] == ["LeaseHeld", "NoneType", "Pulse"]
    assert commits(store) - before == 1
    assert [len(await store.journal(run_id)) for run_id in ("leased", "other")] == [2, 10]


async def test_what_cannot_be_written_takes_nothing_away(store: SQLiteStore) -> None:
    await store.restore(pending_row("run"), journal("old"), inbox("old"))
    before = await _state(store, "run")
    too_large = Entry(seq=11, key="step", attempt=2**64)  # SQLite cannot hold it, and no check sees it before
    with pytest.raises(OverflowError):
        await store.restore(pending_row("run", input=b"new"), [*journal("new"), too_large], inbox("new"))
    with pytest.raises(OverflowError):
        await store.create(new_run("new"), entries=[*journal("new"), too_large])
    assert await _state(store, "run") == before
    assert await store.get("new") is None


async def test_what_a_killed_process_held_can_be_restored_at_once(store: SQLiteStore, dsn: str, start_child: StartChild) -> None:
    process = await asyncio.to_thread(start_child, "hold", dsn, "run")
    with pytest.raises(LeaseHeld, match=f"process {process.pid} "):
        await store.restore(pending_row("run"), [])
    await kill_unreaped(process)
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await store.restore(pending_row("run"), [Entry(seq=1, key="step")])
            except LeaseHeld:  # that the process lives is believed for a moment
                await asyncio.sleep(0.01)
            else:
                break
    assert [claim.run.id for claim in (await store.claim(1, 60, [("flow", 1)])).claims] == ["run"]


async def test_a_restore_waits_for_an_open_transaction_and_ends_its_lease(store: SQLiteStore) -> None:
    claim = (await store.create(new_run("run"), ttl=0.001, now=1)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        restoring = asyncio.create_task(store.restore(pending_row("run"), [Entry(seq=5, key="restored")]))
        await asyncio.sleep(0)
        await transaction.record([Entry(seq=1, key="step")])
        assert not restoring.done()
    await restoring
    assert [entry.seq for entry in await store.journal("run")] == [5]
    with pytest.raises(LeaseLost):
        async with store.transaction(claim.lease):
            pass


async def test_what_restore_and_create_were_passed_may_be_changed_while_they_run(store: SQLiteStore) -> None:
    entries, rows = journal("step"), inbox("go")
    calls = [
        asyncio.create_task(store.restore(pending_row("restored"), entries, rows)),
        asyncio.ensure_future(store.create(new_run("created"), entries=entries)),
    ]
    await asyncio.sleep(0)
    entries.clear()
    rows.append(Signal(seq=9, name="late", payload=b""))
    await asyncio.gather(*calls)
    assert [len(await store.journal(run_id)) for run_id in ("restored", "created")] == [10, 10]
    assert len(await store.inbox("restored")) == 5


def test_nothing_is_left_of_a_run_that_was_replaced(store: SQLiteStore, path: Path) -> None:
    async def use() -> None:
        lease = await create_leased(store, "run")
        await store.signal("run", "go", b"1", dedupe="d")
        await store.record(lease, journal("old"), consume=[1])
        await store.finish(lease, "failed", b"1")
        await store.restore(pending_row("run"), [])
        await store.close()

    asyncio.run(use())
    database = sqlite3.connect(path)
    tables = ("runs", "steps", "signals", "items")
    counts = [database.execute(f"SELECT count(*) FROM perdure_{table}").fetchone()[0] for table in tables]
    database.close()
    assert counts == [1, 0, 0, 0]
