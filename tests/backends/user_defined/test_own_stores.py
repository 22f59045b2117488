"""A user's own `WorkflowStore` of four methods is as good as a store for `wf.run` and for a Runtime, on one process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, WaitingFor, workflow
from perdure.backends.user_defined.workflow_adapter import WorkflowStateStore, workflow_store
from perdure.errors import (
    DeadlineExceeded,
    LeaseHeld,
    LeaseLost,
    PersistenceError,
    RunConflict,
    RunDead,
    RunFinished,
    RunNotFound,
    SnapshotFormatError,
    StoreCapabilityError,
)
from perdure.model.journal import Entry
from perdure.model.records import NewRun
from perdure.options import LEASE_TTL
from perdure.simple_stores import StoredRun
from perdure.snapshots.snapshot import Snapshot
from perdure.store import require
from perdure.testing import ManualClock
from tests.backends.user_defined.own_stores import DictStore, LeasedStore, PlainStore, RowLeasedStore

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def charge(cents: int) -> int:
    calls.append(f"charge {cents}")
    return cents


@workflow
async def checkout(ctx: Context, cents: int) -> list[Any]:
    paid = await ctx.step(charge, cents)
    await ctx.sleep("settle", "1h")
    answer = await ctx.wait_for_signal("approve")
    return [paid, answer, str(ctx.uuid4())]


@workflow
async def paying(ctx: Context, times: int) -> int:
    return sum([await ctx.step(charge, number, key=f"charge:{number}") for number in range(times)])


@workflow
async def asking(ctx: Context) -> Any:
    return await ctx.wait_for_signal("go")


EVERY = pytest.mark.parametrize("make", [DictStore, PlainStore, LeasedStore, RowLeasedStore])


async def _until(condition: Callable[[], bool]) -> None:
    """Let the others go on until it holds; a test that waits for ever is stopped by its time limit."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is a dict of the user's, which has no event
            await asyncio.sleep(0.001)


def own_status(own: Any, run_id: str) -> str:
    return str(own.runs[run_id].status if isinstance(own, PlainStore) else own.rows[run_id]["status"])


def runtime_on(own: Any, *workflows: Any, **options: Any) -> Runtime:
    return Runtime(own, workflows or [checkout], concurrency=options.pop("concurrency", 0), unload_grace=0, **options)


@EVERY
async def test_a_run_sleeps_is_swept_signalled_and_ends(make: type[Any]) -> None:
    own, clock = make(), ManualClock()
    async with runtime_on(own, clock=clock) as runtime:
        assert isinstance(await runtime.run(checkout, 5, id="c"), Suspended)
        assert await runtime.sweep() == {}
        clock.advance("1h")
        swept = await runtime.sweep()
        assert isinstance(swept["c"], Suspended)
        assert swept["c"].waiting_for == (WaitingFor("signal", "approve"),)
        assert await runtime.sweep() == {}
        await runtime.signal("c", "approve", "yes", dedupe="once")
        await runtime.signal("c", "approve", "yes", dedupe="once")
        (outcome,) = (await runtime.sweep()).values()
        assert outcome.unwrap()[:2] == [5, "yes"]
        assert await runtime.resume("c") == outcome
        with pytest.raises(RunFinished):
            await runtime.signal("c", "approve", "no")
    assert calls == ["charge 5"]


@EVERY
async def test_a_worker_finds_what_is_due_by_itself(make: type[Any]) -> None:
    own, clock = make(), ManualClock()
    async with runtime_on(own, concurrency=10, clock=clock) as runtime:
        run = await runtime.start(checkout, 5, id="c")
        later = await runtime.start(checkout, 6, id="d", start_at=datetime(2026, 1, 1, 3, tzinfo=UTC))
        assert isinstance(await run.outcome(), Suspended)
        clock.advance("1h")
        await runtime.signal("c", "approve", "yes")
        assert (await run)[:2] == [5, "yes"]
        assert await later.status() == "pending"
        clock.advance("2h")
        await runtime.signal("d", "approve", "no")
        await _until(lambda: own_status(own, "d") == "suspended")
        clock.advance("1h")
        assert (await later)[:2] == [6, "no"]
    assert sorted(calls) == ["charge 5", "charge 6"]


async def test_wf_run_takes_it_as_it_is() -> None:
    own = DictStore()
    assert isinstance(await checkout.run(5, id="c", store=own), Suspended)
    assert isinstance(await checkout.run(5, id="c", store=own), Suspended)
    with pytest.raises(RunConflict):
        await checkout.run(6, id="c", store=own)
    assert await paying.run(3, id="p", store=own) == Ok(3)
    assert calls == ["charge 5", "charge 0", "charge 1", "charge 2"]


