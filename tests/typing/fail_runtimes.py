"""Calls of `Runtime` and `runtime.sync` that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure import Context, Run, Runtime, workflow


@workflow
async def greet(ctx: Context, name: str, mark: str = "!") -> str:
    return ctx.run_id + name + mark


async def plain(name: str) -> str:
    return name


def constructors() -> None:
    Runtime(1)  # error
    Runtime(workflows=greet)  # error
    Runtime(workflows=[plain])  # error
    Runtime(concurency=1)  # error
    Runtime(concurrency="many")  # error
    Runtime(lease_ttl=[30])  # error
    Runtime(on_changed_arguments="shout")  # error
    Runtime(queues=["mail"])  # error
    Runtime(only_queues=[3])  # error


async def wrong_arguments(runtime: Runtime) -> None:
    await runtime.start(greet)  # error
    await runtime.start(greet, 1)  # error
    await runtime.start(greet, "Ada", 1)  # error
    await runtime.start(greet, "Ada", "!", "!")  # error
    await runtime.start(1, "Ada")  # error
    await runtime.start()  # error
    await runtime.run(greet)  # error
    await runtime.run(greet, 1)  # error
    await runtime.run(greet, "Ada", "!", "!")  # error
    await runtime.run(1, "Ada")  # error


async def keywords_of_the_workflow(runtime: Runtime) -> None:
    await runtime.start(greet, name="Ada")  # error
    await runtime.run(greet, "Ada", mark="!")  # error


async def process_options_are_not_stored(runtime: Runtime) -> None:
    await runtime.start(greet, "Ada", deps={})  # error
    await runtime.start(greet, "Ada", store="memory:")  # error
    await runtime.run(greet, "Ada", strict=True)  # error
    await runtime.run(greet, "Ada", wait=False)  # error
    await runtime.run("greet", "Ada", retry_failed=True)  # error


async def wrong_options(runtime: Runtime) -> None:
    await runtime.start(greet, "Ada", id=1)  # error
    await runtime.start(greet, "Ada", ident="g1")  # error
    await runtime.start(greet, "Ada", start_at="tomorrow")  # error
    await runtime.start("greet", "Ada", priority="high")  # error
    await runtime.run(greet, "Ada", metadata=[])  # error
    await runtime.start(greet, "Ada", delay=datetime(2026, 1, 1, tzinfo=UTC))  # error
    await runtime.start(greet, "Ada", deadline=[])  # error


async def many_at_once(runtime: Runtime) -> None:
    await runtime.start_many(greet, ["Ada"])  # error
    await runtime.start_many(greet, [(1,)])  # error
    await runtime.start_many(greet, [("Ada",)], id="g1")  # error
    await runtime.start_many(greet, [("Ada",)], ids=len)  # error


async def with_a_signal(runtime: Runtime) -> None:
    await runtime.signal_with_start(greet, "Ada", signal="more")  # error
    await runtime.signal_with_start(greet, "Ada", id="g1")  # error
    await runtime.signal_with_start(greet, 1, id="g1", signal="more")  # error


async def other_verbs(runtime: Runtime) -> None:
    await runtime.resume(1)  # error
    await runtime.resume(greet)  # error
    await runtime.signal("g1")  # error
    await runtime.list(status="finished")  # error
    await runtime.list(status=("finished",))  # error
    await runtime.count(metadata={"tags": ["a"]})  # error
    await runtime.count(limit=3)  # error
    await runtime.list("g")  # error
    await runtime.sweep("now")  # error
    await runtime.purge()  # error


async def of_a_run(run: Run[str]) -> None:
    await run.signal()  # error
    number: int = await run  # error
    assert number


def blocking(runtime: Runtime) -> None:
    runtime.sync.start(greet)  # error
    runtime.sync.start(greet, 1)  # error
    runtime.sync.run(greet, 1)  # error
    runtime.sync.run(greet, "Ada", deps={})  # error
    number: int = runtime.sync.start(greet, "Ada").result()  # error
    assert number
