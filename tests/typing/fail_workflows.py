"""Definitions and calls of workflows that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from perdure import Context, Err, Ok, Outcome, Suspended, Workflow, workflow


@dataclass
class Deps:
    url: str


@workflow
async def greet(ctx: Context[Deps], name: str, mark: str = "!") -> str:
    return ctx.deps.url + name + mark


@workflow
async def tick(ctx: Context) -> None:
    assert ctx.run_id


@workflow  # error
def not_async(ctx: Context) -> None:
    assert ctx.run_id


@workflow  # error
async def without_a_context(name: str) -> str:
    return name


@workflow(nam="tick")  # error
async def unknown_option(ctx: Context) -> None:
    assert ctx.run_id


@workflow(on_changed_arguments="shout")  # error
async def unknown_choice(ctx: Context) -> None:
    assert ctx.run_id


async def typed_deps(ctx: Context[Deps]) -> None:
    assert ctx.deps.uri  # error


async def helper(ctx: Context[Deps]) -> None:
    assert ctx.deps.url


async def other_deps(ctx: Context[int]) -> None:
    await helper(ctx)  # error


async def wrong_calls() -> None:
    await greet()  # error
    await greet(1)  # error
    await greet("Ada", 1)  # error
    await greet("Ada", "!", "!")  # error
    await greet("Ada", nam="!")  # error
    await greet("Ada", id="g1")  # error
    await tick(1)  # error
    Workflow("tick")  # error


async def wrong_runs() -> None:
    await greet.run()  # error
    await greet.run(1)  # error
    await greet.run("Ada", 1, id="g1")  # error
    await greet.run(1, "!", id="g1")  # error
    await greet.run("Ada", "!", "!", id="g1")  # error
    await tick.run(1, id="t1")  # error


async def a_default_left_out_beside_an_option() -> None:
    # No signature can say this; wf.options(id=...).run(...) and runtime.run(wf, ...) can.
    await greet.run("Ada", id="g1")  # error
    await greet.start("Ada", id="g1")  # error


async def wrong_options() -> None:
    await tick.run(ident="t1")  # error
    await tick.run(id=1)  # error
    await tick.run(store=1)  # error
    await tick.run(wait="no")  # error
    await tick.run(on_changed_arguments="shout")  # error
    await tick.start(ident="t1")  # error
    await tick.start(priority="high")  # error
    tick.run_sync(ident="t1")  # error
    tick.options(ident="t1")  # error
    tick.options(start_at="tomorrow")  # error


async def wrong_arguments_after_options() -> None:
    await greet.options(id="g1").run()  # error
    await greet.options(id="g1").run(1)  # error
    await greet.options(id="g1").run("Ada", nam="!")  # error
    await greet.options(id="g1").run("Ada", id="g1")  # error
    await greet.options(id="g1").start(1)  # error
    greet.options(id="g1").run_sync(1)  # error


async def another_value() -> None:
    number: int = await (await greet.start("Ada"))  # error
    assert number


def a_case_is_missing(outcome: Outcome[int]) -> None:
    match outcome:
        case Ok():
            pass
        case Err():
            pass
        case _:
            assert_never(outcome)  # error


def not_every_outcome_has_a_value(outcome: Outcome[int]) -> None:
    assert outcome.value  # error
    assert outcome.wake_at  # error
    assert Suspended("r1", "tomorrow")  # error
