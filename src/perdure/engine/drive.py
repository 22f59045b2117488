"""Driving one attempt of a run: the body runs from the top, and recorded results are delivered to it again.

A `Drive` owns the body's task and everything around it: `Calls` (what the body asked for), `ResultQueue` (when a result reaches
it), `Recorder` (what the store has), `Waits` (timers and signals), `BodyTasks` (what the body's tasks do). It ends in one of six
ways: the body ended, the run suspended, it was cancelled, it was stopped (a deploy), it does not fit the code, or the attempt
failed (it could not be recorded, or its code called `sys.exit`). After that whatever the body still does is discarded, and every
ctx call in it raises.

Cancelling a run is a record like any other: it reaches the body when the store has acknowledged it, so a replay cancels the body
at the same place. The body may clean up with ctx calls for `cancel_grace`. Then, as after a failure, `closing` does what is left.

Cancelling a drive takes effect when the write in flight has its reply; only then is the lease released, or left to expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, Literal, NoReturn, Protocol

import msgspec

from perdure.aio.interrupts import describe_interrupt, is_for_process
from perdure.aio.own_tasks import body_context, start_own_task
from perdure.aio.pending_write import await_reply, run_to_end
from perdure.codec.outcomes import Ending, Hints, outcome_of, run_ending
from perdure.engine.body_tasks import BodyTask, BodyTasks, begun, cancel_by_ctx, first_step, note_tasks
from perdure.engine.child_runs import Children, ChildRuns, cancel_open_children
from perdure.engine.endings import (
    StartingOver,
    StartOver,
    can_leave_memory,
    end_tasks,
    ending_of_body,
    ending_of_cancelled_run,
    ending_of_dead_run,
    open_children,
    start_over_in,
)
from perdure.engine.event_publisher import EventPublisher
from perdure.engine.heartbeat import Heartbeat, HeldLease
from perdure.engine.inbox_reader import InboxReader
from perdure.engine.keyed_calls import Calls, CtxCall, raised_by
from perdure.engine.progress import ProgressReporter
from perdure.engine.recorder import Recorder, Unrecorded
from perdure.engine.replay_order import ResultQueue
from perdure.engine.step_cache import CachedKeys, StepCaching
from perdure.engine.streams import Streams, emit_in_step
from perdure.engine.subscriptions import Subscriptions
from perdure.engine.timers_and_signals import Waits
from perdure.errors import (
    CANCEL_KEY,
    COMPENSATION_PREFIX,
    ChildrenOpen,
    ChildStuck,
    InvalidInput,
    LeaseLost,
    NotUndone,
    OnChange,
    PerdureError,
    PerdureWarning,
    PersistenceError,
    RunCancelled,
    RunDiverged,
    SnapshotCorrupt,
    ValueNotStorable,
)
from perdure.model.clock import Clock, Timer
from perdure.model.durations import MICROSECOND, moment
from perdure.model.idempotency import IdempotencyKeys
from perdure.model.journal import CancelPoint, Entry, JournalIndex
from perdure.model.logs import log, run_fields
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from perdure.model.records import (
    Claim,
    NewInput,
    Pulse,
    columns_after_continue,
    deadline_in_force,
    failure_pause,
    misfit_pause,
    problem_text,
)
from perdure.options import EngineSettings, Options
from perdure.result import Err, Outcome, Suspended
from perdure.snapshots.consistent_view import View
from perdure.snapshots.effects import effects_in, find_cancel_request
from perdure.stepspec import StepInfo, current
from perdure.store import Store, StreamStore, require

# After how many microseconds a cancelled run looks again whether its children have ended.
_LOOK_AT_CHILDREN_AGAIN: Final = MICROSECOND // 2
# How many of them it asks the store about, to find one that cannot end.
_MOST_CHILDREN_LOOKED_AT: Final = 100


class BodyClosing(Protocol):
    """What is left to do when a body has ended."""

    def is_needed(self, result: Any, /) -> bool:
        """Whether there is something to do before the run ends with this result."""
        ...

    async def close(self, own: BodyTask, result: Any, /) -> Any:
        """Do it, in this task of the body, and give the result of the run."""
        ...

    def unreached(self) -> list[str]:
        """Return the keys of what would have to be undone and cannot be, because the body does not reach it."""
        ...


class Drive:
    """One attempt of one run."""

    # It has more attributes than Python keeps in an object without a dict.
    __slots__ = (
        "__weakref__",
        "_attention",
        "_body",
        "_cancel_request",
        "_cancel_requested",
        "_cancel_timer",
        "_closing_task",
        "_deadline",
        "_deadline_timer",
        "_ending",
        "_failure",
        "_heartbeat",
        "_held",
        "_hints",
        "_is_cancel_recorded",
        "_is_drain_over",
        "_is_late",
        "_is_misfit",
        "_is_request_read",
        "_is_time_limit_noted",
        "_lease",
        "_linger_timer",
        "_loop",
        "_main",
        "_must_suspend",
        "_progress",
        "_reading_request",
        "_store",
        "_unreadable",
        "cached_keys",
        "caching",
        "calls",
        "children",
        "clock",
        "closing",
        "codec",
        "compares_arguments",
        "encode_input",
        "executing",
        "idempotency_keys",
        "inbox",
        "is_continued",
        "is_resumed",
        "is_strict",
        "must_stop",
        "options",
        "problem",
        "publisher",
        "rebuilds_errors",
        "recorder",
        "reference",
        "results",
        "run",
        "settings",
        "streams",
        "tasks",
        "undoes",
        "waits",
    )

    def __init__(  # noqa: PLR0915 - one line for each part of the drive
        self,
        body: Callable[[Drive], Coroutine[Any, Any, Any]],
        hints: Hints,
        claim: Claim,
        settings: EngineSettings,
        options: Options,
        store: Store | None = None,
        *,
        heartbeat: Heartbeat | None = None,
        ttl: float = 0.0,
        asked_at: float = 0.0,
        subscriptions: Subscriptions | None = None,
        retired: Collection[str] = (),
        clock: Clock | None = None,
        child_runs: ChildRuns | None = None,
    ) -> None:
        self.run = claim.run
        self.settings = settings
        self.options = options
        self.codec = settings.codec
        self.clock = settings.clock if clock is None else clock
        self.is_strict = options.strict if options.strict is not None else store is not None
        # Whether the arguments of a step are compared with those that are recorded, now or when the run is resumed.
        is_resumable = store is not None or options.on_event is not None or options.cache is not None
        self.compares_arguments = is_resumable and options.on_changed_arguments != "ignore"
        # Whether what is recorded and then raised is raised as a replay raises it. Otherwise nothing is ever replayed.
        self.rebuilds_errors = is_resumable or bool(claim.journal)
        self._body = body
        self._hints = hints
        self._lease = claim.lease
        self._store = store
        self._loop = asyncio.get_running_loop()
        # Whether anything was recorded before this attempt.
        self.is_resumed = bool(claim.journal)
        recorded, self._unreadable = _readable(claim, owes_imported=options.on_divergence == "stop")
        if options.on_divergence == "run":
            recorded.owed.clear()
            recorded.owed_after.clear()
        self._look_at_requests(claim, recorded)
        self.children = Children(claim.run, child_runs, recorded.undone)
        self.waits = self._new_waits(claim)
        self.tasks = self._new_tasks()
        self.results = self._new_results(recorded)
        # Whether the journal says that a clock which it does not know has cancelled something. Once is enough.
        self._is_time_limit_noted = "" in recorded.cancelled
        self.waits.on_change = self.tasks.changed = self.results.look_soon
        self.calls = Calls(
            claim.run.id,
            recorded,
            self.tasks,
            self.results,
            self.waits,
            retired,
            on_cancelled=self._note_cancelled,
            on_misfit=self.misfit,
        )
        self.idempotency_keys = IdempotencyKeys(claim.run.id, claim.run.generation, recorded.intents, recorded.undone)
        self.cached_keys = CachedKeys(self.calls, self.results)
        self.publisher = EventPublisher(self, options.on_event, Subscriptions() if subscriptions is None else subscriptions)
        self.caching = None if options.cache is None else StepCaching(options.cache, self.clock)
        journal, pulsed = list(claim.journal), self._pulsed
        self.recorder = Unrecorded(journal) if store is None else self._new_recorder(store, journal, pulsed)
        for row in claim.inbox:
            if row.name == CANCEL_WITHOUT_UNDO and row.seq != self._cancel_request:
                self.recorder.consume(row.seq)  # void, or repeated: it must not come back to life
        self.waits.unrecorded = self.recorder.consuming
        # Step functions that are running right now: the start of each attempt by the step's key. A step that removes itself
        # calls `look_whether_drained`. The heartbeat's thread copies it.
        self.executing: dict[str, int] = {}
        self._held: HeldLease | None = None
        self._heartbeat = heartbeat
        if heartbeat is not None:
            tasks, max_blocked = self.tasks, settings.max_blocked
            self._held = HeldLease(
                claim, ttl, asked_at, self.clock, pulsed, self._lost, self.executing, body=tasks, max_blocked=max_blocked
            )
            heartbeat.hold(self._held)
        self._main: asyncio.Task[None] | None = None
        # Done when there is something that `drive` has to deal with.
        self._attention: asyncio.Future[None] = self._loop.create_future()
        self._ending: Ending | StartOver | None = None
        # Whether the run starts over: this drive has ended it no more than a suspension does.
        self.is_continued = False
        # How arguments become the input of a run, as the workflow takes them; set by the body.
        self.encode_input: Callable[[tuple[Any, ...], dict[str, Any]], NewInput] | None = None
        self._failure: BaseException | None = None
        # Why the run is given back with a pause: it does not fit this code, or the attempt failed.
        self.problem: str | None = None
        self._is_misfit = False
        self._must_suspend = False
        # Whether no step may be started any more, because the run is being given back.
        self.must_stop = False
        self._is_drain_over = False
        # Set by the first call that leaves something to do at the end, such as a step with a compensation.
        self.closing: BodyClosing | None = None
        self._closing_task: asyncio.Task[None] | None = None
        # When a body that was cancelled has no more time to clean up.
        self._cancel_timer: asyncio.TimerHandle | None = None
        # When a parent that waits for more children may leave memory again.
        self._linger_timer: Timer | None = None
        self._prepare_to_show(claim)

    def _prepare_to_show(self, claim: Claim) -> None:
        # Made by the first `set_progress`.
        self._progress: ProgressReporter | None = None
        # Made by the first item that is emitted, or because an earlier drive has emitted some.
        has_items = bool(claim.item_counts) and self._store is not None
        self.streams: Streams | None = Streams(self, claim.item_counts) if has_items else None
        # What a step's function knows of the drive. Weak: the context of a step may outlive the run.
        self.reference = weakref.ref(self)

    def _look_at_requests(self, claim: Claim, recorded: JournalIndex) -> None:
        """Whether the run is to be cancelled: on request, or because its deadline has passed (then it `_is_late`)."""
        self._is_cancel_recorded = recorded.cancel_point is not None
        self._deadline = None if self._store is None else deadline_in_force(claim.run, claim.journal)
        self._deadline_timer: Timer | None = None
        # The seq of the inbox row that asks to cancel the run and to undo nothing, until it is consumed.
        self._cancel_request: int | None = None
        if claim.inbox:
            try:
                self._cancel_request = find_cancel_request(claim.inbox, claim.journal)
            except ValueError as reason:
                self._unreadable = SnapshotCorrupt(claim.run.id, "a request to cancel it", str(reason))
        is_requested = claim.run.cancel_requested or self._cancel_request is not None
        self._is_late = self._deadline is not None and self._deadline <= self.clock.now() and not is_requested
        # Whether a cancelled run compensates what it has done.
        self.undoes = self._cancel_request is None
        if recorded.cancel_point is not None:
            self._is_late = recorded.cancel_point.deadline is not None
            self.undoes = self.undoes and recorded.cancel_point.undo
        self._cancel_requested = is_requested or self._is_late or self._is_cancel_recorded
        # Whether the inbox was read since the run was asked to stop: how it is to stop may stand there.
        self._is_request_read = self._cancel_requested or self._store is None
        self._reading_request: asyncio.Future[None] | None = None

    def _new_waits(self, claim: Claim) -> Waits:
        waits = Waits(self.clock, claim.inbox, claim.inbox_seq, claim.run.updated_at)
        self.inbox: InboxReader | None = None
        if self._store is not None:
            self.inbox = InboxReader(self._store, self.run.id, self.clock, waits, self._stop_misfit)
            waits.read_inbox = self.inbox.read
        return waits

    def _new_tasks(self) -> BodyTasks:
        tasks = BodyTasks(self.run.seed)
        tasks.may_survive_exit = self._store is not None
        tasks.note_exit = self._note_exit
        tasks.note_time_limit = self._note_time_limit
        tasks.drive = self
        return tasks

    def _new_results(self, recorded: JournalIndex) -> ResultQueue:
        results = ResultQueue(
            self.tasks,
            self.clock,
            self.settings.unload_grace,
            recorded.closes,
            has_store=self._store is not None,
            on_live=self._went_live,
            on_rest=self._flush,
            on_idle=self._is_idle,
            find_divergence=self._find_divergence,
            on_diverged=self._stop_misfit,
            decide_patch=self._decide_patch,
            has_event=self.waits.has_due,
            next_event=self.waits.resolve_one,
        )
        results.last_at = self.run.began_at
        if self._cancel_requested:
            # The body comes to its first wait, as on a replay, and is cancelled there rather than before it began.
            results.is_live = False
        return results

    def _new_recorder(self, store: Store, journal: list[Entry], pulsed: Callable[[Pulse], None]) -> Recorder:
        return Recorder(
            store,
            self._lease,
            self.clock,
            journal,
            self.tasks,
            on_pulse=pulsed,
            on_failure=self._give_up,
            on_written=self._written,
            on_replaced=self._replaced,
        )

    @property
    def has_lease(self) -> bool:
        """Whether the run is in a store, and ours to drive."""
        return self._store is not None

    def result(self) -> Any:
        """The value of a run that has completed: a copy for a listener, as the waiter of the run has its own."""
        return outcome_of(self.codec, self.run, self._hints).unwrap()

    def set_progress(self, value: Any) -> None:
        """Show this value as the progress of the run. May be called in the thread of a step.

        Raises `StoreCapabilityError`, `ValueNotStorable`, and `Unloaded` or `RunFinished` when the run has left memory.
        """
        if self.is_closed:
            self.calls.refuse()
        if self._store is None:
            return
        store = require(self._store, "streams")
        payload, _ = self.codec.dump(value, path="progress")
        if self.calls.is_in_thread_of_body():
            self._show_progress(store, payload)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._show_progress, store, payload)

    def _show_progress(self, store: StreamStore, payload: bytes) -> None:
        if self.is_closed:
            return
        if self._progress is None:
            is_replaying: Callable[[], bool] = lambda: bool(self.results.queue) or not self.results.is_live  # noqa: E731
            self._progress = ProgressReporter(store, self._lease, self.run, is_replaying)
        self._progress.set(payload)

    @property
    def module(self) -> str:
        """The name of the module of the workflow's function."""
        return self._hints.module

    @property
    def epoch(self) -> int:
        """The epoch of the lease."""
        return self._lease.epoch

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that drives the run."""
        return self._loop

    @property
    def may_record(self) -> bool:
        """Whether what the body has done may be written. Not while results are missing: the code may have diverged."""
        return self.results.is_live and not self.calls.owed.missing

    def check_open(self) -> None:
        """Raise `Unloaded` or `RunFinished` when the run has left memory or ended."""
        if self.is_closed:
            self.calls.refuse()

    def open_streams(self) -> Streams | None:
        """The streams of the run; None without a store. Raises `StoreCapabilityError`."""
        if self.streams is None and self._store is not None:
            require(self._store, "streams")
            self.streams = Streams(self, {})
        return self.streams

    def emit_in_step(self, info: StepInfo, stream: str, item: Any, max_items: int) -> Awaitable[None]:
        """`current_step().emit`, in any thread."""
        return emit_in_step(self, info, stream, item, max_items)

    def view(self) -> View:
        """The run as it stands: everything that is recorded for certain."""
        return View(self.run, self.recorder.journal, self.recorder.acknowledged_length, self.waits.inbox)

    @property
    def is_closed(self) -> bool:
        """Whether ctx calls are refused, since the run has left memory or ended."""
        return self.calls.closed is not None

    @property
    def is_replaying(self) -> bool:
        """Whether recorded results are still being delivered."""
        return bool(self.results.queue)

    async def drive(self) -> Outcome[Any]:
        """Drive the run until it ends or suspends, and give its outcome. Raises when it had to give up."""
        try:
            outcome = await self._until_over()
        except asyncio.CancelledError:
            await run_to_end(self._abandon())
            ended = self._ending.outcome if isinstance(self._ending, Ending) and self.run.ended else None
            await self.publisher.publish_cancelled_drive(ended, self._failure)
            raise
        except BaseException as failure:
            self._failure = failure
            await run_to_end(self._let_go())
            await self.publisher.publish_failure(failure)
            raise
        finally:
            self._close("ended")
            if self._heartbeat is not None and self._held is not None:
                self._heartbeat.drop(self._held)
            if self._progress is not None:
                self._progress.stop()
            # Break the reference cycles, so that the drive is freed without the garbage collector.
            self._held = self._progress = self.streams = None
            self.children.runs = self.closing = None
            self.tasks.forget_owner()
            self.recorder.forget_owner()
        await self.publisher.publish_end(outcome)
        self._ending = None  # an error's traceback refers to the frames that it went through, and by that to the drive
        return outcome

    async def _until_over(self) -> Outcome[Any]:
        await self.publisher.publish_start()
        if self.run.attempts > self.settings.max_attempts:
            await cancel_open_children(self.children.runs, self.calls.opened, self.calls.is_recorded)
            return await self._finish(ending_of_dead_run(self.run, self.codec, self._hints))
        if self._unreadable is not None:
            self._stop_misfit(self._unreadable)
        else:
            if self.streams is not None and self._store is not None:
                await self.streams.load(require(self._store, "streams"), self.run, self.recorder.journal)
            self._start_body()
        while True:
            await self._attention
            if self._failure is not None:
                raise self._failure
            if self._ending is not None:
                return await self._finish(self._ending)
            if self.must_stop and (not self.executing or self._is_drain_over):
                return await self._give_back()
            self._attention = self._loop.create_future()
            if self._must_suspend:
                self._must_suspend = False
                suspended = await self._suspend()
                if suspended is not None:
                    return suspended

    def _attend(self) -> None:
        """Let `drive` look at what has changed."""
        if not self._attention.done():
            self._attention.set_result(None)

    def stop(self) -> None:
        """Start no step any more; when those that run have ended, or were given time enough, give the run back."""
        self.must_stop = True
        self._loop.call_later(self.settings.drain_after, self._drain_is_over)
        self.publisher.stop_waiting_after(self.settings.drain_after)
        self._attend()

    def _drain_is_over(self) -> None:
        self._is_drain_over = True
        self._attend()

    def cancel(self, *, undo: bool = True) -> None:
        """End the run as cancelled: CancelledError is raised at the body's waits, once it has every recorded result.

        A run in a store is not told `undo` here: the request is in its inbox.
        """
        self._cancel_requested = True
        if not undo:
            self.undoes = False
        if self._main is None:
            self.results.is_live = False  # as for a run that was to be cancelled when it was claimed
        if not self.results.is_live:
            return  # `_went_live` does it
        if self.results.queue:
            self.results.when_empty = self._record_cancel
        else:
            self._record_cancel()

    def _pass_deadline(self) -> None:
        """The time of the run is up: its body is cancelled like that of a cancelled run."""
        self._deadline_timer = None
        if not self._cancel_requested:
            self._is_late = self._is_request_read = True
            self.cancel()

    def look_at_inbox(self) -> None:
        """Somebody may have sent a signal: fetch what is new, unless nothing waits for one."""
        if self.inbox is not None:
            self.inbox.look()

    def may_start_now(self) -> bool:
        """Whether a step function may be called without waiting for anything."""
        return (
            not self.recorder.unacknowledged_open
            and not self.must_stop
            and not self.calls.is_refusing
            and (self._held is None or self._held.is_valid())
        )

    async def may_start(self) -> None:
        """Return when a step function may be called: every open entry is recorded, and the run is ours."""
        if self.recorder.unacknowledged_open:
            await self.recorder.acknowledged()
        if self.calls.is_refusing or (self._held is not None and not self._held.is_valid()):
            self._check_lease()
        if self.must_stop:
            await asyncio.get_running_loop().create_future()

    async def recorded(self) -> None:
        """Return when everything so far is recorded, and the run is ours."""
        await self.recorder.acknowledged()
        self._check_lease()

    def _check_lease(self) -> None:
        self.calls.check()
        if self._held is not None and not self._held.is_valid():
            self._lost()
            self.calls.refuse()

    def look_whether_drained(self) -> None:
        """A step function has ended, and the drive must stop when none is left."""
        if not self.executing:
            self._attend()

    def misfit(self, error: PerdureError) -> NoReturn:
        """The run does not fit this code: stop it without letting the body see why. It is tried again later, as it was."""
        self._stop_misfit(error)
        self.calls.refuse()

    def _stop_misfit(self, error: PerdureError) -> None:
        if self._failure is not None or self._ending is not None:
            return
        if self._cancel_requested and not self.undoes:
            self._ending = ending_of_cancelled_run(self.run, self._left_behind())
            self._close("unloaded")
            self._attend()
        elif self._store is None:
            self._ending = run_ending(self.codec, Err(error), self._hints)
            self._close("unloaded")
            self._attend()
        else:
            self._is_misfit = True
            self._give_up(error)

    def stop_because(self, failure: PerdureError) -> NoReturn:
        """Give up this attempt and let the body see nothing of it: the run is as it was, and is tried again after a pause."""
        self._give_up(failure)
        self.calls.refuse()

    def stop_at_exit(self, interrupt: KeyboardInterrupt | SystemExit, where: str) -> NoReturn:
        """The run's code exits: give up this attempt. Raises the interrupt if it is for the process, or if there is no store."""
        if self._store is None or is_for_process(interrupt):
            raise interrupt
        self.stop_because(describe_interrupt(self.run.id, where, interrupt))

    def react(self, choice: OnChange, error: PerdureError, what: str) -> None:
        """Do with a mismatch what the option says, and tell listeners of it. `what` has changed for all runs of the workflow."""
        if choice == "error":
            self.misfit(error)
        self.warn_or_raise(choice, error, what)

    def warn_or_raise(self, choice: OnChange, error: PerdureError, what: str) -> None:
        """As `react`, for an error that the body may handle."""
        if choice == "error":
            raise error
        if choice == "warn":
            self.publisher.publish_warning(str(error))
            self._warn_of_change(error, what)

    def _warn_of_change(self, error: PerdureError, what: str) -> None:
        """Warn once for all runs of the workflow: after a deploy there may be thousands."""
        run, said = self.run, self.settings.said_changes
        change = run.workflow, run.version, what
        if said is not None and change in said:
            return
        if said is not None:
            said.add(change)
        if log.hasHandlers():  # otherwise it would be printed twice
            log.warning(
                "the code of workflow %r has changed, and its runs go on, such as %r: %s",
                run.workflow,
                run.id,
                error,
                extra=run_fields(run),
            )
        warnings.warn(str(error), PerdureWarning, stacklevel=3)

    def corrupt(self, what: str, reason: Exception) -> NoReturn:
        """Recorded data cannot be read back by this code."""
        self.misfit(SnapshotCorrupt(self.run.id, what, str(reason)))

    def start_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """End the body, so that the run starts over with these arguments.

        Raises `InvalidInput`, `ChildrenOpen`, and RuntimeError outside the body's own task. Then nothing has changed.
        """
        self.calls.check_place("continue_as")
        self.calls.check()
        if asyncio.current_task() is not self._main or self.encode_input is None:
            raise RuntimeError(
                f"ctx.continue_as was called in a task that the body of run {self.run.id!r} started; call it in the body itself"
            )
        new = self.encode_input(args, kwargs)
        still_open = open_children(self.recorder.journal)
        if still_open:
            raise ChildrenOpen(self.run.id, still_open)
        if self.closing is not None and (unreached := self.closing.unreached()):
            raise NotUndone(self.run.id, unreached)
        raise StartingOver(new)

    def note_gone(self, failed: Entry, classes: list[str]) -> None:
        """The error of this entry has a stand-in, since these classes are gone."""
        choice, is_handled_by_function = self.options.on_divergence, not failed.key.startswith(COMPENSATION_PREFIX)
        # Not for what was imported from a snapshot, unless that is wanted.
        if is_handled_by_function and (choice == "stop" or (choice is None and failed.epoch)):
            self.calls.note_gone(failed.key, classes)

    # From here on: how it starts, goes on and ends.

    def _start_body(self) -> None:
        note_tasks(self._loop)
        context = body_context()
        context.run(current.set, self.tasks)
        self._main = self._loop.create_task(begun(self._run_body()), context=context, name=f"perdure:{self.run.id}")
        if self._is_cancel_recorded:
            self.calls.owed.ask(CANCEL_KEY)
            self.results.ask(CANCEL_KEY, _Cancellation(self._cancel_body))
        if not self.results.is_live:
            self.results.look_soon()
        else:
            self._let_calls_through()
        if self._deadline is not None and not self._cancel_requested:
            self._deadline_timer = self.clock.call_at(self._deadline, self._pass_deadline)

    async def _run_body(self) -> None:
        try:
            await first_step()
            value = await self._body(self)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            if self._store is not None and not is_for_process(interrupt):
                self._note_exit(interrupt)
                return
            self._failure = interrupt
            self._attend()
            raise
        except BaseException as error:  # noqa: BLE001 - the body's end is recorded, whatever it is
            await self._end_function(Err(error))
        else:
            if self.calls.owed.missing:
                await self._end_function(value)
            else:
                self._function_ended(value)

    async def _end_function(self, result: Any) -> None:
        """The workflow's function has ended by itself. While recorded results are missing, its run does not end."""
        if self.calls.closed is None and self._closing_task is None and not self.calls.is_cancelling:
            if gone := self.calls.find_gone(result):
                self._stop_misfit(RunDiverged(self.run.id, None, (), gone, raised_by(result)))
            else:
                await self.calls.wait_to_end(result)
        self._function_ended(result)

    def _function_ended(self, result: Any) -> None:
        """The workflow's function has ended, or has no more time. What is left to do is done before the body has ended."""
        if self._closing_task is not None:
            return
        if not self.calls.is_cancelling:
            result = start_over_in(result) or result
        is_open = self.calls.closed is None and self._ending is None
        if not is_open or self.closing is None or not self.closing.is_needed(result):
            self._body_ended(result)
            return
        context = body_context()
        context.run(current.set, self.tasks)
        self._closing_task = closing = self._loop.create_task(begun(self._close_body(self.closing, result)), context=context)
        self.calls.admit_only(next(branch for branch in self.tasks.alive if branch.task is closing))
        self.results.look_soon()

    async def _close_body(self, closing: BodyClosing, result: Any) -> None:
        await first_step()
        own = self.tasks.running
        try:
            if own is not None:
                result = await closing.close(own, result)
        except BaseException as error:  # noqa: BLE001 - as above; nothing comes of it if the run is unloaded
            result = Err(error)
        self._body_ended(result)

    def _body_ended(self, result: Any) -> None:
        if self.calls.closed is None and self._ending is None:
            try:
                self._ending = ending_of_body(
                    result,
                    self.run,
                    self.calls,
                    self.codec,
                    self._hints,
                    is_strict=self.is_strict,
                    passed_deadline=self._deadline if self._is_late and self.undoes else None,
                    left=[] if self.undoes else self._left_behind(),
                    on_unknown_steps=partial(self.react, self.options.on_unknown_steps, what="steps that are not asked for"),
                )
            except BaseException as error:  # noqa: BLE001 - an interrupt in code of the result's own
                self._give_up(error)
            self.results.close()  # nothing reaches a body that has ended
        self._attend()

    def _left_behind(self) -> list[str]:
        """Return the keys of what a cancelled run has done and does not undo, because its caller asked for that."""
        try:
            return [effect.key for effect in effects_in(self.recorder.journal) if not effect.is_undone]
        except ValueError:  # the run ends all the same, as it was asked to
            return []

    async def _finish(self, ending: Ending | StartOver) -> Outcome[Any]:
        self._ending = ending
        self._close("ended")
        if self._cancel_request is not None and not isinstance(ending, StartOver):
            self.recorder.consume(self._cancel_request)
        if not self.undoes and isinstance(ending, Ending) and ending.status == "cancelled":
            await cancel_open_children(self.children.runs, self.calls.opened, self.calls.is_recorded, undo=False)
        if self.tasks.alive:
            await self._end_body()
        if self._progress is not None:
            await self._progress.flush()
        if isinstance(ending, StartOver):
            return await self._continue_as(msgspec.structs.replace(ending.new, deadline=self._deadline))
        try:
            try:
                await self.recorder.finish(ending.status, ending.payload)
            except ValueNotStorable as refusal:
                error = ValueNotStorable("value", f"it has {len(ending.payload):,} bytes ({refusal.reason})")
                ending = self._ending = run_ending(self.codec, Err(error), self._hints)
                await self.recorder.finish(ending.status, ending.payload)
        finally:  # cancelled meanwhile it may have ended all the same
            if self.recorder.has_let_go:
                self._stands(status=ending.status, outcome=ending.payload, wake_at=None)
                self.recorder.report_written()
        return ending.outcome if ending.status == "completed" else self.outcome_again(ending.outcome)

    def outcome_again(self, outcome: Outcome[Any]) -> Outcome[Any]:
        """This outcome of the drive for one more caller: errors are rebuilt for each, as for those who come later."""
        return outcome_of(self.codec, self.run, self._hints) if self.rebuilds_errors and isinstance(outcome, Err) else outcome

    async def _continue_as(self, new: NewInput) -> Outcome[Any]:
        """Let the run start over, due at once: another drive goes on with it."""
        try:
            await self.recorder.continue_as(new)
        except ValueNotStorable as refusal:
            reason = f"it has {len(new.input):,} bytes ({refusal.reason})"
            return await self._finish(run_ending(self.codec, Err(InvalidInput(self.run.workflow, reason)), self._hints))
        finally:
            if self.recorder.has_let_go:
                self.run = msgspec.structs.replace(self.run, **columns_after_continue(self.run, new, self.clock.now()))
                self.is_continued = True
        return Suspended(self.run.id, moment(self.run.updated_at))

    async def _give_back(self, wake_at: int | None = None) -> Outcome[Any]:
        await self._end_body()
        await self._release(wake_at)
        return Suspended(self.run.id, moment(self.clock.now() if wake_at is None else wake_at))

    async def _suspend(self) -> Outcome[Any] | None:
        if self._progress is not None:
            await self._progress.flush()
            if self._attention.done():
                return None  # something happened meanwhile
        if not self.results.is_idle or self.waits.has_due():
            return None
        if self._cancel_requested:
            if self.undoes and (stuck := await self._find_stuck_child()) is not None:
                self._stop_misfit(stuck)
                return None
            # Suspended it would be due at once: it waits for its children, and they may need its place in the worker, or for the
            # next try of a compensation.
            next_try = None if self.waits.has_address else self._wake_at()
            return await self._give_back(self.clock.now() + _LOOK_AT_CHILDREN_AGAIN if next_try is None else next_try)
        # Until the store replies no wait is resolved and no call goes ahead: what the run waits for must not change meanwhile.
        self.waits.is_live = False
        wake_at, awaited = self._wake_at(), self.waits.addresses()
        self.calls.suspending = self._loop.create_future()
        try:
            signals = await self.recorder.suspend(wake_at, awaited)
        finally:
            suspending, self.calls.suspending = self.calls.suspending, None
            suspending.set_result(None)
            if self.recorder.has_let_go:
                self._stands(status="suspended", wake_at=wake_at, waiting_for=awaited)
            self.recorder.report_written()
        if signals:
            self.waits.is_live = True
            self.waits.receive(signals)
            return None
        await self._end_body()
        awaited_by_user = tuple(each.by_user for each in awaited)
        return Suspended(self.run.id, None if wake_at is None else moment(wake_at), awaited_by_user)

    async def _find_stuck_child(self) -> ChildStuck | None:
        """Return why a cancelled run cannot end, if one of its children cannot."""
        runs = self.children.runs
        if runs is None:
            return None
        waiting = [child for child in self.children.started if not child.is_over and not child.is_detached]
        for child in waiting[:_MOST_CHILDREN_LOOKED_AT]:
            row = await runs.get(child.id)
            if row is not None and not row.ended and row.problem is not None:
                return ChildStuck(self.run.id, row.id, row.problem)
        return None

    def _wake_at(self) -> int | None:
        """When the run must be in memory again: at the earliest deadline of its waits, or at its own."""
        child_at = None if self.children.runs is None else self.children.runs.wake_at()
        instants = [at for at in (self.waits.wake_at(), self._deadline, child_at) if at is not None]
        return min(instants, default=None)

    async def _let_go(self) -> None:
        """After a failure: nothing more is written; the run is given back, due after a pause, if the store lets us."""
        await self._end_body()
        await self.recorder.abandon()
        if self._progress is not None:
            self._progress.stop()
            await self._progress.wait()
        if self._store is None:
            self._stands(status="failed", wake_at=None)
            return
        # A drain does not wait for a store that has just failed, and a step may still run: the lease expires by itself.
        is_failing = self.must_stop and isinstance(self._failure, PersistenceError)
        if isinstance(self._failure, LeaseLost) or is_failing or self.executing:
            return
        self.problem = problem_text("unknown" if self._failure is None else self._failure)
        # Whatever a failing store raises now: the lease expires by itself, and the failure that is being raised says why.
        with contextlib.suppress(Exception):
            await await_reply(self._release_with_problem(self._store, self.problem))
            self.publisher.publish_release()

    def _release_with_problem(self, store: Store, problem: str) -> Awaitable[None]:
        """Give the run back, due after a pause. The attempt counts, unless the run does not fit the code: it did not fail."""
        if self._is_misfit:
            pause = misfit_pause(self.run.problem_count)
        elif self.run.attempts == self.settings.max_attempts:
            pause = 0.0  # the next claim ends it as dead; if the store refuses even that, there is a pause again
        else:
            pause = failure_pause(self.run.attempts)
        wake_at = self.clock.now() + round(pause * MICROSECOND)
        if self._deadline is not None and not self._cancel_requested:
            wake_at = min(wake_at, self._deadline)
        counts, now = not self._is_misfit, self.clock.store_now()
        return store.release(self._lease, wake_at=wake_at, problem=problem, counts_attempt=counts, now=now)

    async def _abandon(self) -> None:
        """The drive itself was cancelled: wait for the reply of the write in flight, record what is left, and release the run."""
        if self._failure is not None:
            await self._let_go()
            return
        await self._end_body()
        if self._store is None:
            self._stands(status="cancelled", wake_at=None)
        elif not self.recorder.has_let_go:
            with contextlib.suppress(PerdureError):  # its lease expires by itself
                await self._release()

    async def _release(self, wake_at: int | None = None) -> None:
        """Give the run back, due at this instant or at once. Not while a step of it still runs: then the lease ends by itself."""
        if self._progress is not None:
            if self.is_replaying:
                self._progress.stop()  # what a replay has set is older than what is stored
            await self._progress.flush()
        if not self.may_record:
            self.recorder.items.clear()  # the next replay emits them again
        if self.executing:  # and ignores its cancellation: a run that is given back is called again at once
            await self.recorder.record_rest()
            return
        await self.recorder.release(wake_at)
        self._stands(status="pending", wake_at=self.clock.now() if wake_at is None else wake_at)
        self.publisher.publish_release()

    def _stands(self, **changed: Any) -> None:
        """This is how the run stands in the store from now on."""
        self.run = msgspec.structs.replace(self.run, updated_at=self.clock.now(), **changed)

    async def _end_body(self) -> None:
        self._close("unloaded")
        if isinstance(self._failure, KeyboardInterrupt | SystemExit) and self._main is not None and self._main.done():
            self._main.exception()  # retrieved, since the loop has raised it already
        await end_tasks(self.run.id, self._main, self.tasks)

    def _close(self, why: Literal["unloaded", "ended"]) -> None:
        if self.calls.closed is None:
            self.calls.close(why)
            self.waits.close()
            for timer in (self._deadline_timer, self._cancel_timer, self._linger_timer):
                if timer is not None:
                    timer.cancel()
            self._deadline_timer = self._cancel_timer = self._linger_timer = None
            if self.inbox is not None:
                self.inbox.close()
            if self.streams is not None:
                self.streams.close()

    # What the parts of the drive report to it.

    def _went_live(self) -> None:
        if self.calls.closed is not None:
            return
        if self._cancel_requested and not self._is_cancel_recorded and self._closing_task is None:
            self.results.is_live = False  # until the body was cancelled and rests again
            self._record_cancel()
            return
        self._let_calls_through()
        self.results.look_soon()

    def _find_divergence(self) -> PerdureError | None:
        """The code must fit when the body was cancelled, too. A run that is to be cancelled need not fit before that."""
        is_cancelled_next = self._cancel_requested and not self._is_cancel_recorded
        return None if is_cancelled_next else self.calls.find_divergence()

    def _decide_patch(self) -> bool:
        return self.calls.decide_patch()

    def _let_calls_through(self) -> None:
        self.calls.go_live()
        self.waits.is_live = True

    def _is_idle(self) -> None:
        """Suspend the run if it may leave memory."""
        is_open = self.calls.suspending is None and self.calls.closed is None and self._ending is None
        if self._store is None or not is_open:
            return
        if self._cancel_requested and not self.calls.is_cancelling and self._closing_task is None:
            self._record_cancel()
        elif self.calls.is_cancelling and self._closing_task is None:
            self._flush()  # its time to clean up counts in memory
        elif self._stays_for_children():
            self._flush()
        elif can_leave_memory(self.tasks, self._wake_at(), self.clock.now(), self.settings.unload_grace):
            self._must_suspend = True
            self._attend()
        else:
            self._flush()

    def _stays_for_children(self) -> bool:
        """Whether the run stays in memory for its children: one is driven here, or one has ended and others may follow at once.

        Without that a run with a thousand children would be woken and replayed for each of them.
        """
        if self.children.runs is None or not self.waits.has_address:
            return False
        if self.children.runs.keeps_parent_in_memory():
            return True
        until = self.children.lingers_until(self.settings.unload_grace)
        if until is None or until <= self.clock.now():
            return False
        if self._linger_timer is None:
            self._linger_timer = self.clock.call_at(until, self._stop_lingering)
        return True

    def _stop_lingering(self) -> None:
        self._linger_timer = None
        self.results.look_soon()

    def _flush(self) -> None:
        """The body rests and the run stays in memory: what would have gone with `suspend` is written now.

        Not while results are missing, since the code may have diverged, and then nothing that it did is to be recorded.
        """
        if self.may_record:
            self.recorder.flush()
        if self.inbox is not None:
            self.inbox.watch()

    def _written(self, seq: int) -> None:
        if self.publisher.subscribers:
            self.publisher.publish_persisted(seq)
        self.results.acknowledge(seq)

    def _replaced(self, entry: Entry) -> None:
        self.results.replace(entry)
        if entry.kind == "step" and self.streams is not None:
            self.streams.note_end(entry.key, 0)

    def _note_cancelled(self, call: CtxCall) -> None:
        now = self.clock.now()
        # Not ok: what cancelled a step may come earlier or later on a replay, and the body then goes another way.
        ok = call.kind != "step" or (call.branch is not None and call.branch.is_cancelled_by_ctx)
        self.recorder.append(call.key, "", kind=call.kind, phase="cancel", ok=ok, started_at=now, ended_at=now)

    def _note_time_limit(self) -> None:
        """A clock that no journal knows cancels something: on a replay it may do so earlier, later or not at all."""
        if self.calls.closed is not None or self.calls.is_cancelling or self._ending is not None:
            return
        self.calls.owed.expect_nothing()
        if not self._is_time_limit_noted:
            self._is_time_limit_noted = True
            now = self.clock.now()
            self.recorder.append("", "", kind="run", phase="cancel", ok=False, started_at=now, ended_at=now)

    def _pulsed(self, pulse: Pulse) -> None:
        if pulse.cancel_requested and not self._cancel_requested:
            self.cancel()
        if pulse.inbox_seq > self.waits.inbox_seq:
            self.look_at_inbox()

    def _record_cancel(self) -> None:
        """Record that the body is cancelled here. It is, when the store has acknowledged that and the body rests."""
        has_ended = self.calls.closed is not None or self._ending is not None or self._closing_task is not None
        if self._is_cancel_recorded or has_ended:
            return
        if not self._is_request_read:
            if self._reading_request is None:
                self._reading_request = start_own_task(self._read_request())
            return
        self._is_cancel_recorded = True
        self.calls.stop_judging()
        now = self.clock.now()
        payload = msgspec.json.encode(CancelPoint(self._deadline if self._is_late else None, self.undoes))
        request, self._cancel_request = self._cancel_request, None
        entry = self.recorder.append(
            CANCEL_KEY, "", kind="cancel", payload=payload, started_at=now, ended_at=now, consume=request
        )
        self.calls.resolve(entry, _Cancellation(self._cancel_body))

    async def _read_request(self) -> None:
        """Find out whether the run is to undo nothing, then cancel it."""
        self.results.begin_work()
        try:
            inbox = [] if self._store is None else await self._store.inbox(self.run.id)
            self._cancel_request = find_cancel_request(inbox, self.recorder.journal)
        except PerdureError as failure:
            self._give_up(failure)
        except ValueError as reason:
            self._stop_misfit(SnapshotCorrupt(self.run.id, "a request to cancel it", str(reason)))
        else:
            self.undoes = self._cancel_request is None
        finally:
            self.results.running -= 1
            self._is_request_read, self._reading_request = True, None
        if self._failure is None:
            self._record_cancel()
            self.results.look_soon()

    def _cancel_body(self) -> None:
        if self.calls.is_cancelling or self._main is None or self.calls.closed is not None or self._closing_task is not None:
            return
        self.calls.begin_to_cancel()
        cancel_by_ctx(self._main)
        # A body that swallows this and goes on has no more say after a while.
        cancelled = Err(RunCancelled(self.run.id))
        self._cancel_timer = self._loop.call_later(self.settings.cancel_grace, self._function_ended, cancelled)

    def _note_exit(self, interrupt: BaseException) -> None:
        self._give_up(describe_interrupt(self.run.id, "the body", interrupt))

    def _lost(self) -> None:
        self._give_up(LeaseLost(self.run.id, self._lease.epoch))

    def _give_up(self, failure: BaseException) -> None:
        if self._failure is None and self._ending is None:
            self._failure = failure
            self._close("unloaded")
            self._attend()


class _Cancellation(msgspec.Struct, frozen=True):
    """Gets the record that says where the run is cancelled."""

    cancel_body: Callable[[], None]

    def deliver(self, entry: Entry) -> bool:
        """It is this record's turn."""
        del entry
        self.cancel_body()
        return True

    def abandon(self) -> None:
        """Nothing to do: the run has left memory or ended."""


def _readable(claim: Claim, *, owes_imported: bool) -> tuple[JournalIndex, SnapshotCorrupt | None]:
    """What the journal says, or the error that says why it cannot be read."""
    if not claim.journal:
        return JournalIndex([], {}, {}, {}, {}, {}, [], {}, {}, None), None
    try:
        return JournalIndex.of(claim.journal, owes_imported=owes_imported), None
    except ValueError as reason:
        return JournalIndex.of([]), SnapshotCorrupt(claim.run.id, "the journal", str(reason))
