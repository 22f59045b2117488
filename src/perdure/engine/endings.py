"""How a drive ends: the outcome of a run whose body has ended, whether a waiting run may leave memory, and the end of its tasks.

The tasks of a body are ended in bounded time, whatever they do with a cancellation.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec

from perdure.aio.code_places import CodePlace, innermost_place
from perdure.codec import Codec
from perdure.codec.outcomes import Ending, Hints, run_ending
from perdure.engine.body_tasks import BodyTasks
from perdure.engine.keyed_calls import Calls
from perdure.engine.replay_order import MOST_TURNS, QUIET_TURNS_AFTER_END
from perdure.errors import CompensationFailed, DeadlineExceeded, PerdureWarning, RunCancelled, RunDead, SnapshotMismatch, name_key
from perdure.model.durations import moment
from perdure.model.journal import Entry, entries_in_force
from perdure.model.logs import log
from perdure.model.records import NewInput, RunRow
from perdure.result import Err
from perdure.stepspec import StepInfo, await_in, current

# How long a body may take to end once it was cancelled. It is discarded then; only its own clean-up is cut short.
CLOSING_SECONDS: Final = 5.0
# How long a body that ends is left alone before the next look at which of its tasks cannot end by themselves.
_LOOK_AGAIN_SECONDS: Final = 0.05

# Tasks that did not end when they were cancelled, with the ids of their runs.
_left: Final[weakref.WeakKeyDictionary[asyncio.Task[Any], str]] = weakref.WeakKeyDictionary()


class StartingOver(BaseException):
    """Raised in the body by `ctx.continue_as`. No exception of the kind that handlers catch: the run does not fail."""

    def __init__(self, new: NewInput) -> None:
        super().__init__(new)
        self.new = new


class StartOver(NamedTuple):
    """The run does not end: it starts over with this input."""

    new: NewInput


def start_over_in(result: Any) -> StartOver | None:
    """With what the run starts over, if that is how its body ended. A TaskGroup that the body was in has wrapped it."""
    # By `type`, which no value of the user's can intercept.
    error = result.error if type(result) is Err else None
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return StartOver(error.new) if isinstance(error, StartingOver) else None


def open_children(journal: Sequence[Entry]) -> list[str]:
    """The keys of children whose outcome the body has not got, but those that it left to themselves."""
    entries = entries_in_force(journal)
    over = {entry.key for entry in entries if entry.phase != "open"}
    opened = [entry for entry in entries if entry.kind == "child" and entry.phase == "open" and entry.key not in over]
    return [entry.key for entry in opened if not _is_detached(entry)]


def _is_detached(opened: Entry) -> bool:
    payload = msgspec.json.decode(opened.payload)
    return isinstance(payload, dict) and bool(payload.get("detached"))


def can_leave_memory(branches: BodyTasks, wake_at: int | None, now: int, grace: int) -> bool:
    """Whether a run at rest need not stay in memory: only a timer that is not due soon, or a signal, can move its body.

    When no branch waits for either, the body is busy with something of its own, and nothing in the store would wake it.
    """
    # A wait that is due is not over yet while the inbox is read for it.
    is_due_soon = wake_at is not None and (wake_at <= now or wake_at - now < grace)
    return bool(branches.ours) and not is_due_soon


async def end_tasks(run_id: str, main: asyncio.Task[Any] | None, branches: BodyTasks) -> None:
    """Cancel the body's task, and after it every other that the body created; return when they have ended, or in bounded time.

    A task that was created elsewhere is not cancelled, also when the body awaits it.
    """
    patience: tuple[float, ...] = (CLOSING_SECONDS, CLOSING_SECONDS / 5)
    if main is not None and not main.done() and not await _end_main(main, branches):
        patience = patience[1:]
    if branches.alive:
        await _cancel_tasks(run_id, branches, patience)


async def _end_main(main: asyncio.Task[Any], branches: BodyTasks) -> bool:
    """Cancel the body's task, first because a TaskGroup ignores a child that is cancelled on its own. Whether it has ended.

    A TaskGroup that aborts already passes a second cancellation on to none of its children. Those inside a ctx call would wait
    there for ever, so they are cancelled when the cancellation has come as far as it gets.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CLOSING_SECONDS
    main.cancel()
    cancelled = {main}
    while loop.time() < deadline:
        await _settle(main, branches)
        if main.done():
            return True
        inside = {
            branch.task for branch in branches.alive if branch.task is not None and branch.is_ours and not branch.is_leaving
        }
        for task in inside - cancelled:
            task.cancel()
        await asyncio.wait([main], timeout=0 if inside - cancelled else _LOOK_AGAIN_SECONDS)
        cancelled |= inside
    return main.done()


async def _settle(main: asyncio.Task[Any], branches: BodyTasks) -> None:
    """Return when no task of the body has moved for a few turns of the loop, or the body's task has ended."""
    quiet = turns = 0
    while quiet < QUIET_TURNS_AFTER_END and turns < MOST_TURNS and not main.done():
        stirs, turns = branches.stirs, turns + 1
        await asyncio.sleep(0)
        quiet = quiet + 1 if branches.stirs == stirs else 0


