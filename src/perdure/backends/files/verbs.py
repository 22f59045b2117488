"""What each verb does to one locked run. A verb checks first and changes afterwards, so one that raises has changed nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from perdure.backends.base.leases import length_in_microseconds
from perdure.backends.base.new_runs import found_row, new_row, restored_row
from perdure.backends.base.process_owner import Owner, Owners
from perdure.backends.files.place import LockedRun
from perdure.backends.files.state import RunState
from perdure.errors import LeaseHeld, LeaseLost, RunFinished
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import Awaited, Claim, Created, EndStatus, Item, Lease, NewRun, Pulse, RunRow, Signal


def clock(now: int | None) -> int:
    """The store's present instant, or the one a test gave."""
    return time.time_ns() // 1000 if now is None else now


class Begun(NamedTuple):
    """With what a new run begins."""

    entries: Sequence[Entry]
    inbox: Sequence[Signal]
    created_at: int | None


def create(run: LockedRun, new: NewRun, begun: Begun, ttl: float | None, owners: Owners, now: int | None) -> Created:
    """Begin the run, or find it."""
    at = clock(now)
    if run.state is not None:
        run.state.row = found_row(run.state.row, new, at)
        return Created(run=run.state.row, is_new=False)
    state = RunState.begun(new_row(new, at, begun.created_at), begun.entries, begun.inbox)
    claim = None if ttl is None else state.give_to(owners.here, ttl, at)
    run.state = state
    return Created(run=state.row, is_new=True, claim=claim)


def create_missing(run: LockedRun, row: RunRow) -> None:
    """Begin the run with this row, unless there is one."""
    if run.state is None:
        run.state = RunState.begun(row)


def restore(
    run: LockedRun, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], owners: Owners, now: int | None
) -> None:
    """Put this whole run in place of what is there."""
    at = clock(now)
    if run.state is not None:
        refuse_live(run.state, owners, at)
    run.state = RunState.begun(restored_row(row, inbox, None if run.state is None else run.state.row, at), entries, inbox)


def refuse_live(state: RunState, owners: Owners, now: int) -> None:
    """Raise `LeaseHeld` while a lease has not expired and its process may be alive."""
    owner = state.row.lease_owner
    if not state.leased(now) or (owner is not None and owners.gone(owner)):
        return
    known = None if owner is None else Owner.parse(owner)
    raise LeaseHeld(state.row.id, (owner or "a live worker") if known is None else known.label)


def acquire(run: LockedRun, ttl: float, owners: Owners, now: int | None, *, due_only: bool) -> Claim | None:
    """Lease this run."""
    at = clock(now)
    state = run.found()
    if state.row.ended:
        return None
    if state.row.held:
        raise LeaseHeld(run.id, "an operator; unhold it first")
    refuse_live(state, owners, at)
    if state.row.lacks_input or (due_only and not state.due(at) and state.row.status != "running"):
        return None
    return state.give_to(owners.here, ttl, at)


def renew(run: LockedRun, lease: Lease, ttl: float, owners: Owners, now: int | None) -> Pulse | None:
    """Prolong the lease; None when it is no longer current."""
    at = clock(now)
    try:
        state = run.fenced(lease)
    except LeaseLost:
        return None
    until = at + length_in_microseconds(ttl)
    state.change(lease_until=until, wake_at=until, updated_at=at, lease_owner=owners.here)
    return state.pulse()


def release(run: LockedRun, lease: Lease, now: int | None) -> None:
    """Give the run back, due at once, with its attempt."""
    at = clock(now)
    state = run.fenced(lease)
    state.free(status="pending", wake_at=at, attempts=max(0, state.row.attempts - 1), updated_at=at)


def record(run: LockedRun, lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item]) -> Pulse:
    """Append to the journal."""
    state = run.fenced(lease)
    state.write(lease, entries, consume, items)
    return state.pulse()


def suspend(
    run: LockedRun,
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> list[Signal]:
    """Record and give up the lease, unless something awaited is there."""
    at = clock(now)
    state = run.fenced(lease)
    state.write(lease, entries, consume)
    arrived = [signal for signal in state.unconsumed() if signal.address in waiting_for]
    if not arrived:
        state.free(status="suspended", wake_at=wake_at, attempts=0, updated_at=at, waiting_for=tuple(waiting_for))
        if state.row.cancel_requested:
            state.wake(at)
    return arrived


def finish(
    run: LockedRun,
    listens: bool,  # noqa: FBT001 - a callback with just these two
    *,
    lease: Lease,
    status: EndStatus,
    outcome: bytes,
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int,
) -> None:
    """Record and end the run. Its parent is owed the outcome if it `listens`."""
    state = run.fenced(lease)
    state.write(lease, entries, consume)
    told = state.row.parent_id is not None and state.row.parent_key is not None
    notified = True if told else state.row.parent_notified
    state.free(status=status, outcome=outcome, wake_at=None, updated_at=now, parent_notified=notified)
    state.owes_parent = listens


def remember_debt(run: LockedRun, listens: bool) -> None:  # noqa: FBT001 - as above
    """After a crash: the run has ended already, and owes its parent what it owed, unless that listens no more."""
    if run.state is not None and not listens:
        run.state.owes_parent = False


def reopen(run: LockedRun, drop: Collection[str], now: int | None) -> None:
    """Make an ended run pending again."""
    at = clock(now)
    state = run.found()
    row = state.row
    if row.status == "completed":
        raise RunFinished(run.id, "completed")
    if not row.ended:
        raise LeaseHeld(run.id, f"whoever drives it: it is {row.status} and has not ended")
    epoch = max(row.epoch + 1, at)
    state.append(drop_entry(max(state.entries, default=0) + 1, drop, at, epoch))
    wake_at = None if row.lacks_input else at
    state.free(status="pending", wake_at=wake_at, epoch=epoch, attempts=0, updated_at=at)
    state.change(outcome=None, cancel_requested=False, parent_notified=False)


def signal(run: LockedRun, name: str, payload: bytes, dedupe: str | None, now: int | None) -> int:
    """Put a signal into the run's inbox."""
    first = _already_sent(run.found(), name, dedupe)
    return run.unended().put(name, payload, dedupe=dedupe, now=clock(now)) if first is None else first


def _already_sent(state: RunState, name: str, dedupe: str | None) -> int | None:
    if dedupe is None:
        return None
    sent = ("signal", name, dedupe)
    return next((row.seq for row in state.inbox.values() if (row.kind, row.name, row.dedupe) == sent), None)


def cancel(run: LockedRun, now: int | None) -> None:
    """Ask the run to stop."""
    at = clock(now)
    state = run.unended()
    state.change(cancel_requested=True)
    if not state.leased(at) and not state.row.lacks_input:
        state.wake(at)


def hold(run: LockedRun, *, held: bool) -> None:
    """Keep the run from being driven, or no longer."""
    run.found().change(held=held)


def report(run: LockedRun, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    run.fenced(lease).change(progress=progress)
