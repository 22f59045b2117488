"""A run in memory, and what one append to its log changes about it.

A verb works on a `RunState`, which collects what is new; `take_record` returns that as one `LogRecord`, to be written as one
frame. Reading a log back means applying its records in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Item, RunRow, Signal

_FIELDS: Final = RunRow.__struct_fields__


class LoggedSignal(msgspec.Struct, frozen=True, array_like=True):
    """An inbox row. `origin` names the end of a child whose outcome it is, so that a second delivery is noticed."""

    row: Signal
    origin: str | None = None


class LeaseState(msgspec.Struct, frozen=True, array_like=True):
    """What is not in the row: the token that may write, the journal's length at the last claim, whether to notify the parent."""

    token: str | None = None
    claimed_length: int = 0
    owes_parent: bool = False


class LogRecord(msgspec.Struct, omit_defaults=True):
    """The content of one frame. `whole` begins the run; `row` has the columns that changed."""

    whole: RunRow | None = None
    row: dict[str, Any] = {}
    lease: LeaseState | None = msgspec.field(default=None, name="lien")
    entries: list[Entry] = []
    inbox: list[LoggedSignal] = []
    consumed: list[tuple[int, str]] = []
    items: list[Item] = []

    @property
    def changes_only_row(self) -> bool:
        """Whether a later record can make this one superfluous."""
        return not (self.entries or self.inbox or self.consumed or self.items)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.whole or self.row or self.lease) and self.changes_only_row


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(LogRecord)


def encode_record(record: LogRecord) -> bytes:
    """The record as bytes."""
    return _encoder.encode(record)


def decode_record(payload: bytes) -> LogRecord:
    """The record that these bytes are. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(payload)


@dataclass(slots=True)
class RunState(InMemoryRun):
    """Everything of one run, and what of it is not in the log yet. `origins` has the seq of each child's outcome."""

    owes_parent: bool = False
    origins: dict[str, int] = field(default_factory=dict)
    _logged_row: RunRow | None = None
    _logged_lease: LeaseState = field(default_factory=LeaseState)
    _new: LogRecord = field(default_factory=LogRecord)

    @classmethod
    def create(cls, row: RunRow, entries: Iterable[Entry] = (), inbox: Iterable[Signal] = ()) -> RunState:
        """A run that has no log yet."""
        state = cls(row)
        for entry in entries:
            state.append(entry)
        for signal in inbox:
            state._add_signal(signal)
        return state

    @classmethod
    def read(cls, first: LogRecord) -> RunState:
        """The run that a log begins with."""
        if first.whole is None:
            raise ValueError("its first record does not begin a run")
        state = cls(first.whole, _logged_row=first.whole)
        state.apply(first)
        return state

    def apply(self, record: LogRecord) -> None:
        """Apply what a frame of the log says."""
        if record.row:
            self.row = _replace_columns(self.row, record.row)
        if record.lease is not None:
            lease = record.lease
            self.token, self.claimed_length, self.owes_parent = lease.token, lease.claimed_length, lease.owes_parent
        self.entries.update((entry.seq, entry) for entry in record.entries)
        self.items.update(((item.stream, item.n), item) for item in record.items)
        for logged in record.inbox:
            self._apply_signal(logged)
        for seq, token in record.consumed:
            self.inbox[seq] = msgspec.structs.replace(self.inbox[seq], consumed_by=token)
        self._logged_row, self._logged_lease = self.row, self._lease

    def take_record(self) -> LogRecord | None:
        """What has changed since the last call, or None when nothing has."""
        record, self._new = self._new, LogRecord()
        before, self._logged_row = self._logged_row, self.row
        if before is None:
            record, self._logged_lease = self.whole_record(), self._lease
        elif before is not self.row:
            record.row = _difference(before, self.row)
        if self._lease != self._logged_lease:
            record.lease = self._logged_lease = self._lease
        return None if record.is_empty else record

    def whole_record(self) -> LogRecord:
        """Everything of the run, as the first frame of a log."""
        origins = {seq: origin for origin, seq in self.origins.items()}
        return LogRecord(
            whole=self.row,
            lease=self._lease,
            entries=list(self.entries.values()),
            inbox=[LoggedSignal(row, origins.get(row.seq)) for row in self.inbox.values()],
            items=list(self.items.values()),
        )

    @property
    def is_new(self) -> bool:
        """Whether no log has it yet."""
        return self._logged_row is None

    def deliver_outcome(self, child: RunState, now: int) -> None:
        """Put the child's outcome into the inbox, once for each time that it ended."""
        row = child.row
        origin = f"{row.epoch} {row.id}"
        if origin not in self.origins:
            signal = Signal(seq=self.inbox_seq + 1, name=row.parent_key or "", payload=row.outcome or b"", kind="child")
            self._add_logged(LoggedSignal(signal, origin))
            self.wake_for(signal, now)

    def append(self, entry: Entry) -> None:
        """Add an entry whose seq is known to be free."""
        self.entries[entry.seq] = entry
        self._new.entries.append(entry)

    def clear_journal(self) -> None:
        """As the base, and all that is left goes into a new log: entries cannot be taken out of this one."""
        InMemoryRun.clear_journal(self)  # super() without arguments fails in a class with slots
        self._logged_row = None

    def _is_needed(self, row: Signal) -> bool:
        # By its row a child's outcome is recognised that is delivered again after a crash.
        return row.consumed_by is None or row.dedupe is not None or row.kind == "child"

    def _add_item(self, item: Item) -> None:
        self.items[item.stream, item.n] = item
        self._new.items.append(item)

    def _consume(self, seq: int, token: str) -> None:
        self.inbox[seq] = msgspec.structs.replace(self.inbox[seq], consumed_by=token)
        self._new.consumed.append((seq, token))

    def _add_signal(self, signal: Signal) -> None:
        self._add_logged(LoggedSignal(signal))

    def _add_logged(self, logged: LoggedSignal) -> None:
        self._apply_signal(logged)
        self._new.inbox.append(logged)

    def _apply_signal(self, logged: LoggedSignal) -> None:
        self.inbox[logged.row.seq] = logged.row
        if logged.origin is not None:
            self.origins[logged.origin] = logged.row.seq

    @property
    def _lease(self) -> LeaseState:
        return LeaseState(self.token, self.claimed_length, self.owes_parent)


def _difference(before: RunRow, after: RunRow) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(after, name)) != getattr(before, name)}


def _replace_columns(row: RunRow, columns: dict[str, Any]) -> RunRow:
    if "waiting_for" in columns:
        columns = {**columns, "waiting_for": msgspec.convert(columns["waiting_for"], tuple[Awaited, ...])}
    return msgspec.structs.replace(row, **columns)
