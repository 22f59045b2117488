"""What each verb does to one run. A verb checks first and changes afterwards, so one that raises has changed nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from perdure.backends.base.leases import lease_microseconds
from perdure.backends.base.new_runs import found_row, restored_row
from perdure.backends.key_value.document import Cargo
from perdure.backends.key_value.run import Given, Run, origin_of, origin_of_end
from perdure.errors import LeaseHeld, LeaseLost, RunFinished
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import Awaited, EndStatus, Item, Lease, NewRun, Pulse, RunRow, Signal

_OPERATOR: Final = "an operator; unhold it first"


def clock(now: int | None) -> int:
    """This process's clock, or the instant a test gave."""
    return time.time_ns() // 1000 if now is None else now


@dataclass(frozen=True, slots=True)
class Writing:
    """What a holder writes, as a document has it."""

    entries: Sequence[Entry]
    consume: Collection[int]
    items: Sequence[Item]
    cargo: Cargo

    @classmethod
    def of(cls, entries: Sequence[Entry], consume: Collection[int], items: Sequence[Item] = ()) -> Writing:
        """What was passed in, copied."""
        cargo = Cargo()
        return cls(cargo.entries(entries), frozenset(consume), cargo.items(items), cargo)

    def into(self, run: Run) -> None:
        """Write it."""
        run.write(self.entries, self.consume, self.items)
        run.carry(self.cargo.parcels)


@dataclass(frozen=True, slots=True)
class Beginning:
    """With what a new run begins, as a document has it."""

    row: RunRow
    entries: list[Entry]
    inbox: list[Signal]
    cargo: Cargo

    @classmethod
    def of(cls, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal]) -> Beginning:
        """What was passed in, copied."""
        cargo = Cargo()
        return cls(cargo.row(row), cargo.entries(entries), cargo.inbox(inbox), cargo)


def create(run: Run, new: NewRun, begun: Beginning, ttl: float | None, owner: str, now: int) -> tuple[bool, Given | RunRow]:
    """Whether the run is new, and its row; with a `ttl` a new one's lease."""
    if run.row is not None:
        cargo = Cargo()
        row = found_row(run.row, cargo.row(new), now)
        if row is not run.row:
            run.replace(row)
            run.carry(cargo.parcels)
        return False, row
    begin(run, begun)
    return True, run.found() if ttl is None else run.give(ttl, owner, now)


def begin(run: Run, begun: Beginning) -> None:
    """Have this run in place of what is there."""
    run.begin(begun.row, list(begun.entries), begun.inbox, begun.cargo.parcels)


def create_missing(run: Run, row: RunRow) -> None:
    """Begin the run with this row, unless there is one."""
    if run.row is None:
        begin(run, Beginning.of(row, [], []))


def restore(run: Run, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], now: int) -> None:
    """Put this whole run in place of what is there."""
    refuse_live(run, now)
    begin(run, Beginning.of(restored_row(row, inbox, run.row, now), entries, inbox))


def refuse_live(run: Run, now: int) -> None:
    """Raise `LeaseHeld` while a lease has not expired."""
    if run.row is not None and run.leased(now):
        raise LeaseHeld(run.id, run.row.lease_owner or "a live worker")


def acquire(run: Run, ttl: float, owner: str, now: int, *, due_only: bool) -> Given | None:
    """Lease this run."""
    row = run.found()
    if row.ended:
        return None
    if row.held:
        raise LeaseHeld(run.id, _OPERATOR)
    refuse_live(run, now)
    if row.lacks_input or (due_only and not run.due(now)):
        return None
    return run.give(ttl, owner, now)


def renew(run: Run, lease: Lease, ttl: float, now: int) -> Pulse | None:
    """Prolong the lease; None when it is no longer current."""
    try:
        run.fenced(lease)
    except LeaseLost:
        return None
    until = now + lease_microseconds(ttl)
    run.change(lease_until=until, wake_at=until, updated_at=now)
    return run.pulse()


def release(run: Run, lease: Lease, now: int) -> None:
    """Give the run back, due at once, with its attempt."""
    row = run.fenced(lease)
    run.free(status="pending", wake_at=now, attempts=max(0, row.attempts - 1), updated_at=now)


