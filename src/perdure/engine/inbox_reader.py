"""Reading the inbox of a run in memory: when its store may have changed, and before a wait expires.

Nothing is read while no wait is open for an inbox row. A read that fails is repeated after a pause: a wait expires only after the
inbox was read, and must not wait for that for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Final

from perdure.aio.store_watch import POLL_SECONDS, expect_change
from perdure.engine.timers_and_signals import Waits, nothing
from perdure.errors import SnapshotCorrupt
from perdure.model.approvals import DEDUPE
from perdure.model.clock import Clock
from perdure.store import Store

# How soon the inbox is read again if that failed.
_READ_AGAIN_SECONDS: Final = 1.0
# Tasks that fetch inboxes: an event loop refers to its tasks weakly.
_fetching: Final[set[asyncio.Task[None]]] = set()


class InboxReader:
    """Fetches the inbox rows of one drive for its waits."""

    def __init__(
        self, store: Store, run_id: str, clock: Clock, waits: Waits, on_damage: Callable[[SnapshotCorrupt], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._waits = waits
        self._on_damage = on_damage
        self._loop = asyncio.get_running_loop()
        # How long the watching begins after the body came to rest: a run that leaves memory soon need not watch its store.
        self.watches_after = POLL_SECONDS
        # What will let the inbox be looked at: a timer until the store is watched, then its next change.
        self._watching: asyncio.Future[None] | asyncio.TimerHandle | None = None
        # Whether reading failed, and a timer is set to try again.
        self._is_to_be_read = False
        self._is_closed = False

    def look(self) -> None:
        """Something may have been sent: fetch what is new, unless nothing waits for it."""
        if not self._is_closed and self._waits.has_address:
            self.read(self._clock.now())

    def read(self, asked_at: int) -> None:
        """Fetch what is new; `asked_at` is the present instant."""
        fetching = self._loop.create_task(self._fetch(asked_at), context=contextvars.Context())
        _fetching.add(fetching)
        fetching.add_done_callback(_fetching.discard)

    def watch(self) -> None:
        """The body rests: look whenever the store may have changed, as long as a row is waited for."""
        if self._watching is None and self._waits.has_address and not self._is_closed:
            self._watching = self._loop.call_later(self.watches_after, self._watch_now)

    def close(self) -> None:
        """Fetch nothing more, and call nothing more."""
        self._is_closed = True
        self._on_damage = nothing
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _watch_now(self) -> None:
        self._watching = change = expect_change(self._store)
        change.add_done_callback(self._store_changed)
        self.look()  # for what came before it was watched

    def _store_changed(self, change: asyncio.Future[None]) -> None:
        if change is self._watching:
            self._watching = None
            # Not while the store is down: its watch may take that for a change, and return at once.
            if self._waits.has_address and not self._is_to_be_read:
                self._watch_now()

    async def _fetch(self, asked_at: int) -> None:
        try:
            for name, payload in self._waits.expiries():
                await self._store.signal(self._run_id, name, payload, dedupe=DEDUPE, now=self._clock.store_now())
            signals = await self._store.inbox(self._run_id, after=self._waits.inbox_seq)
        except SnapshotCorrupt as damage:
            self._on_damage(damage)
        except Exception:  # noqa: BLE001 - the store is down; the run is ours until its lease ends
            self._read_later()
        else:
            self._waits.note_inbox_read(signals, asked_at)

    def _read_later(self) -> None:
        if not self._is_to_be_read:
            self._is_to_be_read = True
            self._loop.call_later(_READ_AGAIN_SECONDS, self._read_again)

    def _read_again(self) -> None:
        self._is_to_be_read = False
        if self._watching is None and self._waits.has_address and not self._is_closed:
            self._watch_now()
        else:
            self.look()
