"""Wait for a body that is busy with its own I/O, or waits for a lock or a queue of the host, but not forever.

Nothing tells when such a task resumes. So an entry that no call asks for counts as missing after a while only, and a run whose
body could resume by itself leaves memory a while after its last ctx call. Waiting costs time, and never gives a wrong
answer. A body in which nothing waits outside ctx is not waited for.
"""

from __future__ import annotations

from typing import Final

from perdure.body.body_queue import BodyQueue
from perdure.body.calls import Calls
from perdure.model.clock import Clock, Timer
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry

# An entry is waited for twice as long as it took on the first run, but no longer than this many microseconds.
MOST_PATIENCE: Final = 300 * MICROSECOND


class Patience:
    """The time for which one body was waited for since its last ctx call."""

    def __init__(self, clock: Clock, grace: int, body: BodyQueue, calls: Calls) -> None:
        self._clock = clock
        self._grace = grace
        self._body = body
        self._calls = calls
        self._since = 0
        # How many calls the body had made then; None while nothing is waited for.
        self._made: int | None = None
        self._timer: Timer | None = None

    def has(self, entry: Entry, *, is_spinning: bool = False) -> bool:
        """Return whether to wait until the body asks for this entry."""
        if not is_spinning and not self._body.has_own_waits(self._calls.waited_for()):
            return False
        took = 2 * max(0, entry.started_at - self._calls.cursor.last_at)
        return self._waits(max(self._grace, min(took, MOST_PATIENCE)))

    def has_for_leaving(self) -> bool:
        """Return whether to wait before the run leaves memory."""
        return self._body.has_own_waits(self._calls.waited_for()) and self._waits(self._grace)

    def end(self) -> None:
        """Wait no longer: the body has resumed."""
        self._made = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waits(self, microseconds: int) -> bool:
        now, made = self._clock.now(), self._calls.cursor.calls_made
        if self._made != made:
            self.end()
            self._made, self._since = made, now
        left = self._since + microseconds - now
        if left <= 0:
            return False
        if self._timer is None:
            self._timer = self._clock.call_at(now + left, self._look)
        return True

    def _look(self) -> None:
        self._timer = None
        self._body.schedule()
