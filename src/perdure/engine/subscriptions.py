"""The subscriptions of a run, and how events reach their listeners.

A listener in mode `sync` is called where the event happens. If it is async, its coroutine runs in a task of its own, and no
listener gets another event before that task has ended. The code that causes an event can wait for it; cancelling that wait does
not cancel the listener. A listener in mode `async` has a queue, and gets its events one at a time, in order, while the run goes
on; `coalesce="latest"` leaves in that queue only the newest event and the terminal ones. An event is published when every sync
listener has returned and every async one has it in its queue.

A listener is no part of the body: it runs in a copy of a context, the tasks that it starts are not tasks of the body, and its
exceptions are logged and do not change the run. Only KeyboardInterrupt and SystemExit are raised: they are meant for the process,
and end the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, TypeAlias, get_args

from perdure.aio.own_tasks import current
from perdure.events import Event, Listener

# What identifies a drive: the id of its event loop, the database and the run id.
DriveKey: TypeAlias = tuple[int, tuple[str, ...], str]
Mode: TypeAlias = Literal["sync", "async"]
Coalesce: TypeAlias = Literal["none", "latest"]
log: Final = logging.getLogger("perdure")


class Subscription:
    """One listener of one run. Call it, or leave its `with` block, to unsubscribe."""

    def __init__(self, listener: Listener, mode: Mode = "sync", coalesce: Coalesce = "none") -> None:
        if not callable(listener):
            raise TypeError(f"a listener is a function that takes an event, not {listener!r}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode is one of {', '.join(get_args(Mode))}, not {mode!r}")
        if coalesce not in get_args(Coalesce):
            raise ValueError(f"coalesce is one of {', '.join(get_args(Coalesce))}, not {coalesce!r}")
        if coalesce == "latest" and mode == "sync":
            raise ValueError('coalesce="latest" needs mode="async": a sync listener is never behind')
        self._listener = listener
        self._mode = mode
        self._coalesce = coalesce
        # For mode async, which runs in the context of the subscriber; mode sync runs in the context of the event.
        self._context = contextvars.copy_context()
        # Replaced, never cleared: another thread may unsubscribe while the loop takes an event from it.
        self._queue: deque[Event] = deque()
        self._queue_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._subscriptions: Subscriptions | None = None

    def __call__(self) -> None:
        """Unsubscribe: the listener gets no more events. A second call does nothing."""
        self._is_closed = True
        self._queue = deque()
        if self._subscriptions is not None:
            self._subscriptions.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self()

    def join(self, subscriptions: Subscriptions) -> Self:
        """Add this subscription to those of a run, and return it."""
        self._subscriptions = subscriptions
        subscriptions.subscribers.append(self)
        return self

    def deliver(self, event: Event) -> asyncio.Task[None] | None:
        """Call the listener, or put the event into its queue. The task, if any, must end before the next event is published."""
        if self._is_closed:
            return None
        if self._mode == "async":
            self._put(event)
            return None
        context = _without_body(contextvars.copy_context())
        returned = self._call(event, context)
        return None if returned is None else _start_task(self._await_listener(event, returned), context)

    @property
    def queue_task(self) -> asyncio.Task[None] | None:
        """The task that delivers the queue; None when the queue is empty and the listener has returned."""
        # A task that is cancelled before its first step never runs the `finally` that resets the attribute.
        return None if self._queue_task is None or self._queue_task.done() else self._queue_task

    def _put(self, event: Event) -> None:
        if self._coalesce == "latest" and not event.is_terminal:
            self._queue = deque(queued for queued in self._queue if queued.is_terminal)
        self._queue.append(event)
        if self.queue_task is None:
            # Taken out of the queue before the task runs: the next event cannot replace it there.
            self._queue_task = _start_task(self._deliver_queue(self._queue.popleft()), _without_body(self._context.copy()))

    async def _deliver_queue(self, event: Event) -> None:
        try:
            while not self._is_closed:
                returned = self._call(event, contextvars.copy_context())
                if returned is not None:
                    await self._await_listener(event, returned)
                queue = self._queue
                if not queue:
                    return
                event = queue.popleft()
        finally:
            self._queue_task = None

    def _call(self, event: Event, context: contextvars.Context) -> Awaitable[Any] | None:
        """Call the listener, and return what it returned if that is awaitable."""
        try:
            returned = context.run(self._listener, event)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._interrupt_loop(interrupt)
            return None
        except BaseException as error:  # noqa: BLE001 - a listener may raise anything, and the run goes on
            self._log_error(event, error)
            return None
        return returned if inspect.isawaitable(returned) else None

    async def _await_listener(self, event: Event, returned: Awaitable[Any]) -> None:
        try:
            await returned
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._interrupt_loop(interrupt)
        except GeneratorExit:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this task was cancelled, not the listener's own awaitable: the loop is shutting down
            self._log_error(event, error)

    def _interrupt_loop(self, interrupt: BaseException) -> None:
        """End the loop with this exception, as a signal would, and keep it out of the body. The listener gets no more events."""
        self._is_closed = True
        asyncio.get_running_loop().call_soon(_raise, interrupt)

    def _log_error(self, event: Event, error: BaseException) -> None:
        log.error(
            "a listener %r raised at %s of run %r; the run goes on", self._listener, event.type, event.run_id, exc_info=error
        )


def _raise(error: BaseException) -> NoReturn:
    raise error


def _without_body(context: contextvars.Context) -> contextvars.Context:
    """This context, changed so that code in it does not count as part of a body."""
    context.run(current.set, None)
    return context


def _start_task(work: Any, context: contextvars.Context) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, context=context)
    return task


class Subscriptions:
    """The subscriptions of one run in this process, and the events that are not published yet.

    Events are published one at a time, in the order in which they happened, also when a second drive of the run begins while
    events of the first are still queued.
    """

    def __init__(self, key: DriveKey | None = None) -> None:
        self._key = key
        # The key contains the id of the loop. Holding the loop keeps that id from being used by another loop.
        self.loop = asyncio.get_running_loop()
        self.subscribers: list[Subscription] = []
        self._drives = 0
        # Whether the run has ended, as its last drive knows it.
        self._has_ended = False
        # The event that is being published, the subscribers that have not got it, and the listener's task that it waits for.
        self._event: Event | None = None
        self._remaining: Sequence[Subscription] = ()
        self._awaited: asyncio.Task[None] | None = None
        self._is_delivering = False
        # How many events were queued, and how many of them are published.
        self._queued_count = 0
        self._published_count = 0

    # The two deques are made when they are first used: most runs have no listener.
    @cached_property
    def _queue(self) -> deque[tuple[Event, Subscription | None]]:
        return deque()

    @cached_property
    def _waiters(self) -> deque[tuple[int, asyncio.Future[None]]]:
        return deque()

    @property
    def has_pending(self) -> bool:
        """Return whether an event is queued that is not published yet."""
        return self._published_count != self._queued_count

    def publish(self, event: Event, first: Subscription | None) -> None:
        """Deliver this event to `first` and then to the subscribers, after all events before it."""
        self._queued_count += 1
        self._queue.append((event, first))
        self._deliver_events()

    def pending(self) -> asyncio.Future[None] | None:
        """A future that is done when every event so far is published; None when it is already."""
        if not self.has_pending:
            return None
        published = self.loop.create_future()
        self._waiters.append((self._queued_count, published))
        return published

    def add_drive(self) -> None:
        """Count a drive of the run that begins."""
        self._drives += 1
        self._has_ended = False

    def mark_ended(self) -> None:
        """Remember that the run has ended, in case its drive is cancelled before it can return the outcome."""
        self._has_ended = True

    def remove_drive(self, *, has_ended: bool) -> None:
        """Stop counting a drive that is over. The subscriptions stay if the run may be driven again."""
        self._drives -= 1
        if has_ended:
            self._has_ended = True
        if not self._drives and (self._has_ended or not self.subscribers):
            self._unregister()

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription whose listener gets no more events."""
        if subscription in self.subscribers:
            self.subscribers.remove(subscription)
        if not self._drives and not self.subscribers:
            self._unregister()

    def _unregister(self) -> None:
        if self._key is not None and _by_key.get(self._key) is self:
            _by_key.pop(self._key, None)

    def _deliver_events(self) -> None:
        """Deliver the queued events in order, until the task of a listener has to be awaited."""
        if self._is_delivering:
            return  # a listener caused this event: the one that it is handling is delivered to all subscribers first
        self._is_delivering = True
        try:
            while self._awaited is None and (self._remaining or self._take_next_event()):
                self._deliver_to_next()
        finally:
            self._is_delivering = False

    def _deliver_to_next(self) -> None:
        subscription, *self._remaining = self._remaining
        if self._event is not None:
            self._awaited = subscription.deliver(self._event)
        if self._awaited is not None:
            self._awaited.add_done_callback(self._resume)

    def _resume(self, task: asyncio.Task[None]) -> None:
        del task
        self._awaited = None
        self._deliver_events()

    def _take_next_event(self) -> bool:
        """Count the present event as published, and take the next that has a subscriber. False when the queue is empty."""
        while not self._remaining:
            if self._event is not None:
                self._event = None
                self._published_count += 1
                self._wake_waiters()
            if not self._queue:
                return False
            self._event, first = self._queue.popleft()
            self._remaining = [*([] if first is None else [first]), *self.subscribers]
        return True

    def _wake_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._published_count:
            _, published = self._waiters.popleft()
            if not published.done():
                published.set_result(None)


# The subscriptions of each run in this process. Not part of the worker's registry of drives: a listener may subscribe before the
# first drive, and stays subscribed while the run is suspended and not driven at all.
_by_key: dict[DriveKey, Subscriptions] = {}
# The loops on which runs were driven or subscribed to.
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def subscriptions_of(key: DriveKey) -> Subscriptions:
    """The subscriptions of a run: the same object for all its drives and all calls of `subscribe`."""
    subscriptions = _by_key.get(key)
    if subscriptions is None:
        subscriptions = _by_key[key] = Subscriptions(key)
        _add_loop(subscriptions.loop)
    return subscriptions


def _add_loop(loop: asyncio.AbstractEventLoop) -> None:
    """If this loop is new, drop the subscriptions of closed loops: no event can be published there."""
    if loop not in _loops:
        _loops.add(loop)
        for key, subscriptions in list(_by_key.items()):
            if subscriptions.loop.is_closed():
                _by_key.pop(key, None)
