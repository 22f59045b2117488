"""A run whose stored data cannot be read: its problem, and no other run's.

Bits flip, operators write by hand, and a journal can be too large for this machine. The rule is the same in every store. A verb
for one run raises `SnapshotCorrupt`. `claim` gives the other runs, and sets the damaged one aside: pending, without a lease, with
the problem in its row and its attempt not counted, due again after `DAMAGED_PAUSE`, so that it goes on once it is mended. `list`
shows it with its problem. What was stored stays as it is: only the columns that say when a run is due are written. Where even
the problem cannot be stored with the run, it is passed over. Each problem is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from perdure.backends.base.leases import Release, length_in_microseconds
from perdure.codec.outcomes import error_line
from perdure.errors import SnapshotCorrupt
from perdure.model.durations import MAX_INSTANT, moment
from perdure.model.journal import Entry, Kind, Phase
from perdure.model.records import STATUSES, Awaited, Lease, RunInfo, RunRow, Signal, Status, misfit_pause, problem_text

# What decoding stored data raises when they are damaged, or too large for the memory.
UNREADABLE: Final = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError,
    msgspec.MsgspecError, SnapshotCorrupt,
)  # fmt: skip


class UnreadableText(ValueError):
    """The database gave text that is not UTF-8, and its driver refuses it."""


# What reading from a database raises because of its data, and not because the database or its client fails.
FETCH_FAILURES: Final = (UnreadableText, UnicodeDecodeError, MemoryError)
# Seconds until a damaged run is tried again, unless a signal or `unhold` makes it due.
DAMAGED_PAUSE: Final = misfit_pause(100)
# Beyond this an instant or a count is damage: it is the year 148,000, and leaves room for adding to it in 64 bits.
_LIMIT: Final = 1 << 62
_LOGGED: Final = 10_000

log: Final = logging.getLogger("perdure")
_logged: Final[set[str]] = set()


class DamagedRun(NamedTuple):
    """A leased run whose data cannot be read."""

    lease: Lease
    problem: SnapshotCorrupt


def problem_of(run_id: str, what: str, reason: BaseException) -> SnapshotCorrupt:
    """The problem of a run of which `what` cannot be read."""
    if isinstance(reason, SnapshotCorrupt):
        return reason
    text = str(reason)
    return SnapshotCorrupt(run_id, what, f"{type(reason).__name__}: {text}" if text else type(reason).__name__)


@contextmanager
def raise_damage(run_id: str, what: str, errors: tuple[type[BaseException], ...] = UNREADABLE) -> Iterator[None]:
    """Raise `SnapshotCorrupt` for what cannot be read of this run inside the context.

    A context in which a user's client is called takes `FETCH_FAILURES`: an error of the client is no damage.
    """
    try:
        yield
    except errors as reason:
        raise problem_of(run_id, what, reason) from reason


def report(problem: SnapshotCorrupt) -> None:
    """Log the problem, once in this process."""
    log_once(f"a run is set aside: {problem_text(problem)}")


def log_once(text: str) -> None:
    """Log this error, unless it was logged before."""
    if text in _logged:
        return
    if len(_logged) >= _LOGGED:
        _logged.clear()
    _logged.add(text)
    log.error("%s", text)


def set_aside(problem: SnapshotCorrupt, at: int) -> Release:
    """How a run with this problem is given back at this instant. Logs the problem."""
    report(problem)
    return Release(wake_at=due_again(at), problem=problem_text(problem))


def due_again(at: int) -> int:
    """When a run that is set aside at this instant is tried again."""
    return at + length_in_microseconds(DAMAGED_PAUSE)


def _types(struct: type[msgspec.Struct]) -> dict[str, frozenset[type]]:
    """The types that each field of a struct may have."""
    return {name: frozenset(_types_of(hint)) for name, hint in get_type_hints(struct).items()}


def _types_of(hint: Any) -> Iterable[type]:
    if hint in (int, str, bytes, bool, type(None)):
        return (hint,)
    if get_origin(hint) is tuple:
        return (tuple,)
    return (str,) if get_origin(hint) is Literal else (one for arg in get_args(hint) for one in _types_of(arg))


_ROW_TYPES: Final = _types(RunRow)
_COUNTS: Final = frozenset({"epoch", "attempts", "problem_count", "version", "generation"})
_PHASES: Final = frozenset(get_args(Phase))
_KINDS: Final = frozenset(get_args(Kind))


def check_row(row: RunRow) -> RunRow:
    """The row, if every column has a value of its type. Raises ValueError."""
    check_columns({name: getattr(row, name) for name in _ROW_TYPES})
    return row


def check_columns(columns: Mapping[str, Any]) -> None:
    """Raise ValueError unless each of these columns of a run has a value of its type."""
    for name, value in columns.items():
        if type(value) not in _ROW_TYPES[name]:
            raise ValueError(f"{name} is of type {type(value).__name__}")
        if name == "status" and value not in STATUSES:
            raise ValueError(f"status is {value!r:.100}")
        if type(value) is int and (not -_LIMIT < value < _LIMIT or (value < 0 and name in _COUNTS)):
            raise ValueError(f"{name} is {value}")


def check_entry(entry: Entry) -> Entry:
    """The entry, if every field has a value of its type. Raises ValueError. Kept flat: a replay reads thousands of them."""
    if (
        type(entry.seq) is int
        and type(entry.key) is str
        and entry.phase in _PHASES
        and entry.kind in _KINDS
        and type(entry.name) is str
        and type(entry.payload) is bytes
        and type(entry.attempt) is int
        and (entry.args_hash is None or type(entry.args_hash) is bytes)
        and type(entry.started_at) is int
        and -_LIMIT < entry.started_at < _LIMIT
        and type(entry.ended_at) is int
        and -_LIMIT < entry.ended_at < _LIMIT
        and type(entry.epoch) is int
    ):
        return entry
    raise ValueError(f"entry {entry.seq!r:.50} is damaged: {msgspec.structs.replace(entry, payload=b'')!r:.400}")


def check_signal(signal: Signal) -> Signal:
    """The inbox row, if every field has a value of its type. Raises ValueError."""
    if (
        type(signal.seq) is int
        and type(signal.name) is str
        and type(signal.payload) is bytes
        and signal.kind in ("signal", "child")
        and (signal.dedupe is None or type(signal.dedupe) is str)
    ):
        return signal
    raise ValueError(f"signal {signal.seq!r:.50} is damaged: {msgspec.structs.replace(signal, payload=b'')!r:.400}")


class _LineColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that a line is made of."""

    id: str
    workflow: str
    version: int
    generation: int
    status: Status
    created_at: int
    updated_at: int
    queue: str
    priority: int
    waiting_for: tuple[Awaited, ...]
    wake_at: int | None
    attempts: int
    problem: str | None
    metadata: bytes


