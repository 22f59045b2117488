"""Approvals: a person decides once, what is approved happens exactly then, and the clock is one of those who decide."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import (
    ApprovalAmbiguous,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalNotFound,
    Approved,
    Context,
    DuplicateStep,
    Err,
    Expired,
    InvalidInput,
    NotAssigned,
    Ok,
    PendingApproval,
    Rejected,
    RunFinished,
    RunNotFound,
    Runtime,
    Snapshot,
    Suspended,
    stores,
    workflow,
)
from perdure.model.journal import Entry
from tests.campaign import times
from tests.engine.approving import SECRET, Draft, Press, desk
from tests.engine.replays import raised, twice
from tests.engine.worlds import world
from tests.simulation import LoopClock, SlowStore, simulate

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


async def test_what_is_approved_is_done_once_and_who_and_when_is_recorded() -> None:
    async with desk() as here:
        await here.ask("run")
        assert here.press.published == []
        here.clock.advance("10m")
        await here.runtime.approve("run", "publish", by="ada")
        assert await here.runtime.sweep() == {"run": Ok("ada approved news of run at 00:10")}
        assert here.press.published == [Draft("news of run", 3)]
        recorded = (await (await here.runtime.start(here.press.workflow, "news of run", id="run")).snapshot()).steps[
            "approve:publish"
        ]
        assert (recorded.ok, recorded.value["decision"], recorded.value["by"]) == (True, "approved", "ada")
        assert recorded.value["at"] == "2026-01-01T00:10:00Z"


async def test_what_is_rejected_is_not_done_and_the_reason_is_recorded() -> None:
    async with desk() as here:
        await here.ask("run")
        await here.runtime.reject("run", "publish", by="bob", reason="too short")
        assert await here.runtime.sweep() == {"run": Ok("bob rejected it at 00:00: too short")}
        assert here.press.published == []


async def test_what_nobody_decides_expires_and_is_not_done() -> None:
    async with desk() as here:
        await here.ask("run")
        assert await here.later("59m") == {}
        assert await here.later("2h") == {"run": Ok("expired at 01:00")}
        assert here.press.published == []
        assert [entry.ok for entry in await here.runtime.store.journal("run")] == [True, True], "no error was recorded"


@pytest.mark.parametrize("edited", [Draft("better", 7), {"title": "better", "words": 7}, {"title": "better"}], ids=str)
async def test_an_edited_payload_is_what_is_approved(edited: Any) -> None:
    async with desk() as here:
        await here.ask("run")
        await here.runtime.approve("run", "publish", by="ada", payload=edited)
        assert await here.runtime.sweep() == {"run": Ok("ada approved better at 00:00")}
        assert here.press.published == [Draft("better", 7 if edited != {"title": "better"} else 0)]


@pytest.mark.parametrize("edited", [7, "text", {"titel": "x"}, [Draft("x")], None], ids=str)
async def test_an_edited_payload_of_another_type_is_refused_and_decides_nothing(edited: Any) -> None:
    async with desk() as here:
        await here.ask("run")
        with pytest.raises(InvalidInput, match="the payload of approval 'publish'"):
            await here.runtime.approve("run", "publish", by="ada", payload=edited)
        await here.runtime.approve("run", "publish", by="ada")
        assert here.press.published == []
        await here.runtime.sweep()
        assert len(here.press.published) == 1


@pytest.mark.parametrize(
    ("payload", "good", "bad"),
    [(1, 2, "2"), (1.5, 2, None), ("a", "b", 1), ([1], [2, 3], {"a": 1}), ({"a": 1}, {"b": 2}, [1]), (True, False, 0)],
    ids=repr,
)
async def test_an_edited_builtin_stays_of_its_type(payload: Any, good: Any, bad: Any) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        decision = await ctx.approve("it", payload)
        return decision.payload if isinstance(decision, Approved) else None

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        with pytest.raises(InvalidInput):
            await here.runtime.approve("run", "it", by="ada", payload=bad)
        await here.runtime.approve("run", "it", by="ada", payload=good)
        outcome = (await here.runtime.sweep())["run"]
        assert outcome == Ok(good)
        assert type(outcome.unwrap()) is type(payload)


async def test_returns_is_the_type_of_an_edited_payload_and_the_body_gets_the_error() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        drafts = await ctx.approve("drafts", [Draft("a")], returns=list[Draft])
        error = await raised(ctx.approve("more", [Draft("a")], returns=list[Draft]))
        await ctx.sleep("until the replay", "1h")
        assert isinstance(drafts, Approved)
        return [repr(drafts.payload), type(error).__name__, str(error)]

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.approve("run", "drafts", by="ada", payload=[{"title": "b"}])
        await here.runtime.sweep()
        await here.runtime.approve("run", "more", by="ada", payload=[{"words": 1}])
        await here.runtime.sweep()
        outcome = (await here.later("1h"))["run"].unwrap()
        assert outcome[:2] == ["[Draft(title='b', words=0)]", "InvalidInput"]
        assert "approval 'more', with the payload of 'ada'" in outcome[2]


async def test_a_second_decision_is_refused_with_the_first() -> None:
    async with desk() as here:
        await here.ask("run")
        await here.runtime.approve("run", "publish", by="ada")
        for decide in (here.runtime.approve, here.runtime.reject):
            for by in ("ada", "bob"):
                with pytest.raises(ApprovalDecided, match="was approved by 'ada' at 2026-01-01T00:00:00Z") as refused:
                    await decide("run", "publish", by=by)
                assert (refused.value.decision, refused.value.by) == ("approved", "ada")
        await here.runtime.sweep()
        with pytest.raises(ApprovalDecided, match="by 'ada'"):  # also when the run has ended
            await here.runtime.reject("run", "publish", by="bob")
        assert len(here.press.published) == 1


async def _decide_at_once(seed: int) -> None:
    """Some people and the clock decide at about the same time: one of them was first, and all others are told so."""
    rng = random.Random(seed)
    press = Press(expires_in=rng.choice([None, 0.02, 0.03]))
    store = SlowStore(stores.memory(), rng)
    async with Runtime(store, [press.workflow], clock=LoopClock(), unload_grace=rng.choice([0, 0.003])) as runtime:
        run = await runtime.start(press.workflow, "news", id="run")
        await run.outcome()  # it is suspended, and waits

        async def decide(by: str) -> str | None:
            await asyncio.sleep(rng.random() * 0.03)
            try:
                await (runtime.approve if by > "m" else runtime.reject)("run", "publish", by=by)
            except ApprovalDecided as refused:
                return refused.by if refused.decision == ("approved" if refused.by > "m" else "rejected") else None
            except ApprovalExpired:
                return "nobody"
            return by

        told = await asyncio.gather(*map(decide, "abxyz"))
        outcome = await run
        assert len(set(told)) == 1, "all are told the same, and the first that it was"
        first = str(told[0])
        expected = "expired" if first == "nobody" else f"{first} {'approved' if first > 'm' else 'rejected'}"
        assert outcome.startswith(expected)
        assert len(press.published) == ("approved" in expected)


def test_of_decisions_at_once_one_counts_and_the_others_are_told_which() -> None:
    for seed in range(times(3_000)):
        try:
            simulate(_decide_at_once(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def test_a_decision_before_the_expiry_counts_however_late_the_worker_is() -> None:
    async with desk() as here:
        await here.ask("run")
        here.clock.advance("59m")
        await here.runtime.approve("run", "publish", by="ada")
        assert await here.later("1d") == {"run": Ok("ada approved news of run at 00:59")}


async def test_a_decision_after_the_expiry_is_refused_however_late_the_worker_is() -> None:
    async with desk() as here:
        await here.ask("run")
        here.clock.advance("1h")
        for _ in range(2):
            for decide in (here.runtime.approve, here.runtime.reject):
                with pytest.raises(ApprovalExpired, match="expired at 2026-01-01T01:00:00Z"):
                    await decide("run", "publish", by="ada")
            await here.runtime.sweep()
        assert here.press.published == []


def _hold_back(store: Any, is_held: Callable[[bytes], bool], until: asyncio.Event, reached: asyncio.Event) -> None:
    """Let the store's `signal` wait for an event before it takes such a payload."""
    signal = store.signal

    async def held(run_id: str, name: str, payload: bytes, **options: Any) -> int:
        if is_held(payload):
            reached.set()
            await until.wait()
        seq: int = await signal(run_id, name, payload, **options)
        return seq

    store.signal = held


