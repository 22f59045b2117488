"""The contract's values as they are stored, and back.

A run's columns are text or bytes under their own names; a column that is None is absent. An entry begins with the numbers that
a script may have to write by itself (`seq:epoch:started_at:ended_at:`), an inbox row with the lengths of its parts; the rest is
opaque to scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from perdure.backends.base.damaged_runs import UNREADABLE, check_entry, check_row, problem_of
from perdure.model.journal import Entry, Kind, Phase
from perdure.model.records import Awaited, Claim, Item, Lease, NewRun, QueueLimits, RunRow, Schedule, Signal, WorkerRow
from perdure.model.run_filter import RunFilter

# An argument of a script.
Arg: TypeAlias = str | bytes | int

_BYTES: Final = frozenset({"input", "input_hash", "first_input_hash", "seed", "metadata", "running_steps", "progress", "outcome"})
_NUMBERS: Final = frozenset({
    "version", "generation", "continued_at", "priority", "start_at", "deadline", "wake_at", "epoch", "lease_until", "attempts",
    "problem_at", "problem_count", "created_at", "updated_at",
})  # fmt: skip
_BOOLEANS: Final = frozenset({"held", "cancel_requested", "parent_notified"})
# Digits of an item's number, as in prelude.lua.
_N_DIGITS: Final = 20


class _EntryRest(msgspec.Struct, frozen=True, array_like=True):
    """The part of an entry that scripts do not read."""

    key: str
    phase: Phase
    kind: Kind
    name: str
    ok: bool
    payload: bytes
    attempt: int
    args_hash: bytes | None


class _ScheduleRest(msgspec.Struct, frozen=True, array_like=True):
    """The part of a schedule that scripts do not read."""

    workflow: str
    spec: str
    input: bytes
    metadata: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_entry_rest: Final = msgspec.msgpack.Decoder(_EntryRest)
_schedule_rest: Final = msgspec.msgpack.Decoder(_ScheduleRest)


def worker_from(worker_id: bytes, data: bytes) -> WorkerRow:
    """The worker as put_worker.lua stores it."""
    seen_at, _, info = data.partition(b":")
    return WorkerRow(id=worker_id.decode(), seen_at=int(seen_at), info=info)


def as_list(values: Sequence[Arg]) -> list[Arg]:
    """The values after their number, as `take_list` in prelude.lua reads a list."""
    return [len(values), *values]


def as_lists(lists: Iterable[Sequence[Arg]]) -> list[Arg]:
    """Several lists, one after the other."""
    return [part for one in lists for part in as_list(one)]


def optional(value: Arg | None) -> Arg:
    """The value, or the empty text that stands for None."""
    return "" if value is None else value


def pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The names and values of a hash, which Redis gives as one flat list."""
    values = iter(flat)
    return zip(values, values, strict=True)


def _frame(texts: Iterable[str]) -> bytes:
    return b"".join(b"%d:%b" % (len(text), text) for text in map(str.encode, texts))


def _unframe(data: bytes) -> list[str]:
    texts: list[str] = []
    while data:
        length, _, data = data.partition(b":")
        texts.append(data[: int(length)].decode())
        data = data[int(length) :]
    return texts


def awaited_bytes(waiting_for: Iterable[Awaited]) -> bytes:
    """What a run waits for, as it is stored."""
    return _frame(text for awaited in waiting_for for text in (awaited.kind, awaited.name))


def _awaited_from(data: bytes) -> tuple[Awaited, ...]:
    texts = iter(_unframe(data))
    return tuple(Awaited(kind, name) for kind, name in zip(texts, texts, strict=True))  # type: ignore[arg-type]  # as written


def columns_of(run: NewRun) -> list[Arg]:
    """The columns that are neither None nor false, each after its name."""
    columns: list[Arg] = []
    for name, value in msgspec.structs.asdict(run).items():
        stored = awaited_bytes(value) if name == "waiting_for" else 1 if value is True else value
        if stored is not None and stored is not False and not (name == "waiting_for" and not stored):
            columns += [name, stored]
    return columns


def run_from(flat: Sequence[bytes]) -> RunRow | None:
    """The run that is stored in these columns, or None when there are no columns. Raises `SnapshotCorrupt`."""
    stored = dict(pairs(flat))
    if not stored:
        return None
    columns: dict[str, Any] = {"wake_at": None}
    name = "id"
    try:
        for name in RunRow.__struct_fields__:
            if (value := stored.get(name.encode())) is not None:
                columns[name] = column_from(name, value)
        return check_row(RunRow(**columns))
    except UNREADABLE as reason:
        what = "the row" if name in columns else f"the column {name}"
        raise problem_of(stored.get(b"id", b"?").decode(errors="replace"), what, reason) from reason


def column_from(name: str, value: bytes) -> Any:
    """The value of a column that is not absent. Raises one of `UNREADABLE`."""
    if name in _BYTES:
        return value
    if name in _NUMBERS:
        return int(value)
    if name in _BOOLEANS:
        return value == b"1"
    return _awaited_from(value) if name == "waiting_for" else value.decode()


def filter_args(wanted: RunFilter) -> list[Arg]:
    """The arguments that `take_filter` in prelude.lua reads."""
    return [
        wanted.prefix,
        *as_list(wanted.status or ()),
        int(wanted.workflow is not None),
        optional(wanted.workflow),
        optional(wanted.queue),
        optional(wanted.updated_after),
        optional(wanted.updated_before),
        optional(wanted.metadata_text),
    ]


