"""Children: runs that a body starts and waits for, as in a TaskGroup.

A child is recorded under a key. Its open entry, which holds its id, is in the store before the child is created; its close entry
holds its outcome as that of a step is held. Between the two the parent waits for the inbox row that the child's end puts into its
inbox, and need not be in memory. What counts is the child's own row, which is read when the inbox row arrives and whenever the
parent is driven again: a parent cannot miss an end, whatever became of the inbox row.

A child that the body gives up (a race that it lost, a time limit, a cancelled task) is asked to stop before its call returns to
the body. What gave it up is recorded by then, so a replay gives it up again. `end_children` sees to the rest when the body has
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import msgspec

from perdure import events
from perdure.aio.own_tasks import start_own_task
from perdure.aio.pending_write import await_reply, run_to_end
from perdure.codec import Codec
from perdure.codec.outcomes import Hints, store_exception
from perdure.ctx_calls.fanout import join
from perdure.ctx_calls.steps import load_result, replay_step
from perdure.engine.body_tasks import cancel_by_ctx, nothing
from perdure.engine.child_runs import ChildRuns, StartedChild
from perdure.engine.drive import Drive
from perdure.engine.keyed_calls import CtxCall
from perdure.engine.timers_and_signals import Wait
from perdure.errors import (
    InvalidInput,
    LeaseHeld,
    PerdureError,
    PersistenceError,
    RunCancelled,
    RunConflict,
    RunFinished,
    RunNotFound,
    StepFailed,
)
from perdure.model.ids import random_bytes
from perdure.model.journal import Entry, OpenChild
from perdure.model.records import NewRun, RunRow, Signal
from perdure.options import StoredOptions, columns_of
from perdure.stepspec import StepPlan, spec_of

T_co = TypeVar("T_co", covariant=True)

# How many children are read or cancelled at once when their parent ends.
_AT_ONCE: Final = 100


class ChildWorkflow(Protocol):
    """What starting a child asks of its workflow. `Workflow`, which stands in a layer above, is the only implementation."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def hints(self) -> Hints: ...
    @property
    def definition_hash(self) -> str | None: ...
    def encode_input(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, bytes, Any]: ...


class ChildCall(msgspec.Struct, frozen=True):
    """A child as it was called."""

    key: str
    name: str
    plan: StepPlan
    workflow: ChildWorkflow
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Mapping[str, Any]
    is_detached: bool = False


async def _child() -> None:
    """Stands for a child's function: the plan of its step says only what it returns."""


_PLAN: Final = spec_of(_child).plan


def is_workflow(fn: Any) -> bool:
    """Whether this is a `Workflow`. Its class says so: a mock has every attribute."""
    return getattr(type(fn), "is_perdure_workflow", False) is True


def child_call(
    workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: str, options: Mapping[str, Any], *, detached: bool = False
) -> ChildCall:
    """The call of this child, checked."""
    if not is_workflow(workflow):
        raise TypeError(f"a child is a workflow, not {workflow!r}; call a function with ctx.step")
    options = dict(options)
    compensate = options.pop("compensate", None)
    if compensate is not None and not callable(compensate):
        raise TypeError(f"compensate= takes a function of the child's result, not {compensate!r}")
    if compensate is not None and detached:
        raise TypeError("a detached child outlives its parent, which cannot undo it; leave out detached=True or compensate=")
    unknown = options.keys() - StoredOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(sorted(StoredOptions.__annotations__))
        raise TypeError(f"a child does not take {', '.join(sorted(unknown))}; its options are compensate, key, {known}")
    definition: ChildWorkflow = workflow
    hints = definition.hints
    plan = msgspec.structs.replace(_PLAN, returns=hints.value, fails_with=hints.error, module=hints.module, compensate=compensate)
    return ChildCall(key, definition.name, plan, definition, args, kwargs, options, detached)


async def run_child(drive: Drive, child: ChildCall) -> Any:
    """The child's value; raises its error."""
    await drive.calls.admitted()
    return await _Waiter(drive, child).wait()


