"""A run in memory, and what one append to its log changes about it.

A verb works on a `RunState`, which notes what is new; `taken_change` gives that as one `Change`, to be written as one frame.
Reading a log back means applying its changes in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Item, Lease, RunRow, Signal

_FIELDS: Final = RunRow.__struct_fields__


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """An inbox row. `origin` names the child that told its end, and when, so that being told twice is noticed."""

    row: Signal
    origin: str | None = None


class Lien(msgspec.Struct, frozen=True, array_like=True):
    """What is not in the row: who may write, how long the journal was at the last claim, and whether the parent must be told."""

    token: str | None = None
    claimed_length: int = 0
    owes_parent: bool = False


class Change(msgspec.Struct, omit_defaults=True):
    """What one frame says. `whole` begins the run; `row` has the columns that became others."""

    whole: RunRow | None = None
    row: dict[str, Any] = {}
    lien: Lien | None = None
    entries: list[Entry] = []
    inbox: list[Arrival] = []
    consumed: list[tuple[int, str]] = []
    items: list[Item] = []


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Change)


def encoded(change: Change) -> bytes:
    """The change as bytes."""
    return _encoder.encode(change)


def decoded(payload: bytes) -> Change:
    """The change that these bytes are. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(payload)


@dataclass(slots=True)
class RunState(InMemoryRun):
    """Everything of one run, and what of it is not in the log yet."""

    owes_parent: bool = False
    origins: dict[str, int] = field(default_factory=dict)
    _logged_row: RunRow | None = None
    _logged_lien: Lien = field(default_factory=Lien)
    _new: Change = field(default_factory=Change)

    @classmethod
    def begun(cls, row: RunRow, entries: Iterable[Entry] = (), inbox: Iterable[Signal] = ()) -> RunState:
        """A run that is nowhere yet."""
        state = cls(row)
        for entry in entries:
            state._add_entry(entry)
        for signal in inbox:
            state._add_arrival(Arrival(signal))
        return state

    @classmethod
    def read(cls, first: Change) -> RunState:
        """The run that a log begins with."""
        if first.whole is None:
            raise ValueError("its first record does not begin a run")
        state = cls(first.whole, _logged_row=first.whole)
        state.apply(first)
        return state

    def apply(self, change: Change) -> None:
        """Have what a frame of the log says."""
        if change.row:
            self.row = _changed(self.row, change.row)
        if change.lien is not None:
            self.token, self.claimed_length, self.owes_parent = (
                change.lien.token,
                change.lien.claimed_length,
                change.lien.owes_parent,
            )
        self.entries.update((entry.seq, entry) for entry in change.entries)
        self.items.update(((item.stream, item.n), item) for item in change.items)
        for arrival in change.inbox:
            self._have_arrival(arrival)
        for seq, token in change.consumed:
            self.inbox[seq] = msgspec.structs.replace(self.inbox[seq], consumed_by=token)
        self._logged_row, self._logged_lien = self.row, self._lien

    def taken_change(self) -> Change | None:
        """What has changed since the last one was taken, or None when nothing has."""
        change, self._new = self._new, Change()
        before, self._logged_row = self._logged_row, self.row
        if before is None:
            change.whole = self.row
        elif before is not self.row:
            change.row = _difference(before, self.row)
        if self._lien != self._logged_lien:
            change.lien = self._logged_lien = self._lien
        is_empty = not (
            change.whole or change.row or change.lien or change.entries or change.inbox or change.consumed or change.items
        )
        return None if is_empty else change

    def whole_change(self) -> Change:
        """Everything of the run, as the first frame of a log."""
        origins = {seq: origin for origin, seq in self.origins.items()}
        return Change(
            whole=self.row,
            lien=self._lien,
            entries=list(self.entries.values()),
            inbox=[Arrival(row, origins.get(row.seq)) for row in self.inbox.values()],
            items=list(self.items.values()),
        )

    @property
    def is_new(self) -> bool:
        """Whether no log has it yet."""
        return self._logged_row is None

    def give_to(self, owner: str, ttl: float, now: int) -> Claim:
        """Lease the run to this process."""
        claim = self.give(ttl, now)
        self.change(lease_owner=owner)
        return msgspec.structs.replace(claim, run=self.row)

    def write(self, lease: Lease, entries: Iterable[Entry], consume: Iterable[int], items: Iterable[Item] = ()) -> None:
        """Everything or nothing; what is there already is left as it is."""
        consumed = [self._arrived(seq) for seq in consume]
        new_entries = self._missing(self.entries, ((entry.seq, entry) for entry in entries))
        new_items = self._missing(self.items, (((item.stream, item.n), item) for item in items))
        for entry in new_entries.values():
            self._add_entry(entry)
        for place, item in new_items.items():
            self.items[place] = item
            self._new.items.append(item)
        for signal in consumed:
            if signal.consumed_by != lease.token:
                self.inbox[signal.seq] = msgspec.structs.replace(signal, consumed_by=lease.token)
                self._new.consumed.append((signal.seq, lease.token))

    def put(
        self, name: str, payload: bytes, kind: Literal["signal", "child"] = "signal", dedupe: str | None = None, *, now: int
    ) -> int:
        """Append to the inbox and wake the run if it waits for just this."""
        signal = Signal(seq=self.inbox_seq + 1, name=name, payload=payload, kind=kind, dedupe=dedupe)
        self._add_arrival(Arrival(signal))
        self._wake_for(signal, now)
        return signal.seq

    def hear(self, child: RunState, now: int) -> None:
        """Have the child's outcome in the inbox, once for each of its ends."""
        row = child.row
        origin = f"{row.epoch} {row.id}"
        if origin not in self.origins:
            signal = Signal(seq=self.inbox_seq + 1, name=row.parent_key or "", payload=row.outcome or b"", kind="child")
            self._add_arrival(Arrival(signal, origin))
            self._wake_for(signal, now)

    def append(self, entry: Entry) -> None:
        """Add an entry whose place is known to be free."""
        self._add_entry(entry)

    def _wake_for(self, signal: Signal, now: int) -> None:
        if self.row.status == "suspended" and signal.address in self.row.waiting_for:
            self.wake(now)

    def _add_entry(self, entry: Entry) -> None:
        self.entries[entry.seq] = entry
        self._new.entries.append(entry)

    def _add_arrival(self, arrival: Arrival) -> None:
        self._have_arrival(arrival)
        self._new.inbox.append(arrival)

    def _have_arrival(self, arrival: Arrival) -> None:
        self.inbox[arrival.row.seq] = arrival.row
        if arrival.origin is not None:
            self.origins[arrival.origin] = arrival.row.seq

    def _missing(self, written: dict[Any, Any], new: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """What is not there yet, by its place, if no place is taken by something else."""
        placed: dict[Any, Any] = {}
        for place, value in new:
            if written.get(place, value) != value or placed.setdefault(place, value) != value:
                reason = f"something else is recorded at {place!r} already; nothing was written"
                raise PersistenceError(f"run {self.row.id!r}", reason)
        return {place: value for place, value in placed.items() if place not in written}

    @property
    def _lien(self) -> Lien:
        return Lien(self.token, self.claimed_length, self.owes_parent)


def _difference(before: RunRow, after: RunRow) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(after, name)) != getattr(before, name)}


def _changed(row: RunRow, columns: dict[str, Any]) -> RunRow:
    if "waiting_for" in columns:
        columns = {**columns, "waiting_for": msgspec.convert(columns["waiting_for"], tuple[Awaited, ...])}
    return msgspec.structs.replace(row, **columns)
