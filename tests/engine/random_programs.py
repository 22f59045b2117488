"""Random workflow bodies: trees of asyncio and ctx constructs, made from a seed alone.

Their branches share a lock, a queue and a log whose length is part of the keys, so a replay that goes another way asks for other
keys. A program is data, so it can be changed between two drives as a deploy changes code, and cut down when it fails.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

from perdure import Context, Retry, StepFailed, Workflow

LEAVES: Final = ("step", "step", "log", "lock", "queue", "retry", "once", "fails", "sleep", "signal", "patched")
BRANCHING: Final = (
    "gather",
    "group",
    "failing group",
    "race",
    "map",
    "limit",
    "long wait_for",
    "cancel",
    "cancel and use again",
    "as_completed",
    "wait",
    "shield",
)
# What these do depends on time that no journal has: a replay may go another way.
BY_THE_CLOCK: Final = ("wall limit", "wait_for")
# These cancel steps by something that the journal does not have, after which results are not owed.
CANCELLING: Final = frozenset({"failing group", "cancel", "cancel and use again", "wall limit", "wait_for"})
PAUSES: Final = (0.003, 0.02, 7.0)
TRIED_AGAIN: Final = (
    Retry(attempts=3, wait_initial=0.004, wait_jitter=0),
    Retry(attempts=3, wait_initial=5, wait_jitter=0),
)


class Boom(Exception):
    """What failing steps raise."""


@dataclass(frozen=True)
class Node:
    """One construct. `at` names it and its effects, `key` its steps: they differ after a rename."""

    kind: str
    at: str
    chance: float
    branches: tuple[tuple[Node, ...], ...] = ()
    renamed: str = ""

    @property
    def key(self) -> str:
        return self.at + self.renamed

    def kinds(self) -> set[str]:
        """Its own kind, and those of all inside it."""
        return {self.kind}.union(*(node.kinds() for branch in self.branches for node in branch))

    def __str__(self) -> str:
        inside = ", ".join("[" + " ".join(map(str, branch)) + "]" for branch in self.branches)
        return f"{self.kind!r}{self.key}({self.chance:.2f}{' ' if inside else ''}{inside})"


Program = tuple[Node, ...]


def random_program(rng: random.Random, kinds: tuple[str, ...], depth: int = 2, path: str = "") -> Program:
    """A program of these kinds."""
    leaves = tuple(kind for kind in kinds if kind in LEAVES or kind == "io")
    nodes: list[Node] = []
    for number in range(rng.randint(1, 3)):
        kind, at = rng.choice(kinds if depth else leaves), f"{path}.{number}"
        is_leaf = kind in LEAVES or kind == "io"
        letters = "" if is_leaf else "abc"[: rng.randint(2, 3)]
        branches = tuple(random_program(rng, kinds, depth - 1, f"{at}{letter}") for letter in letters)
        nodes.append(Node(kind, at, rng.random(), branches))
    return tuple(nodes)


def is_by_the_clock(program: Program) -> bool:
    """Whether a replay may go another way, or see results in another order."""
    return any(node.kinds() & {*BY_THE_CLOCK, "io"} for node in program)


def all_nodes(program: Program) -> list[Node]:
    """Every node, outer ones first."""
    return [each for node in program for each in (node, *(one for branch in node.branches for one in all_nodes(branch)))]


def rewrite(program: Program, change: Callable[[Program], Program]) -> Program:
    """The program with `change` applied to every sequence of nodes in it."""
    changed = change(program)
    return tuple(replace(node, branches=tuple(rewrite(branch, change) for branch in node.branches)) for node in changed)


def mutate(program: Program, rng: random.Random) -> Program:
    """The program as after a deploy: one leaf renamed, removed, swapped with its neighbour, or a step put before it."""
    leaves = [node.at for node in all_nodes(program) if not node.branches]
    if not leaves:
        return program
    target, how = rng.choice(leaves), rng.choice(["rename", "insert", "remove", "swap"])

    def change(nodes: Program) -> Program:
        at = next((index for index, node in enumerate(nodes) if node.at == target), None)
        if at is None:
            return nodes
        before, node, after = nodes[:at], nodes[at], nodes[at + 1 :]
        match how:
            case "rename":
                return (*before, replace(node, renamed="'"), *after)
            case "insert":
                return (*before, Node("step", f"{target}+", 0.5), node, *after)
            case "remove":
                return (*before, *after)
            case _:
                return (*before, *after[:1], node, *after[1:])

    return rewrite(program, change)


@dataclass
class Shared:
    """What the branches of one drive of a body share."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queue: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    log: list[str] = field(default_factory=list)

    def note(self, what: str) -> int:
        self.log.append(what)
        return len(self.log) - 1


