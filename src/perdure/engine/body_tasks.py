"""The tasks of a body: which of them run, which wait for us, and which wait for something else.

A replay delivers one recorded result at a time and lets the body come to rest before the next, and a run may leave memory
when all its tasks wait in ctx calls. Both need to know what the body's tasks are doing. A drive runs its body in a context of its
own; a wrapper around the loop's task factory notices tasks created in that context and wraps their coroutines in a `BodyTask`,
which sees every time the task runs and what it then waits for. Step functions run outside that context, so what they start is
no branch. Only public interfaces are used: the task factory, context variables, subclasses of Task and the coroutine protocol.
The exception is `find_canceller`, which looks at the calling frame to tell an aborting TaskGroup and `wait_for` from a clock.

A cancelled call could return at once while it waits for a record, as on a replay, but not while a step's function runs, which
has to unwind first. So cancelled calls return to the body together, in the order in which they were cancelled, when all of them
have unwound and the body is at rest. No result is handed over before that.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType, coroutine
from typing import Any, Final, Literal, TypeAlias, TypeVar

from perdure.aio.interrupts import is_for_process
from perdure.aio.own_tasks import is_own_context
from perdure.aio.task_order import TaskCreator
from perdure.stepspec import StepInfo, current

T = TypeVar("T")

# Who cancels a task: ctx.race, ctx.map or ctx.timeout and a body's own code do so again on a replay, a clock need not.
CancelledBy: TypeAlias = Literal["ctx", "body", "clock"]

# A TaskGroup whose child failed cancels the other children and its own task from a callback, outside any task.
_GROUP_CODE: Final = frozenset(getattr(asyncio.TaskGroup, name).__code__ for name in ("_abort", "_on_task_done"))
# How asyncio.wait_for cancels before Python 3.12; later versions use asyncio.timeout.
_CANCEL_AND_WAIT: Final = getattr(getattr(asyncio.tasks, "_cancel_and_wait", None), "__code__", None)
# None before Python 3.12.
_EAGER_TASK_FACTORY: Final = getattr(asyncio, "eager_task_factory", None)


class BodyTasks(TaskCreator):
    """The living tasks of one body."""

    __slots__ = (
        "alive",
        "are_exits_open",
        "cancelled_by",
        "changed",
        "drive",
        "ended",
        "joining",
        "leaving",
        "may_survive_exit",
        "note_exit",
        "note_time_limit",
        "ours",
        "outside",
        "running",
        "stirs",
    )

    def __init__(self, seed: bytes = b"") -> None:
        # Another for each run: asyncio keeps all tasks of a loop in one set, where equal hashes are compared one by one.
        super().__init__(int.from_bytes(seed[:4], "big"))
        # Called when a task waits for something of its own, or has ended.
        self.changed: Callable[[], None] = nothing
        # Called when a time limit of asyncio, or something else outside the body, cancels one of these tasks.
        self.note_time_limit: Callable[[], None] = nothing
        # Called when one of these tasks calls `sys.exit` and `may_survive_exit`: only the run's attempt ends, not the process.
        self.note_exit: Callable[[BaseException], None] = nothing
        self.may_survive_exit = False
        # The drive of this body: another workflow that the body calls becomes a child of its run.
        self.drive: Any = None
        # What passes a cancellation on right now: a task's cancel reaches what it waits for before it returns.
        self.cancelled_by: CancelledBy | None = None
        self.alive: set[BodyTask] = set()
        # How many are inside a ctx call, waiting for us. The rest are about to run, or in `outside`.
        self.ours = 0
        # How many wait, through ctx.map or ctx.race, for nothing but other branches. They are in `outside` too.
        self.joining = 0
        # What each of the others waits for; None is a bare yield.
        self.outside: dict[BodyTask, Any] = {}
        self.running: BodyTask | None = None
        # Cancelled inside a ctx call and not out of it yet, in the order in which they were cancelled.
        self.leaving: list[BodyTask] = []
        # Whether cancelled calls return at once: the body has ended or is being unloaded, so nothing that follows is replayed.
        self.are_exits_open = False
        # Grows whenever a branch runs; `ended` whenever one ends.
        self.stirs = 0
        self.ended = 0

    @property
    def run_id(self) -> str | None:
        """The id of the body's run, until its drive is over."""
        return None if self.drive is None else str(self.drive.run.id)

    def all_ours(self) -> bool:
        """Whether every branch waits for us, so that nothing but us can move the body."""
        return len(self.alive) == self.ours

    def only_one_moves(self) -> bool:
        """Whether every branch but the one that runs waits for us, and none of them was cancelled."""
        running = self.running
        return running is not None and len(self.alive) == self.ours + (not running.is_ours) and not self.leaving

    def all_parked(self) -> bool:
        """Whether every branch waits for us or for other branches."""
        return len(self.alive) == self.ours + self.joining

    def is_unwinding(self) -> bool:
        """Whether a cancelled call cannot return yet: its step's clean-up takes a while."""
        return any(branch.exit is None for branch in self.leaving)

    def let_leave(self) -> None:
        """Let the cancelled calls return to the body, in the order in which they were cancelled."""
        leaving, self.leaving = self.leaving, []
        for branch in leaving:
            branch.let_leave()

    def open_exits(self) -> None:
        """Let cancelled calls return at once from now on."""
        self.are_exits_open = True
        if self.leaving:
            self.let_leave()

    @contextmanager
    def cancelling(self, by: CancelledBy) -> Iterator[None]:
        """Around a cancellation whose reason is known. What it is passed on to has the same."""
        before, self.cancelled_by = self.cancelled_by, by
        try:
            yield
        finally:
            self.cancelled_by = before

    def find_canceller(self) -> CancelledBy:
        """What cancels a task right now, judged by what runs: a task of the body, a TaskGroup that aborts, or neither."""
        running = self.running
        if running is None:
            is_inside_step = isinstance(current.get(), StepInfo)  # its own time limit, which it handles itself
            return "body" if is_inside_step or sys._getframe(2).f_code in _GROUP_CODE else "clock"  # noqa: SLF001 - documented
        if running.is_cancelled_by_ctx:
            return "ctx"
        is_requested = running.task is not None and running.task.cancelling()
        return "clock" if not is_requested and _is_wait_for_over() else "body"

    def can_move(self) -> bool:
        """Whether some branch is about to run as far as can be seen; a callback on its way to one cannot be seen."""
        if len(self.alive) > self.ours + len(self.outside):
            return True
        return any(waited is None or waited.done() for waited in self.outside.values())

    def waits_outside(self, branch: BodyTask, waited: Any) -> None:
        """`branch` waits for `waited` now, which is none of our calls."""
        self.outside[branch] = waited if waited is None or hasattr(waited, "done") else None
        self.changed()

    def end(self, branch: BodyTask) -> None:
        """`branch` has ended."""
        self.ended += 1
        branch.leave()
        branch.task = None  # which refers to it: nothing here shall wait for a collection
        self.alive.discard(branch)
        self.changed()

    def forget_owner(self) -> None:
        """Drop the reference to the drive, so that it is freed without the garbage collector."""
        self.drive = None
        self.changed = self.note_time_limit = self.note_exit = nothing


