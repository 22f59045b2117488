"""Forking a run: a new run that repeats another up to a step, and calls that step anew.

A fork begins with what the journal holds before the first record of the step. That is a state in which the old run was itself,
and from which it would have gone on after a crash, so a fork replays as every resumed run does. Seven things differ from a crash:

- Waits that were open then have the time that was left when the step began, and so does the run's deadline: a time limit around
  the step would otherwise have passed long ago.
- Steps that were under way in other branches begin at their first attempt, also those that run at most once: in this run they
  have not been called, and their idempotency keys are new.
- Signals that the old run consumed later, and those that it has not consumed, are in the inbox of the fork: their senders know
  the old run only.
- Decisions about approvals that the old run took later, or has not taken, are not: a person approved what that run would do.
- Steps that the old run has compensated since are called anew: what they did was undone. So is the cancellation of the old run.
- Steps and children that the old run has done belong to it: the fork does not undo them, unless it takes them over.
- The fork has no parent. The parent of the old run waits for that one. Children that were under way are started anew: those of
  the old run belong to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from perdure.errors import CANCEL_KEY, RunConflict, SnapshotCorrupt, StepNotFound
from perdure.model.approvals import OpenApproval
from perdure.model.durations import MAX_INSTANT
from perdure.model.journal import Entry, Kind, NextTry, OpenChild, OpenWait, StepOpening, drop_entry, entries_in_force
from perdure.model.own_names import RESERVED, compensation_key, undone_by
from perdure.model.records import NewRun, RunRow, Signal
from perdure.snapshots.consistent_view import View, user_metadata
from perdure.snapshots.importer import RunStart
from perdure.worker.host import Host
from perdure.worker.retry_run import compensated_keys

# The name in a fork's metadata under which the id of the old run stands.
FORKED_FROM: Final = "forked_from"
_MOST_SUGGESTED: Final = 5
# The payload of the open entry of each kind that has a deadline.
_WAITS: Final[Mapping[Kind, type[OpenWait]]] = {
    "sleep": OpenWait,
    "signal": OpenWait,
    "timeout": OpenWait,
    "timer": OpenWait,
    "approval": OpenApproval,
}


async def fork_run(host: Host, run_id: str, from_step: str, new_id: str, *, take_over: bool) -> None:
    """Create the run `new_id`, due now. Raises `RunNotFound`, `StepNotFound`, and `RunConflict` when the id is taken."""
    await host.ask_time()
    view = await host.view(run_id)
    start = fork(view, from_step, new_id, host.clock.now(), take_over=take_over)
    created = await host.store.create(
        start.new, entries=start.entries, inbox=start.inbox, created_at=start.created_at, now=host.clock.store_now()
    )
    if not created.is_new:
        raise RunConflict(new_id, "a journal of its own")


def fork(view: View, from_step: str, new_id: str, now: int, *, take_over: bool = False) -> RunStart:
    """The fork of this run as it is to be created at the instant `now`. Raises `StepNotFound`."""
    row, journal = view.row, view.journal[: view.length]
    if row.lacks_input:
        raise ValueError(f"run {row.id!r} was restored without its input and cannot be repeated before it is started")
    cut = next((index for index, entry in enumerate(journal) if entry.key == from_step), None)
    if cut is None:
        keys = list(dict.fromkeys(entry.key for entry in journal if entry.key))
        similar = difflib.get_close_matches(from_step, keys, _MOST_SUGGESTED)
        raise StepNotFound(row.id, from_step, similar or keys[-_MOST_SUGGESTED:])
    passed = max(0, now - journal[cut].started_at)
    owner = None if take_over else row.id
    entries = [_owned_by(owner, entry) for entry in _entries_before(row.id, journal[:cut], passed)]
    return RunStart(
        _new_run(row, new_id, passed),
        entries=_without_undone(entries, journal[cut:], now),
        inbox=_inbox(journal[cut:], view.inbox),
        created_at=row.created_at,
    )


def _new_run(row: RunRow, new_id: str, passed: int) -> NewRun:
    """The seed and `continued_at` are those of the old run: a replay gets the same from ctx.random(), uuid4() and now()."""
    kept = {name: getattr(row, name) for name in NewRun.__struct_fields__}
    kept |= {
        "id": new_id,
        "metadata": msgspec.json.encode({**user_metadata(row), FORKED_FROM: row.id}),
        "deadline": _later(row.deadline, passed),
        "parent_id": None,
        "parent_key": None,
        "generation": 0,
        "first_input_hash": None,
    }
    return NewRun(**kept)


def _entries_before(run_id: str, entries: Sequence[Entry], passed: int) -> list[Entry]:
    kept, over = list[Entry](), set[str]()
    for entry in reversed(entries):
        if entry.phase == "cancel" and not kept:
            continue  # a cancellation is only recorded before something else: the body repeats it
        if entry.phase != "open":
            over.add(entry.key)
        elif entry.key not in over:
            if entry.kind in ("step", "child"):
                continue
            entry = _with_time_left(run_id, entry, passed)  # noqa: PLW2901 - the same entry, later
        kept.append(entry)
    return kept[::-1]


def _without_undone(kept: list[Entry], later: Sequence[Entry], now: int) -> list[Entry]:
    """Return these entries, and one that drops what was undone then or `later`: it does not count as done in the fork."""
    in_force = entries_in_force(kept)
    compensations = {entry.key for entry in later if entry.phase == "close" and entry.ok}
    names = undone_by(compensations)
    undone = {each.key for each in in_force if each.key and (each.key in names or compensation_key(each.key) in compensations)}
    undone |= compensated_keys(in_force) | ({CANCEL_KEY} & {entry.key for entry in in_force})
    return [*kept, drop_entry(kept[-1].seq + 1, undone, now, kept[-1].epoch)] if undone else kept


def _owned_by(owner: str | None, entry: Entry) -> Entry:
    """Return the entry as one of a step that the run `owner` executed; for None as one of a step that the fork has to undo."""
    if entry.phase != "open" or entry.kind not in ("step", "child"):
        return entry
    opened = msgspec.json.decode(entry.payload, type=StepOpening if entry.kind == "step" else OpenChild)
    if isinstance(opened, NextTry) or (opened.belongs_to is not None and owner is not None):
        return entry
    return msgspec.structs.replace(entry, payload=msgspec.json.encode(msgspec.structs.replace(opened, belongs_to=owner)))


def _with_time_left(run_id: str, opened: Entry, passed: int) -> Entry:
    """The open entry of a wait with its deadline put off."""
    if opened.kind not in _WAITS:
        return opened
    try:
        wait = msgspec.json.decode(opened.payload, type=_WAITS[opened.kind])
    except msgspec.MsgspecError as reason:
        raise SnapshotCorrupt(run_id, f"the deadline of {opened.key!r}", str(reason)) from reason
    later = msgspec.structs.replace(wait, deadline=_later(wait.deadline, passed))
    return msgspec.structs.replace(opened, payload=msgspec.json.encode(later))


def _later(instant: int | None, passed: int) -> int | None:
    return None if instant is None else min(instant + passed, MAX_INSTANT)


def _inbox(entries: Sequence[Entry], unconsumed: Sequence[Signal]) -> list[Signal]:
    """The signals that were consumed with these entries, in that order, then those that were not consumed."""
    closed = (entry for entry in entries if entry.phase == "close" and entry.kind == "signal" and entry.ok)
    consumed = [(entry.name, entry.payload, None) for entry in closed]
    waiting = [(each.name, each.payload, each.dedupe) for each in unconsumed if _is_for_fork(each)]
    return [
        Signal(seq=seq, name=name, payload=payload, dedupe=dedupe)
        for seq, (name, payload, dedupe) in enumerate((*consumed, *waiting), start=1)
    ]


def _is_for_fork(row: Signal) -> bool:
    return row.kind == "signal" and not row.name.startswith(RESERVED)
