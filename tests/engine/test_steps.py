"""What `ctx.step` takes, runs, records and gives back, on the first run and on every replay."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import re
import threading
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, make_dataclass
from typing import Any
from unittest import mock

import pytest

from perdure import Context, Err, Ok, PerdureWarning, Retry, Suspended, Workflow, current_step, step, stores, workflow
from perdure.codec import Codec
from perdure.errors import DuplicateStep, StepChanged, StepFailed, StepTimeout, ValueNotStorable
from tests.engine.replays import raised, stored, twice
from tests.engine.worlds import world
from tests.patience import PATIENCE


@dataclass
class Point:
    x: int
    y: int


class Refused(Exception):
    """A domain error with a constructor that nobody can call from its args."""

    def __init__(self, *, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Abrupt(BaseException):
    """Like KeyboardInterrupt, but asyncio does not treat it specially."""


async def double(n: int) -> int:
    return 2 * n


def double_plainly(n: int) -> int:
    return 2 * n


def add(a: int, b: int = 0) -> int:
    return a + b


class Doubler:
    async def __call__(self, n: int) -> int:
        return 2 * n

    async def method(self, n: int) -> int:
        return 2 * n

    def plain_method(self, n: int) -> int:
        return 2 * n

    @classmethod
    async def class_method(cls, n: int) -> int:
        return 2 * n

    @staticmethod
    def static_method(n: int) -> int:
        return 2 * n


class PlainDoubler:
    def __call__(self, n: int) -> int:
        return 2 * n


FUNCTIONS: list[tuple[str, Callable[..., Any], str | None]] = [
    ("async function", double, "double"),
    ("plain function", double_plainly, "double_plainly"),
    ("lambda", lambda n: 2 * n, None),
    ("lambda around a coroutine function", lambda n: double(n), None),  # noqa: PLW0108 - the lambda is what is tested
    ("async callable object", Doubler(), None),
    ("plain callable object", PlainDoubler(), None),
    ("bound method", Doubler().method, "method"),
    ("plain bound method", Doubler().plain_method, "plain_method"),
    ("class method", Doubler.class_method, "class_method"),
    ("static method", Doubler.static_method, "static_method"),
    ("partial of an async function", functools.partial(double), "double"),
    ("partial of a partial of a plain one", functools.partial(functools.partial(add), b=5), "add"),
    ("partial of a method", functools.partial(Doubler().method), "method"),
    ("partial of a lambda around a coroutine function", functools.partial(lambda n: double(n)), None),  # noqa: PLW0108
]


@pytest.mark.parametrize(("fn", "name"), [row[1:] for row in FUNCTIONS], ids=[row[0] for row in FUNCTIONS])
async def test_any_callable_is_a_step_and_runs_once(fn: Callable[..., Any], name: str | None) -> None:
    async def body(ctx: Context[Any]) -> Any:
        named = await ctx.step("named", fn, 5)
        by_itself = await ctx.step(fn, 5) if name else None
        return named, by_itself

    assert await twice(body) == (((10, 10 if name else None),) * 2)


@pytest.mark.parametrize(("fn", "name"), [row[1:] for row in FUNCTIONS], ids=[row[0] for row in FUNCTIONS])
async def test_the_key_is_the_name_which_is_the_functions(fn: Callable[..., Any], name: str | None) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        if name:
            await ctx.step(fn, 1)
        else:
            error = await raised(ctx.step(fn, 1))
            assert isinstance(error, TypeError)
            assert "has no name" in str(error)
        await ctx.step("named", fn, 1)
        await ctx.step("named", fn, 1, key="keyed")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert await here.keys("run") == [*([name] if name else []), "named", "keyed"]
        assert {entry.name for entry in await here.runtime.store.journal("run")} == {"named", *([name] if name else [])}


async def test_a_key_names_a_function_without_a_name() -> None:
    async def body(ctx: Context) -> Any:
        return [
            await ctx.step(lambda: double(1), key="user:1"),
            await ctx.step(lambda: 4, key="user:2"),
            await ctx.scope("a/b").step(lambda: 6, key="user:1"),
        ]

    async with world(Workflow("flow", body)) as here:
        assert await here.runtime.run("flow", id="r") == Ok([2, 4, 6])
        journal = await here.runtime.store.journal("r")
    assert [(entry.key, entry.name) for entry in journal] == [
        ("user:1", "user:1"),
        ("user:2", "user:2"),
        ("/a%2Fb/user:1", "user:1"),
    ]


@pytest.mark.parametrize("unnamed", [lambda: 1, mock.Mock(), mock.AsyncMock(), mock.MagicMock(spec=double)])
async def test_a_function_without_name_and_key_is_refused_with_advice(unnamed: Any) -> None:
    for_function = r"pass one before it.*or a key: ctx\.step\(lambda: \.\.\., key='user:1'\)"
    for_mock = r"give it one, as in Mock\(name='charge'\), or pass key= to ctx\.step"

    async def body(ctx: Context) -> None:
        with pytest.raises(TypeError, match=for_mock if isinstance(unnamed, mock.NonCallableMock) else for_function):
            await ctx.step(unnamed)

    await Workflow("flow", body)()


class Gateway:
    async def charge(self, cents: int) -> str:
        raise AssertionError("the real one was called")

    def look_up(self, cents: int) -> str:
        raise AssertionError("the real one was called")


def autospecced(cls: type) -> Any:
    fake = mock.create_autospec(cls)
    fake.return_value.charge.return_value = "paid"
    return fake


MOCKS: dict[str, Callable[[], Any]] = {
    "Mock": lambda: mock.Mock(name="charge", return_value="paid"),
    "MagicMock": lambda: mock.MagicMock(name="charge", return_value="paid"),
    "AsyncMock": lambda: mock.AsyncMock(name="charge", return_value="paid"),
    "side effects": lambda: mock.AsyncMock(name="charge", side_effect=["paid"]),
    "of a plain function": lambda: mock.Mock(spec=double_plainly, name="charge", return_value="paid"),
    "of an async function": lambda: mock.Mock(spec=double, name="charge", return_value="paid"),
    "of a method": lambda: mock.MagicMock(spec=Gateway().look_up, name="charge", return_value="paid"),
    "of an async method": lambda: mock.MagicMock(spec=Gateway().charge, name="charge", return_value="paid"),
    "attribute": lambda: mock.Mock(**{"gateway.charge.return_value": "paid"}).gateway.charge,
    "attribute of an AsyncMock": lambda: mock.AsyncMock(**{"charge.return_value": "paid"}).charge,
    "attribute of a class": lambda: autospecced(Gateway)().charge,
}


@pytest.mark.parametrize("make", MOCKS.values(), ids=MOCKS)
async def test_a_mock_is_a_step_under_its_name_and_replays(make: Callable[[], Any]) -> None:
    fake = make()

    async def body(ctx: Context) -> Any:
        found = [await ctx.step(fake, 5)]
        if fake.side_effect is None:
            found.append(await ctx.step(functools.partial(fake, 5), key="again"))
        await ctx.sleep("nap", "1h")
        return found

    async with world(Workflow("flow", body)) as here:
        assert isinstance(await here.runtime.run("flow", id="r"), Suspended)
        calls = fake.call_count
        outcome = (await here.later("1h"))["r"]
        keys = await here.keys("r")
    assert isinstance(outcome, Ok)
    assert set(outcome.value) == {"paid"}
    assert (keys[0], len(outcome.value), calls) == ("charge", fake.call_count, fake.call_count)
    fake.assert_called_with(5)
    if hasattr(type(fake), "assert_awaited_with"):
        fake.assert_awaited_with(5)


@pytest.mark.parametrize("options", [{}, {"autospec": True}, {"spec": True}])
async def test_a_patched_function_is_a_step_under_its_name(options: dict[str, Any]) -> None:
    async def body(ctx: Context) -> Any:
        return [await ctx.step(double, 1), await ctx.step(double_plainly, 1), await ctx.step(Gateway().charge, 1, key="charge")]

    given = {**options, "return_value": "fake"}
    with (
        mock.patch(f"{__name__}.double", **given),
        mock.patch(f"{__name__}.double_plainly", **given),
        mock.patch.object(Gateway, "charge", **given),
    ):
        async with world(Workflow("flow", body)) as here:
            assert await here.runtime.run("flow", id="r") == Ok(["fake"] * 3)
            assert await here.keys("r") == ["double", "double_plainly", "charge"]


async def test_what_a_mock_raises_is_the_steps_error() -> None:
    for fake in (mock.Mock(side_effect=OSError("no")), mock.AsyncMock(side_effect=OSError("no"))):

        async def body(ctx: Context, fake: Any = fake) -> None:
            await ctx.step("charge", fake)

        with pytest.raises(OSError, match="no"):
            await Workflow("flow", body)()


async def test_a_mock_that_is_not_called_is_no_step() -> None:
    async def body(ctx: Context) -> None:
        fake: Any = mock.NonCallableMock(name="charge")
        with pytest.raises(TypeError, match=r"ctx\.step takes a function"):
            await ctx.step(fake)

    await Workflow("flow", body)()


async def test_a_class_is_a_step_that_makes_its_instance() -> None:
    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step(Point, 1, 2)

    assert await twice(body) == (Point(1, 2), Point(1, 2))


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_object_is_closed_and_refused() -> None:
    async def body(ctx: Context[Any]) -> str:
        refused: Any = double(1)
        return str(await raised(ctx.step(refused))) + str(await raised(ctx.step("named", double(1))))  # type: ignore[call-overload]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = await twice(body)
        gc.collect()
    assert first == second
    assert first.count("not a coroutine: write ctx.step(fetch, 1)") == 2
    assert not caught


@pytest.mark.parametrize("call", [(), ("name",), (5,), ("name", 5), (None,)], ids=repr)
async def test_what_is_no_function_is_refused(call: tuple[Any, ...]) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return type(await raised(ctx.step(*call))).__name__

    assert await flow() == "TypeError"


async def test_a_workflow_is_no_step() -> None:
    @workflow
    async def child(ctx: Context[Any]) -> int:
        return 1

    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        return [str(await raised(ctx.step(fn))) for fn in (child, functools.partial(child))]

    for message in await flow():
        assert "is a workflow, not a step" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": 3}, "unknown step option retries"),
        ({"key": ""}, "must have 1 to 1024"),
        ({"key": 7}, "must be a str"),
        ({"key": "a\0b"}, "no NUL"),
        ({"timeout": 0}, "longer than zero"),
        ({"timeout": -1}, "zero or more"),
        ({"retry": 0}, "at least 1"),
        ({"retry": True}, "at least 1"),
        ({"at_most_once": True, "retry": 2}, "contradict each other"),
    ],
    ids=repr,
)
async def test_a_bad_option_is_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    ran: list[int] = []

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return str(await raised(ctx.step("append", ran.append, 1, **options)))

    assert message in await flow()
    assert not ran


async def test_options_beside_the_function_are_defaults_and_the_calls_own_win() -> None:
    tried: list[int] = []

    @step(retry=Retry(3, wait_initial=0, wait_jitter=0))
    async def flaky() -> None:
        tried.append(current_step().attempt)
        raise ValueError

    def also_flaky(n: int) -> None:
        tried.append(n)
        raise ValueError

    decorated = step(retry=Retry(2, wait_initial=0, wait_jitter=0))(functools.partial(also_flaky, 7))

    @workflow
    async def flow(ctx: Context[Any]) -> list[list[int]]:
        counts = []
        calls: list[tuple[Any, dict[str, Any]]] = [
            (flaky, {}),
            (flaky, {"retry": None}),
            (flaky, {"retry": 1}),
            (decorated, {}),
            (functools.partial(also_flaky, 1), {}),
        ]
        for number, (fn, options) in enumerate(calls):
            tried.clear()
            assert isinstance(await raised(ctx.step(fn, **options, key=f"{number}")), ValueError)
            counts.append(list(tried))
        return counts

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok([[1, 2, 3], [1], [1], [7, 7], [1]])
    assert isinstance(await raised(asyncio.to_thread(decorated)), ValueError)
    for refused in ({"key": "k"}, {"retries": 3}, {"at_most_once": True, "retry": 2}):
        with pytest.raises((TypeError, ValueError)):
            step(**refused)


async def test_a_step_knows_itself_in_its_thread_and_in_the_tasks_it_starts() -> None:
    def in_thread() -> tuple[bool, str, int]:
        here = current_step()
        return threading.current_thread() is threading.main_thread(), here.key, here.attempt

    async def in_task() -> str:
        async def helper() -> str:
            return current_step().idempotency_key

        return await asyncio.create_task(helper())

    async def body(ctx: Context[Any]) -> Any:
        with pytest.raises(RuntimeError, match="outside a step"):
            current_step()
        async with asyncio.TaskGroup() as group:
            thread = group.create_task(ctx.step(in_thread, key="a"))
            task = group.create_task(ctx.step(in_task, key="b"))
            lazily = group.create_task(ctx.scope("s").step("lambda", lambda: in_task()))  # noqa: PLW0108
        with pytest.raises(RuntimeError, match="outside a step"):
            current_step()
        return thread.result(), task.result(), lazily.result()

    expected = ((False, "a", 1), "run/b", "run//s/lambda")
    assert await twice(body) == (expected, expected)
    with pytest.raises(RuntimeError, match="outside a step"):
        current_step()


@pytest.mark.parametrize("options", [{}, {"timeout": 5}, {"at_most_once": True}, {"retry": 2}])
async def test_context_variables_that_a_step_sets_never_reach_the_body(options: dict[str, Any]) -> None:
    who = contextvars.ContextVar("who", default="nobody")

    async def sets() -> str:
        before = who.get()
        who.set("set by the step")
        await asyncio.sleep(0)
        return f"{before}, {who.get()}"

    async def body(ctx: Context[Any]) -> Any:
        who.set("the body")
        return [await ctx.step("s", sets, **options), who.get(), await ctx.step("lambda", lambda: sets()), who.get()]  # noqa: PLW0108

    first, second = await twice(body)
    assert first == second == ["the body, set by the step", "the body"] * 2


async def test_a_context_variable_set_in_one_attempt_does_not_reach_the_next() -> None:
    tries = contextvars.ContextVar("tries", default=0)

    async def fails_first() -> int:
        tries.set(tries.get() + 1)
        if current_step().attempt == 1:
            raise OSError
        return tries.get()

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step(fails_first, retry=Retry(2, wait_initial=0, wait_jitter=0))

    assert await Workflow("flow", body)() == 1


async def test_cancelling_reaches_a_step_and_what_it_raises_then_is_its_own() -> None:
    seen: list[str] = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def body(ctx: Context[Any]) -> None:
        task = asyncio.ensure_future(ctx.step(hangs))
        await ctx.step("turn", asyncio.sleep, 0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    await Workflow("flow", body)()
    assert seen == ["cancelled"]


async def test_a_step_in_a_thread_sees_the_bodys_context_variables() -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        user.set("ada")
        return await ctx.step("who", user.get)

    assert await flow() == "ada"
    assert user.get() == "nobody"


@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["plain", "with a time limit"])
async def test_context_variables_that_a_step_sets_stay_in_the_step(options: dict[str, Any]) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    async def who() -> str:
        return user.get()

    async def log_in() -> list[str]:
        seen = [user.get()]
        user.set("eve")
        seen.append(await asyncio.create_task(who()))
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0)
        except TimeoutError:
            seen.append(user.get())
        return seen

    async def body(ctx: Context[Any]) -> tuple[list[str], str]:
        user.set("ada")
        return await ctx.step(log_in, **options), user.get()

    expected = (["ada", "eve", "eve"], "ada")
    assert await twice(body) == (expected, expected)


async def test_a_result_is_a_copy_with_its_types() -> None:
    kept: list[Any] = []

    async def make() -> Any:
        kept.append([1, (2, 3), {4}, b"5", {6: None}])
        return kept[-1]

    async def body(ctx: Context[Any]) -> Any:
        value = await ctx.step(make)
        seen = repr(value)
        value.append("mutated by the body")
        kept[-1].append("mutated by the step's owner")
        return seen

    assert await twice(body) == ("[1, (2, 3), {4}, b'5', {6: None}]",) * 2
    assert len(kept) == 1


async def test_a_result_is_rebuilt_by_annotation_or_by_returns() -> None:
    async def annotated() -> dict[str, Point]:
        return {"p": Point(1, 2)}

    async def unannotated():  # type: ignore[no-untyped-def]  # noqa: ANN202
        return [Point(3, 4)]

    def in_ok() -> Ok[Point] | Err[str]:
        return Ok(Point(5, 6))

    async def body(ctx: Context[Any]) -> Any:
        return (
            await ctx.step(annotated),
            await ctx.step("returns", unannotated, returns=list[Point]),
            await ctx.step(in_ok),
        )

    expected = ({"p": Point(1, 2)}, [Point(3, 4)], Point(5, 6))
    assert await twice(body) == (expected, expected)


async def test_returns_names_the_value_and_the_error_of_a_result() -> None:
    async def unannotated(is_good: bool):  # type: ignore[no-untyped-def]  # noqa: ANN202 - that is the point
        return Ok(Point(1, 2)) if is_good else Err(Point(3, 4))

    async def half(is_good: bool) -> Err[Point]:
        return Ok(Point(1, 2)) if is_good else Err(Point(3, 4))  # type: ignore[return-value]

    async def body(ctx: Context) -> Any:
        found: list[Any] = []
        for name, fn, returns in (
            ("full", unannotated, Ok[Point] | Err[Point]),
            ("half", half, Ok[Point]),
            ("value", half, Point),
        ):
            found.append(await ctx.step(name, fn, True, key=f"{name} good", returns=returns))
            try:
                await ctx.step(name, fn, False, key=f"{name} bad", returns=returns)
            except StepFailed as failed:
                found.append(failed.error)
        return found

    first, second = await twice(body)
    assert first == second == [Point(1, 2), Point(3, 4)] * 3


async def test_a_value_that_cannot_be_stored_fails_its_step_once_with_the_path() -> None:
    ran: list[int] = []

    async def make() -> Any:
        ran.append(1)
        return {"rows": [1, threading.Lock()]}

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(make, retry=3))
        assert isinstance(error, ValueNotStorable)
        assert "ran, but what it returned cannot be recorded" in error.__notes__[0]
        return error.path, str(error)

    first, second = await twice(body)
    assert first == second
    assert first[0] == 'value["rows"][1]'
    assert ran == [1]


async def test_without_a_store_a_value_that_cannot_be_stored_becomes_none() -> None:
    async def make() -> Any:
        return [1, threading.Lock(), (2,)]

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(make)

    with pytest.warns(PerdureWarning, match=r"value\[1\]"):
        assert await flow() == [1, None, (2,)]

    @workflow(strict=True)
    async def strict(ctx: Context[Any]) -> Any:
        return await ctx.step(make)

    with pytest.raises(ValueNotStorable):
        await strict()


async def test_err_raises_step_failed_which_the_body_may_catch() -> None:
    async def refuse() -> Ok[int] | Err[str]:
        return Err("too poor")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(refuse, retry=5))
        assert isinstance(error, StepFailed)
        return error.key, error.error, error.was_returned

    assert await twice(body) == (("refuse", "too poor", True),) * 2


async def test_err_that_nobody_catches_is_the_runs_outcome() -> None:
    ran: list[int] = []

    async def refuse() -> Ok[int] | Err[Point]:
        ran.append(1)
        return Err(Point(1, 2))

    @workflow
    async def flow(ctx: Context[Any]) -> Ok[int] | Err[Point]:
        return Ok(await ctx.step(refuse))

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Err(Point(1, 2))
        assert await here.runtime.resume("run") == Err(Point(1, 2))
        assert await here.runtime.run(flow, id="run") == Err(Point(1, 2))
    assert ran == [1]


async def test_a_raised_error_is_the_same_error_on_replay() -> None:
    async def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            error = Refused(code=402, reason="no money")
            error.add_note("while charging")
            raise error from inner

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(fail))
        assert isinstance(error, Refused)
        return str(error), error.code, error.reason, error.__notes__, repr(error.__cause__)

    notes = ["while charging", "in step 'fail' of run 'run'"]
    expected = ("402: no money", 402, "no money", notes, "KeyError('inner')")
    assert await twice(body) == (expected, expected)


class Unnotable(Exception):
    """An error that takes no notes."""

    def add_note(self, note: str) -> None:
        raise TypeError(note)


@pytest.mark.parametrize("kind", [ValueError, Unnotable])
async def test_a_call_that_fails_names_its_step(kind: type[Exception]) -> None:
    @step(retry=Retry(2, wait_initial=0, wait_jitter=0))
    async def charge(number: int) -> None:
        raise kind(f"no {number}")

    @workflow
    async def shop(ctx: Context) -> None:
        for number in range(3):
            with contextlib.suppress(kind):
                await ctx.step(charge, number, key=f"handled:{number}")
        await ctx.step(charge, 7, key="charge:7")

    store = stores.memory()
    for call in (shop(), await shop.start(id="r", store=store), await shop.start(id="r", store=store)):
        with pytest.raises(kind, match="no 7") as failed:
            await call
        assert re.fullmatch(r"in step 'charge:7' of run '[^']+'", failed.value.__notes__[0])
        assert len(failed.value.__notes__) == 1


async def test_a_call_that_ends_with_an_err_names_the_step_that_returned_it() -> None:
    async def charge() -> Ok[int] | Err[str]:
        return Err("no money")

    @workflow
    async def shop(ctx: Context) -> int:
        with contextlib.suppress(StepFailed):
            await ctx.step(charge, key="handled")
        return await ctx.step(charge, key="charge:7")

    @workflow
    async def returns_err(ctx: Context) -> Ok[int] | Err[str]:
        return Err("of the body")

    store = stores.memory()
    calls: list[Awaitable[int]] = [shop(), await shop.start(id="r", store=store), await shop.start(id="r", store=store)]
    for call in calls:
        with pytest.raises(StepFailed) as failed:
            await call
        assert (failed.value.key, failed.value.error) == ("charge:7", "no money")
        assert str(failed.value) == "step 'charge:7' returned Err('no money')"
    for outcome in (await shop.run(), await shop.run(id="r", store=store)):
        assert isinstance(outcome, Err)
        assert (outcome, outcome.step, repr(outcome)) == (Err("no money"), "charge:7", "Err(error='no money', cause=None)")
    own = await returns_err.run()
    assert isinstance(own, Err)
    assert own.step is None


@pytest.mark.one_loop
async def test_an_error_that_is_raised_again_and_again_does_not_collect_notes() -> None:
    always = ValueError("no")

    async def body(ctx: Context[Any]) -> list[str]:
        for number in range(100):
            with contextlib.suppress(ValueError):
                await ctx.step("s", mock.Mock(side_effect=always), key=f"{number}")
        return always.__notes__

    assert len(await Workflow("flow", body)()) <= 10


async def test_an_error_whose_class_cannot_be_found_again_is_step_failed_from_the_start() -> None:
    class Local(ValueError):
        pass

    async def fail() -> None:
        raise Local("somewhere")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(fail))
        assert isinstance(error, ValueError), "the nearest base that is there"
        assert isinstance(error, StepFailed)
        assert not error.was_returned
        return error.key, error.error.rpartition(".")[2], str(error)

    first, second = await twice(body)
    assert first == second
    assert first[:2] == ("fail", "Local")
    assert first[2].endswith("Local: somewhere")


async def test_a_failed_step_runs_once_however_often_its_error_replays() -> None:
    ran: list[int] = []

    def fail() -> None:
        ran.append(1)
        raise OSError(2, "No such file", "x.txt")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(fail))
        assert type(error) is FileNotFoundError
        return error.errno, error.filename

    assert await twice(body) == ((2, "x.txt"),) * 2
    assert ran == [1]


async def test_stop_iteration_from_a_plain_function_ends_its_step() -> None:
    def first_of_none() -> Any:
        return next(iter(()))

    async def body(ctx: Context[Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            error = await raised(ctx.step(first_of_none))
        return type(error), str(error)

    assert await twice(body) == ((RuntimeError, "the step's function raised StopIteration"),) * 2


@pytest.mark.parametrize("is_plain", [False, True])
async def test_what_is_no_exception_is_never_recorded_as_a_result(is_plain: bool) -> None:
    ran: list[int] = []

    def plainly() -> str:
        ran.append(1)
        if len(ran) == 1:
            raise Abrupt
        return "done"

    async def abrupt() -> str:
        return plainly()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step("abrupt", plainly) if is_plain else await ctx.step(abrupt, retry=5)

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepFailed)
        assert "Abrupt" in str(outcome.error)
        assert await here.keys("run") == []
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("done")}


async def test_an_exception_inside_err_is_what_the_run_ends_with() -> None:
    async def refuse() -> Ok[str] | Err[ValueError]:
        return Err(ValueError("too much"))

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(refuse)

    async with world(flow) as here:
        for _ in range(2):
            outcome = await here.runtime.run(flow, id="run")
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, ValueError)
            assert str(outcome.error) == "too much"


@pytest.mark.parametrize("use", ["step", "sleep", "wait_for_signal", "map", "race", "timeout", "uuid4", "random"])
async def test_ctx_inside_a_step_is_refused_with_advice(use: str) -> None:
    async def inside(ctx: Context[Any]) -> str:
        match use:
            case "step":
                error = await raised(ctx.step("inner", double, 1))
            case "sleep":
                error = await raised(ctx.sleep("inner", 0))
            case "wait_for_signal":
                error = await raised(ctx.wait_for_signal("inner"))
            case "map":
                error = await raised(ctx.map("inner", double, [1]))
            case "race":
                error = await raised(ctx.race("inner", ctx.sleep("a", 0)))
            case "timeout":
                error = await raised(ctx.timeout("inner", 5).__aenter__())
            case "uuid4":
                error = await raised(asyncio.to_thread(ctx.uuid4))
            case _:
                error = await raised(asyncio.to_thread(ctx.random))
        assert isinstance(error, RuntimeError)
        return str(error)

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step("outer", inside, ctx)

    first, second = await twice(body)
    assert first == second
    assert "body" in first
    assert "step" in first


async def test_a_key_used_twice_in_a_row_is_refused_with_advice() -> None:
    async def body(ctx: Context[Any]) -> Any:
        await ctx.step(double, 1)
        errors = [
            await raised(ctx.step(double, 1)),
            await raised(ctx.sleep("double", 0)),
            await raised(ctx.step("double", add, 1)),
        ]
        assert all(isinstance(error, DuplicateStep) for error in errors)
        return str(errors[0])

    assert await twice(body) == ("step key 'double' was used twice in run 'run'; pass key= to tell them apart",) * 2


async def test_a_key_used_by_two_branches_is_refused_in_the_second_and_the_first_goes_on() -> None:
    ran: list[int] = []

    async def slow(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(0.001)
        return n

    async def body(ctx: Context[Any]) -> Any:
        one, two = await asyncio.gather(ctx.step(slow, 1), ctx.step(slow, 2), return_exceptions=True)
        return one, type(two)

    assert await twice(body) == ((1, DuplicateStep),) * 2
    assert ran == [1]


async def test_the_key_of_a_cancelled_call_is_free_again() -> None:
    ran: list[str] = []
    has_begun = asyncio.Event()

    async def hang(label: str) -> str:
        ran.append(label)
        if label == "first":
            has_begun.set()
            await asyncio.sleep(3600)
        return label

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        first = asyncio.create_task(ctx.step(hang, "first"))
        await ctx.step(has_begun.wait)
        first.cancel()
        await asyncio.wait([first])
        return await ctx.step(hang, "second")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("second")
        assert await here.keys("run") == ["wait", "hang"]
    assert ran == ["first", "second"]


CHANGES: dict[str, Any] = {
    "a step that is a sleep now": lambda ctx: ctx.sleep("a", 0),
    "a step that is a signal now": lambda ctx: ctx.wait_for_signal("a"),
    "a sleep that is a step now": lambda ctx: ctx.step("b", add, 1),
    "a step that is a race now": lambda ctx: ctx.race("a", ctx.sleep("x", 0)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_run_whose_recorded_key_is_asked_for_as_another_kind_is_stopped(change: str) -> None:
    replaced: list[bool] = []
    seen_by_body: list[Exception] = []

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        if replaced:
            try:
                return await CHANGES[change](ctx)
            except Exception as error:
                seen_by_body.append(error)
        await ctx.step("a", add, 1)
        await ctx.sleep("b", 0)
        await ctx.sleep("end", "1h")
        return "as it was"

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        replaced.append(True)
        outcome = (await here.later("1h"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepChanged)
        assert "key of its own" in str(outcome.error)
        assert stored(here).row.problem == str(outcome.error)
        replaced.clear()
        assert await here.later("5s") == {"run": Ok("as it was")}
    assert not seen_by_body


async def test_the_key_of_a_cancelled_wait_stays_one_of_its_kind() -> None:
    async def body(ctx: Context[Any]) -> Any:
        waiting = asyncio.ensure_future(ctx.sleep("a", "10m"))
        await ctx.step("tick", add, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        return type(await raised(ctx.step("a", add, 1)))

    assert await twice(body) == (StepChanged, StepChanged)


@pytest.mark.parametrize("policy", ["warn", "error", "ignore", None])
async def test_changed_arguments_follow_the_policy(policy: Any) -> None:
    calls: list[Any] = []
    options = {} if policy is None else {"on_changed_arguments": policy}

    async def flow(ctx: Context[Any]) -> Any:
        value = await ctx.step(double, 1 + len(calls))
        calls.append(value)
        await ctx.sleep("end", "1h")
        return value

    definition = Workflow("flow", flow, **options)
    async with world(definition) as here:
        await here.runtime.run(definition, id="run")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = (await here.later("1h"))["run"]
    if policy == "error":
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepChanged)
    else:
        assert outcome == Ok(2)
    warned = [each for each in caught if issubclass(each.category, PerdureWarning)]
    assert len(warned) == (policy in {"warn", None})
    assert all("'double'" in str(each.message) for each in warned)


@pytest.mark.parametrize("options", [{}, {"cache": {}}])
async def test_arguments_that_are_not_compared_are_not_hashed(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    hashed: list[Any] = []
    monkeypatch.setattr(Codec, "checksum", lambda _, args: hashed.append(args))

    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step(double, 1, key="a"), await ctx.step(double, 2), await ctx.map("m", double, [3, 4])]

    assert await twice(body, on_changed_arguments="ignore", **options) == ([2, 4, [6, 8]],) * 2
    assert hashed == []


async def test_a_class_that_got_a_default_field_gives_no_warning() -> None:
    grown = make_dataclass("Point", [("x", int), ("y", int), ("z", int, 0)])
    grown.__module__ = __name__
    kinds: list[Any] = [Point, grown]

    async def use(point: Any) -> int:
        return int(point.x)

    async def body(ctx: Context[Any]) -> Any:
        kind = kinds.pop(0)
        return [await ctx.step(use, kind(1, 2)), await ctx.step("several", use, kind(3, 4))]

    assert await twice(body, on_changed_arguments="error") == ([1, 3], [1, 3])


async def test_arguments_that_cannot_be_encoded_are_not_compared() -> None:
    async def use(lock: Any) -> str:
        return type(lock).__name__

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step(use, threading.Lock())

    first, second = await twice(body, on_changed_arguments="error")
    assert first == second


async def test_steps_that_change_places_go_on_and_so_does_an_inserted_one_where_the_workflow_wants_it() -> None:
    ran: list[str] = []

    async def work(label: str) -> str:
        ran.append(label)
        return label

    orders = [["a", "b", "c", "d"], ["d", "b", "c", "a"], ["new", "d", "b", "a"]]

    @workflow(on_unknown_steps="ignore", on_divergence="run")
    async def flow(ctx: Context[Any]) -> list[str]:
        values = [await ctx.step("work", work, label, key=label) for label in orders[0]]
        await ctx.sleep(f"nap {len(orders)}", "1h")
        return values

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        orders.pop(0)
        assert isinstance((await here.later("1h"))["run"], Suspended)
        assert ran == ["a", "b", "c", "d"]
        orders.pop(0)
        await here.later("1h")
        assert await here.keys("run") == ["a", "b", "c", "d", "new"]
    assert ran == ["a", "b", "c", "d", "new"]


async def test_a_step_that_outlives_its_time_is_step_timeout_which_is_a_timeout_error() -> None:
    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step("slow", asyncio.sleep, 3600, timeout=0.001))
        assert isinstance(error, StepTimeout)
        assert isinstance(error, TimeoutError)
        return str(error)

    assert await twice(body) == ("step 'slow' did not finish within 0.001 s",) * 2
