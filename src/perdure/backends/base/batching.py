"""Group commit: while a statement is under way, what arrives next is gathered into the following one.

A batcher belongs to one kind of write and to one event loop. Requests from other loops, and the answers to them, cross over many
at a time, so that a record costs its caller a future and not a task on each side.

A request that is refused fails alone, with the error that its statement gave it. When a statement fails as a whole because of
what it says, each of its requests is sent once more by itself, so that only the culprit hears of it. One that takes long, because
some row is locked, does not hold up the others: after PATIENCE the next one starts beside it.

A batcher may have two statements under way. Runs that were answered together ask together again, so that client and server would
take turns; many requests are therefore sent in two halves, and while the server has the one, the runs of the other go on.
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

from perdure.aio.pending_write import Answer
from perdure.errors import PersistenceError

MAX_REQUESTS: Final = 500
MAX_BYTES: Final = 8 << 20
PATIENCE: Final = 0.05
MAX_STATEMENTS: Final = 4
WORTH_SPLITTING: Final = 16


class _Again(enum.Enum):
    SEND_AGAIN = "SEND_AGAIN"


SEND_AGAIN: Final = _Again.SEND_AGAIN  # the request has to be sent once more; nothing was written


class Request(Protocol):
    """What a batcher carries."""

    @property
    def written_rows(self) -> Collection[Hashable]:
        """What is written once in a statement: a second request for one of these goes into the next."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        ...


Q = TypeVar("Q", bound=Request)
A = TypeVar("A")
Reply: TypeAlias = A | BaseException | _Again


class _Asked(Answer[A], Generic[Q, A]):
    """The answer to a request, on the loop of whoever asked, and what is to be called on the batcher's loop when there is one."""

    __slots__ = ("on_reply", "request")

    def __init__(self, request: Q, on_reply: Callable[[], None] | None) -> None:
        super().__init__()
        self.request = request
        self.on_reply = on_reply


