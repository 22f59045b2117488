"""Constructs of ctx: steps, waits, fan-out, children, what a body shows, and values that a replay repeats."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

from perdure import Approved, Expired, Rejected, Retry
from tests.fuzz.body import EXPECTED, Body, shown
from tests.fuzz.programs import Node, construct
from tests.fuzz.steps import Boom

SIGNALS: Final = ("a", "b", "c")
_RETRIED: Final = Retry(attempts=3, wait_initial=0.001, wait_jitter=0)
_LENGTHS: Final = (0.0, 0.001, 0.003, 0.01)


def _length(rng: random.Random) -> tuple[float]:
    return (rng.choice(_LENGTHS),)


@construct("step", weight=3)
async def step(body: Body, node: Node) -> Any:
    return await body.step(body.steps.quick, node.at)


@construct("slow", weight=3)
async def slow(body: Body, node: Node) -> Any:
    return await body.step(body.steps.slow, node.at)


@construct("ordered", weight=2)
async def ordered(body: Body, node: Node) -> Any:
    """Call a step whose key says how many others came before it."""
    return await body.step(body.steps.slow, f"{node.at}@{body.ask()}")


@construct("thread_step")
async def thread_step(body: Body, node: Node) -> Any:
    return await body.step(body.steps.in_thread, node.at)


@construct("fail")
async def fail(body: Body, node: Node) -> Any:
    return await body.step(body.steps.fail, node.at)


@construct("retried")
async def retried(body: Body, node: Node) -> Any:
    return await body.step(body.steps.fail_at_first, node.at, retry=_RETRIED)


@construct("timed_step", args=_length)
async def timed_step(body: Body, node: Node) -> Any:
    return await body.step(body.steps.slow, node.at, timeout=max(0.001, node.args[0]))


@construct("once")
async def once(body: Body, node: Node) -> Any:
    return await body.step(body.steps.once, node.at, at_most_once=True)


@construct("compensated", weight=2)
async def compensated(body: Body, node: Node) -> Any:
    return await body.step(body.steps.compensated, node.at, compensate=body.steps.undo)


@construct("unwind")
async def unwind(body: Body, node: Node) -> Any:
    return await body.step(body.steps.unwind, node.at)


@construct("stubborn")
async def stubborn(body: Body, node: Node) -> Any:
    value = await body.step(body.steps.stubborn, node.at)
    body.note(node.at, "returned")
    await body.step(body.steps.quick, f"{node.at}+")
    return value


@construct("cached")
async def cached(body: Body, node: Node) -> Any:
    """Call a step that other runs of the campaign may have called already."""
    label = f"cached {sum(map(ord, node.at)) % 5}"
    return await body.ctx.step("work", body.steps.slow, label, key=f"{node.at} {label}", ttl=60)


@construct("transaction", "sql")
async def transaction(body: Body, node: Node) -> Any:
    return await body.ctx.transaction("write", body.steps.write_row, node.at, key=node.at)


@construct("sleep", args=_length, weight=2)
async def sleep(body: Body, node: Node) -> Any:
    await body.ctx.sleep(node.at, node.args[0])


@construct("signal", args=lambda rng: (rng.choice(SIGNALS), rng.choice((None, 0.002, 0.01))), weight=3)
async def signal(body: Body, node: Node) -> Any:
    name, timeout = node.args
    if timeout is None:
        value = await body.ctx.wait_for_signal(name, key=node.at)
    else:
        value = await body.ctx.wait_for_signal(name, key=node.at, timeout=timeout, default="late")
    body.note(node.at, "got", name, value)
    return value


@construct("sending", args=lambda rng: (rng.choice(SIGNALS),))
async def sending(body: Body, node: Node) -> Any:
    """Send a signal in a step, to the run itself."""
    send = body.steps.sender(body.process.send_from_step, node.args[0])
    return await body.step(send, node.at)


@construct("approval", args=lambda rng: (rng.choice((None, 0.005)),))
async def approval(body: Body, node: Node) -> Any:
    decision = await body.ctx.approve("approval", node.at, key=node.at, expires_in=node.args[0])
    match decision:
        case Approved(payload, by):
            return f"approved by {by}: {payload}"
        case Rejected(reason, by):
            return f"rejected by {by}: {reason}"
        case Expired():
            return "expired"


@construct("limit", args=lambda rng: (rng.choice((0.001, 0.004, 0.02)),), inside=(1, 2), weight=2)
async def limit(body: Body, node: Node) -> Any:
    try:
        async with body.ctx.timeout(node.at, node.args[0]):
            return [await body.run(each) for each in node.inside]
    except TimeoutError as error:
        return f"late: {type(error).__name__}"


def _map_arguments(rng: random.Random) -> tuple[int, str, int]:
    return rng.randint(2, 5), rng.choice(("raise", "collect", "enough", "max_failures")), rng.randint(1, 3)


@construct("map", args=_map_arguments)
async def map_(body: Body, node: Node) -> Any:
    count, policy, concurrency = node.args
    items = [f"{node.at}[{number}]" for number in range(count)]
    options: dict[str, Any] = {"key": lambda item: item, "concurrency": concurrency, "cache": False}
    match policy:
        case "collect":
            options["on_error"] = "collect"
        case "enough":
            options["enough"] = 1
        case "max_failures":
            options["max_failures"] = 1

    async def work(label: str) -> str:
        if label.endswith("[1]"):
            return await body.steps.fail(label)
        return await body.steps.slow(label)

    return await body.ctx.map("map", work, items, **options)


@construct("ctx_race", inside=(2, 3), args=lambda rng: (rng.choice((None, None, 1, 2)),), weight=2)
async def ctx_race(body: Body, node: Node) -> Any:
    return await body.ctx.race(node.at, *body.branches(node), wins=node.args[0])


@construct("child", inside=(1, 2), weight=2)
async def child(body: Body, node: Node) -> Any:
    return await body.ctx.child(body.process.child, node.at, key=node.at)


@construct("start_child", inside=(1, 1), args=lambda rng: (rng.choice(("await", "cancel", "leave", "detached")),))
async def start_child(body: Body, node: Node) -> Any:
    how = node.args[0]
    handle = body.ctx.start_child(body.process.child, node.at, key=node.at, detached=how == "detached")
    await body.step(body.steps.slow, f"{node.at} beside")
    if how == "cancel":
        handle.cancel()
    return await handle if how in {"await", "cancel"} else how


@construct("emit_much")
async def emit_much(body: Body, node: Node) -> None:
    """Emit so many items that the store has to catch up."""
    await _emit_in_branches(body, node, 1500)


@construct("emit")
async def emit(body: Body, node: Node) -> None:
    await _emit_in_branches(body, node, 3)


async def _emit_in_branches(body: Body, node: Node, count: int) -> None:

    async def branch(name: int) -> None:
        for number in range(count):
            await body.ctx.emit("shown", number)
            if number % (count // 3) == 0:
                body.note(node.at, "emitted", name, number)

    await asyncio.gather(branch(0), branch(1))


@construct("emitting_step")
async def emitting_step(body: Body, node: Node) -> Any:
    return await body.step(body.steps.emitting, node.at)


@construct("progress")
async def progress(body: Body, node: Node) -> Any:
    body.ctx.set_progress({"at": node.at})


@construct("patched")
async def patched(body: Body, node: Node) -> Any:
    is_new = await body.ctx.patched(node.at)
    return await body.step(body.steps.quick, f"{node.at} {is_new}")


@construct("values")
async def values(body: Body, node: Node) -> Any:
    """Note the values that a replay has to repeat."""
    return [body.ctx.now().isoformat(), str(body.ctx.uuid4()), body.ctx.random(), str(body.ctx.uuid4(key=node.at))]


@construct("scope", inside=(1, 2))
async def scope(body: Body, node: Node) -> Any:
    scoped = body.scoped(node.at)
    return [await scoped.run(each) for each in node.inside]


@construct("key_again")
async def key_again(body: Body, node: Node) -> Any:
    """Cancel a call, and use its key again."""
    call = asyncio.create_task(body.step(body.steps.unwind, node.at))
    await body.step(body.steps.slow, f"{node.at} before")
    call.cancel()
    await asyncio.wait([call])
    body.note(node.at, "first", call.cancelled())
    return await body.step(body.steps.quick, node.at) if call.cancelled() else call.result()


@construct("cancels_itself")
async def cancels_itself(body: Body, node: Node) -> Any:
    async def branch() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await body.step(body.steps.slow, node.at)
        except asyncio.CancelledError:
            body.note(node.at, "itself")
            raise

    task = asyncio.create_task(branch())
    await asyncio.wait([task])
    return task.cancelled()


@construct("cleanup", inside=(1, 1))
async def cleanup(body: Body, node: Node) -> Any:
    """Call a step when the block is left, however that happens."""
    try:
        return await body.run(node.inside[0])
    finally:
        await body.step(body.steps.quick, f"{node.at} finally")
        body.note(node.at, "cleaned up")


@construct("handled", inside=(1, 1))
async def handled(body: Body, node: Node) -> Any:
    try:
        return await body.run(node.inside[0])
    except (*EXPECTED, ExceptionGroup) as error:
        await body.step(body.steps.quick, f"{node.at} handled")
        return shown(error)


__all__ = ["Boom"]
