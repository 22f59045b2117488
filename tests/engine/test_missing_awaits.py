"""An `await` that is missing: a coroutine comes where a value is expected, and the error says so."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from perdure import Context, Err, Ok, Workflow, stores
from perdure.errors import InvalidInput, PerdureError, ValueNotStorable


async def fetch() -> int:
    return 1


async def double(number: int) -> int:
    return 2 * number


@dataclass
class Page:
    body: Any


async def nothing(_: Context, argument: Any = None) -> None:
    """A child."""


CHILD: Final = Workflow("child", nothing)
OF_CTX: Final[dict[str, Callable[[Context], Any]]] = {
    "step": lambda ctx: ctx.step(fetch),
    "child": lambda ctx: ctx.child(CHILD),
    "a called workflow": lambda _: CHILD(),
    "sleep": lambda ctx: ctx.sleep("nap", "1h"),
    "signal": lambda ctx: ctx.wait_for_signal("go"),
    "approval": lambda ctx: ctx.approve("refund"),
    "map": lambda ctx: ctx.map(double, [1]),
    "patched": lambda ctx: ctx.patched("more"),
}
AROUND: Final[dict[str, tuple[Callable[[Any], Any], str]]] = {
    "itself": (lambda value: value, "value"),
    "in a list": (lambda value: [1, value], "value[1]"),
    "in a dict": (lambda value: {"a": (value,)}, 'value["a"][0]'),
    "in an object": (Page, "value.body"),
}


def outcome_of_ctx(error: BaseException, path: str) -> None:
    assert isinstance(error, ValueNotStorable)
    told = "it is what a call such as ctx.step(...) gives before it is awaited: an `await` is missing before it"
    assert str(error) == f"the value at {path} cannot be stored: {told}"


@pytest.mark.parametrize("has_store", [True, False], ids=["in a store", "in memory"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", OF_CTX)
async def test_a_body_that_returns_a_ctx_call_is_told_that_an_await_is_missing(
    kind: str, around: str, *, has_store: bool
) -> None:
    wrap, path = AROUND[around]

    async def body(ctx: Context) -> Page | Any:
        return wrap(OF_CTX[kind](ctx))

    flow = Workflow("flow", body)
    if has_store:
        outcome = await flow.run(id="run", store=stores.memory())
        assert isinstance(outcome, Err)
        outcome_of_ctx(outcome.error, path)
    else:
        with pytest.raises(ValueNotStorable) as refusal:
            await flow()
        outcome_of_ctx(refusal.value, path)
    gc.collect()  # a coroutine that nobody has awaited would be warned of, which fails the test


@pytest.mark.parametrize("around", AROUND)
async def test_a_step_that_returns_a_coroutine_is_told_which(around: str) -> None:
    wrap, path = AROUND[around]

    async def step() -> Page | Any:
        return wrap(fetch())

    async def body(ctx: Context) -> None:
        await ctx.step(step)

    with pytest.raises(ValueNotStorable) as refusal:
        await Workflow("flow", body)()
    assert (
        str(refusal.value)
        == f"the value at {path} cannot be stored: it is the coroutine of fetch(): an `await` is missing before it"
    )
    gc.collect()


async def test_several_at_once_are_all_put_away() -> None:
    async def body(ctx: Context) -> Any:
        return [ctx.step(fetch), {"more": [fetch(), fetch()]}]

    outcome = await Workflow("flow", body).run()
    assert isinstance(outcome, Err)
    outcome_of_ctx(outcome.error, "value[0]")
    gc.collect()


async def test_a_coroutine_as_an_argument_of_a_child_is_refused_so_too() -> None:
    async def body(ctx: Context) -> str:
        with pytest.raises(InvalidInput, match=r"input\[0\]\[0\] .*the coroutine of fetch\(\): an `await` is missing before it"):
            await ctx.child(CHILD, fetch())
        return "told"

    assert await Workflow("flow", body).run(id="run", store=stores.memory()) == Ok("told")
    gc.collect()


async def test_a_step_may_be_given_a_coroutine_as_its_argument() -> None:
    async def await_it(given: Any) -> int:
        number: int = await given
        return number

    async def body(ctx: Context) -> int:
        return await ctx.step(await_it, fetch())

    assert await Workflow("flow", body).run(id="run", store=stores.memory()) == Ok(1)


async def test_an_input_of_a_class_without_annotation_speaks_of_the_workflows_parameter() -> None:
    async def untyped(ctx: Context, page) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
        return await ctx.step("page", lambda: page)

    with pytest.raises(InvalidInput) as refusal:
        await Workflow("flow", untyped).run(Page(1), id="run", store=stores.memory())
    assert str(refusal.value) == (
        "workflow 'flow' cannot take this input: the value at input[0][0] cannot be stored: "
        "class tests.engine.test_missing_awaits:Page is not in the annotation, so it could not be rebuilt; "
        "annotate the workflow's parameter with it, or register the class (perdure.register)"
    )


async def test_a_result_of_a_class_without_annotation_speaks_of_the_return_type() -> None:
    async def body(ctx: Context) -> Any:
        return await ctx.step("page", lambda: Page(1))

    outcome = await Workflow("flow", body).run(id="run", store=stores.memory())
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, PerdureError)
    assert "annotate the return type of the step or workflow with it, pass returns=, or register" in str(outcome.error)