async def test_a_decision_that_was_under_way_at_the_expiry_is_told_that_it_was_too_late() -> None:
    store: Any = stores.memory()
    async with desk(store=store) as here:
        await here.ask("run")
        released, under_way = asyncio.Event(), asyncio.Event()
        _hold_back(store, lambda payload: b"ada" in payload, released, under_way)
        deciding = asyncio.create_task(here.runtime.approve("run", "publish", by="ada"))
        await under_way.wait()  # it has seen a pending approval
        assert await here.later("1h") == {"run": Ok("expired at 01:00")}
        released.set()
        with pytest.raises(ApprovalExpired):
            await deciding
        assert here.press.published == []


async def test_a_worker_whose_clock_says_too_late_loses_against_a_decision_that_the_store_has() -> None:
    store: Any = stores.memory()
    async with desk(store=store) as here:
        await here.ask("run")
        released, under_way = asyncio.Event(), asyncio.Event()
        _hold_back(store, lambda payload: b"expired" in payload, released, under_way)
        approving_late, seen = asyncio.Event(), asyncio.Event()
        _hold_back(store, lambda payload: b"ada" in payload, approving_late, seen)
        deciding = asyncio.create_task(here.runtime.approve("run", "publish", by="ada"))
        await seen.wait()
        here.clock.advance("1h")
        sweeping = asyncio.create_task(here.runtime.sweep())
        await under_way.wait()  # the worker has read an empty inbox, and is about to expire the approval
        approving_late.set()
        await deciding
        released.set()
        assert await sweeping == {"run": Ok("ada approved news of run at 00:00")}
        assert len(here.press.published) == 1


