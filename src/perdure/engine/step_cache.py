"""The cache of step outcomes: reading and writing it, and letting one run at a time fill a missing key (single-flight).

The cache is the user's object, so the engine assumes nothing about it. It may drop values or ignore a ttl: the instant of expiry
is part of the text. It may hold a text that perdure did not write, or that another version wrote: that is a miss. Its `get` or
`set` may fail: the run goes on without it, since a step that is shared must be harmless to do twice, and its own journal has the
outcome. Only a step with `at_most_once` waits until the cache can be read. A failing cache causes one warning in each drive.

A flight lets one of several runs do the work while the others wait for it. It is identified by the object that the user passed
(not by a wrapper around it), by the key and by the event loop: two processes may both do the work.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from perdure.errors import PerdureWarning, PersistenceError
from perdure.kv.protocol import as_text, maybe_await
from perdure.model.clock import Clock
from perdure.model.durations import microseconds

_FORMAT_VERSION: Final = 1


class Cached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a step, encoded as in its journal entry, and the instant until which other runs may use it."""

    ok: bool
    payload: msgspec.Raw
    args_hash: bytes | None
    expires_at: int | None

    def to_text(self) -> str:
        """The JSON text that `from_text` reads."""
        return msgspec.json.encode(_CacheText(_FORMAT_VERSION, self)).decode()

    @staticmethod
    def from_text(text: str) -> Cached:
        """The outcome in a text that `to_text` wrote; ValueError for any other text. Only the codec can check the payload."""
        if not isinstance(text, str):
            raise ValueError(f"it is no text but a {type(text).__name__}")
        try:
            return msgspec.json.decode(text, type=_CacheText).step
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


class _CacheText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    step: Cached


@dataclass(slots=True)
class _Flight:
    # A reference, so that no other object can get the id of the cache while the flight exists.
    cache: Any
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # How many callers hold the lock or wait for it.
    callers: int = 0
    # Identifies the caller that holds the lock.
    holder: object = None


_FlightKey: TypeAlias = tuple[asyncio.AbstractEventLoop, int, str]
# A flight exists while a caller holds its lock or waits for it. A loop touches only its own flights, so threads need no lock.
_flights: dict[_FlightKey, _Flight] = {}
# The holders of the flights that the running code is inside of.
_held: ContextVar[tuple[object, ...]] = ContextVar("perdure_flights", default=())


class StepCaching:
    """A user's cache for the outcomes of steps, by key, with one run at a time for each key."""

    def __init__(self, cache: Any, clock: Clock) -> None:
        from perdure.caches import as_cache  # imported only if a cache is used

        self._user_cache = cache
        self._cache = as_cache(cache)
        self._clock = clock
        self._has_warned = False

    async def read(self, key: str) -> Cached | None:
        """The outcome under `key`, unless it is missing or has expired.

        A text that cannot be read is a miss, with a `PerdureWarning`. Raises `PersistenceError` when the cache fails.
        """
        try:
            text = await maybe_await(self._cache.get(key))
        except Exception as error:
            raise PersistenceError(f"the cache could not be asked for step {key!r}", _reason(error)) from error
        if text is None:
            return None
        try:
            cached = Cached.from_text(as_text(text))
        except ValueError as error:
            message = f"what the cache has under {key!r} cannot be read, so that the step runs again: {error}"
            warnings.warn(message, PerdureWarning, stacklevel=2)
            return None
        return None if cached.expires_at is not None and cached.expires_at <= self._clock.now() else cached

    async def keep(self, key: str, cached: Cached, ttl: float | None = None) -> None:
        """Keep the outcome for other runs, for `ttl` seconds from now if given. A failing cache causes a `PerdureWarning`."""
        if ttl is not None:
            cached = msgspec.structs.replace(cached, expires_at=self._clock.now() + microseconds(ttl, what="ttl"))
        text = cached.to_text()
        try:
            # The ttl is passed only if there is one, in whole seconds and by position: a cache may lack the parameter, or name it
            # differently.
            await maybe_await(self._cache.set(key, text) if ttl is None else self._cache.set(key, text, math.ceil(ttl)))
        except Exception as error:  # noqa: BLE001 - it is the user's object, and this run does not depend on it
            self.warn_of_failure(
                f"the cache did not keep step {key!r} ({_reason(error)}); this run has its result, others will do the step again"
            )

    def warn_of_failure(self, message: str) -> None:
        """Warn that the cache fails, once for this drive: each of its steps would say the same."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, PerdureWarning, stacklevel=3)

    @asynccontextmanager
    async def flight(self, key: str) -> AsyncIterator[None]:
        """Enter as the only caller for this cache and key on this event loop; others wait, in the order of their calls.

        A cancelled holder or waiter leaves nothing behind. Raises RuntimeError inside a flight of the same key: to wait
        there would be a deadlock.
        """
        flight_key = (asyncio.get_running_loop(), id(self._user_cache), key)
        flight = _flights.setdefault(flight_key, _Flight(self._user_cache))
        around = _held.get()
        if flight.holder in around:
            raise RuntimeError(
                f"step {key!r} was reached from inside a step with the same key and the same cache, and each would wait for the "
                "other; pass key= to tell them apart"
            )
        flight.callers += 1
        try:
            async with flight.lock:
                flight.holder = object()
                _held.set((*around, flight.holder))
                try:
                    yield
                finally:
                    flight.holder = None
                    _held.set(around)
        finally:
            flight.callers -= 1
            if not flight.callers:
                del _flights[flight_key]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
