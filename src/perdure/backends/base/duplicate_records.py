"""A record that is sent twice: the reply to the first was lost, so what is recorded already must be the same.

The contract of `record`: entries and items that are recorded already and equal are left alone, another one under a taken number
is refused, and so is an inbox row that does not exist. Then nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Item


def refuse_write(run_id: str, reason: str) -> PersistenceError:
    """The error of a write that contradicts itself or what is recorded; the caller raises it, or replies with it."""
    return PersistenceError(f"run {run_id!r}", f"{reason}; nothing was written")


def unique_entries(run_id: str, entries: Iterable[Entry]) -> list[Entry]:
    """The entries of one write without repetitions. Raises `PersistenceError` when two different ones have the same seq."""
    unique: dict[int, Entry] = {}
    for entry in entries:
        if unique.setdefault(entry.seq, entry) != entry:
            raise refuse_write(run_id, f"two different entries have seq {entry.seq}")
    return list(unique.values())


def unique_items(run_id: str, items: Iterable[Item]) -> list[Item]:
    """The items of one write without repetitions. Raises `PersistenceError` when two different ones have the same number."""
    unique: dict[tuple[str, int], Item] = {}
    for item in items:
        if unique.setdefault((item.stream, item.n), item) != item:
            raise refuse_write(run_id, f"stream {item.stream!r} gets two different items {item.n}")
    return list(unique.values())


def missing_entries(run_id: str, recorded: Mapping[int, Entry], entries: Iterable[Entry]) -> dict[int, Entry]:
    """The entries that are not recorded yet, by seq. Raises `PersistenceError` when a seq holds something else."""
    missing: dict[int, Entry] = {}
    for entry in entries:
        if recorded.get(entry.seq, entry) != entry or missing.setdefault(entry.seq, entry) != entry:
            raise refuse_write(run_id, f"something else is recorded under seq {entry.seq} already")
    return {seq: entry for seq, entry in missing.items() if seq not in recorded}


def missing_items(run_id: str, recorded: Mapping[tuple[str, int], Item], items: Iterable[Item]) -> dict[tuple[str, int], Item]:
    """The items that are not recorded yet, by stream and number. Raises `PersistenceError` when a number holds another item."""
    missing: dict[tuple[str, int], Item] = {}
    for item in items:
        place = item.stream, item.n
        if recorded.get(place, item) != item or missing.setdefault(place, item) != item:
            raise refuse_write(run_id, f"stream {item.stream!r} has another item {item.n} already")
    return {place: item for place, item in missing.items() if place not in recorded}


def check_consumed(run_id: str, inbox: Collection[int], consume: Iterable[int]) -> None:
    """Raise `PersistenceError` when a row to consume is not in the inbox."""
    for seq in consume:
        if seq not in inbox:
            raise refuse_write(run_id, f"its inbox has no row {seq} to consume")
