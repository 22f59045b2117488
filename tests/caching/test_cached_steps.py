"""Steps with a cache: what other runs get, for how long, and from whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, current_step, step, stores, workflow
from perdure.engine import step_cache as caching
from perdure.errors import (
    DuplicateStep,
    PerdureWarning,
    PersistenceError,
    RunCancelled,
    StepChanged,
    StepFailed,
    StepTimeout,
    ValueNotStorable,
)
from perdure.events import Event, StepEvent
from perdure.state import FileCache, MemoryCache
from perdure.store import Store
from perdure.testing import ManualClock
from tests.caching.cached import (
    AT_ONCE,
    CACHES,
    HOURLY,
    Body,
    Counted,
    Gated,
    OwnCache,
    Untouchable,
    entry_of,
    flow,
    forget,
    has,
    one_step,
    until,
    waiting_for_a_turn,
)
from tests.codec.same import same
from tests.engine.worlds import world
from tests.patience import PATIENCE
from tests.simulation import LoopClock, MortalStore, simulate


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return CACHES[request.param](tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = stores.memory() if request.param == "memory" else await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def no_flight_is_left() -> Iterator[None]:
    yield
    assert caching._flights == {}


# Other runs.


async def test_a_later_run_with_the_same_key_does_not_call(store: Store, cache: Any) -> None:
    fn = Counted()
    wf = flow(one_step(fn), cache=cache)
    assert [await wf.run(id=f"r{n}", store=store) for n in range(3)] == [Ok("first")] * 3
    assert await wf() == "first"
    assert fn.calls == 1


async def test_workflows_that_have_a_cache_and_a_key_in_common_have_the_value_in_common() -> None:
    fn, cache = Counted(), dict[str, str]()
    assert await flow(one_step(fn), "a", cache=cache).run() == Ok("first")
    assert await flow(one_step(fn), "b", cache=cache).run() == Ok("first")
    assert await flow(one_step(fn, key="t"), "c", cache=cache).run() == Ok("second")
    assert sorted(cache) == ["s", "t"]


async def test_raised_exceptions_are_cached_and_deleting_the_key_makes_the_next_run_call_again(store: Store, cache: Any) -> None:
    fn = Counted(ValueError("one"), ValueError("two"), "well")
    wf = flow(one_step(fn), cache=cache)
    for expected in ("one", "one", "two", "two"):
        if expected == "two" and fn.calls == 1:
            assert await forget(cache, "s")
        outcome = await wf.run(id=f"r{uuid.uuid4()}", store=store)
        assert isinstance(outcome, Err)
        assert (type(outcome.error), outcome.error.args) == (ValueError, (expected,))
    assert fn.calls == 2
    assert await forget(cache, "s")
    assert await wf() == "well"


async def test_a_returned_err_is_cached(store: Store, cache: Any) -> None:
    fn = Counted(Err("NOT_FOUND"), "well")
    wf = flow(one_step(fn), cache=cache)
    assert [await wf.run(id=f"r{n}", store=store) for n in range(3)] == [Err("NOT_FOUND")] * 3
    with pytest.raises(StepFailed) as failed:
        await wf()
    assert (failed.value.error, failed.value.was_returned, fn.calls) == ("NOT_FOUND", True, 1)
    await forget(cache, "s")
    assert await wf() == "well"


async def test_what_a_run_has_recorded_does_not_change_when_its_key_is_deleted(store: Store) -> None:
    fn, cache = Counted(), dict[str, str]()
    wf = flow(one_step(fn), cache=cache)
    assert await wf.run(id="r1", store=store) == Ok("first")
    cache.clear()
    assert await wf.run(id="r1", store=store) == Ok("first")
    assert await wf.run(id="r2", store=store) == Ok("second")
    assert await wf.run(id="r1", store=store) == Ok("first")


async def test_the_order_is_journal_cache_call(store: Store) -> None:
    fn, cache, log = Counted(), OwnCache(), list[str]()
    cache.log = log

    async def noted() -> Any:
        log.append("call")
        return await fn()

    async def body(ctx: Context[Any]) -> Any:
        value = await ctx.step("s", noted, key="s")
        await ctx.sleep("nap", "1h")
        return value

    definition = flow(body, cache=cache)
    async with world(definition, store=store) as here:
        for run_id, expected in (("r1", ["get s", "call", "set s"]), ("r2", ["get s"])):
            assert isinstance(await here.runtime.run(definition, id=run_id), Suspended)
            assert log == expected
            log.clear()
        assert await here.later("1h") == {"r1": Ok("first"), "r2": Ok("first")}
        assert log == []  # both were in their journals


async def test_a_hit_is_journaled_like_any_result_and_replays_without_the_cache(store: Store) -> None:
    fn, cache = Counted(), dict[str, str]()

    async def body(ctx: Context[Any], number: int) -> Any:
        value = await ctx.step("s", fn, 7, key="s")
        await ctx.sleep("nap", "1h")
        return [value, number]

    definition = Workflow("flow", body, cache=cache)
    async with world(definition, store=store) as here:
        assert isinstance(await here.runtime.run(definition, 1, id="r1"), Suspended)
        here.clock.advance("5m")
        assert isinstance(await here.runtime.run(definition, 2, id="r2"), Suspended)
        made, hit = await entry_of(store, "r1", "s"), await entry_of(store, "r2", "s")
        assert (made.attempt, hit.attempt) == (1, 0)
        assert (hit.kind, hit.name, hit.ok, hit.payload, hit.args_hash) == (made.kind, "s", True, made.payload, made.args_hash)
        assert hit.started_at == hit.ended_at == here.clock.now() > made.ended_at
        run = await here.runtime.get("r2")
        assert run is not None
        assert (await run.snapshot()).to_dict()["steps"] == {"s": {"ok": True, "value": "first"}}
    async with world(Workflow("flow", body, cache=Untouchable()), store=store) as here:
        assert await here.later("2h") == {"r1": Ok(["first", 1]), "r2": Ok(["first", 2])}
    assert fn.calls == 1


async def test_an_error_that_was_a_hit_replays_without_the_cache(store: Store) -> None:
    fn, cache, seen = Counted(KeyError("k")), dict[str, str](), list[Exception]()

    async def body(ctx: Context[Any]) -> None:
        try:
            await ctx.step("s", fn, key="s")
        except KeyError as error:
            seen.append(error)
        await ctx.sleep("nap", "1h")

    async with world(flow(body, cache=cache), store=store) as here:
        for run_id in ("r1", "r2"):
            assert isinstance(await here.runtime.run("flow", id=run_id), Suspended)
    async with world(flow(body, cache=Untouchable()), store=store) as here:
        assert await here.later("1h") == {"r1": Ok(None), "r2": Ok(None)}
    assert [(type(error), error.args) for error in seen] == [(KeyError, ("k",))] * 4
    assert fn.calls == 1


async def test_events_tell_a_miss_a_hit_and_nothing_of_a_second_use() -> None:
    heard: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepEvent):
            heard.append(f"{event.type} {event.attempt}")

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("s", Counted(), key="s"), await ctx.step("s", Counted(), key="s")]

    wf = flow(body, cache={}, on_event=listen)
    assert await wf.run() == Ok(["first", "first"])
    assert heard == ["step_cache_miss 1", "step_start 1", "step_success 1", "step_complete 1"]
    heard.clear()
    assert await wf.run() == Ok(["first", "first"])
    assert heard == ["step_cache_hit 0", "step_success 0", "step_complete 0"]


# What is not cached.


async def user(uid: str) -> str:
    return f"the record of {uid}"


async def test_a_step_without_key_is_never_shared_between_runs(store: Store, cache: Any) -> None:
    async def body(ctx: Context[Any], uid: str) -> str:
        return await ctx.step("fetchUser", lambda: user(uid))

    wf = Workflow("flow", body, cache=cache)
    assert await wf.run("alice", id="r1", store=store) == Ok("the record of alice")
    assert await wf.run("bob", id="r2", store=store) == Ok("the record of bob")
    assert not await has(cache, "fetchUser")


async def test_a_loop_without_keys_is_a_duplicate_step_also_with_a_cache() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        return [await ctx.step("fetchUser", user, uid) for uid in "abc"]

    outcome = await flow(body, cache={}).run()
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, DuplicateStep)
    assert "pass key= to tell them apart" in str(outcome.error)


async def test_a_key_used_with_and_without_key_option_is_a_duplicate_step() -> None:
    for options in ([{}, {"key": "s"}], [{"key": "s"}, {}]):

        async def body(ctx: Context[Any], options: list[Any] = options) -> None:
            for each in options:
                await ctx.step("s", Counted(), **each)

        outcome = await flow(body, cache={}).run()
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)


async def test_steps_without_key_replay_in_a_run_that_has_a_cache(store: Store) -> None:
    fn, cache = Counted(), OwnCache()

    async def body(ctx: Context[Any]) -> Any:
        found = [await ctx.step("a", fn), await ctx.step("b", fn, key="b")]
        await ctx.sleep("nap", "1h")
        return found

    async with world(flow(body, cache=cache), store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="r"), Suspended)
        assert await here.later("1h") == {"r": Ok(["first", "second"])}
    assert (fn.calls, cache.log) == (2, ["get b", "set b"])


async def test_a_cancelled_step_is_not_cached(store: Store) -> None:
    gate, cache = Gated(), dict[str, str]()
    async with world(flow(one_step(gate), cache=cache), store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run("flow", id="r"))
        await until(lambda: gate.inside == 1)
        await here.runtime.cancel("r")
        outcome = await driving
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
    assert (gate.cancelled, cache) == (1, {})


async def test_a_step_cut_off_by_the_end_of_its_process_is_not_cached(store: Store) -> None:
    gate, cache = Gated(), dict[str, str]()
    wf = flow(one_step(gate), cache=cache)
    driving = asyncio.ensure_future(wf.run(id="r", store=store))
    await until(lambda: gate.inside == 1)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert cache == {}
    gate.may_end.set()
    assert await wf.run(id="r", store=store) == Ok("call 2")


async def test_a_cancellation_that_the_function_itself_raises_is_not_cached(store: Store) -> None:
    fn, cache = Counted(asyncio.CancelledError("not ours"), "well"), dict[str, str]()
    wf = flow(one_step(fn), cache=cache)
    outcome = await wf.run(id="r1", store=store)
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, StepFailed)
    assert cache == {}
    assert await wf.run(id="r2", store=store) == Ok("well")


class Halt(BaseException):
    pass


async def test_a_base_exception_is_not_cached(store: Store) -> None:
    fn, cache = Counted(Halt("now"), "well"), dict[str, str]()
    wf = flow(one_step(fn), cache=cache)
    assert isinstance(await wf.run(id="r1", store=store), Err)
    assert cache == {}
    assert await wf.run(id="r2", store=store) == Ok("well")


async def test_suspending_before_during_and_after_a_step_caches_nothing_but_its_outcome(store: Store) -> None:
    fn, cache = Counted(OSError("not yet"), "well"), dict[str, str]()

    async def body(ctx: Context[Any]) -> Any:
        await ctx.sleep("before", "1h")
        value = await ctx.step("s", fn, retry=HOURLY, key="s")
        await ctx.wait_for_signal("after")
        return value

    async with world(flow(body, cache=cache), store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="r"), Suspended)
        assert isinstance((await here.later("1h"))["r"], Suspended)
        assert (fn.calls, cache) == (1, {})
        assert isinstance((await here.later("1h"))["r"], Suspended)
        assert (fn.calls, list(cache)) == (2, ["s"])
        await here.runtime.signal("r", "after")
        assert await here.runtime.sweep() == {"r": Ok("well")}
    assert list(cache) == ["s"]


# States and snapshots.


async def test_a_run_that_begins_with_a_state_neither_asks_the_cache_for_it_nor_puts_it_there() -> None:
    fn, cache = Counted(), OwnCache()

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("a", fn, key="a"), await ctx.step("b", fn, key="b"), await ctx.step("a", fn, key="a")]

    wf = flow(body)
    run = await flow(body, cache={}).start()
    await run
    state, snapshot = await run.resume_state(), await run.snapshot()
    partial = {**snapshot.to_dict(), "steps": {"a": {"ok": True, "value": "told"}}}
    assert await wf.run(cache=cache, resume_state=state) == Ok(["first", "second", "first"])
    assert await wf.run(cache=cache, snapshot=snapshot) == Ok(["first", "second", "first"])
    assert (cache.log, cache.kept, fn.calls) == ([], {}, 2)
    assert await wf.run(cache=cache, snapshot=partial) == Ok(["told", "third", "told"])
    assert cache.log == ["get b", "set b"]
    assert await wf.run(cache=Untouchable(), snapshot=snapshot) == Ok(["first", "second", "first"])


async def test_nothing_but_outcomes_of_steps_is_written_into_the_cache(store: Store) -> None:
    cache = OwnCache()

    async def body(ctx: Context[Any]) -> Any:
        await ctx.step("flaky", Counted(OSError("not yet"), 1), retry=AT_ONCE, key="flaky")
        await ctx.step("once", Counted(2), at_most_once=True, key="once")
        await ctx.sleep("nap", 0)
        await ctx.race(ctx.step("a", Counted(3), key="a"), ctx.wait_for_signal("never"))
        await ctx.map("each", Counted(4), [1, 2], key=lambda n: f"each:{n}")
        await ctx.map("unnamed", Counted(4), [1, 2])
        await ctx.step("unnamed", Counted(4))
        await ctx.scope("of/a").step("s", Counted(5), key="s")
        await ctx.step("private", Counted(6), cache=False)

    wf = flow(body, cache=cache)
    assert await wf.run(id="r", store=store) == Ok(None)
    assert await wf.run(id="r", store=store) == Ok(None)
    assert sorted(cache.kept) == ["/of%2Fa/s", "a", "each:1", "each:2", "flaky", "once"]
    for text in cache.kept.values():
        tree = json.loads(text)
        assert (tree.keys(), tree["version"]) == ({"version", "step"}, 1)
        assert tree["step"].keys() == {"ok", "payload", "args_hash", "expires_at"}


# A failed run.


async def test_a_failed_durable_run_goes_on_and_calls_only_what_failed(store: Store) -> None:
    good, bad = Counted(), Counted(ValueError("no"), "well")

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("good", good, key="good"), await ctx.step("bad", bad, key="bad")]

    wf = flow(body)
    assert isinstance(await wf.run(id="r", store=store), Err)
    assert isinstance(await wf.run(id="r", store=store), Err)
    assert await wf.run(id="r", store=store, retry_failed=True) == Ok(["first", "well"])
    assert (good.calls, bad.calls) == (1, 2)


async def test_a_failed_run_with_a_cache_gets_the_error_again_until_its_key_is_deleted(store: Store, cache: Any) -> None:
    good, bad = Counted(), Counted(ValueError("no"), "well")

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("good", good, key="good"), await ctx.step("bad", bad, key="bad")]

    wf = flow(body, cache=cache)
    for _ in range(2):
        assert isinstance(await wf.run(id="r", store=store, retry_failed=True), Err)
    assert (good.calls, bad.calls) == (1, 1)
    assert await forget(cache, "bad")
    assert await wf.run(id="r", store=store, retry_failed=True) == Ok(["first", "well"])
    assert (good.calls, bad.calls) == (1, 2)


# Values.


@dataclass
class Point:
    x: int
    at: datetime | None = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Shade(Enum):
    DARK = "d"


class Record(msgspec.Struct):
    points: list[Point]


NOON: Final = datetime(2026, 5, 4, 12, 0, 0, 7, tzinfo=UTC)
VALUES: Final[list[tuple[Any, Any]]] = [
    *[(Any, value) for value in (None, True, 0, -0.0, 1.5, float("nan"), float("inf"), 2**70, "", "é\ud800\0$", b"\x00\xff")],
    *[(Any, value) for value in ([], {}, [1, [2]], {"$a": 1, "b": None}, (1, 2), {1, 2}, frozenset({"a"}), {(1, 2): "x"})],
    *[(Any, value) for value in (NOON, date(2026, 1, 1), timedelta(days=-1), Decimal("1.10"), uuid.UUID(int=7), Path("a/b"))],
    (Point, Point(1, NOON)),
    (list[Point], [Point(1), Point(2, NOON)]),
    (Record, Record([Point(3)])),
    (Pair, Pair(Decimal(1), None)),
    (Shade, Shade.DARK),
    (dict[str, Point] | None, {"a": Point(4)}),
]


@pytest.mark.parametrize(("hint", "value"), VALUES)
async def test_a_value_is_the_same_when_made_when_hit_and_when_the_hit_is_replayed(hint: Any, value: Any) -> None:
    fn, given = Counted(value), list[Any]()

    async def body(ctx: Context[Any]) -> None:
        given.append(await ctx.step("s", fn, returns=hint, key="s"))
        given.append(await ctx.step("s", fn, returns=hint, key="s"))
        await ctx.sleep("nap", "1h")

    async with world(flow(body, cache={})) as here:
        for run_id in ("r1", "r2"):
            await here.runtime.run("flow", id=run_id)
        assert await here.later("1h") == {"r1": Ok(None), "r2": Ok(None)}
    assert fn.calls == 1
    assert len(given) == 8
    assert all(same(each, value) for each in given)


async def test_a_dataclass_is_rebuilt_from_the_annotation_in_every_store_and_cache(store: Store, cache: Any) -> None:
    calls: list[int] = []

    async def locate(x: int) -> list[Point]:
        calls.append(x)
        return [Point(x, NOON)]

    @workflow(cache=cache)
    async def located(ctx: Context, x: int) -> list[Point]:
        return await ctx.step(locate, x, key="locate")

    for run_id in ("r1", "r2", "r1"):
        assert await located.run(5, id=run_id, store=store) == Ok([Point(5, NOON)])
    assert calls == [5]


@dataclass
class Problem:
    code: int
    seen_at: datetime


class Refused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[1]} ({self.args[0]})"


async def test_an_err_keeps_its_payload_and_an_exception_its_class(store: Store, cache: Any) -> None:
    calls: list[str] = []

    async def reject() -> Ok[int] | Err[Problem]:
        calls.append("reject")
        return Err(Problem(7, NOON))

    async def refuse() -> int:
        calls.append("refuse")
        raise Refused(9, "no") from KeyError("why")

    seen: list[Any] = []

    async def body(ctx: Context[Any]) -> None:
        for fn in (reject, refuse, reject, refuse):
            try:
                await ctx.step(fn, key=fn.__name__)
            except (StepFailed, Refused) as error:
                seen.append(error)
        await ctx.sleep("nap", "1h")

    async with world(flow(body, cache=cache), store=store) as here:
        for run_id in ("r1", "r2"):
            assert isinstance(await here.runtime.run("flow", id=run_id), Suspended)
        assert await here.later("1h") == {"r1": Ok(None), "r2": Ok(None)}
    assert calls == ["reject", "refuse"]
    assert len(seen) == 16
    for returned, raised in zip(seen[::2], seen[1::2], strict=True):
        assert type(returned) is StepFailed
        assert (returned.key, returned.error, returned.was_returned) == ("reject", Problem(7, NOON), True)
        assert type(raised) is Refused
        assert (raised.args, str(raised), raised.code) == ((9, "no"), "no (9)", 9)
        assert isinstance(raised.__cause__, KeyError)


async def test_an_exception_whose_class_cannot_be_rebuilt_is_step_failed_everywhere() -> None:
    class Local(Exception):
        pass

    fn, seen = Counted(Local("x")), list[Any]()

    async def body(ctx: Context[Any]) -> None:
        for _ in range(2):
            try:
                await ctx.step("s", fn, key="s")
            except Exception as error:
                seen.append((type(error), error.args[:2]))

    wf = flow(body, cache={})
    for _ in range(2):
        assert await wf.run() == Ok(None)
    assert len(set(seen)) == 1
    assert len(seen) == 4
    assert seen[0][0] is StepFailed


async def test_what_a_body_does_to_a_value_changes_nobody_elses() -> None:
    fn = Counted({"items": [1]})

    async def body(ctx: Context[Any]) -> Any:
        first = await ctx.step("s", fn, key="s")
        first["items"].append(2)
        second = await ctx.step("s", fn, key="s")
        second["more"] = 3
        return await ctx.step("s", fn, key="s")

    wf = flow(body, cache={})
    assert [await wf.run() for _ in range(2)] == [Ok({"items": [1]})] * 2
    assert fn.gives == ({"items": [1]},)


@pytest.mark.filterwarnings("default::perdure.errors.PerdureWarning")
async def test_a_lossy_value_is_lossy_in_every_run_and_its_snapshot_says_so() -> None:
    fn, cache = Counted({"a": 1, "b": object()}), dict[str, str]()

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("s", fn, key="s"), await ctx.step("s", fn, key="s")]

    wf = flow(body, cache=cache, strict=False)
    first = await wf.start()
    with pytest.warns(PerdureWarning, match=r'became None: value\["b"\]'):
        assert await first == [{"a": 1, "b": None}] * 2
    second = await wf.start()
    assert await second == [{"a": 1, "b": None}] * 2
    assert fn.calls == 1
    for run in (first, second):
        warnings = (await run.snapshot()).to_dict()["warnings"]
        assert warnings == [{"type": "lossy_value", "stepId": "s", "path": 'value["b"]', "reason": "non-json"}]


@pytest.mark.filterwarnings("ignore::perdure.errors.PerdureWarning")
async def test_a_strict_run_does_not_take_half_a_value_from_the_cache(store: Store) -> None:
    fn, cache = Counted({"a": 1, "b": object()}), dict[str, str]()
    wf = flow(one_step(fn), cache=cache)
    assert await wf() == {"a": 1, "b": None}  # without a store nothing is strict
    kept = dict(cache)
    outcome = await wf.run(id="r", store=store)
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, ValueNotStorable)
    assert 'value["b"]' in str(outcome.error)
    assert (fn.calls, cache) == (1, kept)
    assert await wf.run(id="r2", store=store, strict=False) == Ok({"a": 1, "b": None})


async def test_a_value_that_cannot_be_stored_is_an_error_and_cached_as_one(store: Store) -> None:
    fn, cache = Counted({"b": object()}), dict[str, str]()
    wf = flow(one_step(fn), cache=cache)
    for run_id in ("r1", "r2"):
        outcome = await wf.run(id=run_id, store=store)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueNotStorable)
    assert fn.calls == 1


# Arguments.


def by_argument(**options: Any) -> tuple[Counted, Workflow[[int], Any]]:
    fn = Counted()

    async def body(ctx: Context[Any], number: int) -> Any:
        return await ctx.step("s", fn, number, key="s")

    return fn, Workflow("flow", body, cache={}, **options)


async def test_a_hit_for_other_arguments_is_a_warning_by_default(store: Store) -> None:
    fn, wf = by_argument()
    assert await wf.run(1, id="r1", store=store) == Ok("first")
    assert await wf.run(1, id="r2", store=store) == Ok("first")
    with pytest.warns(PerdureWarning, match="other arguments by the run whose result is in the cache") as told:
        assert await wf.run(2, id="r3", store=store) == Ok("first")
    assert len(told) == 1
    assert await wf.run(2, id="r3", store=store) == Ok("first")  # recorded with the arguments of this run
    assert fn.calls == 1


async def test_a_hit_for_other_arguments_may_be_ignored(store: Store) -> None:
    fn, wf = by_argument(on_changed_arguments="ignore")
    assert [await wf.run(n, id=f"r{n}", store=store) for n in range(2)] == [Ok("first")] * 2
    assert fn.calls == 1


async def test_a_hit_for_other_arguments_may_be_an_error_and_nothing_is_recorded(store: Store) -> None:
    fn, wf = by_argument(on_changed_arguments="error")
    assert await wf.run(1, id="r1", store=store) == Ok("first")
    outcome = await wf.run(2, id="r2", store=store)
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, StepChanged)
    assert (fn.calls, [entry.key for entry in await store.journal("r2")]) == (1, [])
    fn, wf = by_argument(on_changed_arguments="error")
    assert await wf.run(2, id="r2", store=store, retry_failed=True) == Ok("first")  # with a cache that has nothing


async def test_arguments_that_have_no_hash_are_not_compared() -> None:
    fn, cache = Counted(), dict[str, str]()
    for argument in (object(), 1, object()):
        assert await flow(one_step(fn, argument), cache=cache).run() == Ok("first")
    assert fn.calls == 1


@pytest.mark.parametrize("uses", [[1, 2], [1, 1, 2]])
async def test_a_second_use_with_other_arguments_follows_the_same_option(uses: list[int]) -> None:
    def body_of(gathered: bool) -> Body:
        async def body(ctx: Context[Any]) -> Any:
            calls = [ctx.step("s", Counted(), number, key="s") for number in uses]
            found = await asyncio.gather(*calls, return_exceptions=True) if gathered else [await call for call in calls]
            return [each if isinstance(each, str) else type(each).__name__ for each in found]

        return body

    for gathered in (False, True):
        with pytest.warns(PerdureWarning, match="called with other arguments, but") as told:
            assert await flow(body_of(gathered), cache={}).run() == Ok(["first"] * len(uses))
        assert len(told) == 1
        assert await flow(body_of(gathered), cache={}, on_changed_arguments="ignore").run() == Ok(["first"] * len(uses))
    strict = await flow(body_of(True), cache={}, on_changed_arguments="error").run()
    assert strict == Ok([*["first"] * (len(uses) - 1), "StepChanged"])


async def test_uses_that_are_refused_for_their_arguments_are_refused_alike() -> None:
    fn, cache = Counted(), dict[str, str]()
    await flow(one_step(fn, 1), cache=cache).run()

    async def body(ctx: Context[Any]) -> Any:
        found = await asyncio.gather(*(ctx.step("s", fn, n, key="s") for n in (2, 3, 1, 2)), return_exceptions=True)
        return [each if isinstance(each, str) else type(each).__name__ for each in found]

    outcome = await flow(body, cache=cache, on_changed_arguments="error").run()
    assert outcome == Ok(["StepChanged", "StepChanged", "first", "StepChanged"])
    assert fn.calls == 1


# How long.


@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "file"])
async def test_a_ttl_counts_from_when_the_result_is_kept_in_any_cache(kind: str, tmp_path: Path) -> None:
    fn, cache = Counted(), CACHES[kind](tmp_path)

    async def body(ctx: Context[Any]) -> Any:
        return [
            await ctx.step("short", fn, ttl="10s", key="short"),
            await ctx.step("long", fn, ttl="1m", key="long"),
            await ctx.step("good", fn, key="good"),
        ]

    definition = flow(body, cache=cache)
    async with world(definition) as here:
        outcomes = []
        for number, seconds in enumerate((0, 9.999999, 0.000001, 40, 10, 10**8)):
            here.clock.advance(seconds)
            outcomes.append(await here.runtime.run(definition, id=f"r{number}"))
    assert outcomes == [
        Ok(["first", "second", "third"]),
        Ok(["first", "second", "third"]),
        Ok(["fourth", "second", "third"]),
        Ok(["fourth", "second", "third"]),
        Ok(["fourth", "fourth", "third"]),
        Ok(["fourth", "fourth", "third"]),
    ]
    assert fn.calls == 9


async def test_the_ttl_of_a_cache_is_for_steps_without_one_of_their_own(tmp_path: Path) -> None:
    for make in (MemoryCache, lambda **options: FileCache(tmp_path / "cache", **options)):
        fn = Counted()

        async def body(ctx: Context[Any], fn: Any = fn) -> Any:
            return [await ctx.step("a", fn, key="a"), await ctx.step("b", fn, ttl="3h", key="b")]

        clock = ManualClock()
        wf: Workflow[[], Any] = flow(body, cache=make(ttl="1h", clock=clock))
        runtime = Runtime(stores.memory(), [wf], clock=clock, concurrency=0)
        outcomes: list[Any] = []
        for hours in (0, 0.99, 0.01, 1.99, 0.01):
            clock.advance(hours * 3600)
            outcomes.append(await runtime.run(wf, id=str(len(outcomes))))
        await runtime.close()
        assert outcomes == [Ok(["first", "second"])] * 2 + [Ok(["third", "second"]), Ok(["fourth", "second"]), Ok(["fourth"] * 2)]
        assert fn.calls == 5


async def test_an_error_has_the_ttl_of_its_step(store: Store) -> None:
    fn = Counted(ValueError("no"), "well")
    definition = flow(one_step(fn, ttl="1m"), cache={})
    async with world(definition, store=store) as here:
        for number in range(2):
            assert isinstance(await here.runtime.run(definition, id=f"r{number}"), Err)
            here.clock.advance("30s")
        assert await here.runtime.run(definition, id="r3") == Ok("well")


async def test_an_expired_result_stays_in_the_runs_that_have_it(store: Store) -> None:
    fn = Counted()

    async def body(ctx: Context[Any]) -> Any:
        before = await ctx.step("s", fn, ttl="1m", key="s")
        await ctx.sleep("nap", "1h")
        return [before, await ctx.step("s", fn, ttl="1m", key="s")]

    async with world(flow(body, cache={}), store=store) as here:
        await here.runtime.run("flow", id="r")
        assert await here.later("1h") == {"r": Ok(["first", "first"])}
    assert fn.calls == 1


async def test_options_beside_the_function_count_and_those_of_the_call_win() -> None:
    calls: Counter[str] = Counter()

    @step(cache=False)
    async def private() -> int:
        calls["private"] += 1
        return 1

    @step(ttl="1m")
    async def short() -> int:
        calls["short"] += 1
        return 1

    async def body(ctx: Context[Any]) -> None:
        await ctx.step(private, key="private")
        await ctx.step(short, key="short")
        await ctx.step("long", short, ttl="2m", key="long")

    async with world(flow(body, cache={})) as here:
        for number in range(3):
            await here.runtime.run("flow", id=f"r{number}")
            here.clock.advance("1m")
    assert calls == {"private": 3, "short": 3 + 2}


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"ttl": 0}, ValueError, "ttl must be longer than zero; cache=False keeps a step out of the cache"),
        ({"ttl": "0s"}, ValueError, "ttl must be longer than zero"),
        ({"ttl": -1}, ValueError, "ttl"),
        ({"ttl": "soon"}, ValueError, "ttl"),
        ({"ttl": [1]}, TypeError, "ttl"),
        ({"cache": True}, TypeError, "a step takes only cache=False.*belongs to the workflow or the run"),
        ({"cache": {}}, TypeError, "a step takes only cache=False"),
        ({"cache": None}, TypeError, "a step takes only cache=False"),
    ],
)
async def test_step_options_that_make_no_sense_are_refused(options: Any, kind: type[Exception], told: str) -> None:
    caches: list[Any] = [None, {}]
    for cache in caches:
        outcome = await flow(one_step(Counted(), **options), cache=cache).run()
        assert isinstance(outcome, Err)
        with pytest.raises(kind, match=told):
            raise outcome.error
    with pytest.raises(kind, match=told):
        step(**options)


@pytest.mark.parametrize("bad", [True, "x", 7, dict, MemoryCache, [], object()])
async def test_a_cache_that_is_none_is_refused_wherever_it_is_given(bad: Any) -> None:
    wf = flow(one_step(Counted()))
    refused: list[Callable[[], Any]] = [
        lambda: flow(one_step(Counted()), cache=bad),
        lambda: Runtime(stores.memory(), cache=bad),
        lambda: wf.options(cache=bad),
    ]
    for make in refused:
        with pytest.raises(TypeError, match="cache= takes a dict, MemoryCache"):
            make()
    with pytest.raises(TypeError, match="cache= takes a dict, MemoryCache"):
        await wf.run(cache=bad)
    with pytest.raises(TypeError, match="cache= takes a dict, MemoryCache"):
        await wf.start(cache=bad)


# Which cache.


async def test_the_nearest_cache_wins_and_none_given_to_a_run_turns_it_off() -> None:
    of_workflow, of_run, fn = dict[str, str](), dict[str, str](), Counted()
    wf = flow(one_step(fn), cache=of_workflow)
    assert await wf.run(cache=of_run) == Ok("first")
    assert (list(of_workflow), list(of_run)) == ([], ["s"])
    assert await wf.run() == Ok("second")
    assert [await wf.run(cache=None), await wf.run(cache=None)] == [Ok("third"), Ok("fourth")]
    assert await wf.options(cache=of_run).run() == Ok("first")
    assert await (await wf.start(cache=of_run)) == "first"
    assert [await wf.run(), await wf()] == [Ok("second"), "second"]
    assert fn.calls == 4


async def test_the_cache_of_a_runtime_wins_over_the_workflows_and_a_runtime_without_one_leaves_it() -> None:
    of_workflow, of_runtime, fn = dict[str, str](), dict[str, str](), Counted()
    wf = flow(one_step(fn), cache=of_workflow)
    async with world(wf, cache=of_runtime) as here:
        assert await here.runtime.run(wf, id="r1") == Ok("first")
        assert await here.runtime.run(wf, id="r2") == Ok("first")
    assert (list(of_workflow), list(of_runtime)) == ([], ["s"])
    async with world(wf) as here:
        assert await here.runtime.run(wf, id="r3") == Ok("second")
    async with world(flow(one_step(fn)), cache=of_runtime) as here:
        assert await here.runtime.run("flow", id="r4") == Ok("first")


async def test_an_empty_cache_of_the_users_own_class_is_a_cache() -> None:
    class Empty(dict[str, str]):
        def __bool__(self) -> bool:
            return False

    fn, cache = Counted(), Empty()
    wf = flow(one_step(fn), cache=cache)
    assert [await wf.run(), await wf.run()] == [Ok("first"), Ok("first")]


# One call for many runs.


async def test_a_hundred_runs_at_once_call_once(store: Store, cache: Any) -> None:
    gate = Gated()
    wf = flow(one_step(gate), cache=cache)
    runs = [asyncio.ensure_future(wf.run(id=f"r{n}", store=store)) for n in range(100)]
    await until(lambda: waiting_for_a_turn() == 99)
    gate.may_end.set()
    assert await asyncio.gather(*runs) == [Ok("call 1")] * 100
    assert (gate.calls, gate.most) == (1, 1)
    assert [(await entry_of(store, f"r{n}", "s")).attempt for n in range(100)].count(1) == 1


async def test_runs_without_a_store_and_other_workflows_wait_for_each_other_too() -> None:
    gate, cache = Gated(), dict[str, str]()
    runs = [asyncio.ensure_future(flow(one_step(gate), f"w{n}", cache=cache)()) for n in range(5)]
    await until(lambda: waiting_for_a_turn() == 4)
    gate.may_end.set()
    assert await asyncio.gather(*runs) == ["call 1"] * 5


async def test_other_keys_and_steps_outside_the_cache_wait_for_nobody() -> None:
    gate, cache = Gated(), dict[str, str]()
    runs = [asyncio.ensure_future(flow(one_step(gate, key=f"k{n}"), cache=cache)()) for n in range(3)]
    runs += [asyncio.ensure_future(flow(one_step(gate, key="k0", cache=False), cache=cache)())]
    runs += [asyncio.ensure_future(flow(one_step(gate, key="k0"), cache={})())]
    await until(lambda: gate.inside == 5)
    gate.may_end.set()
    await asyncio.gather(*runs)
    assert sorted(cache) == ["k0", "k1", "k2"]


@pytest.mark.parametrize("given", [ValueError("no"), Err("NO")])
async def test_when_the_one_that_calls_fails_the_others_get_the_same_error(store: Store, given: Any) -> None:
    gate, fn = Gated(), Counted(given)

    async def failing() -> Any:
        await gate()
        return await fn()

    wf = flow(one_step(failing), cache={})
    runs = [asyncio.ensure_future(wf.run(id=f"r{n}", store=store)) for n in range(20)]
    await until(lambda: waiting_for_a_turn() == 19)
    gate.may_end.set()
    outcomes = await asyncio.gather(*runs)
    assert fn.calls == 1
    assert {repr(outcome) for outcome in outcomes} == {repr(Err(ValueError("no")) if isinstance(given, ValueError) else given)}


async def cut_off(how: str, here: Any, runs: dict[str, asyncio.Future[Any]], run_id: str) -> None:
    """End the attempt of this run without an outcome of its step."""
    if how == "its process ends":
        runs[run_id].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runs[run_id]
    else:
        await here.runtime.cancel(run_id)
        await runs[run_id]


@pytest.mark.parametrize("how", ["its process ends", "it is cancelled"])
async def test_when_the_one_that_calls_is_cut_off_the_next_one_calls_and_never_two(store: Store, how: str) -> None:
    gate = Gated()
    definition = flow(one_step(gate), cache={})
    async with world(definition, store=store) as here:
        runs: dict[str, asyncio.Future[Any]] = {}
        for n in range(6):
            runs[f"r{n}"] = asyncio.ensure_future(here.runtime.run(definition, id=f"r{n}"))
            await until(lambda n=n: gate.inside == 1 and waiting_for_a_turn() == n)  # type: ignore[misc]
        await cut_off(how, here, runs, "r3")  # one that waits
        for n, victim in enumerate(("r0", "r1"), 1):
            await cut_off(how, here, runs, victim)
            await until(lambda n=n: gate.calls == n + 1)  # type: ignore[misc]
        gate.may_end.set()
        assert [await runs[f"r{n}"] for n in (2, 4, 5)] == [Ok("call 3")] * 3
    assert (gate.calls, gate.cancelled, gate.most) == (3, 2, 1)


def test_when_the_process_of_the_one_that_calls_dies_at_any_write_the_others_are_served() -> None:
    async def main(dies_at: int, *, after_commit: bool) -> None:
        fn, shared = Counted(), stores.memory()

        async def slow() -> Any:
            await asyncio.sleep(0.01)
            return await fn()

        definition = flow(one_step(slow), cache={})
        mortal = MortalStore(shared, dies_at, after_commit=after_commit)
        dying, living = (Runtime(each, [definition], clock=LoopClock(), concurrency=0) for each in (mortal, shared))
        first = asyncio.ensure_future(dying.run(definition, id="r0"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(living.run(definition, id=f"r{n}")) for n in range(1, 5)]
        with contextlib.suppress(PersistenceError):
            await first
        outcomes = await asyncio.gather(*others)
        assert outcomes in ([Ok("first")] * 4, [Ok("second")] * 4)
        await asyncio.sleep(31)  # the lease expires
        again = await living.run(definition, id="r0")
        assert again in ([Ok("first"), *outcomes] if dies_at > 0 else outcomes)
        assert fn.calls <= 2
        for runtime in (dying, living):
            await runtime.close()

    for dies_at in range(4):
        for after_commit in (False, True):
            simulate(main(dies_at, after_commit=after_commit))


async def test_when_the_one_that_calls_pauses_for_long_and_leaves_memory_the_others_are_not_stuck(store: Store) -> None:
    gate, fn = Gated(), Counted(OSError("a"), OSError("b"), "well", "never")

    async def first_waits() -> Any:
        await gate()
        return await fn()

    definition = flow(one_step(first_waits, retry=HOURLY), cache={})
    async with world(definition, store=store) as here:
        runs = [asyncio.ensure_future(here.runtime.run(definition, id=f"r{n}")) for n in range(2)]
        await until(lambda: waiting_for_a_turn() == 1)
        gate.may_end.set()
        assert [type(await run) for run in runs] == [Suspended, Suspended]
        assert fn.calls == 2
        assert caching._flights == {}
        assert await here.later("1h") == {"r0": Ok("well"), "r1": Ok("well")}
    assert (fn.calls, gate.most) == (3, 1)


async def test_a_run_that_resumes_after_a_pause_takes_what_others_found_meanwhile(store: Store) -> None:
    fn = Counted(OSError("a"), "well")
    definition = flow(one_step(fn, retry=HOURLY), cache={})
    async with world(definition, store=store) as here:
        assert isinstance(await here.runtime.run(definition, id="r0"), Suspended)
        assert await here.runtime.run(definition, id="r1") == Ok("well")
        assert await here.later("1h") == {"r0": Ok("well")}
        assert (await entry_of(store, "r0", "s")).attempt == 0
    assert fn.calls == 2


async def test_a_run_that_waits_for_another_drains_at_once(store: Store) -> None:
    gate, cache = Gated(), dict[str, str]()
    definition = flow(one_step(gate), cache=cache)
    leading = asyncio.ensure_future(definition())
    await until(lambda: gate.inside == 1)
    async with world(definition, store=store) as here:
        following = asyncio.ensure_future(here.runtime.run(definition, id="r"))
        await until(lambda: waiting_for_a_turn() == 1)
    assert isinstance(await following, Suspended)
    gate.may_end.set()
    assert await leading == "call 1"


async def test_a_step_reached_from_inside_a_step_with_its_key_is_an_error_and_not_a_hang() -> None:
    cache = dict[str, str]()
    inner = flow(one_step(Counted()), "inner", cache=cache)

    async def nested() -> Any:
        return await inner()

    outcome = await asyncio.wait_for(flow(one_step(nested), cache=cache).run(), PATIENCE)
    assert isinstance(outcome, Err)
    with pytest.raises(RuntimeError, match="step 's' was reached from inside a step with the same key and the same cache"):
        raise outcome.error
    cache.clear()
    assert await asyncio.wait_for(flow(one_step(nested, key="outer"), cache=cache).run(), PATIENCE) == Ok("first")
    assert sorted(cache) == ["outer", "s"]


async def test_what_a_step_started_may_use_its_key_when_it_has_ended() -> None:
    cache, left = dict[str, str](), list[asyncio.Future[Any]]()
    may_start = asyncio.Event()
    inner = flow(one_step(Counted()), "inner", cache=cache)

    async def later() -> Any:
        await may_start.wait()
        cache.clear()
        return await inner()

    async def starts() -> str:
        left.append(asyncio.ensure_future(later()))
        return "started"

    assert await flow(one_step(starts), cache=cache).run() == Ok("started")
    may_start.set()
    assert await left[0] == "first"


# With the other options of a step.


async def test_an_at_most_once_step_is_cached_and_its_unknown_outcome_is_not(store: Store) -> None:
    gate, cache = Gated(), dict[str, str]()
    wf = flow(one_step(gate, at_most_once=True), cache=cache)
    driving = asyncio.ensure_future(wf.run(id="r1", store=store))
    await until(lambda: gate.inside == 1)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    gate.may_end.set()
    outcome = await wf.run(id="r1", store=store)
    assert isinstance(outcome, Err)
    assert "OutcomeUnknown" in str(outcome.error)
    assert (gate.calls, cache) == (1, {})
    assert [await wf.run(id=run_id, store=store) for run_id in ("r2", "r3")] == [Ok("call 2")] * 2


def test_an_at_most_once_step_whose_record_was_lost_is_found_in_the_cache() -> None:
    async def main(dies_at: int, *, after_commit: bool) -> str:
        fn, shared = Counted(), stores.memory()
        definition = flow(one_step(fn, at_most_once=True), cache={})
        mortal = MortalStore(shared, dies_at, after_commit=after_commit)
        dying, living = (Runtime(each, [definition], clock=LoopClock(), concurrency=0) for each in (mortal, shared))
        with contextlib.suppress(PersistenceError):
            await dying.run(definition, id="r")
        await asyncio.sleep(31)
        outcome = await living.run(definition, id="r")
        assert fn.calls <= 1
        for runtime in (dying, living):
            await runtime.close()
        return str(outcome.value if isinstance(outcome, Ok) else outcome)

    found = {simulate(main(dies_at, after_commit=after)) for dies_at in range(4) for after in (False, True)}
    unknown = {each for each in found if "OutcomeUnknown" in each}
    assert found - unknown == {"first"}
    assert len(unknown) == 1  # it died after the intent and before the call, which cannot be known


async def test_retries_are_one_outcome_for_the_cache(store: Store, cache: Any) -> None:
    fn, attempts = Counted(OSError("1"), OSError("2"), "well"), list[int]()

    async def noted() -> Any:
        attempts.append(current_step().attempt)
        return await fn()

    wf = flow(one_step(noted, retry=AT_ONCE), cache=cache)
    assert [await wf.run(id=f"r{n}", store=store) for n in range(2)] == [Ok("well")] * 2
    assert attempts == [1, 2, 3]
    bad = flow(one_step(noted, retry=AT_ONCE, key="bad"), cache=cache)
    fn.gives, fn.calls = (OSError("always"),), 0
    for _ in range(2):
        with pytest.raises(OSError, match="always"):
            await bad()
    assert (fn.calls, attempts[3:]) == (3, [1, 2, 3])


def test_a_time_out_is_an_error_and_cached_as_one() -> None:
    calls: list[int] = []

    async def slow() -> None:
        calls.append(1)
        await asyncio.sleep(60)

    async def main() -> list[Any]:
        definition = flow(one_step(slow, timeout=1, retry=2), cache={})
        runtime = Runtime(stores.memory(), [definition], clock=LoopClock(), unload_grace="1h", concurrency=0)
        outcomes = [await runtime.run(definition, id=f"r{n}") for n in range(2)]
        await runtime.close()
        return outcomes

    for outcome in simulate(main()):
        assert isinstance(outcome, Err)
        assert type(outcome.error) is StepTimeout
        assert str(outcome.error) == "step 's' did not finish within 1 s"
    assert calls == [1, 1]


async def test_a_plain_function_is_called_once_in_a_thread_for_all(store: Store, cache: Any) -> None:
    threads: list[int] = []

    def plain(number: int) -> Point:
        threads.append(threading.get_ident())
        return Point(number)

    async def body(ctx: Context[Any]) -> Any:
        return [point.x for point in await asyncio.gather(*(ctx.step(plain, 4, key="plain") for _ in range(3)))]

    wf = flow(body, cache=cache)
    assert await asyncio.gather(*(wf.run(id=f"r{n}", store=store) for n in range(10))) == [Ok([4, 4, 4])] * 10
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


# Caches that fail, and what is in them.


class Failing(OwnCache):
    """A cache some of whose methods do not work for the time being."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = set(broken)

    async def get(self, key: str) -> str | None:
        if "get" in self.broken:
            raise ConnectionError("refused")
        return await super().get(key)

    async def set(self, key: str, value: str, ttl: int | None = None) -> None:
        if "set" in self.broken:
            raise ConnectionError("refused")
        await super().set(key, value, ttl)