class Batcher(Generic[Q, A]):
    """Requests of one kind on their way into the database. All of it but `ask` runs on one event loop.

    `statements` counts what was sent.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Q]], Awaitable[Sequence[Reply[A]]]],
        is_caused_by_one_request: Callable[[BaseException], bool],
        *,
        max_in_flight: int = 1,
    ) -> None:
        """`is_caused_by_one_request` says of an error whether a statement for many failed because of one of them.

        `max_in_flight` is how many statements there may be under way, unless one takes long.
        """
        self._perform = perform
        self._has_culprit = is_caused_by_one_request
        self._at_once = max_in_flight
        self._waiting: deque[_Asked[Q, A]] = deque()
        # Asked on other loops, and not noticed here so far. Guarded by the lock.
        self._arriving: list[_Asked[Q, A]] = []
        self._lock = threading.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        # Whether a statement is about to begin, which takes along what is asked before it does.
        self._is_starting = False
        # When the last statement was started, and whether somebody will look how it does.
        self._started_at = 0.0
        self._is_looked_after = False
        self.statements = 0

    def put(self, request: Q, on_reply: Callable[[], None] | None = None) -> Answer[A]:
        """The answer to the request, once what it wrote is committed. On the batcher's own loop."""
        asked: _Asked[Q, A] = _Asked(request, on_reply)
        self._waiting.append(asked)
        if not self._is_starting:
            self._start_if_free()
        return asked

    def put_threadsafe(
        self, request: Q, call: Callable[[Callable[[], None]], object], on_reply: Callable[[], None] | None = None
    ) -> Answer[A]:
        """As `put`, from any loop: an answer on that loop. `call` calls something on the batcher's loop, or raises."""
        asked: _Asked[Q, A] = _Asked(request, on_reply)
        with self._lock:
            self._arriving.append(asked)
            is_first = len(self._arriving) == 1
        if is_first:
            try:
                call(self._arrive)
            except PersistenceError as error:
                for one in self._arrived():
                    _settle_all([(one, PersistenceError(*error.args))])
        return asked

    def _arrived(self) -> list[_Asked[Q, A]]:
        with self._lock:
            arrived, self._arriving = self._arriving, []
        return arrived

    def _arrive(self) -> None:
        self._waiting.extend(self._arrived())
        self._start_if_free()

    def _start_if_free(self) -> None:
        if self._waiting and not self._is_starting and len(self._under_way) < self._at_once:
            self._start()

    def _start(self) -> None:
        self._is_starting = True
        loop = asyncio.get_running_loop()
        # In a context of its own: it is no part of the run that asks first. And unknown to whoever cancels all tasks of a loop to
        # shut it down: what was sent is answered, and those who wait for that are waited for.
        task = asyncio.Task(self._send(), loop=loop, context=contextvars.Context())
        asyncio._unregister_task(task)  # noqa: SLF001 - documented under "Extending", for this
        self._under_way.add(task)
        task.add_done_callback(self._sent)
        self._started_at = loop.time()
        if not self._is_looked_after:
            self._is_looked_after = True
            loop.call_later(PATIENCE, self._look_after)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._start_if_free()

    def _look_after(self) -> None:
        """Start another statement beside those under way, if the last of them takes long and something waits for it."""
        loop = asyncio.get_running_loop()
        self._is_looked_after = False
        if not self._under_way:
            return
        patient_for = self._started_at + PATIENCE - loop.time()
        if patient_for <= 0 and self._waiting and not self._is_starting and len(self._under_way) < MAX_STATEMENTS:
            self._start()
        if not self._is_looked_after:
            self._is_looked_after = True
            loop.call_later(patient_for if patient_for > 0 else PATIENCE, self._look_after)

    async def _send(self) -> None:
        self._is_starting = False
        batch = self._take(self._share())
        self._start_if_free()
        if batch:
            await self._answer(batch)

    def _share(self) -> int:
        """How many of those that wait go into this statement: all, or half when there may be another beside it."""
        waiting = len(self._waiting)
        has_room = len(self._under_way) < self._at_once
        return (waiting + 1) // 2 if has_room and waiting >= WORTH_SPLITTING else waiting

    def _take(self, most: int) -> list[_Asked[Q, A]]:
        waiting = self._waiting
        if len(waiting) == 1:
            return [waiting.popleft()]
        batch: list[_Asked[Q, A]] = []
        left: list[_Asked[Q, A]] = []
        taken: set[Hashable] = set()
        size, most = 0, min(most, MAX_REQUESTS)
        while waiting and len(batch) < most and size < MAX_BYTES:
            asked = waiting.popleft()
            places = asked.request.written_rows
            if taken.isdisjoint(places):
                taken.update(places)
                size += asked.request.size
                batch.append(asked)
            else:
                left.append(asked)
        waiting.extendleft(reversed(left))
        return batch

    async def _answer(self, batch: list[_Asked[Q, A]]) -> None:
        self.statements += 1
        try:
            answers = await self._perform([asked.request for asked in batch])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers hear of it
            await self._fail(batch, error)
            return
        self._waiting.extend([asked for asked, answer in zip(batch, answers, strict=True) if answer is SEND_AGAIN])
        _settle_all(zip(batch, answers, strict=True))

    async def _fail(self, batch: list[_Asked[Q, A]], error: BaseException) -> None:
        if len(batch) > 1 and self._has_culprit(error):
            for one in batch:
                await self._answer([one])
            return
        # One for each caller, as each adds its own traceback.
        many = isinstance(error, PersistenceError) and len(batch) > 1
        _settle_all((asked, PersistenceError(*error.args) if many else error) for asked in batch)


def _settle_all(answered: Iterable[tuple[_Asked[Any, Any], Any]]) -> None:
    """Give each caller its answer on its own loop, which is woken once. Whose request is sent again has none yet."""
    here = asyncio.get_running_loop()
    elsewhere: dict[asyncio.AbstractEventLoop, list[tuple[_Asked[Any, Any], Any]]] = {}
    for asked, answer in answered:
        if answer is SEND_AGAIN:
            continue
        if asked.on_reply is not None:
            asked.on_reply()
        loop = asked.loop
        if loop is here:
            _settle(asked, answer)
        else:
            elsewhere.setdefault(loop, []).append((asked, answer))
    for loop, theirs in elsewhere.items():
        with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle_each, theirs)


def _settle_each(answered: Iterable[tuple[_Asked[Any, Any], Any]]) -> None:
    for asked, answer in answered:
        _settle(asked, answer)


def _settle(asked: _Asked[Any, Any], answer: Any) -> None:
    if isinstance(answer, BaseException):
        asked.set_exception(answer)
    else:
        asked.set_result(answer)
