"""What one drive tells its listeners.

Every drive is told from `run_start` to one of `run_complete`, `run_error`, `run_suspended` and `run_cancelled`. Events are made
only when somebody listens. Whoever causes one waits until it was told, where that is possible; elsewhere the next one waits.

Subscriptions change nothing that the body sees. The outcome of a step is told when its record is acknowledged and has reached its
branch, and until that was told nothing else is handed over: a listener takes time, and the body comes to rest as without one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

from perdure import events
from perdure.codec import Codec
from perdure.engine.body_tasks import BodyTasks
from perdure.engine.replay_order import ResultQueue
from perdure.engine.subscriptions import Subscription, Subscriptions
from perdure.engine.unloading import CLOSING_SECONDS
from perdure.errors import LeaseLost
from perdure.events import Event, Listener
from perdure.model.clock import Clock
from perdure.model.durations import moment
from perdure.model.journal import Entry
from perdure.model.records import RunRow
from perdure.result import Ok, Outcome, Suspended
from perdure.snapshots.consistent_view import View
from perdure.snapshots.step_results import load_value, read_result
from perdure.stepspec import StepPlan


class PublishedDrive(Protocol):
    """What listeners hear about: the drive, as far as events tell of it."""

    @property
    def run(self) -> RunRow: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def results(self) -> ResultQueue: ...
    @property
    def tasks(self) -> BodyTasks: ...
    @property
    def has_lease(self) -> bool: ...
    @property
    def is_resumed(self) -> bool: ...
    def view(self) -> View: ...
    def result(self) -> Any: ...
    @property
    def is_closed(self) -> bool: ...


class PublishedStep(Protocol):
    """A step, as far as events tell of it."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> StepPlan: ...


