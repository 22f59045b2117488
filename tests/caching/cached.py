"""What tests of cached steps share: caches of every kind, and step functions that count or wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from perdure import Context, Retry, Workflow
from perdure.engine import step_cache as caching
from perdure.kv.protocol import maybe_await
from perdure.model.journal import Entry
from perdure.state import FileCache, MemoryCache, MemoryKeyValueStore
from perdure.store import Store

Body = Callable[[Context[Any]], Awaitable[Any]]
HOURLY: Final = Retry(3, wait_initial="1h", wait_exp_base=1, wait_jitter=0, wait_max="1h")
AT_ONCE: Final = Retry(3, wait_initial=0, wait_jitter=0)


class OwnCache:
    """A cache as a user writes one, that notes what it is asked."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.log: list[str] = []

    async def get(self, key: str) -> str | None:
        self.log.append(f"get {key}")
        return self.kept.get(key)

    async def set(self, key: str, value: str, ttl: int | None = None) -> None:
        self.log.append(f"set {key}" if ttl is None else f"set {key} for {ttl}")
        self.kept[key] = value

    async def delete(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None


class PlainCache(OwnCache):
    """The same with plain methods."""

    def get(self, key: str) -> str | None:  # type: ignore[override]
        self.log.append(f"get {key}")
        return self.kept.get(key)

    def set(self, key: str, value: str, ttl: int | None = None) -> None:  # type: ignore[override]
        self.log.append(f"set {key}")
        self.kept[key] = value

    def delete(self, key: str) -> bool:  # type: ignore[override]
        return self.kept.pop(key, None) is not None


class Untouchable:
    """A cache that must not be used."""

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError(f"the cache was used: {args}")

    get = set = delete = _refuse


class Counted:
    """A step's function that counts its calls and returns the next of the given results; an exception among them is raised."""

    def __init__(self, *gives: Any) -> None:
        self.gives = gives or ("first", "second", "third", "fourth")
        self.calls = 0

    async def __call__(self, *_: Any) -> Any:
        self.calls += 1
        given = self.gives[min(self.calls, len(self.gives)) - 1]
        if isinstance(given, BaseException):
            raise given
        return given


class Gated:
    """A step's function that waits for the test, and knows how many are inside it."""

    def __init__(self) -> None:
        self.calls = self.inside = self.most = self.cancelled = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> str:
        self.calls += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return f"call {self.calls}"


CACHES: Final[dict[str, Callable[[Path], Any]]] = {
    "dict": lambda _: {},
    "memory": lambda _: MemoryCache(),
    "file": lambda directory: FileCache(directory / "cache"),
    "own": lambda _: OwnCache(),
    "own and plain": lambda _: PlainCache(),
    "key-value store": lambda _: MemoryKeyValueStore(),
}


async def forget(cache: Any, key: str) -> bool:
    return cache.pop(key, None) is not None if isinstance(cache, dict) else await maybe_await(cache.delete(key))


async def has(cache: Any, key: str) -> bool:
    return await maybe_await(cache.get(key)) is not None


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is awaited happens inside the library, where no event can be set
        await asyncio.sleep(0.001)


def waiting_for_a_turn() -> int:
    """How many runs wait for another to find out what the cache lacks."""
    return sum(flight.callers - 1 for flight in caching._flights.values())


async def entry_of(store: Store, run_id: str, key: str) -> Entry:
    (entry,) = [each for each in await store.journal(run_id) if each.key == key and each.phase == "close"]
    return entry


def one_step(fn: Any, *args: Any, **options: Any) -> Body:
    """A body of one step called `s`, with the key `s` and these options."""

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step("s", fn, *args, **{"key": "s", **options})

    return body


def flow(body: Any, name: str = "flow", **options: Any) -> Workflow[[], Any]:
    return Workflow(name, body, **options)