@EVERY
async def test_wf_start_sees_a_run_through(make: type[Any]) -> None:
    run = await asking.start(id="a", store=make())
    assert isinstance(await run.outcome(), Suspended)
    await run.signal("go", 7)
    assert await run == 7


async def test_what_is_saved_says_how_the_run_stands() -> None:
    saved: list[StoredRun] = []

    class Watching(PlainStore):
        def save(self, run: StoredRun) -> None:
            saved.append(run)
            super().save(run)

    own, clock = Watching(), ManualClock()
    async with runtime_on(own, clock=clock) as runtime:
        await runtime.run(checkout, 5, id="c")
        clock.advance("1h")
        await runtime.sweep()
        await runtime.signal("c", "approve", "yes")
        await runtime.sweep()
    start = datetime(2026, 1, 1, tzinfo=UTC)
    hour, ttl = timedelta(hours=1), timedelta(seconds=LEASE_TTL)
    stood = [(run.status, run.wake_at, run.event_name) for run in saved]
    assert list(dict.fromkeys(stood)) == [
        ("running", start + ttl, None),
        ("suspended", start + hour, None),
        ("running", start + hour + ttl, None),
        ("suspended", None, "approve"),
        ("suspended", start + hour, "approve"),
        ("completed", None, None),
    ]
    assert {(run.run_id, run.workflow) for run in saved} == {("c", "checkout")}
    assert all(isinstance(run.snapshot, Snapshot) for run in saved)
    assert [run.updated_at for run in saved] == sorted(run.updated_at for run in saved)
    assert saved[-1].updated_at == start + hour


async def test_what_a_run_was_started_with_is_kept() -> None:
    own, clock = DictStore(), ManualClock()
    async with runtime_on(own, paying, clock=clock, only_queues=["mail"]) as runtime:
        await runtime.start(paying, 1, id="slow", queue="post")
        await runtime.start(paying, 2, id="quick", queue="mail", priority=7)
    async with runtime_on(DictStore(own.rows), paying, clock=clock, only_queues=["mail"]) as runtime:
        row = await runtime.store.get("quick")
        assert row is not None
        assert (row.queue, row.priority) == ("mail", 7)
        assert list(await runtime.sweep()) == ["quick"]


async def test_another_process_goes_on_from_what_was_saved() -> None:
    rows: dict[str, Any] = {}
    clock = ManualClock()
    async with runtime_on(DictStore(rows), clock=clock) as runtime:
        assert isinstance(await runtime.run(checkout, 5, id="c"), Suspended)
    rows.update(json.loads(json.dumps(rows, default=str), object_hook=_with_times))
    clock.advance("2h")
    async with runtime_on(DictStore(rows), clock=clock) as runtime:
        await runtime.sweep()
        await runtime.signal("c", "approve", "yes")
    async with runtime_on(DictStore(rows), clock=clock) as runtime:
        assert (await runtime.resume("c")).unwrap()[:2] == [5, "yes"]
    assert calls == ["charge 5"]


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("wake_at", "updated_at"):
        if isinstance(row.get(name), str):
            row[name] = datetime.fromisoformat(row[name])
    return row


async def test_a_run_on_hold_stays_so_in_the_next_process() -> None:
    rows: dict[str, Any] = {}
    async with runtime_on(DictStore(rows), paying) as runtime:
        await runtime.start(paying, 1, id="p")
        await runtime.hold("p")
    async with runtime_on(DictStore(rows), paying) as runtime:
        assert await runtime.sweep() == {}
        await runtime.unhold("p")
        assert list(await runtime.sweep()) == ["p"]


async def test_a_deadline_and_its_time_after_a_retry_hold_in_the_next_process() -> None:
    rows: dict[str, Any] = {}
    clock = ManualClock()
    async with runtime_on(DictStore(rows), clock=clock) as runtime:
        await runtime.run(checkout, 5, id="c", deadline="30m")
    clock.advance("1h")
    async with runtime_on(DictStore(rows), clock=clock) as runtime:
        outcome = (await runtime.sweep())["c"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DeadlineExceeded)
        await runtime.retry("c")
    for advance, is_over in (("29m", False), ("1m", True)):
        clock.advance(advance)
        async with runtime_on(DictStore(rows), clock=clock) as runtime:
            assert isinstance((await runtime.sweep())["c"], Err if is_over else Suspended)


