"""Children: runs that belong to a run. What they give, what becomes of them when it ends, and that nothing is started twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from perdure import Context, Err, Ok, Suspended, WaitingFor, Workflow, workflow
from perdure.backends.memory.store import MemoryStore
from perdure.engine.child_runs import child_id
from perdure.errors import (
    DuplicateStep,
    InvalidInput,
    PersistenceError,
    RunCancelled,
    RunConflict,
    RunDead,
    RunNotFound,
    StepFailed,
)
from perdure.model.ids import MAX_ID_BYTES
from perdure.model.records import Awaited
from perdure.result import Outcome
from tests.engine.replays import raised, stored
from tests.engine.worlds import World, world

ran: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


async def note(what: str) -> str:
    ran[what] += 1
    return what


@workflow
async def double(ctx: Context, n: int) -> int:
    await ctx.step(note, f"double {n}")
    return 2 * n


@workflow
async def refuse(ctx: Context, why: str) -> int:
    await ctx.step(note, f"refuse {why}")
    raise PermissionError(why)


@workflow
async def give_err(ctx: Context) -> Ok[int] | Err[str]:
    return Err("no stock")


@workflow
async def wait(ctx: Context, word: str = "go") -> str:
    await ctx.step("before", note, f"wait {word}")
    answer: str = await ctx.wait_for_signal(word)
    await ctx.step("after", note, f"told {word}")
    return answer


CHILDREN = (double, refuse, give_err, wait)
Body = Callable[[Context], Coroutine[Any, Any, Any]]


async def settle(here: World, run_id: str = "run", *, seconds: int = 0) -> Outcome[Any]:
    """What the run has come to when all that comes due within so many seconds was driven."""
    for _ in range(seconds + 1):
        while await here.runtime.sweep():
            pass
        here.clock.advance("1s")
    return await here.runtime.resume(run_id)


async def parent_of(body: Body, here: World, run_id: str = "run") -> Outcome[Any]:
    """What a parent with this body comes to."""
    flow = Workflow(f"parent of {run_id}", body)
    here.runtime.register(flow)
    await here.runtime.start(flow, id=run_id)
    return await settle(here, run_id)


async def statuses(here: World) -> dict[str, str]:
    return {info.id: info.status for info in await here.runtime.list()}


async def test_a_child_gives_its_value_and_its_parent_is_not_in_memory_meanwhile() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[Any]:
            by_name = await double(1)
            return [by_name, await ctx.child(double, 2, key="second"), await ctx.child(double, 3, key="third", id="mine")]

        assert await parent_of(body, here) == Ok([2, 4, 6])
        assert await statuses(here) == {
            "run": "completed",
            "run/double": "completed",
            "run/second": "completed",
            "mine": "completed",
        }
        assert ran == {"double 1": 1, "double 2": 1, "double 3": 1}
        row = stored(here, "run/second").row
        assert (row.parent_id, row.parent_key, row.queue, row.priority) == ("run", "second", "default", 0)


async def test_the_parent_is_a_row_that_waits_for_its_child() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            return await ctx.child(wait)

        assert await parent_of(body, here) == Suspended("run", None, (WaitingFor("child", "wait"),))
        assert stored(here).row.waiting_for == (Awaited("child", "wait"),)
        await here.runtime.signal("run/wait", "go", "now")
        assert await settle(here) == Ok("now")
        assert not await here.runtime.store.inbox("run")


async def test_options_are_those_of_the_parent_or_of_the_call() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> None:
            ctx.start_child(double, 1, key="a", detached=True)
            ctx.start_child(double, 1, key="b", detached=True, queue="other", priority=1, metadata={"of": "b"}, deadline="1h")

        flow = Workflow("parent", body)
        here.runtime.register(flow)
        await here.runtime.start(flow, id="run", queue="fast", priority=7)
        await here.runtime.sweep()
        a, b = stored(here, "run/a").row, stored(here, "run/b").row
        assert ((a.queue, a.priority), (b.queue, b.priority, b.metadata)) == (("fast", 7), ("other", 1, b'{"of":"b"}'))
        assert (a.deadline, b.deadline is not None) == (None, True)


async def test_an_error_of_a_child_is_raised_as_a_step_raises_it() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[str]:
            refused = await raised(ctx.child(refuse, "never"))
            out = await raised(ctx.child(give_err))
            assert isinstance(out, StepFailed)
            assert out.was_returned
            return [f"{type(refused).__name__}: {refused}", str(out.error)]

        assert await parent_of(body, here) == Ok(["PermissionError: never", "no stock"])


async def test_a_childs_error_fails_the_parent_that_does_not_catch_it() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> None:
            await ctx.child(refuse, "never")

        outcome = await parent_of(body, here)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, PermissionError)

        async def returns(ctx: Context) -> None:
            await ctx.child(give_err)

        assert await parent_of(returns, here, "other") == Err("no stock", step="give_err")


async def test_a_child_that_was_cancelled_or_is_dead_says_so() -> None:
    async with world(*CHILDREN, max_attempts=1) as here:

        async def body(ctx: Context) -> list[str]:
            errors = [await raised(ctx.child(wait, word, key=word)) for word in ("cancelled", "dead")]
            assert isinstance(errors[0], RunCancelled)
            assert isinstance(errors[1], RunDead)
            return [str(error.args[0]) for error in errors]

        await parent_of(body, here)
        await here.runtime.cancel("run/cancelled")
        await settle(here)
        await here.runtime.signal("run/dead", "dead", 1)
        for _ in range(2):  # workers that die with it
            assert await here.runtime.store.acquire("run/dead", 1.0, now=here.clock.now()) is not None
            here.clock.advance("2s")
        assert await settle(here) == Ok(["run/cancelled", "run/dead"])


async def test_a_handle_is_awaited_later_and_again() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[Any]:
            first, second = ctx.start_child(double, 1, key="1"), ctx.start_child(double, 2, key="2")
            assert (first.id, repr(second)) == ("run/1", "<Child run/2>")
            return [await second, await first, await first]

        assert await parent_of(body, here) == Ok([4, 2, 2])
        assert ran == {"double 1": 1, "double 2": 1}


async def test_a_handle_can_cancel_its_child() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            child = ctx.start_child(wait)
            child.cancel()
            child.cancel()
            return type(await raised(child)).__name__

        await parent_of(body, here)
        assert await settle(here) == Ok("RunCancelled")


async def test_children_that_were_not_awaited_are_awaited_at_the_end() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            ctx.start_child(double, 1)
            ctx.start_child(wait)
            return "done"

        assert isinstance(await parent_of(body, here), Suspended)
        await here.runtime.signal("run/wait", "go", 1)
        assert await settle(here) == Ok("done")
        assert set((await statuses(here)).values()) == {"completed"}


async def test_an_error_of_a_child_that_was_not_awaited_fails_its_parent_and_stops_the_others() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            ctx.start_child(refuse, "never")
            ctx.start_child(wait)
            return "done"

        await parent_of(body, here)
        outcome = await settle(here)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, PermissionError)
        assert await statuses(here) == {"run": "failed", "run/refuse": "failed", "run/wait": "cancelled"}


async def test_a_parent_that_fails_stops_its_children_and_ends_after_them() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            ctx.start_child(wait)
            ctx.start_child(wait, "on", key="on", detached=True)
            await ctx.child(double, 1)
            raise LookupError("lost")

        outcome = await parent_of(body, here)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, LookupError)
        assert await statuses(here) == {
            "run": "failed", "run/wait": "cancelled", "run/on": "suspended", "run/double": "completed",
        }  # fmt: skip


async def test_cancelling_a_parent_stops_its_children_and_theirs() -> None:
    async with world(*CHILDREN) as here:

        async def middle(ctx: Context) -> str:
            return await ctx.child(wait, key="leaf")

        inner = Workflow("middle", middle)
        here.runtime.register(inner)

        async def body(ctx: Context) -> str:
            alone = ctx.start_child(wait, "alone", key="alone", detached=True)
            return await inner() + await alone

        await parent_of(body, here)
        await here.runtime.cancel("run")
        await settle(here, seconds=3)
        assert await statuses(here) == {
            "run": "cancelled", "run/middle": "cancelled", "run/middle/leaf": "cancelled", "run/alone": "suspended",
        }  # fmt: skip


async def test_a_cancelled_parent_ends_after_its_children() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            return await ctx.child(wait)

        await parent_of(body, here)
        claim = await here.runtime.store.acquire("run/wait", 5.0, due_only=False, now=here.clock.now())
        assert claim is not None  # another worker drives the child, and is slow to see that it was cancelled
        await here.runtime.cancel("run")
        await settle(here, seconds=2)
        assert (await statuses(here))["run"] == "pending"
        await here.runtime.store.finish(claim.lease, "cancelled", b"null", now=here.clock.now())
        await settle(here, seconds=1)
        assert await statuses(here) == {"run": "cancelled", "run/wait": "cancelled"}


@pytest.mark.parametrize("how", ["race", "timeout", "task", "group"])
async def test_a_child_that_the_body_gives_up_is_stopped(how: str) -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            if how == "race":
                return str(await ctx.race(ctx.child(wait), ctx.child(double, 1)))
            if how == "timeout":
                try:
                    async with ctx.timeout("limit", "1h"):
                        await ctx.child(wait)
                except TimeoutError:
                    return "late"
            if how == "task":
                task = asyncio.create_task(ctx.child(wait))
                await ctx.child(double, 1)
                task.cancel()
                return type((await asyncio.gather(task, return_exceptions=True))[0]).__name__
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(ctx.child(wait))
                    group.create_task(ctx.child(refuse, "never"))
            except ExceptionGroup as errors:
                return str(errors.exceptions)
            raise AssertionError

        await parent_of(body, here)
        if how == "timeout":
            here.clock.advance("1h")
        outcome = await settle(here)
        expected = {"race": "2", "timeout": "late", "task": "CancelledError", "group": "(PermissionError('never'),)"}
        assert outcome == Ok(expected[how])
        assert (await statuses(here))["run/wait"] == "cancelled"


@pytest.mark.parametrize("how", ["timeout", "task"])
async def test_a_detached_child_goes_on_when_the_body_gives_up_its_call(how: str) -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            async def look() -> str:
                return await ctx.start_child(wait, detached=True)

            if how == "timeout":
                try:
                    async with ctx.timeout("limit", "1h"):
                        return await look()
                except TimeoutError:
                    return "given up"
            task = asyncio.create_task(look())
            await ctx.child(double, 1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return "given up"

        await parent_of(body, here)
        if how == "timeout":
            here.clock.advance("1h")
        assert await settle(here) == Ok("given up")
        assert (await statuses(here))["run/wait"] == "suspended"
        await here.runtime.signal("run/wait", "go", "well")
        assert await settle(here, "run/wait") == Ok("well")


async def test_a_key_that_was_given_up_starts_another_child() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[Any]:
            try:
                async with ctx.timeout("limit", "1m"):
                    return [await ctx.child(wait)]
            except TimeoutError:
                return [await ctx.child(wait)]

        await parent_of(body, here)
        here.clock.advance("1m")
        await settle(here)
        assert await statuses(here) == {"run": "suspended", "run/wait": "cancelled", "run/%25%7E2%2Fwait": "suspended"}
        await here.runtime.signal("run/%25%7E2%2Fwait", "go", "again")
        assert await settle(here) == Ok(["again"])


async def test_a_retry_lets_a_failed_child_go_on_and_keeps_a_completed_one() -> None:
    fails = [True]

    async def work(ctx: Context, n: int) -> int:
        await ctx.step(note, f"first {n}")
        await ctx.step("second", check, n)
        return n

    async def check(n: int) -> None:
        if n == 2 and fails:
            raise OSError("down")

    part = Workflow("work", work)
    async with world(*CHILDREN, part) as here:

        async def body(ctx: Context) -> list[Any]:
            waiting = ctx.start_child(wait)
            return [await ctx.child(part, 1, key="1"), await ctx.child(part, 2, key="2"), await waiting]

        outcome = await parent_of(body, here)
        assert isinstance(outcome, Err)
        assert await statuses(here) == {"run": "failed", "run/1": "completed", "run/2": "failed", "run/wait": "cancelled"}
        fails.clear()
        await here.runtime.retry("run")
        await settle(here)
        assert await statuses(here) == {"run": "suspended", "run/1": "completed", "run/2": "completed", "run/wait": "suspended"}
        await here.runtime.signal("run/wait", "go", 3)
        assert await settle(here) == Ok([1, 2, 3])
        assert ran == {"first 1": 1, "first 2": 1, "wait go": 1, "told go": 1}


class FailsOnce(MemoryStore):
    """A store that is down when a child is reopened for the first time."""

    is_down = False

    async def reopen(self, run_id: str, *args: Any, **options: Any) -> None:
        if self.is_down and "/" in run_id:
            self.is_down = False
            raise PersistenceError("the child could not be reopened", "down")
        await super().reopen(run_id, *args, **options)


async def test_a_retry_that_was_interrupted_reopens_the_child_all_the_same() -> None:
    fails, store = [True], FailsOnce()

    async def work(ctx: Context) -> str:
        if fails:
            raise OSError("down")
        return "up"

    part = Workflow("work", work)
    async with world(part, store=store) as here:

        async def body(ctx: Context) -> str:
            return await ctx.child(part)

        assert isinstance(await parent_of(body, here), Err)
        fails.clear()
        store.is_down = True
        await here.runtime.retry("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)  # the attempt, not the run
        opened = [entry for entry in await store.journal("run") if entry.phase == "open"]
        assert len(opened) == 2  # the intent to start it again is recorded, and nothing was reopened
        assert (await statuses(here))["run/work"] == "failed"
        assert await settle(here, seconds=5) == Ok("up")


async def test_a_retry_lets_the_children_of_a_map_go_on_that_the_failure_stopped() -> None:
    fails = [True]

    async def work(ctx: Context, n: int) -> int:
        if n == 2 and fails:
            raise OSError("down")
        return int(await ctx.wait_for_signal("go")) if n == 1 else n

    part = Workflow("work", work)
    async with world(part) as here:

        async def body(ctx: Context) -> list[int]:
            return await ctx.map(part, [0, 1, 2])

        outcome = await parent_of(body, here)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, OSError)
        assert await statuses(here) == {
            "run": "failed", "run/work[0]": "completed", "run/work[1]": "cancelled", "run/work[2]": "failed",
        }  # fmt: skip
        fails.clear()
        await here.runtime.retry("run")
        await settle(here)
        await here.runtime.signal("run/work[1]", "go", 7)
        assert await settle(here) == Ok([0, 7, 2])


async def test_a_retry_of_a_cancelled_parent_lets_its_children_go_on() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[Any]:
            return [await ctx.child(double, 1), await ctx.child(wait)]

        await parent_of(body, here)
        await here.runtime.cancel("run")
        await settle(here, seconds=2)
        assert await statuses(here) == {"run": "cancelled", "run/double": "completed", "run/wait": "cancelled"}
        await here.runtime.retry("run")
        await settle(here)
        await here.runtime.signal("run/wait", "go", "on")
        assert await settle(here) == Ok([2, "on"])
        assert ran["double 1"] == ran["wait go"] == 1


async def test_a_child_that_ended_while_its_row_was_lost_is_not_waited_for() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[Any]:
            return [await ctx.child(wait), await ctx.child(double, 1)]

        await parent_of(body, here)
        await here.runtime.signal("run/wait", "go", 1)
        stored(here).inbox.clear()  # nothing that it was told is there
        await here.runtime.sweep()
        stored(here).inbox.clear()
        assert await settle(here) == Ok([1, 2])


async def test_a_row_that_is_stale_wakes_the_parent_for_nothing() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            return await ctx.child(wait)

        await parent_of(body, here)
        stale = stored(here)
        stale.deliver("wait", b"null", "child", now=here.clock.now())
        assert await settle(here) == Suspended("run", None, (WaitingFor("child", "wait"),))
        await here.runtime.signal("run/wait", "go", "now")
        assert await settle(here) == Ok("now")
        assert not await here.runtime.store.inbox("run")


async def test_a_child_that_was_retried_by_hand_counts_as_it_ends_then() -> None:
    fails = [True]

    async def work(ctx: Context) -> str:
        if fails:
            raise OSError("down")
        return "up"

    part = Workflow("work", work)
    async with world(part) as here:

        async def body(ctx: Context) -> str:
            return await ctx.child(part)

        flow = Workflow("parent", body)
        here.runtime.register(flow)
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        await here.runtime.hold("run")
        await settle(here, "run/work")
        fails.clear()
        await here.runtime.retry("run/work")
        await here.runtime.unhold("run")
        assert await settle(here) == Ok("up")


async def test_a_child_that_was_deleted_after_its_end_is_not_started_again() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> str:
            return type(await raised(ctx.child(double, 1))).__name__

        flow = Workflow("parent", body)
        here.runtime.register(flow)
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        await here.runtime.hold("run")
        await settle(here, "run/double")
        await here.runtime.delete("run/double")
        await here.runtime.unhold("run")
        assert await settle(here) == Ok(RunNotFound.__name__)
        assert ran == {"double 1": 1}


async def test_a_child_that_was_not_created_before_a_crash_is_created_then() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> int:
            return await ctx.child(double, 1)

        flow = Workflow("parent", body)
        here.runtime.register(flow)
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        await here.runtime.delete("run/double")  # as if it had never been there
        here.clock.advance("1s")
        await here.runtime.store.signal("run", "wake up", b"1", now=here.clock.now())
        stored(here).wake(here.clock.now())
        assert await settle(here) == Ok(2)


async def test_a_child_that_changed_code_does_not_start_any_more_is_stopped() -> None:
    async with world(*CHILDREN) as here:

        async def before(ctx: Context) -> None:
            await asyncio.gather(ctx.child(wait), ctx.wait_for_signal("deployed"))

        await parent_of(before, here)
        assert await statuses(here) == {"run": "suspended", "run/wait": "suspended"}
        store = here.runtime.store

        async def after(ctx: Context) -> str:
            return "without it"

        flow = Workflow("parent of run", after, on_definition_change="ignore")
        async with world(*CHILDREN, flow, store=store) as there:
            there.clock.advance("1m")  # beyond what the other clock has said
            await there.runtime.signal("run", "deployed")
            assert await settle(there) == Ok("without it")
            assert await statuses(there) == {"run": "completed", "run/wait": "cancelled"}


async def test_a_child_of_another_workflow_under_the_same_key_is_not_taken_for_the_child() -> None:
    """The code has changed: what the first workflow gives is no value of the second."""
    async with world(*CHILDREN) as here:

        async def before(ctx: Context) -> str:
            return await ctx.child(wait, key="child")

        await parent_of(before, here)
        store = here.runtime.store

        async def after(ctx: Context) -> int:
            return await ctx.child(double, 1, key="child")

        flow = Workflow("parent of run", after, on_definition_change="ignore", on_changed_arguments="ignore")
        async with world(*CHILDREN, flow, store=store) as there:
            await there.runtime.signal("run/child", "go", "of the first")
            outcome = await settle(there)
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, RunConflict)
            assert "workflow 'wait'" in str(outcome.error)


async def test_an_id_that_belongs_to_another_run_is_refused() -> None:
    async with world(*CHILDREN) as here:
        await here.runtime.start(double, 1, id="taken")

        async def body(ctx: Context) -> list[str]:
            errors = [
                await raised(ctx.child(double, 1, key="same", id="taken")),
                await raised(ctx.child(double, 2, key="input", id="taken")),
                await raised(ctx.child(wait, key="workflow", id="taken")),
            ]
            assert all(isinstance(error, RunConflict) for error in errors)
            await ctx.sleep("nap", "1m")
            return [str(error) for error in errors]

        await parent_of(body, here)
        here.clock.advance("1m")
        outcome = await settle(here)
        assert "exists already with no parent" in outcome.unwrap()[0]
        assert "input" in outcome.unwrap()[1]


async def test_what_is_no_child_is_refused_before_anything_is_written() -> None:
    async def body(ctx: Context) -> list[str]:
        anything: Any = ctx
        errors = [
            await raised(anything.step(double, 1)),
            await raised(anything.child(note, "x")),
            await raised(anything.child(double, "text")),
            await raised(anything.child(double, 1, store="memory://")),
            await raised(anything.map(double, [1], id="x")),
        ]
        return [f"{type(error).__name__}: {error}" for error in errors]

    async with world(*CHILDREN) as here:
        outcome = await parent_of(body, here)
        texts = outcome.unwrap()
        assert "await ctx.child(double, ...)" in texts[0]
        assert "ctx.step" in texts[1]
        assert texts[2].startswith(InvalidInput.__name__)
        assert "does not take store" in texts[3]
        assert "pass key=" in texts[4]
        assert list(await statuses(here)) == ["run"]


async def test_a_second_child_of_one_name_needs_a_key() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> int:
            await double(1)
            return await double(2)

        outcome = await parent_of(body, here)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)


async def test_scopes_keep_children_apart() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> list[int]:
            return [await ctx.scope(name).child(double, 1) for name in ("a", "b")]

        assert await parent_of(body, here) == Ok([2, 2])
        assert set(await statuses(here)) == {"run", "run/%2Fa%2Fdouble", "run/%2Fb%2Fdouble"}


def test_ids_of_children_are_unique_and_never_too_long() -> None:
    keys = ["a", "a/b", "a%2Fb", "%a", "%25a", "k" * 1024, "k" * 1023 + "l", "ü" * 512, "%~2/a", "a%~1"]
    ids = [child_id(parent, key, generation) for parent in ("r", "r/a", "x" * 1024) for key in keys for generation in (0, 1)]
    assert len(set(ids)) == len(ids)
    assert max(len(each.encode()) for each in ids) <= MAX_ID_BYTES
    assert child_id("order-1", "ship") == "order-1/ship"


async def test_children_without_a_store_are_in_memory_too() -> None:
    async def body(ctx: Context) -> list[Any]:
        waiting = ctx.start_child(wait)
        numbers = await ctx.map(double, [1, 2])
        refused = await raised(ctx.child(refuse, "never"))
        raced = await ctx.race(ctx.child(wait, "x", key="x"), ctx.child(double, 5))
        waiting.cancel()
        return [*numbers, str(refused), raced, type(await raised(waiting)).__name__]

    assert await Workflow("parent", body)() == [2, 4, "never", 10, "RunCancelled"]
    assert ran["told go"] == 0


async def test_children_of_a_run_without_a_worker_are_driven_for_it() -> None:
    async def nap(ctx: Context, n: int) -> int:
        await ctx.sleep("nap", "50ms")
        return n

    napping = Workflow("nap", nap)

    async def body(ctx: Context) -> list[Any]:
        return [await ctx.child(napping, 1), *await ctx.map(double, [1, 2])]

    flow = Workflow("parent", body)
    assert await flow.run() == Ok([1, 2, 4])
    run = await flow.start()
    assert await run == [1, 2, 4]


async def test_an_event_tells_of_a_child_as_of_a_step() -> None:
    told: list[str] = []

    def listen(event: Any) -> None:
        if hasattr(event, "key"):
            told.append(f"{event.type} {event.key}")

    async with world(*CHILDREN, on_event=listen) as here:

        async def body(ctx: Context) -> int:
            return await ctx.child(double, 1, key="child")

        assert await parent_of(body, here) == Ok(2)
        assert [each for each in told if each.endswith("child")] == [
            "step_start child", "step_success child", "step_complete child",
        ]  # fmt: skip


async def test_a_parent_in_a_new_generation_has_other_children() -> None:
    async with world(*CHILDREN) as here:

        async def body(ctx: Context) -> int:
            return await ctx.child(double, 1)

        flow = Workflow("parent", body)
        here.runtime.register(flow)
        await here.runtime.start(flow, id="run")
        stored(here).row = msgspec.structs.replace(stored(here).row, generation=2)
        assert await settle(here) == Ok(2)
        assert "run;generation=2/double" in await statuses(here)
