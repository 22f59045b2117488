"""What a run waits for: instants and inbox rows.

A wait is opened with an absolute deadline, which is recorded, so that a replay waits for the same instant. Signals of one name
go, in order of arrival, to the waits for it in the order in which these were opened. Nothing here fires before the run is live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure.clock import Clock, Timer
from perdure.store import Awaited, Signal


@dataclass(eq=False, slots=True)
class Wait:
    """One open wait. `seq` is that of its open entry."""

    seq: int
    deadline: int | None
    on_due: Callable[[], None]
    address: Awaited | None = None
    on_signal: Callable[[Signal], None] | None = None


class Waits:
    """The open waits of one drive, and the inbox rows that nobody has taken."""

    def __init__(self, clock: Clock, inbox: list[Signal], inbox_seq: int) -> None:
        self._clock = clock
        self._waits: list[Wait] = []
        self._inbox = list(inbox)
        self._timer: Timer | None = None
        self.inbox_seq = inbox_seq
        self.is_live = False

    def add(self, wait: Wait) -> None:
        """Open a wait; it may be resolved before this returns."""
        self._waits.append(wait)
        self._waits.sort(key=lambda each: each.seq)
        self.fire()

    def remove(self, wait: Wait) -> None:
        """Forget a wait that was cancelled."""
        if wait in self._waits:
            self._waits.remove(wait)
            self._arm()

    def receive(self, signals: list[Signal], inbox_seq: int) -> None:
        """Take new inbox rows."""
        known = {signal.seq for signal in self._inbox}
        self._inbox += [signal for signal in signals if signal.seq > self.inbox_seq and signal.seq not in known]
        self.inbox_seq = max(self.inbox_seq, inbox_seq)
        self.fire()

    def fire(self) -> None:
        """Resolve what can be resolved: signals first, so that one that is there in time wins over its deadline."""
        if not self.is_live:
            return
        for wait in list(self._waits):
            signal = self._signal_for(wait)
            if signal is not None and wait.on_signal is not None:
                self._inbox.remove(signal)
                self._waits.remove(wait)
                wait.on_signal(signal)
        now = self._clock.now()
        due = [wait for wait in self._waits if wait.deadline is not None and wait.deadline <= now]
        for wait in sorted(due, key=lambda each: (each.deadline or 0, each.seq)):
            self._waits.remove(wait)
            wait.on_due()
        self._arm()

    def wake_at(self) -> int | None:
        """The earliest deadline."""
        return min((wait.deadline for wait in self._waits if wait.deadline is not None), default=None)

    def addresses(self) -> tuple[Awaited, ...]:
        """What inbox rows are waited for, in the order in which the waits were opened."""
        return tuple(dict.fromkeys(wait.address for wait in self._waits if wait.address is not None))

    def close(self) -> None:
        """Resolve nothing more."""
        self.is_live = False
        self._waits.clear()
        self._arm()

    def _signal_for(self, wait: Wait) -> Signal | None:
        if wait.address is None:
            return None
        return next((signal for signal in self._inbox if signal.address == wait.address), None)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self.wake_at()
        if self.is_live and wake_at is not None:
            self._timer = self._clock.call_at(wake_at, self.fire)
