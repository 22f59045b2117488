"""A record that is sent twice: the reply to the first was lost, so what is recorded already must be the same.

The contract of `record`: entries and items that are recorded already and equal are left alone, another one under a taken number
is refused, and so is an inbox row that does not exist. Then nothing is written.

A statement or script that finds a contradiction by itself reports it as `entry SEQ`, `inbox SEQ` or `item N STREAM`, so that
every store says the same of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Item


def refuse_write(run_id: str, reason: str) -> PersistenceError:
    """Return the error of a write that contradicts itself or what is recorded; the caller raises it, or replies with it."""
    return PersistenceError(f"run {run_id!r}", f"{reason}; nothing was written")


def refusal_from(run_id: str, found: str) -> PersistenceError:
    """Return the error for the contradiction that a statement or script has found."""
    kind, number, *stream = found.split(" ", 2)
    reasons = {
        "entry": f"something else is recorded under seq {number} already",
        "inbox": f"its inbox has no row {number} to consume",
        "item": f"stream {''.join(stream)!r} has another item {number} already",
    }
    return refuse_write(run_id, reasons[kind])


def unique_entries(run_id: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of one write without repetitions. Raises `PersistenceError` if two different ones have the same seq."""
    unique: dict[int, Entry] = {}
    for entry in entries:
        if unique.setdefault(entry.seq, entry) != entry:
            raise refuse_write(run_id, f"two different entries have seq {entry.seq}")
    return list(unique.values())


def unique_items(run_id: str, items: Iterable[Item]) -> list[Item]:
    """Return the items of one write without repetitions. Raises `PersistenceError` if two different ones have the same number."""
    unique: dict[tuple[str, int], Item] = {}
    for item in items:
        if unique.setdefault((item.stream, item.n), item) != item:
            raise refuse_write(run_id, f"stream {item.stream!r} gets two different items {item.n}")
    return list(unique.values())


def missing_entries(run_id: str, recorded: Mapping[int, Entry], entries: Collection[Entry]) -> dict[int, Entry]:
    """Return the entries, all unique, that are not recorded yet, by seq. Raises `PersistenceError` if a seq holds another one."""
    for entry in entries:
        if recorded.get(entry.seq, entry) != entry:
            raise refusal_from(run_id, f"entry {entry.seq}")
    return {entry.seq: entry for entry in entries if entry.seq not in recorded}


def missing_items(run_id: str, recorded: Mapping[tuple[str, int], Item], items: Collection[Item]) -> dict[tuple[str, int], Item]:
    """Return the items, all unique, that are not recorded yet, by stream and number.

    Raises `PersistenceError` if a number holds another one.
    """
    by_place = {(item.stream, item.n): item for item in items}
    for place, item in by_place.items():
        if recorded.get(place, item) != item:
            raise refusal_from(run_id, f"item {item.n} {item.stream}")
    return {place: item for place, item in by_place.items() if place not in recorded}


def check_consumed(run_id: str, inbox: Collection[int], consume: Iterable[int]) -> None:
    """Raise `PersistenceError` if a row to consume is not in the inbox."""
    for seq in consume:
        if seq not in inbox:
            raise refusal_from(run_id, f"inbox {seq}")
