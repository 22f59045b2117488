"""The open waits of a run: for instants, and for inbox rows.

A wait is opened with an absolute deadline, which is recorded, so that a replay waits for the same instant. Signals of one name
go, in order of arrival, to the waits for it in the order in which these were opened.

A wait of the body is taken when the run is live and the body rests, one at a time: what the body does with the first may cancel
the second, and a signal must not be consumed by a wait that is about to be cancelled. The engine waits outside the body until a
step is tried again, or for news of a child. Such a wait is *immediate*: it ends as soon as it can.

A signal that the store accepted before a wait's deadline wins over it, so the inbox is read once more before such a wait expires:
another process may have sent the signal, and its notification may be late or lost. Nothing is read while no wait is open for an
inbox row. A read that fails is repeated after a pause.

A wait with an `expiry` expires by that row alone: at its deadline the drive sends it to the wait's address, as anyone sends a
decision there, and the store says which row was the first.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias

from perdure.aio.store_watch import POLL_SECONDS, expect_change
from perdure.errors import PerdureError, SnapshotCorrupt
from perdure.model.approvals import DEDUPE
from perdure.model.clock import Clock, Timer
from perdure.model.records import Awaited, Claim, Signal
from perdure.store import Store

_NONE: Final[frozenset[int]] = frozenset()
# From how many elements on a collection is cleared of what it need not keep.
_CLEARED_FROM: Final = 16
# Tells waits of one rank and seq apart, since waits themselves have no order.
_order: Final = itertools.count()
# How soon the inbox is read again if that failed.
_READ_AGAIN_SECONDS: Final = 1.0
# Tasks that fetch inboxes: an event loop refers to its tasks weakly.
_fetching: Final[set[asyncio.Task[None]]] = set()


@dataclass(eq=False, slots=True)
class Wait:
    """One open wait. `seq` is that of its open entry; `on_end` gets the signal, or None when the deadline has passed."""

    seq: int
    deadline: int | None
    on_end: Callable[[Signal | None], None]
    address: Awaited | None = None
    # The payload of the row that the drive sends at the deadline. With it, only where there is no store does it end by that.
    expiry: bytes | None = None
    is_immediate: bool = False
    is_open: bool = False
    is_expiring: bool = False
    # Of an immediate wait with a deadline.
    timer: Timer | None = None


# Waits by a rank, their seq and `_order`. One that was closed is dropped when it comes to the front.
_Heap: TypeAlias = list[tuple[int, int, int, Wait]]


def _push(heap: _Heap, rank: int, wait: Wait, number_open: int) -> None:
    """Add a wait to a heap. Closed waits are dropped from it when they are many."""
    if len(heap) > 4 * number_open + _CLEARED_FROM:
        heap[:] = [item for item in heap if item[-1].is_open]
        heapq.heapify(heap)
    heapq.heappush(heap, (rank, wait.seq, next(_order), wait))


def _first(heap: _Heap) -> Wait | None:
    """Return the open wait with the lowest rank, of several the one that was opened first."""
    while heap and not heap[0][-1].is_open:
        heapq.heappop(heap)
    return heap[0][-1] if heap else None


class WaitingDrive(Protocol):
    """The drive, as its waits see it."""

    clock: Clock
    body: Any

    def stop_misfit(self, error: PerdureError, /) -> None:
        """Stop the run, whose inbox cannot be read."""
        ...


class Waits:
    """The open waits of one drive, and the inbox rows that no wait has taken.

    Everything sent up to the instant `inbox_read_at` is among the rows of `inbox`, or was consumed before.
    """

    def __init__(self, drive: WaitingDrive, claim: Claim, store: Store | None) -> None:
        self._drive: WaitingDrive | None = drive
        self._clock = drive.clock
        self._run_id = claim.run.id
        # None: there is no inbox but what is known.
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._open: dict[Wait, None] = {}
        self._by_deadline: _Heap = []
        self._by_address: dict[Awaited, _Heap] = {}
        # Of every address that has a signal, at least the first open wait. Also waits whose signal another wait has taken.
        self._matched: _Heap = []
        # What no wait has taken, as heaps by seq.
        self._signals: dict[Awaited, list[tuple[int, Signal]]] = {}
        # Taken, and by `unrecorded` not recorded as consumed; also others, until it is cleared of them.
        self._taken: list[Signal] = []
        self._cleared_from = _CLEARED_FROM
        self.unrecorded: Collection[int] = _NONE
        self._received: set[int] = set()
        self._timer: Timer | None = None
        self._timer_at: int | None = None
        # Everything up to this seq was fetched. Single rows above it may have been received by other ways.
        self.inbox_seq = claim.inbox_seq
        self._inbox_read_at = self._asked_at = claim.run.updated_at
        # How long after the body came to rest the store is watched: a run that leaves memory soon need not watch it.
        self.watches_after = POLL_SECONDS
        # What will let the inbox be looked at: a timer until the store is watched, then its next change.
        self._watching: asyncio.Future[None] | asyncio.TimerHandle | None = None
        # Whether reading failed, and a timer is set to try again.
        self._is_to_be_read = False
        if claim.inbox:
            self._keep(claim.inbox)

    @property
    def inbox(self) -> tuple[Signal, ...]:
        """Return the rows that were received and are not recorded as consumed."""
        self._forget_recorded()
        if not self._signals and not self._taken:
            return ()
        waiting = (signal for rows in self._signals.values() for _, signal in rows)
        return tuple(sorted((*waiting, *self._taken), key=lambda signal: signal.seq))

    @property
    def has_address(self) -> bool:
        """Return whether a wait is open for an inbox row."""
        return bool(self._by_address)

    def has_row(self, address: Awaited) -> bool:
        """Return whether a row with this address was received that no wait has taken."""
        return address in self._signals

    def take_rows(self, address: Awaited) -> list[Signal]:
        """Take the rows with this address that were received and that no wait has taken."""
        rows = [signal for _, signal in sorted(self._signals.pop(address, ()), key=itemgetter(0))]
        self._taken += rows
        return rows

    def add(self, wait: Wait) -> None:
        """Open a wait."""
        wait.is_open = True
        self._open[wait] = None
        if wait.deadline is not None:
            _push(self._by_deadline, wait.deadline, wait, len(self._open))
            if wait.is_immediate:
                wait.timer = self._clock.call_at(wait.deadline, self._end, wait, None)
        if wait.address is not None:
            _push(self._by_address.setdefault(wait.address, []), wait.seq, wait, len(self._open))
            if wait.address in self._signals:
                self._match(wait)
        self._arm()

    def _match(self, wait: Wait) -> None:
        """Note that there is a signal for this wait. An immediate wait takes it now."""
        if wait.address is not None and wait.is_immediate:
            self._end(wait, self._signals[wait.address][0][1])
        else:
            _push(self._matched, wait.seq, wait, len(self._open))

    def remove(self, wait: Wait) -> None:
        """Forget a wait that was cancelled."""
        if wait.is_open:
            self._shut(wait)
            self._arm()

    def receive(self, signals: list[Signal]) -> None:
        """Take inbox rows, whether they are new or not."""
        self._keep(signals)
        self._tell_body()

    def _tell_body(self) -> None:
        """Let the body look whether a wait can end."""
        if self._drive is not None:
            self._drive.body.schedule()

    def has_due(self) -> bool:
        """Return whether a wait of the body can be taken now."""
        return bool(self._open) and self._due() is not None

    def take_one(self) -> bool:
        """End one wait of the body if one can end; a signal that is there in time wins over the deadline."""
        found = self._due() if self._open else None
        if found is None:
            return False
        self._end(*found)
        return True

    def _end(self, wait: Wait, signal: Signal | None) -> None:
        if not wait.is_open:
            return
        if signal is not None:
            self._take(signal)
        self._shut(wait)
        wait.on_end(signal)
        if signal is not None:
            self._taken.append(signal)
            if len(self._taken) >= self._cleared_from:
                self._forget_recorded()
                self._cleared_from = max(_CLEARED_FROM, 2 * len(self._taken))
        self._arm()

    def _due(self) -> tuple[Wait, Signal | None] | None:
        matched = self._first_matched()
        if matched is not None:
            return matched
        wait = _first(self._by_deadline)
        if wait is None or wait.deadline is None or wait.is_immediate:
            return None  # an immediate wait has its own timer, and those after it are not due
        now = self._clock.now()
        if wait.deadline > now:
            self._arm()  # the timer was early by this clock
            return None
        return None if self._must_read_inbox(wait, wait.deadline, now) else (wait, None)

    def _must_read_inbox(self, wait: Wait, deadline: int, now: int) -> bool:
        """Return whether this wait may not expire yet: a row that was sent before its deadline may not have been received."""
        if wait.address is None or self._store is None:
            return False
        if wait.expiry is not None:
            if not wait.is_expiring:
                wait.is_expiring = True
                self._read(now)
            return True
        if deadline <= self._inbox_read_at:
            return False
        if deadline > self._asked_at:
            self._asked_at = now
            self._read(now)
        return True

    def wake_at(self) -> int | None:
        """Return the earliest deadline."""
        wait = _first(self._by_deadline)
        return None if wait is None else wait.deadline

    def addresses(self) -> tuple[Awaited, ...]:
        """Return the addresses that the waits are open for, in the order in which they were opened."""
        waiting = sorted((wait.seq, index, wait.address) for index, wait in enumerate(self._open) if wait.address is not None)
        return tuple(dict.fromkeys(address for _, _, address in waiting))

    def close(self) -> None:
        """End nothing more, and call nothing more."""
        if self._open:
            for wait in self._open:
                wait.is_open = False
                _stop_timer(wait)
            self._open, self._by_address = {}, {}
            self._arm()
        if self._watching is not None:
            self._watching.cancel()
        self._drive = self._store = self._watching = None

    def _shut(self, wait: Wait) -> None:
        wait.is_open = False
        _stop_timer(wait)
        del self._open[wait]
        if wait.address is None:
            return
        following = _first(self._by_address[wait.address])
        if following is None:
            del self._by_address[wait.address]
        elif wait.address in self._signals:
            self._match(following)

    def _keep(self, signals: list[Signal]) -> None:
        for signal in signals:
            if signal.seq in self._received:
                continue
            self._received.add(signal.seq)
            rows = self._signals.setdefault(signal.address, [])
            heapq.heappush(rows, (signal.seq, signal))
            waiting = self._by_address.get(signal.address) if len(rows) == 1 else None
            if waiting is not None and (wait := _first(waiting)) is not None:
                self._match(wait)

    def _take(self, signal: Signal) -> None:
        rows = self._signals[signal.address]
        heapq.heappop(rows)
        if not rows:
            del self._signals[signal.address]

    def _first_matched(self) -> tuple[Wait, Signal] | None:
        while (wait := _first(self._matched)) is not None:
            if wait.address is not None and (rows := self._signals.get(wait.address)):
                return wait, rows[0][1]
            heapq.heappop(self._matched)
        return None

    def _forget_recorded(self) -> None:
        if self._taken:
            self._taken = [signal for signal in self._taken if signal.seq in self.unrecorded]

    def _arm(self) -> None:
        wake_at = self.wake_at()
        if wake_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        self._timer = None if wake_at is None else self._clock.call_at(wake_at, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = self._timer_at = None
        self._tell_body()

    # Reading the inbox.

    def look(self) -> None:
        """Fetch new rows, since somebody may have sent some, unless no wait is open for one."""
        if self.has_address:
            self._read(self._clock.now())

    def watch(self) -> None:
        """Look whenever the store may have changed, as long as a wait is open for a row. The body rests."""
        if self._watching is None and self.has_address and self._store is not None:
            self._watching = self._loop.call_later(self.watches_after, self._watch_now, self._store)

    def _watch_now(self, store: Store) -> None:
        self._watching = change = expect_change(store)
        change.add_done_callback(self._store_changed)
        self.look()  # for what came before it was watched

    def _store_changed(self, change: asyncio.Future[None]) -> None:
        if change is self._watching:
            self._watching = None
            # Not while the store is down: its watch may take that for a change, and return at once.
            if self.has_address and self._store is not None and not self._is_to_be_read:
                self._watch_now(self._store)

    def _read(self, asked_at: int) -> None:
        """Fetch new rows; `asked_at` is the present instant."""
        if self._store is not None:
            fetching = self._loop.create_task(self._fetch(self._store, asked_at), context=contextvars.Context())
            _fetching.add(fetching)
            fetching.add_done_callback(_fetching.discard)

    async def _fetch(self, store: Store, asked_at: int) -> None:
        expiring = [wait for wait in self._open if wait.is_expiring]
        try:
            for wait in expiring:
                if wait.address is not None and wait.expiry is not None:
                    name, now = wait.address.name, self._clock.store_now()
                    await store.signal(self._run_id, name, wait.expiry, dedupe=DEDUPE, now=now)
            signals = await store.inbox(self._run_id, after=self.inbox_seq)
        except SnapshotCorrupt as damage:
            if self._drive is not None:
                self._drive.stop_misfit(damage)
        except Exception:  # noqa: BLE001 - the store is down; the run is ours until its lease ends
            self._read_later()
        else:
            self.inbox_seq = max((self.inbox_seq, *(signal.seq for signal in signals)))
            self._inbox_read_at = max(self._inbox_read_at, asked_at)
            self.receive(signals)

    def _read_later(self) -> None:
        if not self._is_to_be_read:
            self._is_to_be_read = True
            self._loop.call_later(_READ_AGAIN_SECONDS, self._read_again)

    def _read_again(self) -> None:
        self._is_to_be_read = False
        if self._watching is None and self.has_address and self._store is not None:
            self._watch_now(self._store)
        else:
            self.look()


def _stop_timer(wait: Wait) -> None:
    if wait.timer is not None:
        wait.timer.cancel()
        wait.timer = None


def nothing(*_: object) -> None:
    """Stand for a callback that is no longer wanted."""
