"""The lane: scripts go to the server in one line, many at a time.

While one pipeline is under way, what arrives meanwhile is gathered into the next. So a single caller pays one round trip, and a
thousand runs that record at once pay for a handful. A pipeline is no transaction: each script in it is atomic by itself, is
answered by itself and fails by itself.

When the connection breaks nobody knows which scripts have run, and the whole pipeline is sent again. That is safe: each script
leaves a mark (a lease's token, or the call's own) by which it recognises itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from perdure.backends.redis.calls import Call, answer
from perdure.backends.redis.client_loop import Home, leave_to_parent
from perdure.backends.redis.driver import RedisAddress, is_unknown_script, map_error, may_pass
from perdure.errors import PersistenceError

T = TypeVar("T")

# A pipeline ends with the call that makes it one of so many, or of so many bytes.
_MOST_AT_ONCE: Final = 256
_LARGEST: Final = 4_000_000
# How long to wait before each repetition, when the server cannot be reached or cannot answer yet.
_PAUSES: Final = (0.0, 0.05, 0.2, 0.5, 1.0)
# A server that answers nothing for so long is not asked again.
_GIVES_UP_AFTER: Final = 15.0


class Batcher:
    """Sends calls through one client. Any thread may put one in."""

    def __init__(self, make: Callable[[], Any], home: Home, where: RedisAddress, *, owned: bool) -> None:
        self._make = make
        self.home = home
        self.where = where
        self._owned = owned
        self._start_over()

    def _start_over(self) -> None:
        """Also in a forked child: what the parent's connections carry is not ours."""
        self._pid = os.getpid()
        self._client: Any = None  # made and used on the home loop only
        self._loop: asyncio.AbstractEventLoop | None = None  # the home loop, once there is a client
        self._pumping: asyncio.Task[Any] | None = None  # the last pump, on the home loop
        self._lock = threading.Lock()  # guards the two below; nobody waits under it
        self._waiting: deque[Call] = deque()
        self._busy = False  # whether a pump is running or about to

    def put(self, call: Call) -> None:
        """Send the call with the next pipeline."""
        if self._pid != os.getpid():
            leave_to_parent(self._client, self._loop)
            self._start_over()
        with self._lock:
            self._waiting.append(call)
            starts, self._busy = not self._busy, True
        if starts:
            try:
                self.submit(self._pump())
            except PersistenceError as gone:
                self._fail_waiting(gone)

    @property
    def client(self) -> Any:
        """The client. To be asked for on the home loop only."""
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            self._client = self._make()
        return self._client

    def another(self) -> Batcher:
        """A lane with connections of its own or, when the client is borrowed, a second one on the same loop."""
        self.home.pin()
        return Batcher(self._make, self.home, self.where, owned=self._owned)

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine on the home loop. Raises `PersistenceError` when the borrowed client's loop is gone."""
        try:
            return self.home.submit(coro)
        except RuntimeError as closed:
            raise PersistenceError(str(self.where), str(closed)) from closed

    async def ask(self, question: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """What somebody finds out with the client, on the home loop. Any loop may wait for it."""
        return await asyncio.wrap_future(self.submit(self._with_client(question)))

    async def _with_client(self, question: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return await question(self.client)

    async def close(self) -> None:
        """Wait for what is under way, also for callers that were cancelled, and let go of the connections that are ours."""
        if self._pid != os.getpid():
            return
        try:
            closing = self.home.submit(self._close_client())
        except RuntimeError:  # the loop of a borrowed client is closed, so nothing is under way
            return
        await asyncio.wrap_future(closing)

    def abandon(self, first: Callable[[], None]) -> None:
        """As `close`, some time later, after `first`. Takes no lock: whoever collects garbage may call this, anywhere."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._close_soon, first)

    def _close_soon(self, first: Callable[[], None]) -> None:
        first()
        self._closing = asyncio.ensure_future(self._close_client())

    async def _close_client(self) -> None:
        if self._pumping is not None:
            await asyncio.wait([self._pumping])
        client, self._client = self._client, None
        if client is not None and self._owned:
            await client.aclose()

    def _next(self) -> list[Call]:
        with self._lock:
            batch: list[Call] = []
            size = 0
            while self._waiting and len(batch) < _MOST_AT_ONCE and size < _LARGEST:
                batch.append(self._waiting.popleft())
                size += batch[-1].size
            self._busy = bool(batch)
        return batch

    async def _pump(self) -> None:
        self._pumping = asyncio.current_task()
        try:
            while batch := self._next():
                await self._serve(batch)
        except BaseException as error:
            self._fail_waiting(PersistenceError(str(self.where), f"it was interrupted by {error!r} before this was sent"))
            raise

    def _fail_waiting(self, error: PersistenceError) -> None:
        with self._lock:
            batch, self._busy = list(self._waiting), False
            self._waiting.clear()
        for call in batch:
            call.error = PersistenceError(*error.args)
        answer(batch)

    async def _serve(self, batch: Sequence[Call]) -> None:
        """Answer every call of the batch, whatever happens."""
        try:
            await self._run(batch)
        except BaseException as error:  # mostly that the loop is ending; nobody knows which of them have run
            for call in batch:
                call.error = PersistenceError(str(self.where), f"it was interrupted by {error!r} while this was under way")
            raise
        finally:
            answer(batch)

    async def _run(self, batch: Sequence[Call]) -> None:
        began = asyncio.get_running_loop().time()
        left = await self._attempt(batch)
        for pause in _PAUSES:
            if not left or asyncio.get_running_loop().time() - began > _GIVES_UP_AFTER:
                return
            await asyncio.sleep(pause)
            left = await self._attempt(left)

    async def _attempt(self, batch: Sequence[Call]) -> list[Call]:
        """Send the batch once; gives what may succeed when it is sent again."""
        unknown = await self._send(batch)
        if unknown:
            for call in await self._send(unknown, new=True):
                call.error = PersistenceError(str(self.where), "the server does not keep scripts")
        return [call for call in batch if call.error is not None and _may_pass(call.error)]

    async def _send(self, batch: Sequence[Call], *, new: bool = False) -> list[Call]:
        """Send the calls in one pipeline and take their replies; gives those whose script is not known.

        When the scripts are `new` to the server, the first call of each has its text.
        """
        told: set[str] = set() if new else {call.script.sha for call in batch}
        try:
            pipeline = self.client.pipeline(transaction=False)
            for call in batch:
                pipeline.execute_command(*call.command(whole=call.script.sha not in told))
                told.add(call.script.sha)
            replies = await pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - it is told to each caller
            replies = [error] * len(batch)
        return [call for call, reply in zip(batch, replies, strict=True) if not self._took(call, reply)]

    def _took(self, call: Call, reply: Any) -> bool:
        """Give the call its reply. False when the server does not know its script."""
        call.error = map_error(reply, self.where) if isinstance(reply, Exception) else None
        call.reply = reply
        return call.error is None or not is_unknown_script(reply)


def _may_pass(error: BaseException) -> bool:
    return error.__cause__ is not None and may_pass(error.__cause__)
