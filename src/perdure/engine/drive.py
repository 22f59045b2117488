"""One attempt of a run: its body runs from the top, and entries of the journal are delivered to it.

A `Drive` owns the body's queue (`BodyQueue`), its calls and its place in the journal (`Calls`, `JournalCursor`), the recorder,
and what the run waits for (`Waits`). What happens when the body rests is `rest`: its order is the rule by which every replay
repeats the first run. The drive ends in one of six ways: the body ended, the run suspended, it was cancelled, it was stopped (a
deploy), it does not fit the code, or the attempt failed (it could not be recorded, or its code called `sys.exit`). After that
perdure discards everything that the body does, and every ctx call in it raises.

Cancelling a run is an entry like any other: it reaches the body when the store has acknowledged it and the body rests, so a
replay cancels the body at the same place. The body may clean up with ctx calls for `cancel_grace`. Then, as after a failure,
`Closing` does what is left, outside the body.

Cancelling a drive takes effect when the write in flight has its reply; only then is the lease released, or left to expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import msgspec

from perdure.aio.interrupts import describe_interrupt, is_for_process
from perdure.aio.own_tasks import start_own_task
from perdure.aio.pending_write import await_reply, run_to_end
from perdure.body.body_queue import BodyQueue, BodyTask
from perdure.body.calls import Call, Calls, raised_by
from perdure.body.journal_cursor import STARTED_TOGETHER, JournalCursor
from perdure.body.leaving import Leaving
from perdure.body.patience import Patience
from perdure.codec.outcomes import Ending, Hints, outcome_of, run_ending
from perdure.engine.asyncio_timers import DurableTimers
from perdure.engine.cancelling import Cancellation, calls_before
from perdure.engine.child_runs import Children, ChildRuns, cancel_open_children
from perdure.engine.endings import (
    StartingOver,
    StartOver,
    ending_of_body,
    ending_of_cancelled_run,
    ending_of_dead_run,
    open_children,
    start_over_in,
)
from perdure.engine.event_publisher import EventPublisher
from perdure.engine.heartbeat import Heartbeat, HeldLease
from perdure.engine.progress import ProgressReporter
from perdure.engine.recorder import Recorder
from perdure.engine.step_cache import StepCaching
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
    RunInterrupted,
    SnapshotCorrupt,
    ValueNotStorable,
)
from perdure.model.clock import Clock, Timer
from perdure.model.durations import MICROSECOND, moment
from perdure.model.idempotency import IdempotencyKeys
from perdure.model.journal import Entry, JournalIndex
from perdure.model.logs import log, run_fields
from perdure.model.records import (
    Claim,
    NewInput,
    Pulse,
    columns_after_continue,
    failure_pause,
    misfit_pause,
    problem_text,
)
from perdure.options import EngineSettings, Options
from perdure.result import Err, Outcome, Suspended
from perdure.snapshots.consistent_view import View
from perdure.snapshots.effects import effects_in
from perdure.stepspec import StepInfo
from perdure.store import Store, StreamStore, require

# After how many microseconds a cancelled run looks again whether its children have ended.
_LOOK_AT_CHILDREN_AGAIN: Final = MICROSECOND // 2
# How many of them it asks the store about, to find one that cannot end.
_MOST_CHILDREN_LOOKED_AT: Final = 100


class BodyClosing(Protocol):
    """The work between the end of a body and the end of its run."""

    def is_needed(self, result: Any, /) -> bool:
        """Return whether there is something to do before the run ends with this result."""
        ...

    async def close(self, result: Any, /) -> Any:
        """Do it, and return the result of the run."""
        ...

    def unreached(self) -> list[str]:
        """Return the keys of what would have to be undone and cannot be, because the body does not reach it."""
        ...

    def forget(self) -> None:
        """Drop the references to calls and functions."""
        ...


class Drive:
    """One attempt of one run."""

    def __init__(  # noqa: PLR0915 - one line for each part of the drive
        self,
        function: Callable[[Drive], Coroutine[Any, Any, Any]],
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
        self._function = function
        self._hints = hints
        self._lease = claim.lease
        self._store = store
        self.loop = asyncio.get_running_loop()
        # Whether anything was recorded before this attempt.
        self.is_resumed = bool(claim.journal)
        recorded, self._unreadable = _readable(claim, owes_imported=options.on_divergence == "stop")
        self.cancellation = Cancellation(claim, recorded.cancel_point, self.clock.now(), has_store=store is not None)
        self._unreadable = self._unreadable or self.cancellation.problem
        self.children = Children(claim.run, child_runs, recorded.undone)
        self.waits = Waits(self, claim, store)
        stops = options.on_divergence != "run"
        cursor: JournalCursor[Call] = JournalCursor(
            recorded.entries,
            has_store=store is not None,
            owed=recorded.owed if stops else (),
            undone_results=recorded.undone_results if stops else (),
            owed_after=recorded.owed_after,
            retired=retired,
        )
        cursor.last_at = self.run.began_at
        self.body = BodyQueue(self.loop, self, self.run.id, self.run.seed, cursor.last_at, self.clock.now())
        self.calls = Calls(self.run.id, self.body, cursor, retired, self.misfit)
        self.body.has_steps = store is None
        self.timers = DurableTimers(self, claim.journal)
        self._patience = Patience(self.clock, settings.unload_grace, self.body, self.calls)
        self.idempotency_keys = IdempotencyKeys(claim.run.id, claim.run.generation, recorded.intents, recorded.undone)
        self.publisher = EventPublisher(self, options.on_event, Subscriptions() if subscriptions is None else subscriptions)
        self.caching = None if options.cache is None else StepCaching(options.cache, self.clock)
        # The first use of each key that names a cached value.
        self.shared_calls: dict[str, Call] = {}
        self.recorder = Recorder(self, store, self._lease, list(claim.journal))
        for seq in self.cancellation.void_requests(claim.inbox):
            self.recorder.consume(seq)
        self.waits.unrecorded = self.recorder.consuming
        # Calls that do something live, so the run cannot leave memory; and the tasks of steps.
        self.at_work: set[object] = set()
        self.steps: dict[asyncio.Task[Any], Call] = {}
        # Step functions that are running right now: the start of each attempt by the step's key. A step that removes itself
        # calls `look_whether_drained`. The heartbeat's thread copies it.
        self.executing: dict[str, int] = {}
        self._held: HeldLease | None = None
        self._heartbeat = heartbeat
        if heartbeat is not None:
            self._held = HeldLease(self, claim, ttl, asked_at)
            heartbeat.hold(self._held)
        self._main: BodyTask | None = None
        # Whether the journal is used up, so that calls start and waits end; never, for a check.
        self.is_live = False
        self.is_check = False
        # Whether nothing may reach the body for now: the store is asked to suspend the run, or listeners are waited for.
        self._is_frozen = False
        # The call that gets its entry next: listeners have had that.
        self._published: tuple[Call, Entry] | None = None
        self._leaving: Leaving | None = None
        # Done when there is something that `drive` has to deal with.
        self._attention: asyncio.Future[None] = self.loop.create_future()
        self._ending: Ending | StartOver | None = None
        # Whether the task of the drive was cancelled.
        self._is_cancelled = False
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
        # Set by the workflow's function, since what its calls leave to be done is known there.
        self.closing: BodyClosing | None = None
        # Closes the run after its function has ended, or has no more time.
        self._closing_task: asyncio.Future[None] | None = None
        # The closing waits for this: an entry of the journal, or something outside the run.
        self._closing_waits_for: asyncio.Future[Any] | None = None
        self._timers: list[Timer | asyncio.TimerHandle] = []
        # When a parent that waits for more children may leave memory again.
        self._linger_timer: Timer | None = None
        # Made by the first `set_progress`.
        self._progress: ProgressReporter | None = None
        # Made by the first item that is emitted, or because an earlier drive has emitted some.
        has_items = bool(claim.item_counts) and store is not None
        self.streams: Streams | None = Streams(self, claim.item_counts) if has_items else None
        # What a step's function knows of the drive. Weak: the context of a step may outlive the run.
        self.reference = weakref.ref(self)

    # What others ask.

    @property
    def has_lease(self) -> bool:
        """Return whether the run is in a store, and ours to drive."""
        return self._store is not None

    @property
    def module(self) -> str:
        """The name of the module of the workflow's function."""
        return self._hints.module

    @property
    def epoch(self) -> int:
        """The epoch of the lease."""
        return self._lease.epoch

    @property
    def undoes(self) -> bool:
        """Return whether a cancelled run compensates what it has done."""
        return self.cancellation.undoes

    @property
    def is_closed(self) -> bool:
        """Return whether ctx calls are refused, since the run has left memory or ended."""
        return self.calls.closed is not None

    @property
    def is_replaying(self) -> bool:
        """Return whether recorded results are still being delivered."""
        return not self.is_live and bool(self.calls.cursor.entries)

    @property
    def may_record(self) -> bool:
        """Return whether what the body has done may be written. Not while results are missing: the code may have diverged."""
        return self.is_live and not self.calls.cursor.missing

    @property
    def must_not_record(self) -> bool:
        """Return whether the end of a step is discarded: the run has left memory or ended, or its function has ended."""
        return self.calls.closed is not None or self._ending is not None

    @property
    def records_nothing(self) -> bool:
        """Return whether nothing is recorded of the run, and nobody listens: `await wf(x)`."""
        return self._store is None and not self.rebuilds_errors and not self.is_check and not self.publisher.subscribers

    def note_time(self) -> None:
        """A step of a run has ended of which nothing is recorded: that is the time of the body now."""
        self.body.now = self.calls.cursor.last_at = self.clock.now()

    def result(self) -> Any:
        """Return the value of a run that has completed: a copy for a listener, as the waiter of the run has its own."""
        return outcome_of(self.codec, self.run, self._hints).unwrap()

    def view(self) -> View:
        """Return the run as it stands: everything that is recorded for certain."""
        return View(self.run, self.recorder.journal, self.recorder.acknowledged_length, self.waits.inbox)

    def set_progress(self, value: Any) -> None:
        """Show this value as the progress of the run. May be called in the thread of a step.

        Raises `StoreCapabilityError`, `ValueNotStorable`, and `Unloaded` or `RunFinished` when the run has left memory.
        """
        self.check_open()
        if self._store is None:
            return
        store = require(self._store, "streams")
        payload, _ = self.codec.dump(value, path="progress")
        if self.calls.is_in_thread_of_body():
            self.body.on_host(self._show_progress, store, payload)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._show_progress, store, payload, context=self.body.context)

    def _show_progress(self, store: StreamStore, payload: bytes) -> None:
        if self.is_closed:
            return
        if self._progress is None:
            self._progress = ProgressReporter(store, self._lease, self.run, lambda: not self.is_live)
        self._progress.set(payload)

    def check_open(self) -> None:
        """Raise `Unloaded` or `RunFinished` when the run has left memory or ended."""
        if self.is_closed:
            self.calls.refuse()

    def open_streams(self) -> Streams | None:
        """Return the streams of the run; None without a store. Raises `StoreCapabilityError`."""
        if self.streams is None and self._store is not None:
            require(self._store, "streams")
            self.streams = Streams(self, {})
        return self.streams

    def emit_in_step(self, info: StepInfo, stream: str, item: Any, max_items: int) -> Awaitable[None]:
        """`current_step().emit`, in any thread."""
        return emit_in_step(self, info, stream, item, max_items)

    # From its start to its end.

    async def drive(self) -> Outcome[Any]:
        """Drive the run until it ends or suspends, and return its outcome. Raises when it had to give up."""
        try:
            outcome = await self._until_over()
        except asyncio.CancelledError:
            self._is_cancelled = True
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
            self.body.end()
            if self._heartbeat is not None and self._held is not None:
                self._heartbeat.drop(self._held)
            if self._progress is not None:
                self._progress.stop()
            self._forget_parts()
        await self.publisher.publish_end(outcome)
        self._ending = None  # an error's traceback refers to the frames that it went through, and by that to the drive
        return outcome

    def _forget_parts(self) -> None:
        """Break the reference cycles, so that the drive is freed without the garbage collector."""
        self._held = self._progress = self.streams = self._main = self._leaving = None
        self.children.runs = None
        if self.closing is not None:
            self.closing.forget()
        self.shared_calls.clear()
        self.calls.forget()
        self.recorder.forget_owner()

    async def _until_over(self) -> Outcome[Any]:
        await self.publisher.publish_start()
        if self.run.attempts > self.settings.max_attempts:
            await cancel_open_children(self.children.runs, self.recorder.journal)
            return await self._finish(ending_of_dead_run(self.run, self.codec, self._hints))
        if self._unreadable is not None:
            self.stop_misfit(self._unreadable)
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
            self._attention = self.loop.create_future()
            if self._must_suspend:
                self._must_suspend = False
                suspended = await self._suspend()
                if suspended is not None:
                    return suspended

    def _attend(self) -> None:
        """Let `drive` look at what has changed."""
        if not self._attention.done():
            self._attention.set_result(None)

    def _start_body(self) -> None:
        self._main = self.body.start(self._function(self), f"perdure:{self.run.id}")
        deadline = self.cancellation.deadline
        if deadline is not None and not self.cancellation.is_requested:
            self._timers.append(self.clock.call_at(deadline, self._pass_deadline))

    # At a rest of the body.

    def rest(self, *, is_spinning: bool) -> bool:
        """Let one thing reach the body, which rests or spins. Return whether to ask again at once."""
        calls, cursor = self.calls, self.calls.cursor
        calls.in_a_row = 0
        if self.body.interrupt is not None or self.body.is_interrupted:
            self._note_interrupt()
        if self._leaving is not None:
            return self._leaving.rest()
        is_closing = self._closing_task is not None and self._is_closing_by_itself
        if self._is_frozen or is_closing or calls.closed is not None or self._ending is not None or self._main is None:
            return False
        if self._published is not None:
            (call, entry), self._published = self._published, None
            call.deliver(entry)
            return True
        if cursor.unsettled:
            cursor.settle()
        if self._main.done() and self._closing_task is None:
            self._end_function(self._main, is_spinning=is_spinning)
            # A task that starts eagerly may wait for the journal by now.
            return self._closing_task is not None
        if calls.holds:
            return self._end_hold()
        if cursor.settled and self.is_live and not self.cancellation.is_on_its_way and self._start_calls():
            return True
        return self._give_next(is_spinning=is_spinning)

    def _end_hold(self) -> bool:
        """End the first hold, if it is over; on a replay it is."""
        hold = self.calls.holds[0]
        if self.may_record and not hold.is_over():
            self._flush()
            return False
        self.calls.holds.popleft()
        if not hold.future.done():
            hold.future.set_result(None)
        return True

    def _start_calls(self) -> bool:
        """Start a few of the calls that are settled. Return whether to ask for more of them at once."""
        starting = [] if self.must_stop else self.calls.cursor.take_settled()
        for call in starting:
            if call.is_cancelled:
                call.end_unstarted()
            else:
                call.start()
        return len(starting) == STARTED_TOGETHER

    def _give_next(self, *, is_spinning: bool) -> bool:
        """Let the next entry reach the body; when the journal is used up, what happens live."""
        cursor = self.calls.cursor
        while True:
            found = cursor.look()
            if found.entry is None:
                return self._go_on_live(is_spinning=is_spinning)
            if found.call is not None:
                return self._deliver(found.call, found.entry)
            if found.what == "unacknowledged":
                self.recorder.flush()
                return False
            if found.what == "timer":
                taken = self._take_timer(found.entry, is_spinning=is_spinning)
            elif found.what == "cancellation":
                taken = self._take_cancellation(found.entry, is_spinning=is_spinning)
            else:
                taken = self._take_unasked(found.entry, is_spinning=is_spinning)
            if taken is not None:
                return taken
            cursor.pass_over()

    def _take_timer(self, entry: Entry, *, is_spinning: bool) -> bool | None:
        """Fire the timer of this entry. Return False to wait until the body sets it, and None to pass the entry over."""
        if self.timers.take(entry):
            return True
        if entry.phase != "close" or self.timers.was_set(entry):
            return None
        return False if self._patience.has(entry, is_spinning=is_spinning) else None

    def _take_cancellation(self, entry: Entry, *, is_spinning: bool) -> bool:
        """Cancel the body where it was cancelled before. Return False to wait until it has come there."""
        if self._made() < calls_before(entry) and self._patience.has(entry, is_spinning=is_spinning):
            return False
        self.body.now = self.calls.cursor.take_next()
        self.timers.note_delivery()
        self._cancel_body()
        return True

    def _take_unasked(self, entry: Entry, *, is_spinning: bool) -> bool | None:
        """Nobody asks for this entry. Return False to wait for that, True if it tells a call something, None to pass it over."""
        if self._patience.has(entry, is_spinning=is_spinning):
            return False
        # A wait that was begun may be waited for after the new code as well.
        is_past = entry.phase == "close" or entry.kind in ("step", "child")
        return True if is_past and self._tell_patch() else None

    def _made(self) -> int:
        """Return how many calls and timers the body has made."""
        return self.calls.cursor.calls_made + self.body.timers_made

    def _deliver(self, call: Call, entry: Entry) -> bool:
        """Give this entry to its call, after those who listen have had it."""
        self._patience.end()
        self.body.now = self.calls.cursor.last_at
        self.timers.note_delivery()
        published = None
        try:
            if self.publisher.subscribers and not call.is_recorded_now:
                published = self.publisher.publish_delivery(call, entry)
            call.outcome = call.load(entry) if entry.phase == "close" else None
        except asyncio.CancelledError:  # the run does not fit its code, and is stopped
            return False
        except Exception as error:  # noqa: BLE001 - such as a warning that is an error
            call.outcome = None, error
        if self.publisher.subscribers and call.is_recorded_now:
            published = self.publisher.publish_delivery(call, entry)
        if published is not None:
            self._is_frozen = True
            published.add_done_callback(lambda _: self._thaw(call, entry), context=self.body.context)
            return False
        call.deliver(entry)
        return True

    @property
    def _is_closing_by_itself(self) -> bool:
        """Return whether the closing of the run is about to act, so that nothing else may reach the run or happen first."""
        waits_for = self._closing_waits_for
        return self._closing_task is not None and (waits_for is None or waits_for.done())

    async def wait_to_close(self, future: asyncio.Future[Any]) -> None:
        """Return when this is done, which the closing of the run needs. Other things may happen in the run meanwhile."""
        self._closing_waits_for = future
        self.body.schedule()
        try:
            await asyncio.wait([future])
        finally:
            self._closing_waits_for = None

    def _thaw(self, call: Call, entry: Entry) -> None:
        self._is_frozen = False
        self._published = call, entry
        self.body.schedule()

    def _tell_patch(self) -> bool:
        """Nobody asks for what comes next, so a call of `ctx.patched` that waits is in code that the run has passed before."""
        for call in self.calls.cursor.asked.values():
            if call.kind == "patch" and call.is_settled:
                self.calls.cursor.withdraw(call)
                call.tell(is_new=False)
                return True
        return False

    def _go_on_live(self, *, is_spinning: bool) -> bool:
        """The journal is used up: take the next step that was not taken before."""
        cursor = self.calls.cursor
        # A function that has ended is not cancelled any more.
        is_cancelled_next = self.cancellation.is_next and self._closing_task is None
        if not is_cancelled_next and (error := self.calls.find_divergence()) is not None:
            missing = min(cursor.missing.values(), key=lambda entry: entry.seq)
            if not self._patience.has(missing, is_spinning=is_spinning):
                self.stop_misfit(error)
            return False
        if is_cancelled_next:
            return self._record_cancel()
        self.is_live = True
        if self._start_calls():
            return True
        self.timers.arm()
        if not cursor.entries and not self.must_stop:
            self.waits.take_one()
        if cursor.entries:  # it was recorded just now
            self.recorder.flush()
            return not self.recorder.has_store
        self._idle()
        return False

    def _idle(self) -> None:
        """The body waits, and nothing is to be done: suspend the run if it may leave memory."""
        if self._may_leave():
            self._must_suspend = True
            self._attend()
        else:
            self._flush()

    def _may_leave(self) -> bool:
        """Return whether the run need not stay in memory."""
        if self._store is None or self.at_work or self._is_closing_by_itself or self.must_stop:
            return False
        is_cleaning_up = self.cancellation.is_delivered and self._closing_task is None
        if is_cleaning_up or self._stays_for_children():  # its time to clean up counts in memory
            return False
        wake_at = self._wake_at()
        # A wait that is due is not over yet while the inbox is read for it.
        is_due_soon = wake_at is not None and wake_at - self.clock.now() < max(1, self.settings.unload_grace)
        return not is_due_soon and self._waits_for_store() and not self._patience.has_for_leaving()

    def _waits_for_store(self) -> bool:
        """Return whether something in the store can move the run. A time limit alone does not: the body is busy by itself."""
        if self._closing_task is not None:
            return True
        return self.calls.is_awaited() or any(timer.waiter is not None for timer in self.body.timers.values())

    def _stays_for_children(self) -> bool:
        """Return whether the run stays in memory for its children: one is driven here, or others may end soon after one that has.

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
        self.body.schedule()

    def _flush(self) -> None:
        """The body rests and the run stays in memory: what would have gone with `suspend` is written now.

        Not while results are missing, since the code may have diverged, and then nothing that it did is to be recorded.
        """
        if self.may_record:
            self.recorder.flush()
        self.waits.watch()

    # What calls and parts tell.

    def record(self, call: Call | None, *, write: Callable[..., Entry] | None = None, name: str = "", **fields: Any) -> Entry:
        """Record the end of a call."""
        key, kind = (call.key, call.kind) if call is not None else (fields.pop("key"), fields.pop("kind"))
        entry = (write or self.recorder.append)(key, name, kind=kind, **fields)
        self.calls.cursor.append(entry)
        if call is not None:
            call.is_recorded_now = True
        if not self.body.is_pumping:
            self.recorder.flush_soon(is_alone=len(self.at_work) == 0)
            self.body.schedule()
        return entry

    def acknowledged(self, seq: int) -> None:
        """The store has everything up to this seq."""
        if self.publisher.subscribers:
            self.publisher.publish_persisted(seq)
        self.calls.cursor.acknowledged = max(seq, self.calls.cursor.acknowledged)
        self.body.pump_now()

    def replaced(self, entry: Entry) -> None:
        """The store has this entry in place of the one with its seq. An opening is no end: its step begins again."""
        cursor = self.calls.cursor
        cursor.replace(entry)
        call = cursor.asked.get(entry.key)
        if entry.phase == "open" and call is not None:
            cursor.openings[entry.key] = entry
            call.end_unstarted() if call.is_cancelled else call.start()
            return
        if entry.kind == "step" and self.streams is not None:
            self.streams.note_end(entry.key, 0)

    def fail(self, failure: BaseException) -> None:
        """The attempt has failed: give the run up."""
        if self._failure is None and self._ending is None:
            self._failure = failure
            self._close("unloaded")
            self._attend()

    def pulsed(self, pulse: Pulse) -> None:
        """The store has replied: somebody may have cancelled the run, or sent something."""
        if pulse.cancel_requested and not self.cancellation.is_requested:
            self.cancel()
        if pulse.inbox_seq > self.waits.inbox_seq:
            self.waits.look()

    def lost(self) -> None:
        """The lease is lost."""
        self.fail(LeaseLost(self.run.id, self._lease.epoch))

    def _note_interrupt(self) -> None:
        """Code of the body has called `sys.exit`, or a task of it was cancelled from outside: the body leaves memory."""
        interrupt, self.body.interrupt, self.body.is_interrupted = self.body.interrupt, None, False
        if isinstance(interrupt, Exception):
            self.fail(interrupt)
            return
        if interrupt is None:
            self.note_cancelled_from_outside("the body")
        elif self._store is not None and not is_for_process(interrupt):
            self.fail(describe_interrupt(self.run.id, "the body", interrupt))
        else:
            self.fail(interrupt)

    def note_cancelled_from_outside(self, what: str) -> None:
        """Neither the body nor the engine has cancelled this: the process ends, or a time limit of the host has passed."""
        self._close("unloaded")
        advice = "to end the run, use runtime.cancel; to end a branch, cancel its task in the workflow function"
        self.loop.call_soon(self._fail_alone, RunInterrupted(self.run.id, what, "was cancelled from outside", advice))

    def _fail_alone(self, failure: RunInterrupted) -> None:
        """Give the run up, unless the drive is cancelled too, as it is by Ctrl-C."""
        if not self._is_cancelled:
            self.fail(failure)

    def stop(self) -> None:
        """Start no step any more; when those that run have ended, or were given time enough, give the run back."""
        self.must_stop = True
        self.loop.call_later(self.settings.drain_after, self._drain_is_over)
        self.publisher.stop_waiting_after(self.settings.drain_after)
        self._attend()

    def _drain_is_over(self) -> None:
        self._is_drain_over = True
        self._attend()

    def look_whether_drained(self) -> None:
        """A step function has ended, and the drive must stop when none is left."""
        if self.must_stop and not self.executing:
            self._attend()

    def may_start_now(self) -> bool:
        """Return whether a step function may be called without waiting for anything."""
        return (
            not self.recorder.unacknowledged_open
            and not self.must_stop
            and self.calls.closed is None
            and (self._held is None or self._held.is_valid())
        )

    async def may_start(self) -> None:
        """Return when a step function may be called: every open entry is recorded, and the run is ours."""
        if self.recorder.unacknowledged_open:
            await self.recorder.acknowledged()
        self._check_lease()
        if self.must_stop:
            await self.loop.create_future()

    async def recorded(self) -> None:
        """Return when everything so far is recorded, and the run is ours."""
        await self.recorder.acknowledged()
        self._check_lease()

    def _check_lease(self) -> None:
        self.check_open()
        if self._held is not None and not self._held.is_valid():
            self.lost()
            self.calls.refuse()

    # Why the run stops.

    def misfit(self, error: PerdureError) -> NoReturn:
        """The run does not fit this code: stop it without letting the body see why. It is tried again later, as it was."""
        self.stop_misfit(error)
        self.calls.refuse()

    def stop_misfit(self, error: PerdureError) -> None:
        """As `misfit`, for what is called outside the body."""
        if self._failure is not None or self._ending is not None:
            return
        if self.cancellation.is_requested and not self.undoes:
            self._ending = ending_of_cancelled_run(self.run, self._left_behind())
        elif self._store is None:
            self._ending = run_ending(self.codec, Err(error), self._hints)
        else:
            self._is_misfit = True
            self.fail(error)
            return
        self._close("unloaded")
        self._attend()

    def stop_because(self, failure: PerdureError) -> NoReturn:
        """Give up this attempt and let the body see nothing of it: the run is as it was, and is tried again after a pause."""
        self.fail(failure)
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

    def note_gone(self, failed: Entry, classes: list[str]) -> None:
        """The error of this entry has a stand-in, since these classes are gone."""
        choice, is_handled_by_function = self.options.on_divergence, not failed.key.startswith(COMPENSATION_PREFIX)
        # Not for what was imported from a snapshot, unless that is wanted.
        if is_handled_by_function and (choice == "stop" or (choice is None and failed.epoch)):
            self.calls.note_gone(failed.key, classes)

    # Cancelling the run.

    def cancel(self, *, undo: bool = True) -> None:
        """End the run as cancelled: CancelledError is raised at the body's waits, once it has every recorded result.

        A run in a store is not told `undo` here: the request is in its inbox.
        """
        self.cancellation.is_requested = True
        if not undo:
            self.cancellation.undoes = False
        self.body.schedule()

    def _pass_deadline(self) -> None:
        """The time of the run is up: its body is cancelled like that of a cancelled run."""
        if not self.cancellation.is_requested:
            self.cancellation.is_late = self.cancellation.is_read = True
            self.cancel()

    def _record_cancel(self) -> bool:
        """Record that the body is cancelled here. It is, when the store has acknowledged that and the body rests."""
        cancellation = self.cancellation
        if cancellation.is_recorded:
            return False
        if not cancellation.is_read:
            self._is_frozen = True
            start_own_task(self._read_request())
            return False
        self.is_live = True
        cancellation.is_recorded = True
        self.calls.cursor.missing.clear()  # code that has changed may be cancelled all the same
        now, request = self.clock.now(), cancellation.request
        cancellation.request = None
        payload = cancellation.point(self._made())
        self.record(None, key=CANCEL_KEY, kind="cancel", payload=payload, started_at=now, ended_at=now, consume=request)
        self.recorder.flush()
        return not self.recorder.has_store

    async def _read_request(self) -> None:
        """Find out whether the run is to undo nothing, then cancel it."""
        try:
            inbox = [] if self._store is None else await self._store.inbox(self.run.id)
            self.cancellation.read(self.run.id, inbox, self.recorder.journal)
        except SnapshotCorrupt as problem:
            self.stop_misfit(problem)
        except PerdureError as failure:
            self.fail(failure)
        finally:
            self._is_frozen = False
            self.body.schedule()

    def _cancel_body(self) -> None:
        """Cancel the body here."""
        self.cancellation.is_delivered = True
        if self._main is None or self._main.done() or self._closing_task is not None:
            return
        self._main.cancel()
        # A body that swallows this has no more say after a while.
        seconds = self.settings.cancel_grace
        self._timers.append(self.body.call_later(seconds, self._function_ended, Err(RunCancelled(self.run.id))))

    # The end of the function, and of the run.

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

    def _end_function(self, main: BodyTask, *, is_spinning: bool) -> None:
        """The workflow's function has ended by itself. While recorded results are missing, its run does not end."""
        error = _cancelled_error(main) if main.cancelled() else main.exception()
        result = main.result() if error is None else Err(error)
        if not self.cancellation.is_delivered and self._has_ended_early(result, is_spinning=is_spinning):
            return
        self._function_ended(result)

    def _has_ended_early(self, result: Any, *, is_spinning: bool) -> bool:
        """Return whether recorded results are missing, so that the run does not end, at least for now."""
        gone, missing = self.calls.find_gone(result), self.calls.cursor.missing_at_end()
        if not gone and not missing:
            return False
        if self.cancellation.is_requested:  # code that has changed may be cancelled all the same
            self._record_cancel()
            self.cancellation.is_delivered = self.cancellation.is_recorded
            return not self.cancellation.is_recorded
        entry = next((each for each in self.calls.cursor.unasked() if each.key in missing), None)
        if gone or entry is None or not self._patience.has(entry, is_spinning=is_spinning):
            self.stop_misfit(self.calls.divergence(None, [] if gone else missing, raised_by(result)))
        return True

    def _function_ended(self, result: Any) -> None:
        """The workflow's function has ended, or has no more time: close the run before it ends."""
        if self._closing_task is not None or self.is_closed or self._ending is not None:
            return
        if not self.cancellation.is_delivered:
            result = start_over_in(result) or result
        is_needed = self.closing is not None and self.closing.is_needed(result)
        if not self.body.pending_tasks() and not self.steps and not is_needed:
            self._body_ended(result)
            return
        self._closing_task = start_own_task(self._close_body(result))

    async def _close_body(self, result: Any) -> None:
        """End what the function left behind, then do what `Closing` says."""
        try:
            self.calls.is_refusing = True
            await self._end_tasks()
            if not self.is_closed and self.closing is not None and self.closing.is_needed(result):
                result = await self.closing.close(result)
        except asyncio.CancelledError as cut_off:
            if not self.is_closed:
                result = Err(cut_off)
        except BaseException as error:  # noqa: BLE001 - nothing comes of it if the run is unloaded
            result = Err(error)
        self._body_ended(result)

    async def _end_tasks(self) -> None:
        """Cancel the tasks of the body and its steps, and return when they have ended, or were given time enough."""
        if self._main is None or self.body.is_over or (not self.body.pending_tasks() and not self.steps):
            return
        steps = {task: call.key for task, call in self.steps.items()}
        leaving = self._leaving = Leaving(self.body, self._main, steps, self.calls.refused)
        try:
            await leaving.done
        finally:
            self._leaving = None

    def _body_ended(self, result: Any) -> None:
        if not self.is_closed and self._ending is None:
            try:
                self._ending = ending_of_body(
                    result,
                    self.run,
                    self.calls,
                    self.codec,
                    self._hints,
                    is_cancelled=self.cancellation.is_delivered,
                    is_strict=self.is_strict,
                    passed_deadline=self.cancellation.passed_deadline,
                    left=[] if self.undoes else self._left_behind(),
                    on_unknown_steps=partial(self.react, self.options.on_unknown_steps, what="steps that are not asked for"),
                )
            except BaseException as error:  # noqa: BLE001 - an interrupt in code of the result's own
                self.fail(error)
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
        if self.cancellation.request is not None and not isinstance(ending, StartOver):
            self.recorder.consume(self.cancellation.request)
        if not self.undoes and isinstance(ending, Ending) and ending.status == "cancelled":
            await cancel_open_children(self.children.runs, self.recorder.journal, undo=False)
        await self._end_body()
        if self._progress is not None:
            await self._progress.flush()
        if isinstance(ending, StartOver):
            return await self._continue_as(msgspec.structs.replace(ending.new, deadline=self.cancellation.deadline))
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
        """Return this outcome for one more caller: errors are rebuilt for each, as for those who come later."""
        return outcome_of(self.codec, self.run, self._hints) if self.rebuilds_errors and isinstance(outcome, Err) else outcome

    async def _continue_as(self, new: NewInput) -> Outcome[Any]:
        """Let the run start over, due at once, in another drive."""
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
        self._is_frozen = True  # until the store replies: what the run waits for must not change meanwhile
        try:
            if self._progress is not None:
                await self._progress.flush()
            await self.recorder.pause()
            is_cancelled_now = self._closing_task is None and (self.cancellation.is_next or self.cancellation.is_on_its_way)
            is_at_work = bool(self.at_work) or self._is_closing_by_itself
            cursor, is_busy = self.calls.cursor, is_at_work or self.waits.has_due() or self._attention.done()
            if is_busy or cursor.entries or cursor.has_unstarted or is_cancelled_now:
                self.recorder.resume()
                return None  # something happened meanwhile
            if self.cancellation.is_requested:
                if self.undoes and (stuck := await self._find_stuck_child()) is not None:
                    self.stop_misfit(stuck)
                    return None
                # Suspended it would be due at once: it waits for its children, and they may need its place in the worker, or for
                # the next try of a compensation.
                next_try = None if self.waits.has_address else self._wake_at()
                return await self._give_back(self.clock.now() + _LOOK_AT_CHILDREN_AGAIN if next_try is None else next_try)
            return await self._suspend_now()
        finally:
            self._is_frozen = False
            self.body.schedule()

    async def _suspend_now(self) -> Outcome[Any] | None:
        self.timers.record_armed()
        wake_at, awaited = self._wake_at(), self.waits.addresses()
        try:
            signals = await self.recorder.suspend(wake_at, awaited)
        finally:
            if self.recorder.has_let_go:
                self._stands(status="suspended", wake_at=wake_at, waiting_for=awaited)
            self.recorder.report_written()
        if signals:
            self.recorder.resume()
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
        """Return when the run must be in memory again: at the earliest deadline of its waits, or at its own."""
        child_at = None if self.children.runs is None else self.children.runs.wake_at()
        found = (self.waits.wake_at(), self.timers.wake_at(), self.cancellation.deadline, child_at)
        return min((at for at in found if at is not None), default=None)

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
        if self.cancellation.deadline is not None and not self.cancellation.is_requested:
            wake_at = min(wake_at, self.cancellation.deadline)
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
        """Note how the run stands in the store from now on."""
        self.run = msgspec.structs.replace(self.run, updated_at=self.clock.now(), **changed)

    async def _end_body(self) -> None:
        """Refuse every call, and end the tasks of the body, the steps and the closing."""
        for task, call in list(self.steps.items()):
            if task.done():  # its callback has not been called yet
                call.ended(task)
        self._close("unloaded")
        if self._main is not None and self._main.done() and not self._main.cancelled():
            self._main.exception()  # retrieved: nothing comes of it any more, or the loop has raised it already
        if self._closing_task is not None and not self._closing_task.done():
            self._closing_task.cancel()
        await self._end_tasks()
        self.calls.drop_all()
        self.body.end()

    def _close(self, why: Any) -> None:
        if self.is_closed:
            return
        self.calls.close(why)
        self.waits.close()
        for timer in self._timers:
            timer.cancel()
        self._patience.end()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self.streams is not None:
            self.streams.close()


def _cancelled_error(main: asyncio.Task[Any]) -> BaseException | None:
    """Return the CancelledError with which this task has ended."""
    try:
        main.result()
    except asyncio.CancelledError as error:
        return error
    return None


def _readable(claim: Claim, *, owes_imported: bool) -> tuple[JournalIndex, SnapshotCorrupt | None]:
    """Return what the journal says, or the error that says why it cannot be read."""
    if not claim.journal:
        return JournalIndex([], set(), [], [], {}, {}, None), None
    try:
        return JournalIndex.of(claim.journal, owes_imported=owes_imported), None
    except ValueError as reason:
        return JournalIndex.of([]), SnapshotCorrupt(claim.run.id, "the journal", str(reason))
