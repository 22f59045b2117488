"""Going on from a snapshot or a resume state: what may be given, what is refused, and that nothing is done twice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, stores
from perdure.errors import (
    PerdureError,
    PerdureWarning,
    PersistenceError,
    RunDiverged,
    SnapshotCorrupt,
    SnapshotFormatError,
    SnapshotMismatch,
    StepChanged,
    StepFailed,
)
from perdure.snapshots.snapshot import Snapshot
from perdure.state import ResumeState, StepResult, dump_state, merge_snapshots, parse_state
from perdure.testing import ManualClock
from tests.campaign import times
from tests.codec.models import Item, Level, Page, Point
from tests.naming import short_id
from tests.snapshots import mutations
from tests.snapshots.documents import COMPLETED, DOCUMENTS, FAILED, LOSSY, RUNNING, all_snapshots, all_states
from tests.snapshots.elsewhere import There, returning, through_text

Asked = list[tuple[str, Any]]


def asking(*keys: str, name: str = "flow", **options: Any) -> tuple[Workflow[[], Asked], list[str]]:
    """A workflow that asks for these steps and gives what each came to; and the keys of those that were really called."""
    called: list[str] = []

    async def call(key: str) -> str:
        called.append(key)
        return f"<{key}>"

    async def body(ctx: Context) -> Asked:
        asked: Asked = []
        for key in keys:
            try:
                asked.append((key, await ctx.step("ask", call, key, key=key)))
            except Exception as error:
                asked.append((key, error))
        seen.append(asked)
        return []

    seen: list[Asked] = []
    flow = Workflow(name, body, **options)
    flow.seen = seen  # type: ignore[attr-defined]
    return flow, called


def seen_by(flow: Any) -> Asked:
    """What the body of `asking` saw the last time."""
    seen: Asked = flow.seen[-1]
    return seen


ONE_STEP: Final = ResumeState({"a": StepResult(ok=True, value=1)})
GIVEN: Final[dict[str, Callable[[], Any]]] = {
    "a state": lambda: ONE_STEP,
    "a snapshot": ONE_STEP.to_snapshot,
    "its dict": lambda: ONE_STEP.to_snapshot().to_dict(),
    "its text": lambda: json.dumps(ONE_STEP.to_snapshot().to_dict()),
    "its bytes": lambda: json.dumps(ONE_STEP.to_snapshot().to_dict()).encode(),
    "entries": lambda: json.loads(dump_state(ONE_STEP)),
    "entries as text": lambda: dump_state(ONE_STEP),
    "pairs": lambda: {"kind": "ResumeState", "steps": [["a", {"ok": True, "value": 1}]]},
}


class TestWhatMayBeGiven:
    """A state, a snapshot, its dict or text, None, or a function that gives one of these."""

    @pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
    async def test_every_form_of_a_state_is_taken_under_both_names_by_run_and_start(self, make: Callable[[], Any]) -> None:
        async def later() -> Any:
            return make()

        for given_as in (make(), make, later):
            for name in ("snapshot", "resume_state"):
                flow, called = asking("a", "b")
                assert await flow.run(**{name: given_as}) == Ok([])
                assert (seen_by(flow), called) == ([("a", 1), ("b", "<b>")], ["b"])
                await (await flow.start(**{name: given_as}))
                assert (seen_by(flow), called) == ([("a", 1), ("b", "<b>")], ["b", "b"])

    @pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
    async def test_every_form_of_a_state_is_taken_by_the_workflow_for_all_its_runs(self, make: Callable[[], Any]) -> None:
        async def later() -> Any:
            return make()

        for given_as in (make(), make, later):
            for name in ("snapshot", "resume_state"):
                options: dict[str, Any] = {name: given_as}
                flow, called = asking("a", "b", **options)
                await flow()
                assert (seen_by(flow), called) == ([("a", 1), ("b", "<b>")], ["b"])
                await flow.run()
                await (await flow.start())
                async with Runtime(stores.memory(), [flow]) as runtime:
                    await runtime.run(flow)
                    await (await runtime.start(flow))
                assert (seen_by(flow), called) == ([("a", 1), ("b", "<b>")], ["b"] * 5)

    async def test_a_function_of_the_workflow_is_called_once_for_each_run(self) -> None:
        loaded: list[str] = []

        def load() -> ResumeState:
            loaded.append("load")
            return ONE_STEP

        flow, called = asking("a", "b", resume_state=load)
        assert loaded == []
        await asyncio.gather(flow(), flow.run(), flow.run(id="run", store=stores.memory()))
        assert (loaded, called) == (["load"] * 3, ["b"] * 3)

    async def test_the_state_of_a_run_wins_over_that_of_its_workflow_whatever_their_names(self) -> None:
        other = ResumeState({"b": StepResult(ok=True, value=2)})
        for of_workflow in ("snapshot", "resume_state"):
            for of_run in ("snapshot", "resume_state"):
                options: dict[str, Any] = {of_workflow: ONE_STEP}
                flow, called = asking("a", "b", **options)
                state: dict[str, Any] = {of_run: other}
                await flow.run(**state)
                assert (seen_by(flow), called) == ([("a", "<a>"), ("b", 2)], ["a"])
                state = {of_run: None}
                await flow.run(**state)
                assert called == ["a", "a", "b"]

    async def test_a_run_that_exists_goes_on_from_its_own_record_whatever_the_workflow_says(self) -> None:
        flow, called = asking("a", "b", resume_state=ONE_STEP)
        store = stores.memory()
        for _ in range(2):
            await flow.run(id="run", store=store)
        assert called == ["b"]

    async def test_a_call_from_a_snapshot_is_checked_as_a_run_is(self) -> None:
        flow, _ = asking("a")
        run = await flow.start(id="run", store=stores.memory())
        await run
        snapshot = await run.snapshot()
        again, called = asking("a", snapshot=snapshot)
        await again()
        assert called == []
        elsewhere, _ = asking("a", name="elsewhere", snapshot=snapshot)
        with pytest.raises(SnapshotMismatch, match="is of workflow"):
            await elsewhere()
        document = {**snapshot.to_dict(), "metadata": {**(snapshot.metadata or {}), "definitionHash": "ast1:other"}}
        changed, _ = asking("a", snapshot=document)
        with pytest.warns(PerdureWarning, match="has changed"):
            await changed()
        refusing, _ = asking("a", snapshot=document, on_definition_change="error")
        with pytest.raises(SnapshotMismatch, match="has changed"):
            await refusing()

    async def test_signals_in_a_snapshot_reach_a_call(self) -> None:
        async def body(ctx: Context) -> Any:
            return await ctx.wait_for_signal("go")

        store = stores.memory()
        runtime = Runtime(store, [Workflow("flow", body)], concurrency=0)
        run = await runtime.start("flow", id="run")
        await runtime.signal("run", "go", 7)
        assert await Workflow("flow", body, snapshot=await run.snapshot())() == 7
        await runtime.close()

    def test_both_names_at_once_are_refused_where_the_workflow_is_made(self) -> None:
        with pytest.raises(TypeError, match="two names for one option"):
            asking("a", snapshot=None, resume_state=ONE_STEP)

    async def test_none_starts_afresh_also_from_a_function(self) -> None:
        async def later() -> None:
            return None

        for given_as in (None, lambda: None, later):
            flow, called = asking("a")
            await flow.run(snapshot=given_as)
            assert called == ["a"]

    async def test_a_function_is_called_once_for_each_run_and_before_the_body(self) -> None:
        order: list[str] = []

        async def body(ctx: Context) -> None:
            order.append("body")

        def load() -> None:
            order.append("load")

        flow = Workflow("flow", body)
        await flow.run(snapshot=load)
        await (await flow.start(resume_state=load))
        await flow.options(snapshot=load).run()
        assert order == ["load", "body"] * 3

    async def test_what_a_function_raises_is_raised_and_nothing_is_written(self) -> None:
        def load() -> None:
            raise ConnectionError("no route")

        flow, called = asking("a")
        store = stores.memory()
        with pytest.raises(ConnectionError):
            await flow.run(id="run", store=store, snapshot=load)
        assert (await store.list(), called) == ([], [])

    @pytest.mark.parametrize("kind", ["child in memory", "child of wf.run", "child of a worker", "schedule", "run of a schedule"])
    async def test_children_and_runs_of_schedules_start_from_the_state_of_their_workflow(self, kind: str) -> None:
        flow, called = asking("a", "b", resume_state=lambda: ONE_STEP)

        async def parent(ctx: Context) -> None:
            await ctx.child(flow)

        over, store = Workflow("over", parent), stores.memory()
        if kind == "child in memory":
            await over()
        elif kind == "child of wf.run":
            await over.run(id="over", store=store)
        elif kind == "child of a worker":
            async with Runtime(store, [over, flow]) as runtime:
                await (await runtime.start(over))
        else:
            clock = ManualClock(datetime(2026, 5, 4, tzinfo=UTC))
            runtime = Runtime(store, [flow], clock=clock, concurrency=0)
            await runtime.schedule(flow, every="1h")
            if kind == "schedule":
                clock.advance("1h")
            else:
                await runtime.run_schedule("flow")
            assert list((await runtime.sweep()).values()) == [Ok([])]
            assert await runtime.sweep() == {}
            await runtime.close()
        assert (seen_by(flow), called) == ([("a", 1), ("b", "<b>")], ["b"])

    async def test_a_child_whose_state_cannot_be_loaded_is_tried_again_and_its_parent_sees_nothing_of_it(self) -> None:
        loads: list[str] = []

        def load() -> ResumeState:
            loads.append("load")
            if len(loads) == 1:
                raise ConnectionError("no route")
            return ONE_STEP

        flow, called = asking("a", "b", resume_state=load)
        seen: list[Exception] = []

        async def parent(ctx: Context) -> str:
            try:
                await ctx.child(flow)
            except Exception as error:
                seen.append(error)
            return "done"

        store, over = stores.memory(), Workflow("over", parent)
        with pytest.raises(
            PersistenceError, match=r"the state for run 'over/flow' could not be loaded: ConnectionError\('no route'\)"
        ):
            await over.run(id="over", store=store)
        assert await over.run(id="over", store=store) == Ok("done")
        assert (loads, called, seen) == (["load"] * 2, ["b"], [])

    async def test_a_schedule_whose_state_cannot_be_loaded_says_so_and_makes_up_for_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        loads: list[str] = []

        def load() -> ResumeState:
            loads.append("load")
            if len(loads) < 3:
                raise ConnectionError("no route")
            return ONE_STEP

        flow, called = asking("a", "b", resume_state=load)
        plain, plainly = asking("a", name="plain")
        clock = ManualClock(datetime(2026, 5, 4, tzinfo=UTC))
        runtime = Runtime(stores.memory(), [flow, plain], clock=clock, concurrency=0)
        await runtime.schedule(flow, every="1h")
        await runtime.schedule(plain, every="1h")
        clock.advance("1h")
        outcomes = [list(await runtime.sweep()) for _ in range(3)]
        assert outcomes == [["plain:2026-05-04T01:00:00Z"], [], ["flow:2026-05-04T01:00:00Z"]]
        assert (called, plainly) == (["b"], ["a"])
        (line,) = {record.message for record in caplog.records if record.levelname == "ERROR"}
        assert line == (
            "schedule 'flow' starts no runs: run 'flow:2026-05-04T01:00:00Z' cannot be created with its state, which is tried "
            "again: ConnectionError('no route')"
        )
        await runtime.close()

    @pytest.mark.parametrize("level", ["run", "workflow"])
    async def test_a_run_that_the_store_has_is_not_loaded_and_gives_its_outcome_though_loading_would_fail(
        self, level: str
    ) -> None:
        loads: list[str] = []

        def load() -> ResumeState:
            loads.append("load")
            if len(loads) > 1:
                raise ConnectionError("no route")
            return ONE_STEP

        of_run: dict[str, Any] = {"resume_state": load} if level == "run" else {}
        of_workflow: dict[str, Any] = {} if level == "run" else {"resume_state": load}
        flow, called = asking("a", "b", **of_workflow)
        store = stores.memory()
        for _ in range(2):
            assert await flow.run(id="run", store=store, **of_run) == Ok([])
            assert await (await flow.start(id="run", store=store, **of_run)) == []
        if level == "workflow":
            async with Runtime(store, [flow]) as runtime:
                assert await runtime.run(flow, id="run") == Ok([])
                (run,) = await runtime.start_many(flow, [()], ids=["run"])
                assert await run == []
        assert (loads, called) == (["load"], ["b"])

    async def test_without_a_store_a_state_takes_the_place_of_what_an_earlier_run_of_this_process_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PERDURE_STORE", raising=False)
        calls: list[str] = []

        async def charge() -> str:
            calls.append("charge")
            if len(calls) == 1:
                raise ConnectionError("no route")
            return "charged"

        async def body(ctx: Context) -> str:
            return f"{await ctx.step(charge)} {await ctx.step('ship', returning('shipped'))}"

        flow = Workflow("flow", body)
        state = ResumeState({"charge": StepResult(ok=True, value="elsewhere")})
        for method in ("run", "start"):
            calls.clear()
            run_id = f"replaced by {method}"
            assert isinstance(await flow.run(id=run_id, resume_state=None), Err)
            if method == "run":
                assert await flow.run(id=run_id, resume_state=state) == Ok("elsewhere shipped")
            else:
                assert await (await flow.start(id=run_id, resume_state=lambda: state)) == "elsewhere shipped"
            assert calls == ["charge"]

    async def test_without_a_store_a_state_that_is_not_used_is_warned_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PERDURE_STORE", raising=False)
        flow, called = asking("a", "b")
        assert await flow.run(id="known", resume_state=ONE_STEP) == Ok([])
        assert await flow.run(id="known", resume_state=ONE_STEP) == Ok([])  # the run has recorded the same
        other = ResumeState({"a": StepResult(ok=True, value=2), "c": StepResult(ok=True, value=3)})
        with pytest.warns(
            PerdureWarning, match=r"run 'known' is in the memory of this process, completed, .* result of 'a', 'c', is not used"
        ):
            assert await flow.run(id="known", resume_state=other) == Ok([])
        assert called == ["b"]

    async def test_both_names_at_once_are_a_type_error_whatever_they_say(self) -> None:
        flow, called = asking("a")
        store = stores.memory()
        for pair in ((None, None), (COMPLETED, None), (None, ONE_STEP)):
            with pytest.raises(TypeError, match="two names for one option"):
                await flow.run(id="run", store=store, snapshot=pair[0], resume_state=pair[1])
            with pytest.raises(TypeError, match="two names for one option"):
                await flow.start(id="run", store=store, snapshot=pair[0], resume_state=pair[1])
        assert (await store.list(), called) == ([], [])

    @pytest.mark.parametrize(
        ("given_as", "path"),
        [
            (0, "$"),
            ("", "$"),
            ([], "$"),
            ({}, "$.formatVersion"),
            ({"version": 1}, "$.entries"),
            ({"kind": "ResumeState"}, "$.steps"),
            ({**COMPLETED, "formatVersion": 2}, "$.formatVersion"),
            ({**COMPLETED, "steps": {"a": 1}}, "$.steps.a"),
            (json.dumps(COMPLETED)[:-1], "$"),
            (lambda: lambda: None, "$"),
            (ResumeState({"a": {"ok": True, "value": 1}}), "$.steps.a"),  # type: ignore[dict-item]
            (ResumeState({"a": StepResult(ok=True, value=object())}), "$.entries.a.result.value"),
            (ResumeState({"": StepResult(ok=True, value=1)}), '$.entries[""]'),
            (
                Snapshot(steps={"a": 1}, execution=Snapshot.from_dict(COMPLETED).execution),  # type: ignore[dict-item]
                "$.steps.a",
            ),
            ({**COMPLETED, "metadata": {"perdure": 1}}, "$.metadata.perdure"),
            ({**COMPLETED, "metadata": {"perdure": {"seed": "", "createdAt": -1}}}, "$.metadata.perdure"),
            ({**COMPLETED, "metadata": {"a": "\ud800"}}, "$.metadata"),
            ({**COMPLETED, "steps": {"a": {"ok": True, "value": {"$set": 1}, "perdure": {"tagged": True}}}}, "$.steps.a.value"),
            ({**COMPLETED, "steps": {"a": {"ok": True, "value": 1, "perdure": {"kind": "nap"}}}}, "$.steps.a.perdure"),
            ({**COMPLETED, "steps": {"a": {"ok": True, "value": 1, "perdure": 1}}}, "$.steps.a.perdure"),
        ],
        ids=lambda part: short_id(part, 60),
    )
    async def test_what_is_no_state_is_refused_with_its_path_before_anything_happens(self, given_as: Any, path: str) -> None:
        flow, called = asking("a", name="feed")
        store = stores.memory()
        for name in ("snapshot", "resume_state"):
            for begin in (flow.run, flow.start):
                with pytest.raises(SnapshotFormatError) as caught:
                    await begin(id="run", store=store, **{name: given_as})
                assert path in {error.path for error in caught.value.errors}
        assert (await store.list(), called, flow.seen) == ([], [], [])  # type: ignore[attr-defined]

    @pytest.mark.parametrize("as_text", [False, True])
    async def test_a_snapshot_of_another_workflow_is_refused_by_name(self, as_text: bool) -> None:
        store = stores.memory()
        given_as: Any = json.dumps(COMPLETED) if as_text else COMPLETED
        other, called = asking("user:1", name="other")
        with pytest.raises(SnapshotMismatch, match="of workflow 'feed', and this is 'other'"):
            await other.run(id="run", store=store, snapshot=given_as)
        assert (await store.list(), called) == ([], [])
        for name, document in (("feed", COMPLETED), ("other", {**COMPLETED, "workflowName": "other"})):
            flow, called = asking("user:1", "posts:1", name=name)
            assert await flow.run(snapshot=document) == Ok([])
            assert called == []

    async def test_one_without_a_name_is_accepted(self) -> None:
        nameless = {name: part for name, part in COMPLETED.items() if name != "workflowName"}
        for document in (nameless, parse_state(COMPLETED), parse_state(nameless)):
            flow, called = asking("user:1", "posts:1", name="another")
            assert await flow.run(snapshot=document) == Ok([])
            assert called == []

    async def test_a_run_that_is_there_already_goes_by_its_own_record(self, here: There) -> None:
        async def body(ctx: Context) -> int:
            await ctx.step("a", lambda: 1)
            await ctx.sleep("nap", "1h")
            return await ctx.step("b", lambda: 2)

        flow = Workflow("flow", body)
        await here.begin(flow)
        later = ResumeState({"a": StepResult(ok=True, value=7), "b": StepResult(ok=True, value=8)})
        assert isinstance(await here.begin(flow, snapshot=later), Suspended)
        assert await here.later("1h") == Ok(2)
        assert (await here.snapshot()).steps["a"].value == 1


class TestOptions:
    """What to do when state and code do not fit, and what metadata becomes."""

    EXTRA: Final = {**COMPLETED, "steps": {**COMPLETED["steps"], "gone": {"ok": True, "value": 1}}}
    CHANGED: Final = {**COMPLETED, "metadata": {"definitionHash": "ast1:another"}}

    async def test_steps_that_the_body_never_asks_for_are_warned_of_or_an_error_or_ignored(self) -> None:
        flow, called = asking("user:1", "posts:1", name="feed")
        with pytest.warns(PerdureWarning, match="'gone'; was a step renamed"):
            assert await flow.run(snapshot=self.EXTRA) == Ok([])
        assert await flow.run(snapshot=self.EXTRA, on_unknown_steps="ignore") == Ok([])
        with pytest.raises(SnapshotMismatch, match="'gone'"):
            await flow.run(snapshot=self.EXTRA, on_unknown_steps="error")
        assert called == []

    async def own_snapshot(self) -> Snapshot:
        run = await asking("a")[0].start()
        await run
        return await run.snapshot()

    async def test_a_new_step_beside_results_that_nobody_asks_for_runs_and_is_warned_of(self) -> None:
        for state in (await self.own_snapshot(), ONE_STEP, RUNNING):
            flow, called = asking("new")
            with pytest.warns(PerdureWarning, match="was a step renamed"):
                assert await flow.run(snapshot=state, on_definition_change="ignore") == Ok([])
            assert called == ["new"]

    async def test_with_an_explicit_stop_it_does_not_run(self) -> None:
        stopping: dict[str, Any] = {"on_definition_change": "ignore", "on_divergence": "stop"}
        by_workflow, called_by_workflow = asking("new", **stopping)
        by_run, called = asking("new")
        for state in (await self.own_snapshot(), ONE_STEP, RUNNING):
            with pytest.raises(RunDiverged, match="stopped before 'new'"):
                await by_workflow.run(snapshot=state)
            with pytest.raises(RunDiverged, match="stopped before 'new'"):
                await by_run.run(snapshot=state, **stopping)
        store = stores.memory()
        await store.save("run", ONE_STEP)
        with pytest.raises(RunDiverged, match="stopped before 'new'"):
            await Runtime(store, [by_run], concurrency=0, **stopping).run(by_run, id="run")
        assert called == called_by_workflow == []

    async def test_another_definition_is_warned_of_or_an_error_before_it_starts_or_ignored(self) -> None:
        flow, called = asking("user:1", "posts:1", name="feed")
        with pytest.warns(PerdureWarning, match="the code of 'feed' has changed"):
            assert await flow.run(snapshot=self.CHANGED) == Ok([])
        assert await flow.run(snapshot=self.CHANGED, on_definition_change="ignore") == Ok([])
        store = stores.memory()
        count = len(flow.seen)  # type: ignore[attr-defined]
        with pytest.raises(SnapshotMismatch, match="has changed since the snapshot was taken"):
            await flow.run(id="run", store=store, snapshot=self.CHANGED, on_definition_change="error")
        assert (await store.list(), called, len(flow.seen)) == ([], [], count)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("recorded", ["v1:another", 7, None, ""])
    async def test_a_hash_of_another_scheme_says_nothing(self, recorded: Any) -> None:
        flow, _ = asking("user:1", "posts:1", name="feed", on_definition_change="error")
        assert await flow.run(snapshot={**COMPLETED, "metadata": {"definitionHash": recorded}}) == Ok([])

    @pytest.mark.parametrize("option", ["on_unknown_steps", "on_definition_change", "on_changed_arguments"])
    async def test_other_words_are_refused(self, option: str) -> None:
        flow, _ = asking("a")
        with pytest.raises(ValueError, match="warn, error, ignore"):
            await flow.run(**{option: "explode"})

    async def test_restored_metadata_is_carried_into_later_snapshots(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> None:
            await ctx.sleep("nap", "1h")

        flow = Workflow("flow", body)
        await here.begin(flow, metadata={"tenant": "acme", "note": 1})
        snapshot = await (await here.run()).snapshot(metadata={"takenBy": "ops"})
        await there.begin(flow, snapshot=through_text(snapshot), metadata={"note": 2, "new": [None]})
        metadata = dict((await there.snapshot()).metadata or {})
        assert metadata.pop("perdure")
        assert metadata.pop("definitionHash")
        expected = {"workflowId": "there", "input": [[], {}], "tenant": "acme", "takenBy": "ops", "note": 2, "new": [None]}
        assert metadata == expected
        state = await (await there.run()).resume_state()
        assert state.metadata == {"tenant": "acme", "takenBy": "ops", "note": 2, "new": [None]}

    async def test_a_run_without_an_id_keeps_the_one_in_the_snapshot_as_metadata(self) -> None:
        flow, _ = asking("user:1", "posts:1", name="feed")
        run = await flow.start(snapshot=COMPLETED)
        await run
        metadata = (await run.snapshot()).metadata or {}
        assert metadata["workflowId"] == "wf-123"
        run = await flow.start(snapshot=COMPLETED, id="mine", store=stores.memory())
        await run
        metadata = (await run.snapshot()).metadata or {}
        assert metadata["workflowId"] == "mine"


FOREIGN: Final = all_states()


def outcome_told(step: StepResult) -> Any:
    """What a body gets for a step that others recorded: the value, or what is inside the StepFailed."""
    if step.ok:
        return step.value
    cause = step.cause or {}
    if (step.meta or {}).get("origin") != "throw":
        return ("failed", step.error, None)
    if cause["type"] == "error":
        return ("failed", cause["name"], cause["message"])
    return ("failed", step.error, cause["stringRepresentation"])


def outcome_seen(value: Any) -> Any:
    return ("failed", value.error, value.args[2]) if isinstance(value, StepFailed) else value


class TestWhatOthersWrote:
    """Documents of the three shapes, as other libraries write them."""

    @pytest.mark.parametrize("document", FOREIGN.values(), ids=FOREIGN)
    async def test_they_load_report_their_steps_and_resume_without_running_anything(self, document: dict[str, Any]) -> None:
        state = parse_state(document)
        assert state.steps
        flow, called = asking(*state.steps, "more", name=document.get("workflowName", "flow"))
        before = copy.deepcopy(document)
        run = await flow.start(snapshot=document)
        assert await run == []
        assert called == ["more"]
        assert document == before
        seen = dict(seen_by(flow))
        assert {key: outcome_seen(seen[key]) for key in state.steps} == {
            key: outcome_told(step) for key, step in state.steps.items()
        }
        later = await run.snapshot()
        tree = through_text(later)
        del tree["steps"]["more"]
        assert tree["steps"] == {key: step.tree() for key, step in state.steps.items()}
        assert list(tree["steps"]) == list(state.steps)
        assert tree.get("warnings", []) == document.get("warnings", [])

    @pytest.mark.parametrize("document", FOREIGN.values(), ids=FOREIGN)
    async def test_what_a_resumed_run_exports_resumes_again_word_for_word(self, document: dict[str, Any]) -> None:
        state = parse_state(document)
        flow, called = asking(*state.steps, name=document.get("workflowName", "flow"))
        exported: Any = document
        for _ in range(3):
            run = await flow.start(snapshot=exported)
            await run
            exported = through_text(await run.snapshot())
            assert exported["steps"] == {key: step.tree() for key, step in state.steps.items()}
            assert exported.get("warnings", []) == document.get("warnings", [])
            of_state = json.loads(dump_state(await run.resume_state()))
            assert parse_state(of_state).steps == state.steps
            assert len(flow.seen[-1]) == len(state.steps)  # type: ignore[attr-defined]
        assert called == []

    @pytest.mark.parametrize("document", all_snapshots().values(), ids=all_snapshots())
    def test_reading_and_writing_changes_nothing(self, document: dict[str, Any]) -> None:
        once = Snapshot.from_dict(document)
        assert once.to_dict() == document
        assert Snapshot.from_dict(once.to_dict()) == once

    @settings(max_examples=times(2000), suppress_health_check=[HealthCheck.too_slow])
    @given(DOCUMENTS)
    @example({**RUNNING, "steps": {key: {"ok": True, "value": 1} for key in ("/users/1", "%2F", "a/b", "/", "%", "a%2Fb")}})
    def test_any_document_resumes_and_is_told_word_for_word(self, document: dict[str, Any]) -> None:
        document = {name: part for name, part in document.items() if name not in ("workflowName", "metadata")}
        flow, called = asking(*document["steps"])

        async def main() -> None:
            run = await flow.start(snapshot=document)
            await run
            assert through_text(await run.snapshot())["steps"] == document["steps"]

        asyncio.run(main())
        assert called == []

    async def test_tags_in_foreign_data_are_plain_dicts(self) -> None:
        values = {
            "datetime": {"$datetime": "2026-01-01T00:00:00+00:00"},
            "class": {"$class": ["os:system", {"command": "true"}]},
            "lost": [{"$lost": "non-json"}, {"$$x": 1}],
            "mixed": {"$set": [1], "other": {"$tuple": 5}},
        }
        state = ResumeState({key: StepResult(ok=True, value=value) for key, value in values.items()})
        flow, _ = asking(*values)
        run = await flow.start(snapshot=state)
        await run
        assert dict(seen_by(flow)) == values
        assert {key: step.value for key, step in (await run.snapshot()).steps.items()} == values
        assert (await run.snapshot()).warnings == ()

    @pytest.mark.parametrize("name", ["ValueError", "KeyError", "TypeError", "StepTimeout", "PerdureError"])
    async def test_a_foreign_error_is_never_the_python_exception_of_its_name(self, name: str) -> None:
        cause = {"type": "error", "name": name, "message": "no"}
        steps = {
            "threw": StepResult(ok=False, error="UNEXPECTED_ERROR", cause=cause, meta={"origin": "throw"}),
            "returned": StepResult(ok=False, error=name, cause=cause, meta={"origin": "result"}),
        }
        flow, _ = asking(*steps)
        await flow.run(snapshot=ResumeState(steps))
        threw, returned = (error for _, error in seen_by(flow))
        assert (type(threw), threw.error, threw.was_returned) == (StepFailed, name, False)
        assert "no" in str(threw)
        assert (type(returned), returned.error, returned.was_returned) == (StepFailed, name, True)

    async def test_a_foreign_failure_ends_the_run_like_one_of_its_own(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("returned", lambda: None)

        outcome = await Workflow("lookup", body).run(snapshot=FAILED, on_unknown_steps="ignore")
        assert isinstance(outcome, Err)
        assert outcome.error == "NOT_FOUND"

    async def test_a_plain_dict_becomes_what_the_step_is_annotated_with_where_it_fits(self) -> None:
        got: list[Any] = []

        @dataclass(frozen=True)
        class Person:
            id: str
            name: str
            born: date | None = None

        def never(_: str) -> Any:
            raise AssertionError("it is recorded")

        async def body(ctx: Context) -> None:
            for returns in (Person, Point, Any, dict, Person | None):
                got.append(await ctx.step("user", never, "x", key=f"user:{len(got)}", returns=returns))
            got.append(await ctx.step("when", never, "x", returns=datetime))
            got.append(await ctx.step("pair", never, "x", returns=tuple[int, str]))

        value = {"id": "1", "name": "Ada", "born": "1815-12-10"}
        steps = {f"user:{n}": StepResult(ok=True, value=value) for n in range(5)}
        steps["when"] = StepResult(ok=True, value="2026-01-01T00:00:00.000Z")
        steps["pair"] = StepResult(ok=True, value=[1, "a"])
        assert await Workflow("flow", body).run(snapshot=ResumeState(steps)) == Ok(None)
        ada = Person("1", "Ada", date(1815, 12, 10))
        assert got == [ada, value, value, value, ada, datetime(2026, 1, 1, tzinfo=UTC), (1, "a")]

    async def test_a_constructor_that_raises_leaves_the_dict(self) -> None:
        @dataclass
        class Picky:
            a: int

            def __post_init__(self) -> None:
                raise KeyError("never")

        async def body(ctx: Context) -> Any:
            return await ctx.step("a", lambda: None, returns=Picky)

        state = ResumeState({"a": StepResult(ok=True, value={"a": 1})})
        assert await Workflow("flow", body).run(snapshot=state) == Ok({"a": 1})

    async def test_a_told_step_stands_for_every_construct(self, there: There) -> None:
        got: list[Any] = []

        async def body(ctx: Context) -> None:
            await ctx.sleep("nap", "1h")
            got.append(await ctx.wait_for_signal("go", returns=Point))
            got.append(await ctx.wait_for_signal("late", timeout="1h", default="default"))
            try:
                async with ctx.timeout("limit", "1h"):
                    await ctx.wait_for_signal("never")
            except TimeoutError:
                got.append("too late")

        state = ResumeState(
            {
                "nap": StepResult(ok=True, value=None),
                "go": StepResult(ok=True, value={"x": 1.5, "y": 2}),
                "late": StepResult(ok=False, error="TIMEOUT"),
                "limit": StepResult(ok=True, value=None),
            }
        )
        assert await there.begin(Workflow("flow", body), snapshot=state) == Ok(None)
        assert got == [Point(1.5, 2.0), "default", "too late"]

    async def test_the_deepest_and_the_longest_value_that_may_be_stored_arrive(self) -> None:
        deep: Any = 1
        for _ in range(200):
            deep = [deep]
        long = "x" * (8 * 2**20 - 2)

        def make(what: str) -> Any:
            return deep if what == "deep" else long

        async def body(ctx: Context) -> list[bool]:
            return [(await ctx.step("deep", make, "deep")) == deep, (await ctx.step("long", make, "long")) == long]

        flow = Workflow("flow", body)
        run = await flow.start()
        assert await run == [True, True]
        for state in (await run.snapshot(), await run.resume_state()):
            assert await flow.run(snapshot=state) == Ok([True, True])

    async def test_a_warning_keeps_the_fields_that_nobody_knows(self) -> None:
        warning = {"type": "lossy_value", "stepId": "fn", "path": "value.x", "reason": "too-large", "bytes": 7}
        flow, _ = asking("fn")
        run = await flow.start(snapshot={**LOSSY, "warnings": [warning, {**warning, "stepId": "elsewhere"}]})
        await run
        assert through_text(await run.snapshot())["warnings"] == [warning]
        assert (await run.snapshot(limit=0)).warnings == ()


class TestWhatSomebodyChanged:
    """What the snapshot says about a step counts, whatever is kept beside it."""

    @asynccontextmanager
    async def failed(self, here: There) -> AsyncIterator[tuple[Workflow[[], Any], list[str], dict[str, Any]]]:
        ran: list[str] = []

        async def work(key: str, times_to_fail: int) -> str:
            ran.append(key)
            if ran.count(key) <= times_to_fail:
                raise ValueError(key)
            return f"<{key}>"

        async def body(ctx: Context) -> list[str]:
            log = [await ctx.step("work", work, "day", 0, key="day")]
            try:
                await ctx.step("work", work, "handled", 9, key="handled")
            except ValueError as error:
                log.append(f"handled {error}")
            retry = Retry(attempts=2, wait_initial="10s", wait_jitter=0)
            log.append(await ctx.step("work", work, "retried", 2, key="retried", retry=retry))
            log.append(await ctx.step("work", work, "once", 1, key="once", at_most_once=True))
            return log

        flow = Workflow("flow", body)
        await here.begin(flow)
        assert isinstance(await here.later("1m"), Err)
        yield flow, ran, through_text(await here.snapshot())

    async def test_a_failed_run_fails_again_elsewhere_and_runs_nothing(self, here: There, there: There) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            ran.clear()
            outcome = await there.begin(flow, snapshot=snapshot)
            assert isinstance(outcome, Err)
            assert repr(outcome.error) == "ValueError('retried')"
            assert ran == []

    async def test_retry_failed_runs_again_what_ended_the_run_with_all_its_attempts_and_nothing_else(
        self, here: There, there: There
    ) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            ran.clear()
            ran += ["retried", "retried"]  # as if it had been these two attempts that failed
            outcome = await there.begin(flow, snapshot=snapshot, retry_failed=True)
            assert isinstance(outcome, Err)
            assert repr(outcome.error) == "ValueError('once')"
            assert ran[2:] == ["retried", "once"]
            # And once more, what is at most once and has failed: that it failed is known.
            last = There(here.clock)
            assert await last.begin(flow, snapshot=through_text(await there.snapshot()), retry_failed=True) == Ok(
                ["<day>", "handled handled", "<retried>", "<once>"]
            )
            assert ran[2:] == ["retried", "once", "once"]

    async def test_retry_failed_starts_the_attempts_over(self, here: There, there: There) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            ran.clear()
            assert isinstance(await there.begin(flow, snapshot=snapshot, retry_failed=True), Suspended)
            assert ran == ["retried"]
            outcome = await there.later("1m")
            assert isinstance(outcome, Err)
            assert ran == ["retried", "retried"]

    async def test_a_state_does_not_know_what_ended_the_run_so_all_failures_are_tried_again(
        self, here: There, there: There
    ) -> None:
        async with self.failed(here) as (flow, ran, _):
            state = await (await here.run()).resume_state()
            ran.clear()
            await there.begin(flow, snapshot=state, retry_failed=True)
            assert ran == ["handled", "retried"]

    async def test_a_failed_durable_run_continues_and_calls_only_what_failed(self, here: There) -> None:
        async with self.failed(here) as (flow, ran, _):
            assert isinstance(await here.begin(flow), Err)
            ran.clear()
            ran += ["retried", "retried"]
            outcome = await here.begin(flow, retry_failed=True)
            assert isinstance(outcome, Err)
            assert ran[2:] == ["retried", "once"]
            assert await here.begin(flow, retry_failed=True) == Ok(["<day>", "handled handled", "<retried>", "<once>"])
            assert ran[2:] == ["retried", "once", "once"]
            assert await here.begin(flow, retry_failed=True) == Ok(["<day>", "handled handled", "<retried>", "<once>"])
            assert ran[2:] == ["retried", "once", "once"]

    async def test_a_step_that_was_taken_out_has_not_happened(self, here: There, there: There) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            del snapshot["steps"]["retried"]
            ran.clear()
            assert isinstance(await there.begin(flow, snapshot=snapshot), Suspended)
            assert ran == ["retried"]

    async def test_an_at_most_once_step_that_was_taken_out_runs_again(self, here: There, there: There) -> None:
        ran: list[str] = []

        async def body(ctx: Context) -> None:
            await ctx.step("once", ran.append, "once", at_most_once=True)

        flow = Workflow("flow", body)
        await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        del snapshot["steps"]["once"]
        assert await there.begin(flow, snapshot=snapshot) == Ok(None)
        assert ran == ["once", "once"]

    async def test_a_value_that_was_changed_is_the_value(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> list[Any]:
            return [
                await ctx.step("plain", lambda: 1),
                await ctx.step("day", lambda: date(2026, 1, 1)),
                await ctx.step("point", lambda: Point(1, 2), returns=Point),
            ]

        flow = Workflow("flow", body)
        await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        snapshot["steps"]["plain"]["value"] = {"$date": "2026-02-02"}
        snapshot["steps"]["day"]["value"]["$date"] = "2026-02-02"
        snapshot["steps"]["point"]["value"] = None
        assert await there.begin(flow, snapshot=snapshot) == Ok([{"$date": "2026-02-02"}, date(2026, 2, 2), None])
        assert through_text(await there.snapshot())["steps"]["day"] == snapshot["steps"]["day"]

    async def test_a_lossy_value_that_was_mended_is_whole(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> Any:
            return await ctx.step("a", lambda: [date(2026, 1, 1), object()])

        flow = Workflow("flow", body, strict=False)
        with pytest.warns(PerdureWarning, match="what cannot be stored"):
            await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        snapshot["steps"]["a"]["value"][1] = 7
        assert await there.begin(flow, snapshot=snapshot) == Ok([date(2026, 1, 1), 7])
        assert (await there.snapshot()).warnings == ()

    async def test_a_failure_that_somebody_settled_has_gone_well(self, here: There, there: There) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            snapshot["steps"]["retried"] = {**snapshot["steps"]["retried"], "ok": True, "value": "by hand"}
            ran.clear()
            outcome = await there.begin(flow, snapshot=snapshot)
            assert isinstance(outcome, Err)
            assert ran == ["once"]
            assert (await there.snapshot()).steps["retried"].value == "by hand"

    async def test_an_error_that_was_reworded_is_told_in_the_new_words(self, here: There, there: There) -> None:
        async with self.failed(here) as (flow, ran, snapshot):
            step = snapshot["steps"]["retried"]
            step["cause"]["message"] = "another"
            ran.clear()
            outcome = await there.begin(flow, snapshot=snapshot)
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, StepFailed)
            assert (outcome.error.error, outcome.error.args[2], ran) == ("ValueError", "another", [])
            assert through_text(await there.snapshot())["steps"]["retried"] == step

    async def test_what_we_keep_beside_the_steps_may_be_lost_on_the_way(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> list[Any]:
            log: list[Any] = [await ctx.step("plain", lambda: [1, None])]
            await ctx.sleep("nap", 0)
            try:
                await ctx.step("fails", returning(Err("E")))
            except StepFailed as failed:
                log.append(failed.error)
            return log

        flow = Workflow("flow", body)
        expected = await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        for without in ("metadata", "steps", "both"):
            bare = copy.deepcopy(snapshot)
            if without != "steps":
                del bare["metadata"]["perdure"]
            if without != "metadata":
                for step in bare["steps"].values():
                    step.pop("perdure", None)
            place = There(here.clock)
            assert await place.begin(flow, snapshot=bare) == expected
            told = through_text(await place.snapshot())["steps"]
            assert [{**step, "perdure": 0} for step in told.values()] == [
                {**step, "perdure": 0} for step in bare["steps"].values()
            ]

    async def test_pieces_that_were_exported_one_by_one_resume_as_a_whole(self, here: There, there: There) -> None:
        ran: list[str] = []

        async def flaky() -> str:
            ran.append("flaky")
            if len(ran) < 3:
                raise OSError("no")
            return "well"

        async def body(ctx: Context) -> list[Any]:
            log: list[Any] = [await ctx.step("a", returning({1}))]
            log.append(await ctx.step(flaky, retry=Retry(attempts=2, wait_initial="10s", wait_jitter=0)))
            await ctx.sleep("nap", "1h")
            return log

        flow = Workflow("flow", body)
        await here.begin(flow)
        merged = await here.snapshot()  # the first attempt has failed
        assert isinstance(await here.later("10s"), Err)
        merged = merge_snapshots(merged, await (await here.run()).snapshot(since="a"))
        await here.runtime.retry("there")
        await here.runtime.sweep()
        merged = merge_snapshots(merged, await (await here.run()).snapshot(since="a"))
        assert len(ran) == 3
        assert isinstance(await there.begin(flow, snapshot=through_text(merged)), Suspended)
        assert await there.later("1h") == Ok([{1}, "well"])
        assert len(ran) == 3
        closed = [entry.key for entry in await there.store.journal("there") if entry.phase == "close"]
        assert closed == ["a", "flaky", "nap"]


SEED: Final = {"seed": "AAAA", "createdAt": 1}
FAR: Final = 10**18


def _line(key: str = "a", phase: str = "open", kind: str = "step", payload: Any = None, **fields: Any) -> list[Any]:
    told = {"name": "", "attempt": 1, "started_at": 1, "ended_at": 1, "args_hash": None} | fields
    return [key, phase, kind, *told.values(), payload]


class TestWhatWeKeepBesideTheSteps:
    """It is checked like everything else, before anything happens: nothing in it can stop a run that has begun."""

    @pytest.mark.parametrize(
        ("record", "path"),
        [
            ({"seed": "A" * 100, "createdAt": 1}, "$.metadata.perdure"),
            ({"seed": "AAAA", "createdAt": FAR}, "$.metadata.perdure"),
            ({"seed": "AAAA"}, "$.metadata.perdure"),
            ({**SEED, "journal": {"x": _line()}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": [*_line(), 1]}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(key="")}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(phase="drop")}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(name="a\0b")}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(attempt=2**31)}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(attempt=-1)}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(started_at=FAR)}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(args_hash="A" * 100)}}, "$.metadata.perdure"),
            ({**SEED, "journal": {"1": _line(payload={"at": FAR, "error": {}})}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": _line(payload={"deadline": 1})}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": _line(kind="sleep", payload={"deadline": FAR})}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": _line(kind="sleep")}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": _line(kind="race", payload={"deadline": 1})}}, "$.metadata.perdure.journal"),
            ({**SEED, "journal": {"1": _line(kind="foreign", payload={"deadline": 1})}}, "$.metadata.perdure.journal"),
            (
                {**SEED, "journal": {"1": _line(), "2": _line(kind="sleep", payload={"deadline": 1})}},
                "$.metadata.perdure.journal",
            ),
            ({**SEED, "journal": {"1": _line(), "2": _line("a", "close", "sleep")}}, "$.metadata.perdure.journal"),
            ({**SEED, "status": "held"}, "$.metadata.perdure"),
            ({**SEED, "status": "failed", "outcome": {"origin": "result"}}, "$.metadata.perdure"),
            ({**SEED, "status": "completed", "outcome": {"$set": [[]]}}, "$.metadata.perdure"),
            ({**SEED, "inbox": [["signal", "", 1, None]]}, "$.metadata.perdure"),
            ({**SEED, "inbox": [["signal", "go", {"$date": 1}, None]]}, "$.metadata.perdure"),
            ({**SEED, "inbox": [["signal", "go", 1, "twice"]] * 2}, "$.metadata.perdure"),
            ({**SEED, "waitingFor": [["signal", "a\0b"]]}, "$.metadata.perdure"),
        ],
        ids=lambda part: str(part)[-60:],
    )
    async def test_a_run_that_could_not_go_on_is_refused(self, record: Any, path: str) -> None:
        flow, called = asking("a")
        store = stores.memory()
        document = {**ONE_STEP.to_snapshot().to_dict(), "metadata": {"perdure": record}}
        with pytest.raises(SnapshotFormatError) as caught:
            await flow.run(id="run", store=store, snapshot=document)
        assert caught.value.path == path
        assert (await store.list(), called) == ([], [])
        with pytest.raises(SnapshotFormatError):
            await store.save("run", document)
        assert await store.list() == []

    @pytest.mark.parametrize(
        ("step", "path"),
        [
            ({"ok": True, "value": "first", "perdure": {"kind": "race"}}, "$.steps.a.value"),
            ({"ok": True, "value": -1, "perdure": {"kind": "race"}}, "$.steps.a.value"),
            ({"ok": True, "value": None, "perdure": {"kind": "sleep", "tagged": 1}}, "$.steps.a.perdure"),
            ({"ok": True, "value": None, "perdure": {"unknown": 1}}, "$.steps.a.perdure"),
            ({"ok": True, "value": [None], "perdure": {"stored": [{"$lost": "why"}]}}, "$.steps.a.value"),
            ({"ok": False, "error": 1, "cause": {}, "perdure": {"failure": {"origin": "throw"}}}, "$.steps.a.perdure.failure"),
            ({"ok": False, "error": 1, "cause": {}, "perdure": {"failure": None}}, "$.steps.a.perdure.failure"),
            (
                {"ok": False, "error": 1, "cause": {}, "perdure": {"failure": {"origin": "result", "error": {"$date": 1}}}},
                "$.steps.a.perdure.failure",
            ),
            (
                {
                    "ok": False,
                    "error": 1,
                    "cause": {},
                    "perdure": {"failure": {"origin": "result", "error": 1, "cause": {"$int": 1}}},
                },
                "$.steps.a.perdure.failure",
            ),
        ],
        ids=lambda part: str(part)[-60:],
    )
    async def test_a_step_that_could_not_be_given_to_the_body_is_refused(self, step: dict[str, Any], path: str) -> None:
        if not step["ok"]:
            step = {**step, "cause": {"type": "thrown", "stringRepresentation": ""}}
        flow, called = asking("a")
        store = stores.memory()
        document = {**ONE_STEP.to_snapshot().to_dict(), "steps": {"a": step}}
        for given_as in (document, {"kind": "ResumeState", "steps": [["a", step]]}):
            with pytest.raises(SnapshotFormatError) as caught:
                await flow.run(id="run", store=store, snapshot=given_as)
            assert caught.value.path == path
        assert (await store.list(), called) == ([], [])


# Words that mean something where we keep what the shared format has no words for, and values that come close.
WORDS: Final[tuple[Any, ...]] = (
    "step", "sleep", "signal", "timeout", "race", "child", "run", "foreign", "open", "close", "drop", "result", "throw",
    "$datetime", "$set", "$tuple", "$dict", "$bytes", "$class", "$enum", "$lost", "$float", "$$x", "non-json", "builtins",
    "running", "suspended", "completed", "failed", "dead", "cancelled", "plain", "tagged", "lost", "raised", "returned",
    "nap", "go", "limit", "race", "flaky", "once", "perdure", "kind", "stored", "failure", "journal", "seed", "outcome", "inbox",
    "", "1", "01", "-1", "AAAA", "A" * 100, 0, 1, -1, 2**31, 2**53, 2**64, 10**400, True, None, (), {"a": 1},
)  # fmt: skip


def meddled(document: Any, random: Random) -> Any:
    """The document with a few parts replaced by words that mean something, moved, repeated or taken out."""
    document = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = mutations._places(document) or [({"": None}, "")]
        (container, key), (other, other_key) = random.choice(places), random.choice(places)
        match random.randrange(5):
            case 0:
                del container[key]
            case 1:
                container[key] = copy.deepcopy(other[other_key])
            case 2 if isinstance(container, dict):
                container[str(random.choice(WORDS))] = container.pop(key)
            case 3 if isinstance(container, dict):
                container[str(random.choice(WORDS))] = copy.deepcopy(other[other_key])
            case _:
                word = random.choice(WORDS)
                container[key] = [] if word == () else word
    return document


async def _lossy() -> list[Any]:
    return [1, object(), date(2026, 1, 1)]


async def _raised() -> None:
    try:
        raise KeyError("inner", {1})
    except KeyError as inner:
        raise ValueError("outer", datetime(2026, 1, 1, tzinfo=UTC)) from inner


async def _returned() -> Err[Any]:
    return Err({"code", 1}, cause=[(1,)])


async def _returned_exception() -> Err[Any]:
    return Err(LookupError("inside"), cause=OSError(5, "why"))


async def _never() -> None:
    raise OSError("never")


async def _whatever(ctx: Context, n: int) -> int:
    """Everything that can be recorded; whatever a step comes to, the next one is asked for."""

    async def plain() -> Any:
        return {"a": [1, None, "x"], "n": n}

    async def tagged() -> Any:
        return {"$x": [datetime(2026, 1, 1, tzinfo=UTC), {1, 2}, (b"x",), {1: float("nan")}, "\ud800", 10**700]}

    async def slow() -> None:
        await ctx.sleep("slow", "1h")

    calls: list[Callable[[], Awaitable[Any]]] = [
        *(functools.partial(ctx.step, fn) for fn in (plain, tagged, _lossy, _raised, _returned, _returned_exception)),
        functools.partial(ctx.step, "once", plain, at_most_once=True),
        lambda: ctx.race("race", ctx.step("fast", plain), slow()),
        functools.partial(ctx.sleep, "nap", 0),
        functools.partial(ctx.wait_for_signal, "go"),
        functools.partial(ctx.wait_for_signal, "late", timeout=0, default=None),
        functools.partial(ctx.scope("a/b").step, "scoped", plain),
        functools.partial(ctx.step, _never, retry=Retry(attempts=3, wait_initial="1h", wait_max="1h", wait_jitter=0)),
    ]
    for call in calls:
        with contextlib.suppress(PerdureError, ValueError, OSError):
            await call()
    async with ctx.timeout("limit", "1h"):
        return n


WHATEVER: Final = Workflow("whatever", _whatever, strict=False, on_definition_change="ignore", on_unknown_steps="ignore")


async def own_documents(here: There) -> list[Any]:
    """What a run of everything is exported as: whole, in parts, as a state, at the end, and once it was resumed."""
    await here.begin(WHATEVER, 1)
    run = await here.run()
    await run.signal("go", {"by": {"ada"}})
    await here.runtime.sweep()
    await run.signal("never", 7, dedupe="once")
    documents = [through_text(await run.snapshot()), through_text(await run.snapshot(since="tagged"))]
    documents.append(json.loads(dump_state(await run.resume_state())))
    documents.append({"kind": "ResumeState", "steps": [[key, step] for key, step in documents[0]["steps"].items()]})
    await here.later("1h")
    await here.later("1h")
    documents.append(through_text(await run.snapshot()))
    assert documents[-1]["execution"]["status"] == "completed"
    again = There(here.clock)
    await again.begin(WHATEVER, 1, snapshot=documents[2])
    return [*documents, through_text(await again.snapshot())]


async def begun_or_refused(document: Any, clock: ManualClock) -> str:
    """What became of a run that was to begin with this, after checking that it is one of the things that may become of it."""
    place = There(clock)
    told: list[str] = []
    try:
        outcome = await place.begin(WHATEVER, 1, snapshot=document, on_event=lambda event: told.append(event.type))
    except SnapshotFormatError as error:
        assert error.errors  # noqa: PT017 - most of these are errors, some are other runs
        assert all(problem.path[0] == "$" and problem.reason for problem in error.errors)  # noqa: PT017 - as above
        assert str(error).isprintable()  # noqa: PT017 - as above
        refused = "no snapshot"
    except SnapshotMismatch as error:
        assert "of workflow" in str(error)  # noqa: PT017 - as above
        refused = "another workflow"
    else:
        if isinstance(outcome, Err) and isinstance(outcome.error, StepChanged):
            return "stopped"  # a key is recorded as another kind of call
        assert isinstance(outcome, Ok | Suspended), outcome
        # A snapshot can be taken of it, and a run can go on from that one too.
        exported = through_text(await place.snapshot())
        outcome = await There(clock).begin(WHATEVER, 1, snapshot=exported)
        assert isinstance(outcome, Ok | Suspended), outcome
        return "begun"
    assert (told, await place.store.list()) == ([], [])
    return refused


@pytest.mark.filterwarnings("ignore::perdure.errors.PerdureWarning")
async def test_a_broken_state_is_refused_before_anything_happens_or_begins_a_run_like_any_other(here: There) -> None:
    own = await own_documents(here)
    for document in own:
        assert await begun_or_refused(document, here.clock) == "begun"
    renamed = [{**document, "workflowName": "whatever"} for document in FOREIGN.values() if "formatVersion" in document]
    documents = [*own, *own, *own, *renamed, *FOREIGN.values()]
    became: Counter[str] = Counter()
    for seed in range(times(10_000)):
        random = Random(seed)
        break_it = mutations.mutated if seed % 3 else meddled
        became[await begun_or_refused(break_it(documents[seed % len(documents)], random), here.clock)] += 1
    assert became.keys() - {"stopped"} == {"begun", "no snapshot", "another workflow"}
    assert became["begun"] > times(500)


@pytest.mark.filterwarnings("ignore::perdure.errors.PerdureWarning")
async def test_only_a_class_or_an_enum_is_found_out_when_its_step_is_asked_for(here: There) -> None:
    """Which classes a step may give is known where it is called; until then an object is any object that is well formed."""

    async def body(ctx: Context) -> None:
        for key, returns in (("item", Item), ("level", Level), ("page", Page[Item])):
            values = {"item": Item("a", Decimal(1)), "level": Level.HIGH, "page": Page([Item("b")])}
            await ctx.step(key, returning(values[key]), returns=returns)

    flow = Workflow("flow", body)
    await here.begin(flow)
    document = through_text(await here.snapshot())
    became: Counter[str] = Counter()
    for seed in range(times(2000)):
        broken = meddled({"steps": document["steps"]}, Random(seed))
        place = There(here.clock)
        try:
            outcome = await place.begin(flow, snapshot={**document, **broken})
        except SnapshotFormatError:
            assert await place.store.list() == []
            became["refused"] += 1
            continue
        became[type(outcome.error).__name__ if isinstance(outcome, Err) else "begun"] += 1
        if isinstance(outcome, Err) and isinstance(outcome.error, SnapshotCorrupt):
            (key,) = re.findall(r"the record of step '(\w+)'", str(outcome.error))
            assert re.search(r'"\$(class|enum)"', json.dumps(broken["steps"][key]))
    assert became.keys() >= {"refused", "begun", "SnapshotCorrupt"}
