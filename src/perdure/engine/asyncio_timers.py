"""Sleeps and time limits of asyncio in a body, as entries of the journal.

That such a timer has fired is recorded and delivered like the end of a step, so `asyncio.sleep`, `asyncio.timeout` and `wait_for`
are durable: they last as long whatever happens to the process, and a replay sees them end at the same places. A timer is named by
its instant, which is the time of an entry plus a length, and so the same on every replay. When the run leaves memory, what is set
is recorded with the instant at which it fires. One that was cancelled leaves nothing.

Timers of libraries may depend on what the process shares, such as a pool of connections. So an entry of a timer that the body has
not set is passed over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from perdure.body.body_queue import BodyQueue, BodyTimer
from perdure.body.calls import Calls
from perdure.engine.recorder import Recorder
from perdure.errors import TIMER_PREFIX
from perdure.model.clock import Clock
from perdure.model.durations import MAX_INSTANT
from perdure.model.journal import Entry, OpenWait
from perdure.model.logs import log, run_fields
from perdure.model.records import RunRow

# After so many entries of timers a run is said to poll.
_MANY: Final = 1_000


class TimersDrive(Protocol):
    """The drive, as its timers see it."""

    @property
    def body(self) -> BodyQueue: ...
    @property
    def calls(self) -> Calls: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def run(self) -> RunRow: ...
    @property
    def is_live(self) -> bool: ...
    @property
    def must_not_record(self) -> bool: ...
    def record(self, call: None, **fields: Any) -> Entry: ...


class DurableTimers:
    """The timers of asyncio that the body of one drive has set."""

    def __init__(self, drive: TimersDrive, claimed: Sequence[Entry]) -> None:
        # Weak: the drive refers to this.
        self._drive = weakref.ref(drive)
        # When timers fire whose run has left memory before that, by name.
        self._fires_at: dict[str, int] = {}
        # What an earlier drive, or this one, has recorded of a timer that is set.
        self._opened: dict[str, int] = {}
        self._fired = sum(entry.kind == "timer" and entry.phase == "close" for entry in claimed)
        # Whether the run itself has recorded anything: what a fork or a snapshot brings along was recorded by another.
        self._has_own = any(entry.epoch and entry.phase != "drop" for entry in claimed)
        # When the run was retried: time limits that had not passed begin again.
        self._retried_at = max((entry.ended_at for entry in claimed if entry.phase == "drop" and entry.epoch), default=0)
        # When the last entry was delivered live; None during a replay.
        self._since: int | None = None

    def take(self, entry: Entry) -> bool:
        """Fire the timer of the next entry, if the body has set it. An entry that says when it fires is noted."""
        drive, name = self._get(), entry.key.removeprefix(TIMER_PREFIX)
        if entry.phase == "cancel":
            self._opened.pop(name, None)
            return False
        if entry.phase == "open":
            fires_at = msgspec.json.decode(entry.payload, type=OpenWait).deadline
            if fires_at is not None:
                self._opened[name] = self._fires_at[name] = fires_at
            return False
        self._opened.pop(name, None)
        timer = drive.body.timers.get(name)
        if timer is None:
            return False
        drive.body.now = drive.calls.cursor.take_next()
        self.note_delivery()
        drive.body.fire(timer)
        return True

    def note_delivery(self) -> None:
        """An entry is delivered: what the body does by itself counts from now."""
        drive = self._get()
        if drive.is_live:
            self._since = drive.clock.now()

    def was_set(self, entry: Entry) -> bool:
        """Return whether the body has set the timer of this entry, and cancelled it."""
        return self._get().body.was_set(entry.key.removeprefix(TIMER_PREFIX))

    def arm(self) -> None:
        """The run is live: let what is set fire at its instant. Note what was cancelled if the journal says that it is set."""
        drive = self._get()
        for name in [name for name in self._opened if name not in drive.body.timers and drive.body.was_set(name)]:
            del self._opened[name]
            now = drive.clock.now()
            drive.recorder.append(TIMER_PREFIX + name, "", kind="timer", phase="cancel", started_at=now, ended_at=now)
        unarmed, drive.body.unarmed = drive.body.unarmed, []
        for timer in unarmed:
            if drive.body.timers.get(timer.name) is timer:  # neither cancelled nor fired
                timer.fires_at = min(self._fires_at.get(timer.name) or self._instant(timer), MAX_INSTANT)
                timer.armed = drive.clock.call_at(timer.fires_at, self._fire, timer)

    def _instant(self, timer: BodyTimer) -> int:
        """Return when a timer fires of which nothing is recorded.

        The body's time stands still while it does something of its own, and while the run waits for a worker: a time limit does
        not count that.
        """
        drive = self._get()
        since = self._since if self._since is not None or self._has_own else drive.body.now
        late = 0 if since is None else max(0, drive.clock.now() - since)
        if timer.set_at < self._retried_at:
            return max(timer.at + late, self._retried_at + timer.at - timer.set_at)
        return timer.at + late

    def wake_at(self) -> int | None:
        """Return when the first one fires."""
        return min((timer.fires_at for timer in self._set()), default=None)

    def record_armed(self) -> None:
        """The run is about to leave memory: record when each of them fires."""
        drive = self._get()
        for timer in self._set():
            if self._opened.get(timer.name) != timer.fires_at:
                self._opened[timer.name] = timer.fires_at
                now, payload = drive.clock.now(), msgspec.json.encode(OpenWait(timer.fires_at))
                key = TIMER_PREFIX + timer.name
                drive.recorder.append(key, "", kind="timer", phase="open", payload=payload, started_at=now, ended_at=now)

    def _set(self) -> list[BodyTimer]:
        """Return the timers that are set, once the run is live."""
        return [timer for timer in self._get().body.timers.values() if timer.armed is not None]

    def _get(self) -> TimersDrive:
        drive = self._drive()
        if drive is None:
            raise RuntimeError("the drive is over")
        return drive

    def _fire(self, timer: BodyTimer) -> None:
        drive = self._drive()
        if drive is None or drive.must_not_record or timer.armed is None:
            return
        timer.armed = None
        self._opened.pop(timer.name, None)
        # Never before its instant: some loops fire early.
        at = max(drive.clock.now(), timer.fires_at)
        drive.record(None, key=TIMER_PREFIX + timer.name, kind="timer", started_at=timer.fires_at, ended_at=at)
        self._fired += 1
        if self._fired == _MANY:
            log.warning(
                "run %r of workflow %r has slept %d times with asyncio, and each sleep is an entry of its journal; to poll, "
                "use a step that polls, or ctx.wait_for_signal",
                drive.run.id,
                drive.run.workflow,
                _MANY,
                extra=run_fields(drive.run),
            )
