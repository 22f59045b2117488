"""Bodies whose branches depend on each other's timing, for the concurrency proof.

Their keys say in which order things happened, so that a replay which sees another order asks for other keys.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from perdure import Context, Workflow

Body = Callable[["World", Context[Any]], Awaitable[Any]]


class World:
    """Step functions with random durations, and what the body saw, in the order in which it saw it."""

    def __init__(self, seed: int, on_seen: Callable[[str, Any], None] | None = None, pace: float = 1) -> None:
        self.rng = random.Random(seed)
        self.on_seen = on_seen
        self.pace = pace
        self.ran: Counter[str] = Counter()
        self.seen: list[tuple[str, Any]] = []
        self.values: list[Any] = []

    async def work(self, label: str) -> str:
        self.ran[label] += 1
        await asyncio.sleep(self.pace * self.rng.choice([0, 0.001, self.rng.random() * 0.01]))
        return f"<{label}>"

    async def hang(self, label: str) -> None:
        """Run until it is cancelled, which takes a while to get through."""
        self.ran[label] += 1
        depth, clean_up = self.rng.randrange(4), self.rng.choice([0, 0.003])
        inner: Awaitable[Any] = asyncio.sleep(3600)
        for _ in range(depth):
            inner = asyncio.gather(inner)
        try:
            await inner
        finally:
            await asyncio.sleep(self.pace * clean_up)

    async def step(self, ctx: Context[Any], key: str) -> str:
        """A step whose key is also its argument."""
        value: str = await self.saw(key, ctx.step("work", self.work, key, key=key))
        return value

    async def saw(self, key: str, awaitable: Awaitable[Any]) -> Any:
        """What the awaitable gives, noted."""
        value = await awaitable
        self.seen.append((key, value))
        if self.on_seen is not None:
            self.on_seen(key, value)
        return value


async def chains(world: World, ctx: Context[Any]) -> Any:
    """Ten chains of three steps; each result goes into the next step's arguments."""

    async def chain(number: int) -> str:
        value = ""
        for n in range(3):
            key = f"{number}:{n}"
            value = await world.saw(key, ctx.step("work", world.work, f"{value}{key}", key=key))
        return value

    return await asyncio.gather(*(chain(number) for number in range(10)))


async def as_completed(world: World, ctx: Context[Any]) -> Any:
    """Keys say in which order results came."""
    seen: list[str] = []
    for done in asyncio.as_completed([world.step(ctx, f"first{n}") for n in range(6)]):
        value = await done
        seen.append(await world.step(ctx, f"{len(seen)}-after-{value}"))
    return seen


async def first_completed(world: World, ctx: Context[Any]) -> Any:
    """The next step depends on which of the pending ones was first."""
    pending = {asyncio.ensure_future(world.step(ctx, f"p{n}")) for n in range(6)}
    order: list[Any] = []
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        names = sorted(task.result() for task in done)
        order.append(await world.step(ctx, f"{len(order)}:{'+'.join(names)}:{len(pending)}"))
    return order


async def queue(world: World, ctx: Context[Any]) -> Any:
    """Producers and consumers: who takes what depends on timing, and so do the keys."""
    line: asyncio.Queue[str | None] = asyncio.Queue(maxsize=2)
    log: list[str] = []

    async def produce(name: str) -> None:
        for n in range(3):
            await line.put(await world.step(ctx, f"{name}{n}"))

    async def consume(name: str) -> None:
        while (item := await line.get()) is not None:
            key = f"{name}@{len(log)}:{item}"
            log.append(key)
            log.append(await world.step(ctx, key))

    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(consume(f"c{n}")) for n in range(2)]
        async with asyncio.TaskGroup() as producers:
            for name in "abc":
                producers.create_task(produce(name))
        for _ in consumers:
            await line.put(None)
    return log


async def lock(world: World, ctx: Context[Any]) -> Any:
    """A shared log behind a lock: the order in which branches get it is part of the keys."""
    mutex = asyncio.Lock()
    log: list[str] = []

    async def branch(name: str) -> None:
        await world.step(ctx, f"{name}-before")
        async with mutex:
            key = f"{name}#{len(log)}"
            log.append(key)
            await world.step(ctx, key)

    await asyncio.gather(*(branch(f"b{n}") for n in range(6)))
    return log