def record(run: Run, lease: Lease, writing: Writing) -> Pulse:
    """Append to the journal."""
    run.fenced(lease)
    writing.into(run)
    return run.pulse()


def suspend(
    run: Run, lease: Lease, wake_at: int | None, waiting_for: tuple[Awaited, ...], writing: Writing, now: int
) -> list[Signal]:
    """Record and give up the lease, unless something awaited is there."""
    run.fenced(lease)
    writing.into(run)
    arrived = run.awaited(waiting_for)
    if not arrived:
        run.free(status="suspended", wake_at=wake_at, attempts=0, updated_at=now, waiting_for=waiting_for)
        if run.found().cancel_requested:
            run.wake(now)
    return arrived


def finish(run: Run, lease: Lease, status: EndStatus, outcome: bytes, writing: Writing, now: int) -> bool:
    """Record and end the run. Whether its parent is owed the outcome: it has one that knows it by a key."""
    row = run.fenced(lease)
    writing.into(run)
    cargo = Cargo()
    run.free(status=status, outcome=cargo.once(outcome), wake_at=None, updated_at=now)
    run.carry(cargo.parcels)
    is_owed = row.parent_id is not None and row.parent_key is not None
    run.owe(is_owed=is_owed)
    return is_owed


def hear(run: Run, child: RunRow, outcome: bytes) -> None:
    """Have the child's outcome in the inbox, once for each of its ends. One that has ended or is gone hears nothing.

    If it waits for that, it is due since the child ended, also when it is told much later.
    """
    origin = origin_of_end(child)
    if run.row is None or run.row.ended or run.seq_of(origin) is not None:
        return
    cargo = Cargo()
    run.put(Signal(seq=0, name=child.parent_key or "", payload=cargo.once(outcome), kind="child"), origin, child.updated_at)
    run.carry(cargo.parcels)


def be_quits(run: Run, epoch: int) -> None:
    """The parent was told of the end that the run had in this epoch."""
    if run.row is not None and run.row.ended and run.row.epoch == epoch:
        run.owe(is_owed=False)
        run.change(parent_notified=True)


def reopen(run: Run, drop: Collection[str], now: int) -> None:
    """Make an ended run pending again."""
    row = run.found()
    if row.status == "completed":
        raise RunFinished(run.id, "completed")
    if not row.ended:
        raise LeaseHeld(run.id, f"whoever drives it: it is {row.status} and has not ended")
    epoch = max(row.epoch + 1, now)
    cargo = Cargo()
    run.append(*cargo.entries([drop_entry(run.next_seq, drop, now, epoch)]))
    run.carry(cargo.parcels)
    run.free(status="pending", wake_at=None if row.lacks_input else now, epoch=epoch, attempts=0, updated_at=now)
    run.change(outcome=None, cancel_requested=False, parent_notified=False)
    run.owe(is_owed=False)


def signal(run: Run, sent: Signal, now: int) -> int:
    """Put a signal into the run's inbox."""
    run.found()
    origin = origin_of(sent)
    first = run.seq_of(origin)
    if first is not None:
        return first
    run.unended()
    cargo = Cargo()
    (packed,) = cargo.inbox([sent])
    run.carry(cargo.parcels)
    return run.put(packed, origin, now)


def cancel(run: Run, now: int) -> None:
    """Ask the run to stop."""
    row = run.unended()
    run.change(cancel_requested=True)
    if not run.leased(now) and not row.lacks_input:
        run.wake(now)


def hold(run: Run, *, held: bool) -> None:
    """Keep the run from being driven, or no longer."""
    run.found()
    run.change(held=held)


def report(run: Run, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    run.fenced(lease)
    cargo = Cargo()
    run.change(progress=cargo.once(progress))
    run.carry(cargo.parcels)


def delete(run: Run, *, ended_before: int | None = None) -> bool:
    """Remove the run, or only if it has ended and was not changed since; whether it was."""
    row = run.row
    if row is None or (ended_before is not None and not (row.ended and row.updated_at <= ended_before)):
        return False
    run.delete()
    return True
