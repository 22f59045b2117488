"""What each verb does to one locked run. A verb checks first and changes afterwards, so one that raises has changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from perdure.backends.base.leases import Release, length_in_microseconds, refuse_leased, store_time
from perdure.backends.base.new_runs import new_row, row_after_create, row_after_restore
from perdure.backends.base.process_owner import Owners
from perdure.backends.files.namespace import LockedRun
from perdure.backends.files.run_state import RunState
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Created, EndStatus, Item, Lease, NewInput, NewRun, Pulse, RunRow, Signal


def create(
    run: LockedRun,
    new: NewRun,
    entries: Sequence[Entry],
    inbox: Sequence[Signal],
    ttl: float | None,
    owners: Owners,
    created_at: int | None,
    now: int | None,
) -> Created:
    """Create the run with its first entries and signals, or find it."""
    at = store_time(now)
    if run.state is not None:
        run.state.row = row_after_create(run.state.row, new, at)
        return Created(run=run.state.row, is_new=False)
    state = RunState.create(new_row(new, at, created_at), entries, inbox)
    claim = None if ttl is None else state.grant_lease(ttl, at, owners.here)
    run.state = state
    return Created(run=state.row, is_new=True, claim=claim)


def create_missing(run: LockedRun, row: RunRow) -> None:
    """Create the run with this row, unless there is one."""
    if run.state is None:
        run.state = RunState.create(row)


def restore(
    run: LockedRun, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], owners: Owners, now: int | None
) -> None:
    """Put this whole run in place of what is there."""
    at = store_time(now)
    found = None if run.state is None else run.state.row
    if found is not None and not has_dead_owner(found.lease_owner, owners):
        refuse_leased(found, at)
    run.state = RunState.create(row_after_restore(row, inbox, found, at), entries, inbox)


def has_dead_owner(lease_owner: str | None, owners: Owners) -> bool:
    """Whether the process that has the lease is known to have died."""
    return lease_owner is not None and owners.has_ended(lease_owner)


def acquire(
    run: LockedRun,
    ttl: float,
    owners: Owners,
    at: int,
    *,
    due_only: bool,
    take_room: Callable[[RunRow], bool] = lambda _: True,
) -> Claim | None:
    """Lease this run, if the limits of its queue let it in."""
    state = run.find()
    if not state.can_acquire(at, due_only=due_only, owner_has_died=has_dead_owner(state.row.lease_owner, owners)):
        return None
    return state.grant_lease(ttl, at, owners.here) if take_room(state.row) else None


def renew(run: LockedRun, lease: Lease, ttl: float, running_steps: bytes | None, owners: Owners, now: int | None) -> Pulse | None:
    """Prolong the lease; None when it is no longer current."""
    at = store_time(now)
    try:
        return run.find_leased(lease).renew(at + length_in_microseconds(ttl), at, running_steps, lease_owner=owners.here)
    except LeaseLost:
        return None


def release(run: LockedRun, lease: Lease, release: Release, now: int | None) -> None:
    """Give the run back, due at once or later."""
    run.find_leased(lease).release(store_time(now), release)


def record(run: LockedRun, lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item]) -> Pulse:
    """Append to the journal."""
    state = run.find_leased(lease)
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
    """Record and give up the lease, unless an awaited signal is there."""
    state = run.find_leased(lease)
    state.write(lease, entries, consume)
    return state.suspend(wake_at, waiting_for, store_time(now))


def finish(
    run: LockedRun,
    parent_listens: bool,  # noqa: FBT001 - a callback with just these two
    *,
    lease: Lease,
    status: EndStatus,
    outcome: bytes,
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int,
) -> None:
    """Record and end the run. Its parent must be notified if it listens."""
    state = run.find_leased(lease)
    state.write(lease, entries, consume)
    has_parent = state.row.parent_id is not None and state.row.parent_key is not None
    state.finish(status, outcome, now, parent_notified=has_parent or state.row.parent_notified)
    state.owes_parent = parent_listens


def keep_debt(run: LockedRun, parent_listens: bool) -> None:  # noqa: FBT001 - as above
    """After a crash: the run has ended, and its parent must still be notified, unless it no longer listens."""
    if run.state is not None and not parent_listens:
        run.state.owes_parent = False


def continue_as(run: LockedRun, lease: Lease, new: NewInput, now: int | None) -> None:
    """Let the run start over with this input."""
    run.find_leased(lease).continue_as(new, store_time(now))


def reopen(run: LockedRun, drop: Collection[str], now: int | None, *, new_generation: bool) -> None:
    """Make an ended run pending again."""
    run.find().reopen(drop, store_time(now), new_generation=new_generation)


def signal(run: LockedRun, name: str, payload: bytes, dedupe: str | None, now: int | None) -> int:
    """Put a signal into the run's inbox."""
    return run.find().send_signal(name, payload, dedupe, store_time(now))


def cancel(run: LockedRun, now: int | None) -> None:
    """Ask the run to stop."""
    run.find().request_cancel(store_time(now))


def hold(run: LockedRun) -> None:
    """Keep the run from being driven."""
    run.find().change(held=True)


def unhold(run: LockedRun, now: int | None) -> None:
    """Let the run be driven again."""
    run.find().unhold(store_time(now))


def report(run: LockedRun, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    run.find_leased(lease).change(progress=progress)
