"""What `ctx.step` takes, runs, records and gives back, on the first run and on every replay."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Context, Err, Ok, PerdureWarning, Retry, Suspended, Workflow, current_step, step, workflow
from perdure.errors import DuplicateStep, StepChanged, StepFailed, StepTimeout, ValueNotStorable
from tests.engine.replays import raised, twice
from tests.engine.worlds import world


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

    expected = ("402: no money", 402, "no money", ["while charging"], "KeyError('inner')")
    assert await twice(body) == (expected, expected)


async def test_an_error_whose_class_cannot_be_found_again_is_step_failed_from_the_start() -> None:
    class Local(ValueError):
        pass

    async def fail() -> None:
        raise Local("somewhere")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(fail))
        assert not isinstance(error, ValueError)
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
        async with asyncio.timeout(5):
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


async def test_the_key_of_a_cancelled_call_is_free_again_and_nothing_is_recorded_for_it() -> None:
    ran: list[str] = []
    limit = asyncio.timeout(None)

    async def hang(label: str) -> str:
        ran.append(label)
        if label == "first":
            limit.reschedule(0)
            await asyncio.sleep(3600)
        return label

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        with pytest.raises(TimeoutError):
            async with limit:
                await ctx.step(hang, "first")
        return await ctx.step(hang, "second")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("second")
        assert await here.keys("run") == ["hang"]
    assert ran == ["first", "second"]


async def test_a_result_that_a_cancelled_call_did_not_take_goes_to_the_next_call() -> None:
    ran: list[str] = []
    has_run = asyncio.Event()

    async def work() -> str:
        ran.append("work")
        has_run.set()
        return "done"

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        other = asyncio.create_task(ctx.step("other", asyncio.sleep, 0.005))
        task = asyncio.create_task(ctx.step(work))
        await has_run.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        value = await ctx.step(work)
        await other
        return value

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("done")
        assert sorted(await here.keys("run")) == ["other", "work"]
    assert ran == ["work"]


async def test_a_recorded_key_asked_for_as_another_kind_is_step_changed() -> None:
    replaced: list[bool] = []

    @workflow(on_unknown_steps="ignore")
    async def flow(ctx: Context[Any]) -> Any:
        if replaced:
            for call in (ctx.sleep("a", 0), ctx.wait_for_signal("b"), ctx.step("c", add, 1), ctx.race("d", ctx.sleep("x", 0))):
                error = await raised(call)
                assert isinstance(error, StepChanged)
                assert "key of its own" in str(error)
            return "told"
        await ctx.step("a", add, 1)
        await ctx.step("b", add, 1)
        await ctx.sleep("c", 0)
        await ctx.step("d", add, 1)
        return await ctx.sleep("end", "1h")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        replaced.append(True)
        assert await here.later("1h") == {"run": Ok("told")}


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


async def test_arguments_that_cannot_be_encoded_are_not_compared() -> None:
    async def use(lock: Any) -> str:
        return type(lock).__name__

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step(use, threading.Lock())

    first, second = await twice(body, on_changed_arguments="error")
    assert first == second


async def test_inserted_reordered_and_removed_steps_go_on() -> None:
    ran: list[str] = []

    async def work(label: str) -> str:
        ran.append(label)
        return label

    orders = [["a", "b", "c", "d"], ["new", "d", "b", "a"]]

    @workflow(on_unknown_steps="ignore")
    async def flow(ctx: Context[Any]) -> list[str]:
        order = orders[0] if len(ran) < 4 else orders[1]
        values = [await ctx.step("work", work, label, key=label) for label in order]
        await ctx.sleep("end", "1h")
        return values

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert await here.later("1h") == {"run": Ok(["new", "d", "b", "a"])}
        assert await here.keys("run") == ["a", "b", "c", "d", "new", "end"]
    assert ran == ["a", "b", "c", "d", "new"]


async def test_a_step_that_outlives_its_time_is_step_timeout_which_is_a_timeout_error() -> None:
    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step("slow", asyncio.sleep, 3600, timeout=0.001))
        assert isinstance(error, StepTimeout)
        assert isinstance(error, TimeoutError)
        return str(error)

    assert await twice(body) == ("step 'slow' did not finish within 0.001 s",) * 2
