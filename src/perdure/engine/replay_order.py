"""In which order recorded results reach the body, on the first run and on every replay.

Results reach the body one at a time, in the order of the journal, and the next only when the body is at rest: every branch waits.
A result that was recorded just now waits in the same queue as those that a replay finds, until the store has acknowledged it; so
the first run and every replay follow one rule. That is why `gather`, `as_completed`, queues and locks between branches give the
same values again, whatever the event loop does.

Nothing live happens before the journal is used up: steps that are not recorded, timers and signals wait. A recorded key that the
body does not ask for (the code changed) must not hold up the rest: once only this queue can move the body, or `grace` passed
without a ctx call, the lowest record that *was* asked for is delivered, and if there is none, the run is live.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from perdure.engine.body_tasks import BodyTasks, nothing
from perdure.errors import PerdureError
from perdure.model.clock import Clock, Timer
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry

# The end of a task reaches a branch through callbacks that cannot be seen, one loop turn for each level of gather, shield or
# wait between them. So many quiet turns are waited for after a branch ended; otherwise one is enough.
QUIET_TURNS_AFTER_END: Final = 6
# Cancelling a step that awaits other tasks reaches its branch through them, a turn for each, so while steps are running
# a few quiet turns are waited for.
QUIET_TURNS_WHEN_BUSY: Final = 3
# A divergence is judged when so many turns have passed in which nothing moved.
QUIET_TURNS_BEFORE_STOP: Final = 30
# While a task of the body waits for something of its own, a recorded key that the body has not asked for is waited for twice as
# long as it took on the first run, but no longer than this many microseconds.
MOST_PATIENCE: Final = 300 * MICROSECOND
# A body that never rests (a loop around sleep(0)) must not starve its own results.
MOST_TURNS: Final = 200


class Receiver(Protocol):
    """A call that waits for its record."""

    def abandon(self) -> None:
        """No record will be delivered: the call can be cancelled."""
        ...

    def deliver(self, entry: Entry) -> bool:
        """Take the record and let the body go on; False when the call was cancelled meanwhile."""
        ...


class EmitCall(Protocol):
    """A call of `ctx.emit` that waits for its turn."""

    @property
    def is_waiting(self) -> bool:
        """Whether it was not cancelled."""
        ...

    def resume(self) -> None:
        """Let the body go on."""
        ...


class ResultQueue:
    """Delivers records to the calls that wait for them; tells its owner when the run is live and when it is idle."""

    def __init__(
        self,
        branches: BodyTasks,
        clock: Clock,
        grace: int,
        recorded: Iterable[Entry],
        *,
        has_store: bool,
        on_live: Callable[[], None],
        on_rest: Callable[[], None],
        on_idle: Callable[[], None],
        find_divergence: Callable[[], PerdureError | None],
        on_diverged: Callable[[PerdureError], None],
        decide_patch: Callable[[], bool],
        has_event: Callable[[], bool],
        next_event: Callable[[], bool],
    ) -> None:
        self._branches = branches
        self._clock = clock
        self._grace = grace
        self._on_live = on_live
        # Told when the body rests and the run is not idle: steps are running, or a task of the body waits for something else.
        self._on_rest = on_rest
        self._on_idle = on_idle
        # Whether the body wants something new while records that it must ask for are left.
        self._find_divergence = find_divergence
        self._on_diverged = on_diverged
        # Tell a call of ctx.patched, if one waits, that the journal goes on after it.
        self._decide_patch = decide_patch
        # Timers and signals: whether one can be taken, and take one. Its record is delivered next.
        self._has_event = has_event
        self._next_event = next_event
        self._loop = asyncio.get_running_loop()
        # Recorded and not delivered, by seq; `_skipped` were not asked for when their turn came.
        self.queue: deque[Entry] = deque(recorded)
        self._skipped: dict[str, Entry] = {}
        self._asked: dict[str, Receiver] = {}
        # No longer asked for: their records are skipped at once.
        self._withdrawn: set[str] = set()
        # Nothing above this seq is delivered: the store has not acknowledged it.
        self._acknowledged = self.queue[-1].seq if self.queue and has_store else 0 if has_store else sys.maxsize
        self.is_live = not self.queue
        # Set for a check, where nothing live may happen: `on_live` is told whenever the run would go live.
        self.stays_in_replay = False
        # Calls that do something live and have no record yet, so the run is not idle.
        self.running = 0
        self.last_at = 0
        # The highest seq of a record that has reached the body.
        self.last_seq = 0
        # Calls of ctx.emit that wait for their turn, in order, each with what says whether the store keeps up.
        self._emits: deque[tuple[EmitCall, Callable[[], bool]]] = deque()
        # Called once, when the queue is empty.
        self.when_empty: Callable[[], None] | None = None
        self._calls = 0
        self._look_due = False
        self._turns = self._quiet = self._seen = self._ended = 0
        self._quiet_before_stop = 0
        self._grace_timer: Timer | None = None
        self._grace_over = -1
        self._held = 0
        self._closed = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Deliver nothing inside: the body does not have the record that was just delivered, or written, yet."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self.look_soon()

    @property
    def is_idle(self) -> bool:
        """Whether there is no live call and no result waiting to be delivered."""
        return not self.running and not self._asked

    def is_next(self, key: str) -> bool:
        """Whether the record of `key` is next, and no other branch could tell the difference if it were delivered at once."""
        queue = self.queue
        return (
            bool(queue)
            and queue[0].key == key
            and queue[0].seq <= self._acknowledged
            and not self._asked
            and not self._emits
            and self._branches.only_one_moves()
        )

    def take(self) -> Entry:
        """The next record: a sequential body needs only this."""
        self._calls += 1
        entry = self.queue.popleft()
        self._note_delivery(entry)
        return entry

    def ask(self, key: str, receiver: Receiver) -> None:
        """Deliver the record of `key` to `receiver` when its turn comes."""
        self._calls += 1
        self._quiet_before_stop = 0
        self._asked[key] = receiver
        self._withdrawn.discard(key)
        if self._closed:
            receiver.abandon()
        self.look_soon()

    def withdraw(self, key: str) -> None:
        """The call that asked for `key` is over; its record holds up nothing."""
        if self._asked.pop(key, None) is not None:
            self._withdrawn.add(key)
            self.look_soon()

    def begin_work(self) -> None:
        """A call does something live from now on; its end counts `running` down."""
        self._calls += 1
        self.running += 1
        if self._asked or not self.is_live:
            self.look_soon()

    def reaches_body_at_once(self, entry: Entry) -> bool:
        """Whether this new record may go to the running branch at once: acknowledged, first in the queue, and nothing moves."""
        if entry.seq > self._acknowledged or self.queue or self._emits or not self._branches.only_one_moves():
            return False
        self.last_at = max(self.last_at, entry.ended_at)
        if entry.seq > self.last_seq:  # noqa: PLR1730 - `max` would be one more call for each step
            self.last_seq = entry.seq
        return True

    def add(self, entry: Entry, receiver: Receiver) -> None:
        """A new record joined the journal; `receiver` gets it after those before it, once it is acknowledged."""
        self.queue.append(entry)
        if entry.seq <= self._acknowledged or self._closed:
            self.ask(entry.key, receiver)
        else:
            self._calls += 1
            self._asked[entry.key] = receiver  # `acknowledge` looks

    def replace(self, entry: Entry) -> None:
        """This record stands in the place of the one with its seq, which was not delivered.

        An open one is no result: the call that waits gets it at once, and runs again.
        """
        if entry.phase == "open":
            self.queue = deque(known for known in self.queue if known.seq != entry.seq)
            self._asked.pop(entry.key).deliver(entry)
            return
        for index, known in enumerate(self.queue):
            if known.seq == entry.seq:
                self.queue[index] = entry
        if entry.key in self._skipped and self._skipped[entry.key].seq == entry.seq:
            self._skipped[entry.key] = entry

    def acknowledge(self, seq: int) -> None:
        """The store has recorded everything up to `seq`."""
        self._acknowledged = seq
        if self.queue and self.queue[0].seq <= seq and not self._look_due:
            self._turns = self._quiet = 0
            self._look()  # at once: most often one call waits, and nothing else moves

    def add_next(self, entries: list[Entry]) -> None:
        """Deliver these next, in this order: they follow from the record that was just delivered."""
        self.queue.extendleft(reversed(entries))
        self.look_soon()

    def wait_to_emit(self, call: EmitCall, has_room: Callable[[], bool]) -> None:
        """Let this call of `ctx.emit` go on when the body rests, one at a time and before any record is delivered.

        That is so on a replay too, so that the branches of the body go on in the same order. When the run is live the call also
        waits until there is room for more items.
        """
        self._emits.append((call, has_room))
        self.note_call()

    def look_for_emits(self) -> None:
        """There may be room for more items."""
        if self._emits:
            self.look_soon()

    def note_call(self) -> None:
        """There was a ctx call, so the grace starts again."""
        self._calls += 1
        self._quiet_before_stop = 0
        self.look_soon()

    def close(self) -> None:
        """Deliver nothing more, and tell the owner nothing more."""
        self._closed = True
        self._branches.open_exits()
        self._on_live = self._on_rest = self._on_idle = nothing
        self._has_event = self._next_event = self._decide_patch = _never
        self._find_divergence, self._on_diverged = nothing, nothing
        self.when_empty = None
        for receiver in self._asked.values():
            receiver.abandon()
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None

    def look_soon(self) -> None:
        """Look, in the next turn of the loop, whether something can be delivered."""
        if not self._look_due and not self._closed:
            self._look_due = True
            self._turns = self._quiet = 0
            self._loop.call_soon(self._look_now)

    def _note_delivery(self, entry: Entry) -> None:
        self.last_at = max(self.last_at, entry.ended_at)
        if entry.seq > self.last_seq:  # noqa: PLR1730 - `max` would be one more call for each step
            self.last_seq = entry.seq
        if not self.queue:
            self._note_empty()

    def _note_empty(self) -> None:
        if not self.is_live:
            self.look_soon()
        elif self.when_empty is not None:
            self._loop.call_soon(self.when_empty)
            self.when_empty = None

    def _go_live(self) -> None:
        self.is_live = not self.stays_in_replay
        self._loop.call_soon(self._on_live)

    def _look_now(self) -> None:
        self._look_due = False
        self._look()

    def _look(self) -> None:
        """Let cancelled calls return, or deliver the next record, if the body rests; otherwise look again in the next turn."""
        if self._closed or self._held or (self._branches.leaving and self._branches.is_unwinding()):
            return
        if self.running or not self._branches.all_ours():
            if not self._has_something_to_do():
                return
            if not self._is_quiet():
                if not self._look_due:
                    self._look_due = True
                    self._loop.call_soon(self._look_now)
                return
        if self._branches.leaving:
            self._ended = self._branches.ended
            self._branches.let_leave()
            self.look_soon()
        elif self._emits:
            self._let_emit()
        elif (entry := self._next()) is not None:
            self._deliver(entry)
        elif not self._is_unacknowledged():
            self._go_on_without_record()

    def _has_something_to_do(self) -> bool:
        """Whether there is a reason to wait until tasks of the body that can move, or a step that was cancelled, are quiet."""
        if self._branches.leaving or self._emits:
            return True
        if self._is_waiting_for_steps():
            self._on_rest()
            return False
        return not self._is_unacknowledged()  # `acknowledge` looks again

    def _let_emit(self) -> None:
        """Let the first call of `ctx.emit` go on, unless the store has to catch up first: then `look_for_emits` looks again."""
        call, has_room = self._emits[0]
        if self.is_live and call.is_waiting and not has_room():
            return
        self._emits.popleft()
        if call.is_waiting:
            call.resume()
        self.look_soon()

    def _is_unacknowledged(self) -> bool:
        """Whether the next record is not in the store yet."""
        return bool(self.queue) and self.queue[0].seq > self._acknowledged

    def _go_on_without_record(self) -> None:
        """The body rests and there is no record to deliver: go live, take a timer or a signal, or rest."""
        if not self.queue and not self._skipped and not self.is_live and self._find_divergence() is None:
            self._go_live()  # and not before: the last record may be what cancels the calls that would go live
        elif self.is_live and self._next_event():
            self.look_soon()
        else:
            self._rest()

    def _is_waiting_for_steps(self) -> bool:
        """Whether steps are running, none has ended, and nothing else has happened."""
        return self.is_live and self.running > 0 and not self._asked and not self._has_event()

    def _is_quiet(self) -> bool:
        """Whether nothing has moved for some turns of the loop, so that the body rests although it could move."""
        branches = self._branches
        self._turns += 1
        if branches.can_move() or branches.stirs != self._seen:
            self._seen = branches.stirs
            self._quiet = 0
        else:
            self._quiet += 1
        needed = QUIET_TURNS_WHEN_BUSY if self.running else 1
        if branches.ended != self._ended:
            needed = QUIET_TURNS_AFTER_END
        return self._quiet >= needed or self._turns > MOST_TURNS

    def _next(self) -> Entry | None:
        if self._skipped and (late := self._asked.keys() & self._skipped.keys()):
            return self._skipped.pop(min(late, key=lambda key: self._skipped[key].seq))
        while self.queue and self.queue[0].key in self._withdrawn and self.queue[0].key not in self._asked:
            self._skip()
        if self.queue and self.queue[0].key in self._asked and self.queue[0].seq <= self._acknowledged:
            return self.queue.popleft()
        return None

    def _skip(self) -> None:
        entry = self.queue.popleft()
        self._skipped[entry.key] = entry
        if not self.queue and self.is_live:
            self._note_empty()

    def _deliver(self, entry: Entry) -> None:
        self._ended = self._branches.ended
        if not self._asked.pop(entry.key).deliver(entry):
            self._skipped[entry.key] = entry
        self._note_delivery(entry)
        if self._asked or not self.is_live:
            self.look_soon()

    def _rest(self) -> None:
        """The body rests and the next record, if any, is not asked for."""
        if not self._branches.all_parked() and self._grace_over != self._calls:
            self._arm_grace()
            self._on_rest()
            return
        if self.queue and self._decide_patch():
            return
        while self.queue and self.queue[0].key not in self._asked:
            self._skip()
        if self.queue:
            self.look_soon()
        elif self.is_live and self.running:
            self._on_rest()
        elif (error := self._find_divergence()) is not None:
            self._stop_when_quiet(error)
        elif not self.is_live:
            self._go_live()
        else:
            self._on_idle()

    def _stop_when_quiet(self, error: PerdureError) -> None:
        if self._branches.all_ours() or self._quiet_before_stop >= QUIET_TURNS_BEFORE_STOP:
            self._on_diverged(error)
        else:
            self._quiet_before_stop += 1
            self.look_soon()

    def _arm_grace(self) -> None:
        if self._grace_timer is None:
            until = self._clock.now() + max(self._grace, self._patience())
            self._grace_timer = self._clock.call_at(until, self._grace_passed, self._calls)

    def _patience(self) -> int:
        """How long a record that the body has not asked for is waited for while a task of the body is busy by itself."""
        if not self.queue and self._find_divergence() is None:
            return 0
        entry = self.queue[0] if self.queue else min(self._skipped.values(), key=_by_seq, default=None)
        return 0 if entry is None else min(2 * max(0, entry.started_at - self.last_at), MOST_PATIENCE)

    def _grace_passed(self, calls: int) -> None:
        self._grace_timer = None
        if calls == self._calls:
            self._grace_over = calls
        self.look_soon()


def _by_seq(entry: Entry) -> int:
    return entry.seq


def _never() -> bool:
    return False
