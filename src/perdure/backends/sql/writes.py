"""What holders of leases ask to be written: records, and with a status the end or the sleep of a run."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from perdure.errors import PersistenceError
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
        """Whose it is."""
        return self.lease.run_id

    @property
    def places(self) -> list[Hashable]:
        """What it writes: places in a journal and in streams, or the run's row."""
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
    """What appends these. Raises `PersistenceError` when it says two things under one number."""
    return Write(lease, _entries(lease, entries), list(dict.fromkeys(consume)), _items(lease, items))


def suspend(
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> Write:
    """What records, and gives up the lease unless something awaited is there."""
    written = record(lease, entries, consume)
    return written._replace(status="suspended", wake_at=wake_at, waiting_for=frozenset(waiting_for), now=now)


def finish(
    lease: Lease, status: EndStatus, outcome: bytes, entries: Sequence[Entry], consume: Sequence[int], now: int | None
) -> Write:
    """What records, ends the run and tells its parent."""
    return record(lease, entries, consume)._replace(status=status, outcome=outcome, now=now)


def refusal(lease: Lease, reason: str) -> PersistenceError:
    """Why nothing of a write was written."""
    return PersistenceError(f"run {lease.run_id!r}", f"{reason}; nothing was written")


def _entries(lease: Lease, entries: Sequence[Entry]) -> list[Entry]:
    said: dict[int, Entry] = {}
    for entry in entries:
        if said.setdefault(entry.seq, entry) != entry:
            raise refusal(lease, f"two different entries have seq {entry.seq}")
    return list(said.values())


def _items(lease: Lease, items: Sequence[Item]) -> list[Item]:
    said: dict[tuple[str, int], Item] = {}
    for item in items:
        if said.setdefault((item.stream, item.n), item) != item:
            raise refusal(lease, f"stream {item.stream!r} gets two different items {item.n}")
    return list(said.values())
