"""The verbs of a Runtime that drives nothing in the background."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Err, Ok, Run, Suspended, WaitingFor, workflow
from perdure.errors import InvalidInput, LeaseHeld, RunCancelled, RunConflict, RunFinished, RunNotFound
from perdure.model.durations import moment
from perdure.store import Store
from perdure.testing import ManualClock
from tests.worker.flows import Flaky, Gate, ask, client, greet, nap

HOUR = timedelta(hours=1)


async def test_run_gives_the_value_and_records_it(store: Store) -> None:
    async with client(store, greet) as runtime:
        assert await runtime.run(greet, "Ada", id="g1") == Ok("hello Ada!")
        assert await runtime.run(greet, "Ada", id="g1") == Ok("hello Ada!")
        assert [entry.key for entry in await store.journal("g1")] == ["greet"]


async def test_run_without_an_id_makes_one_up(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.run(greet, "Ada")
        await runtime.run(greet, "Ada")
        assert len({info.id for info in await runtime.list()}) == 2


async def test_run_takes_a_registered_workflow_by_name(store: Store) -> None:
    async with client(store, greet) as runtime:
        assert await runtime.run("greet", "Ada", "?", id="g1") == Ok("hello Ada?")
        assert isinstance(await runtime.start("greet", "Eve"), Run)


async def test_a_workflow_object_is_registered_by_its_first_use(store: Store) -> None:
    async with client(store) as runtime:
        assert await runtime.run(greet, "Ada", id="g1") == Ok("hello Ada!")
        assert await runtime.run("greet", "Eve", id="g2") == Ok("hello Eve!")


async def test_an_unknown_name_is_an_error_that_names_the_known_ones(store: Store) -> None:
    async with client(store, greet, nap) as runtime:
        with pytest.raises(
            LookupError, match=r"'greeet' is not registered here \(registered: greet, nap\); pass it in workflows="
        ):
            await runtime.run("greeet", "Ada", id="g1")
        with pytest.raises(LookupError, match="'greeet'"):
            await runtime.start("greeet", "Ada", id="g1")
        assert await runtime.list() == []


async def test_something_else_than_a_workflow_is_a_type_error(store: Store) -> None:
    async def plain(ctx: Context) -> None: ...

    async with client(store) as runtime:
        with pytest.raises(TypeError, match=r"take a workflow or its name, not .*plain.*; decorate the function with @workflow"):
            await runtime.run(plain)  # type: ignore[call-arg, arg-type]
        with pytest.raises(TypeError, match="a workflow"):
            runtime.register(plain)  # type: ignore[arg-type]


async def test_two_workflows_with_one_name_are_refused(store: Store) -> None:
    @workflow(name="greet")
    async def other(ctx: Context, name: str) -> str:
        return name

    async with client(store, greet) as runtime:
        said = r"two workflows are called 'greet' and have version 1; give one another name or version: @workflow\(name="
        with pytest.raises(ValueError, match=said):
            runtime.register(other)
        with pytest.raises(ValueError, match="two workflows are called 'greet'"):
            await runtime.run(other, "Ada", id="g1")
        assert await runtime.run(greet, "Ada", id="g1") == Ok("hello Ada!")


async def test_one_workflow_may_be_registered_twice(store: Store) -> None:
    async with client(store, greet, greet) as runtime:
        runtime.register(greet)
        assert await runtime.run(greet, "Ada", id="g1") == Ok("hello Ada!")


async def test_start_of_a_client_only_writes_the_row(store: Store) -> None:
    async with client(store, greet) as runtime:
        run = await runtime.start(greet, "Ada", id="g1")
        assert await run.status() == "pending"
        assert await store.journal("g1") == []
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}
        assert await run == "hello Ada!"
        assert await run.status() == "completed"


async def test_the_same_id_with_the_same_input_is_the_same_run(store: Store) -> None:
    async with client(store, greet) as runtime:
        first, again = await runtime.start(greet, "Ada", id="g1"), await runtime.start(greet, "Ada", id="g1")
        assert first.id == again.id == "g1"
        assert [info.id for info in await runtime.list()] == ["g1"]


async def test_the_same_id_with_another_input_is_a_conflict(store: Store) -> None:
    async with client(store, greet, nap) as runtime:
        await runtime.start(greet, "Ada", id="g1")
        for verb in (runtime.start, runtime.run):
            with pytest.raises(RunConflict, match="'g1' exists already"):
                await verb(greet, "Eve", id="g1")
        with pytest.raises(RunConflict, match="'g1' exists already"):
            await runtime.run(nap, id="g1")
        assert await runtime.resume("g1") == Ok("hello Ada!")


async def test_resume_of_a_run_that_is_not_due_changes_nothing(store: Store) -> None:
    clock = ManualClock()
    async with client(store, nap, clock=clock, unload_grace=0) as runtime:
        suspended = await runtime.run(nap, id="n1")
        assert isinstance(suspended, Suspended)
        before = await store.get("n1")
        clock.advance("30m")
        assert await runtime.resume("n1") == suspended
        assert await runtime.run(nap, id="n1") == suspended
        assert await store.get("n1") == before
        clock.advance("30m")
        assert await runtime.resume("n1") == Ok("awake")


async def test_resume_does_not_move_an_untimed_wait(store: Store) -> None:
    async with client(store, ask, unload_grace=0) as runtime:
        waiting = Suspended("a1", None, (WaitingFor("signal", "answer"),))
        assert await runtime.run(ask, id="a1") == waiting
        assert await runtime.resume("a1") == waiting
        await runtime.signal("a1", "answer", {"approved": True})
        assert await runtime.resume("a1") == Ok({"approved": True})


async def test_resume_of_an_ended_run_gives_its_outcome_also_where_its_workflow_is_unknown(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.run(greet, "Ada", id="g1")
        await runtime.start(greet, "Eve", id="g2")
    async with client(store) as stranger:
        assert await stranger.resume("g1") == Ok("hello Ada!")
        with pytest.raises(LookupError, match="'greet' is not registered here"):
            await stranger.resume("g2")


async def test_a_run_that_ends_while_resume_looks_is_not_called_suspended(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.start(greet, "Ada", id="g1")
        look, is_first = store.get, True

        async def get(run_id: str) -> Any:
            nonlocal is_first
            row = await look(run_id)
            if is_first:  # another worker takes the run and ends it, just after it was looked at
                is_first = False
                claim = await store.acquire(run_id, 30)
                assert claim is not None
                await store.finish(claim.lease, "completed", b'"by another"')
            return row

        store.get = get  # type: ignore[method-assign]
        assert await runtime.resume("g1") == Ok("by another")


async def test_a_signal_is_kept_until_the_run_asks_for_it(store: Store) -> None:
    async with client(store, ask) as runtime:
        run = await runtime.start(ask, id="a1")
        await runtime.signal("a1", "answer", 1, dedupe="webhook-1")
        await runtime.signal("a1", "answer", 1, dedupe="webhook-1")
        await run.signal("answer", 2)
        assert await runtime.resume("a1") == Ok(1)
        assert [row.payload for row in await store.inbox("a1")] == [b"2"]


async def test_signals_to_unknown_and_ended_runs_are_refused(store: Store) -> None:
    async with client(store, greet) as runtime:
        with pytest.raises(RunNotFound, match="no run 'g1'"):
            await runtime.signal("g1", "answer")
        await runtime.run(greet, "Ada", id="g1")
        with pytest.raises(RunFinished, match=r"'g1' has ended \(completed\)"):
            await runtime.signal("g1", "answer")


async def test_a_signal_that_cannot_be_stored_is_refused(store: Store) -> None:
    async with client(store, ask) as runtime:
        await runtime.start(ask, id="a1")
        with pytest.raises(InvalidInput, match="signal answer"):
            await runtime.signal("a1", "answer", object())
        with pytest.raises(ValueError, match="a signal's name"):
            await runtime.signal("a1", "", 1)
        assert await store.inbox("a1") == []


async def test_get_gives_a_run_or_none(store: Store) -> None:
    async with client(store, greet) as runtime:
        assert await runtime.get("g1") is None
        await runtime.run(greet, "Ada", id="g1")
        run = await runtime.get("g1")
        assert run is not None
        assert repr(run) == "<Run g1>"
        assert await run == "hello Ada!"
        assert await run.outcome() == Ok("hello Ada!")


async def test_a_run_that_was_deleted_is_not_found(store: Store) -> None:
    async with client(store, greet) as runtime:
        run = await runtime.start(greet, "Ada", id="g1")
        await runtime.delete("g1")
        await runtime.delete("g1")
        assert await runtime.get("g1") is None
        for verb in (run.status, run.outcome, run.cancel, lambda: run.signal("x"), lambda: runtime.resume("g1")):
            with pytest.raises(RunNotFound, match="'g1'"):
                await verb()
        with pytest.raises(RunNotFound):
            await run


async def test_list_is_filtered_and_paged_by_a_cursor(store: Store) -> None:
    clock = ManualClock()
    async with client(store, greet, nap, clock=clock, unload_grace=0) as runtime:
        for number in range(7):
            clock.advance("1s" if number % 3 else 0)  # some share an instant
            await runtime.start(greet, "Ada", id=f"g{number}")
        await runtime.run(nap, id="n1")
        everything = await runtime.list()
        assert len(everything) == 8
        pages, cursor = [], None
        while page := await runtime.list(limit=3, cursor=cursor):
            pages.append(page)
            cursor = page[-1]
        assert [len(page) for page in pages] == [3, 3, 2]
        assert [info for page in pages for info in page] == everything
        assert {info.id for info in await runtime.list(workflow=nap)} == {"n1"}
        assert {info.id for info in await runtime.list(workflow="nap")} == {"n1"}
        assert {info.id for info in await runtime.list(status="suspended")} == {"n1"}
        assert {info.id for info in await runtime.list(prefix="g", limit=2, status="pending")} <= {f"g{n}" for n in range(7)}
        assert await runtime.list(prefix="%") == []
        assert everything[0].updated_at.tzinfo is not None


async def test_runs_are_selected_by_what_they_are(store: Store) -> None:
    clock = ManualClock()
    async with client(store, greet, ask, clock=clock, unload_grace=0) as runtime:
        await runtime.start(greet, "Ada", id="g1", queue="mail", priority=3, metadata={"customer": "c-7", "vip": True})
        clock.advance("1h")
        await runtime.run(ask, id="a1", metadata={"customer": "c-8"})

        async def ids(**selection: Any) -> list[str]:
            found = [info.id for info in await runtime.list(**selection)]
            assert await runtime.count(**selection) == len(found)
            return found

        assert await ids() == ["a1", "g1"]
        assert await ids(status=["pending", "failed"]) == ["g1"]
        assert await ids(status={"suspended"}, workflow=ask) == ["a1"]
        assert await ids(queue="mail") == ["g1"]
        assert await ids(updated_after="30m") == ["a1"]
        assert await ids(updated_before=timedelta(minutes=30)) == ["g1"]
        assert await ids(updated_after=moment(clock.now()), updated_before=None) == ["a1"]
        assert await ids(metadata={"customer": "c-7"}) == ["g1"]
        assert await ids(metadata={"vip": 1}) == []
        waiting, new = await runtime.list()
        assert waiting.waiting_for == (WaitingFor("signal", "answer"),)
        assert (waiting.metadata, waiting.queue) == ({"customer": "c-8"}, "default")
        assert (new.priority, new.attempts, new.error, new.created_at) == (3, 0, None, waiting.created_at - timedelta(hours=1))


@pytest.mark.parametrize(
    ("selection", "error", "text"),
    [
        ({"state": "failed"}, TypeError, "runs cannot be selected by state; by workflow, status, queue, prefix,"),
        ({"status": "ended"}, ValueError, "a status is one of pending, running, suspended, completed, .*, not 'ended'"),
        ({"status": ()}, ValueError, "status is empty, which no run can have; leave it out for any status"),
        ({"status": 3}, TypeError, "status is one of pending, .*, or several of them, not 3"),
        ({"workflow": 3}, TypeError, "workflow is a workflow or its name, not 3"),
        ({"queue": ""}, ValueError, "a queue's name must have 1 to 1024 UTF-8 bytes"),
        ({"updated_after": datetime(2026, 1, 1)}, ValueError, "has no time zone"),  # noqa: DTZ001 - that is the mistake
        ({"updated_before": "yesterday"}, ValueError, "updated_before 'yesterday' is not a length of time"),
        ({"updated_after": None, "updated_before": []}, TypeError, "updated_before is a datetime, or how long ago"),
        ({"metadata": {}}, ValueError, "metadata is a dict with one key"),
        ({"metadata": {"a": 1, "b": 2}}, ValueError, "metadata is a dict with one key"),
        ({"metadata": {"a": [1]}}, TypeError, "metadata must be one key and a str, a number, a bool or None"),
        ({"metadata": {"a": float("nan")}}, ValueError, "no run has"),
    ],
)
async def test_a_selection_that_makes_no_sense_is_refused(
    store: Store, selection: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with client(store) as runtime:
        for verb in (runtime.list, runtime.count, runtime.stuck_runs):
            with pytest.raises(error, match=text):
                await verb(**selection)


async def test_stuck_runs_have_a_problem_or_were_not_claimed_in_time(store: Store) -> None:
    clock = ManualClock()
    async with client(store, greet, clock=clock) as runtime:
        await runtime.start(greet, "Ada", id="g1", queue="mail")
        assert await runtime.stuck_runs() == []
        clock.advance("61s")
        (stuck,) = await runtime.stuck_runs(queue="mail")
        assert (stuck.id, stuck.problem) == ("g1", "due for 61 s, and no worker has claimed it")
        assert await runtime.stuck_runs(queue="default") == []


async def test_cancel_ends_a_suspended_run_when_it_is_driven_next(store: Store) -> None:
    async with client(store, ask, unload_grace=0) as runtime:
        await runtime.run(ask, id="a1")
        await runtime.cancel("a1")
        (outcome,) = (await runtime.sweep()).values()
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        run = await runtime.get("a1")
        assert run is not None
        assert await run.status() == "cancelled"
        with pytest.raises(RunCancelled, match="'a1' was cancelled"):
            await run
        with pytest.raises(RunFinished, match="cancelled"):
            await runtime.cancel("a1")


async def test_cancel_of_an_unknown_run_is_not_found(store: Store) -> None:
    async with client(store) as runtime:
        with pytest.raises(RunNotFound):
            await runtime.cancel("a1")


async def test_cancel_reaches_a_run_that_is_being_driven_here(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow) as runtime:
        driving = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        await runtime.cancel("r1")
        outcome = await driving
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert gate.cancelled == 1


async def test_retry_goes_on_after_what_failed(store: Store) -> None:
    flaky = Flaky()
    async with client(store, flaky.flow) as runtime:
        outcome = await runtime.run(flaky.flow, id="f1")
        assert isinstance(outcome, Err)
        assert str(outcome.error) == "not today"
        again = await runtime.run(flaky.flow, id="f1")
        assert isinstance(again, Err)
        assert flaky.calls == ["first", "second"]
        flaky.is_broken = False
        run = await runtime.retry("f1")
        assert await run.status() == "pending"
        assert await runtime.resume("f1") == Ok("first second")
        assert flaky.calls == ["first", "second", "second"]


async def test_retry_of_what_has_not_failed_is_refused(store: Store) -> None:
    async with client(store, greet, ask, unload_grace=0) as runtime:
        await runtime.run(greet, "Ada", id="g1")
        with pytest.raises(RunFinished, match="completed"):
            await runtime.retry("g1")
        await runtime.run(ask, id="a1")
        with pytest.raises(LeaseHeld, match="'a1' is held by"):
            await runtime.retry("a1")
        with pytest.raises(RunNotFound):
            await runtime.retry("x1")


async def test_a_run_on_hold_is_not_driven_until_unhold(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.start(greet, "Ada", id="g1")
        await runtime.hold("g1")
        assert await runtime.sweep() == {}
        for verb in (lambda: runtime.resume("g1"), lambda: runtime.run(greet, "Ada", id="g1")):
            with pytest.raises(LeaseHeld, match="operator"):
                await verb()
        await runtime.unhold("g1")
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}
        with pytest.raises(RunNotFound):
            await runtime.hold("x1")
        with pytest.raises(RunNotFound):
            await runtime.unhold("x1")


async def test_a_run_with_a_problem_shows_it_and_goes_on_when_a_worker_can_drive_it(store: Store) -> None:
    async with client(store, greet) as runtime:
        run = await runtime.start(greet, "Ada", id="g1")
        claim = await store.acquire("g1", 30)
        assert claim is not None
        assert await run.problem() is None
        await store.release(claim.lease, wake_at=claim.lease.until, problem="step 'greet' has another name now")
        assert (await run.problem(), await run.status()) == ("step 'greet' has another name now", "pending")
        assert [info.problem for info in await runtime.list()] == ["step 'greet' has another name now"]
        assert await runtime.sweep() == {}
        await runtime.hold("g1")
        await runtime.unhold("g1")
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}
        assert await run.problem() is None


async def test_purge_deletes_ended_runs_that_are_old_enough(store: Store) -> None:
    clock = ManualClock()
    async with client(store, greet, nap, clock=clock, unload_grace=0) as runtime:
        await runtime.run(greet, "Ada", id="old")
        await runtime.run(nap, id="waiting")
        clock.advance("1d")
        await runtime.run(greet, "Ada", id="new")
        assert await runtime.purge("2d") == 0
        assert await runtime.purge(timedelta(hours=12)) == 1
        assert {info.id for info in await runtime.list()} == {"waiting", "new"}


@pytest.mark.parametrize("verb", ["resume", "get", "cancel", "retry", "hold", "unhold", "delete"])
@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800", "x" * 1025, "é" * 513])
async def test_a_bad_id_is_refused_by_every_verb(store: Store, verb: str, bad: str) -> None:
    async with client(store) as runtime:
        with pytest.raises(ValueError, match="a run's id"):
            await getattr(runtime, verb)(bad)
        with pytest.raises(TypeError, match="a run's id must be a str, not int"):
            await getattr(runtime, verb)(7)


async def test_outcome_returns_at_the_first_suspension_and_awaiting_goes_through_it(store: Store) -> None:
    async with client(store, ask, unload_grace=0) as runtime:
        run = await runtime.start(ask, id="a1")
        await runtime.sweep()
        assert await run.outcome() == Suspended("a1", None, (WaitingFor("signal", "answer"),))
        waiting = asyncio.ensure_future(run._value())
        await run.signal("answer", "yes")
        await runtime.sweep()
        assert await waiting == "yes"


async def test_now_of_a_list_is_aware_utc(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.start(greet, "Ada")
        (info,) = await runtime.list()
        assert abs(datetime.now(UTC) - info.updated_at) < HOUR
