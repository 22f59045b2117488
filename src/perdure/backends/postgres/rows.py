"""Rows of the tables as the contract's values, and back."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from perdure.model.journal import Entry
from perdure.model.records import Awaited, Lease, RunRow, Signal

# The run's columns in the order of RunRow's fields, so that a row and a RunRow are the same sequence of values.
RUN_FIELDS: Final = RunRow.__struct_fields__
RUN_COLUMNS: Final = ", ".join(RUN_FIELDS)
_WAITING_FOR: Final = RUN_FIELDS.index("waiting_for")

ENTRY_COLUMNS: Final = 'seq, epoch, "key", phase, kind, name, ok, attempt, started_at, ended_at, args_hash, payload'
ENTRY_TYPES: Final = ("bigint", "bigint", "text", "text", "text", "text", "boolean", *["bigint"] * 3, "bytea", "bytea")
SIGNAL_COLUMNS: Final = "seq, kind, name, payload, dedupe, consumed_by"
ENDED_SQL: Final = "('completed', 'failed', 'cancelled', 'dead')"


def address(awaited: Awaited) -> str:
    """What a run waits for, or an inbox row answers to, as one text."""
    return f"{awaited.kind}:{awaited.name}"


def addresses(waiting_for: Collection[Awaited]) -> list[str]:
    """What a run waits for."""
    return sorted({address(awaited) for awaited in waiting_for})


def identity(name: str, dedupe: str | None) -> bytes:
    """What makes a signal the same as another: its name and dedupe, or nothing but itself."""
    if dedupe is None:
        return secrets.token_bytes(16)
    return hashlib.sha256(f"{len(name)}:{name}{dedupe}".encode()).digest()


def _awaited(text: str) -> Awaited:
    kind, _, name = text.partition(":")
    return Awaited("child" if kind == "child" else "signal", name)


def run_from(values: Sequence[Any]) -> RunRow:
    """The run of a row that begins with `RUN_COLUMNS`."""
    fields = dict(zip(RUN_FIELDS, values, strict=False))
    fields["waiting_for"] = tuple(_awaited(text) for text in fields["waiting_for"])
    return RunRow(**fields)


def values_of(run: RunRow) -> list[Any]:
    """The values of `RUN_COLUMNS` for this run."""
    values = [getattr(run, name) for name in RUN_FIELDS]
    values[_WAITING_FOR] = addresses(run.waiting_for)
    return values


def entry_from(values: Sequence[Any]) -> Entry:
    """The entry of a row that begins with `ENTRY_COLUMNS`."""
    return Entry(
        seq=values[0],
        epoch=values[1],
        key=values[2],
        phase=values[3],
        kind=values[4],
        name=values[5],
        ok=values[6],
        attempt=values[7],
        started_at=values[8],
        ended_at=values[9],
        args_hash=values[10],
        payload=values[11],
    )


def entry_values(entry: Entry) -> tuple[Any, ...]:
    """The values of `ENTRY_COLUMNS` for this entry."""
    return (
        entry.seq,
        entry.epoch,
        entry.key,
        entry.phase,
        entry.kind,
        entry.name,
        entry.ok,
        entry.attempt,
        entry.started_at,
        entry.ended_at,
        entry.args_hash,
        entry.payload,
    )


def columns(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """The rows turned into one list for each column, as `unnest` takes them."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned or [[] for _ in range(width)]


def signal_from(values: Sequence[Any]) -> Signal:
    """The signal of a row that begins with `SIGNAL_COLUMNS`."""
    seq, kind, name, payload, dedupe, consumed_by = values[:6]
    return Signal(seq=seq, kind=kind, name=name, payload=payload, dedupe=dedupe, consumed_by=consumed_by)


def lease_of(run: RunRow, token: str) -> Lease:
    """The lease under which the run is running."""
    return Lease(run_id=run.id, epoch=run.epoch, token=token, until=run.lease_until or 0)
