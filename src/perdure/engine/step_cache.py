"""What the engine does with a cache: keep the outcome of a step in it, and let one run at a time find out that it is missing.

The cache is somebody else's, so nothing about it is taken for granted. It may forget, or not know what a ttl is: the instant of
expiry is part of the text. It may hold what we did not write: a text of another version is a miss. It may fail: a run cannot know
then whether a step was done before, so it stops; but when only keeping fails, the run goes on, as it has a record of its own.

Flights are what makes one of several runs do the work and the others wait for it. They belong to the object that the user
passed, whatever was made around it, and to an event loop: between processes the work may be done twice.
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
    """The outcome of a step, as its journal entry has it, and until when it counts for other runs."""

    ok: bool
    payload: msgspec.Raw
    args_hash: bytes | None
    expires_at: int | None

    def to_text(self) -> str:
        """JSON that `from_text` reads."""
        return msgspec.json.encode(_Written(_FORMAT_VERSION, self)).decode()

    @staticmethod
    def from_text(text: str) -> Cached:
        """What `to_text` wrote; ValueError when it did not write this. The payload is JSON, and more is for the codec to say."""
        if not isinstance(text, str):
            raise ValueError(f"it is no text but a {type(text).__name__}")
        try:
            return msgspec.json.decode(text, type=_Written).step
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    step: Cached


@dataclass(slots=True)
class _Flight:
    # Held here so that no other object can get its id while somebody is inside.
    cache: Any
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    inside: int = 0
    # Whoever has the turn.
    holder: object = None


_Place: TypeAlias = tuple[asyncio.AbstractEventLoop, int, str]
# An entry is there while somebody holds or awaits its turn. A loop touches no entries but its own, so threads need no lock.
_flights: dict[_Place, _Flight] = {}
# The turns that were taken around the running code, by their holders.
_held: ContextVar[tuple[object, ...]] = ContextVar("perdure_flights", default=())


class StepCaching:
    """A user's cache, as the engine sees it: outcomes of steps by key, and one run at a time for each key."""

    def __init__(self, cache: Any, clock: Clock) -> None:
        from perdure.caches import as_cache  # loaded by those who use one

        self._users = cache
        self._cache = as_cache(cache)
        self._clock = clock

    async def read(self, key: str) -> Cached | None:
        """What is kept for `key` and has not expired.

        A text that is not ours, or damaged, is a miss and a `PerdureWarning`. `PersistenceError` when the cache fails.
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
            told = f"what the cache has under {key!r} cannot be read, so that the step runs again: {error}"
            warnings.warn(told, PerdureWarning, stacklevel=2)
            return None
        return None if cached.expires_at is not None and cached.expires_at <= self._clock.now() else cached

    async def keep(self, key: str, cached: Cached, ttl: float | None = None) -> None:
        """Keep the outcome for other runs, for `ttl` seconds from now if given. A cache that fails is a `PerdureWarning`."""
        if ttl is not None:
            cached = msgspec.structs.replace(cached, expires_at=self._clock.now() + microseconds(ttl, what="ttl"))
        text = cached.to_text()
        try:
            # A ttl only if there is one, in whole seconds and by position: a cache that knows less, or another name, will do.
            await maybe_await(self._cache.set(key, text) if ttl is None else self._cache.set(key, text, math.ceil(ttl)))
        except Exception as error:  # noqa: BLE001 - it is the user's object, and this run does not depend on it
            told = (
                f"the cache did not keep step {key!r} ({_reason(error)}); this run has its result, others will do the step again"
            )
            warnings.warn(told, PerdureWarning, stacklevel=2)

    @asynccontextmanager
    async def flight(self, key: str) -> AsyncIterator[None]:
        """Inside, nobody else on this loop is inside for the same user's object and key; others come in the order they asked.

        A cancelled holder or waiter leaves nothing behind. Whoever is inside cannot ask for the same key again: RuntimeError.
        """
        place = (asyncio.get_running_loop(), id(self._users), key)
        flight = _flights.setdefault(place, _Flight(self._users))
        around = _held.get()
        if flight.holder in around:
            raise RuntimeError(
                f"step {key!r} was reached from inside a step with the same key and the same cache, and each would wait for the "
                "other; pass key= to tell them apart"
            )
        flight.inside += 1
        try:
            async with flight.turn:
                flight.holder = object()
                _held.set((*around, flight.holder))
                try:
                    yield
                finally:
                    flight.holder = None
                    _held.set(around)
        finally:
            flight.inside -= 1
            if not flight.inside:
                del _flights[place]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