async def test_a_run_with_a_problem_waits_for_its_next_try_in_the_next_process() -> None:
    rows: dict[str, Any] = {}
    store = workflow_store(own := DictStore(rows))
    await runtime_on(own, paying).start(paying, 2, id="p")
    claim = await store.acquire("p", 30)
    assert claim is not None
    later = claim.lease.until + 60_000_000
    await store.release(claim.lease, wake_at=later, problem="it does not fit")
    row = await workflow_store(DictStore(rows)).get("p")
    assert row is not None
    assert (row.problem, row.problem_count, row.wake_at, row.attempts) == ("it does not fit", 1, later, 0)
    async with runtime_on(DictStore(rows), paying) as runtime:
        assert await runtime.sweep() == {}
        await runtime.signal("p", "anything")
        assert list(await runtime.sweep()) == ["p"]


async def test_a_run_that_kills_its_worker_again_and_again_is_dead() -> None:
    rows: dict[str, Any] = {}
    store = workflow_store(own := DictStore(rows))
    await runtime_on(own, paying).start(paying, 2, id="p")
    claim = await store.acquire("p", 30)
    assert claim is not None
    await store.record(claim.lease, [Entry(seq=1, key="something")])
    for _ in range(4):  # each claims it, and is gone
        assert await workflow_store(DictStore(rows)).acquire("p", 30) is not None
    async with runtime_on(DictStore(rows), paying, max_attempts=3) as runtime:
        outcome = await runtime.resume("p")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunDead)
    assert calls == []


@pytest.mark.parametrize("dies_after", range(8))
async def test_a_save_that_fails_loses_nothing_and_the_run_goes_on_later(dies_after: int) -> None:
    class Failing(DictStore):
        left: int | None = dies_after

        async def save(self, run: StoredRun) -> None:
            if self.left is not None:
                if self.left == 0:
                    raise OSError("no space left on device")
                self.left -= 1
            await super().save(run)

    own = Failing()
    with contextlib.suppress(PersistenceError):
        await paying.run(3, id="p", store=own)
    saved = json.loads(own.rows["p"]["snapshot"])["steps"] if "p" in own.rows else {}
    calls.clear()
    assert await paying.run(3, id="p", store=DictStore(own.rows)) == Ok(3)
    assert calls == [f"charge {number}" for number in range(3) if f"charge:{number}" not in saved]


@pytest.mark.parametrize("make", [DictStore, LeasedStore])
@pytest.mark.parametrize("fails_at", range(2, 7))
async def test_a_worker_goes_on_with_a_run_once_it_can_be_saved_again(make: type[DictStore], fails_at: int) -> None:
    own = make()
    save, saves = own.save, itertools.count(1)

    async def failing_for_a_while(run: StoredRun) -> None:
        if fails_at <= next(saves) < fails_at + 3:  # also when the lease is to be given back
            if isinstance(own, LeasedStore):  # where nothing else lets a lease expire
                asyncio.get_running_loop().call_later(0.3, own.leases.clear)
            raise OSError("no space left on device")
        await save(run)

    own.save = failing_for_a_while  # type: ignore[method-assign]
    async with runtime_on(own, paying, concurrency=10, lease_ttl="300ms") as runtime:
        run = await runtime.start(paying, 3, id="p")
        await _until(lambda: own_status(own, "p") == "completed")
        assert await run == 3
    assert sorted(set(calls)) == ["charge 0", "charge 1", "charge 2"]
    assert len(calls) <= 5


async def test_failed_runs_are_retried_and_cancelled_ones_end() -> None:
    tries: list[int] = []

    async def fail() -> int:
        tries.append(1)
        if len(tries) < 4:
            raise ValueError("no")
        return 7

    @workflow
    async def failing(ctx: Context) -> int:
        await ctx.step(charge, 1)
        return await ctx.step("fail", fail, retry=Retry(2, wait_initial=0, wait_jitter=0))

    own = DictStore()
    async with runtime_on(own, failing, asking) as runtime:
        assert isinstance(await runtime.run(failing, id="f"), Err)
        await runtime.retry("f")
        assert await runtime.sweep() == {"f": Ok(7)}
        await runtime.run(asking, id="a")
        await runtime.cancel("a")
        assert isinstance((await runtime.sweep())["a"], Err)
        run = await runtime.get("a")
        assert run is not None
        assert await run.status() == "cancelled"
        await runtime.delete("a")
        assert await runtime.get("a") is None
        with pytest.raises(RunNotFound):
            await runtime.signal("a", "go")
    assert list(own.rows) == ["f"]
    assert calls == ["charge 1"]


