"""A loop in which time is a number, and stores that dawdle or die: whole campaigns in seconds, the same for the same seed."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from perdure.errors import PersistenceError
from perdure.model.clock import Timer
from perdure.model.durations import MICROSECOND

T = TypeVar("T")


class _VirtualSelector(selectors.SelectSelector):
    """Waits by moving the loop's clock; waiting for ever would be a deadlock, so it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never really waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class LoopClock:
    """A perdure clock that goes by the running loop's time."""

    def now(self) -> int:
        return 1_700_000_000 * MICROSECOND + round(asyncio.get_running_loop().time() * MICROSECOND)

    def store_now(self) -> int | None:
        return self.now()

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(max(0, at - self.now()) / MICROSECOND, callback, *args)


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """What `main` gives, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


# Reads are left alone: a process that dies while it reads has changed nothing.
WRITES = frozenset({
    "create", "claim", "acquire", "renew", "release", "record", "suspend", "finish", "signal", "cancel", "report", "fire",
    "continue_as",
})  # fmt: skip


class _Proxy:
    """A store that does something around each write of another."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._around(method) if name in WRITES else method

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        raise NotImplementedError


class MortalStore(_Proxy):
    """The store as seen by a process that dies at its n-th write: just before it, or just after it was committed.

    From then on nothing that process does reaches the store.
    """

    def __init__(self, store: Any, dies_at: int, *, after_commit: bool) -> None:
        super().__init__(store)
        self.writes_left = dies_at
        self._after_commit = after_commit

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.writes_left -= 1
            if self.writes_left == -1 and self._after_commit:
                await method(*args, **kwargs)
            if self.writes_left < 0:
                raise PersistenceError("this process", "is dead")
            return await method(*args, **kwargs)

        return call


class SlowStore(_Proxy):
    """A store whose writes take a while before and after they take effect."""

    def __init__(self, store: Any, rng: random.Random) -> None:
        super().__init__(store)
        self._rng = rng

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(self._rng.choice([0, 0, self._rng.random() * 0.01]))
            result = await method(*args, **kwargs)
            await asyncio.sleep(self._rng.choice([0, 0, self._rng.random() * 0.01]))
            return result

        return call


class HeldBack(_Proxy):
    """A store whose `verb` takes effect, and answers only when the test lets it; or, held `before`, does neither until then."""

    def __init__(self, store: Any, verb: str = "record", *, before: bool = False) -> None:
        super().__init__(store)
        self._verb = verb
        self._before = before
        self.reached = asyncio.Event()
        self.may_answer = asyncio.Event()

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.__name__ != self._verb:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._before:
                await self._hold()
                return await method(*args, **kwargs)
            answer = await method(*args, **kwargs)
            await self._hold()
            return answer

        return call

    async def _hold(self) -> None:
        self.reached.set()
        try:
            await self.may_answer.wait()
        finally:
            self.may_answer.set()  # if it was cut off, the next is not held
