"""Children: runs that a body starts and waits for, as in a TaskGroup.

A child is recorded under a key. Its open entry, which holds its id, is in the store before the child is created; its close entry
holds its outcome as that of a step is held. Between the two the parent waits for the inbox row that the child's end puts into its
inbox, and need not be in memory. What counts is the child's own row, which is read when the inbox row arrives and whenever the
parent is driven again: a parent cannot miss an end, whatever became of the inbox row.

A child that the body gives up (a race that it lost, a time limit, a cancelled task) is asked to stop. That is an entry, like the
end of a cancelled step, and the call waits for it: so a replay gives it up again, and a run that goes live after a crash asks
again. `end_children` sees to the rest when the function has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import msgspec

from perdure import events
from perdure.aio.own_tasks import start_own_task
from perdure.aio.pending_write import await_reply
from perdure.body.calls import Call
from perdure.codec import Codec
from perdure.codec.outcomes import Hints, store_exception
from perdure.ctx_calls.step_calls import compare_arguments, load_result
from perdure.engine.child_runs import ChildRuns, StartedChild
from perdure.engine.drive import Drive
from perdure.engine.event_publisher import EventPublisher
from perdure.engine.timers_and_signals import Wait, nothing
from perdure.errors import (
    InvalidInput,
    LeaseHeld,
    PerdureError,
    RunCancelled,
    RunConflict,
    RunFinished,
    RunNotFound,
    StepFailed,
)
from perdure.model.ids import random_bytes
from perdure.model.journal import Entry, OpenChild, entries_in_force
from perdure.model.records import NewRun, RunRow, Signal
from perdure.options import StoredOptions, columns_of
from perdure.stepspec import StepPlan, spec_of

T_co = TypeVar("T_co", covariant=True)

# How many children are read or cancelled at once when their parent ends.
_AT_ONCE: Final = 100


class ChildWorkflow(Protocol):
    """The workflow, as the start of a child sees it. `Workflow`, which stands in a layer above, is the only implementation."""

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
    """Return whether this is a `Workflow`. Its class says so: a mock has every attribute."""
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
    """Return the child's value; raise its error."""
    await drive.calls.admitted()
    call = CalledChild(drive, child)
    await drive.calls.ask(call)
    return call.result()


class Child(Generic[T_co]):
    """A child that `ctx.start_child` has started. Await it for its value, or its error; awaiting it again gives the same."""

    def __init__(self, drive: Drive, child: ChildCall) -> None:
        drive.calls.check()
        self._drive = drive
        self._call = call = CalledChild(drive, child)
        drive.calls.cursor.ask(call)
        drive.children.handles.append(call)

    @property
    def id(self) -> str:
        """The id of the child's run."""
        return self._call.started.id

    def __repr__(self) -> str:
        return f"<Child {self.id}>"

    def __await__(self) -> Generator[Any, None, T_co]:
        return self._wait().__await__()

    async def _wait(self) -> T_co:
        call, calls = self._call, self._drive.calls
        call.is_awaited = True
        if call.entry is None:
            calls.check()
            await calls.wait_for(call)
        if call.entry is None or call.entry.phase == "cancel":
            raise call.cancelled_by or asyncio.CancelledError
        if call.outcome is None:  # awaited before: another instance, so that tracebacks do not mix
            call.outcome = load_result(self._drive, call.key, call.child.plan, call.entry)
        return cast("T_co", call.result())

    def cancel(self) -> None:
        """Ask the child to stop. Awaiting it then raises `RunCancelled`, unless it ended before."""
        if self._call.started.is_over:
            return
        self._drive.calls.check()
        self._call.ask_to_stop()


