"""Group commit: while one batch is in flight, the requests that arrive are collected for the next.

A batcher belongs to one kind of write and to one event loop. Requests from other loops, and the replies to them, cross over many
at a time, so that a record costs its caller a future and not a task on each side.

A request that is refused fails alone, with the error that its batch gave it. When a batch fails as a whole because of one of its
requests, each of them is sent once more by itself, so that only the one at fault gets the error. A batch that takes long, because
some row is locked, does not hold up the others: after SLOW_AFTER the next one starts beside it.

A batcher may have two batches in flight. Runs that get their replies together send their next requests together, so that client
and server would wait for each other in turns. Many requests are therefore sent in two halves: while the server works on one, the
runs of the other go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from perdure.aio.pending_write import PendingWrite
from perdure.errors import PersistenceError

MAX_REQUESTS: Final = 500
MAX_BYTES: Final = 8 << 20
SLOW_AFTER: Final = 0.05  # seconds
MAX_IN_FLIGHT: Final = 4  # also when all of them are slow
WORTH_SPLITTING: Final = 16


class _Again(enum.Enum):
    SEND_AGAIN = "SEND_AGAIN"


SEND_AGAIN: Final = _Again.SEND_AGAIN  # the request has to be sent once more; nothing was written


class Request(Protocol):
    """A write that a batcher can send."""

    @property
    def written_rows(self) -> Collection[Hashable]:
        """What it writes. A batch writes each of these once: a second request for one of them goes into the next batch."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        ...


Q = TypeVar("Q", bound=Request)
A = TypeVar("A")
Reply: TypeAlias = A | BaseException | _Again


class _QueuedRequest(PendingWrite[A], Generic[Q, A]):
    """A request, and the reply to it on the caller's loop. `on_reply` is called on the batcher's loop before that."""

    __slots__ = ("on_reply", "request")

    def __init__(self, request: Q, on_reply: Callable[[], None] | None) -> None:
        super().__init__()
        self.request = request
        self.on_reply = on_reply


