"""Rows of the tables as the contract's values, and back.

How names (`str`) and payloads (`bytes`) are stored is the store's `Values`: all as text, or payloads as bytes.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from perdure.backends.base.damaged_runs import UNREADABLE, check_entry, check_row, check_signal, problem_of
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Lease, RunRow, Signal

Row: TypeAlias = Sequence[Any]

# Begins the text of a payload that is not UTF-8. A payload that begins with it is encoded too.
MARK: Final = "base64:"


class Values(Protocol):
    """The encoding of names (`str`) and payloads (`bytes`) for a database, and their decoding."""

    # Written into the meta table, so that a store with another encoding does not misread the payloads.
    kind: int
    # Whether the driver returns exactly what was written: `str`, `int`, `bytes` and None.
    is_exact: bool

    def __hash__(self) -> int: ...
    def name(self, text: str) -> Any: ...
    def name_from(self, value: Any) -> str: ...
    def id_from(self, value: Any) -> str | None: ...
    def payload(self, payload: bytes) -> Any: ...
    def payload_from(self, value: Any) -> bytes: ...


class TextValues:
    """Everything is text. A payload is usually JSON and stays readable."""

    kind = 1
    is_exact = False

    def name(self, text: str) -> Any:
        """As it is."""
        return text

    def name_from(self, value: Any) -> str:
        """Binary columns give bytes."""
        return value if isinstance(value, str) else bytes(value).decode()

    def id_from(self, value: Any) -> str | None:
        """As `name_from`; None for what is no text."""
        try:
            name = self.name_from(value)
        except UNREADABLE:
            return None
        return name if isinstance(name, str) else None

    def payload(self, payload: bytes) -> Any:
        """As it is if it is text without NUL, which PostgreSQL does not take; otherwise in base 64."""
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            text = MARK
        if text.startswith(MARK) or "\0" in text:
            return MARK + base64.b64encode(payload).decode()
        return text

    def payload_from(self, value: Any) -> bytes:
        """The inverse of `payload`."""
        text = self.name_from(value)
        if text.startswith(MARK):
            return base64.b64decode(text.removeprefix(MARK), validate=True)
        return text.encode()


class BytesValues(TextValues):
    """Names are text, payloads are bytes as they are."""

    kind = 2

    def payload(self, payload: bytes) -> Any:
        return payload

    def payload_from(self, value: Any) -> bytes:
        return value.encode() if isinstance(value, str) else bytes(value)


class ExactValues(BytesValues):
    """Names are text and payloads are bytes, in the database and as the driver gives them back."""

    is_exact = True

    def name_from(self, value: Any) -> str:
        return value  # type: ignore[no-any-return]

    def payload_from(self, value: Any) -> bytes:
        return value  # type: ignore[no-any-return]


TEXT: Final[Values] = TextValues()
BYTES: Final[Values] = BytesValues()
EXACT: Final[Values] = ExactValues()

# The run's columns in the order of RunRow's fields, so that a row and a RunRow are the same sequence of values.
RUN_FIELDS: Final = RunRow.__struct_fields__
RUN_COLUMNS: Final = ", ".join(RUN_FIELDS)
# What a statement that ends a lease sets.
NO_LEASE_SQL: Final = "lease_token = NULL, lease_owner = NULL, lease_until = NULL, running_steps = NULL"
# What a statement that suspends, ends or reopens a run sets.
NO_PROBLEM_SQL: Final = "problem = NULL, problem_at = NULL, problem_count = 0"
# An entry takes few bytes: '' stands for the phase "close" and for the kind "step", which nearly every entry has, and `took`, in
# microseconds, for when it ended.
ENTRY_FIELDS: Final = (
    "seq", "epoch", "key", "phase", "kind", "name", "ok", "attempt", "started_at", "took", "args_hash", "payload",
)  # fmt: skip
ENTRY_COLUMNS: Final = ", ".join("$key" if field == "key" else field for field in ENTRY_FIELDS)
SIGNAL_FIELDS: Final = ("seq", "kind", "name", "payload", "dedupe", "consumed_by")
SIGNAL_COLUMNS: Final = ", ".join(SIGNAL_FIELDS)
WORKER_FIELDS: Final = ("id", "seen_at", "info")
SCHEDULE_FIELDS: Final = ("id", "workflow", "spec", "input", "next_at", "metadata")

_PAYLOADS: Final = frozenset({
    "input", "input_hash", "first_input_hash", "seed", "metadata", "running_steps", "progress", "outcome",
    "payload", "args_hash", "info",
})  # fmt: skip
_BOOLEANS: Final = frozenset({"held", "cancel_requested", "parent_notified", "ok"})
_NUMBERS: Final = frozenset({
    "version", "generation", "continued_at", "priority", "start_at", "deadline", "wake_at", "epoch", "lease_until", "attempts",
    "problem_at", "problem_count", "created_at", "updated_at", "seq", "attempt", "started_at", "took", "next_at", "seen_at",
})  # fmt: skip
_ID: Final = RUN_FIELDS.index("id")
_WAITING_FOR: Final = RUN_FIELDS.index("waiting_for")
_BOOLEAN_INDEXES: Final = tuple(index for index, field in enumerate(RUN_FIELDS) if field in _BOOLEANS)
_PAYLOAD_INDEXES: Final = tuple(index for index, field in enumerate(RUN_FIELDS) if field in _PAYLOADS)

_awaited = msgspec.json.Decoder(tuple[Awaited, ...])


def awaited_text(waiting_for: Collection[Awaited]) -> str:
    """What a run waits for, as JSON."""
    if not waiting_for:
        return "[]"
    return msgspec.json.encode(sorted(set(waiting_for), key=lambda awaited: (awaited.kind, awaited.name))).decode()


def awaited_from(text: str) -> tuple[Awaited, ...]:
    """What a run waits for."""
    return _awaited.decode(text)


@lru_cache(maxsize=32)
def _readers(fields: tuple[str, ...], values: Values) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(field, _reader(field, values)) for field in fields]


def _reader(field: str, values: Values) -> Callable[[Any], Any]:
    if field in _PAYLOADS:
        return values.payload_from
    if field in _BOOLEANS:
        return bool
    return int if field in _NUMBERS else values.name_from


def fields_from(fields: tuple[str, ...], row: Row, values: Values) -> dict[str, Any]:
    """The first columns of a row by their names, as the contract's values."""
    readers = _readers(fields, values)
    return {field: None if value is None else read(value) for (field, read), value in zip(readers, row, strict=False)}