class CalledChild(Call):
    """The call of a child: starts it if it is not recorded, and waits for its outcome."""

    __slots__ = ("_args_hash", "_consume", "_drive", "_info", "_input", "_task", "child", "is_awaited", "opened_child", "started")

    def __init__(self, drive: Drive, child: ChildCall) -> None:
        super().__init__(child.key, "child")
        self.context = contextvars.copy_context()
        self.child = child
        self._drive = drive
        # Encoded now: the body may change its arguments, and an input that does not fit is refused before anything is written.
        is_new = not drive.calls.cursor.is_known(child.key)
        self._input = child.workflow.encode_input(drive.codec, child.args, child.kwargs) if is_new else None
        drive.calls.use(child.key, "child")
        compared = (child.args, child.kwargs) if child.kwargs else child.args
        self._args_hash = drive.codec.checksum(compared) if compared and drive.compares_arguments else None
        parent_key, chosen = drive.children.name(child.key), child.options.get("id")
        own_id = drive.children.default_id(parent_key) if chosen is None else drive.children.chosen_id(chosen, parent_key)
        self._info = OpenChild(own_id, child.is_detached, is_compensated=child.plan.compensate is not None)
        self.started = StartedChild(child.key, parent_key, own_id, child.is_detached)
        # Whether the body awaits the handle that `ctx.start_child` gave.
        self.is_awaited = False
        # The entry with the child's id, once that is recorded.
        self.opened_child: Entry | None = None
        self._consume: int | None = None
        self._task: asyncio.Future[Any] | None = None
        drive.children.started.append(self.started)

    # On the host.

    def start(self) -> None:
        self._take_opened()
        self._drive.at_work.add(self)
        self._task = task = start_own_task(self._find_outcome())
        task.add_done_callback(self._found, context=self._drive.body.context)

    def stop(self) -> None:
        """The body gives the child up. It is asked to stop, unless it is detached, and that is recorded."""
        if self._task is not None:
            self._drive.body.on_host(self._task.cancel)

    def end_unstarted(self) -> None:
        self._take_opened()
        self._drive.at_work.add(self)
        self._task = task = start_own_task(self._give_up())
        task.add_done_callback(self._found, context=self._drive.body.context)

    def _take_opened(self) -> None:
        """Find out which child this call has started before: the last one, if it was started again under the same id.

        The child of another run, from whose journal this run begins, is not ours.
        """
        drive, chosen = self._drive, self.child.options.get("id")
        own = [
            entry
            for entry in self.opened
            if chosen is not None or drive.children.is_own_id(read_open_child(drive, entry).id, self.started.parent_key)
        ]
        if not own:
            return
        self.opened_child = own[-1]
        self._info = read_open_child(drive, own[-1])
        self.started.id, self.started.is_detached, self.started.seq = self._info.id, self._info.detached, own[-1].seq

    def ask_to_stop(self) -> None:
        """`Child.cancel`: the child's end will tell."""
        drive = self._drive
        cancelling = drive.body.on_host(start_own_task, self._cancel_when_created())
        drive.children.requests.add(cancelling)
        drive.at_work.add(cancelling)  # the run stays in memory until the request is in the store
        cancelling.add_done_callback(self._cancel_sent, context=drive.body.context)

    async def _cancel_when_created(self) -> None:
        await asyncio.wait([self.started.created])
        if not self.started.is_over:
            await _runs_of(self._drive).cancel(self.started.id)

    def _cancel_sent(self, cancelling: asyncio.Future[None]) -> None:
        drive = self._drive
        drive.children.requests.discard(cancelling)
        drive.at_work.discard(cancelling)
        drive.body.schedule()
        if not cancelling.cancelled() and isinstance(error := cancelling.exception(), PerdureError):
            drive.fail(error)

    def deliver(self, entry: Entry) -> None:
        self.started.note_created()
        super().deliver(entry)

    def dropped(self) -> None:
        self.started.note_created()
        if self._task is not None:
            self._drive.body.on_host(self._task.cancel)

    def failure(self) -> BaseException | None:
        """Return the error of a child that the function has not awaited."""
        return None if self.outcome is None or self.is_awaited else self.outcome[1]

    def _found(self, task: asyncio.Future[Any]) -> None:
        """The outcome of the child is known, or it was given up: record that."""
        drive = self._drive
        drive.at_work.discard(self)
        self.started.note_created()
        if drive.must_not_record or not drive.calls.is_asked(self):
            if not task.cancelled():
                task.exception()
        elif task.cancelled() and not self.is_cancelled:
            drive.note_cancelled_from_outside(f"child {self.key!r}")
        elif task.cancelled():
            self._task = giving_up = start_own_task(self._give_up())
            drive.at_work.add(self)
            giving_up.add_done_callback(self._found, context=drive.body.context)
        elif (failure := task.exception()) is not None:
            drive.fail(failure)
        else:
            self._record(task.result())
            drive.body.schedule()

    def _record(self, outcome: tuple[bool, bytes] | None) -> None:
        """Record the outcome; None if the child was given up."""
        drive, now = self._drive, self._drive.clock.now()
        if outcome is None:
            drive.record(self, phase="cancel", ok=False, name=self.child.name, started_at=now, ended_at=now)
            return
        ok, payload = outcome
        for stale in drive.waits.take_rows(self.started.address):
            drive.recorder.consume(stale.seq)
        self.started.is_over = True
        drive.record(
            self,
            name=self.child.name,
            ok=ok,
            payload=payload,
            args_hash=self._args_hash,
            started_at=now if self.opened_child is None else self.opened_child.started_at,
            ended_at=now,
            consume=self._consume,
        )

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        self.started.is_over = True
        compare_arguments(self._drive, self.key, entry, self._args_hash)
        return load_result(self._drive, self.key, self.child.plan, entry)

    def publish(self, publisher: EventPublisher, entry: Entry) -> None:
        publisher.publish_result(self, entry, self.child.name, self.child.plan.returns)

    async def _find_outcome(self) -> tuple[bool, bytes]:
        """Return what the child came to, as it is recorded. Starts the child if it does not exist."""
        drive = self._drive
        try:
            row = await (self._start() if self.opened_child is None else self._find())
            self.started.note_created()
            runs = _runs_of(drive)
            while row is not None and not self._is_over(row):
                if row.ended:
                    with contextlib.suppress(RunFinished, LeaseHeld):  # another retry was faster
                        await await_reply(runs.reopen(row.id))
                    row = await runs.get(row.id)
                    continue
                runs.resume(self.child.workflow, row)
                await self._wait_for_row()
                row = await runs.get(row.id)
        except (RunConflict, InvalidInput) as refusal:
            return False, store_exception(refusal)
        return _outcome_of(self._info.id, row)

    async def _give_up(self) -> None:
        """Ask the child to stop, if it was started and is not detached."""
        if self.opened_child is not None and not self.started.is_detached:
            await _runs_of(self._drive).cancel(self.started.id, undo=self._drive.undoes)

    def _is_over(self, row: RunRow) -> bool:
        """Return whether the child has ended, and not before a retry of its parent started it again. Raises `RunConflict`."""
        if row.parent_id != self._drive.run.id or row.parent_key != self.started.parent_key:
            reason = "no parent" if row.parent_id is None else f"{row.parent_id!r} as its parent (key {row.parent_key!r})"
            raise RunConflict(row.id, reason)
        if row.workflow not in (self.child.workflow.name, *self.child.workflow.aliases):
            raise RunConflict(row.id, f"workflow {row.workflow!r}")
        return row.ended and (row.status == "completed" or row.epoch != self._info.ended_epoch)

    async def _start(self) -> RunRow:
        """Record the intent, and create the child."""
        drive, child = self._drive, self.child
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
        drive, child, now = self._drive, self.child, self._drive.clock.now()
        self.opened_child = drive.recorder.append(
            child.key,
            child.name,
            kind="child",
            phase="open",
            payload=msgspec.json.encode(self._info),
            args_hash=self._args_hash,
            started_at=now,
            ended_at=now,
        )
        self.opened.append(self.opened_child)
        self.started.seq = self.opened_child.seq

    async def _find(self) -> RunRow | None:
        """Return the child that an earlier attempt has recorded. Create it if that was not done; None if it was deleted."""
        row = await _runs_of(self._drive).get(self._info.id)
        if row is None and not self._drive.waits.has_row(self.started.address):
            row = await self._create()
        return row

    async def _create(self) -> RunRow:
        drive, child = self._drive, self.child
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
        drive = self._drive
        if self._consume is not None:
            drive.recorder.consume(self._consume)  # it was older than the child's last end
        drive.at_work.discard(self)
        # At work again as soon as the row arrives: the run must not leave memory before this goes on.
        wait, arrived = open_wait(drive, self.started, partial(drive.at_work.add, self))
        drive.body.schedule()
        try:
            self._consume = (await arrived).seq
        finally:
            drive.waits.remove(wait)
            drive.at_work.add(self)


