"""A program at work: the workflow functions that run its tree and write the trace."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from perdure import Context, Workflow
from perdure.errors import ChildrenOpen, PerdureError
from tests.fuzz.programs import CONSTRUCTS, Node, Program
from tests.fuzz.steps import Boom, Steps

if TYPE_CHECKING:
    from tests.fuzz.hosting import Hosting
    from tests.fuzz.process import Process, Showing

# What nodes may raise: errors of steps, time limits, children that were cancelled.
EXPECTED: Final = (Boom, TimeoutError, PerdureError)
_LONGEST_SHOWN: Final = 120

CHILD: Final = "child"
# Set in the contexts of bodies, and so in those of their tasks, timers and steps.
IN_BODY: Final = contextvars.ContextVar[bool]("IN_BODY")


class Body:
    """One attempt at one run of a program. `scoped` is the same under a ctx with keys of its own."""

    def __init__(self, program: Program, process: Process, hosting: Hosting, ctx: Context[Any], showing: Showing) -> None:
        self.program = program
        self.process = process
        self.hosting = hosting
        self.ctx = ctx
        self.showing = showing
        self.steps = Steps(process)

    def scoped(self, name: str) -> Body:
        return Body(self.program, self.process, self.hosting, self.ctx.scope(name), self.showing)

    def note(self, *what: Any) -> None:
        """Add to the trace, unless the body is leaving memory."""
        if self.showing.is_open:
            if has_left(self.ctx):
                self.showing.close()
            self.showing.note([each if isinstance(each, int | str) else shown(each) for each in what])

    def wrong(self, what: str) -> None:
        """Say that something must not be so."""
        self.process.world.tell("wrong", what)

    def ask(self) -> int:
        """Return how often this was called in this attempt: a number that tells the order of branches."""
        self.showing.asked += 1
        return self.showing.asked

    async def step(self, fn: Callable[[str], Any], key: str, **options: Any) -> Any:
        """Call a step whose key is also its argument. Other runs of the campaign have steps of this key."""
        return await self.ctx.step("work", fn, key, key=key, cache=False, **options)

    async def run(self, node: Node) -> Any:
        """Run a node, and note what it gives, raises, or that it was cancelled."""
        self.showing.running[node.at] = node.kind
        try:
            value = await CONSTRUCTS[node.kind].run(self, node)
        except asyncio.CancelledError:
            self.note(node.at, "cancelled")
            if not is_being_cancelled():  # anyio may leave the cancellation of a scope behind in a gather, on plain asyncio too
                raise Boom("cancelled elsewhere") from None
            raise
        except EXPECTED as error:
            self.note(node.at, "raised", f"{type(error).__name__}: {error}"[:_LONGEST_SHOWN])
            raise
        finally:
            self.showing.running.pop(node.at, None)
        self.note(node.at, node.kind, value)
        return value

    def branches(self, node: Node) -> list[Coroutine[Any, Any, Any]]:
        """Return coroutines that run what is inside."""
        return [self.run(each) for each in node.inside]

    def tasks(self, node: Node) -> list[asyncio.Task[Any]]:
        """Start what is inside, as tasks."""
        return [asyncio.create_task(self.run(each)) for each in node.inside]


def has_left(ctx: Context[Any]) -> bool:
    """Return whether the body has left memory or ended. Then ctx calls are refused, and what the body does is not compared."""
    return bool(ctx._drive.is_closed)


def is_being_cancelled() -> bool:
    """Return whether the task itself was cancelled. Otherwise a CancelledError comes from what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def shown(value: Any) -> str:
    """Return a value as text for the trace, alike on every Python."""
    if isinstance(value, BaseExceptionGroup):
        return f"{type(value).__name__}{[shown(each) for each in value.exceptions]}"[:_LONGEST_SHOWN]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"[:_LONGEST_SHOWN]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"[:_LONGEST_SHOWN]
    return repr(value)[:_LONGEST_SHOWN]


def workflows_of(program: Program, process: Process, hosting: Hosting) -> list[Workflow[Any, Any]]:
    """Return the program as workflows: its main one, and the one of its children, which run a part of the tree."""
    nodes = {node.at: node for node in program.tree.all()}

    async def main(ctx: Context[Any], round_: int) -> str:
        IN_BODY.set(True)
        showing = process.begin(ctx.run_id, round_)
        body = Body(program, process, hosting, ctx, showing)
        with _completing(body):
            try:
                for branch in program.tree.inside:
                    await body.run(branch)
            except asyncio.CancelledError:
                if program.cleans_up and showing.is_open and not has_left(ctx):
                    await body.step(body.steps.slow, "clean up")
                    body.note("main", "cleaned up")
                raise
            except (*EXPECTED, BaseExceptionGroup) as error:
                body.note("main", "error", error)
                if program.raises:
                    raise Boom("left the tree") from None
            if round_ < program.rounds:
                body.note("main", "over", round_)
                with contextlib.suppress(ChildrenOpen):
                    await ctx.continue_as(round_ + 1)
        return "done"

    async def child(ctx: Context[Any], at: str) -> str:
        IN_BODY.set(True)
        showing = process.begin(ctx.run_id, 0)
        body = Body(program, process, hosting, ctx, showing)
        with _completing(body):
            values = [await body.run(each) for each in nodes[at].inside]
        return shown(values)

    return [Workflow("main", main), Workflow(CHILD, child)]


@contextlib.contextmanager
def _completing(body: Body) -> Iterator[None]:
    """Close the trace at the end of the function, and note whether it came there by itself."""
    was_cancelled = False
    try:
        yield
    except (GeneratorExit, asyncio.CancelledError):
        was_cancelled = True
        raise
    finally:
        if has_left(body.ctx):
            body.showing.close()
        body.showing.complete(was_cancelled=was_cancelled, leaves_tasks=_leaves_tasks())


def _leaves_tasks() -> bool:
    """Return whether other tasks of this body are still running."""
    this = asyncio.current_task()
    queue = getattr(this, "body", None)
    return any(getattr(task, "body", None) is queue for task in asyncio.all_tasks() if task is not this)