async def test_a_run_goes_on_without_a_cache_that_is_down_and_warns_once(store: Store) -> None:
    fn, cache = Counted(), Failing("get", "set")

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("s", fn, key=key) for key in "ab"]

    wf = flow(body, cache=cache)
    with pytest.warns(PerdureWarning) as caught:
        assert await wf.run(id="r", store=store) == Ok(["first", "second"])
    assert [str(warning.message) for warning in caught] == [
        "the cache could not be asked for step 'a': ConnectionError: refused; the step is done without it"
    ]
    assert fn.calls == 2
    assert await wf.run(id="r", store=store) == Ok(["first", "second"]), "which its journal has"
    cache.broken.clear()
    await wf.run(id="other", store=store)
    assert fn.calls == 4


async def test_a_worker_begins_a_body_once_while_the_cache_is_down(store: Store) -> None:
    begun = 0

    async def body(ctx: Context[Any]) -> Any:
        nonlocal begun
        begun += 1
        return await ctx.step("s", Counted(), key="s")

    with pytest.warns(PerdureWarning, match="done without it"):
        async with Runtime(store, [flow(body, cache=Failing("get", "set"))]) as runtime:
            assert await (await runtime.start("flow", id="r")) == "first"
    assert begun == 1


async def test_a_step_that_must_not_run_twice_waits_until_the_cache_can_be_read(store: Store) -> None:
    fn, cache, caught = Counted(), Failing("get"), list[BaseException]()

    async def body(ctx: Context[Any]) -> Any:
        before = await ctx.step("before", Counted("b"), cache=False)
        try:
            return [before, await ctx.step("s", fn, key="s", at_most_once=True), await ctx.step("s", fn, key="s")]
        except BaseException as error:
            caught.append(error)
            raise

    wf = flow(body, cache=cache)
    for _ in range(2):
        with pytest.raises(PersistenceError, match="the cache could not be asked for step 's': ConnectionError: refused"):
            await wf.run(id="r", store=store)
        assert [entry.key for entry in await store.journal("r")] == ["before"]
    assert all(isinstance(error, asyncio.CancelledError) for error in caught)
    assert fn.calls == 0
    cache.broken.clear()
    assert await wf.run(id="r", store=store) == Ok(["b", "first", "first"])
    assert fn.calls == 1


