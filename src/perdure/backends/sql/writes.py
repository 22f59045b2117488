"""The writes of a lease holder: records, and with a status the end or the sleep of a run."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from perdure.backends.base.duplicate_records import unique_entries, unique_items
from perdure.model.journal import Entry
from perdure.model.records import Awaited, EndStatus, Item, Lease


class Write(NamedTuple):
    """A record, or with `status` the end or sleep of a run and what is recorded with it."""

    lease: Lease
    entries: Sequence[Entry] = ()
    consume: Sequence[int] = ()
    items: Sequence[Item] = ()
    status: str | None = None
    outcome: bytes | None = None
    wake_at: int | None = None
    waiting_for: frozenset[Awaited] = frozenset()
    now: int | None = None

    @property
    def run_id(self) -> str:
        """The id of the run that is written."""
        return self.lease.run_id

    @property
    def written_rows(self) -> list[Hashable]:
        """The rows it writes: places in a journal and in streams, or the run's row."""
        if self.status is not None:
            return [self.run_id]
        entries = [(self.run_id, entry.seq) for entry in self.entries]
        return [*entries, *((self.run_id, item.stream, item.n) for item in self.items)]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        payloads = sum(len(entry.payload) for entry in self.entries) + sum(len(item.payload) for item in self.items)
        return payloads + len(self.outcome or b"") + 200


def record(lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item] = ()) -> Write:
    """The write that appends these. Raises `PersistenceError` when two different things have the same number."""
    run_id = lease.run_id
    if len(entries) == 1 and not consume and not items:  # as nearly every record
        return Write(lease, list(entries))
    return Write(lease, unique_entries(run_id, entries), list(dict.fromkeys(consume)), unique_items(run_id, items))


def suspend(
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> Write:
    """The write that records, and gives up the lease unless an awaited inbox row has arrived."""
    write = record(lease, entries, consume)
    return write._replace(status="suspended", wake_at=wake_at, waiting_for=frozenset(waiting_for), now=now)


def finish(
    lease: Lease, status: EndStatus, outcome: bytes, entries: Sequence[Entry], consume: Sequence[int], now: int | None
) -> Write:
    """The write that records, ends the run and notifies its parent."""
    return record(lease, entries, consume)._replace(status=status, outcome=outcome, now=now)