async def _cancel_tasks(run_id: str, branches: BodyTasks, patience: tuple[float, ...]) -> None:
    """Cancel them; once more when they have not ended in a while; and then leave them alone and say so.

    A task that one of them creates for its clean-up is cancelled when those that were there before it have ended.
    """
    loop = asyncio.get_running_loop()
    for seconds in patience:
        deadline, cancelled = loop.time() + seconds, set[asyncio.Task[Any]]()
        while (tasks := _running(branches)) and (left := deadline - loop.time()) > 0:
            for task in tasks - cancelled:
                task.cancel()
            cancelled |= tasks
            await asyncio.wait(tasks, timeout=left)
    for task in _running(branches):
        _leave(run_id, task)


def _running(branches: BodyTasks) -> set[asyncio.Task[Any]]:
    return {branch.task for branch in branches.alive if branch.task is not None and not branch.task.done()}


def _leave(run_id: str, task: asyncio.Task[Any]) -> None:
    """Leave a task alone that does not end, and say so."""
    _left[task] = run_id
    what, where = _what_runs(task)
    if log.hasHandlers():  # otherwise it would be printed twice
        log.warning("run %r left memory, but %s does not end when it is cancelled%s", run_id, what, where)
    message = f"run {run_id!r} left memory, but {what} does not end when it is cancelled{where}"
    warnings.warn(message, PerdureWarning, stacklevel=2)


def _what_runs(task: asyncio.Task[Any]) -> tuple[str, str]:
    """A task of a body in words: the step or other code that it runs, and where that is."""
    key, place = _place_of_task(task)
    return "a task of it" if key is None else f"step {key!r}", "" if place is None else f"; it is at {place}"


def _place_of_task(task: asyncio.Task[Any]) -> tuple[str | None, CodePlace | None]:
    """The key of the step in whose function a task of a body waits, and the place where it does."""
    frames, key = [], None
    for frame in _awaiting_frames(task.get_coro()):
        if frame.f_code is await_in.__code__:
            info = frame.f_locals["context"].get(current)
            key = info.key if isinstance(info, StepInfo) else key
        frames.append(frame)
    return key, innermost_place(frames)


def _awaiting_frames(awaited: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that waits, the outermost first."""
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        frame: FrameType | None = None if kind is None else getattr(awaited, f"{kind}_frame")
        if frame is None:
            return
        yield frame
        if frame.f_code is await_in.__code__:
            awaited = frame.f_locals.get("coroutine")
        else:
            awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def give_up_left_tasks() -> list[str]:
    """The tasks that were left alone on this event loop and still run, in words. `asyncio.run` waits for them no more.

    Called when a worker has drained: its program ends now, and the loop would otherwise wait for ever.
    """
    loop, found = asyncio.get_running_loop(), []
    for task, run_id in list(_left.items()):
        if not task.done() and task.get_loop() is loop:
            asyncio._unregister_task(task)  # noqa: SLF001 - documented, for those who extend asyncio
            what, where = _what_runs(task)
            found.append(f"{what} of run {run_id!r}{where}")
    return found


def ending_of_body(
    result: Any,
    run: RunRow,
    calls: Calls,
    codec: Codec,
    hints: Hints,
    *,
    is_strict: bool,
    passed_deadline: int | None,
    left: Sequence[str],
    on_unknown_steps: Callable[[SnapshotMismatch], None],
) -> Ending | StartOver:
    """How the run ends whose body returned `result`, or `Err(exception)` if it raised, or starts over.

    `passed_deadline` is set if that is why the body was cancelled. `left` has the keys of what a cancelled run does not undo,
    because its caller asked for that. `on_unknown_steps` gets the error that steps of a snapshot or resume state were never asked
    for, and raises it where that has to fail the run.
    """
    is_cancelled = calls.is_cancelling and not (isinstance(result, Err) and isinstance(result.error, CompensationFailed))
    if is_cancelled and passed_deadline is not None:
        late = DeadlineExceeded(run.id, moment(passed_deadline).isoformat(timespec="milliseconds"))
        return run_ending(codec, Err(late), hints, keys=[])  # no step ended the run: a retry keeps what is recorded
    if is_cancelled:
        return ending_of_cancelled_run(run, left)
    try:
        if calls.owed.unasked and not isinstance(result, Err) and (unknown := calls.owed.unknown()):
            try:
                on_unknown_steps(SnapshotMismatch(run.id, _unknown_steps(unknown)))
            except SnapshotMismatch as error:
                result = Err(error)
        if isinstance(result, StartOver):
            return result
        keys = calls.failed_keys(result) if isinstance(result, Err) else None
        return run_ending(codec, result, hints, keys, is_strict)
    except Exception as error:  # noqa: BLE001 - a result of the user's making, or a warning that is an error: the run has failed
        return run_ending(codec, Err(error), hints)


def _unknown_steps(unknown: set[str]) -> str:
    shown = ", ".join(map(name_key, sorted(unknown)[:5])) + (" and others" if len(unknown) > 5 else "")
    return f"it ended without asking for what is recorded under {shown}; was a step renamed or removed?"


def ending_of_cancelled_run(run: RunRow, left: Sequence[str]) -> Ending:
    """Return how a cancelled run ends that leaves behind what these steps have done."""
    return Ending("cancelled", msgspec.json.encode(left or None), Err(RunCancelled(run.id, left)))


def ending_of_dead_run(run: RunRow, codec: Codec, hints: Hints) -> Ending:
    """How a run ends of which too many attempts in a row failed, or ended with their process."""
    error = RunDead(run.id, run.attempts - 1, run.problem)
    return Ending("dead", run_ending(codec, Err(error), hints).payload, Err(error))