def nothing(*_: object) -> None:
    """Stands for a callback that is no longer wanted."""


class BodyTask(TaskCreator, Coroutine[Any, Any, Any]):
    """The coroutine of one of the body's tasks, telling `BodyTasks` what it does."""

    __slots__ = (
        "__weakref__",
        "_cancel_requests_before",
        "_coro",
        "branches",
        "deferred_cancel",
        "exit",
        "has_result",
        "is_cancelled_by_body",
        "is_cancelled_by_ctx",
        "is_leaving",
        "is_ours",
        "outlives_function",
        "task",
    )

    def __init__(self, branches: BodyTasks, coro: Coroutine[Any, Any, Any], number: int) -> None:
        super().__init__(number)
        self.branches = branches
        self._coro = coro
        self.is_ours = False
        # Whether it was cancelled inside a ctx call. `exit` is what it waits for once the call has unwound.
        self.is_leaving = False
        self.exit: _Exit | None = None
        # Whether the call that it is inside has a recorded result: cancelling takes effect after that was delivered.
        self.has_result = False
        # Whether ctx.race, ctx.map or ctx.timeout cancelled it last, which a replay does as well.
        self.is_cancelled_by_ctx = False
        # Whether the body's own code did, or one of these, and not a clock or the end of the process.
        self.is_cancelled_by_body = False
        # Whether it may use ctx when the workflow's function has ended: it waits for a child.
        self.outlives_function = False
        self._cancel_requests_before = 0
        # How many cancellations were requested when one was deferred; 0 when none is.
        self.deferred_cancel = 0
        self.task: asyncio.Task[Any] | None = None
        branches.alive.add(self)

    def ours(self) -> None:
        """It is inside a ctx call from now on."""
        if not self.is_ours:
            self.is_ours = True
            self.branches.ours += 1
            self._cancel_requests_before = 0 if self.task is None else self.task.cancelling()

    def leave(self) -> None:
        """It is about to run its own code again."""
        self.has_result = False
        if self.is_ours:
            self.is_ours = False
            self.branches.ours -= 1
        if self.is_leaving:
            self._stay()

    def note_cancel(self) -> None:
        """Its task was cancelled. If it is inside a ctx call without a result, nothing is delivered until that has returned."""
        if self.is_ours and not self.is_leaving and not self.has_result:
            self.is_leaving = True
            self.branches.leaving.append(self)

    def confirm_cancel(self) -> bool:
        """Whether it was cancelled inside this ctx call by the body, and not by a time limit inside the step, which goes on."""
        if self.is_leaving and self.exit is None:
            requests = 0 if self.task is None else self.task.cancelling()
            if requests <= self._cancel_requests_before:
                self._stay()
        return self.is_leaving

    def _stay(self) -> None:
        self.is_leaving = False
        self.branches.leaving.remove(self)
        self.branches.changed()

    def note_result(self) -> None:
        """The call that it is inside has a recorded result, which it will get even if it was cancelled."""
        self.has_result = True
        if self.is_leaving:
            self._stay()

    def defer_cancellation(self) -> None:
        """A ctx call gives its result although its task may have been cancelled meanwhile: cancel at the next await instead."""
        if self.task is not None and self.task.cancelling() > self._cancel_requests_before:
            self.cancel_at_next_await()

    def cancel_at_next_await(self) -> None:
        """Cancel the task when it has come to another await, unless the request is withdrawn by then.

        `asyncio.timeout`, `ctx.timeout` and TaskGroup withdraw theirs at the end of the block.
        """
        if self.task is not None:
            self.deferred_cancel = self.task.cancelling()
            self.task.get_loop().call_soon(self._cancel_if_deferred)

    def check_cancellation(self) -> None:
        """Raise CancelledError if one was deferred, now that the task has come to another ctx call."""
        if self._take_deferred():
            raise asyncio.CancelledError

    def _cancel_if_deferred(self) -> None:
        task = self.task
        if task is not None and self._take_deferred():
            task.uncancel()  # it stays one request, as `asyncio.timeout` and TaskGroup count them
            with self.branches.cancelling("body"):  # what requested it was judged then
                task.cancel()

    def _take_deferred(self) -> bool:
        requests, self.deferred_cancel = self.deferred_cancel, 0
        return 0 < requests <= (0 if self.task is None else self.task.cancelling())

    async def wait_to_leave(self) -> None:
        """Return when the cancelled call that it is inside may return to the body."""
        self.note_cancel()
        if self.is_leaving and not self.branches.are_exits_open:
            self.exit = _Exit()
            self.branches.changed()
            await self.exit

    def let_leave(self) -> None:
        """Let the cancelled call return."""
        self.is_leaving = False
        self.leave()
        if self.exit is not None:
            self.exit.set_result(None)
            self.exit = None

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None) -> Any:
        self.note_cancel()
        return self._step(self._coro.throw, typ) if val is None and tb is None else self._step(self._coro.throw, typ, val, tb)

    def _step(self, advance: Callable[..., Any], *args: Any) -> Any:
        branches = self.branches
        # Not None when this task is started eagerly, inside another branch.
        interrupted = branches.running
        branches.running = self
        branches.stirs += 1
        if branches.outside:
            branches.outside.pop(self, None)
        try:
            waited = advance(*args)
        except BaseException as error:
            branches.running = interrupted
            branches.end(self)
            if isinstance(error, KeyboardInterrupt | SystemExit) and branches.may_survive_exit and not is_for_process(error):
                branches.note_exit(error)
                raise asyncio.CancelledError("the run's code called sys.exit") from error
            raise
        branches.running = interrupted
        if self.is_leaving:
            self.confirm_cancel()
        if not self.is_ours:
            branches.waits_outside(self, waited)
        return waited

    def close(self) -> None:
        self._coro.close()
        self.branches.end(self)

    def __await__(self) -> Any:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        """`cr_frame`, `cr_suspended`, `__qualname__`, ... of the coroutine, for anyio, debuggers and `Task.print_stack`."""
        if name in BodyTask.__slots__:  # not set yet
            raise AttributeError(name)
        return getattr(self._coro, name)

    def __repr__(self) -> str:
        return f"<BodyTask {getattr(self._coro, '__qualname__', self._coro)!s}>"