def entry_rest(entry: Entry) -> bytes:
    """An entry without the numbers that a script may have to write."""
    rest = _EntryRest(entry.key, entry.phase, entry.kind, entry.name, entry.ok, entry.payload, entry.attempt, entry.args_hash)
    return _encode(rest)


def entries_of(entries: Iterable[Entry]) -> list[Arg]:
    """The entries as they are stored, each after its seq."""
    stored: list[Arg] = []
    for entry in entries:
        head = b"%d:%d:%d:%d:" % (entry.seq, entry.epoch, entry.started_at, entry.ended_at)
        stored += [entry.seq, head + entry_rest(entry)]
    return stored


def entry_from(stored: bytes) -> Entry:
    """The entry of these stored bytes. Raises one of `UNREADABLE`."""
    seq, epoch, started_at, ended_at, data = stored.split(b":", 4)
    rest = _entry_rest.decode(data)
    entry = Entry(
        seq=int(seq),
        key=rest.key,
        phase=rest.phase,
        kind=rest.kind,
        name=rest.name,
        ok=rest.ok,
        payload=rest.payload,
        attempt=rest.attempt,
        args_hash=rest.args_hash,
        started_at=int(started_at),
        ended_at=int(ended_at),
        epoch=int(epoch),
    )
    return check_entry(entry)


def inbox_of(rows: Iterable[Signal]) -> list[Arg]:
    """Unconsumed inbox rows as they are stored, each after its seq."""
    stored: list[Arg] = []
    for row in rows:
        name, dedupe = row.name.encode(), None if row.dedupe is None else row.dedupe.encode()
        head = b"%d:%b:%d:%d:" % (row.seq, row.kind.encode(), len(name), -1 if dedupe is None else len(dedupe))
        stored += [row.seq, head + name + (dedupe or b"") + row.payload]
    return stored


def dedupes_of(rows: Iterable[Signal]) -> list[Arg]:
    """The seq of each name and dedupe, after both."""
    return [part for row in rows if row.dedupe is not None for part in (_frame((row.name, row.dedupe)), row.seq)]


def signal_from(stored: bytes) -> Signal:
    """The inbox row of these stored bytes. Raises one of `UNREADABLE`."""
    seq, kind, length, dedupe_length, data = stored.split(b":", 4)
    end = int(length)
    until = end + max(0, int(dedupe_length))
    return Signal(
        seq=int(seq),
        name=data[:end].decode(),
        payload=data[until:],
        kind="child" if kind == b"child" else "signal",
        dedupe=data[end:until].decode() if int(dedupe_length) >= 0 else None,
    )


def items_of(items: Iterable[Item]) -> list[Arg]:
    """The items, each as stream, number and payload."""
    return [part for item in items for part in (item.stream, item.n, item.payload)]


def item_from(stream: str, stored: bytes) -> Item:
    """The item of these stored bytes, which do not name its stream."""
    return Item(stream=stream, n=int(stored[:_N_DIGITS]), payload=stored[_N_DIGITS:])


def claim_from(reply: Sequence[Any]) -> Claim:
    """The claim on a run that a script has leased and replied whole. Raises `SnapshotCorrupt`."""
    flat, steps, inbox, streams = reply
    run = run_from(flat)
    hidden = dict(pairs(flat))
    if run is None or run.lease_until is None:
        raise ValueError("a leased run has no lease")
    try:
        return Claim(
            lease=lease_from(flat),
            run=run,
            journal=[entry_from(stored) for stored in steps],
            inbox=[signal_from(stored) for stored in inbox],
            inbox_seq=int(hidden.get(b"inbox_seq", b"0")),
            item_counts={name.decode(): int(length) for name, length in pairs(streams)},
        )
    except UNREADABLE as reason:
        raise problem_of(run.id, "the journal or the inbox", reason) from reason


def is_leased_with(token: str, flat: Sequence[bytes]) -> bool:
    """Whether the run with these columns has the lease of this token. A repeated `create` may find the lease of another call."""
    return dict(pairs(flat)).get(b"token") == token.encode()


def lease_from(flat: Sequence[bytes]) -> Lease:
    """The lease that a script has given on the run with these columns; the script has just written them."""
    stored = dict(pairs(flat))
    run_id, token = stored[b"id"].decode(), stored[b"token"].decode()
    return Lease(run_id=run_id, epoch=int(stored[b"epoch"]), token=token, until=int(stored[b"lease_until"]))


def schedule_bytes(schedule: Schedule) -> bytes:
    """The schedule as it is stored."""
    rest = _ScheduleRest(schedule.workflow, schedule.spec, schedule.input, schedule.metadata)
    return str(optional(schedule.next_at)).encode() + b":" + _encode(rest)


def schedule_from(schedule_id: bytes, stored: bytes) -> Schedule:
    """The schedule of these stored bytes."""
    next_at, _, data = stored.partition(b":")
    rest = _schedule_rest.decode(data)
    return Schedule(
        id=schedule_id.decode(),
        workflow=rest.workflow,
        spec=rest.spec,
        input=rest.input,
        next_at=int(next_at) if next_at else None,
        metadata=rest.metadata,
    )


def limits_text(limits: QueueLimits) -> str:
    """The limits as they are stored, or the empty text for none."""
    numbers = (limits.concurrency, limits.per_key, limits.interval)
    return ":".join(str(optional(number)) for number in numbers) if limits.is_limited else ""


def limits_from(stored: bytes) -> QueueLimits:
    """The limits of this stored text."""
    concurrency, per_key, interval = (int(number) if number else None for number in stored.split(b":"))
    return QueueLimits(concurrency=concurrency, per_key=per_key, interval=interval)
