"""The events of one drive: which are published, when, and what waits for their listeners.

A drive publishes `run_start` first, and one of `run_complete`, `run_error`, `run_suspended`, `run_continued` and `run_cancelled`
last. An event is made only if the run has a listener. The code that causes an event waits until it is published; code that cannot
await goes on, and the next wait includes that event.

Listeners do not change what the body sees. The outcome of a step is published when the store has acknowledged its entry and its
turn has come. The body gets it when the listeners have had it, and nothing else meanwhile.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from perdure import events
from perdure.aio.own_tasks import current, own_context, start_own_task
from perdure.body.calls import Call
from perdure.body.leaving import CLOSING_SECONDS
from perdure.codec import Codec
from perdure.engine.subscriptions import Subscription, Subscriptions
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
    """The part of a drive that its events are made from."""

    @property
    def run(self) -> RunRow: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def has_lease(self) -> bool: ...
    @property
    def is_resumed(self) -> bool: ...
    @property
    def is_continued(self) -> bool: ...
    def view(self) -> View: ...
    def result(self) -> Any: ...
    @property
    def is_closed(self) -> bool: ...


class PublishedStep(Protocol):
    """The part of a step that its events are made from."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> StepPlan: ...


class EventPublisher:
    """Publishes the events of one drive to `on_event` and to the subscriptions of the run."""

    def __init__(self, drive: PublishedDrive, on_event: Listener | None, subscriptions: Subscriptions) -> None:
        # Weak, because the drive refers to its publisher: a cycle would be freed only by the garbage collector.
        self._drive_ref = weakref.ref(drive)
        self._on_event = None if on_event is None else Subscription(on_event)
        self.subscriptions = subscriptions
        # Only its truth counts: while it is empty the run has no listener, and no event need be made.
        self.subscribers = subscriptions.subscribers if self._on_event is None else [self._on_event]
        subscriptions.add_drive()

    @cached_property
    def _deadline(self) -> asyncio.Future[None]:
        """Done when the drive may no longer wait for listeners."""
        return asyncio.get_running_loop().create_future()

    @property
    def _drive(self) -> PublishedDrive:
        drive = self._drive_ref()
        if drive is None:
            raise RuntimeError("an event was published after its drive was freed")
        return drive

    def publish(self, kind: type[Event], **fields: Any) -> None:
        """Publish an event of this kind after those before it, without waiting for listeners."""
        if self.subscribers:
            drive = self._drive
            at = moment(drive.clock.now())
            event = kind(run_id=drive.run.id, workflow=drive.run.workflow, at=at, view=drive.view(), **fields)
            self.subscriptions.publish(event, self._on_event)

    async def wait_until_published(self) -> None:
        """Return when every event so far is published. Cancelling this wait does not stop the listeners."""
        published = self.subscriptions.pending()
        if published is not None:
            await self._wait_for(published)

    def stop_waiting_after(self, seconds: float) -> None:
        """Wait for listeners no longer than this many seconds from now: the process must be able to exit."""
        asyncio.get_running_loop().call_later(seconds, self._pass_deadline)

    async def publish_start(self) -> None:
        """Publish that the drive begins, and wait for listeners."""
        if self.subscribers:
            run = self._drive.run
            if self._drive.has_lease:
                self.publish(events.LeaseChangedEvent, action="acquired", epoch=run.epoch)
            self.publish(events.RunStartEvent, attempt=max(1, run.attempts), is_resumed=self._drive.is_resumed)
        if self.subscriptions.has_pending:
            await self.wait_until_published()

    async def publish_end(self, outcome: Outcome[Any]) -> None:
        """Publish the recorded outcome of the drive. Returns when every listener has handled every event."""
        self._publish_outcome(outcome)
        if self.subscribers or self.subscriptions.has_pending:
            await self._wait_for_listeners()

    async def publish_failure(self, failure: BaseException) -> None:
        """Publish why the drive had to give up. Returns when every listener has handled every event."""
        self._publish_error(failure)
        await self._wait_for_listeners()

    async def publish_cancelled_drive(self, outcome: Outcome[Any] | None, failure: BaseException | None) -> None:
        """Publish the state in which a cancelled drive left its run: its outcome or failure, if there is one.

        Returns when every listener has handled every event, or after `CLOSING_SECONDS`.
        """
        if outcome is not None:
            self._publish_outcome(outcome)
        elif failure is not None:
            self._publish_error(failure)
        elif self._drive.has_lease:
            self._publish_interruption()
        else:
            self.publish(events.RunCancelledEvent)
        self.stop_waiting_after(CLOSING_SECONDS)
        await self._wait_for_listeners()

    async def publish_step(self, kind: type[events.StepEvent], step: PublishedStep, attempt: int, **fields: Any) -> None:
        """Publish an event of a step that has no outcome yet, and wait for listeners."""
        self.publish(kind, key=step.key, name=step.name, attempt=attempt, **fields)
        await self.wait_until_published()

    def publish_delivery(self, call: Call, entry: Entry) -> asyncio.Future[None] | None:
        """Publish what is delivered to a call, if listeners are told of that. Return what the delivery has to wait for."""
        if entry.phase == "close":
            context = own_context() if call.context is None else call.context.copy()
            context.run(current.set, None)
            context.run(call.publish, self, entry)
        return start_own_task(self.wait_until_published()) if self.subscriptions.has_pending else None

    def publish_result(self, call: Call, entry: Entry, name: str, hint: Any) -> None:
        """Publish the outcome of a step or a child: one that was recorded just now, or that a replay has found."""
        fields = {"key": entry.key, "name": entry.name or name, "attempt": entry.attempt}
        fields |= {"started_at": moment(entry.started_at), "ended_at": moment(entry.ended_at)}
        error = None if call.outcome is None else call.outcome[1]
        if not call.is_recorded_now:
            self.publish(events.StepSkippedEvent, **fields)
        elif error is None:
            codec = self._drive.codec
            self.publish(events.StepSuccessEvent, **fields, load=lambda: load_value(codec, entry, hint))
        else:
            self.publish(events.StepErrorEvent, **fields, error=error)
        is_replayed = not call.is_recorded_now
        self.publish(events.StepCompleteEvent, **fields, is_replayed=is_replayed, load=lambda: read_result(entry).result)

    def publish_signal(self, entry: Entry, load: Callable[[], Any]) -> None:
        """Publish the signal that ended a wait. A replayed one is not published again."""
        if entry.epoch == self._drive.run.epoch:
            self.publish(events.SignalReceivedEvent, key=entry.key, name=entry.name, load=load)

    def publish_persisted(self, seq: int) -> None:
        """Publish that the store has acknowledged the journal up to `seq`."""
        if self.subscribers:
            self.publish(events.PersistedEvent, seq=seq)

    def publish_release(self) -> None:
        """Publish that the drive has released its lease."""
        self.publish(events.LeaseChangedEvent, action="released", epoch=self._drive.run.epoch)

    def publish_warning(self, message: str) -> None:
        """Publish a `WarningEvent` with this message."""
        self.publish(events.WarningEvent, message=message)

    def _publish_outcome(self, outcome: Outcome[Any]) -> None:
        if self._drive.is_continued:
            self.publish(events.RunContinuedEvent, generation=self._drive.run.generation)
            return
        if isinstance(outcome, Suspended):
            self.publish(events.RunSuspendedEvent, wake_at=outcome.wake_at, waiting_for=outcome.waiting_for)
            return
        self.subscriptions.mark_ended()
        if not self.subscribers:
            return
        if isinstance(outcome, Ok):
            self.publish(events.RunCompleteEvent, load=self._drive.result)
        elif self._drive.run.status == "cancelled":
            self.publish(events.RunCancelledEvent)
        else:
            self.publish(events.RunErrorEvent, error=outcome.error)

    def _publish_interruption(self) -> None:
        run = self._drive.run
        # A run that could not be released is still `running`, and its `wake_at` is the expiry of the lease, not a timer.
        wake_at = None if run.wake_at is None or run.status == "running" else moment(run.wake_at)
        self.publish(events.RunSuspendedEvent, wake_at=wake_at, waiting_for=tuple(each.by_user for each in run.waiting_for))

    def _publish_error(self, failure: BaseException) -> None:
        if isinstance(failure, LeaseLost):
            self.publish(events.LeaseChangedEvent, action="lost", epoch=self._drive.run.epoch)
        if self._drive.has_lease:
            self.publish(events.RunSuspendedEvent, wake_at=None, waiting_for=(), error=failure)
        else:
            self.publish(events.RunErrorEvent, error=failure)

    async def _wait_for_listeners(self) -> None:
        """Return when every event is published and the queues of the async subscriptions are empty."""
        await self.wait_until_published()
        for subscription in self.subscriptions.subscribers[:]:
            while subscription.queue_task is not None and not self._deadline.done():
                await self._wait_for(subscription.queue_task)

    async def _wait_for(self, future: asyncio.Future[None]) -> None:
        if not self._deadline.done():
            await asyncio.wait([future, self._deadline], return_when=asyncio.FIRST_COMPLETED)

    def _pass_deadline(self) -> None:
        if not self._deadline.done():
            self._deadline.set_result(None)