async def nested(world: World, ctx: Context[Any]) -> Any:
    """gather in gather in shield, to different depths: an end travels through callbacks before a branch hears of it."""
    log: list[str] = []

    async def group(name: str, depth: int) -> None:
        inner: Awaitable[Any] = asyncio.gather(world.step(ctx, f"{name}x"), world.step(ctx, f"{name}y"))
        for _ in range(depth):
            inner = asyncio.shield(asyncio.gather(inner))
        await inner
        key = f"{name}@{len(log)}"
        log.append(key)
        await world.step(ctx, key)

    await asyncio.gather(*(group(name, depth) for name, depth in zip("abcde", (2, 0, 1, 0, 2), strict=True)))
    return log


async def mixed_waits(world: World, ctx: Context[Any]) -> Any:
    """Sleeps, races, time limits and maps beside steps."""
    log: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await world.saw(f"nap-{name}", ctx.sleep(f"nap-{name}", seconds))
        log.append(await world.step(ctx, f"{name}@{len(log)}"))

    async def limited() -> None:
        try:
            async with ctx.timeout("limit", 0.004):
                await world.step(ctx, "limited")
                await ctx.sleep("long", 5)
        except TimeoutError:
            log.append(f"late@{len(log)}")

    mapped = ctx.map("mapped", world.work, [f"m{n}" for n in range(5)], concurrency=2)
    raced = ctx.race(sleeper("r1", 0.003), sleeper("r2", 0.005))
    results = await asyncio.gather(sleeper("s1", 0.002), sleeper("s2", 7), limited(), mapped, raced)
    return log, results


async def as_completed_at_a_lock(world: World, ctx: Context[Any]) -> Any:
    """The order in which coroutines are started says which of them gets the lock."""
    mutex = asyncio.Lock()
    log: list[str] = []

    async def branch(name: str) -> None:
        async with mutex:
            key = f"{name}#{len(log)}"
            log.append(key)
            await world.step(ctx, key)

    # Their addresses are in another order each time.
    branches = {name: branch(name) for name in random.Random().sample("abcdef", 6)}
    for done in asyncio.as_completed([branches[name] for name in "abcdef"]):
        await done
    return log


async def failing_group(world: World, ctx: Context[Any]) -> Any:
    """A child fails, and the others are cancelled at a lock or in a step, and undo something while the group waits for them."""
    mutex = asyncio.Lock()
    log: list[str] = []

    async def child(name: str) -> None:
        await world.step(ctx, name)
        try:
            async with mutex:
                await ctx.step("hang", world.hang, f"{name}-hang", key=f"{name}-hang")
        except asyncio.CancelledError:
            key = f"{name}-undo@{len(log)}"
            log.append(key)
            await world.step(ctx, key)
            raise

    async def failing() -> None:
        await world.step(ctx, "nearly")
        await world.step(ctx, "failed")
        raise ValueError

    try:
        async with asyncio.TaskGroup() as group:
            for name in "abcdef":
                group.create_task(child(name))
            group.create_task(failing())
    except* ValueError:
        log.append("failed")
    return log


async def cancelled_steps(world: World, ctx: Context[Any]) -> Any:
    """BodyTasks are cancelled while their steps run, or in a time limit, each of which takes another while to unwind."""
    log: list[str] = []

    async def undo(name: str) -> None:
        key = f"{name}-undo@{len(log)}"
        log.append(key)
        await world.step(ctx, key)

    async def cancelled(name: str) -> None:
        try:
            await ctx.step("hang", world.hang, name, key=name)
        except asyncio.CancelledError:
            await undo(name)
            raise

    async def limited(name: str) -> None:
        try:
            async with ctx.timeout(f"{name}-limit", 0.004):
                await cancelled(name)
        except TimeoutError:
            await undo(f"{name}-late")

    tasks = [asyncio.ensure_future(cancelled(name)) for name in "abc"]
    limits = [asyncio.ensure_future(limited(name)) for name in "de"]
    for n in range(3):
        await world.step(ctx, f"main{n}")
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait([*tasks, *limits])
    return log


BODIES = [
    chains,
    as_completed,
    first_completed,
    queue,
    lock,
    nested,
    mixed_waits,
    as_completed_at_a_lock,
    failing_group,
    cancelled_steps,
]


def flow_of(body: Body, world: World) -> Workflow[[], Any]:
    """The body as a workflow that notes each value it arrives at."""

    async def flow(ctx: Context[Any]) -> Any:
        world.seen = []
        value = await body(world, ctx)
        # A step's result may go to the store together with the end of the run. This one makes the body's steps go before.
        await ctx.step("seal", asyncio.sleep, 0)
        world.values.append(value)
        return value

    return Workflow("flow", flow)
