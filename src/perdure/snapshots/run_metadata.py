"""What a snapshot keeps of a run besides its steps, so that the run can go on exactly where it stood.

It stands in the snapshot's metadata under `perdure`: when the run was begun and with which seed, so that `ctx.now()` and
`ctx.uuid4()` give the same again; what the journal says about each entry beyond its result; and what is open. Steps are not
repeated here, and what the snapshot says about a step wins: a line whose step is gone counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from perdure.codec import Codec
from perdure.codec.outcomes import BODY
from perdure.codec.structure import check_structure
from perdure.errors import SnapshotFormatError
from perdure.model.durations import MAX_INSTANT
from perdure.model.ids import check_id
from perdure.model.journal import Entry, Kind
from perdure.model.records import Awaited, RunRow, Signal, Status
from perdure.snapshots.parts import OURS
from perdure.snapshots.to_journal import check_failure

Instant: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANT)]
# A seed is the key of a hash, which can be no longer.
Seed: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]

_codec: Final = Codec()


class Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry of the journal without its result; `payload` is what an open entry remembers."""

    key: str
    phase: Literal["open", "close"]
    kind: Kind
    name: str
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    started_at: Instant
    ended_at: Instant
    args_hash: Digest | None = None
    payload: Any = None

    @classmethod
    def of(cls, entry: Entry) -> Line:
        """What there is to say about an entry in force."""
        return cls(
            entry.key,
            "open" if entry.phase == "open" else "close",
            entry.kind,
            entry.name,
            entry.attempt,
            entry.started_at,
            entry.ended_at,
            entry.args_hash,
            msgspec.json.decode(entry.payload) if entry.phase == "open" else None,
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the entry that this tells."""
        return {name: getattr(self, name) for name in ("kind", "name", "attempt", "started_at", "ended_at", "args_hash")}


class InboxLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signal that waits to be consumed."""

    kind: Literal["signal", "child"]
    name: str
    payload: msgspec.Raw
    dedupe: str | None = None


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A run as it stood, without its steps."""

    seed: Seed
    created_at: Instant
    workflow: str = ""
    input_hash: Digest = b""
    # By seq, as text: JSON has no other keys.
    journal: dict[str, Line] = {}
    # The rest is only told when nothing was left out on purpose: then a run can be put back as it stood.
    status: Status | None = None
    wake_at: Instant | None = None
    waiting_for: tuple[Awaited, ...] = ()
    outcome: Any = msgspec.UNSET
    inbox: list[InboxLine] = []
    cancel_requested: bool = False

    @classmethod
    def of(cls, row: RunRow, entries: Iterable[Entry]) -> RunRecord:
        """What is known of a run of which only these entries are told."""
        journal = {str(entry.seq): Line.of(entry) for entry in entries}
        return cls(seed=row.seed, created_at=row.created_at, workflow=row.workflow, input_hash=row.input_hash, journal=journal)

    def whole(self, row: RunRow, inbox: Iterable[Signal]) -> RunRecord:
        """The same of a run of which everything is told."""
        return msgspec.structs.replace(
            self,
            status=row.status,
            wake_at=row.wake_at,
            waiting_for=row.waiting_for,
            cancel_requested=row.cancel_requested and not row.ended,
            outcome=msgspec.UNSET if row.outcome is None else msgspec.json.decode(row.outcome),
            inbox=[InboxLine(one.kind, one.name, msgspec.Raw(one.payload), one.dedupe) for one in inbox],
        )

    def outcome_bytes(self) -> bytes | None:
        """The outcome as it is stored, if the run has ended with one."""
        return None if self.outcome is msgspec.UNSET else msgspec.json.encode(self.outcome)

    def check(self) -> None:
        """Raise ValueError if something is in it that no run has."""
        for line in self.journal.values():
            check_id(line.key, "a key")
            if "\0" in line.name:
                raise ValueError(f"the name of {line.key!r} contains NUL")
        for awaited in self.waiting_for:
            check_id(awaited.name, "the name of a signal")
        for one in self.inbox:
            check_id(one.name, "the name of a signal")
            check_structure(_codec, bytes(one.payload))
        self._check_repeats()
        outcome = self.outcome_bytes()
        if outcome is not None and self.status in ("failed", "dead"):
            check_failure(outcome, BODY)
        elif outcome is not None:
            check_structure(_codec, outcome)

    def _check_repeats(self) -> None:
        sent = [(one.kind, one.name, one.dedupe) for one in self.inbox if one.dedupe is not None]
        if len(set(sent)) < len(sent) or any(kind == "child" for kind, _, _ in sent):
            raise ValueError("a signal is in the inbox twice")

    def tree(self) -> dict[str, Any]:
        """The record as plain JSON."""
        tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return tree


def record_in(metadata: Any) -> RunRecord | None:
    """The record in a snapshot's metadata, or None. `SnapshotFormatError` when it cannot be read."""
    told = (metadata or {}).get(OURS)
    if told is None:
        return None
    try:
        record = msgspec.json.decode(msgspec.json.encode(told), type=RunRecord)
        record.check()
    except (ValueError, TypeError, RecursionError) as reason:
        raise SnapshotFormatError([(f"$.metadata.{OURS}", f"cannot be read: {reason}")]) from None
    return record