async def test_runs_that_nobody_here_knows_hold_up_nobody() -> None:
    own = DictStore()
    async with runtime_on(own, asking, clock=(clock := ManualClock())) as runtime:
        for number in range(30):
            await runtime.start(asking, id=f"unknown{number}")
        clock.advance(1)
        await runtime.start(paying, 2, id="known")
    async with runtime_on(DictStore(own.rows), paying, clock=clock) as runtime:
        assert await runtime.sweep(limit=2) == {"known": Ok(1)}


async def test_a_run_that_is_named_as_due_and_is_not_is_left_alone() -> None:
    class Eager(DictStore):
        async def due(self, now: datetime, limit: int) -> list[str]:
            return ["gone", *self.rows]

    own = Eager()
    async with runtime_on(own) as runtime:
        await runtime.run(checkout, 5, id="c")
        before = dict(own.rows)
        assert await runtime.sweep() == {}
        assert await runtime.sweep() == {}
    assert own.rows == before


async def test_a_run_that_cannot_be_read_is_said_once_and_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    own = DictStore()
    async with runtime_on(own, paying) as runtime:
        await runtime.start(paying, 1, id="bad")
        await runtime.start(paying, 2, id="good")
    own.rows["bad"]["snapshot"] = '{"formatVersion": 999}'
    kept = dict(own.rows["bad"])
    async with runtime_on(DictStore(own.rows), paying) as runtime:
        with caplog.at_level(logging.ERROR, "perdure"):
            assert await runtime.sweep() == {"good": Ok(1)}
            assert await runtime.sweep() == {}
        with pytest.raises(SnapshotFormatError, match="the state that is kept of run 'bad'"):
            await runtime.resume("bad")
        with pytest.raises(SnapshotFormatError):
            await paying.run(1, id="bad", store=runtime.store)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["run 'bad' is due but passed over"]
    assert own.rows["bad"] == kept


WRONG: list[tuple[str, Any, str]] = [
    ("load", {"run_id": "p"}, r"run 'p' could not be loaded: load\('p'\) gave a dict, not a StoredRun or None"),
    ("load", False, r"load\('p'\) gave a bool"),
    ("load", StoredRun("q", "paying", "{}", "pending", None, None, datetime.now(UTC)), r"load\('p'\) gave the run 'q'"),
    ("load", OSError("gone"), r"run 'p' could not be loaded: OSError\('gone'\)"),
    ("save", OSError("full"), r"run 'p' could not be saved: OSError\('full'\)"),
    ("due", 0, r"due gave int, not a list of run ids or StoredRuns, or None"),
    ("due", "p", r"due gave str, not a list"),
    ("due", [7], r"due gave list, not a list of run ids or StoredRuns"),
    ("due", OSError("gone"), r"what is due could not be found out: OSError\('gone'\)"),
]