async def test_a_run_without_a_store_goes_on_without_a_cache_that_is_down() -> None:
    fn = Counted()
    with pytest.warns(PerdureWarning, match="could not be asked"):
        assert await flow(one_step(fn), cache=Failing("get"))() == "first"
    assert fn.calls == 1
    with pytest.raises(PersistenceError, match="could not be asked"):
        await flow(one_step(fn, at_most_once=True), cache=Failing("get"))()
    assert fn.calls == 1


async def test_a_cache_that_cannot_be_asked_does_not_stop_runs_that_wait_for_nothing_from_it(store: Store) -> None:
    cache = Failing()

    async def body(ctx: Context[Any]) -> Any:
        value = await ctx.step("s", Counted(), key="s")
        await ctx.sleep("nap", "1h")
        return [value, await ctx.step("s", Counted(), key="s")]

    async with world(flow(body, cache=cache), store=store) as here:
        await here.runtime.run("flow", id="r")
        cache.broken = {"get", "set"}
        assert await here.later("1h") == {"r": Ok(["first", "first"])}


async def test_a_cache_that_does_not_keep_is_a_warning_and_the_run_goes_on(store: Store) -> None:
    fn, cache = Counted(), Failing("set")

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step("s", fn, key="s"), await ctx.step("s", fn, key="s")]

    wf = flow(body, cache=cache)
    with pytest.warns(PerdureWarning, match=r"did not keep step 's' \(ConnectionError: refused\)"):
        assert await wf.run(id="r1", store=store) == Ok(["first", "first"])
    cache.broken.clear()
    assert await wf.run(id="r1", store=store) == Ok(["first", "first"])
    assert await wf.run(id="r2", store=store) == Ok(["second", "second"])


