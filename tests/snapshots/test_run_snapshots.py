"""`run.snapshot()`: its content, for every driver and every status of the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Err, Ok, Run, Runtime, Suspended, Workflow, open_store, stores
from perdure.errors import PerdureWarning, RunDead, RunNotFound, SnapshotCorrupt, ValueNotStorable
from perdure.events import Event
from perdure.model.records import Status
from perdure.snapshots.parts import LossWarning
from perdure.snapshots.snapshot import Snapshot
from perdure.state import is_step_complete, merge_snapshots, parse_state
from tests.engine.replays import spoil, stored
from tests.engine.worlds import World, world
from tests.naming import short_id

lossy = pytest.mark.filterwarnings("ignore:what cannot be stored:perdure.errors.PerdureWarning")


async def _fails() -> None:
    raise ValueError("no")


async def _holds_a_socket(name: str) -> dict[str, Any]:
    return {"name": name, "socket": object(), "parts": [object(), 1]}


def _circular() -> list[Any]:
    around: list[Any] = [1]
    around.append(around)
    return around


async def _mixed(ctx: Context) -> str:
    """Two steps that go well, one that fails, and two more, the last beside a part that is lost."""
    await ctx.step("a", lambda: 1)
    try:
        await ctx.step("b", _fails)
    except ValueError:
        await ctx.step("c", lambda: {3})
    await ctx.sleep("nap", 0)
    await ctx.step("lost", _holds_a_socket, "x")
    return "done"


async def _run_of(here: World, run_id: str = "run") -> Run[Any]:
    run = await here.runtime.get(run_id)
    assert run is not None
    return run


def _keys(snapshot: Snapshot) -> list[str]:
    return list(snapshot.steps)


def assert_format_1(tree: Any) -> None:
    """The shared format as its authors describe it, with nothing else in it but what stands under `perdure`."""
    assert json.loads(json.dumps(tree)) == tree
    assert tree.keys() <= {"formatVersion", "workflowName", "steps", "execution", "metadata", "warnings"}
    assert tree["formatVersion"] == 1
    assert isinstance(tree.get("workflowName", ""), str)
    for key, step in tree["steps"].items():
        assert key
        assert step.keys() - {"perdure"} in ({"ok", "value"}, {"ok", "error", "cause", "meta"})
        assert step["ok"] is ("value" in step)
        if not step["ok"]:
            assert step["meta"] in ({"origin": "result"}, {"origin": "throw"})
            _assert_cause(step["cause"])
    execution = tree["execution"]
    assert execution.keys() <= {"status", "lastUpdated", "completedAt", "currentStepId"}
    assert execution["status"] in ("running", "completed", "failed")
    assert ("completedAt" in execution) is (execution["status"] != "running")
    for name in execution.keys() & {"lastUpdated", "completedAt"}:
        assert datetime.fromisoformat(execution[name]).tzinfo is UTC
    assert execution.get("currentStepId", "a") in {*tree["steps"], "a"}
    for warning in tree.get("warnings", ()):
        assert warning.keys() == {"type", "stepId", "path", "reason"}
        assert warning["type"] == "lossy_value"
        assert warning["stepId"] in tree["steps"]
        assert warning["reason"] in ("non-json", "circular", "encode-failed")


def _assert_cause(cause: Any) -> None:
    if cause["type"] == "error":
        assert cause.keys() <= {"type", "name", "message", "stack", "cause"}
        assert all(isinstance(cause.get(name, ""), str) for name in ("name", "message", "stack"))
        if "cause" in cause:
            _assert_cause(cause["cause"])
    else:
        assert cause["type"] == "thrown"
        assert cause.keys() <= {"type", "originalType", "value", "stringRepresentation", "truncated"}
        assert isinstance(cause["stringRepresentation"], str)


@lossy
class TestSelection:
    """Which steps a snapshot has."""

    async def taken(self, **options: Any) -> Snapshot:
        flow = Workflow("flow", _mixed, strict=False)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run", metadata={"tenant": "acme"})
            return await (await _run_of(here)).snapshot(**options)

    async def test_all_steps_are_told_in_the_order_in_which_they_were_recorded(self) -> None:
        snapshot = await self.taken()
        assert _keys(snapshot) == ["a", "b", "c", "nap", "lost"]
        assert_format_1(snapshot.to_dict())

    @pytest.mark.parametrize(
        ("options", "keys"),
        [
            ({"include": "all"}, ["a", "b", "c", "nap", "lost"]),
            ({"include": "completed"}, ["a", "c", "nap", "lost"]),
            ({"include": "failed"}, ["b"]),
            ({"limit": 0}, []),
            ({"limit": 2}, ["a", "b"]),
            ({"limit": 99}, ["a", "b", "c", "nap", "lost"]),
            ({"include": "completed", "limit": 2}, ["a", "c"]),
            ({"include": "failed", "limit": 2}, ["b"]),
            ({"since": "b"}, ["c", "nap", "lost"]),
            ({"since": "lost"}, []),
            ({"since": "b", "limit": 1}, ["c"]),
            ({"since": "b", "include": "failed"}, []),
            ({"since": "b", "include": "completed", "limit": 2}, ["c", "nap"]),
        ],
        ids=str,
    )
    async def test_since_is_exclusive_and_the_limit_counts_what_is_included_oldest_first(
        self, options: dict[str, Any], keys: list[str]
    ) -> None:
        snapshot = await self.taken(**options)
        assert _keys(snapshot) == keys
        assert Snapshot.from_dict(snapshot.to_dict()) == snapshot

    async def test_an_unknown_since_is_an_error_that_names_it(self) -> None:
        for since in ("never", "", "open"):
            with pytest.raises(ValueError, match=f"since='{since}'"):
                await self.taken(since=since)

    @pytest.mark.parametrize("options", [{"include": "some"}, {"limit": -1}, {"limit": True}, {"limit": "2"}, {"limit": 1.0}])
    async def test_what_makes_no_sense_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            await self.taken(**options)

    async def test_only_included_steps_have_warnings(self) -> None:
        told = [LossWarning(step_id="lost", path=path, reason="non-json") for path in ('value["socket"]', 'value["parts"][0]')]
        assert list((await self.taken()).warnings) == told
        assert list((await self.taken(since="nap")).warnings) == told
        for options in ({"limit": 4}, {"include": "failed"}, {"since": "lost"}):
            assert (await self.taken(**options)).warnings == ()

    async def test_how_the_run_stood_does_not_depend_on_what_is_included(self) -> None:
        for options in ({}, {"limit": 0}, {"include": "failed"}, {"since": "b"}):
            snapshot = await self.taken(**options)
            assert snapshot.execution.status == "completed"
            assert snapshot.execution.current_step_id == "lost"

    async def test_metadata_is_added_to_the_runs_own_and_must_be_json(self) -> None:
        metadata = dict((await self.taken(metadata={"note": [1], "tenant": "other"})).metadata or {})
        assert metadata.pop("perdure")
        assert metadata.pop("definitionHash").startswith("ast1:")
        assert metadata == {"workflowId": "run", "input": [[], {}], "tenant": "other", "note": [1]}
        for wrong in ({"at": datetime.now(UTC)}, {1: 2}, [("a", 1)]):
            with pytest.raises(TypeError, match="metadata must be a dict of JSON values"):
                await self.taken(metadata=wrong)
        with pytest.raises(ValueError, match="metadata has 'perdure', which only perdure writes"):
            await self.taken(metadata={"perdure": 1})

    @pytest.mark.parametrize("cut", ["a", "b", "c", "nap", "lost"])
    async def test_two_halves_merge_to_the_whole(self, cut: str) -> None:
        flow = Workflow("flow", _mixed, strict=False)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
            run = await _run_of(here)
            whole = await run.snapshot()
            halves = await run.snapshot(limit=_keys(whole).index(cut) + 1), await run.snapshot(since=cut)
            assert merge_snapshots(*halves).to_dict() == whole.to_dict()
            assert await flow.run(snapshot=merge_snapshots(*halves), strict=False) == Ok("done")


class TestStanding:
    """The words of the format for every status, from memory and from the store."""

    async def test_a_run_that_is_driven_tells_only_what_the_store_has_acknowledged(self) -> None:
        let_go, snapshots = asyncio.Event(), asyncio.Queue[Snapshot]()

        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.step("b", lambda: 2)

        flow = Workflow("flow", body)
        store = stores.memory()
        record = store.record

        async def slow_record(*args: Any, **options: Any) -> Any:
            run = await here.runtime.get("run")
            assert run is not None
            snapshots.put_nowait(await run.snapshot())
            await let_go.wait()
            return await record(*args, **options)

        async with world(flow, store=store) as here:
            store.record = slow_record  # type: ignore[method-assign]
            running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
            while_writing = await snapshots.get()
            assert _keys(while_writing) == []
            assert while_writing.execution.status == "running"
            run = await _run_of(here)
            assert _keys(await run.snapshot()) == []
            let_go.set()
            assert await running == Ok(None)
            assert _keys(await run.snapshot()) == ["a", "b"]

    async def test_a_listener_is_told_the_run_as_it_stood_then(self) -> None:
        told: list[Event] = []

        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.step("b", _fails)

        flow = Workflow("flow", body, on_event=told.append)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
        by_type = {event.type: event.snapshot for event in told}
        assert _keys(by_type["run_start"]) == []
        assert _keys(by_type["step_success"]) == ["a"]
        assert _keys(by_type["step_error"]) == ["a", "b"]
        assert by_type["step_error"].execution.status == "running"
        assert by_type["run_error"].execution.status == "failed"
        for event in told:
            assert_format_1(event.snapshot.to_dict())
            assert is_step_complete(event.snapshot, "a") is ("a" in event.snapshot.steps)

    async def test_the_snapshot_of_the_last_event_is_that_of_the_run_that_has_ended(self) -> None:
        told: list[Event] = []

        async def body(ctx: Context, ending: str) -> str:
            await ctx.step("a", lambda: 1)
            if ending == "fails":
                try:
                    await ctx.step("handled", _fails)
                except ValueError:
                    await ctx.step("b", _fails)
            if ending == "waits":
                await ctx.sleep("nap", "1h")
            return ending

        flow = Workflow("flow", body, on_event=told.append)
        for ending in ("completes", "fails", "waits"):
            async with world(flow) as here:
                await here.runtime.run(flow, ending, id="run")
                assert told[-1].snapshot.to_dict() == (await (await _run_of(here)).snapshot()).to_dict()

    async def test_a_listener_that_asks_the_run_itself_gets_what_it_was_told(self) -> None:
        pairs: list[tuple[Snapshot, Snapshot]] = []

        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)

        async def listen(event: Event) -> None:
            pairs.append((event.snapshot, await (await _run_of(here)).snapshot()))

        flow = Workflow("flow", body, on_event=listen)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
        assert pairs
        for told, asked in pairs:
            assert told.to_dict() == asked.to_dict()

    async def test_a_suspended_run_is_running(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.sleep("nap", "1h")

        flow = Workflow("flow", body)
        async with world(flow) as here:
            assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
            run = await _run_of(here)
            snapshot = await run.snapshot()
            assert await run.status() == "suspended"
            assert (_keys(snapshot), snapshot.execution.status, snapshot.execution.completed_at) == (["a"], "running", None)
            assert_format_1(snapshot.to_dict())
            await here.later("1h")
            snapshot = await run.snapshot()
            assert (_keys(snapshot), snapshot.execution.status) == (["a", "nap"], "completed")
            assert snapshot.execution.completed_at == snapshot.execution.last_updated == datetime(2026, 1, 1, 1, tzinfo=UTC)

    async def test_a_run_that_nobody_has_begun_is_running(self) -> None:
        flow = Workflow("flow", _mixed)
        async with world(flow) as here:
            run = await here.runtime.start(flow, id="run")
            snapshot = await run.snapshot()
            assert await run.status() == "pending"
            assert (_keys(snapshot), snapshot.execution.status) == ([], "running")
            assert snapshot.execution.current_step_id is None
            assert_format_1(snapshot.to_dict())

    async def test_a_cancelled_run_has_failed(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.wait_for_signal("never")

        flow = Workflow("flow", body)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
            run = await _run_of(here)
            await run.cancel()
            await here.runtime.sweep()
            await self.ended_as(run, "cancelled", ["a"])

    async def test_a_dead_run_has_failed(self) -> None:
        flow = Workflow("flow", _mixed)
        async with world(flow, max_attempts=1) as here:
            run = await here.runtime.start(flow, id="run")
            row = stored(here)
            row.change(attempts=7)
            outcome = (await here.runtime.sweep())["run"]
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, RunDead)
            await self.ended_as(run, "dead", [])

    async def ended_as(self, run: Run[Any], status: Status, keys: list[str]) -> None:
        snapshot = await run.snapshot()
        assert await run.status() == status
        assert (_keys(snapshot), snapshot.execution.status) == (keys, "failed")
        assert snapshot.execution.completed_at is not None
        assert_format_1(snapshot.to_dict())

    async def test_an_unknown_run_and_a_purged_one_are_not_found(self) -> None:
        flow = Workflow("flow", _mixed, strict=False)
        async with world(flow) as here:
            with pytest.warns(PerdureWarning, match="what cannot be stored"):
                await here.runtime.run(flow, id="run")
            run = await _run_of(here)
            here.clock.advance("2d")
            assert await here.runtime.purge("1d") == 1
            for call in (run.snapshot, run.resume_state):
                with pytest.raises(RunNotFound, match="'run'"):
                    await call()
            assert await here.runtime.get("run") is None

    async def test_what_failed_and_was_set_aside_is_not_told_any_more(self) -> None:
        calls: list[str] = []

        async def second_time_lucky() -> int:
            calls.append("b")
            if calls.count("b") == 1:
                raise ValueError("no")
            return 2

        async def body(ctx: Context) -> int:
            await ctx.step("a", calls.append, "a")
            return await ctx.step("b", second_time_lucky)

        flow = Workflow("flow", body)
        async with world(flow) as here:
            assert isinstance(await here.runtime.run(flow, id="run"), Err)
            run = await _run_of(here)
            assert (await run.snapshot()).steps["b"].ok is False
            await here.runtime.retry("run")
            snapshot = await run.snapshot()
            assert (_keys(snapshot), snapshot.execution.status, snapshot.execution.current_step_id) == (["a"], "running", "a")
            assert await here.runtime.resume("run") == Ok(2)
            assert (await run.snapshot()).steps["b"].value == 2
            assert calls == ["a", "b", "b"]

    async def test_a_run_that_another_process_drives_is_told_from_the_store(self, tmp_path: Path) -> None:
        dsn = f"sqlite:///{tmp_path}/runs.db"
        reached, let_go = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            reached.set()
            await let_go.wait()

        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: date(2026, 1, 1))
            await ctx.step("b", wait)

        flow = Workflow("flow", body)
        driver, looker = Runtime(open_store(dsn), [flow], concurrency=0), Runtime(_other_handle(dsn), [], concurrency=0)
        running = asyncio.ensure_future(driver.run(flow, id="run"))
        await reached.wait()
        there = await looker.get("run")
        assert there is not None
        snapshot = await there.snapshot()
        assert (_keys(snapshot), snapshot.execution.status) == (["a"], "running")
        here = await driver.get("run")
        assert here is not None
        assert (await here.snapshot()).to_dict() == snapshot.to_dict()
        let_go.set()
        await running
        snapshot = await there.snapshot()
        assert (_keys(snapshot), snapshot.execution.status) == (["a", "b"], "completed")
        await looker.close()
        await driver.close()

    @pytest.mark.parametrize("read", ["get", "journal", "inbox"])
    async def test_a_run_that_moves_while_the_store_is_read_is_told_as_it_is_at_one_moment(self, read: str) -> None:
        async def body(ctx: Context) -> list[Any]:
            return [await ctx.wait_for_signal("one"), await ctx.wait_for_signal("two")]

        flow = Workflow("flow", body)
        store = stores.memory()
        async with world(flow, store=store) as here:
            await here.runtime.run(flow, id="run")
            await here.runtime.signal("run", "one", 1)
            real = getattr(store, read)

            async def goes_on_meanwhile(*args: Any, **options: Any) -> Any:
                found = await real(*args, **options)
                setattr(store, read, real)
                await here.runtime.sweep()
                return found

            run = await _run_of(here)
            setattr(store, read, goes_on_meanwhile)
            record = ((await run.snapshot()).metadata or {})["perdure"]
            assert record["waitingFor"] == [["signal", "two"]]
            assert [line[:2] for line in record["journal"].values()] == [["one", "open"], ["one", "close"], ["two", "open"]]
            assert "inbox" not in record

    @pytest.mark.parametrize("payload", [b"{", b'{"$lost": 1}', b"\xff"])
    async def test_a_record_that_cannot_be_read_is_corrupt_and_left_alone(self, payload: bytes) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("a", lambda: 1)

        flow = Workflow("flow", body)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
            spoil(here, "a", payload)
            run = await _run_of(here)
            for call in (run.snapshot, run.resume_state):
                with pytest.raises(SnapshotCorrupt, match="the record of 'a'"):
                    await call()


def _other_handle(dsn: str) -> Any:
    """The same database as another process has it: drives are joined by key, so this one has a key of its own."""
    store = open_store(dsn)

    class Elsewhere:
        key = ("elsewhere", *store.key)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    return Elsewhere()


class TestLosses:
    """What strict=False leaves out is never silent."""

    async def test_without_strict_the_body_the_store_and_the_snapshot_agree_and_somebody_is_warned(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        async def body(ctx: Context) -> str:
            seen.append(await ctx.step("lost", _holds_a_socket, "x"))
            await ctx.sleep("nap", 0)
            return "done"

        flow = Workflow("flow", body, strict=False)
        dsn = f"sqlite:///{tmp_path}/runs.db"
        with pytest.warns(PerdureWarning, match=r'value\["socket"\] \(non-json\), value\["parts"\]\[0\] \(non-json\)'):
            assert await flow.run(id="run", store=dsn) == Ok("done")
        # Another process reads the file.
        store = open_store(dsn)
        runtime = Runtime(store, [flow], concurrency=0)
        run = await runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
        await runtime.close()
        told = [("lost", 'value["socket"]', "non-json"), ("lost", 'value["parts"][0]', "non-json")]
        assert [(warning.step_id, warning.path, warning.reason) for warning in snapshot.warnings] == told
        assert snapshot.steps["lost"].value == {"name": "x", "socket": None, "parts": [None, 1]} == seen[0]
        assert_format_1(snapshot.to_dict())
        # And yet another one goes on from it.
        text = json.dumps(snapshot.to_dict())
        other = stores.memory()
        assert await flow.run(id="again", store=other, snapshot=json.loads(text)) == Ok("done")
        assert seen[1] == seen[0]
        loaded = await other.load("again")
        assert loaded is not None
        assert loaded.warnings == snapshot.warnings
        assert loaded.steps == snapshot.steps

    async def test_strict_is_the_default_with_a_store_and_the_step_fails_with_the_path(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("lost", _holds_a_socket, "x")

        flow = Workflow("flow", body)
        async with world(flow) as here:
            outcome = await here.runtime.run(flow, id="run")
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, ValueNotStorable)
            snapshot = await (await _run_of(here)).snapshot()
            assert snapshot.warnings == ()
            assert snapshot.steps["lost"].error == "UNEXPECTED_ERROR"
            cause = snapshot.steps["lost"].cause
            assert cause is not None
            assert (cause["name"], 'value["socket"]' in cause["message"]) == ("ValueNotStorable", True)

    @lossy
    @pytest.mark.parametrize(
        ("make", "path", "reason"),
        [
            (object, "value", "non-json"),
            (lambda: [1, {"a": len}], 'value[1]["a"]', "non-json"),
            (lambda: {"$x": object()}, 'value["$x"]', "non-json"),
            (lambda: {1: object()}, "value[1]", "non-json"),
            (_circular, "value[1]", "circular"),
        ],
        ids=short_id,
    )
    async def test_every_loss_has_its_path_and_reason_here_and_after_an_export(
        self, make: Callable[[], Any], path: str, reason: str
    ) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("lost", make)
            await ctx.sleep("nap", "1h")

        flow = Workflow("flow", body, strict=False)
        run = await flow.start(id="run", store=stores.memory())
        await run.outcome()
        expected = [LossWarning(step_id="lost", path=path, reason=reason)]
        snapshot = await run.snapshot()
        for _ in range(3):
            assert list(snapshot.warnings) == expected
            run = await flow.start(id="run", store=stores.memory(), snapshot=Snapshot.from_dict(snapshot.to_dict()))
            await run.outcome()
            again = await run.snapshot()
            assert again.steps == snapshot.steps
            snapshot = again
        # A resume state has no warnings, but what is lost is known from its steps.
        run = await flow.start(id="run", store=stores.memory(), snapshot=await run.resume_state())
        await run.outcome()
        assert list((await run.snapshot()).warnings) == expected

    @lossy
    async def test_what_an_error_and_its_cause_lose_is_told_too(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("bad", lambda: Err({"code": 1, "by": object()}, cause=[object()]))

        flow = Workflow("flow", body, strict=False)
        async with world(flow) as here:
            await here.runtime.run(flow, id="run")
            snapshot = await (await _run_of(here)).snapshot()
            assert snapshot.steps["bad"].error == {"code": 1, "by": None}
            assert [(warning.path, warning.reason) for warning in snapshot.warnings] == [
                ('error["by"]', "non-json"),
                ("cause.value[0]", "non-json"),
            ]
            assert_format_1(snapshot.to_dict())

    async def test_a_cause_that_is_lost_is_never_silent(self) -> None:
        async def body(ctx: Context) -> None:
            await ctx.step("bad", lambda: Err("E", cause=[object()]))

        for strict in (True, False):
            flow = Workflow("flow", body, strict=strict)
            with pytest.warns(PerdureWarning, match=r"cause\[0\] \(non-json\)"):
                assert isinstance(await flow.run(), Err)


async def test_a_resume_state_has_the_steps_of_the_snapshot_and_the_users_own_metadata() -> None:
    flow = Workflow("flow", _mixed, strict=False)
    async with world(flow) as here:
        with pytest.warns(PerdureWarning, match="what cannot be stored"):
            await here.runtime.run(flow, id="run", metadata={"tenant": "acme"})
        run = await _run_of(here)
        state, snapshot = await run.resume_state(), await run.snapshot()
        assert state.steps == snapshot.steps
        assert state.metadata == {"tenant": "acme"}
        assert parse_state(snapshot.to_dict()).steps == state.steps