def _runs_of(drive: Drive) -> ChildRuns:
    runs = drive.children.runs
    if runs is None:
        raise RuntimeError(f"run {drive.run.id!r} is only replayed, and starts no child")
    return runs


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


def open_wait(drive: Drive, child: StartedChild, on_arrival: Callable[[], None]) -> tuple[Wait, asyncio.Future[Signal]]:
    """Open a wait for the next inbox row about this child."""
    arrived: asyncio.Future[Signal] = asyncio.get_running_loop().create_future()

    def receive(signal: Signal | None) -> None:
        drive.children.arrived_at = drive.clock.now()
        on_arrival()
        if not arrived.done() and signal is not None:
            arrived.set_result(signal)

    wait = Wait(child.seq, None, receive, child.address, is_immediate=True)
    drive.waits.add(wait)
    return wait, arrived


async def wait_for_any(drive: Drive, calls: Sequence[Call]) -> None:
    """Return when the entry of one more of these calls is delivered, for the closing of the run."""
    waiting = [call for call in calls if call.entry is None]
    if not waiting:
        return
    delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for call in waiting:
        call.waiters.append(delivered)
    await drive.wait_to_close(delivered)


def are_over(drive: Drive) -> bool:
    """Return whether there is nothing to be done about the children of a body that has ended."""
    children = drive.children
    is_over = all(child.is_over for child in children.started) and all(call.is_awaited for call in children.handles)
    return is_over and not children.requests and not any(_forgotten(drive))


