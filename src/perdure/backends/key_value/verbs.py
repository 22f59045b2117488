"""What each verb does to one run. A verb checks first and changes afterwards, so one that raises has changed nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from perdure.backends.base.leases import Release, refuse_leased
from perdure.backends.base.new_runs import row_after_create, row_after_restore
from perdure.backends.key_value.editable_run import EditableRun, LeaseGrant, origin_of_end, origin_of_signal
from perdure.backends.key_value.run_document import LargePayloads
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import Awaited, EndStatus, Item, Lease, NewInput, NewRun, Pulse, RunRow, Signal


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """What the holder of a lease writes, as a document has it."""

    entries: Sequence[Entry]
    consume: Collection[int]
    items: Sequence[Item]
    payloads: LargePayloads

    @classmethod
    def of(cls, lease: Lease, entries: Sequence[Entry], consume: Collection[int], items: Sequence[Item] = ()) -> PackedRecords:
        """A copy of what was passed in."""
        payloads = LargePayloads()
        return cls(payloads.pack_entries(entries, lease.token), frozenset(consume), payloads.pack_items(items), payloads)

    def write_to(self, run: EditableRun) -> None:
        """Record it."""
        run.write(self.entries, self.consume, self.items)
        run.add_blobs(self.payloads)


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A new run with its first entries and signals, as a document has it."""

    row: RunRow
    entries: list[Entry]
    inbox: list[Signal]
    payloads: LargePayloads

    @classmethod
    def of(cls, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal]) -> PackedRun:
        """A copy of what was passed in."""
        payloads = LargePayloads()
        return cls(payloads.pack_row(row), payloads.pack_entries(entries), payloads.pack_inbox(inbox), payloads)

    def write_to(self, run: EditableRun) -> None:
        """Put this run in place of what is there."""
        run.create(self.row, list(self.entries), self.inbox, self.payloads.blobs)


def create(
    run: EditableRun, new: NewRun, packed: PackedRun, length: int | None, owner: str, now: int
) -> tuple[bool, LeaseGrant | RunRow]:
    """Whether the run is new, and its row; with a `length` a new one's lease."""
    if run.exists:
        payloads = LargePayloads()
        row = row_after_create(run.row, payloads.pack_row(new), now)
        if row is not run.row:
            run.row = row
            run.add_blobs(payloads)
        return False, row
    packed.write_to(run)
    return True, run.row if length is None else run.grant_lease(length, owner, now)


def create_missing(run: EditableRun, row: RunRow) -> None:
    """Create the run with this row, unless there is one."""
    if not run.exists:
        PackedRun.of(row, [], []).write_to(run)


def restore(run: EditableRun, row: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], now: int) -> None:
    """Put this whole run in place of what is there."""
    found = run.row if run.exists else None
    if found is not None:
        refuse_leased(found, now)
    PackedRun.of(row_after_restore(row, inbox, found, now), entries, inbox).write_to(run)


def acquire(run: EditableRun, length: int, owner: str, now: int, *, due_only: bool) -> LeaseGrant | None:
    """Lease this run."""
    return run.grant_lease(length, owner, now) if run.can_acquire(now, due_only=due_only) else None


def find_acquirable(run: EditableRun, now: int, *, due_only: bool) -> RunRow | None:
    """The run's row, if `acquire` may lease it as far as the run itself is concerned."""
    return run.row if run.can_acquire(now, due_only=due_only) else None


def renew(run: EditableRun, lease: Lease, length: int, running_steps: bytes | None, now: int) -> Pulse | None:
    """Prolong the lease; None when it is no longer current."""
    try:
        run.check_fence(lease)
    except LeaseLost:
        return None
    return run.renew(now + length, now, running_steps)


def release(run: EditableRun, lease: Lease, release: Release, now: int) -> None:
    """Give the run back, due at once or later."""
    run.check_fence(lease)
    run.release(now, release)


def record(run: EditableRun, lease: Lease, records: PackedRecords) -> Pulse:
    """Append to the journal."""
    run.check_fence(lease)
    records.write_to(run)
    return run.pulse()


def suspend(
    run: EditableRun, lease: Lease, wake_at: int | None, waiting_for: Collection[Awaited], records: PackedRecords, now: int
) -> list[Signal]:
    """Record and give up the lease, unless an awaited signal is there."""
    run.check_fence(lease)
    records.write_to(run)
    return run.suspend(wake_at, waiting_for, now)


def finish(run: EditableRun, lease: Lease, status: EndStatus, outcome: bytes, records: PackedRecords, now: int) -> bool:
    """Record and end the run. Whether its parent must be notified: it has one that knows it by a key."""
    run.check_fence(lease)
    records.write_to(run)
    payloads = LargePayloads()
    run.finish(status, payloads.pack_once(outcome), now)
    run.add_blobs(payloads)
    run.owes_parent = run.row.parent_id is not None and run.row.parent_key is not None
    return run.owes_parent


def continue_as(run: EditableRun, lease: Lease, new: NewInput, now: int) -> None:
    """Let the run start over with this input."""
    run.check_fence(lease)
    payloads = LargePayloads()
    run.continue_as(msgspec.structs.replace(new, input=payloads.pack_once(new.input)), now)
    run.add_blobs(payloads)


def deliver_outcome(run: EditableRun, child: RunRow, outcome: bytes) -> None:
    """Put the child's outcome into the inbox, once for each time that it ended. A run that has ended or was deleted gets nothing.

    If the run waits for it, it is due since the child ended, also when the outcome is delivered much later.
    """
    origin = origin_of_end(child)
    if not run.exists or run.row.ended or run.seq_of(origin) is not None:
        return
    payloads = LargePayloads()
    signal = Signal(seq=0, name=child.parent_key or "", payload=payloads.pack_once(outcome), kind="child")
    run.deliver(signal, origin, child.updated_at)
    run.add_blobs(payloads)


def set_parent_notified(run: EditableRun, epoch: int) -> None:
    """Note that the parent was notified of the end that the run had in this epoch."""
    if run.exists and run.row.ended and run.row.epoch == epoch:
        run.owes_parent = False
        run.change(parent_notified=True)


def reopen(run: EditableRun, drop: Collection[str], now: int) -> None:
    """Make an ended run pending again."""
    run.reopen(drop, now)


def signal(run: EditableRun, sent: Signal, now: int) -> int:
    """Put a signal into the run's inbox."""
    origin = origin_of_signal(sent)
    first = run.seq_of(origin)
    if first is not None:
        return first
    run.refuse_ended()
    run.wake_from_problem(now)
    payloads = LargePayloads()
    (packed,) = payloads.pack_inbox([sent])
    run.add_blobs(payloads)
    return run.deliver(packed, origin, now)


def cancel(run: EditableRun, now: int) -> None:
    """Ask the run to stop."""
    run.request_cancel(now)


def hold(run: EditableRun) -> None:
    """Keep the run from being driven."""
    run.change(held=True)


def unhold(run: EditableRun, now: int) -> None:
    """Let the run be driven again."""
    run.unhold(now)


def report(run: EditableRun, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    run.check_fence(lease)
    payloads = LargePayloads()
    run.change(progress=payloads.pack_once(progress))
    run.add_blobs(payloads)


def delete(run: EditableRun, *, ended_before: int | None = None) -> bool:
    """Remove the run, or only if it has ended and was not changed since; whether it was removed."""
    if not run.exists or (ended_before is not None and not (run.row.ended and run.row.updated_at <= ended_before)):
        return False
    run.delete()
    return True