async def test_the_expiry_is_tried_again_when_the_store_fails() -> None:
    store: Any = stores.memory()
    signal, failures = store.signal, 2

    async def failing(*args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("away")
        return await signal(*args, **options)

    async with desk(store=store) as here:
        await here.ask("run")
        store.signal = failing
        assert await here.later("1h") == {"run": Ok("expired at 01:00")}
        assert failures == 0


async def test_without_a_store_an_approval_can_only_expire() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return type(await ctx.approve("it", expires_in=0)).__name__

    assert await flow() == "Expired"


async def test_decisions_are_the_same_again_on_a_replay() -> None:
    decided = asyncio.Event()

    async def body(ctx: Context[Any]) -> list[Any]:
        first = await ctx.approve("first", Draft("a"), expires_in=0)
        await ctx.step("mark", decided.set)
        return [first, ctx.now()]

    first, second = await twice(body)
    assert first == second
    assert first[0] == Expired(EPOCH)


async def test_only_those_who_are_assigned_may_decide() -> None:
    async with desk(assignees=["ada", "bob"]) as here:
        await here.ask("run")
        for decide in (here.runtime.approve, here.runtime.reject):
            with pytest.raises(NotAssigned, match="not for 'Ada' to decide, but for 'ada', 'bob'"):
                await decide("run", "publish", by="Ada")
        await here.runtime.approve("run", "publish", by="bob")
        assert await here.runtime.sweep() == {"run": Ok("bob approved news of run at 00:00")}


async def test_an_approval_of_another_run_name_or_time_is_refused_with_what_there_is() -> None:
    async with desk() as here:
        with pytest.raises(RunNotFound):
            await here.runtime.approve("run", "publish", by="ada")
        await here.runtime.start(here.press.workflow, "news of run", id="run")
        with pytest.raises(ApprovalNotFound, match="it waits for none"):
            await here.runtime.approve("run", "publish", by="ada")
        await here.runtime.sweep()
        with pytest.raises(ApprovalNotFound, match="does not wait for an approval 'print'; it waits for 'publish'"):
            await here.runtime.approve("run", "print", by="ada")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        with pytest.raises(RunFinished, match="cancelled"):
            await here.runtime.approve("run", "publish", by="ada")
        assert here.press.published == []


async def test_an_approval_that_a_time_limit_has_cancelled_takes_no_decision() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        try:
            async with ctx.timeout("patience", "1h"):
                await ctx.approve("it")
        except TimeoutError:
            await ctx.sleep("after", "1d")
        return "done"

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.later("1h")
        with pytest.raises(ApprovalNotFound):
            await here.runtime.approve("run", "it", by="ada")
        assert await here.runtime.approvals() == []
        assert await here.later("1d") == {"run": Ok("done")}


async def test_approvals_belong_to_one_run() -> None:
    async with desk() as here:
        await here.ask("one", "two")
        await here.runtime.approve("one", "publish", by="ada")
        assert await here.runtime.sweep() == {"one": Ok("ada approved news of one at 00:00")}
        assert [each.run_id for each in await here.runtime.approvals()] == ["two"]
        assert await here.later("1h") == {"two": Ok("expired at 01:00")}


async def test_two_approvals_of_one_name_need_keys() -> None:
    @workflow
    async def same(ctx: Context[Any]) -> None:
        await asyncio.gather(ctx.approve("it"), ctx.approve("it"))

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        both = await asyncio.gather(ctx.approve("it", 1, key="a"), ctx.scope("b").approve("it", 2), ctx.approve("other", 3))
        return [each.payload if isinstance(each, Approved) else repr(each) for each in both]

    async with world(same, flow) as here:
        assert isinstance((await here.runtime.run(same, id="same")).error, DuplicateStep)  # type: ignore[union-attr]
        await here.runtime.run(flow, id="run")
        with pytest.raises(ApprovalAmbiguous, match="waits for 2 approvals 'it'; pass key= with one of 'a', '/b/approve:it'"):
            await here.runtime.approve("run", "it", by="ada")
        with pytest.raises(ApprovalNotFound):
            await here.runtime.approve("run", "it", by="ada", key="b")
        await here.runtime.approve("run", "it", by="ada", key="/b/approve:it", payload=20)
        await here.runtime.approve("run", "it", by="ada", payload=10)  # one is left
        await here.runtime.reject("run", "other", by="bob")
        outcome = (await here.runtime.sweep())["run"].unwrap()
        assert outcome == [10, 20, repr(Rejected(None, "bob", EPOCH))]


@pytest.mark.parametrize("name", ["perdure:approval:publish:" + "0" * 32, "perdure:", "perdure:x"])
async def test_names_of_perdure_are_refused_for_signals(name: str) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return str(await raised(ctx.wait_for_signal(name)))

    async with world(flow) as here:
        run = await here.runtime.start(flow, id="run")
        sends: list[Callable[[], Awaitable[Any]]] = [
            lambda: here.runtime.signal("run", name),
            lambda: run.signal(name),
            lambda: here.runtime.signal_with_start(flow, id="new", signal=name),
        ]
        for send in sends:
            with pytest.raises(ValueError, match=r"begin with 'perdure:' are perdure's own"):
                await send()
        assert "begin with 'perdure:'" in (await here.runtime.sweep())["run"].unwrap()
        assert await here.runtime.get("new") is None


async def test_pending_approvals_are_listed_until_they_are_decided_or_expire() -> None:
    async with desk(assignees=["ada"]) as here:
        await here.ask("one", "two", "three")
        found = await here.runtime.approvals(prefix="one")
        assert found == [
            PendingApproval(
                run_id="one",
                workflow="press",
                name="publish",
                key="approve:publish",
                payload={"title": "news of one", "words": 3},
                assignees=("ada",),
                requested_at=EPOCH,
                expires_at=EPOCH + timedelta(hours=1),
            )
        ]
        assert len(await here.runtime.approvals(limit=2)) == 2
        assert [len(await here.runtime.approvals(assignee=who)) for who in ("ada", "bob")] == [3, 0]
        await here.runtime.approve("one", "publish", by="ada")
        assert {each.run_id for each in await here.runtime.approvals()} == {"two", "three"}, "also before the run has seen it"
        await here.runtime.sweep()
        assert {each.run_id for each in await here.runtime.approvals(workflow=here.press.workflow)} == {"two", "three"}
        here.clock.advance("1h")
        assert await here.runtime.approvals() == []
        with pytest.raises(ValueError, match="not selected by status"):
            await here.runtime.approvals(status="suspended")


async def test_what_everyone_may_decide_is_listed_for_each_person() -> None:
    async with desk() as here:
        await here.ask("run")
        assert [each.run_id for each in await here.runtime.approvals(assignee="ada")] == ["run"]


async def test_an_approval_of_a_run_in_memory_is_listed_and_decided() -> None:
    at_work, released = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        at_work.set()
        await released.wait()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        decision, _ = await asyncio.gather(ctx.approve("it", 1), ctx.step(work))
        return type(decision).__name__

    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        await at_work.wait()
        assert [(each.run_id, each.payload) for each in await runtime.approvals()] == [("run", 1)]
        await runtime.approve("run", "it", by="ada")
        assert await runtime.approvals() == []
        released.set()
        assert await run == "Approved"


async def test_listing_reads_no_journal_of_a_run_that_waits_for_something_else() -> None:
    @workflow
    async def other(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("news")

    store: Any = stores.memory()
    journal, read = store.journal, list[str]()

    async def noted(run_id: str, **options: Any) -> list[Entry]:
        read.append(run_id)
        entries: list[Entry] = await journal(run_id, **options)
        return entries

    async with desk(store=store) as here:
        await here.ask("asks")
        for n in range(150):
            await here.runtime.start(other, id=f"new {n}")
        await here.runtime.sweep(limit=100)
        store.journal = noted
        assert [each.run_id for each in await here.runtime.approvals()] == ["asks"]
        assert set(read) == {"asks"}


async def test_a_step_beside_the_approval_can_send_its_token() -> None:
    sent = asyncio.get_running_loop().create_future()
    async with Runtime(stores.memory(), secret=SECRET) as runtime:

        async def send_link(run_id: str) -> None:
            sent.set_result(await runtime.approval_token(run_id, "publish", by="ada"))

        @workflow
        async def flow(ctx: Context[Any]) -> str:
            decision, _ = await asyncio.gather(ctx.approve("publish"), ctx.step(send_link, ctx.run_id))
            return type(decision).__name__

        run = await runtime.start(flow)
        await runtime.decide_by_token(await sent, "approve")
        assert await run == "Approved"


async def test_a_rejection_that_fails_the_run_is_not_asked_again_by_a_retry() -> None:
    asked: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        decision = await ctx.approve("it")
        asked.append(type(decision).__name__)
        if isinstance(decision, Rejected):
            raise PermissionError(decision.reason)
        return "done"

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.reject("run", "it", by="bob", reason="no")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert repr(outcome.error) == "PermissionError('no')"
        await here.runtime.retry("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
        assert asked == ["Rejected", "Rejected"]


async def test_a_fork_asks_anew() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.step("before", str)
        decision = await ctx.approve("it", expires_in="1h")
        return f"{await ctx.step('after', str)}{type(decision).__name__}"

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        here.clock.advance("10m")
        await here.runtime.approve("run", "it", by="ada")
        await here.runtime.sweep()
        here.clock.advance("1d")
        await here.runtime.fork("run", from_step="approve:it", id="fork")
        assert isinstance((await here.runtime.sweep())["fork"], Suspended)
        await here.runtime.reject("fork", "it", by="bob")
        assert await here.runtime.sweep() == {"fork": Ok("Rejected")}
        await here.runtime.fork("run", from_step="after", id="decided")
        assert await here.runtime.sweep() == {"decided": Ok("Approved")}


async def test_a_fork_takes_no_decision_that_the_old_run_has_not_taken() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        decision, _ = await asyncio.gather(ctx.approve("it", expires_in="1h"), ctx.step("beside", str))
        return type(decision).__name__

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.approve("run", "it", by="ada")
        await here.runtime.fork("run", from_step="beside", id="fork")
        outcomes = await here.runtime.sweep()
        assert outcomes["run"] == Ok("Approved")
        assert isinstance(outcomes["fork"], Suspended)
        await here.runtime.reject("fork", "it", by="bob")
        assert (await here.runtime.sweep())["fork"] == Ok("Rejected")


@pytest.mark.parametrize("is_decided", [False, True])
async def test_a_snapshot_has_the_approval_and_goes_on_elsewhere(*, is_decided: bool) -> None:
    async with desk(expires_in=None) as here:
        await here.ask("run")
        if is_decided:
            await here.runtime.approve("run", "publish", by="ada", payload=Draft("edited"))
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = Snapshot.from_dict((await run.snapshot()).to_dict())
    press = Press(expires_in=None)
    runtime = Runtime(stores.memory(), [press.workflow], concurrency=0, unload_grace=0)
    outcome = await press.workflow.options(id="copy", store=runtime.store, snapshot=snapshot).run("news of run")
    if not is_decided:
        assert isinstance(outcome, Suspended)
        await runtime.approve("copy", "publish", by="eve")
        outcome = (await runtime.sweep())["copy"]
    assert outcome.unwrap().startswith("ada approved edited" if is_decided else "eve approved news of run")
    ended = await runtime.get("copy")
    assert ended is not None
    again = Snapshot.from_dict((await ended.snapshot()).to_dict())
    assert await press.workflow.options(id="again", store=runtime.store, snapshot=again).run("news of run") == outcome
    assert len(press.published) == 1, "the second copy has everything that the first has recorded"
    await runtime.close()


async def test_a_description_shows_what_is_asked_of_whom() -> None:
    async with desk(assignees=["ada"]) as here:
        await here.ask("run")
        found = await here.runtime.describe("run")
        assert [(each.kind, each.name) for each in found.waiting_for] == [("approval", "publish")]
        (asked,) = found.steps
        assert (asked.kind, asked.status, asked.assignees) == ("approval", "waiting", ("ada",))
        assert asked.until == EPOCH + timedelta(hours=1)
        assert asked.value == {"title": "news of run", "words": 3}
        await here.runtime.approve("run", "publish", by="ada")
        await here.runtime.sweep()
        decided = (await here.runtime.describe("run")).steps[0]
        assert (decided.status, decided.value["by"]) == ("completed", "ada")


async def test_what_cannot_be_asked_is_refused_before_anything_is_recorded() -> None:
    class Odd:
        pass

    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        approve: Any = ctx.approve
        wrong = [
            approve("it", Odd(), key="a"),
            approve("it", "x" * 2**21, key="b"),
            approve("it", assignees="ada"),
            approve("it", assignees=[7]),
            approve("it", expires_in="soon"),
            approve(""),
        ]
        return [type(await raised(each)).__name__ for each in wrong]

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert outcome == Ok(["ValueNotStorable", "ValueNotStorable", "TypeError", "TypeError", "ValueError", "ValueError"])
        assert await here.runtime.store.journal("run") == []


@pytest.mark.parametrize(
    "wrong", [{"by": ""}, {"by": 7}, {"by": "ada", "reason": 7}, {"by": "ada", "reason": "x" * 10_001}], ids=repr
)
async def test_a_decision_that_makes_no_sense_is_refused(wrong: Any) -> None:
    async with desk() as here:
        await here.ask("run")
        with pytest.raises((TypeError, ValueError)):
            await here.runtime.reject("run", "publish", **wrong)
        assert len(await here.runtime.approvals()) == 1


async def test_a_cancelled_run_ends_without_its_approval() -> None:
    async with desk() as here:
        await here.ask("run")
        await here.runtime.cancel("run")
        await here.runtime.approve("run", "publish", by="ada")  # accepted, and the run is cancelled all the same
        assert isinstance((await here.runtime.sweep())["run"], Err)
        assert here.press.published == []


def test_a_program_without_a_loop_decides_too() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        first, second = await ctx.approve("first"), await ctx.approve("second")
        return f"{type(first).__name__}, {type(second).__name__}"

    with Runtime(stores.memory(), [flow], secret=SECRET).sync as runtime:
        run = runtime.start(flow, id="run")
        run.outcome()
        assert [each.name for each in runtime.approvals()] == ["first"]
        runtime.decide_by_token(runtime.approval_token("run", "first", by="ada"), "reject", reason="no")
        while not [each for each in runtime.approvals() if each.name == "second"]:
            pass
        runtime.approve("run", "second", by="ada")
        assert run.result() == "Rejected, Approved"
