"""The journal: what a run has recorded, as an append-only list of entries.

An entry opens something that may outlive the process (a wait's deadline, a child's id, a retry's next try, an intent to run at
most once), closes it with its outcome, says that the body cancelled it, or drops earlier entries, so that a failed run can go on.
Entries are matched by key, never by position; `seq` only says in which order their results reached the body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.errors import COMPENSATION_PREFIX
from perdure.model.own_names import compensation_key

Phase: TypeAlias = Literal["open", "close", "cancel", "drop"]
# What a key stands for. Asking for a recorded key as another kind raises StepChanged.
# `cancel` is the one entry that says where the run was cancelled, or its deadline passed: its payload is that deadline or null.
# `foreign` came from a snapshot of another library: its payload is the whole step as that library wrote it, and it fits any kind.
Kind: TypeAlias = Literal["step", "sleep", "signal", "timeout", "race", "patch", "approval", "child", "run", "cancel", "foreign"]


def name_kind(kind: Kind) -> str:
    """The kind with its article, for messages."""
    return f"{'an' if kind == 'approval' else 'a'} {kind}"


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of the journal. `payload` is encoded by the codec: a value, an error, or the state of an open entry."""

    seq: int
    key: str
    phase: Phase = "close"
    kind: Kind = "step"
    name: str = ""
    ok: bool = True
    payload: bytes = b"null"
    attempt: int = 1
    args_hash: bytes | None = None
    started_at: int = 0
    ended_at: int = 0
    epoch: int = 0


class OpenWait(msgspec.Struct, frozen=True):
    """The payload of the open entry of a wait."""

    deadline: int | None


class OpenChild(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of the open entry of a child: its id, and whether the parent leaves it alone.

    `ended_epoch` is the epoch at which the child had ended when a retry of its parent started it again: while the child still has
    that epoch, it has to be reopened.
    """

    id: str
    detached: bool = False
    ended_epoch: int | None = None


class Intent(msgspec.Struct, frozen=True, omit_defaults=True, tag="intent"):
    """The payload of the entry that a step records before its function is called, if it has a compensation or runs at most once.

    `idempotency_key` is the one that the function gets. `is_compensated` says that the step has a compensation. `belongs_to` is
    the id of the run that executed the step if that is another run: a fork copies steps of its original.
    """

    idempotency_key: str
    is_compensated: bool = False
    belongs_to: str | None = None


class NextTry(msgspec.Struct, frozen=True, tag="retry"):
    """The payload of the open entry of a retried step."""

    at: int
    error: msgspec.Raw


# The payload of an open entry of a step.
StepOpening: TypeAlias = Intent | NextTry


def undone_keys(recorded: Iterable[str], succeeded: Collection[str]) -> set[str]:
    """The compensations among what is recorded, and the steps whose compensation succeeded.

    A step whose compensation failed is not undone.
    """
    keys = set(recorded)
    compensations = {key for key in keys if key.startswith(COMPENSATION_PREFIX)}
    undone = compensations.intersection(succeeded)
    return compensations | {key for key in keys if compensation_key(key) in undone} if compensations else set()


def drop_entry(seq: int, keys: Iterable[str], at: int, epoch: int) -> Entry:
    """An entry that drops everything recorded so far under `keys`; the dropped rows stay as history."""
    payload = msgspec.json.encode(sorted(keys))
    return Entry(seq=seq, key="", phase="drop", kind="run", payload=payload, started_at=at, ended_at=at, epoch=epoch)


def entries_in_force(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that still apply, by `seq`: without drop entries and what they dropped. Raises ValueError."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=attrgetter("seq")):
        if entry.phase == "drop":
            dropped = frozenset(msgspec.json.decode(entry.payload, type=list[str]))
            kept = [earlier for earlier in kept if earlier.key not in dropped]
        else:
            kept.append(entry)
    return kept


class JournalIndex(NamedTuple):
    """A journal by use: results in the order in which the body got them, and the rest by key."""

    closes: list[Entry]
    # The closes of races again: a race must know from the start which of its branches to wait for.
    winners: dict[str, Entry]
    # All open entries of each key, in order: a wait that was cancelled and called again has more than one.
    opened: dict[str, list[Entry]]
    kinds: dict[str, Kind]
    # How many calls of each key the body cancelled before they had a result.
    cancelled: dict[str, int]
    # The results that unchanged code asks for again, by key: first those before any step that something outside the journal
    # cancelled, then, for each such step, those that came after it, which are owed once a replay has cancelled it too.
    owed: dict[str, Entry]
    owed_after: list[tuple[str, dict[str, Entry]]]

    @classmethod
    def of(cls, entries: Collection[Entry], *, owes_imported: bool = False) -> JournalIndex:
        """Index the entries in force among these. Raises ValueError when a drop entry cannot be read.

        `owes_imported` says that results which came from a snapshot are owed like those that this run recorded.
        """
        kept = entries_in_force(entries)
        return cls(
            closes=[entry for entry in kept if entry.phase == "close"],
            winners={entry.key: entry for entry in kept if entry.phase == "close" and entry.kind == "race"},
            opened=_by_key(entry for entry in kept if entry.phase == "open"),
            kinds={entry.key: entry.kind for entry in kept},
            cancelled=Counter(entry.key for entry in kept if entry.phase == "cancel"),
            **_owed(entries, kept, owes_imported=owes_imported),
        )


def _owed(entries: Iterable[Entry], kept: list[Entry], *, owes_imported: bool) -> dict[str, Any]:
    """Compute `owed` and `owed_after`.

    What came after a failure that `retry` set aside is never owed, since the body goes another way without that failure. What was
    imported from a snapshot, which may lack steps and have others, is owed only if the program asks for that.
    """
    windows: list[tuple[int, int]] = []
    for drop in entries:
        if drop.phase == "drop":
            dropped = frozenset(msgspec.json.decode(drop.payload, type=list[str]))
            first = min((entry.seq for entry in entries if entry.key in dropped and entry.seq < drop.seq), default=drop.seq)
            windows.append((first, drop.seq))
    owed: dict[str, Entry] = {}
    after: list[tuple[str, dict[str, Entry]]] = []
    segment = owed
    for entry in kept:
        if entry.phase == "cancel" and not entry.ok:
            segment = {}
            after.append((entry.key, segment))
        elif entry.phase == "close" and entry.kind != "cancel" and (owes_imported or (entry.epoch and entry.kind != "foreign")):
            if windows and _is_within(entry, windows):
                continue
            segment[entry.key] = entry
    return {"owed": owed, "owed_after": after}


def _is_within(entry: Entry, windows: list[tuple[int, int]]) -> bool:
    return any(first < entry.seq < last for first, last in windows)


def _by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.key, []).append(entry)
    return grouped
