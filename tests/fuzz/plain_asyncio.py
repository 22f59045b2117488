"""Constructs of asyncio: they work in a body as always, and a replay goes the same way through them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final

from tests.fuzz.body import EXPECTED, Body, is_being_cancelled, shown
from tests.fuzz.programs import Node, construct

SHALLOW: Final = 3
_LIMITS: Final = (0.001, 0.004, 0.02)


def _limit(rng: random.Random) -> tuple[float]:
    return (rng.choice(_LIMITS),)


@construct("seq", inside=(2, 3))
async def seq(body: Body, node: Node) -> Any:
    return [await body.run(each) for each in node.inside]


@construct("gather", inside=(2, 4), weight=2)
async def gather(body: Body, node: Node) -> Any:
    return await asyncio.gather(*body.branches(node), return_exceptions=True)


@construct("gather_raising", inside=(2, 3))
async def gather_raising(body: Body, node: Node) -> Any:
    """Let the first error through, and cancel what goes on."""
    tasks = body.tasks(node)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@construct("group", inside=(2, 4), weight=2)
async def group(body: Body, node: Node) -> Any:
    try:
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(branch) for branch in body.branches(node)]
    except* EXPECTED as errors:
        body.note(node.at, "errors", errors)
    return [shown(each.exception() or each.result()) for each in made if not each.cancelled()]


@construct("as_completed", inside=(2, 4))
async def as_completed(body: Body, node: Node) -> Any:
    values = []
    for done in asyncio.as_completed(body.tasks(node)):
        try:
            values.append(shown(await done))
        except EXPECTED as error:
            values.append(shown(error))
        body.note(node.at, "completed", values[-1])
    return values


@construct("wait_first", inside=(2, 4), weight=2)
async def wait_first(body: Body, node: Node) -> Any:
    """Cancel the others when one is done."""
    tasks = body.tasks(node)
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        body.note(node.at, "first", [tasks.index(task) for task in done])
        for task in pending:
            task.cancel()
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


@construct("wait_all", inside=(2, 3))
async def wait_all(body: Body, node: Node) -> Any:
    done, _ = await asyncio.wait(body.tasks(node))
    return [shown(task.exception()) for task in done if not task.cancelled()]


@construct("create_task", inside=(1, 2))
async def create_task(body: Body, node: Node) -> Any:
    """Await a task after something else; cancel it when that fails."""
    tasks = body.tasks(node)
    await body.step(body.steps.slow, f"{node.at} before")
    return await asyncio.gather(*tasks, return_exceptions=True)


@construct("cancel", inside=(1, 3))
async def cancel(body: Body, node: Node) -> Any:
    """Cancel branches, the last one first."""
    tasks = body.tasks(node)
    await body.step(body.steps.slow, f"{node.at} before")
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    return [task.cancelled() for task in tasks]


@construct("shield", inside=(1, 2))
async def shield(body: Body, node: Node) -> Any:
    """Cancel what waits for shielded tasks, and await those."""
    tasks = body.tasks(node)

    async def waiting() -> None:
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))

    waiter = asyncio.create_task(waiting())
    await body.step(body.steps.slow, f"{node.at} before")
    waiter.cancel()
    await asyncio.wait([waiter])
    body.note(node.at, "shielded", waiter.cancelled())
    return await asyncio.gather(*tasks, return_exceptions=True)


def _wrapped(awaitable: Awaitable[Any], depth: int, how: str) -> Awaitable[Any]:
    for level in range(depth):
        is_gather = how == "gather" or (how == "mixed" and level % 2)
        awaitable = asyncio.gather(awaitable) if is_gather else asyncio.shield(awaitable)
    return awaitable


async def _at_depths(body: Body, node: Node, depths: tuple[int, ...], how: str) -> None:
    async def branch(number: int, depth: int) -> None:
        fn = body.steps.slow if number else body.steps.quick
        await _wrapped(body.step(fn, f"{node.at}.{number}"), depth, how)
        body.note(node.at, "out of", depth)
        await body.step(body.steps.quick, f"{node.at}.{number}@{body.ask()}")

    await asyncio.gather(*(branch(number, depth) for number, depth in enumerate(depths)))


@construct("deep", args=lambda rng: (rng.choice(("gather", "shield", "mixed")), *(rng.randint(0, SHALLOW) for _ in range(3))))
async def deep(body: Body, node: Node) -> Any:
    """Wait for steps through several levels of gather and shield."""
    await _at_depths(body, node, node.args[1:], node.args[0])


def _very_deep_arguments(rng: random.Random) -> tuple[str, int, int, int]:
    return rng.choice(("gather", "shield", "mixed")), rng.randint(5, 30), rng.randint(0, 30), SHALLOW


@construct("very_deep", args=_very_deep_arguments)
async def very_deep(body: Body, node: Node) -> Any:
    await _at_depths(body, node, node.args[1:], node.args[0])


@construct("lock", inside=(2, 4))
async def lock(body: Body, node: Node) -> Any:
    held = asyncio.Lock()

    async def branch(each: Node) -> Any:
        async with held:
            return await body.run(each)

    return await asyncio.gather(*map(branch, node.inside), return_exceptions=True)


@construct("semaphore", inside=(3, 4))
async def semaphore(body: Body, node: Node) -> Any:
    places = asyncio.Semaphore(2)

    async def branch(each: Node) -> Any:
        async with places:
            body.note(node.at, "has a place", each.at)
            return await body.run(each)

    return await asyncio.gather(*map(branch, node.inside), return_exceptions=True)


@construct("queue", inside=(2, 4))
async def queue(body: Body, node: Node) -> Any:
    """Let branches put what they give into a queue that holds one."""
    line: asyncio.Queue[str] = asyncio.Queue(1)

    async def produce(each: Node) -> None:
        try:
            value = await body.run(each)
        except (*EXPECTED, ExceptionGroup) as error:
            value = error
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            value = "cancelled elsewhere"
        await line.put(shown(value))

    tasks = {asyncio.create_task(produce(each)) for each in node.inside}
    try:
        got = [await line.get() for _ in tasks]
        body.note(node.at, "queue", got)
    finally:
        for task in tasks:
            task.cancel()
        while tasks:  # a task group inside may have swallowed the cancellation: then its branch still wants to put something
            while not line.empty():
                line.get_nowait()
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


@construct("event", inside=(2, 3))
async def event(body: Body, node: Node) -> Any:
    """Let the other branches wait for the end of the first."""
    over = asyncio.Event()

    async def branch(each: Node) -> Any:
        await over.wait()
        return await body.run(each)

    tasks = [asyncio.create_task(branch(each)) for each in node.inside[1:]]
    try:
        return await body.run(node.inside[0])
    finally:
        over.set()
        await asyncio.gather(*tasks, return_exceptions=True)


@construct("condition", inside=(2, 3))
async def condition(body: Body, node: Node) -> Any:
    """Wait until two branches have ended, however they do."""
    ended, changed = 0, asyncio.Condition()

    async def branch(each: Node) -> None:
        nonlocal ended
        try:
            await body.run(each)
        except (*EXPECTED, ExceptionGroup):
            pass
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
        async with changed:
            ended += 1
            changed.notify_all()

    tasks = [asyncio.create_task(branch(each)) for each in node.inside]
    try:
        async with changed:
            await changed.wait_for(lambda: ended >= 2)
        body.note(node.at, "ended", ended)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@construct("generator", inside=(2, 3))
async def generator(body: Body, node: Node) -> Any:
    """Leave an async generator after its first value, and close it."""

    async def values() -> AsyncIterator[Any]:
        try:
            for each in node.inside:
                yield await body.run(each)
        finally:
            body.note(node.at, "closed")

    found = values()
    try:
        async for value in found:
            return value
        return None
    finally:
        await found.aclose()  # type: ignore[attr-defined]  # it is a generator


@construct("dropped_generator", inside=(2, 3))
async def dropped_generator(body: Body, node: Node) -> Any:
    """Leave an async generator after its first value, and let asyncio close it."""

    async def values() -> AsyncIterator[Any]:
        try:
            for each in node.inside:
                yield await body.run(each)
        finally:
            body.note(node.at, "closing")
            await asyncio.sleep(0)
            body.note(node.at, "closed")

    async for value in values():
        return value
    return None


@construct("turns", args=lambda rng: (rng.randint(1, 5),))
async def turns(body: Body, node: Node) -> Any:
    for _ in range(node.args[0]):
        await asyncio.sleep(0)


@construct("race", inside=(2, 3))
async def race(body: Body, node: Node) -> Any:
    """Race with two waits for a signal."""

    async def signal(number: int) -> Any:
        name = "abc"[number]
        value = await body.ctx.wait_for_signal(name, key=f"{node.at} signal {number}")
        body.note(node.at, "got", name, value)
        return value

    tasks = [asyncio.create_task(signal(0)), *body.tasks(node), asyncio.create_task(signal(1))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        body.note(node.at, "first", [tasks.index(task) for task in done])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@construct("asyncio_timeout", args=_limit, inside=(1, 1), weight=2)
async def asyncio_timeout(body: Body, node: Node) -> Any:
    try:
        async with asyncio.timeout(node.args[0]):
            return await body.run(node.inside[0])
    except TimeoutError:
        return "late"


@construct("moved_timeout", inside=(2, 2))
async def moved_timeout(body: Body, node: Node) -> Any:
    """Put a time limit off while it runs."""
    try:
        async with asyncio.timeout(0.02) as outer:
            try:
                async with asyncio.timeout(0.003):
                    return await body.run(node.inside[0])
            except TimeoutError:
                if not outer.expired():
                    outer.reschedule(asyncio.get_running_loop().time() + 0.004)
                return await body.run(node.inside[1])
    except TimeoutError:
        return "late"


@construct("wait_for", args=_limit, inside=(1, 1), weight=2)
async def wait_for(body: Body, node: Node) -> Any:
    try:
        return await asyncio.wait_for(body.run(node.inside[0]), node.args[0])
    except TimeoutError:
        return "late"


@construct("wait_timeout", args=_limit, inside=(1, 3))
async def wait_timeout(body: Body, node: Node) -> Any:
    tasks = body.tasks(node)
    done, pending = await asyncio.wait(tasks, timeout=node.args[0])
    body.note(node.at, "in time", [tasks.index(task) for task in done])
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@construct("asyncio_sleep", args=lambda rng: (rng.choice((0.001, 0.003, 0.01)),), weight=2)
async def asyncio_sleep(body: Body, node: Node) -> Any:
    await asyncio.sleep(node.args[0])


@construct("key_in_limits")
async def key_in_limits(body: Body, node: Node) -> Any:
    """Use a key again that a time limit has cancelled."""
    for number in range(3):
        try:
            async with asyncio.timeout(0.002):
                return await body.step(body.steps.unwind, node.at)
        except TimeoutError:
            body.note(node.at, "again", number)
    return None


@construct("eager", "3.12", inside=(2, 3))
async def eager(body: Body, node: Node) -> Any:
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {"eager_start": True}
    tasks = [asyncio.Task(branch, loop=loop, **options) for branch in body.branches(node)]
    return await asyncio.gather(*tasks, return_exceptions=True)