async def test_when_the_one_that_calls_cannot_keep_the_others_call_one_after_another(store: Store) -> None:
    gate, cache = Gated(), Failing("set")
    wf = flow(one_step(gate), cache=cache)
    runs = [asyncio.ensure_future(wf.run(id=f"r{n}", store=store)) for n in range(3)]
    await until(lambda: waiting_for_a_turn() == 2)
    gate.may_end.set()
    with pytest.warns(PerdureWarning, match="did not keep"):
        outcomes = await asyncio.gather(*runs)
    assert sorted(outcome.value for outcome in outcomes if isinstance(outcome, Ok)) == ["call 1", "call 2", "call 3"]
    assert gate.most == 1


def damaged(text: str) -> list[Any]:
    """A kept text and what may have become of it."""
    tree = json.loads(text)
    payloads: list[Any] = [{"$class": ["gone:Away", {}]}, {"$nonsense": 1}, {"$datetime": "yesterday"}, {"$lost": "?"}]
    changed = [{**tree, "step": {**tree["step"], "payload": payload}} for payload in payloads]
    failed = {**tree, "step": {**tree["step"], "ok": False}}
    return ["", "{", text[:-1], text.replace('"version":1', '"version":2'), 7, *map(json.dumps, [*changed, failed])]


async def test_a_damaged_text_is_a_warning_and_the_step_runs_again() -> None:
    good = dict[str, str]()
    await flow(one_step(Counted({"a": 1})), cache=good).run()
    for text in damaged(good["s"]):
        fn, cache = Counted("new"), {"s": text}
        with pytest.warns(
            PerdureWarning, match=r"what the cache has under 's' cannot be (read|used), so that the step runs again"
        ):
            assert await flow(one_step(fn), cache=cache).run() == Ok("new")
        assert fn.calls == 1
        assert await flow(one_step(fn), cache=cache).run() == Ok("new")
        assert fn.calls == 1


async def test_a_value_whose_class_is_gone_is_a_warning_and_the_step_runs_again(store: Store, cache: Any) -> None:
    old = flow(one_step(Counted(Point(1)), returns=Point), cache=cache)
    await old.run(id="r1", store=store)
    fn = Counted(Pair(1, 2))
    new = flow(one_step(fn, returns=Pair), cache=cache)
    with pytest.warns(PerdureWarning, match="under 's' cannot be used, so that the step runs again: .*Point"):
        await new.run(id="r2", store=store)
    await new.run(id="r3", store=store)
    assert fn.calls == 1