class Batcher(Generic[Q, A]):
    """Sends requests of one kind in batches. Everything but `put_threadsafe` runs on one event loop.

    `statements` counts the batches that were sent.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Q]], Awaitable[Sequence[Reply[A]]]],
        is_caused_by_one_request: Callable[[BaseException], bool],
        *,
        max_in_flight: int = 1,
    ) -> None:
        """`is_caused_by_one_request` says of an error whether a batch failed because of one of its requests.

        `max_in_flight` is how many batches may be in flight, unless one is slow.
        """
        self._perform = perform
        self._is_caused_by_one_request = is_caused_by_one_request
        self._max_in_flight = max_in_flight
        self._waiting: deque[_QueuedRequest[Q, A]] = deque()
        # Put by other loops, and not yet moved to `_waiting`. Guarded by the lock.
        self._arriving: list[_QueuedRequest[Q, A]] = []
        self._lock = threading.Lock()
        self._in_flight: set[asyncio.Task[None]] = set()
        # Whether a batch is about to be collected: requests that are put before that are part of it.
        self._is_starting = False
        # When the last batch was started, and whether a timer will look whether it is slow.
        self._started_at = 0.0
        self._has_timer = False
        self.statements = 0

    def put(self, request: Q, on_reply: Callable[[], None] | None = None) -> PendingWrite[A]:
        """The reply to the request, once its write is committed. On the batcher's own loop."""
        queued: _QueuedRequest[Q, A] = _QueuedRequest(request, on_reply)
        self._waiting.append(queued)
        if not self._is_starting:
            self._start_if_free()
        return queued

    def put_threadsafe(
        self, request: Q, call: Callable[[Callable[[], None]], object], on_reply: Callable[[], None] | None = None
    ) -> PendingWrite[A]:
        """As `put`, from any loop: the reply comes on that loop. `call` runs a callback on the batcher's loop, or raises."""
        queued: _QueuedRequest[Q, A] = _QueuedRequest(request, on_reply)
        with self._lock:
            self._arriving.append(queued)
            is_first = len(self._arriving) == 1
        if is_first:
            try:
                call(self._queue_arriving)
            except PersistenceError as error:
                for one in self._pop_arriving():
                    _deliver_all([(one, PersistenceError(*error.args))])
        return queued

    def _pop_arriving(self) -> list[_QueuedRequest[Q, A]]:
        with self._lock:
            arrived, self._arriving = self._arriving, []
        return arrived

    def _queue_arriving(self) -> None:
        self._waiting.extend(self._pop_arriving())
        self._start_if_free()

    def _start_if_free(self) -> None:
        if self._waiting and not self._is_starting and len(self._in_flight) < self._max_in_flight:
            self._start()

    def _start(self) -> None:
        self._is_starting = True
        loop = asyncio.get_running_loop()
        # In a context of its own: it is no part of the run whose request is first. And not registered, so that a shutdown which
        # cancels all tasks of the loop leaves it alone: what was sent gets its reply, and its callers wait for that.
        task = asyncio.Task(self._run_batch(), loop=loop, context=contextvars.Context())
        asyncio._unregister_task(task)  # noqa: SLF001 - documented under "Extending", for this
        self._in_flight.add(task)
        task.add_done_callback(self._finish_batch)
        self._started_at = loop.time()
        if not self._has_timer:
            self._has_timer = True
            loop.call_later(SLOW_AFTER, self._start_beside_slow)

    def _finish_batch(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._start_if_free()

    def _start_beside_slow(self) -> None:
        """Start another batch beside those in flight, if the last of them is slow and requests wait."""
        loop = asyncio.get_running_loop()
        self._has_timer = False
        if not self._in_flight:
            return
        wait_for = self._started_at + SLOW_AFTER - loop.time()
        if wait_for <= 0 and self._waiting and not self._is_starting and len(self._in_flight) < MAX_IN_FLIGHT:
            self._start()
        if not self._has_timer:
            self._has_timer = True
            loop.call_later(wait_for if wait_for > 0 else SLOW_AFTER, self._start_beside_slow)

    async def _run_batch(self) -> None:
        self._is_starting = False
        batch = self._pop_batch(self._share())
        self._start_if_free()
        if batch:
            await self._send_batch(batch)

    def _share(self) -> int:
        """How many waiting requests go into this batch: all, or half when there may be another beside it."""
        waiting = len(self._waiting)
        has_room = len(self._in_flight) < self._max_in_flight
        return (waiting + 1) // 2 if has_room and waiting >= WORTH_SPLITTING else waiting

    def _pop_batch(self, most: int) -> list[_QueuedRequest[Q, A]]:
        waiting = self._waiting
        if len(waiting) == 1:
            return [waiting.popleft()]
        batch: list[_QueuedRequest[Q, A]] = []
        left: list[_QueuedRequest[Q, A]] = []
        written: set[Hashable] = set()
        size, most = 0, min(most, MAX_REQUESTS)
        while waiting and len(batch) < most and size < MAX_BYTES:
            queued = waiting.popleft()
            rows = queued.request.written_rows
            if written.isdisjoint(rows):
                written.update(rows)
                size += queued.request.size
                batch.append(queued)
            else:
                left.append(queued)
        waiting.extendleft(reversed(left))
        return batch

    async def _send_batch(self, batch: list[_QueuedRequest[Q, A]]) -> None:
        self.statements += 1
        try:
            replies = await self._perform([queued.request for queued in batch])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers get it
            await self._fail(batch, error)
            return
        self._waiting.extend([queued for queued, reply in zip(batch, replies, strict=True) if reply is SEND_AGAIN])
        _deliver_all(zip(batch, replies, strict=True))

    async def _fail(self, batch: list[_QueuedRequest[Q, A]], error: BaseException) -> None:
        if len(batch) > 1 and self._is_caused_by_one_request(error):
            for one in batch:
                await self._send_batch([one])
            return
        # One for each caller, as each adds its own traceback.
        many = isinstance(error, PersistenceError) and len(batch) > 1
        _deliver_all((queued, PersistenceError(*error.args) if many else error) for queued in batch)


def _deliver_all(replies: Iterable[tuple[_QueuedRequest[Any, Any], Any]]) -> None:
    """Give each caller its reply on its own loop, which is woken once. A request that is sent again has none yet."""
    here = asyncio.get_running_loop()
    elsewhere: dict[asyncio.AbstractEventLoop, list[tuple[_QueuedRequest[Any, Any], Any]]] = {}
    for queued, reply in replies:
        if reply is SEND_AGAIN:
            continue
        if queued.on_reply is not None:
            queued.on_reply()
        loop = queued.loop
        if loop is here:
            _deliver(queued, reply)
        else:
            elsewhere.setdefault(loop, []).append((queued, reply))
    for loop, theirs in elsewhere.items():
        with contextlib.suppress(RuntimeError):  # it was closed, so nothing waits there any more
            loop.call_soon_threadsafe(_deliver_each, theirs)


def _deliver_each(replies: Iterable[tuple[_QueuedRequest[Any, Any], Any]]) -> None:
    for queued, reply in replies:
        _deliver(queued, reply)


def _deliver(queued: _QueuedRequest[Any, Any], reply: Any) -> None:
    if isinstance(reply, BaseException):
        queued.set_exception(reply)
    else:
        queued.set_result(reply)
