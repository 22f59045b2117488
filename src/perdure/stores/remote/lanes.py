"""Group commit: while a statement is under way, what arrives next is gathered into the following one.

A lane belongs to one kind of write and to one event loop. A request that is refused fails alone, with the error that its
statement gave it. When a statement fails as a whole because of what it says, each of its requests is sent once more by itself,
so that only the culprit hears of it. One that takes long, because some row is locked, does not hold up the others: after PATIENCE
the next one starts beside it.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from perdure.errors import PersistenceError

MAX_REQUESTS: Final = 500
MAX_BYTES: Final = 8 << 20
PATIENCE: Final = 0.05
MAX_STATEMENTS: Final = 4


class _Again(enum.Enum):
    AGAIN = "AGAIN"


AGAIN: Final = _Again.AGAIN  # the request has to be sent once more; nothing was written


class Request(Protocol):
    """What a lane carries."""

    @property
    def places(self) -> Collection[Hashable]:
        """What is written once in a statement: a second request for one of these goes into the next."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        ...


Q = TypeVar("Q", bound=Request)
A = TypeVar("A")
Answer: TypeAlias = A | BaseException | _Again


class Lane(Generic[Q, A]):
    """Requests of one kind on their way into the database. All of it runs on one event loop.

    `statements` counts what was sent.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Q]], Awaitable[Sequence[Answer[A]]]],
        has_culprit: Callable[[BaseException], bool],
    ) -> None:
        """`has_culprit` says of an error whether a statement for many failed because of one of them."""
        self._perform = perform
        self._has_culprit = has_culprit
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self.statements = 0

    async def submit(self, request: Q) -> A:
        """The answer to the request, once what it wrote is committed."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if not self._under_way:
            self._start()
        return await future

    def _start(self) -> None:
        task = asyncio.get_running_loop().create_task(self._send())
        self._under_way.add(task)
        task.add_done_callback(self._sent)
        asyncio.get_running_loop().call_later(PATIENCE, self._look_after, task)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if self._waiting and not self._under_way:
            self._start()

    def _look_after(self, task: asyncio.Task[None]) -> None:
        """Start another statement beside one that takes long."""
        if task in self._under_way and len(self._under_way) < MAX_STATEMENTS:
            if self._waiting:
                self._start()
            else:
                asyncio.get_running_loop().call_later(PATIENCE, self._look_after, task)

    async def _send(self) -> None:
        await asyncio.sleep(0)  # what was submitted in the same turn of the loop comes along
        batch = self._take()
        if batch:
            await self._answer(batch)

    def _take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        left: deque[tuple[Q, asyncio.Future[A]]] = deque()
        taken: set[Hashable] = set()
        size = 0
        while self._waiting and len(batch) < MAX_REQUESTS and size < MAX_BYTES:
            request, future = self._waiting.popleft()
            if not taken.isdisjoint(request.places):
                left.append((request, future))
                continue
            taken.update(request.places)
            size += request.size
            batch.append((request, future))
        self._waiting.extendleft(reversed(left))
        return batch

    async def _answer(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        self.statements += 1
        try:
            answers = await self._perform([request for request, _ in batch])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers hear of it
            await self._fail(batch, error)
            return
        for (request, future), answer in zip(batch, answers, strict=True):
            if answer is AGAIN:
                self._waiting.append((request, future))
            else:
                _settle(future, answer)

    async def _fail(self, batch: list[tuple[Q, asyncio.Future[A]]], error: BaseException) -> None:
        if len(batch) > 1 and self._has_culprit(error):
            for one in batch:
                await self._answer([one])
            return
        for _, future in batch:
            # One for each caller, as each adds its own traceback.
            _settle(future, PersistenceError(*error.args) if isinstance(error, PersistenceError) and len(batch) > 1 else error)


def _settle(future: asyncio.Future[A], answer: A | BaseException | _Again) -> None:
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)  # type: ignore[arg-type]  # AGAIN was told apart by the caller
