"""What a snapshot keeps of a run in addition to its steps, so that the run can go on exactly where it was.

It is the field `perdure` of the snapshot's metadata: when the run was created and with which seed, so that `ctx.now()` and
`ctx.uuid4()` return the same values again; what the journal holds of each entry beyond its result; and what is open. Results are
not repeated here, and the snapshot's steps take precedence: a journal line whose step was removed is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from perdure.codec import Codec
from perdure.codec.outcomes import BODY
from perdure.codec.structure import check_structure
from perdure.errors import COMPENSATION_PREFIX, SnapshotFormatError
from perdure.model.durations import MAX_INSTANT
from perdure.model.ids import check_id
from perdure.model.journal import Entry, Kind
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from perdure.model.records import MAX_VERSION, OWN_FIELD, Awaited, RunRow, Signal, Status
from perdure.snapshots.step_results import check_failure

Instant: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANT)]
# A seed is the key of a BLAKE2b hash, which has at most 64 bytes.
Seed: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]

# More often than any step is undone. A snapshot that comes from elsewhere must not make a long journal.
MAX_UNDONE: Final = 1_000

_codec: Final = Codec()


class JournalLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry of the journal without its result; `payload` is what an open entry remembers."""

    key: str
    phase: Literal["open", "close", "cancel"]
    kind: Kind
    name: str
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    started_at: Instant
    ended_at: Instant
    args_hash: Digest | None = None
    payload: Any = None

    @classmethod
    def of(cls, entry: Entry) -> JournalLine:
        """The line of an entry in force."""
        return cls(
            entry.key,
            "close" if entry.phase == "drop" else entry.phase,
            entry.kind,
            entry.name,
            entry.attempt,
            entry.started_at,
            entry.ended_at,
            entry.args_hash,
            msgspec.json.decode(entry.payload) if entry.phase == "open" else None,
        )

    @property
    def is_compensated_intent(self) -> bool:
        """Whether it is the intent of a step that has a compensation."""
        return (
            self.phase == "open" and self.kind == "step" and isinstance(self.payload, dict) and "is_compensated" in self.payload
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the entry that this line has."""
        return {name: getattr(self, name) for name in ("kind", "name", "attempt", "started_at", "ended_at", "args_hash")}


class InboxLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signal that waits to be consumed."""

    kind: Literal["signal", "child"]
    name: str
    payload: msgspec.Raw
    dedupe: str | None = None


class RunMetadata(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A run without its steps."""

    seed: Seed
    created_at: Instant
    workflow: str = ""
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] = 1
    input_hash: Digest = b""
    generation: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    first_input_hash: Digest | None = None
    continued_at: Instant | None = None
    # How often each step was undone and done again.
    undone: dict[str, Annotated[int, msgspec.Meta(ge=1, le=MAX_UNDONE)]] = {}
    # By seq, as text: JSON has no other keys.
    journal: dict[str, JournalLine] = {}
    # The rest is set only in a snapshot from which nothing was left out: then the run can be restored as it was.
    status: Status | None = None
    wake_at: Instant | None = None
    waiting_for: tuple[Awaited, ...] = ()
    outcome: Any = msgspec.UNSET
    inbox: list[InboxLine] = []
    cancel_requested: bool = False

    @classmethod
    def of(cls, row: RunRow, entries: Iterable[Entry], undone: dict[str, int]) -> RunMetadata:
        """The metadata of a snapshot that holds only these entries."""
        journal = {str(entry.seq): JournalLine.of(entry) for entry in entries}
        return cls(
            seed=row.seed,
            created_at=row.created_at,
            workflow=row.workflow,
            version=row.version,
            input_hash=row.input_hash,
            generation=row.generation,
            first_input_hash=row.first_input_hash,
            continued_at=row.continued_at,
            undone=undone,
            journal=journal,
        )

    def without(self, left_out: Collection[str], undone: Collection[str]) -> RunMetadata:
        """Return the metadata without what a retry sets aside: the lines of these keys, and time limits that have not passed.

        A step that may have done something, and was not undone, keeps its intent, with the key that it was called with. Of the
        keys in `undone`, each that is no compensation was undone once more.
        """
        limits = {line.key for line in self.journal.values() if line.kind in ("timeout", "timer")}
        limits -= {line.key for line in self.journal.values() if line.phase != "open"}
        again = (key for key in undone if not key.startswith(COMPENSATION_PREFIX))
        gone = limits | set(left_out)
        return msgspec.structs.replace(
            self,
            journal={
                seq: line
                for seq, line in self.journal.items()
                if line.key not in gone or (line.is_compensated_intent and line.key not in undone)
            },
            undone=dict(Counter(self.undone) + Counter(again)),
        )

    def with_state(self, row: RunRow, inbox: Iterable[Signal]) -> RunMetadata:
        """The same, with the state of the run, for a snapshot from which nothing was left out."""
        return msgspec.structs.replace(
            self,
            status=row.status,
            wake_at=row.wake_at,
            waiting_for=row.waiting_for,
            cancel_requested=row.cancel_requested and not row.ended,
            outcome=msgspec.UNSET if row.outcome is None else msgspec.json.decode(row.outcome),
            inbox=[
                InboxLine(one.kind, one.name, msgspec.Raw(one.payload), one.dedupe)
                for one in inbox
                if one.name != CANCEL_WITHOUT_UNDO  # it is about the run that was asked
            ],
        )

    def outcome_bytes(self) -> bytes | None:
        """The outcome as a store holds it, if the run has ended with one."""
        return None if self.outcome is msgspec.UNSET else msgspec.json.encode(self.outcome)

    def check(self) -> None:
        """Raise ValueError if a part of it cannot belong to any run."""
        for key in self.undone:
            check_id(key, "a key")
        for line in self.journal.values():
            check_id(line.key, "a key")
            if "\0" in line.name:
                raise ValueError(f"the name of {line.key!r} contains NUL")
        for awaited in self.waiting_for:
            check_id(awaited.name, "the name of a signal")
        for one in self.inbox:
            if check_id(one.name, "the name of a signal") == CANCEL_WITHOUT_UNDO:
                raise ValueError("a request to cancel another run")
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
        """This as plain JSON."""
        tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return tree


def read_run_metadata(metadata: Any) -> RunMetadata | None:
    """What perdure wrote into a snapshot's metadata, or None. `SnapshotFormatError` when it cannot be read."""
    tree = (metadata or {}).get(OWN_FIELD)
    if tree is None:
        return None
    try:
        run_metadata = msgspec.json.decode(msgspec.json.encode(tree), type=RunMetadata)
        run_metadata.check()
    except (ValueError, TypeError, RecursionError) as reason:
        why = f"cannot be read: {reason} (only perdure writes this field; give your metadata another name)"
        raise SnapshotFormatError([(f"$.metadata.{OWN_FIELD}", why)]) from None
    return run_metadata
