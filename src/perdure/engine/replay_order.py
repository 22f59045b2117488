"""Who gets a recorded result, and when.

Results reach the body one at a time, in the order of the journal, and the next only when the body has come to rest: every
branch waits. On the first run the order is made here, on a replay it is kept here, by the same rule. That is why `gather`,
`as_completed`, queues and locks between branches give the same values again, whatever the loop does.

Nothing live happens before the journal is used up: steps that are not recorded, timers and signals wait. A recorded key that
nobody asks for (the code changed, or the call was cancelled) must not hold up the rest: once nothing but us can move the body, or
`grace` passed without a ctx call, the lowest record that *was* asked for is handed over, and if there is none, the run is live.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from perdure.engine.body_tasks import Branches, nothing
from perdure.model.clock import Clock, Timer
from perdure.model.journal import Entry

# The end of a task reaches a branch through callbacks that cannot be seen, one loop turn for each level of gather, shield or
# wait between them. So many quiet turns are waited for after a branch ended; otherwise one is enough.
QUIET_TURNS_AFTER_END: Final = 6
# Cancelling a step that awaits other tasks reaches its branch through them, a turn for each, so that while steps are under way
# a few quiet turns are waited for.
QUIET_TURNS_WHEN_BUSY: Final = 3
# A body that never rests (a loop around sleep(0)) must not starve its own results.
MOST_TURNS: Final = 200


class Receiver(Protocol):
    """A call that waits for its record."""

    def deliver(self, entry: Entry) -> bool:
        """Take the record and let the body go on; False when the call was cancelled meanwhile."""
        ...


class Turnstile:
    """Hands records over; tells its owner when the run is live and when it is idle."""

    def __init__(
        self,
        branches: Branches,
        clock: Clock,
        grace: int,
        recorded: Iterable[Entry],
        *,
        on_live: Callable[[], None],
        on_idle: Callable[[], None],
        has_event: Callable[[], bool],
        next_event: Callable[[], bool],
    ) -> None:
        self._branches = branches
        self._clock = clock
        self._grace = grace
        self._on_live = on_live
        self._on_idle = on_idle
        # Timers and signals: whether one can be taken, and take one. Its record is handed over next.
        self._has_event = has_event
        self._next_event = next_event
        self._loop = asyncio.get_running_loop()
        # JournalIndex and not handed over, by seq; `_passed` were not asked for when their turn came.
        self.queue: deque[Entry] = deque(recorded)
        self._passed: dict[str, Entry] = {}
        self._asked: dict[str, Receiver] = {}
        self._withdrawn: set[str] = set()
        self.is_live = not self.queue
        # Calls that do something live right now, so that the run is not idle.
        self.busy = 0
        self.last_at = 0
        self._calls = 0
        self._look_due = False
        self._turns = self._quiet = self._seen = self._ended = 0
        self._grace_timer: Timer | None = None
        self._grace_over = -1
        self._held = 0
        self._closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hand nothing over inside: the record that was just delivered is not yet the body's."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self.look_soon()

    @property
    def is_used_up(self) -> bool:
        """Whether every record was handed over, or passed by."""
        return not self.queue

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: no live call, and no result waiting to be handed over."""
        return not self.busy and not self._asked

    def is_next(self, key: str) -> bool:
        """Whether the record of `key` is next, and no other branch could tell the difference if it were handed over at once."""
        return bool(self.queue) and self.queue[0].key == key and not self._asked and self._branches.only_one_moves()

    def take(self) -> Entry:
        """The next record: a sequential body needs only this."""
        self._calls += 1
        entry = self.queue.popleft()
        self._handed(entry)
        return entry

    def ask(self, key: str, receiver: Receiver) -> None:
        """Deliver the record of `key` to `receiver` when its turn comes."""
        self._calls += 1
        self._asked[key] = receiver
        self._withdrawn.discard(key)
        self.look_soon()

    def withdraw(self, key: str) -> None:
        """The call that asked for `key` was cancelled; its record holds up nobody."""
        if self._asked.pop(key, None) is not None:
            self._withdrawn.add(key)
            self.look_soon()

    def give_back(self, entry: Entry) -> None:
        """The record did not reach the body; it is there for the next call that asks for its key."""
        self._passed[entry.key] = entry

    def begin_work(self) -> None:
        """A call does something live from now on, so that the run is not idle until `busy` was counted down again."""
        self._calls += 1
        self.busy += 1
        if self._asked or not self.is_live:
            self.look_soon()

    def pass_through(self, entry: Entry) -> bool:
        """Whether this new record may go to the running branch at once: nothing is before it, nothing else moves."""
        if self.queue or not self._branches.only_one_moves():
            return False
        self.last_at = max(self.last_at, entry.ended_at)
        return True

    def recorded(self, entry: Entry) -> None:
        """A new record joined the journal; it is handed over after those before it."""
        if entry.phase == "close":
            self.queue.append(entry)

    def follow_up(self, entries: list[Entry]) -> None:
        """Hand these over next, in this order: they follow from the record that was just delivered."""
        self.queue.extendleft(reversed(entries))
        self.look_soon()

    def touch(self) -> None:
        """There was a ctx call, so the grace starts again."""
        self._calls += 1
        self.look_soon()

    def close(self) -> None:
        """Hand over nothing more, and tell nobody anything more."""
        self._closed = True
        self._branches.open_exits()
        self._on_live = self._on_idle = nothing
        self._has_event = self._next_event = _never
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None

    def look_soon(self) -> None:
        """Look, in the next turn of the loop, whether something can be handed over."""
        if not self._look_due and not self._closed:
            self._look_due = True
            self._turns = self._quiet = 0
            self._loop.call_soon(self._look)

    def _handed(self, entry: Entry) -> None:
        self.last_at = max(self.last_at, entry.ended_at)
        if not self.queue and not self.is_live:
            self.look_soon()

    def _go_live(self) -> None:
        self.is_live = True
        self._loop.call_soon(self._on_live)

    def _look(self) -> None:
        self._look_due = False
        leaving = self._branches.leaving
        if self._closed or self._held or (self._branches.is_unwinding() if leaving else self._is_waiting_for_steps()):
            return
        if not self._at_rest():
            self._look_due = True
            self._loop.call_soon(self._look)
            return
        if leaving:
            self._ended = self._branches.ended
            self._branches.let_leave()
            self.look_soon()
            return
        entry = self._next()
        if entry is not None:
            self._deliver(entry)
        elif not self.queue and not self.is_live:
            self._go_live()  # and not before: the last record may be what cancels the calls that would go live
        elif self.is_live and self._next_event():
            self.look_soon()
        else:
            self._nothing_next()

    def _is_waiting_for_steps(self) -> bool:
        """Whether live steps are under way, none has ended, and nothing else has happened."""
        return self.is_live and self.busy > 0 and not self._asked and not self._has_event()

    def _at_rest(self) -> bool:
        branches = self._branches
        are_steps_running = self.busy > len(self._asked)
        if branches.all_ours() and not are_steps_running:
            return True
        self._turns += 1
        if branches.can_move() or branches.stirs != self._seen:
            self._seen = branches.stirs
            self._quiet = 0
        else:
            self._quiet += 1
        needed = QUIET_TURNS_WHEN_BUSY if are_steps_running else 1
        if branches.ended != self._ended:
            needed = QUIET_TURNS_AFTER_END
        return self._quiet >= needed or self._turns > MOST_TURNS

    def _next(self) -> Entry | None:
        if self._passed and (late := self._asked.keys() & self._passed.keys()):
            return self._passed.pop(min(late, key=lambda key: self._passed[key].seq))
        while self.queue and self.queue[0].key in self._withdrawn and self.queue[0].key not in self._asked:
            self.give_back(self.queue.popleft())
        if self.queue and self.queue[0].key in self._asked:
            return self.queue.popleft()
        return None

    def _deliver(self, entry: Entry) -> None:
        self._ended = self._branches.ended
        if not self._asked.pop(entry.key).deliver(entry):
            self.give_back(entry)
        self._handed(entry)
        if self._asked or not self.is_live:
            self.look_soon()

    def _nothing_next(self) -> None:
        """The body rests and the next record, if any, is not asked for."""
        if self._is_waiting_for_steps():
            return
        if not self._branches.all_parked() and self._grace_over != self._calls:
            self._arm_grace()
            return
        while self.queue and self.queue[0].key not in self._asked:
            self.give_back(self.queue.popleft())
        if self.queue:
            self._deliver(self.queue.popleft())
        elif not self.is_live:
            self._go_live()
        elif not self.busy:
            self._on_idle()

    def _arm_grace(self) -> None:
        if self._grace_timer is None:
            self._grace_timer = self._clock.call_at(self._clock.now() + self._grace, self._grace_passed, self._calls)

    def _grace_passed(self, calls: int) -> None:
        self._grace_timer = None
        if calls == self._calls:
            self._grace_over = calls
        self.look_soon()


def _never() -> bool:
    return False
