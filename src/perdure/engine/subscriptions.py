"""Who listens to a run, and how events reach them.

A listener in mode `sync` is called where the event happens. If it is asynchronous, what it awaits runs in a task of its own, and
nothing more is told, to anybody, before that has ended: whoever causes an event can wait until it was told, and being cancelled
while waiting takes nothing from the listener. In mode `async` a listener has a queue of its own and gets events one at a time, in
order, while the run goes on; `coalesce="latest"` leaves in that queue only the newest event besides the terminal ones.

A listener is no part of the body, wherever it is called: it has a context of its own, the tasks that it starts are no branches,
and what it raises is reported and changes nothing. Only KeyboardInterrupt and SystemExit go their way: they are about the
process, and end the loop.
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

from perdure.events import Event, Listener
from perdure.stepspec import current

# How a drive is known: by event loop, database and run id.
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
        # Mode async runs in the context in which the listener subscribed; mode sync in that of what happens.
        self._context = contextvars.copy_context()
        # Replaced and never emptied: another thread may unsubscribe while the loop is at it.
        self._queue: deque[Event] = deque()
        self._working: asyncio.Task[None] | None = None
        self._is_over = False
        self._listeners: Subscriptions | None = None

    def __call__(self) -> None:
        """Unsubscribe: nothing more is delivered. Doing it again does nothing."""
        self._is_over = True
        self._queue = deque()
        if self._listeners is not None:
            self._listeners.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self()

    def join(self, listeners: Subscriptions) -> Self:
        """This subscription, one of these from now on."""
        self._listeners = listeners
        listeners.subscriptions.append(self)
        return self

    def deliver(self, event: Event) -> asyncio.Task[None] | None:
        """Tell the listener, or put the event into its queue. What is returned has to end before anything else is told."""
        if self._is_over:
            return None
        if self._mode == "async":
            self._put(event)
            return None
        context = _outside(contextvars.copy_context())
        answer = self._called(event, context)
        return None if answer is None else _start(self._heard(event, answer), context)

    @property
    def working(self) -> asyncio.Task[None] | None:
        """What ends when the queue is empty and the listener at rest; None when they are."""
        # A task that was cancelled before it began never got to saying that it is over.
        return None if self._working is None or self._working.done() else self._working

    def _put(self, event: Event) -> None:
        if self._coalesce == "latest" and not event.is_terminal:
            self._queue = deque(queued for queued in self._queue if queued.is_terminal)
        self._queue.append(event)
        if self.working is None:
            # The first event is on its way to the listener, and no longer waiting in the queue.
            self._working = _start(self._work(self._queue.popleft()), _outside(self._context.copy()))

    async def _work(self, event: Event) -> None:
        try:
            while not self._is_over:
                answer = self._called(event, contextvars.copy_context())
                if answer is not None:
                    await self._heard(event, answer)
                queue = self._queue
                if not queue:
                    return
                event = queue.popleft()
        finally:
            self._working = None

    def _called(self, event: Event, context: contextvars.Context) -> Awaitable[Any] | None:
        """What is left to be awaited after the listener was called."""
        try:
            answer = context.run(self._listener, event)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._interrupted(interrupt)
            return None
        except BaseException as error:  # noqa: BLE001 - whatever a listener raises, the run goes on
            self._report(event, error)
            return None
        return answer if inspect.isawaitable(answer) else None

    async def _heard(self, event: Event, answer: Awaitable[Any]) -> None:
        try:
            await answer
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._interrupted(interrupt)
        except GeneratorExit:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # not its own doing: the loop is shutting down
            self._report(event, error)

    def _interrupted(self, interrupt: BaseException) -> None:
        """End the loop with this, as a signal would, and not the body. The process ends, so the listener is told nothing more."""
        self._is_over = True
        asyncio.get_running_loop().call_soon(_raise, interrupt)

    def _report(self, event: Event, error: BaseException) -> None:
        told = "a listener %r raised at %s of run %r; the run goes on"
        log.error(told, self._listener, event.type, event.run_id, exc_info=error)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _outside(context: contextvars.Context) -> contextvars.Context:
    """The context, in which nothing belongs to a body."""
    context.run(current.set, None)
    return context


def _start(work: Any, context: contextvars.Context) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, context=context)
    return task


class Subscriptions:
    """Those who listen to one run in this process, and what they have not been told yet.

    Events are told one at a time, in the order in which they happened, also across two drives of a run that follow closely.
    """

    def __init__(self, key: DriveKey | None = None) -> None:
        self._key = key
        # Part of the key is the loop's id: as long as this exists no other loop can have it.
        self.loop = asyncio.get_running_loop()
        self.subscriptions: list[Subscription] = []
        self._drives = 0
        # Whether the run has ended as far as its last drive knows.
        self._has_ended = False
        # The event that is being told, who is to be told it next, and whom that waits for.
        self._event: Event | None = None
        self._left: Sequence[Subscription] = ()
        self._awaited: asyncio.Task[None] | None = None
        self._is_telling = False
        # How many events there were, and how many of them everybody has been told.
        self._happened = 0
        self._told = 0

    # Made when there is something to tell: to most runs nobody listens.
    @cached_property
    def _queue(self) -> deque[tuple[Event, Subscription | None]]:
        return deque()

    @cached_property
    def _waiting(self) -> deque[tuple[int, asyncio.Future[None]]]:
        return deque()

    @property
    def are_behind(self) -> bool:
        """Whether something has happened that was not told to everybody."""
        return self._told != self._happened

    def tell(self, event: Event, nearest: Subscription | None) -> None:
        """Tell this to `nearest` and then to the subscribers, after everything before it."""
        self._happened += 1
        self._queue.append((event, nearest))
        self._go_on()

    def telling(self) -> asyncio.Future[None] | None:
        """What is done when everything that has happened so far was told; None when it is."""
        if not self.are_behind:
            return None
        told = self.loop.create_future()
        self._waiting.append((self._happened, told))
        return told

    def driven(self) -> None:
        """A drive of the run begins."""
        self._drives += 1
        self._has_ended = False

    def ended(self) -> None:
        """The run has ended, even if its drive does not get to saying so."""
        self._has_ended = True

    def no_longer_driven(self, *, has_ended: bool) -> None:
        """A drive of the run is over. Who listened is remembered if the run may come back."""
        self._drives -= 1
        if has_ended:
            self._has_ended = True
        if not self._drives and (self._has_ended or not self.subscriptions):
            self._forget()

    def remove(self, subscription: Subscription) -> None:
        """One of them has unsubscribed."""
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
        if not self._drives and not self.subscriptions:
            self._forget()

    def _forget(self) -> None:
        if self._key is not None and _listening.get(self._key) is self:
            _listening.pop(self._key, None)

    def _go_on(self) -> None:
        """Tell what there is to tell, until a listener has to be waited for."""
        if self._is_telling:
            return  # a listener made this happen, and comes before it
        self._is_telling = True
        try:
            while self._awaited is None and (self._left or self._begin_next()):
                self._tell_one()
        finally:
            self._is_telling = False

    def _tell_one(self) -> None:
        subscription, *self._left = self._left
        if self._event is not None:
            self._awaited = subscription.deliver(self._event)
        if self._awaited is not None:
            self._awaited.add_done_callback(self._has_heard)

    def _has_heard(self, task: asyncio.Task[None]) -> None:
        del task
        self._awaited = None
        self._go_on()

    def _begin_next(self) -> bool:
        """The event at hand was told to everybody. Whether there is another, and somebody to tell it to."""
        while not self._left:
            if self._event is not None:
                self._event = None
                self._told += 1
                self._wake()
            if not self._queue:
                return False
            self._event, nearest = self._queue.popleft()
            self._left = [*([] if nearest is None else [nearest]), *self.subscriptions]
        return True

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._told:
            _, told = self._waiting.popleft()
            if not told.done():
                told.set_result(None)


# The listeners of each run, in this process. Not part of the worker's registry of drives: a listener may subscribe before the
# first drive, and stays subscribed while the run is suspended and not driven at all.
_listening: dict[DriveKey, Subscriptions] = {}
# The loops on which runs were driven or subscribed to.
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def subscriptions_of(key: DriveKey) -> Subscriptions:
    """The listeners of a run, now and later."""
    listeners = _listening.get(key)
    if listeners is None:
        listeners = _listening[key] = Subscriptions(key)
        _seen(listeners.loop)
    return listeners


def _seen(loop: asyncio.AbstractEventLoop) -> None:
    """With each new loop, forget who listened on one that is closed: nothing can be told there any more."""
    if loop not in _loops:
        _loops.add(loop)
        for key, listeners in list(_listening.items()):
            if listeners.loop.is_closed():
                _listening.pop(key, None)