class EventPublisher:
    """The listeners of one drive: `on_event`, and whoever subscribed to the run."""

    def __init__(self, drive: PublishedDrive, on_event: Listener | None, listeners: Subscriptions) -> None:
        self._drive_of = weakref.ref(drive)  # which has this: nothing here shall wait for a collection
        self._on_event = None if on_event is None else Subscription(on_event)
        self.listeners = listeners
        # Whoever listens: empty, nothing need be told.
        self.audience = listeners.subscriptions if self._on_event is None else [self._on_event]
        listeners.driven()

    @cached_property
    def _is_late(self) -> asyncio.Future[None]:
        """Done when nobody waits for listeners any more."""
        return asyncio.get_running_loop().create_future()

    @property
    def _drive(self) -> PublishedDrive:
        drive = self._drive_of()
        if drive is None:
            raise RuntimeError("a drive that is gone has nothing to tell")
        return drive

    def note(self, kind: type[Event], **fields: Any) -> None:
        """Tell this, and wait for nobody."""
        if self.audience:
            drive = self._drive
            at = moment(drive.clock.now())
            event = kind(run_id=drive.run.id, workflow=drive.run.workflow, at=at, view=drive.view(), **fields)
            self.listeners.tell(event, self._on_event)

    async def told(self) -> None:
        """Return when everything so far was told. Cancelled meanwhile, the telling goes on."""
        telling = self.listeners.telling()
        if telling is not None:
            await self._wait_for(telling)

    def hurry(self, within: float) -> None:
        """Wait for listeners no longer than this many seconds from now: this process has to get away."""
        asyncio.get_running_loop().call_later(within, self._be_late)

    async def started(self) -> None:
        """The drive begins."""
        if self.audience:
            run = self._drive.run
            if self._drive.has_lease:
                self.note(events.LeaseChangedEvent, action="acquired", epoch=run.epoch)
            self.note(events.RunStartEvent, attempt=max(1, run.attempts), is_resumed=self._drive.is_resumed)
        if self.listeners.are_behind:
            await self.told()

    async def ended(self, outcome: Outcome[Any]) -> None:
        """The drive has ended like this, and that is recorded. Returns when every listener has had everything."""
        self._note_end(outcome)
        if self.audience or self.listeners.are_behind:
            await self._told_everything()

    async def given_up(self, failure: BaseException) -> None:
        """The drive could not go on. Returns when every listener has had everything."""
        self._note_failure(failure)
        await self._told_everything()

    async def abandoned(self, outcome: Outcome[Any] | None, failure: BaseException | None) -> None:
        """The drive was cancelled; this is how the run stands, if that is known. Returns after a while at the latest."""
        if outcome is not None:
            self._note_end(outcome)
        elif failure is not None:
            self._note_failure(failure)
        elif self._drive.has_lease:
            self._note_left()
        else:
            self.note(events.RunCancelledEvent)
        self.hurry(CLOSING_SECONDS)  # after that nobody waits for listeners
        await self._told_everything()

    async def of_step(self, kind: type[events.StepEvent], step: PublishedStep, attempt: int, **fields: Any) -> None:
        """Something happened to a step that has no outcome yet."""
        self.note(kind, key=step.key, name=step.name, attempt=attempt, **fields)
        await self.told()

    async def step_replayed(self, step: PublishedStep, entry: Entry) -> None:
        """The record of a step reached the body again."""
        with self._before_body():
            about = _about(entry, step.name)
            self.note(events.StepSkippedEvent, **about)
            self.note(events.StepCompleteEvent, **about, is_replayed=True, load=lambda: read_result(entry).result)
            await self.told()

    async def step_ended(self, step: PublishedStep, entry: Entry, error: Exception | None) -> None:
        """The step's outcome, recorded just now, reached the body."""
        drive = self._drive
        with self._before_body():
            about = _about(entry, step.name)
            if error is None:
                self.note(events.StepSuccessEvent, **about, load=lambda: load_value(drive.codec, entry, step.plan.returns))
            else:
                self.note(events.StepErrorEvent, **about, error=error)
            self.note(events.StepCompleteEvent, **about, is_replayed=False, load=lambda: read_result(entry).result)
            await self.told()

    async def signal_received(self, entry: Entry, load: Callable[[], Any]) -> None:
        """A wait has its signal, and the body gets it now. One that was consumed before is not told again."""
        if entry.epoch != self._drive.run.epoch:
            return
        with self._before_body():
            self.note(events.SignalReceivedEvent, key=entry.key, name=entry.name, load=load)
            await self.told()

    def persisted(self, seq: int) -> None:
        """The store has acknowledged the journal up to `seq`."""
        if self.audience:
            self.note(events.PersistedEvent, seq=seq)

    def released(self) -> None:
        """The run was given back."""
        self.note(events.LeaseChangedEvent, action="released", epoch=self._drive.run.epoch)

    def warned(self, message: str) -> None:
        """Something is not as it should be."""
        self.note(events.WarningEvent, message=message)

    @contextmanager
    def _before_body(self) -> Iterator[None]:
        """Between a record and the body: nothing else is delivered. The body gets the record also when it is cancelled here."""
        with self._drive.results.hold():
            try:
                yield
            except asyncio.CancelledError:
                branch = self._drive.tasks.running
                if self._drive.is_closed or branch is None:
                    raise
                branch.cancel_at_next_await()

    def _note_end(self, outcome: Outcome[Any]) -> None:
        if isinstance(outcome, Suspended):
            self.note(events.RunSuspendedEvent, wake_at=outcome.wake_at, waiting_for=outcome.waiting_for)
            return
        self.listeners.ended()
        if not self.audience:
            return
        if isinstance(outcome, Ok):
            self.note(events.RunCompleteEvent, load=self._drive.result)
        elif self._drive.run.status == "cancelled":
            self.note(events.RunCancelledEvent)
        else:
            self.note(events.RunErrorEvent, error=outcome.error)

    def _note_left(self) -> None:
        run = self._drive.run
        # A run that could not be given back is as it was: its own wake-up is the end of a lease that is nobody's any more.
        wake_at = None if run.wake_at is None or run.status == "running" else moment(run.wake_at)
        self.note(events.RunSuspendedEvent, wake_at=wake_at, waiting_for=tuple(each.name for each in run.waiting_for))

    def _note_failure(self, failure: BaseException) -> None:
        if isinstance(failure, LeaseLost):
            self.note(events.LeaseChangedEvent, action="lost", epoch=self._drive.run.epoch)
        if self._drive.has_lease:
            self.note(events.RunSuspendedEvent, wake_at=None, waiting_for=(), error=failure)
        else:
            self.note(events.RunErrorEvent, error=failure)

    async def _told_everything(self) -> None:
        await self.told()
        for subscription in self.listeners.subscriptions[:]:
            while subscription.working is not None and not self._is_late.done():
                await self._wait_for(subscription.working)

    async def _wait_for(self, listening: asyncio.Future[None]) -> None:
        if not self._is_late.done():
            await asyncio.wait([listening, self._is_late], return_when=asyncio.FIRST_COMPLETED)

    def _be_late(self) -> None:
        if not self._is_late.done():
            self._is_late.set_result(None)


def _about(entry: Entry, name: str) -> dict[str, Any]:
    times = {"started_at": moment(entry.started_at), "ended_at": moment(entry.ended_at)}
    return {"key": entry.key, "name": entry.name or name, "attempt": entry.attempt, **times}
