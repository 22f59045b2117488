"""Programs as workflows: what their bodies do, and what their steps ask of the provider."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

from perdure import Context, Err, Retry, StepFailed, StepInfo, StepTimeout, Workflow, current_step, step
from perdure.errors import COMPENSATION_PREFIX, RunCancelled, RunConflict, RunDead
from tests.sagas.programs import Node, Version, all_nodes
from tests.sagas.provider import Event, Provider

# How long a step may take that never ends, in seconds.
PATIENCE: Final = 5.0
FOR_EVER: Final = 1e6

# What was paid for, and under which key: what the steps give, and the workflows too.
Receipts = list[list[str]]


class Declined(Exception):
    """What a step raises that has not charged."""


class NoAnswer(Exception):
    """What a compensation raises."""


class Process(Protocol):
    """The process in which a body runs."""

    @property
    def provider(self) -> Provider: ...
    @property
    def pace(self) -> float:
        """How long a second of the program takes."""
        ...

    @property
    def prefix(self) -> str:
        """How the names of the workflows begin."""
        ...

    def check(self) -> None:
        """Raise if this process has died, and does nothing any more."""
        ...

    async def dawdle(self, what: str) -> None:
        """Take some time."""
        ...

    def linger(self, seconds: float) -> None:
        """Let the plain function that is being called return so much later."""
        ...


_HANDLED: Final = (Declined, StepFailed, StepTimeout, RunCancelled, RunDead, RunConflict)


class Body:
    """One drive of a body."""

    def __init__(self, process: Process, version: Version, ctx: Context[Any], path: str) -> None:
        self.process = process
        self.version = version
        self.ctx = ctx
        # What names the things that are paid for here.
        self.path = path
        self.receipts: Receipts = []

    async def run(self, nodes: tuple[Node, ...]) -> None:
        """The nodes, one after the other."""
        for node in nodes:
            try:
                await _CONSTRUCTS[node.kind](self, node)
            except _HANDLED:
                if not node.caught:
                    raise

    def branches(self, node: Node) -> list[Any]:
        return [self.run(branch) for branch in node.branches]

    def thing(self, node: Node, item: int | None = None) -> str:
        return f"{self.path}{node.at}" if item is None else f"{self.path}{node.at}[{item}]"

    # Paying.

    async def pay(self, node: Node) -> None:
        ctx = self.ctx.scope(node.scope) if node.scope else self.ctx
        thing = self.thing(node)
        undo = self.undo_of(node, ctx, {node.key: thing})
        call = self.plain_call(node, thing) if node.plain else self.call(node, thing)
        self.take(await ctx.step(f"pay{node.at}", call, key=node.key, **self.options(node, undo)))

    async def map(self, node: Node) -> None:
        things = {f"{node.key}[{item}]": self.thing(node, item) for item in range(node.count)}
        undo = self.undo_of(node, self.ctx, things)

        async def each(item: int) -> Receipts:
            return await self.call(node, self.thing(node, item))()

        found = await self.ctx.map(node.key, each, range(node.count), concurrency=2, **self.options(node, undo))
        self.take([receipt for receipts in found for receipt in receipts])

    def take(self, receipts: Receipts) -> None:
        """What the steps have given: it is recorded."""
        self.receipts += receipts
        for thing, key in receipts:
            self.process.provider.note(Event(kind="got", thing=thing, run=self.ctx.run_id, key=key))

    def options(self, node: Node, undo: Callable[[Any], Any] | None) -> dict[str, Any]:
        options: dict[str, Any] = {"aliases": list(node.aliases)} if node.aliases else {}
        if node.tries > 1:
            options["retry"] = Retry(attempts=node.tries, wait_initial=0.5 * self.process.pace, wait_jitter=0)
        if node.hangs:
            options["timeout"] = PATIENCE * self.process.pace
        if node.once:
            options["at_most_once"] = True
        if undo is not None:
            options["compensate"] = undo
        return options

    def call(self, node: Node, thing: str) -> Callable[[], Awaitable[Receipts]]:
        async def charge() -> Receipts:
            before = self.begin(node, thing)
            await self.process.dawdle(f"before {thing} {before}")
            receipts = self.charge(node, thing, before)
            await self.process.dawdle(f"after {thing} {before}")
            if node.fails <= before < node.fails + node.hangs:
                await asyncio.sleep(FOR_EVER)
            return receipts

        return charge

    def plain_call(self, node: Node, thing: str) -> Callable[[], Receipts]:
        def charge() -> Receipts:
            before = self.begin(node, thing)
            receipts = self.charge(node, thing, before)
            if node.fails <= before < node.fails + node.hangs:
                self.process.linger(10 * PATIENCE)
            return receipts

        return charge

    def begin(self, node: Node, thing: str) -> int:
        self.process.check()
        return self.process.provider.begin(Event(kind="called", thing=thing, run=self.ctx.run_id))

    def charge(self, node: Node, thing: str, before: int) -> Receipts:
        self.process.check()
        if before < node.fails:
            raise Declined(thing)
        if node.kind == "check":
            return []
        info = current_step()
        paid = Event(kind="charge", thing=thing, run=info.run_id, key=info.idempotency_key, step=info.key, asked=node.asked)
        self.process.provider.charge(paid)
        return [[thing, info.idempotency_key]]

    def undo_of(self, node: Node, ctx: Context[Any], things: dict[str, str]) -> Callable[[Any], Any] | None:
        """The compensation of a step, or of the items of a map, whose things are given by key."""
        if not node.asked:
            return None
        # Under a former name the key is another one than that of the name: then only the compensation knows it.
        keyed = "told" if node.aliases else node.keyed
        keys = {key: ctx.idempotency_key(key) for key in things} if keyed == "eager" else {}

        def which() -> str:
            """The key as the program has it, of the step that is being undone."""
            if len(things) == 1:
                return next(iter(things))
            undone = current_step().key.removeprefix(COMPENSATION_PREFIX)
            return next((key for key in things if key == undone), _item_of(undone, list(things)))

        @step(retry=Retry(attempts=node.undo_tries, wait_initial=0.5 * self.process.pace, wait_jitter=0))
        async def undo(receipts: Receipts | None) -> None:
            key = which()
            thing, of = things[key], keys.get(key) or ctx.idempotency_key(key)
            if keyed == "told":
                of = current_step().undoes or ""
            self.process.check()
            info, provider = current_step(), self.process.provider
            before = provider.begin(Event(kind="undoing", thing=thing, run=info.run_id))
            await self.process.dawdle(f"undo {thing} {before}")
            self.process.check()
            if before < node.undo_fails and not node.undo_late:
                raise NoAnswer(thing)
            if receipts and keyed != "told":
                of = receipts[0][1]
            refund = Event(
                kind="refund",
                thing=thing,
                run=info.run_id,
                key=info.idempotency_key,
                step=info.key,
                of=of,
                in_doubt=receipts is None,
            )
            provider.refund(refund)
            if before < node.undo_fails:
                raise NoAnswer(thing)

        return undo

    # Waiting.

    async def sleep(self, node: Node) -> None:
        await self.ctx.sleep(node.key, node.seconds * self.process.pace)

    async def signal(self, node: Node) -> None:
        limit: dict[str, Any] = {"timeout": node.seconds * self.process.pace, "default": None} if node.seconds else {}
        await self.ctx.wait_for_signal(node.key, key=f"w{node.at}", **limit)

    # Branching.

    async def gather(self, node: Node) -> None:
        await asyncio.gather(*self.branches(node))

    async def group(self, node: Node) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for branch in self.branches(node):
                    group.create_task(branch)
        except* _HANDLED:
            if not node.caught:
                raise Declined(node.at) from None

    async def limit(self, node: Node) -> None:
        try:
            async with self.ctx.timeout(node.key, node.seconds * self.process.pace):
                await self.run(node.branches[0])
        except TimeoutError:
            if not node.caught:
                raise Declined(node.at) from None

    async def race(self, node: Node) -> None:
        await self.ctx.race(node.key, *self.branches(node))

    async def guard(self, node: Node) -> None:
        """A block with a step to clean up."""
        try:
            await self.run(node.branches[0])
        finally:
            await self.run(node.branches[1])

    async def child(self, node: Node) -> None:
        undo = self.undo_child(node) if node.asked else None
        flow = flow_of(self.process, self.version, node)
        self.note_child(node, f"{self.path}{node.at}")
        self.receipts += await self.ctx.child(flow, f"{self.path}{node.at}", self.ctx.run_id, key=node.key, compensate=undo)

    async def each(self, node: Node) -> None:
        """A map of children."""
        flow = each_flow_of(self.process, self.version, node)
        items = [[f"{self.path}{node.at}[{item}]", self.ctx.run_id] for item in range(node.count)]
        undo = self.undo_child(node) if node.asked else None
        for thing, _ in items:
            self.note_child(node, thing)
        found = await self.ctx.map(node.key, flow, items, compensate=undo)
        self.receipts += [receipt for receipts in found for receipt in receipts]

    def note_child(self, node: Node, thing: str) -> None:
        self.process.provider.note(Event(kind="child", thing=thing, run=self.ctx.run_id, asked=node.asked))

    def undo_child(self, node: Node) -> Callable[[Any], Any]:
        async def undo(receipts: Receipts) -> None:
            """Refund what a child has charged, one thing after the other, each under a key of its own."""
            info, provider = current_step(), self.process.provider
            self.process.check()
            before = provider.begin(Event(kind="undoing", thing=f"{self.path}{node.at}", run=info.run_id))
            await self.process.dawdle(f"undo {node.at} {before}")
            if before < node.undo_fails:
                raise NoAnswer(node.at)
            refund_all(self.process, info, receipts)

        return undo

    # Ending.

    async def bug(self, node: Node) -> None:
        raise ZeroDivisionError(node.at)

    async def refuse(self, node: Node) -> None:
        raise Refused

    async def again(self, node: Node) -> None:
        raise StartAgain(node.count)


class Refused(Exception):
    """The workflow returns `Err`."""


class StartAgain(Exception):
    """The workflow starts over, unless it has done so this often."""


def refund_all(process: Process, info: StepInfo, receipts: Receipts) -> None:
    """Refund what a child has charged, one thing after the other, each under a key of its own."""
    for thing, of in receipts:
        process.check()
        key = f"{info.idempotency_key}:{of}"
        process.provider.refund(Event(kind="refund", thing=thing, run=info.run_id, key=key, step=info.key, of=of))


def undo_of_retired(process: Process) -> Callable[[Any], Any]:
    """What undoes steps and children that the code has no more."""

    async def undo(receipts: Receipts | None) -> None:
        process.check()
        info = current_step()
        of = info.undoes or ""
        if receipts and receipts[0][1] != of:
            refund_all(process, info, receipts)
            return
        refund = Event(
            kind="refund",
            thing="retired",
            run=info.run_id,
            key=info.idempotency_key,
            step=info.key,
            of=of,
            in_doubt=receipts is None,
        )
        process.provider.refund(refund)

    return undo


def _options_of(process: Process, version: Version) -> dict[str, Any]:
    """The options of all workflows of a version."""
    retired: Any = list(version.retired)
    if version.undoes_retired:
        retired = dict.fromkeys(retired, undo_of_retired(process))
    return {"retired": retired, "on_definition_change": "ignore"}


def _item_of(undone: str, keys: list[str]) -> str:
    """The item that has this number, where the step is known under a former name."""
    number = undone[undone.rfind("[") :]
    return next(key for key in keys if key.endswith(number))


_CONSTRUCTS: Final[dict[str, Callable[[Body, Node], Awaitable[None]]]] = {
    "pay": Body.pay,
    "check": Body.pay,
    "map": Body.map,
    "sleep": Body.sleep,
    "signal": Body.signal,
    "gather": Body.gather,
    "group": Body.group,
    "limit": Body.limit,
    "race": Body.race,
    "guard": Body.guard,
    "child": Body.child,
    "each": Body.each,
    "bug": Body.bug,
    "refuse": Body.refuse,
    "again": Body.again,
}


def _place_of(ctx: Context[Any], given: str, parent: str) -> str:
    """What names the things of a run: its own id, unless it is a child, for which its parent has given a path.

    A fork of a child is a run of its own.
    """
    return given if parent and ctx.run_id.startswith((f"{parent}/", f"{parent};generation=")) else f"{ctx.run_id}:"


async def _perform(process: Process, version: Version, nodes: tuple[Node, ...], ctx: Context[Any], place: str, again: int) -> Any:
    body = Body(process, version, ctx, f"{place}#{again}" if again else place)
    try:
        await body.run(nodes)
    except Refused:
        return Err("refused")
    except StartAgain as wanted:
        return StartAgain(*wanted.args, body.receipts)
    return body.receipts


def main_flow(process: Process, version: Version) -> Workflow[Any, Any]:
    """The workflow of a version."""

    async def main(ctx: Context[Any], again: int) -> Any:
        ended = await _perform(process, version, version.nodes, ctx, f"{ctx.run_id}:", again)
        if isinstance(ended, StartAgain):
            if again < ended.args[0]:
                await ctx.continue_as(again + 1)
            return ended.args[1]
        return ended

    return Workflow(f"{process.prefix}main", main, **_options_of(process, version))


def flow_of(process: Process, version: Version, node: Node) -> Workflow[Any, Any]:
    """The workflow of a child."""

    async def sub(ctx: Context[Any], given: str, parent: str) -> Any:
        return await _perform(process, version, node.branches[0], ctx, _place_of(ctx, given, parent), 0)

    return Workflow(f"{process.prefix}sub{node.at}", sub, **_options_of(process, version))


def each_flow_of(process: Process, version: Version, node: Node) -> Workflow[Any, Any]:
    """The workflow of the children of a map, which take one argument."""

    async def sub(ctx: Context[Any], given: list[str]) -> Any:
        return await _perform(process, version, node.branches[0], ctx, _place_of(ctx, *given), 0)

    return Workflow(f"{process.prefix}sub{node.at}", sub, **_options_of(process, version))


def flows_of(process: Process, versions: list[Version], current: int) -> Iterator[Workflow[Any, Any]]:
    """The workflows of a version; of children that it does not have any more, as the last version that had them."""
    version = versions[current]
    yield main_flow(process, version)
    known: dict[str, tuple[Version, Node]] = {}
    for each in (*versions, version):
        known |= {node.at: (each, node) for node in all_nodes(each.nodes) if node.kind in ("child", "each")}
    for having, node in known.values():
        yield (flow_of if node.kind == "child" else each_flow_of)(process, having, node)


def some_pause(what: str, seed: int) -> float:
    """How long something takes, which depends on nothing else."""
    return random.Random(f"{seed} {what}").choice((0.0, 0.0, 0.0, 0.01, 0.3))