class _Exit(asyncio.Future[None]):
    """What a cancelled call waits for. Cancelling it again changes nothing: it is on its way out already."""

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ARG002 - always refused
        return True


class ReplayableTask(asyncio.Task[Any]):
    """A task of a body: sets of them iterate in the same order on every replay, and it is known at once when it is cancelled."""

    def __init__(self, branch: BodyTask, **options: Any) -> None:
        self.branch = branch  # first: asyncio puts the new task into a set
        branch.task = self
        super().__init__(branch, **options)

    def __hash__(self) -> int:
        return self.branch.number

    def cancel(self, msg: Any | None = None) -> bool:
        branches = self.branch.branches
        if branches.cancelled_by is None:
            by = branches.find_canceller()
            if by == "clock" and not self.done():
                branches.note_time_limit()
            with branches.cancelling(by):
                return self._cancel(msg)
        return self._cancel(msg)

    def _cancel(self, msg: Any | None) -> bool:
        is_requested = super().cancel(msg)
        if is_requested:
            self.branch.is_cancelled_by_ctx = self.branch.branches.cancelled_by == "ctx"
            self.branch.is_cancelled_by_body = self.branch.branches.cancelled_by != "clock"
            self.branch.note_cancel()
        return is_requested


def cancel_by_ctx(task: asyncio.Future[Any]) -> bool:
    """Cancel a task of the body for a reason that a replay meets again."""
    if not isinstance(task, ReplayableTask):
        return task.cancel()
    with task.branch.branches.cancelling("ctx"):
        return task.cancel()