class Child(Generic[T_co]):
    """A child that `ctx.start_child` has started. Await it for its value, or its error; awaiting it again gives the same."""

    def __init__(self, drive: Drive, child: ChildCall) -> None:
        drive.calls.check()
        self._waiter = waiter = _Waiter(drive, child)
        self._is_delivered = False
        self._drive = drive
        self._started = waiter.started
        self._started.task = asyncio.get_running_loop().create_task(waiter.wait_in_task(), name=f"perdure-child:{self.id}")
        self._started.task.add_done_callback(_retrieve)

    @property
    def id(self) -> str:
        """The id of the child's run."""
        return self._started.id

    def __repr__(self) -> str:
        return f"<Child {self.id}>"

    def __await__(self) -> Generator[Any, None, T_co]:
        return self._wait().__await__()

    async def _wait(self) -> T_co:
        task = self._started.task
        if task is None:
            raise RuntimeError(f"child {self.id!r} has no task")  # it has one from the start
        self._started.is_awaited = True
        try:
            await join(self._drive, [task], asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # As `await task` does: the child is asked to stop before its task ends, unless it is detached.
            with self._drive.tasks.cancelling("body" if _is_given_up(self._drive) else "clock"):
                task.cancel()
            if self._drive.calls.closed is None:
                await asyncio.wait([task])
            raise
        is_again, self._is_delivered = self._is_delivered, True
        waiter = self._waiter
        if is_again and waiter.closed is not None and not waiter.closed.ok:  # another instance, so that tracebacks do not mix
            load_result(self._drive, waiter.key, waiter.plan, waiter.closed)
        return cast("T_co", task.result())

    def cancel(self) -> None:
        """Ask the child to stop. Awaiting it then raises `RunCancelled`, unless it ended before."""
        if self._started.is_over:
            return
        drive = self._drive
        drive.calls.check()
        drive.results.begin_work()  # the run stays in memory until the request is in the store
        cancelling = start_own_task(self._cancel_when_created())
        drive.children.requests.add(cancelling)
        cancelling.add_done_callback(self._cancel_sent)

    async def _cancel_when_created(self) -> None:
        await asyncio.wait([self._started.created])
        if not self._started.is_over:
            await _runs_of(self._drive).cancel(self.id)

    def _cancel_sent(self, cancelling: asyncio.Future[None]) -> None:
        drive = self._drive
        drive.children.requests.discard(cancelling)
        drive.results.running -= 1
        drive.results.look_soon()
        if not cancelling.cancelled() and isinstance(error := cancelling.exception(), PerdureError):
            with contextlib.suppress(asyncio.CancelledError):  # there is no body here to be told
                drive.stop_because(error)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a handle, so that asyncio does not report it: it is recorded, and the end of the body looks at it."""
    if not task.cancelled():
        task.exception()


def _is_given_up(drive: Drive) -> bool:
    """Whether the running task of the body was cancelled by its own code, or with the run, and not by a clock or at shutdown."""
    branch = drive.tasks.running
    return drive.calls.is_cancelling or (branch is not None and branch.is_cancelled_by_body)


def _runs_of(drive: Drive) -> ChildRuns:
    runs = drive.children.runs
    if runs is None:
        raise RuntimeError(f"run {drive.run.id!r} is only replayed, and starts no child")
    return runs


class _Waiter:
    """One call of a child: starts it if it is not recorded, and waits for its outcome."""

    def __init__(self, drive: Drive, child: ChildCall) -> None:
        self._drive = drive
        self._child = child
        self._is_restarted = False
        # Encoded now: the body may change its arguments, and an input that does not fit is refused before anything is written.
        is_new = not drive.calls.is_known(child.key)
        self._input = child.workflow.encode_input(drive.codec, child.args, child.kwargs) if is_new else None
        self._call = call = drive.calls.begin(child.key, "child")
        compared = (child.args, child.kwargs) if child.kwargs else child.args
        self._args_hash = drive.codec.checksum(compared) if compared and drive.compares_arguments else None
        parent_key, chosen = drive.children.name(child.key), child.options.get("id")
        own_id = drive.children.default_id(parent_key) if chosen is None else drive.children.chosen_id(chosen, parent_key)
        self._opened = self._take_opened(parent_key, is_chosen=chosen is not None)
        self._info = (
            OpenChild(own_id, child.is_detached, is_compensated=child.plan.compensate is not None)
            if self._opened is None
            else read_open_child(drive, self._opened)
        )
        self.started = StartedChild(
            child.key, parent_key, self._info.id, self._info.detached, 0 if self._opened is None else self._opened.seq
        )
        # An earlier attempt asked the child to stop before it recorded that the call was cancelled.
        self._is_cancel_sent = call.was_cancelled
        self._consume: int | None = None
        self.key, self.plan = child.key, child.plan
        # The entry with its outcome.
        self.closed: Entry | None = None
        call.unwind = self._give_up
        drive.children.started.append(self.started)

    def _take_opened(self, parent_key: str, *, is_chosen: bool) -> Entry | None:
        """The open entry of this call: the last one, if the child was started again after an earlier attempt had given it up.

        The child of another run, from whose journal this run begins, is not ours.
        """
        drive, calls, key = self._drive, self._drive.calls, self._child.key
        opened = calls.take_opened(key)
        while (
            opened is not None and not is_chosen and not drive.children.is_own_id(read_open_child(drive, opened).id, parent_key)
        ):
            opened = calls.take_opened(key)
        following = calls.opened.get(key)
        while opened is not None and following and read_open_child(drive, following[0]).id == read_open_child(drive, opened).id:
            opened, self._is_restarted = calls.take_opened(key), True
        return opened

    async def wait_in_task(self) -> Any:
        """As `wait`, in a task of its own, which goes on when the function of the body has ended."""
        branch = self._call.branch = self._drive.tasks.running
        if branch is not None:
            branch.outlives_function = True
        return await self.wait()

    async def wait(self) -> Any:
        drive, child, call = self._drive, self._child, self._call
        results = drive.results
        entry = results.take() if results.queue and results.is_next(child.key) and not call.was_cancelled else None
        try:
            if entry is None:
                with call:
                    if not drive.calls.may_go_ahead(call):
                        entry = await drive.calls.turn(call)
                    if entry is None:
                        return await self._wait_live()
            self.started.is_over = True
            self.closed = entry
        finally:
            self.started.note_created()
        if drive.publisher.subscribers:
            await drive.publisher.publish_replayed_step(child, entry)
        return replay_step(drive, child.key, child.plan, entry, self._args_hash)

    async def _wait_live(self) -> Any:
        drive, child = self._drive, self._child
        self._is_cancel_sent = False  # unlike the earlier attempt, this one goes on
        drive.results.begin_work()
        try:
            ok, payload = await self._find_outcome()
        except asyncio.CancelledError:
            await self._give_up()
            await self._call.wait_to_leave()
            raise
        finally:
            drive.results.running -= 1
        opened = self._opened
        for stale in drive.waits.take_rows(self.started.address):
            drive.recorder.consume(stale.seq)
        entry = drive.recorder.append(
            child.key,
            child.name,
            kind="child",
            ok=ok,
            payload=payload,
            args_hash=self._args_hash,
            started_at=drive.clock.now() if opened is None else opened.started_at,
            ended_at=drive.clock.now(),
            consume=self._consume,
        )
        self.started.is_over = True
        if not drive.results.reaches_body_at_once(entry):
            entry = await drive.calls.wait_for_delivery(self._call, entry)
        self.closed = entry
        error: Exception | None = None
        value: Any = None
        try:
            value = load_result(drive, child.key, child.plan, entry)
        except Exception as raised:  # noqa: BLE001 - the child's error, whatever it is
            error = raised
        if drive.publisher.subscribers:
            self._call.left()
            await drive.publisher.publish_step_result(child, entry, error)
        if error is not None:
            raise error
        return value

    async def _find_outcome(self) -> tuple[bool, bytes]:
        """What the child came to, as it is recorded. Starts the child if it does not exist."""
        drive = self._drive
        try:
            row = await (self._start() if self._opened is None else self._find())
            self.started.note_created()
            runs = _runs_of(drive)
            while row is not None and not self._is_over(row):
                if row.ended:
                    with contextlib.suppress(RunFinished, LeaseHeld):  # another retry was faster
                        await await_reply(runs.reopen(row.id))
                    row = await runs.get(row.id)
                    continue
                runs.resume(self._child.workflow, row)
                await self._wait_for_row()
                row = await runs.get(row.id)
        except (RunConflict, InvalidInput) as refusal:
            return False, store_exception(refusal)
        except PersistenceError as failure:
            drive.stop_because(failure)
        return _outcome_of(self._info.id, row)

    def _is_over(self, row: RunRow) -> bool:
        """Whether the child has ended, and not before a retry of its parent started it again. Raises `RunConflict`."""
        if row.parent_id != self._drive.run.id or row.parent_key != self.started.parent_key:
            reason = "no parent" if row.parent_id is None else f"{row.parent_id!r} as its parent (key {row.parent_key!r})"
            raise RunConflict(row.id, reason)
        if row.workflow not in (self._child.workflow.name, *self._child.workflow.aliases):
            raise RunConflict(row.id, f"workflow {row.workflow!r}")
        return row.ended and (row.status == "completed" or row.epoch != self._info.ended_epoch)

    async def _start(self) -> RunRow:
        """Record the intent, and create the child."""
        drive, child = self._drive, self._child
        if drive.children.is_retried(child.key, drive.recorder.journal):
            await self._note_earlier_end(await _runs_of(drive).get(self._info.id))
        self._open()
        if drive.publisher.subscribers:
            await drive.recorded()
            await drive.publisher.publish_step(events.StepStartEvent, child, 1)
        return await self._create()

    async def _note_earlier_end(self, row: RunRow | None) -> None:
        """The child is started again: if it has ended badly, or is about to since it was cancelled, it has to be reopened."""
        if row is not None and row.parent_id != self._drive.run.id:
            return  # the id is taken, which `_is_over` reports
        while row is not None and not row.ended and row.cancel_requested:
            await self._wait_for_row()
            row = await _runs_of(self._drive).get(row.id)
        if row is not None and row.ended and row.status != "completed":
            self._info = msgspec.structs.replace(self._info, ended_epoch=row.epoch)

    def _open(self) -> None:
        drive, child, now = self._drive, self._child, self._drive.clock.now()
        self._opened = drive.recorder.append(
            child.key,
            child.name,
            kind="child",
            phase="open",
            payload=msgspec.json.encode(self._info),
            args_hash=self._args_hash,
            started_at=now,
            ended_at=now,
        )
        self.started.seq = self._opened.seq

    async def _find(self) -> RunRow | None:
        """The child that an earlier attempt has recorded. It was perhaps not created; None if it was deleted after its end."""
        row = await _runs_of(self._drive).get(self._info.id)
        if self._call.was_cancelled and not self._is_restarted:
            await self._note_earlier_end(row)
            self._open()
            await self._drive.recorded()
            row = await _runs_of(self._drive).get(self._info.id)
        if row is None and not self._drive.waits.has_row(self.started.address):
            row = await self._create()
        return row

    async def _create(self) -> RunRow:
        drive, child = self._drive, self._child
        if not drive.may_start_now():
            await drive.may_start()
        encoded, digest, arguments = self._input or child.workflow.encode_input(drive.codec, child.args, child.kwargs)
        inherited = {"queue": drive.run.queue, "priority": drive.run.priority}
        new = NewRun(
            id=self._info.id,
            workflow=child.workflow.name,
            version=child.workflow.version,
            input=encoded,
            input_hash=digest,
            seed=random_bytes(),
            definition_hash=child.workflow.definition_hash,
            parent_id=drive.run.id,
            parent_key=self.started.parent_key,
            **{**inherited, **columns_of(child.options, drive.clock.now())},
        )
        return await await_reply(_runs_of(drive).create(child.workflow, new, arguments))

    async def _wait_for_row(self) -> None:
        """Return when a row about this child is in the inbox. It is consumed by the next record."""
        if self._consume is not None:
            self._drive.recorder.consume(self._consume)  # it was older than the child's last end
        self._consume = (await _wait_for_row(self._drive, self._call, self.started)).seq

    async def _give_up(self) -> None:
        """The body cancelled this call: the child is asked to stop, unless the run only leaves memory.

        A clock of asyncio, or the end of the process, may cancel a call too. The child then goes on until the body has ended.
        """
        is_open = self._drive.calls.closed is None and not self._is_cancel_sent and not self.started.is_detached
        if is_open and self.started.seq and self._is_given_up():
            self._is_cancel_sent = True
            await _cancel(self._drive, self.started)

    def _is_given_up(self) -> bool:
        branch = self._call.branch
        return self._drive.calls.is_cancelling or (branch is not None and branch.is_cancelled_by_body)


def read_open_child(drive: Drive, opened: Entry) -> OpenChild:
    try:
        return msgspec.json.decode(opened.payload, type=OpenChild)
    except msgspec.MsgspecError as reason:
        drive.corrupt(f"the child {opened.key!r}", reason)


def _outcome_of(child_id: str, row: RunRow | None) -> tuple[bool, bytes]:
    """The outcome of a child that has ended, as a step's is recorded: whether it is a value, and the bytes."""
    if row is None:
        return False, store_exception(RunNotFound(child_id))
    if row.status == "completed":
        return True, b"null" if row.outcome is None else row.outcome
    if row.status == "cancelled":
        return False, store_exception(RunCancelled(child_id))
    unknown = StepFailed(child_id, row.status, "its outcome is not known")
    return False, store_exception(unknown) if row.outcome is None else row.outcome


async def _wait_for_row(drive: Drive, call: CtxCall, child: StartedChild) -> Signal:
    """The next inbox row about this child. While it waits the run may leave memory."""
    future = call.park()

    def receive(signal: Signal) -> None:
        drive.children.arrived_at = drive.clock.now()
        if not future.done():
            future.set_result(signal)

    wait = Wait(child.seq, None, nothing, child.address, receive)
    drive.results.running -= 1
    try:
        drive.waits.add(wait)
        drive.results.note_call()
        signal: Signal = await drive.calls.parked(call, future)
    finally:
        drive.results.running += 1
        drive.waits.remove(wait)
    return signal


def _has_to_undo(drive: Drive) -> bool:
    """Return whether a child that is cancelled now compensates what it has done."""
    return drive.undoes


async def _cancel(drive: Drive, child: StartedChild) -> None:
    """Ask the child to stop, whatever cancels the caller meanwhile."""

    async def cancel() -> None:
        await _runs_of(drive).cancel(child.id, undo=_has_to_undo(drive))

    try:
        await run_to_end(cancel())
    except PersistenceError as failure:
        drive.stop_because(failure)


def are_over(drive: Drive) -> bool:
    """Whether there is nothing to be done about the children of a body that has ended."""
    started = all(child.is_over and (child.task is None or child.is_awaited) for child in drive.children.started)
    return started and not drive.children.requests and not any(_forgotten(drive))


def _forgotten(drive: Drive) -> Iterator[Entry]:
    """The open entries of children that the body, whose code has changed, did not ask for."""
    for key, entries in drive.calls.opened.items():
        yield from (opened for opened in entries if opened.kind == "child" and not drive.calls.is_recorded(key))


async def end_children(drive: Drive, *, must_cancel: bool) -> BaseException | None:
    """Return when every child of a body that has ended is over, but those that are detached; the error of one that failed.

    Children that the body has not awaited are awaited now. When one fails, and with `must_cancel` at once, the others are asked
    to stop. So are children that are recorded and that the body, whose code has changed, did not ask for.
    """
    children = drive.children
    _adopt_forgotten(drive)
    if not children.started:
        return None
    handles = [child for child in children.started if child.task is not None]
    detached = [child for child in handles if child.is_detached]
    if detached:
        await join(drive, [child.created for child in detached], asyncio.ALL_COMPLETED)
    attached = [(child, child.task) for child in handles if not child.is_detached and child.task is not None]
    error: BaseException | None = None
    if not must_cancel:
        await join(drive, [task for _, task in attached if not task.done()], asyncio.FIRST_EXCEPTION)
        error = next((found for child, task in attached if (found := _failure(child, task)) is not None), None)
    pending = [task for _, task in attached if not task.done()]
    for task in pending:
        cancel_by_ctx(task)
    await join(drive, pending, asyncio.ALL_COMPLETED)
    if children.requests:
        await join(drive, list(children.requests), asyncio.ALL_COMPLETED)
    left = [child for child in children.started if not child.is_over and not child.is_detached]
    if left and children.runs is not None:
        await _end_given_up(drive, left)
    return error


def _adopt_forgotten(drive: Drive) -> None:
    """Count the children among those of the body that it did not ask for."""
    for opened in list(_forgotten(drive)):
        info, parent_key = read_open_child(drive, opened), drive.children.name(opened.key)
        drive.children.started.append(StartedChild(opened.key, parent_key, info.id, info.detached, opened.seq))


def _failure(child: StartedChild, task: asyncio.Future[Any]) -> BaseException | None:
    """The error of a child that nothing has awaited."""
    return task.exception() if task.done() and not task.cancelled() and not child.is_awaited else None


async def _end_given_up(drive: Drive, children: Sequence[StartedChild]) -> None:
    """Ask these children to stop, and return when they have ended. The run may leave memory meanwhile."""
    rows = await _each(drive, children, _runs_of(drive).get)
    running = [child for child, row in rows if row is not None and not row.ended and row.parent_id == drive.run.id]
    await _each(drive, running, partial(_runs_of(drive).cancel, undo=_has_to_undo(drive)))
    for child in running:
        await _see_end(drive, child)


async def read_outcome(drive: Drive, opened: Entry) -> Entry | None:
    """Return what would be recorded of a child that has completed although its parent has not recorded that."""
    row = await _runs_of(drive).get(read_open_child(drive, opened).id)
    if row is None or row.status != "completed" or row.parent_id != drive.run.id:
        return None
    return msgspec.structs.replace(opened, phase="close", payload=_outcome_of(row.id, row)[1])


async def _each(drive: Drive, children: Sequence[StartedChild], verb: Any) -> list[tuple[StartedChild, Any]]:
    """What the verb gives for each of these children, asked for in few turns."""
    replies: list[tuple[StartedChild, Any]] = []
    for first in range(0, len(children), _AT_ONCE):
        batch = children[first : first + _AT_ONCE]
        asked = [start_own_task(_call(verb, child.id)) for child in batch]
        drive.results.begin_work()
        try:
            await asyncio.wait(asked)
            replies += zip(batch, [each.result() for each in asked], strict=True)
        except PersistenceError as failure:
            drive.stop_because(failure)
        finally:
            drive.results.running -= 1
    return replies


async def _call(verb: Any, run_id: str) -> Any:
    return await verb(run_id)


async def _see_end(drive: Drive, child: StartedChild) -> None:
    """Return when this child has ended or was deleted. Nothing is recorded but that its inbox rows were consumed."""
    call = drive.calls.begin(f"{child.parent_key}\0end", "child")
    call.was_cancelled = True  # so that the journal does not note it if it is cancelled
    with call:
        drive.results.begin_work()
        try:
            while (row := await _runs_of(drive).get(child.id)) is not None and not row.ended:
                drive.recorder.consume((await _wait_for_row(drive, call, child)).seq)
            child.is_over = True
        except asyncio.CancelledError:
            await call.wait_to_leave()
            raise
        except PersistenceError as failure:
            drive.stop_because(failure)
        finally:
            drive.results.running -= 1
