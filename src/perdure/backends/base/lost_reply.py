"""A record that is sent twice: the reply to the first was lost, so what is there already must be the same.

The contract of `record`: entries and items that are there already and equal are left alone, another one under a taken number is
refused, and so is an inbox row that does not exist. Then nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Item

K = TypeVar("K")
V = TypeVar("V")


def refuse_write(run_id: str, reason: str) -> PersistenceError:
    """The error of a write that contradicts what is recorded; the caller raises it, or answers with it."""
    return PersistenceError(f"run {run_id!r}", f"{reason}; nothing was written")


def missing_entries(run_id: str, recorded: Mapping[int, Entry], entries: Iterable[Entry]) -> dict[int, Entry]:
    """The entries that are not recorded yet, by seq. Raises `PersistenceError` when a seq holds something else."""
    return _missing(run_id, recorded, ((entry.seq, entry) for entry in entries), "something else is recorded under seq {}")


def missing_items(run_id: str, recorded: Mapping[tuple[str, int], bytes], items: Iterable[Item]) -> dict[tuple[str, int], bytes]:
    """The payloads of items that are not recorded yet, by stream and number. Raises `PersistenceError` as above."""
    numbered = (((item.stream, item.n), item.payload) for item in items)
    return _missing(run_id, recorded, numbered, "a stream has something else under {}")


def check_consumed(run_id: str, inbox: Collection[int], consume: Iterable[int]) -> None:
    """Raise `PersistenceError` when a row to consume is not in the inbox."""
    for seq in consume:
        if seq not in inbox:
            raise refuse_write(run_id, f"its inbox has no row {seq} to consume")


def _missing(run_id: str, recorded: Mapping[K, V], new: Iterable[tuple[K, V]], what: str) -> dict[K, V]:
    missing: dict[K, V] = {}
    for number, value in new:
        if recorded.get(number, value) != value or missing.setdefault(number, value) != value:
            raise refuse_write(run_id, f"{what.format(number)} already")
    return {number: value for number, value in missing.items() if number not in recorded}