@pytest.mark.parametrize(("method", "answer", "said"), WRONG)
async def test_a_wrong_answer_is_an_error_that_names_method_and_run(method: str, answer: Any, said: str) -> None:
    own = DictStore()

    async def wrong(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    setattr(own, method, wrong)
    with pytest.raises(PersistenceError, match=said):
        await (runtime_on(own, paying).sweep() if method == "due" else paying.run(1, id="p", store=own))
    assert calls == []
    assert own.rows == {}


async def test_a_store_that_wakes_its_runs_by_itself_may_say_that_nothing_is_due_by_none() -> None:
    class Pushing(DictStore):
        async def due(self, now: datetime, limit: int) -> None:  # type: ignore[override]
            """Nothing, ever."""

    async with runtime_on(Pushing(), paying) as runtime:
        assert isinstance(await runtime.run(paying, 1, id="p"), Ok)
        assert await runtime.sweep() == {}
        assert list(await require(runtime.store, "operators").due()) == []


async def test_it_says_what_it_cannot_do() -> None:
    assert "unfenced, one process only" in repr(WorkflowStateStore(DictStore()))
    assert "unfenced, leases by its acquire" in repr(WorkflowStateStore(LeasedStore()))
    store = workflow_store(own := DictStore())
    assert (store.capabilities, store.durability) == (frozenset({"operators"}), "process")
    runtime, nothing = runtime_on(own), cast("Any", None)
    for call in (
        runtime.list(),
        runtime.purge("1d"),
        store.count(),
        store.put_schedule(nothing),
        store.limit_queue("q", nothing),
    ):
        with pytest.raises(StoreCapabilityError, match="the DictStore store has no"):
            await call


async def test_a_store_that_can_only_take_leases_is_refused() -> None:
    own: Any = LeasedStore()
    own.release = None
    with pytest.raises(TypeError, match="has acquire but no release"):
        Runtime(own)


async def test_all_callers_of_one_object_work_on_one_store() -> None:
    own = DictStore()
    assert workflow_store(own) is runtime_on(own).store
    both = await asyncio.gather(paying.run(5, id="p", store=own), paying.run(5, id="p", store=own))
    assert list(both) == [Ok(10), Ok(10)]
    assert len(calls) == 5


@EVERY
async def test_a_run_that_is_created_with_a_lease_is_ours(make: type[Any]) -> None:
    store = workflow_store(make())
    new = NewRun(id="r", workflow="flow", input=b"[]", input_hash=b"hash", seed=b"seed")
    created = await store.create(new, ttl=30)
    assert created.is_new
    assert created.claim is not None
    await store.record(created.claim.lease, [Entry(seq=1, key="one")])
    again = await store.create(new, ttl=30)
    assert (again.is_new, again.claim) == (False, None)


async def test_a_worker_whose_time_is_up_writes_nothing_more() -> None:
    own = LeasedStore()
    store = workflow_store(own)
    new = NewRun(id="r", workflow="flow", input=b"[]", input_hash=b"hash", seed=b"seed")
    claim = (await store.create(new, ttl=0.05)).claim
    assert claim is not None
    before = dict(own.rows)
    await asyncio.sleep(0.06)  # whoever has the lease by now, or nobody: it is not ours
    for has_it in ("somebody else", None):
        own.leases = {"r": has_it} if has_it else {}
        for write in (store.record(claim.lease, [Entry(seq=1, key="one")]), store.release(claim.lease)):
            with pytest.raises(LeaseLost):
                await write
    assert own.rows == before


@pytest.mark.parametrize("make", [LeasedStore, RowLeasedStore])
async def test_a_lease_is_given_back_whenever_nobody_here_drives_the_run(make: type[LeasedStore]) -> None:
    own, clock = make(), ManualClock()
    async with runtime_on(own, checkout, clock=clock, lease_ttl="7s") as runtime:
        await runtime.run(checkout, 5, id="c")
        assert own.leases == {}
        await runtime.signal("c", "approve", "yes")
        assert own.leases == {}
        clock.advance("1h")
        await runtime.sweep()
        await runtime.delete("c")
    assert own.leases == {}
    assert 7.0 in own.ttls


async def test_what_another_process_has_is_left_to_it() -> None:
    own = LeasedStore()
    async with runtime_on(own, asking, paying) as runtime:
        await runtime.run(asking, id="a")
        await runtime.start(paying, 2, id="p")
        own.leases.update(a="somebody else's", p="somebody else's")
        before = dict(own.rows)
        assert await runtime.sweep() == {}
        with pytest.raises(LeaseHeld, match="run 'a' is held by another process that uses this store"):
            await runtime.signal("a", "go", 1)
        with pytest.raises(LeaseHeld):
            await paying.run(2, id="p", store=own, wait=False)
        assert own.rows == before
        del own.leases["p"]
        assert await paying.run(2, id="p", store=own) == Ok(1)


async def test_a_run_that_another_process_makes_while_this_one_asks_for_it_is_found() -> None:
    here = LeasedStore()
    there = LeasedStore(here.rows, here.leases)
    acquire = here.acquire

    async def after_the_other(run_id: str, token: str, ttl: float) -> bool:
        here.acquire = acquire  # type: ignore[method-assign]
        assert await paying.run(2, id="p", store=there) == Ok(1)
        return await acquire(run_id, token, ttl)

    here.acquire = after_the_other  # type: ignore[method-assign]
    assert await paying.run(2, id="p", store=here) == Ok(1)
    assert calls == ["charge 0", "charge 1"]
    assert here.leases == {}


async def test_a_run_that_another_process_is_about_to_save_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.user_defined.workflow_adapter._PAUSE_FOR_CREATED", 0.0)

    @workflow
    async def greet(ctx: Context) -> str:
        return "hello"

    theirs = LeasedStore()
    ours = LeasedStore(theirs.rows, theirs.leases)
    theirs.leases["r"] = "the other process"
    async with Runtime(ours, [greet], concurrency=0) as runtime:
        with pytest.raises(LeaseHeld, match="creating it"):
            await runtime.start(greet, id="r")
    assert (ours.rows, ours.leases) == ({}, {"r": "the other process"})
    del theirs.leases["r"]
    async with Runtime(theirs, [greet], concurrency=0) as other:
        await other.start(greet, id="r")
    theirs.leases["r"] = "the other process"
    async with Runtime(ours, [greet], concurrency=0) as runtime:
        assert (await runtime.start(greet, id="r")).id == "r"


async def test_a_waiting_call_goes_on_when_the_other_process_is_done() -> None:
    rows: dict[str, Any] = {}
    leases: dict[str, str] = {}
    here, there = LeasedStore(rows, leases), LeasedStore(rows, leases)
    is_charging, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> int:
        is_charging.set()
        await may_go_on.wait()
        return 7

    @workflow
    async def slow(ctx: Context) -> int:
        return await ctx.step(slowly)

    first = asyncio.create_task(slow.run(id="s", store=here))
    await is_charging.wait()
    second = asyncio.create_task(slow.run(id="s", store=there))
    await _until(lambda: "s" in there.asked)
    may_go_on.set()
    assert [await first, await second] == [Ok(7), Ok(7)]


async def test_a_change_that_took_longer_than_its_lease_is_not_saved() -> None:
    own = LeasedStore()
    load, is_slow = own.load, [False]

    async def slowly(run_id: str) -> StoredRun | None:
        await asyncio.sleep(0.05 * is_slow[0])
        return await load(run_id)

    own.load = slowly  # type: ignore[method-assign]
    async with runtime_on(own, asking, lease_ttl="10s") as runtime:
        await runtime.run(asking, id="a")
        await workflow_store(own).acquire("a", 0.02)
        before, is_slow[0] = dict(own.rows), True
        with pytest.raises(LeaseHeld, match="the store took longer than the lease that it gave; try again"):
            await runtime.signal("a", "go", 1)
        assert own.rows == before
        is_slow[0] = False
        assert await runtime.resume("a") == Suspended("a", None, (WaitingFor("signal", "go"),))


async def test_a_lease_is_prolonged_while_its_run_is_driven_and_a_worker_that_lost_it_saves_nothing() -> None:
    own = LeasedStore()
    asked_again, may_go_on = asyncio.Event(), asyncio.Event()
    release = own.release

    async def released(run_id: str, token: str) -> None:
        await release(run_id, token)
        asked_again.set()

    async def slowly() -> int:
        await asked_again.wait()
        await may_go_on.wait()
        return 7

    @workflow
    async def slow(ctx: Context) -> int:
        return await ctx.step(slowly)

    own.release = released  # type: ignore[method-assign]
    async with runtime_on(own, slow, lease_ttl="600ms") as runtime:
        driving = asyncio.create_task(runtime.run(slow, id="s"))
        await asked_again.wait()
        await _until(lambda: "s" in own.leases)
        token = own.leases["s"]
        own.leases["s"] = "somebody else's"  # it expired there, and another process has it
        before = dict(own.rows)
        with pytest.raises(LeaseLost):
            await driving
        assert token != own.leases["s"]
        assert own.rows == before
        del own.leases["s"]
        may_go_on.set()
        assert await runtime.resume("s") == Ok(7)


@workflow
async def collecting(ctx: Context, seen: list[str]) -> list[str]:
    seen = [*seen, await ctx.wait_for_signal("word", returns=str)]
    await ctx.step(charge, len(seen))
    if len(seen) < 4:
        await ctx.continue_as(seen)
    return [*seen, ctx.idempotency_key("charge")]


@EVERY
async def test_a_run_starts_over_and_its_signals_go_on(make: type[Any]) -> None:
    own = make()
    async with runtime_on(own, collecting) as runtime:
        await runtime.start(collecting, [], id="c")
        for word in ("a", "b", "c"):
            await runtime.signal("c", "word", word, dedupe=word)
        assert isinstance(await runtime.resume("c"), Suspended)
    async with runtime_on(own, collecting) as runtime:
        await runtime.start(collecting, [], id="c")
        with pytest.raises(RunConflict):
            await runtime.start(collecting, ["a"], id="c")
        await runtime.signal("c", "word", "a", dedupe="a")
        await runtime.signal("c", "word", "d", dedupe="d")
        assert await runtime.resume("c") == Ok(["a", "b", "c", "d", "c;generation=3/charge"])
    assert calls == [f"charge {number}" for number in (1, 2, 3, 4)]
