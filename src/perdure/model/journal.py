"""The journal: what a run has recorded, as an append-only list of entries.

An entry opens something that may outlive the process (a wait's deadline, a child's id, a retry's next try, an intent to run at
most once), closes it with its outcome, says that the body cancelled it, or drops earlier entries, so that a failed run can go on.
Entries are matched by key, never by position; `seq` only says in which order their results reached the body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import takewhile
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from perdure.errors import COMPENSATION_PREFIX
from perdure.model.own_names import compensation_key, undone_by

Phase: TypeAlias = Literal["open", "close", "cancel", "drop"]
# What a key stands for. Asking for a recorded key as another kind raises StepChanged.
# `race` is never recorded: its key is only used.
# `timer` is a sleep or a time limit of asyncio, named by its instant.
# `cancel` is the one entry that says where the run was cancelled, or its deadline passed.
# `foreign` came from a snapshot of another library: its payload is the whole step as that library wrote it, and it fits any kind.
Kind: TypeAlias = Literal[
    "step", "sleep", "signal", "timeout", "race", "patch", "approval", "child", "run", "cancel", "timer", "foreign"
]


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
    that epoch, it has to be reopened. `is_compensated` and `belongs_to` are as in `Intent`.
    """

    id: str
    detached: bool = False
    ended_epoch: int | None = None
    is_compensated: bool = False
    belongs_to: str | None = None


class Intent(msgspec.Struct, frozen=True, omit_defaults=True, tag="intent"):
    """The payload of the entry that a step records before its function is called, if it has a compensation or runs at most once.

    `idempotency_key` is the one that the function gets. `is_compensated` says that the step has a compensation. `belongs_to` is
    the id of the run that executed the step if that is another run: a fork copies steps of its original.
    """

    idempotency_key: str
    is_compensated: bool = False
    belongs_to: str | None = None


class CancelPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of the entry that says where a run was cancelled.

    `deadline` is set if the run was cancelled because that had passed. `undo` is False if nothing is to be compensated. `calls`
    is how many calls and timers the body had made: no call asks for this entry, so a replay could give it to the body too early.
    """

    deadline: int | None = None
    undo: bool = True
    calls: int = 0


class CancelRequest(msgspec.Struct, frozen=True):
    """The payload of the inbox row that asks to cancel a run and to undo nothing. A retry with a later epoch makes it void."""

    epoch: int


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
    names = undone_by(undone)
    return compensations | {key for key in keys if key in names or compensation_key(key) in undone} if compensations else set()


def read_intents(kept: Collection[Entry]) -> dict[str, Intent]:
    """Return the intents among these entries in force, by the keys of their steps. Raises ValueError if one cannot be read.

    Another run's intent counts if its step has a result. If it has none, the step was cancelled there, and is another one here.
    """
    intents: dict[str, Intent] = {}
    closed = {entry.key for entry in kept if entry.phase == "close"}
    for entry in kept:
        if entry.phase == "open" and entry.kind == "step":
            try:
                opened = msgspec.json.decode(entry.payload, type=StepOpening)
            except msgspec.MsgspecError as reason:
                raise ValueError(f"what step {entry.key!r} has begun: {reason}") from None
            if isinstance(opened, Intent) and (opened.belongs_to is None or entry.key in closed):
                intents[entry.key] = opened
    return intents


def count_undone(entries: Iterable[Entry]) -> dict[str, int]:
    """Return how often each step was undone and then set aside by a retry. Raises ValueError if a drop entry cannot be read.

    The journal of an imported run begins with a drop entry that names each step as often as it was undone.
    """
    undone: Counter[str] = Counter()
    succeeded: set[str] = set()
    for entry in sorted(entries, key=attrgetter("seq")):
        if entry.phase == "drop":
            dropped = msgspec.json.decode(entry.payload, type=list[str])
            names = undone_by(succeeded)
            undone.update(key for key in dropped if entry.seq == 1 or key in names or compensation_key(key) in succeeded)
            succeeded.difference_update(dropped)
        elif entry.phase == "close" and entry.ok and entry.key.startswith(COMPENSATION_PREFIX):
            succeeded.add(entry.key)
    return dict(undone)


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
    """A journal by use."""

    # The entries in force, in the order in which the body got them.
    entries: list[Entry]
    # The seqs of those that unchanged code asks for again.
    owed: set[int]
    # Results that the last retry dropped because they were undone, and entries that are owed once these come again alike.
    undone_results: list[Entry]
    owed_after: list[Entry]
    # What steps recorded before their functions were called, and how often each step was undone before.
    intents: dict[str, Intent]
    undone: dict[str, int]
    # Where the run was cancelled.
    cancel_point: CancelPoint | None

    @classmethod
    def of(cls, entries: Collection[Entry], *, owes_imported: bool = False) -> JournalIndex:
        """Index the entries in force among these. Raises ValueError if a drop entry or an intent cannot be read.

        `owes_imported` says that results which came from a snapshot are owed like those that this run recorded.
        """
        kept = entries_in_force(entries)
        if len(kept) < len(entries):
            void = void_cancellations(sorted(entries, key=attrgetter("seq")))
            kept = [entry for entry in kept if entry.seq not in void]
        owed, undone_results, owed_after = _owed(entries, kept, owes_imported=owes_imported)
        return cls(
            entries=kept,
            owed=owed,
            undone_results=undone_results,
            owed_after=owed_after,
            intents=read_intents(kept),
            undone=count_undone(entries) if len(kept) < len(entries) else {},
            cancel_point=_find_cancel_point(kept),
        )


def void_cancellations(entries: list[Entry]) -> set[int]:
    """Return the seqs of entries that say that a call was cancelled, if a retry has set aside what may have led to that.

    That is what came after a result that a retry dropped, after the cancellation of the run, or last of all, when the function
    raised. A call whose key was used again before the retry is not among them: the journal has to tell the two uses apart.
    """
    void: set[int] = set()
    for at, drop in enumerate(entries):
        if drop.phase != "drop":
            continue
        since = min((result.seq for result in _dropped_results(entries[:at], drop)), default=drop.seq)
        used_later: set[str] = set()
        is_last = True
        for entry in reversed(entries[:at]):
            is_last = is_last and (entry.phase == "cancel" or entry.key.startswith(COMPENSATION_PREFIX))
            if entry.phase == "cancel" and entry.key and entry.key not in used_later and (is_last or entry.seq > since):
                void.add(entry.seq)
            used_later.add(entry.key)
    return void


def _dropped_results(earlier: Iterable[Entry], drop: Entry) -> list[Entry]:
    """Return the results in force that the entry drops, in the order of the journal."""
    dropped = frozenset(msgspec.json.decode(drop.payload, type=list[str]))
    results: dict[str, Entry] = {}
    for entry in earlier:
        if entry.phase == "drop":
            for key in msgspec.json.decode(entry.payload, type=list[str]):
                results.pop(key, None)
        elif entry.phase == "close" and entry.key in dropped:
            results[entry.key] = entry
    return sorted(results.values(), key=attrgetter("seq"))


def _find_cancel_point(kept: Iterable[Entry]) -> CancelPoint | None:
    cancel = next((entry for entry in kept if entry.kind == "cancel"), None)
    return None if cancel is None else msgspec.json.decode(cancel.payload, type=CancelPoint)


def _owed(entries: Iterable[Entry], kept: list[Entry], *, owes_imported: bool) -> tuple[set[int], list[Entry], list[Entry]]:
    """Return the seqs of the entries that unchanged code asks for, the undone results, and what is owed once these come again.

    Unchanged code may go another way after a failure that `retry` dropped. So it may after a result that was undone and dropped,
    unless the step returns the same again. Entries that were imported from a snapshot, which may lack steps and have others, are
    owed only if the program asks for that.
    """
    ordered = sorted(entries, key=attrgetter("seq"))
    drops = [(at, drop) for at, drop in enumerate(ordered) if drop.phase == "drop"]
    dropped = [(_dropped_results(ordered[:at], drop), drop.seq) for at, drop in drops]
    windows = [(results[0].seq, last) for results, last in dropped if results]
    own = [entry for entry in kept if owes_imported or (entry.epoch and entry.kind != "foreign")]
    owed = {entry.seq for entry in own if not (windows and _is_within(entry, windows))}
    if not windows or not dropped[-1][0]:
        return owed, [], []
    undone = list(takewhile(attrgetter("ok"), dropped[-1][0]))
    failed_at = next((result.seq for result in dropped[-1][0] if not result.ok), windows[-1][1])
    after = [each for each in own if windows[-1][0] < each.seq < failed_at and not _is_within(each, windows[:-1])]
    return owed, undone, after


def _is_within(entry: Entry, windows: list[tuple[int, int]]) -> bool:
    return any(first < entry.seq < last for first, last in windows)
