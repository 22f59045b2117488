"""What a run waits for: instants and inbox rows.

A wait is opened with an absolute deadline, which is recorded, so that a replay waits for the same instant. Signals of one name
go, in order of arrival, to the waits for it in the order in which these were opened.

Nothing is resolved before the run is live, and then one wait at a time, when the body rests: what the body does with the first
may cancel the second, and a signal must not be consumed by a wait that is about to be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from perdure.engine.body_tasks import nothing
from perdure.model.clock import Clock, Timer
from perdure.model.records import Awaited, Signal

_NONE: Final[frozenset[int]] = frozenset()


@dataclass(eq=False, slots=True)
class Wait:
    """One open wait. `seq` is that of its open entry."""

    seq: int
    deadline: int | None
    on_due: Callable[[], None]
    address: Awaited | None = None
    on_signal: Callable[[Signal], None] | None = None


class Waits:
    """The open waits of one drive, and the inbox rows that no wait has taken."""

    def __init__(self, clock: Clock, inbox: list[Signal], inbox_seq: int) -> None:
        self._clock = clock
        # Called when there may be something to resolve.
        self.on_change: Callable[[], None] = nothing
        self._waits: list[Wait] = []
        # Replaced when it changes, so a reader's copy does not change.
        self._inbox = tuple(inbox)
        # Taken, and by `unrecorded` not recorded as consumed.
        self._taken: tuple[Signal, ...] = ()
        self.unrecorded: Collection[int] = _NONE
        self._received = frozenset(signal.seq for signal in inbox) if inbox else _NONE
        self._timer: Timer | None = None
        # Everything up to this seq was fetched. Single rows above it may have been received by other ways.
        self.inbox_seq = inbox_seq
        self.is_live = False

    @property
    def inbox(self) -> tuple[Signal, ...]:
        """The rows that were received and are not recorded as consumed."""
        self._forget_recorded()
        if not self._taken:
            return self._inbox
        return tuple(sorted((*self._inbox, *self._taken), key=lambda signal: signal.seq))

    def add(self, wait: Wait) -> None:
        """Open a wait."""
        self._waits.append(wait)
        self._waits.sort(key=lambda each: each.seq)
        self._arm()

    def remove(self, wait: Wait) -> None:
        """Forget a wait that was cancelled."""
        if wait in self._waits:
            self._waits.remove(wait)
            self._arm()

    def receive(self, signals: list[Signal]) -> None:
        """Take inbox rows, whether they are new or not."""
        new = (signal for signal in signals if signal.seq not in self._received)
        self._inbox = tuple(sorted((*self._inbox, *new), key=lambda signal: signal.seq))
        self._received |= {signal.seq for signal in signals}
        self.on_change()

    def has_due(self) -> bool:
        """Whether a wait can be resolved now."""
        return self.is_live and bool(self._waits) and self._due() is not None

    def resolve_one(self) -> bool:
        """Resolve one wait if one can be; a signal that is there in time wins over the deadline."""
        resolution = self._due() if self.is_live else None
        if resolution is None:
            return False
        wait, signal = resolution
        self._waits.remove(wait)
        if signal is not None and wait.on_signal is not None:
            self._inbox = tuple(other for other in self._inbox if other is not signal)
            wait.on_signal(signal)
            self._forget_recorded()
            self._taken += (signal,)
        else:
            wait.on_due()
        self._arm()
        return True

    def _forget_recorded(self) -> None:
        self._taken = tuple(signal for signal in self._taken if signal.seq in self.unrecorded)

    def _due(self) -> tuple[Wait, Signal | None] | None:
        for wait in self._waits:
            signal = self._signal_for(wait)
            if signal is not None:
                return wait, signal
        now = self._clock.now()
        due = [wait for wait in self._waits if wait.deadline is not None and wait.deadline <= now]
        return (min(due, key=lambda each: (each.deadline or 0, each.seq)), None) if due else None

    def wake_at(self) -> int | None:
        """The earliest deadline."""
        return min((wait.deadline for wait in self._waits if wait.deadline is not None), default=None)

    def addresses(self) -> tuple[Awaited, ...]:
        """What inbox rows are waited for, in the order in which the waits were opened."""
        return tuple(dict.fromkeys(wait.address for wait in self._waits if wait.address is not None))

    def close(self) -> None:
        """Resolve nothing more, and call nothing more."""
        self.is_live = False
        self._waits.clear()
        self._arm()
        self.on_change = nothing

    def _signal_for(self, wait: Wait) -> Signal | None:
        if wait.address is None:
            return None
        return next((signal for signal in self._inbox if signal.address == wait.address), None)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waits and (wake_at := self.wake_at()) is not None:
            self._timer = self._clock.call_at(wake_at, self.on_change)