def _is_wait_for_over() -> bool:
    """Whether it is `asyncio.wait_for` that cancels, before Python 3.12."""
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - documented; what called Task.cancel
    while frame is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return frame is not None and frame.f_code is _CANCEL_AND_WAIT


class _NotingFactory:
    """A task factory that wraps coroutines started by a body, and leaves the rest to the factory that was there."""

    def __init__(self, previous: Callable[..., Any] | None) -> None:
        self.previous = previous

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        context = options.get("context")
        branches = current.get() if context is None else context.get(current)
        if not isinstance(branches, BodyTasks) or is_own_context(context):
            return asyncio.Task(coro, loop=loop, **options) if self.previous is None else self.previous(loop, coro, **options)
        creator = branches.running or branches
        branch = BodyTask(branches, creator.next_to_start(coro), creator.number_child())
        if self.previous is None:
            return ReplayableTask(branch, loop=loop, **options)
        if self.previous is _EAGER_TASK_FACTORY:
            return ReplayableTask(branch, loop=loop, eager_start=True, **options)
        # Tasks of another class hash by address, and that one was cancelled is known only when it runs again.
        branch.task = self.previous(loop, branch, **options)
        return branch.task


def note_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """See to it that tasks created by bodies on this loop are noticed. Stays installed: for other tasks it is one look-up."""
    current = loop.get_task_factory()
    if not isinstance(current, _NotingFactory):
        loop.set_task_factory(_NotingFactory(current))


@coroutine
def first_step() -> Generator[None, None, None]:
    """Return in the first step of the task. Raises what comes before that, such as a cancellation."""
    yield


def begun(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """A coroutine that awaits `first_step` before anything else, and has come so far."""
    work.send(None)
    return work