LINE_FIELDS: Final = _LineColumns.__struct_fields__


def line_from(run_id: str, columns: Mapping[str, Any], outcome: bytes | None) -> RunInfo:
    """The line of a run with these columns (`LINE_FIELDS`) and this beginning of its outcome; of a damaged one, its problem."""
    try:
        run = _LineColumns(id=run_id, **{name: columns[name] for name in LINE_FIELDS if name != "id"})
        check_columns(msgspec.structs.asdict(run))
        return RunInfo.of(run, error_line(run.status, outcome))
    except UNREADABLE as reason:
        return damaged_line(run_id, columns, reason)


def damaged_line(run_id: str, columns: Mapping[str, Any], reason: BaseException) -> RunInfo:
    """The line of a run whose row cannot be read: what can be, and its problem. Logs the problem."""
    problem = problem_of(run_id, "the row", reason)
    report(problem)
    created_at, updated_at = (_readable_instant(columns.get(name)) for name in ("created_at", "updated_at"))
    workflow, version, status, queue = (columns.get(name) for name in ("workflow", "version", "status", "queue"))
    return RunInfo(
        id=run_id,
        workflow=workflow if isinstance(workflow, str) else "",
        version=version if type(version) is int else 0,
        status=status if status in STATUSES else "pending",
        created_at=created_at,
        updated_at=updated_at,
        queue=queue if isinstance(queue, str) else "",
        problem=problem_text(problem),
    )


def _readable_instant(at: object) -> datetime:
    return moment(at if type(at) is int and 0 <= at <= MAX_INSTANT else 0)
