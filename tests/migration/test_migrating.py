"""`migrate_store`: what the target has then is what the source has, and nothing that only the target has is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import pytest
from hypothesis import given, settings

from perdure import Context, Runtime, Suspended, migrate_store, open_store, stores, workflow
from perdure.errors import PersistenceError
from perdure.migration import Migration, Skipped
from perdure.model.journal import Entry
from perdure.model.records import NewRun, QueueLimits, RunRow
from perdure.store import FullStore
from tests.backends.registry import BACKENDS
from tests.backends.user_defined.own_stores import DictStore
from tests.campaign import times
from tests.migration.worlds import LIMITS, PLACES, SCHEDULES, THEN, add_schedules_and_limits, everything, fill, runs

Change: TypeAlias = Callable[[FullStore], Awaitable[None]]
calls: list[int] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def charge(cents: int) -> int:
    calls.append(cents)
    return cents


@workflow
async def paying(ctx: Context, cents: int) -> list[Any]:
    paid = await ctx.step(charge, cents)
    answer = await ctx.wait_for_signal("go")
    return [paid, answer, await ctx.step("again", charge, cents), str(ctx.uuid4())]


async def test_progress_is_reported_after_each_batch() -> None:
    source, reports = stores.memory(), list[tuple[int, int | None]]()
    for number in range(5):
        await source.create(NewRun(id=f"r{number}", workflow="wf", input=b"[[],{}]", input_hash=b"1", seed=b"2"))
    await migrate_store(source, stores.memory(), batch=2, on_progress=lambda done, total: reports.append((done, total)))
    assert reports[:3] == [(2, 5), (4, 5), (5, 5)]
    assert set(reports[3:]) <= {(5, 5)}


@given(runs())
async def test_runs_of_every_sort_are_the_same_in_the_target(some: Any) -> None:
    source, target = stores.memory(), stores.memory()
    await fill(source, some)
    await add_schedules_and_limits(source)
    before = await everything(source, but=())
    assert await migrate_store(source, target, batch=2) == Migration(len(some), 0, ())
    assert await everything(target) == await everything(source)
    assert await everything(source, but=()) == before
    assert await migrate_store(source, target) == Migration(0, len(some), ())
    assert [info.id for info in await target.list()] == [info.id for info in await source.list()]


PAIRS = [(name, "sqlite") for name in PLACES] + [("sqlite", name) for name in PLACES if name != "sqlite"]


@pytest.mark.parametrize(("source_name", "target_name"), PAIRS)
@settings(max_examples=times(40))
@given(some=runs(min_size=3))
def test_every_store_can_be_left_and_moved_into(source_name: str, target_name: str, some: Any) -> None:
    with BACKENDS[source_name].place() as source, BACKENDS[target_name].place() as target:
        asyncio.run(_moved(source, target, some))


async def _moved(source_dsn: str, target_dsn: str, some: Any) -> None:
    async with opened(source_dsn) as source, opened(target_dsn) as target:
        await fill(source, some)
        await add_schedules_and_limits(source)
        assert await migrate_store(source, target, batch=2) == Migration(len(some), 0, ())
        assert await everything(target) == await everything(source)
        assert await migrate_store(source, target, batch=2) == Migration(0, len(some), ())
        for info in await source.list():
            old, new = await source.get(info.id), await target.get(info.id)
            assert old is not None
            assert new is not None
            assert new.epoch >= old.epoch


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[FullStore]:
    store = await asyncio.to_thread(open_store, dsn)  # finding the real path of a file looks at the disk
    try:
        yield store
    finally:
        await store.close()


async def test_a_run_goes_on_in_the_target_where_it_stood(tmp_path: Path) -> None:
    dsns = [f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db")]
    async with Runtime(dsns[0], [paying], concurrency=0, unload_grace=0) as runtime:
        assert isinstance(await runtime.run(paying, 5, id="p"), Suspended)
        await runtime.run(paying, 6, id="q")
        await runtime.signal("p", "go", "yes", dedupe="d")
        row = await runtime.store.get("p")
    assert await migrate_store(*dsns) == Migration(2, 0, ())
    async with Runtime(dsns[1], [paying], concurrency=0, unload_grace=0) as runtime:
        await runtime.signal("p", "go", "no", dedupe="d")
        (outcome,) = (await runtime.sweep()).values()
        assert outcome.unwrap()[:3] == [5, "yes", 5]
        moved = await runtime.store.get("p")
    assert row is not None
    assert moved is not None
    assert moved.epoch > row.epoch
    assert calls == [5, 6, 5]


async def test_a_run_that_a_worker_drives_is_reported_and_copied_when_it_is_free() -> None:
    source, target = stores.memory(), stores.memory()
    created = await source.create(_new("r"), ttl=60)
    assert created.claim is not None
    await source.record(created.claim.lease, [Entry(seq=1, key="one")])
    done = await migrate_store(source, target)
    ((kind, run_id, reason),) = done.skipped
    assert (kind, run_id, done.copied, done.is_complete) == ("run", "r", 0, False)
    assert reason.startswith("a worker drives it in the source, with a lease until 20")
    assert await target.get("r") is None
    await source.release(created.claim.lease)
    assert await migrate_store(source, target) == Migration(1, 0, ())
    assert [entry.key for entry in await target.journal("r")] == ["one"]


async def test_a_run_whose_worker_is_gone_is_pending_in_the_target() -> None:
    source, target = stores.memory(), stores.memory()
    created = await source.create(_new("r"), ttl=1, now=THEN)
    assert created.claim is not None
    await source.record(created.claim.lease, [Entry(seq=1, key="one")])
    assert (await migrate_store(source, target)).copied == 1
    row = await target.get("r")
    assert row is not None
    assert (row.status, row.attempts, row.lease_until, row.updated_at) == ("pending", 0, None, THEN)
    claim = await target.acquire("r", 30)
    assert claim is not None
    assert claim.lease.epoch > created.claim.lease.epoch
    assert len(claim.journal) == 1


async def test_a_run_that_changed_in_the_source_is_copied_again() -> None:
    source, target = stores.memory(), stores.memory()
    await source.create(_new("r"))
    await source.signal("r", "go", b"1", dedupe="d")
    assert (await migrate_store(source, target)).copied == 1
    await source.signal("r", "go", b"2")
    assert (await migrate_store(source, target)).copied == 1
    assert [row.payload for row in await target.inbox("r")] == [b"1", b"2"]
    claim = await source.acquire("r", 60)
    assert claim is not None
    consumed = Entry(seq=1, key="go", kind="signal", name="go", payload=b"1")
    await source.suspend(claim.lease, wake_at=THEN, entries=[consumed], consume=[1])
    assert (await migrate_store(source, target)).copied == 1
    assert await everything(target) == await everything(source)
    claim = await source.acquire("r", 60)
    assert claim is not None
    await source.finish(claim.lease, "failed", b"null")
    await migrate_store(source, target)
    await source.reopen("r", ["go"])
    assert (await migrate_store(source, target)).copied == 1
    assert await everything(target) == await everything(source)


async def _signalled(store: FullStore) -> None:
    await store.signal("r", "go", b"only here")


async def _driven(store: FullStore) -> None:
    claim = await store.acquire("r", 60)
    assert claim is not None
    await store.record(claim.lease, [Entry(seq=1, key="one")])
    await store.release(claim.lease)


async def _suspended(store: FullStore) -> None:
    claim = await store.acquire("r", 60)
    assert claim is not None
    await store.suspend(claim.lease, wake_at=None)


async def _finished(store: FullStore) -> None:
    claim = await store.acquire("r", 60)
    assert claim is not None
    await store.finish(claim.lease, "completed", b"null")


async def _claimed(store: FullStore) -> None:
    assert await store.acquire("r", 60) is not None


async def _cancelled(store: FullStore) -> None:
    await store.cancel("r")


async def _looked_at(store: FullStore) -> None:
    claim = await store.acquire("r", 60)
    assert claim is not None
    await store.release(claim.lease)


@pytest.mark.parametrize(
    ("in_target", "in_source"),
    [
        (_signalled, _signalled),
        (_signalled, _looked_at),
        (_driven, _signalled),
        (_driven, _looked_at),
        (_suspended, _signalled),
        (_finished, _signalled),
        (_finished, _looked_at),
        (_claimed, _signalled),
        (_claimed, _looked_at),
        (_cancelled, _signalled),
        (_cancelled, _looked_at),
    ],
)
async def test_what_only_the_target_has_is_never_overwritten(in_target: Change, in_source: Change) -> None:
    source, target = stores.memory(), stores.memory()
    await source.create(_new("r"))
    await source.signal("r", "go", b"1")
    await migrate_store(source, target)
    await in_target(target)
    if in_source is _signalled:
        await source.signal("r", "go", b"only there")
    else:
        await in_source(source)
    kept = await everything(target, but=())
    done = await migrate_store(source, target)
    assert [(one.kind, one.id) for one in done.skipped] == [("run", "r")]
    assert "in the target" in done.skipped[0].reason
    assert await everything(target, but=()) == kept


async def test_another_run_under_the_same_id_is_left_alone() -> None:
    source, target = stores.memory(), stores.memory()
    await source.create(_new("r"))
    await target.create(_new("r"))
    kept = await everything(target, but=())
    done = await migrate_store(source, target)
    assert done == Migration(0, 0, (Skipped("run", "r", "another run has this id in the target"),))
    assert await everything(target, but=()) == kept


async def test_schedules_and_limits_that_the_target_has_otherwise_are_reported() -> None:
    source, target = stores.memory(), stores.memory()
    await add_schedules_and_limits(source)
    await migrate_store(source, target)
    await target.limit_queue("go", QueueLimits(concurrency=9))
    await target.put_schedule(msgspec.structs.replace(SCHEDULES[0], next_at=THEN + 2))
    assert await source.fire("nightly", expected_at=THEN, next_at=THEN + 1, run=_new("night"))
    done = await migrate_store(source, target)
    assert [(one.kind, one.id) for one in done.skipped] == [("queue", "go"), ("schedule", "nightly")]
    assert (await target.schedules())[0].next_at == THEN + 2
    assert await source.fire("nightly", expected_at=THEN + 1, next_at=THEN + 3, run=_new("night 2"))
    await migrate_store(source, target)
    assert (await target.schedules())[0].next_at == THEN + 3
    assert (await target.queue_limits())["pay"] == LIMITS["pay"]


async def test_a_hold_goes_with_the_run_and_is_then_the_targets_own() -> None:
    source, target = stores.memory(), stores.memory()
    await source.create(_new("r"))
    await source.hold("r")
    await migrate_store(source, target)
    assert await target.due() == []
    await target.unhold("r")
    await source.signal("r", "go", b"1")
    assert (await migrate_store(source, target)).copied == 1
    assert await target.due() == ["r"]


async def test_an_epoch_above_the_clock_does_not_go_back() -> None:
    source, target = stores.memory(), stores.memory()
    ahead = time.time_ns() // 1000 + 10**12
    created = await source.create(_new("r"), ttl=1, now=ahead)
    assert created.claim is not None
    await source.suspend(created.claim.lease, wake_at=None, now=THEN)
    await migrate_store(source, target)
    claim = await target.acquire("r", 1, due_only=False)
    assert claim is not None
    assert claim.lease.epoch > ahead


async def test_runs_that_come_and_change_while_it_copies_are_copied_too() -> None:
    source, target = stores.memory(), stores.memory()
    for number in range(20):
        await source.create(_new(f"r{number:02}"), now=THEN + number)
    restore, changed = target.restore, iter(range(20))

    async def while_others_work(run: RunRow, *rest: Any, **options: Any) -> None:
        await restore(run, *rest, **options)
        number = next(changed, None)
        if number is not None:  # the oldest first, which are listed last
            claim = await source.acquire(f"r{number:02}", 60)
            assert claim is not None
            await source.suspend(claim.lease, wake_at=None, entries=[Entry(seq=1, key="one")])
            await source.create(_new(f"new{number:02}"))

    target.restore = while_others_work  # type: ignore[method-assign]
    done = await migrate_store(source, target, batch=3)
    assert done.skipped == ()
    assert await target.count() == 40
    assert await everything(target) == await everything(source)


async def test_a_copy_that_reads_back_otherwise_is_an_error() -> None:
    source, target = stores.memory(), stores.memory()
    await source.create(_new("r"))
    restore = target.restore

    async def forgetful(run: RunRow, entries: Any, inbox: Any, **options: Any) -> None:
        await restore(msgspec.structs.replace(run, priority=7), entries, inbox, **options)

    target.restore = cast("Any", forgetful)  # type: ignore[method-assign]
    with pytest.raises(PersistenceError, match="run 'r' was copied, but does not read back the same"):
        await migrate_store(source, target)


async def test_what_cannot_be_migrated_is_refused(tmp_path: Path) -> None:
    store: Any = stores.memory()
    with pytest.raises(ValueError, match="source and target are the same store"):
        await migrate_store(store, store)
    dsn = f"sqlite:///{tmp_path / 'a.db'}"
    with pytest.raises(ValueError, match="source and target are the same store"):
        await migrate_store(dsn, dsn)
    for other in (DictStore(), None, type(store)):
        with pytest.raises(TypeError, match="migrate_store takes two stores or DSNs"):
            await migrate_store(store, other)  # type: ignore[arg-type]
    for batch in (0, True, "7"):
        with pytest.raises(ValueError, match="batch must be a whole number of at least 1"):
            await migrate_store(store, stores.memory(), batch=batch)  # type: ignore[arg-type]


def _new(run_id: str) -> NewRun:
    return NewRun(id=run_id, workflow="flow", input=b"[]", input_hash=b"hash", seed=f"{time.time_ns()}".encode())
