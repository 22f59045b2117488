"""Constructs that are aimed at rules which random programs hardly ever need. They are drawn at random too, but rarely.

Each is run alone by the tests as well, in many rounds, and says which rule it is for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from tests.fuzz.body import Body
from tests.fuzz.programs import Node, construct


@construct("one_at_a_time")
async def one_at_a_time(body: Body, node: Node) -> Any:
    """Give up a wait for a signal because of a result, and wait again.

    Aimed at: signals are taken one at a time, when nothing is undelivered. One that is taken while a result which gives up its
    wait is on its way would be lost.
    """
    for number in range(4):
        step = asyncio.create_task(body.step(body.steps.slow, f"{node.at} step {number}"))
        signals = [asyncio.create_task(_signal(body, f"{node.at} signal {number} {name}", name)) for name in "aab"]
        try:
            done, _ = await asyncio.wait([step, *signals], return_when=asyncio.FIRST_COMPLETED)
            body.note(node.at, "first", step in done, [signal in done for signal in signals])
        finally:
            for task in signals:
                task.cancel()
            await asyncio.gather(step, *signals, return_exceptions=True)


async def _signal(body: Body, key: str, name: str) -> Any:
    value = await body.ctx.wait_for_signal(name, key=key)
    body.note(key, "got", name, value)
    return value


@construct("cancelled_in_step", "own", weight=0)
async def cancelled_in_step(body: Body, node: Node) -> Any:
    """Await a thread, which takes longer on a replay, and then a step in which the run is cancelled.

    Aimed at: a cancellation carries how many calls the body had made. Without that a replay gives it to the body too early.
    """
    place = "in the thread"  # noted only once it is recorded that the run was cancelled there
    try:
        await asyncio.to_thread(time.sleep, 0.001 if body.showing.is_first else 0.1)
        place = "in the step"
        return await body.step(body.steps.cancelling(body.process.cancel_from_step), node.at)
    finally:
        body.note(node.at, place)


@construct("emit_beside_call", args=lambda rng: (rng.choice((1, 1100)),))
async def emit_beside_call(body: Body, node: Node) -> Any:
    """Emit while a call was made that has not started, and cancel the call.

    Aimed at: `ctx.emit` may return at once only if no call is unsettled. Otherwise the call is withdrawn, or has an end in the
    journal, depending on how fast the store is.
    """
    for number in range(2):
        call = asyncio.create_task(body.step(body.steps.unwind, f"{node.at} call {number}"))
        await asyncio.sleep(0)
        for item in range(node.args[0]):
            await body.ctx.emit("beside", item)
        body.note(node.at, "emitted", number)
        call.cancel()
        await asyncio.wait([call])
        body.note(node.at, "cancelled", call.cancelled())


@construct("patch_given_up")
async def patch_given_up(body: Body, node: Node) -> Any:
    """Give up a call of `ctx.patched` because of an end that was written just before the patch was recorded.

    Aimed at: whether a cancelled call waits for its end depends on what the body has done, and not on what is in the journal.
    All calls begin when the emitting has ended. The first step is cancelled by then, and the second one writes as it starts.
    """
    step, beside, patch = map(
        asyncio.create_task,
        (
            body.step(body.steps.unwind, f"{node.at} step"),
            body.step(body.steps.emitting, f"{node.at} beside"),
            body.ctx.patched(node.at),
        ),
    )
    for item in range(1500):
        await body.ctx.emit("beside", item)
    step.cancel()
    await asyncio.wait([step])
    patch.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    body.note(node.at, "given up at once", patch.done())
    return await asyncio.gather(beside, patch, return_exceptions=True)


@construct("short_scopes", "anyio")
async def short_scopes(body: Body, node: Node) -> Any:
    """Cut steps off by scopes of anyio, whose timers fire a little early on uvloop and are armed again.

    Aimed at: a durable timer that its own callback arms again is durable, and its record is never before its instant.
    """
    import anyio

    for number in range(5):
        with anyio.move_on_after(0.0003 + 0.00037 * number) as limit:
            await body.step(body.steps.hang, f"{node.at} {number}")
        body.note(node.at, number, limit.cancelled_caught)


@construct("spinning")
async def spinning(body: Body, node: Node) -> Any:
    """Look at a step in every turn of the loop.

    Aimed at: a body that does not rest counts as resting after a while.
    """
    call = asyncio.create_task(body.step(body.steps.slow, node.at))
    while not call.done():  # noqa: ASYNC110 - that is the point
        await asyncio.sleep(0)
    return call.result()


# The I/O takes longer than the limit after it, and both take far longer than a step that returns at once.
_OWN_IO: Final = 0.6
_LIMIT: Final = 0.5


@construct("limit_after_io", "own", weight=0)
async def limit_after_io(body: Body, node: Node) -> Any:
    """Begin a time limit after I/O that took longer than it.

    Aimed at: `loop.time()` is that of the last entry, so a timer fires later by what own waits took since then.
    """
    await body.step(body.steps.quick, f"{node.at} before")
    await asyncio.to_thread(time.sleep, _OWN_IO)
    try:
        async with asyncio.timeout(_LIMIT):
            await body.step(body.steps.quick, node.at)
            return "in time"
    except TimeoutError:
        body.wrong("a time limit passed at once, since I/O before it took long")


@construct("child_given_up", inside=(1, 1), weight=0)
async def child_given_up(body: Body, node: Node) -> Any:
    """Give up a child while steps of other branches end.

    Aimed at: the process may die while the cancellation of a child is under way; then it is asked for again.
    """

    async def others() -> None:
        for number in range(4):
            await body.step(body.steps.slow, f"{node.at} other {number}")

    async def child() -> None:
        await body.ctx.child(body.process.child, node.at, key=node.at)

    beside = asyncio.create_task(others())
    given_up = asyncio.create_task(child())
    await body.step(body.steps.slow, f"{node.at} before")
    given_up.cancel()
    await asyncio.wait([given_up])
    body.note(node.at, "given up", given_up.cancelled())
    await beside
