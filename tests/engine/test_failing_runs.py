"""Runs that fail, lie in ruins, kill their workers or lose their store: what is recorded stays, and they can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, stores, workflow
from perdure.errors import (
    DuplicateStep,
    LeaseHeld,
    LeaseLost,
    PersistenceError,
    RunDead,
    RunDiverged,
    RunFinished,
    SnapshotCorrupt,
    StepFailed,
)
from perdure.testing import ManualClock
from tests.engine.replays import spoil, stored
from tests.engine.worlds import World, world
from tests.simulation import SlowStore


class Log:
    """Step functions that note their calls; those in `broken` raise."""

    def __init__(self, *broken: str) -> None:
        self.called: list[str] = []
        self.broken = set(broken)
        self.seen_by_body: list[BaseException] = []

    async def work(self, label: str) -> str:
        self.called.append(label)
        if label in self.broken:
            raise ValueError(label)
        return label

    def refuse(self, label: str) -> Ok[str] | Err[str]:
        self.called.append(label)
        return Err(label) if label in self.broken else Ok(label)


def chain(log: Log, *labels: str) -> Workflow[[], Any]:
    """A workflow of one step for each label, that notes every ordinary error it sees."""

    async def flow(ctx: Context[Any]) -> Any:
        try:
            return [await ctx.step("work", log.work, label, key=label) for label in labels]
        except Exception as error:
            log.seen_by_body.append(error)
            raise

    return Workflow("chain", flow)


async def error_of(here: World) -> BaseException:
    """What the due run ends with."""
    outcome = (await here.runtime.sweep())["run"]
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, BaseException)
    return outcome.error


async def test_a_failed_run_is_retried_from_what_failed_and_keeps_its_history() -> None:
    log = Log("b")
    flow = chain(log, "a", "b", "c")
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        assert isinstance(await here.runtime.resume("run"), Err)
        assert await here.runtime.sweep() == {}
        assert log.called == ["a", "b"], "a failed run is not run again unless somebody says so"
        log.broken.clear()
        run = await here.runtime.retry("run")
        assert await run.status() == "pending"
        assert await here.runtime.sweep() == {"run": Ok(["a", "b", "c"])}
        assert [(entry.key, entry.ok) for entry in stored(here).journal() if entry.phase == "close"] == [
            ("a", True),
            ("b", False),
            ("b", True),
            ("c", True),
        ]
    assert log.called == ["a", "b", "b", "c"]


async def test_a_run_is_retried_as_often_as_it_fails() -> None:
    log = Log("b")
    flow = chain(log, "a", "b")
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        for _ in range(3):
            await here.runtime.retry("run")
            assert isinstance(await error_of(here), ValueError)
        assert stored(here).row.status == "failed"
    assert log.called == ["a", "b", "b", "b", "b"]


async def test_retry_failed_goes_on_and_without_it_the_outcome_stands() -> None:
    log, store = Log("b"), stores.memory()
    flow = chain(log, "a", "b")
    for _ in range(2):
        outcome = await flow.run(id="run", store=store)
        assert isinstance(outcome, Err)
    log.broken.clear()
    assert isinstance(await flow.run(id="run", store=store, retry_failed=False), Err)
    assert await flow.run(id="run", store=store, retry_failed=True) == Ok(["a", "b"])
    log.broken.add("a")
    assert await flow.run(id="run", store=store, retry_failed=True) == Ok(["a", "b"]), "completed is final"
    assert log.called == ["a", "b", "b"]


async def test_an_err_that_a_step_returned_is_set_aside_like_any_failure() -> None:
    log = Log("a")

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step("refuse", log.refuse, "a")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Err("a")
        log.broken.clear()
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("a")}


async def test_a_retried_step_that_failed_for_good_has_all_its_attempts_again() -> None:
    log = Log("a")

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step("a", log.work, "a", retry=Retry(2, wait_initial=0, wait_jitter=0))

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        await here.runtime.retry("run")
        assert isinstance(await error_of(here), ValueError)
    assert log.called == ["a"] * 4


async def test_a_completed_run_takes_nothing_more() -> None:
    flow = chain(Log(), "a")
    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(["a"])
        for refused in (here.runtime.retry("run"), here.runtime.cancel("run"), here.runtime.signal("run", "x")):
            with pytest.raises(RunFinished):
                await refused
        assert await here.runtime.resume("run") == Ok(["a"])


async def test_a_run_that_has_not_ended_is_not_retried() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.sleep("nap", "1h")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        with pytest.raises(LeaseHeld, match="wait until it has ended"):
            await here.runtime.retry("run")


@pytest.mark.parametrize("is_parallel", [False, True])
async def test_a_key_used_twice_leaves_a_run_that_goes_on_once_the_code_is_fixed(is_parallel: bool) -> None:
    log = Log()
    is_fixed: list[bool] = []

    async def body(ctx: Context[Any]) -> Any:
        await ctx.step("before", log.work, "before")
        keys = ["one", "two"] if is_fixed else ["same", "same"]
        if is_parallel:
            return await asyncio.gather(*(ctx.step("work", log.work, key, key=key) for key in keys))
        return [await ctx.step("work", log.work, key, key=key) for key in keys]

    store = stores.memory()
    async with world(Workflow("flow", body), store=store) as here:
        outcome = await here.runtime.run("flow", id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)
        assert all(entry.ok for entry in stored(here).journal()), "the misuse itself is not recorded as a step"
        is_fixed.append(True)
        await here.runtime.retry("run")
        if is_parallel:  # the function failed before it rested, so nothing had begun
            assert await here.runtime.sweep() == {"run": Ok(["one", "two"])}
            return
        assert isinstance(await error_of(here), RunDiverged), "'same' was done, and nothing says that it is no longer wanted"
    async with world(Workflow("flow", body, retired={"same"}), store=store) as here:
        assert await here.later("5s") == {"run": Ok(["one", "two"])}
    assert log.called.count("before") == 1


BROKEN = [b"", b"{", b"\xff\xfe", b"nul", b'{"$nope": 1}', b'{"a":1,"a":2}', b'"never closed', b"\0" * 16]


@pytest.mark.parametrize("payload", BROKEN, ids=repr)
@pytest.mark.parametrize("ok", [True, False], ids=["a value", "an error"])
async def test_a_record_that_cannot_be_read_stops_the_run_unseen_by_the_body_until_it_can(payload: bytes, ok: bool) -> None:
    log = Log(*([] if ok else ["b"]))

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            results: list[Any] = [await ctx.step("work", log.work, "a", key="a")]
            try:
                results.append(await ctx.step("work", log.work, "b", key="b"))
            except ValueError as error:
                results.append(repr(error))
            await ctx.sleep("nap", "1h")
        except Exception as error:
            log.seen_by_body.append(error)
            raise
        return results

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        intact = dict(stored(here).entries)
        spoil(here, "b", payload)
        spoiled = dict(stored(here).entries)
        here.clock.advance("1h")
        error = await error_of(here)
        assert isinstance(error, SnapshotCorrupt)
        assert "step 'b'" in str(error)
        assert "'run'" in str(error)
        with pytest.raises(SnapshotCorrupt):
            await here.runtime.resume("run")
        assert stored(here).entries == spoiled, "nothing was written over it"
        assert (stored(here).row.status, stored(here).row.problem) == ("pending", str(error))
        assert not log.seen_by_body

        stored(here).entries.update(intact)  # from a backup
        assert await here.later("10s") == {"run": Ok(["a", "b" if ok else "ValueError('b')"])}
    assert sorted(log.called) == ["a", "b"]


async def test_every_kind_of_record_says_that_it_cannot_be_read() -> None:
    log = Log("flaky")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        try:
            await ctx.race("race", ctx.sleep("raced", 0))
            await ctx.wait_for_signal("news")
            await ctx.sleep("nap", "1h")
            await ctx.step("flaky", log.work, "flaky", retry=Retry(2, wait_initial="1h", wait_max="1h", wait_jitter=0))
        except Exception as error:
            log.seen_by_body.append(error)
            raise

    for key, phase, hours in [
        ("news", "close", 0),
        ("nap", "open", 0),
        ("flaky", "open", 1),
    ]:
        async with world(flow) as here:
            await here.runtime.start(flow, id="run")
            await here.runtime.signal("run", "news", {"x": 1})
            assert isinstance((await here.runtime.sweep())["run"], Suspended)
            for _ in range(hours):
                assert isinstance((await here.later("1h"))["run"], Suspended)
            spoil(here, key, b"[", phase=phase)
            here.clock.advance("1h")
            error = await error_of(here)
            assert isinstance(error, SnapshotCorrupt), key
            assert f"{key!r}" in str(error)
    assert not log.seen_by_body


@pytest.mark.parametrize("given", [*BROKEN, b"5", b"[]", b"[5, {}]", b"[[1], 5]", b"{}", b"null", b"[[1], {}, 3]"], ids=repr)
async def test_an_input_that_cannot_be_read_stops_the_run_before_any_of_its_code(given: bytes) -> None:
    ran: list[int] = []

    @workflow
    async def flow(ctx: Context[Any], n: int) -> int:
        ran.append(n)
        return n

    async with world(flow) as here:
        await here.runtime.start(flow, 1, id="run")
        await here.runtime.start(flow, 2, id="sound")
        intact = stored(here).row.input
        stored(here).change(input=given)
        outcomes = await here.runtime.sweep()
        assert outcomes["sound"] == Ok(2)
        corrupt = outcomes["run"]
        assert isinstance(corrupt, Err)
        assert isinstance(corrupt.error, SnapshotCorrupt)
        assert "the input of run 'run'" in str(corrupt.error)
        assert ran == [2]
        assert stored(here).row.input == given

        assert stored(here).row.problem == str(corrupt.error)

        stored(here).change(input=intact)
        assert await here.runtime.sweep() == {}
        assert await here.later("5s") == {"run": Ok(1)}


@pytest.mark.parametrize("payload", [b"", b"{", b"5", b"[1]", b"\xff"], ids=repr)
async def test_a_journal_that_cannot_be_read_stops_its_run_and_no_other(payload: bytes) -> None:
    log = Log("a")
    flow = chain(log, "a")
    async with world(flow) as here:
        for run_id in ("run", "sound"):
            await here.runtime.run(flow, id=run_id)
            await here.runtime.retry(run_id)
        log.broken.clear()
        intact = dict(stored(here).entries)
        spoil(here, "", payload, phase="drop")
        outcomes = await here.runtime.sweep()
        assert outcomes["sound"] == Ok(["a"])
        corrupt = outcomes["run"]
        assert isinstance(corrupt, Err)
        assert isinstance(corrupt.error, SnapshotCorrupt)
        with pytest.raises(SnapshotCorrupt, match="journal"):
            await here.runtime.resume("run")

        stored(here).entries.update(intact)
        assert await here.later("10s") == {"run": Ok(["a"])}


@pytest.mark.parametrize("status", ["completed", "failed"])
async def test_an_outcome_that_cannot_be_read_is_told_to_whoever_asks(status: str) -> None:
    flow = chain(Log(*(["a"] if status == "failed" else [])), "a")
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        stored(here).change(outcome=b"{")
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.status() == status
        for asked in (run.outcome(), here.runtime.resume("run"), here.runtime.run(flow, id="run"), _value_of(run)):
            with pytest.raises(SnapshotCorrupt, match="the outcome of run 'run'"):
                await asked


async def _value_of(run: Any) -> Any:
    return await run


async def killed(here: World, times: int) -> None:
    """So many workers take the run and are never heard of again."""
    for _ in range(times):
        claims = await here.runtime.store.claim(10, 30.0, [("chain", 1)], now=here.clock.now())
        assert [claim.run.id for claim in claims.claims] == ["run"]
        here.clock.advance("31s")


async def test_a_run_that_kills_worker_after_worker_is_set_aside_and_can_be_taken_up_again() -> None:
    log = Log()
    flow = chain(log, "a")
    async with world(flow, max_attempts=3) as here:
        await here.runtime.start(flow, id="run")
        await killed(here, 3)
        error = await error_of(here)
        assert isinstance(error, RunDead)
        assert "its worker was lost 3 times" in str(error)
        assert not log.called
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.status() == "dead"
        with pytest.raises(RunDead):
            await run
        assert isinstance(await here.runtime.resume("run"), Err)
        assert await here.runtime.sweep() == {}

        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok(["a"])}


async def test_as_many_deaths_as_are_allowed_do_not_set_a_run_aside() -> None:
    flow = chain(Log(), "a")
    async with world(flow, max_attempts=3) as here:
        await here.runtime.start(flow, id="run")
        await killed(here, 2)
        assert await here.runtime.sweep() == {"run": Ok(["a"])}


async def test_a_run_that_records_something_each_time_is_not_set_aside() -> None:
    log, labels = Log(), [f"{n}" for n in range(8)]
    flow = chain(log, *labels)
    store, clock = stores.memory(), ManualClock()
    for _ in range(5):
        dying: Any = FailingStore(store, "record", after=1, forever=True)
        runtime = Runtime(dying, [flow], clock=clock, concurrency=0, max_attempts=2)
        with pytest.raises(PersistenceError):
            await runtime.run(flow, id="run")
        await runtime.close()
        clock.advance("31s")
        row = await store.get("run")
        assert row is not None
        assert not row.ended
    runtime = Runtime(store, [flow], clock=clock, concurrency=0, max_attempts=2)
    assert await runtime.run(flow, id="run") == Ok(labels)
    await runtime.close()


class FailingStore(SlowStore):
    """A store of which one verb raises: the call after so many went well, or (`forever`) each one from there on.

    `forever` stands for a database that is gone: then nothing works any more, not even letting go.
    """

    def __init__(self, store: Any, verb: str, *, after: int, forever: bool = False, run_id: str | None = None) -> None:
        self._store = store
        self.verb = verb
        self.left = after
        self.forever = forever
        self.run_id = run_id

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            is_meant = method.__name__ == self.verb and self.run_id in {None, getattr(args[0], "run_id", None)}
            self.left -= is_meant
            if (is_meant and self.left == -1) or (self.forever and self.left < 0):
                raise OSError(28, "No space left on device")
            return await method(*args, **kwargs)

        return call


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(
    ("verb", "after", "called"),
    [
        ("record", 0, ["a"]),
        ("record", 1, ["a", "b"]),
        ("record", 2, ["a", "b", "c"]),
        ("suspend", 0, ["a", "b", "c"]),
        ("finish", 0, ["a", "b", "c", "d"]),
    ],
)
async def test_a_store_that_fails_stops_the_run_there_and_nothing_is_done_after_it(
    verb: str, after: int, called: list[str], forever: bool
) -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            labels = [await ctx.step("work", log.work, label, key=label) for label in "abc"]
            await ctx.sleep("nap", "1h")
            return [*labels, await ctx.step("work", log.work, "d", key="d")]
        except Exception as error:
            log.seen_by_body.append(error)
            raise

    store, clock = stores.memory(), ManualClock()
    failing: Any = FailingStore(store, verb, after=after, forever=forever)
    runtime = Runtime(failing, [flow], clock=clock, concurrency=0, unload_grace=0)
    if verb == "finish":
        assert isinstance(await runtime.run(flow, id="run"), Suspended)
        clock.advance("1h")
    with pytest.raises(PersistenceError, match="No space left on device"):
        await runtime.run(flow, id="run")
    await runtime.close()
    assert log.called == called
    assert not log.seen_by_body
    row = await store.get("run")
    assert row is not None
    assert not row.ended

    kept = [entry.key for entry in await store.journal("run") if entry.phase == "close"]
    runtime = Runtime(store, [flow], clock=clock, concurrency=0, unload_grace=0)
    clock.advance("2h")
    outcomes = await runtime.sweep()
    if isinstance(outcomes["run"], Suspended):
        clock.advance("1h")
        outcomes = await runtime.sweep()
    assert outcomes == {"run": Ok(list("abcd"))}
    assert all(log.called.count(label) == 1 for label in kept if label != "nap")
    await runtime.close()


async def test_a_store_that_fails_for_one_run_does_not_stop_the_others_of_a_sweep() -> None:
    flow = chain(Log(), "a", "b")
    store = stores.memory()
    failing: Any = FailingStore(store, "record", after=0, run_id="bad")
    async with world(flow, store=failing) as here:
        for run_id in ("bad", "good"):
            await here.runtime.start(flow, id=run_id)
        outcomes = await here.runtime.sweep()
        assert outcomes["good"] == Ok(["a", "b"])
        bad = outcomes["bad"]
        assert isinstance(bad, Err)
        assert isinstance(bad.error, PersistenceError)
        assert await here.runtime.sweep() == {}, "it failed, so it waits"
        assert await here.later("2s") == {"bad": Ok(["a", "b"])}


async def test_a_step_in_flight_beside_a_record_that_failed_is_cancelled_and_not_recorded() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("slow")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await asyncio.gather(ctx.step("fast", asyncio.sleep, 0), ctx.step(slow))

    store = stores.memory()
    failing: Any = FailingStore(store, "record", after=0)
    async with world(flow, store=failing) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
        assert ended == ["slow"]
        assert await store.journal("run") == []


async def test_a_worker_that_lost_its_lease_changes_nothing_and_says_so() -> None:
    log = Log()
    store, clock = stores.memory(), ManualClock()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async def overtaken() -> str:
            if not log.called:
                log.called.append("overtaken")
                clock.advance("31s")
                claims = await store.claim(1, 30.0, [("flow", 1)], now=clock.now())
                assert len(claims.claims) == 1
            return "late"

        await ctx.step(overtaken)
        return await ctx.step("after", log.work, "after")

    runtime = Runtime(store, [flow], clock=clock, concurrency=0)
    with pytest.raises(LeaseLost):
        await runtime.run(flow, id="run")
    assert log.called == ["overtaken"]
    assert await store.journal("run") == []
    row = await store.get("run")
    assert row is not None
    assert row.status == "running"
    assert row.lease_until is not None, "the other one's lease is left alone"
    clock.advance("31s")
    assert await runtime.sweep() == {"run": Ok("after")}
    await runtime.close()


async def test_an_error_that_leaves_the_body_is_the_same_for_whoever_asks_later() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        raise LookupError("no such order") from KeyError(7)

    async with world(flow) as here:
        first = await here.runtime.run(flow, id="run")
        later = await here.runtime.resume("run")
        for outcome in (first, later):
            assert isinstance(outcome, Err)
            assert type(outcome.error) is LookupError
            assert str(outcome.error) == "no such order"
            assert repr(outcome.error.__cause__) == "KeyError(7)"
        run = await here.runtime.get("run")
        with pytest.raises(LookupError, match="no such order"):
            await _value_of(run)


async def test_a_result_that_cannot_be_stored_fails_the_run_not_the_caller() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return object()

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert "cannot be stored" in str(outcome.error)
        again = await here.runtime.resume("run")
        assert isinstance(again, Err)
        assert type(again.error) is type(outcome.error)
        assert not isinstance(again.error, StepFailed)
    assert msgspec.json.decode(stored(here).row.outcome or b"")
