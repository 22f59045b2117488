"""One watch of a store for all calls and drives on an event loop that have to know of its changes.

`store.watch` returns when something may have changed, and does not say what. If each of n calls that wait for a run watched the
store by itself and read its run after each change, n runs that end would be read n² times. So they share one watch and take
turns: after a change those that have waited longest look, only so many in a short time. Each looks at the latest when it has
waited for `POLL_SECONDS`, or with thousands of them a few times that. What happens to a run in this process is known without it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from typing import Final, Protocol

# How long a change in the store may go unnoticed, where the store cannot report it.
POLL_SECONDS: Final = 1.0
# How many of those that take turns may look in this time.
TURNS: Final = 16
TURNS_SECONDS: Final = 0.02


class Watchable(Protocol):
    """A store, as far as it matters here."""

    async def watch(self, timeout: float) -> None:
        """Return when something may have changed since the call, at the latest after `timeout` seconds."""


class WatchableForItems(Watchable, Protocol):
    """A store that keeps streams."""

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """As above, and with `items` also when a run may have new items."""


class StoreWatch:
    """The watch of one store on the running event loop. It exists while something expects a change."""

    def __init__(self, watch: Callable[[float], Awaitable[None]], key: tuple[int, int, bool]) -> None:
        self._watch_store = watch
        self._key = key
        self._loop = asyncio.get_running_loop()
        # Since when each waits; the one that has waited longest is first.
        self._expecting: dict[asyncio.Future[None], float] = {}
        self._watching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turns_since, self._turns_left = self._loop.time(), TURNS

    def expect(self) -> asyncio.Future[None]:
        """A future that is done when it is its turn."""
        future = self._loop.create_future()
        self._expecting[future] = self._loop.time()
        future.add_done_callback(self._forget, context=contextvars.Context())
        if self._watching is None:
            self._start()
        return future

    def _forget(self, future: asyncio.Future[None]) -> None:
        self._expecting.pop(future, None)
        if self._expecting:
            return
        if self._watching is not None:
            self._end()
        else:  # it had its turn, and in its own callback it may expect the next change
            self._loop.call_soon(self._end_if_unused, context=contextvars.Context())

    def _end_if_unused(self) -> None:
        if not self._expecting:
            self._end()

    def _end(self) -> None:
        if _watches.get(self._key) is self:
            del _watches[self._key]
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        # In an empty context: a run's body may be what expects a change, and this task is none of its branches.
        self._watching = self._loop.create_task(self._watch(), name="perdure-watch", context=contextvars.Context())
        self._watching.add_done_callback(self._on_watched)

    async def _watch(self) -> None:
        try:
            await self._watch_store(POLL_SECONDS)
        except Exception:  # noqa: BLE001 - a user's own store may raise anything; what is read next reports it
            await asyncio.sleep(POLL_SECONDS)

    def _on_watched(self, task: asyncio.Task[None]) -> None:
        if task is self._watching:
            self._watching = None
            self._give_turns()

    def _give_turns(self) -> None:
        now = self._loop.time()
        if now - self._turns_since >= TURNS_SECONDS:
            self._turns_since, self._turns_left = now, TURNS
        for future in list(islice(self._expecting, self._turns_left)):
            del self._expecting[future]
            self._turns_left -= 1
            if not future.done():
                future.set_result(None)
        if self._expecting and self._timer is None:
            self._timer = self._loop.call_later(TURNS_SECONDS, self._go_on)

    def _go_on(self) -> None:
        """Watch again for those that had no turn, and give turns to those that have waited long enough."""
        self._timer = None
        if self._watching is None:
            self._start()
        since = next(iter(self._expecting.values()), None)
        if since is not None and self._loop.time() - since >= POLL_SECONDS:
            self._give_turns()


# By event loop, store, and whether new items matter.
_watches: Final[dict[tuple[int, int, bool], StoreWatch]] = {}


def expect_change(store: Watchable) -> asyncio.Future[None]:
    """A future that is done when the store may have changed since; cancel it when that does not matter any more.

    The watch starts with the next turn of the loop: what is read after one `await asyncio.sleep(0)` misses no change.
    """
    return _expect(store, store.watch, items=False)


def expect_items(store: WatchableForItems) -> asyncio.Future[None]:
    """As `expect_change`; it is also done when a run may have new items."""
    return _expect(store, partial(store.watch, items=True), items=True)


def _expect(store: Watchable, watch_store: Callable[[float], Awaitable[None]], *, items: bool) -> asyncio.Future[None]:
    key = id(asyncio.get_running_loop()), id(store), items
    watch = _watches.get(key)
    if watch is None:
        watch = _watches[key] = StoreWatch(watch_store, key)
    return watch.expect()