class World:
    """Everything outside the run: step functions with random durations, what they did, and what the body saw of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # How often the function of each effect was called.
        self.tried: Counter[str] = Counter()
        # The results that the body saw in this drive, in order, and the most that it saw in an earlier one.
        self.seen: list[tuple[str, Any]] = []
        self.expected: list[tuple[str, Any]] = []
        self.is_order_checked = self.are_effects_checked = True
        # The steps whose results it ever saw.
        self.delivered: set[str] = set()
        # Keys that were recorded when this drive began, and the effects of these.
        self.recorded: set[str] = set()
        self.key_of: dict[str, str] = {}
        self.wrong: list[str] = []

    def begin_drive(self) -> None:
        """The body runs from the top."""
        self.expected = max(self.expected, self.seen, key=len)
        self.seen = []

    def _see(self, key: str, value: Any) -> None:
        self.seen.append((key, value))
        self.delivered.add(key)
        position = len(self.seen) - 1
        if self.is_order_checked and position < len(self.expected) and self.expected[position] != (key, value):
            self.wrong.append(f"the body saw {(key, value)} and before the kill {self.expected[position]}, as result {position}")

    def _happens(self, effect: str, key: str) -> None:
        self.tried[effect] += 1
        if key in self.recorded or key in self.delivered:
            self.wrong.append(f"step {key!r} ran again after its result was recorded")
        earlier = self.key_of.get(effect)
        if (
            self.are_effects_checked
            and earlier is not None
            and earlier != key
            and (earlier in self.recorded or earlier in self.delivered)
        ):
            self.wrong.append(f"the effect {effect!r} of step {earlier!r}, which is recorded, happened again as {key!r}")
        self.key_of[effect] = key

    def _pause(self) -> float:
        return self.rng.choice([0, 0, 0.001, self.rng.random() * 0.01])

    async def work(self, effect: str, key: str) -> str:
        self._happens(effect, key)
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        await asyncio.sleep(self._pause())
        return f"<{effect}>"

    async def fail(self, effect: str, key: str) -> str:
        await self.work(effect, key)
        raise Boom(effect)

    async def fail_at_first(self, effect: str, key: str) -> str:
        value = await self.work(effect, key)
        if self.tried[effect] < 3:
            raise Boom(effect)
        return value

    async def hang(self, effect: str, key: str) -> str:
        """Run until it is cancelled, which takes a while to get through, and now and then is swallowed."""
        self._happens(effect, key)
        inner: Awaitable[Any] = asyncio.sleep(3600)
        for _ in range(self.rng.randrange(4)):
            inner = asyncio.gather(inner)
        try:
            await inner
        except asyncio.CancelledError:
            if self.rng.random() < 0.1:
                return f"<{effect} swallowed>"
            raise
        finally:
            await asyncio.sleep(self.rng.choice([0, 0, 0.003]))
        return "never"

    async def saw(self, key: str, awaitable: Awaitable[Any], *errors: type[Exception]) -> Any:
        """What the awaitable gives or raises, noted."""
        try:
            value = await awaitable
        except errors as error:
            value = type(error).__name__
        self._see(key, value)
        return value


class Body:
    """One drive of a program."""

    def __init__(self, world: World, ctx: Context[Any]) -> None:
        self.world = world
        self.ctx = ctx
        self.shared = Shared()

    async def run(self, program: Program) -> None:
        """The nodes one after the other; cancelled, some of them undo something first."""
        for node in program:
            try:
                await _CONSTRUCTS[node.kind](self, node)
            except asyncio.CancelledError:
                number = self.shared.note(node.at)
                if node.chance < 0.5:
                    await self.step(f"undo{node.at}", f"undo{node.key}@{number}")
                raise

    async def step(self, effect: str, key: str, fn: Callable[[str, str], Any] | None = None, **options: Any) -> Any:
        fn = fn or self.world.work
        return await self.world.saw(key, self.ctx.step("work", fn, effect, key, key=key, **options), Boom, StepFailed)

    async def hang(self, node: Node) -> None:
        await self.step(f"h{node.at}", f"h{node.key}", self.world.hang)

    def inside(self, node: Node) -> list[Coroutine[Any, Any, None]]:
        """The branches of a node, and for some nodes one that never ends."""
        hanging = [self.hang(node)] if node.chance < 0.4 and node.kind in _ENDS_HANGING else []
        return [self.run(branch) for branch in node.branches] + hanging

    async def ordered_step(self, node: Node) -> None:
        number = self.shared.note(node.at)
        await self.step(f"l{node.at}", f"l{node.key}@{number}")

    async def locked_step(self, node: Node) -> None:
        async with self.shared.lock:
            number = self.shared.note(node.at)
            await self.step(f"k{node.at}", f"k{node.key}@{number}")

    async def queued_step(self, node: Node) -> None:
        self.shared.queue.put_nowait(node.key)
        await self.step(f"q{node.at}", f"q{node.key}")
        got = await self.shared.queue.get()
        await self.step(f"g{node.at}", f"g{node.key}:{got}")

    async def sleep(self, node: Node) -> None:
        key = f"nap{node.key}"
        await self.world.saw(key, self.ctx.sleep(key, PAUSES[int(node.chance * 3)]))

    async def signal(self, node: Node) -> None:
        key = f"signal{node.key}"
        name = "abc"[int(node.chance * 3)]
        await self.world.saw(
            key, self.ctx.wait_for_signal(name, key=key, timeout=PAUSES[int(node.chance * 9) % 3], default="late")
        )

    async def patched(self, node: Node) -> None:
        is_new = await self.world.saw(f"patched{node.key}", self.ctx.patched(node.key))
        await self.step(f"p{node.at}", f"p{node.key}:{is_new}")

    async def own_io(self, node: Node) -> None:
        await asyncio.sleep(node.chance * 0.05)
        await self.step(f"i{node.at}", f"i{node.key}")

    async def gather(self, node: Node) -> None:
        await asyncio.gather(*self.inside(node))

    async def group(self, node: Node) -> None:
        async with asyncio.TaskGroup() as group:
            for branch in self.inside(node):
                group.create_task(branch)

    async def failing_group(self, node: Node) -> None:
        async def failing() -> None:
            await self.step(f"f{node.at}", f"f{node.key}")
            raise Boom

        try:
            async with asyncio.TaskGroup() as group:
                for branch in self.inside(node):
                    group.create_task(branch)
                group.create_task(failing())
        except* Boom:
            self.shared.note(node.at)

    async def race(self, node: Node) -> None:
        await self.ctx.race(f"race{node.key}", *self.inside(node))

    async def map(self, node: Node) -> None:
        async def work(item: str) -> str:
            return await self.world.work(f"m{node.at}:{item}", f"m{node.key}:{item}")

        items = [str(number) for number in range(2 + int(node.chance * 3))]
        mapped = self.ctx.map("map", work, items, key=lambda item: f"m{node.key}:{item}", concurrency=2)
        await asyncio.gather(mapped, *self.inside(node))

    async def limit(self, node: Node) -> None:
        try:
            async with self.ctx.timeout(f"limit{node.key}", 0.001 + node.chance * 0.02):
                await asyncio.gather(*self.inside(node))
        except TimeoutError:
            await self.step(f"late{node.at}", f"late{node.key}@{self.shared.note(node.at)}")

    async def wall_limit(self, node: Node) -> None:
        try:
            async with asyncio.timeout(0.001 + node.chance * 0.02):
                await asyncio.gather(*self.inside(node))
        except TimeoutError:
            await self.step(f"late{node.at}", f"late{node.key}@{self.shared.note(node.at)}")

    async def wait_for(self, node: Node) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(*self.inside(node)), 0.001 + node.chance * 0.02)
        except TimeoutError:
            await self.step(f"late{node.at}", f"late{node.key}@{self.shared.note(node.at)}")

    async def long_wait_for(self, node: Node) -> None:
        await asyncio.wait_for(asyncio.gather(*self.inside(node)), 1_000_000)

    async def cancel(self, node: Node) -> None:
        tasks = [asyncio.ensure_future(branch) for branch in self.inside(node)]
        await self.step(f"c{node.at}", f"c{node.key}")
        for task in tasks if node.chance < 0.2 else reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)

    async def cancel_and_use_again(self, node: Node) -> None:
        """Keys of a cancelled call are used again, by a step and by a sleep."""
        keys = [f"again{node.key}", f"nap again{node.key}"]

        async def calls() -> None:
            await self.step(f"again{node.at}", keys[0], self.world.hang if node.chance < 0.5 else None)
            await self.world.saw(keys[1], self.ctx.sleep(keys[1], PAUSES[1]))

        task = asyncio.ensure_future(calls())
        others = [asyncio.ensure_future(branch) for branch in self.inside(node)]
        await self.step(f"c{node.at}", f"c{node.key}")
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            had = {key for key, _ in self.world.seen}
            if keys[0] not in had:
                await self.step(f"again{node.at}", keys[0])
            if keys[1] not in had:
                await self.world.saw(keys[1], self.ctx.sleep(keys[1], PAUSES[0]))
        await asyncio.gather(*others)

    async def as_completed(self, node: Node) -> None:
        for done in asyncio.as_completed(self.inside(node)):
            await done
            number = self.shared.note(node.at)
            await self.step(f"a{node.at}:{number}", f"a{node.key}@{number}")

    async def wait(self, node: Node) -> None:
        pending = {asyncio.ensure_future(branch) for branch in self.inside(node)}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self.step(f"w{node.at}:{len(pending)}", f"w{node.key}@{self.shared.note(node.at)}:{len(pending)}")

    async def shield(self, node: Node) -> None:
        await asyncio.shield(asyncio.gather(*self.inside(node)))


_ENDS_HANGING: Final = frozenset({"failing group", "race", "limit", "wall limit", "wait_for", "cancel"})
_CONSTRUCTS: Final[dict[str, Callable[[Body, Node], Awaitable[None]]]] = {
    "step": lambda body, node: body.step(f"s{node.at}", f"s{node.key}"),
    "retry": lambda body, node: body.step(
        f"r{node.at}", f"r{node.key}", body.world.fail_at_first, retry=TRIED_AGAIN[node.chance < 0.5]
    ),
    "once": lambda body, node: body.step(f"o{node.at}", f"o{node.key}", at_most_once=True),
    "fails": lambda body, node: body.step(f"e{node.at}", f"e{node.key}", body.world.fail),
    "log": Body.ordered_step,
    "lock": Body.locked_step,
    "queue": Body.queued_step,
    "sleep": Body.sleep,
    "signal": Body.signal,
    "patched": Body.patched,
    "io": Body.own_io,
    "gather": Body.gather,
    "group": Body.group,
    "failing group": Body.failing_group,
    "race": Body.race,
    "map": Body.map,
    "limit": Body.limit,
    "wall limit": Body.wall_limit,
    "wait_for": Body.wait_for,
    "long wait_for": Body.long_wait_for,
    "cancel": Body.cancel,
    "cancel and use again": Body.cancel_and_use_again,
    "as_completed": Body.as_completed,
    "wait": Body.wait,
    "shield": Body.shield,
}


def flow_of(program: Program, world: World) -> Workflow[[], Any]:
    """The program as a workflow."""

    async def flow(ctx: Context[Any]) -> None:
        world.begin_drive()
        body = Body(world, ctx)
        await body.run(program)
        await body.step("seal", "seal")

    return Workflow("flow", flow)