def field_from(field: str, value: Any, values: Values) -> Any:
    """The value of one column, as the contract's value. Raises one of `UNREADABLE`."""
    return None if value is None else _reader(field, values)(value)


def run_from(row: Row, values: Values) -> RunRow:
    """The run of a row that begins with `RUN_COLUMNS`. Raises `SnapshotCorrupt`."""
    try:
        fields = fields_from(RUN_FIELDS, row, values)
        fields["waiting_for"] = awaited_from(fields["waiting_for"])
        return check_row(RunRow(**fields))
    except UNREADABLE as reason:
        raise _damage(row, values, reason) from reason


def _damage(row: Row, values: Values, reason: BaseException) -> SnapshotCorrupt:
    """The error that names the run, and the first column that cannot be read, if it is one column's fault."""
    run_id, what = values.id_from(row[_ID]) or repr(row[_ID]), "the row"
    for (field, read), value in zip(_readers(RUN_FIELDS, values), row, strict=False):
        try:
            if value is not None:
                read(value)
        except UNREADABLE:
            what = f"the column {field}"
            break
    return problem_of(run_id, what, reason)


def run_values(run: RunRow, blob: Callable[[bytes], Any] = bytes) -> list[Any]:
    """The values of `RUN_COLUMNS` for this run, with each payload as `blob` makes it."""
    values = list(msgspec.structs.astuple(run))
    for index in _PAYLOAD_INDEXES:
        if values[index] is not None:
            values[index] = blob(values[index])
    for index in _BOOLEAN_INDEXES:
        values[index] = 1 if values[index] else 0
    values[_WAITING_FOR] = awaited_text(run.waiting_for)
    return values


def entries_from(rows: Iterable[Row], values: Values) -> list[Entry]:
    """The entries of rows that begin with `ENTRY_COLUMNS`. Raises one of `UNREADABLE`."""
    exact = rows if values.is_exact else (fields_from(ENTRY_FIELDS, row, values).values() for row in rows)
    return [
        check_entry(
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
        )
        for seq, epoch, key, phase, kind, name, ok, attempt, started_at, took, args_hash, payload, *_ in exact
    ]


def entry_values(entry: Entry, blob: Callable[[bytes], Any] = bytes) -> tuple[Any, ...]:
    """The values of `ENTRY_COLUMNS` for this entry, with each payload as `blob` makes it."""
    return (
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
        None if entry.args_hash is None else blob(entry.args_hash),
        blob(entry.payload),
    )


def signal_from(row: Row, values: Values) -> Signal:
    """The signal of a row that begins with `SIGNAL_COLUMNS`. Raises one of `UNREADABLE`."""
    return check_signal(Signal(**fields_from(SIGNAL_FIELDS, row, values)))


def signal_values(signal: Signal) -> list[Any]:
    """The values of `SIGNAL_COLUMNS` and the identity for this signal."""
    return [*(getattr(signal, field) for field in SIGNAL_FIELDS), identity(signal.name, signal.dedupe)]


def identity(name: str, dedupe: str | None) -> str:
    """The key by which a repeated signal is recognised: made of its name and dedupe, or random without a dedupe."""
    if dedupe is None:
        return secrets.token_hex(16)
    return hashlib.sha256(f"{len(name)}:{name}{dedupe}".encode()).hexdigest()


def lease_of(run: RunRow, token: str) -> Lease:
    """The lease under which the run is running."""
    return Lease(run_id=run.id, epoch=run.epoch, token=token, until=run.lease_until or 0)


def assignments(columns: Mapping[str, str]) -> str:
    """The assignments after SET, from the placeholder of each column."""
    return ", ".join(f"{column} = {place}" for column, place in columns.items())
