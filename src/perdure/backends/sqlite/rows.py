"""Rows of the tables as the contract's values, and back."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

from perdure.model.journal import Entry
from perdure.model.records import Awaited, RunRow, Signal

# The run's columns in the order of RunRow's fields, so that a row and a RunRow are the same sequence of values.
RUN_FIELDS: Final = RunRow.__struct_fields__
RUN_COLUMNS: Final = ", ".join(RUN_FIELDS)
_WAITING_FOR: Final = RUN_FIELDS.index("waiting_for")
_BOOLEANS: Final = ("held", "cancel_requested", "parent_notified")
_BOOLEAN_INDEXES: Final = tuple(map(RUN_FIELDS.index, _BOOLEANS))
_BLOB_INDEXES: Final = tuple(map(RUN_FIELDS.index, ("seed", "input_hash", "metadata", "progress", "outcome", "input")))

ENTRY_COLUMNS: Final = 'seq, epoch, "key", phase, kind, name, ok, attempt, started_at, took, args_hash, payload'
SIGNAL_COLUMNS: Final = "seq, kind, name, payload, dedupe, consumed_by"

_awaited = msgspec.json.Decoder(tuple[Awaited, ...])


def clock(now: int | None) -> int:
    """The store's present instant, or the one a test gave."""
    return time.time_ns() // 1000 if now is None else now


def awaited_text(waiting_for: Collection[Awaited]) -> str:
    """What a run waits for, as JSON."""
    if not waiting_for:
        return "[]"
    return msgspec.json.encode(sorted(set(waiting_for), key=lambda awaited: (awaited.kind, awaited.name))).decode()


def awaited_from(text: str) -> tuple[Awaited, ...]:
    """What a run waits for."""
    return _awaited.decode(text)


def run_from(values: Sequence[Any]) -> RunRow:
    """The run of a row with `RUN_COLUMNS`."""
    fields = dict(zip(RUN_FIELDS, values, strict=True))
    fields["waiting_for"] = awaited_from(fields["waiting_for"])
    for name in _BOOLEANS:
        fields[name] = bool(fields[name])
    return RunRow(**fields)


def values_of(run: RunRow) -> list[Any]:
    """The values of `RUN_COLUMNS` for this run, in types that Python hands to SQLite at once.

    For bytes and bool it would first ask who might adapt them.
    """
    values = list(msgspec.structs.astuple(run))
    for index in _BLOB_INDEXES:
        if values[index] is not None:
            values[index] = bytearray(values[index])
    for index in _BOOLEAN_INDEXES:
        values[index] = int(values[index])
    values[_WAITING_FOR] = awaited_text(run.waiting_for)
    return values


def entries_from(rows: Iterable[Sequence[Any]]) -> list[Entry]:
    """The entries of rows with `ENTRY_COLUMNS`."""
    return [
        Entry(
            seq=seq,
            key=key,
            phase=phase or "close",
            kind=kind or "step",
            name=name,
            ok=bool(ok),
            payload=payload,
            attempt=attempt,
            args_hash=args_hash,
            started_at=started_at,
            ended_at=started_at + took,
            epoch=epoch,
        )
        for seq, epoch, key, phase, kind, name, ok, attempt, started_at, took, args_hash, payload in rows
    ]


def entry_values(namespace: str, run_id: str, entry: Entry) -> tuple[Any, ...]:
    """Namespace, run and the values of `ENTRY_COLUMNS` for this entry, in types as those of `values_of`."""
    return (
        namespace,
        run_id,
        entry.seq,
        entry.epoch,
        entry.key,
        "" if entry.phase == "close" else entry.phase,
        "" if entry.kind == "step" else entry.kind,
        entry.name,
        1 if entry.ok else 0,
        entry.attempt,
        entry.started_at,
        entry.ended_at - entry.started_at,
        None if entry.args_hash is None else bytearray(entry.args_hash),
        bytearray(entry.payload),
    )


def signal_from(values: Sequence[Any]) -> Signal:
    """The signal of a row with `SIGNAL_COLUMNS`."""
    seq, kind, name, payload, dedupe, consumed_by = values
    return Signal(seq=seq, kind=kind, name=name, payload=payload, dedupe=dedupe, consumed_by=consumed_by)