def _forgotten(drive: Drive) -> Iterator[Entry]:
    """Return the open entries of children that the function, whose code has changed, did not ask for."""
    if not drive.is_resumed:
        return
    started = {child.seq for child in drive.children.started}
    last = {entry.key: entry for entry in entries_in_force(drive.recorder.journal) if entry.kind == "child"}
    yield from (entry for entry in last.values() if entry.phase == "open" and entry.seq not in started)


async def end_children(drive: Drive, *, must_cancel: bool) -> BaseException | None:
    """Return when every child of a function that has ended is over, but those that are detached; the error of one that failed.

    Children that the function has not awaited are awaited now. When one fails, and with `must_cancel` at once, the others are
    asked to stop. So are children that are recorded and that the function, whose code has changed, did not ask for.
    """
    children = drive.children
    _adopt_forgotten(drive)
    if not children.started:
        return None
    calls = [call for call in drive.calls.cursor.asked.values() if isinstance(call, CalledChild)]
    attached = [call for call in calls if not call.started.is_detached]
    error = next((found for call in children.handles if (found := call.failure()) is not None), None)
    for call in attached:
        if error is None and not must_cancel:
            await wait_for_any(drive, attached)
            error = next((found for call in attached if (found := call.failure()) is not None), None)
    for call in attached:
        if call.entry is None and not call.is_cancelled:
            call.is_cancelled = True
            call.stop()
    for call in attached:
        await wait_for_any(drive, [call])
    for pending in [*(call.started.created for call in calls if call.started.is_detached), *children.requests]:
        await drive.wait_to_close(pending)
    left = [child for child in children.started if not child.is_over and not child.is_detached]
    if left and children.runs is not None:
        await _end_given_up(drive, left)
    return error


def _adopt_forgotten(drive: Drive) -> None:
    """Count the children among those of the body that it did not ask for."""
    for opened in list(_forgotten(drive)):
        info, parent_key = read_open_child(drive, opened), drive.children.name(opened.key)
        drive.children.started.append(StartedChild(opened.key, parent_key, info.id, info.detached, opened.seq))


async def _end_given_up(drive: Drive, children: Sequence[StartedChild]) -> None:
    """Ask these children to stop, and return when they have ended. The run may leave memory meanwhile."""
    rows = await _each(children, _runs_of(drive).get)
    running = [child for child, row in rows if row is not None and not row.ended and row.parent_id == drive.run.id]
    await _each(running, partial(_runs_of(drive).cancel, undo=drive.undoes))
    for child in running:
        while (row := await _runs_of(drive).get(child.id)) is not None and not row.ended:
            wait, arrived = open_wait(drive, child, nothing)
            try:
                await drive.wait_to_close(arrived)
            finally:
                drive.waits.remove(wait)
            drive.recorder.consume(arrived.result().seq)
        child.is_over = True


async def read_outcome(drive: Drive, opened: Entry) -> Entry | None:
    """Return what would be recorded of a child that has completed although its parent has not recorded that."""
    row = await _runs_of(drive).get(read_open_child(drive, opened).id)
    if row is None or row.status != "completed" or row.parent_id != drive.run.id:
        return None
    return msgspec.structs.replace(opened, phase="close", payload=_outcome_of(row.id, row)[1])


async def _each(children: Sequence[StartedChild], verb: Any) -> list[tuple[StartedChild, Any]]:
    """Return what the verb gives for each of these children, asked for in few turns."""
    replies: list[tuple[StartedChild, Any]] = []
    for first in range(0, len(children), _AT_ONCE):
        batch = children[first : first + _AT_ONCE]
        replies += zip(batch, await asyncio.gather(*(verb(child.id) for child in batch)), strict=True)
    return replies
