"""Retrying a run that has ended badly: which of its steps are executed again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.codec.outcomes import failed_keys_of
from perdure.errors import COMPENSATION_PREFIX, RunFinished, SnapshotCorrupt
from perdure.model.journal import Entry, OpenChild, drop_entry, entries_in_force, read_intents, undone_keys, void_cancellations
from perdure.model.records import RunRow
from perdure.store import Store


async def reopen_run(store: Store, row: RunRow, now: int | None) -> None:
    """Let a failed, cancelled or dead run go on without what failed. Raises `RunFinished`."""
    if row.status == "completed":
        raise RunFinished(row.id, row.status)
    try:
        entries = entries_in_force(await store.journal(row.id))
    except ValueError as reason:
        raise SnapshotCorrupt(row.id, "the journal", str(reason)) from reason
    await store.reopen(row.id, keys_to_retry(row, entries), now=now)


def keys_to_retry(row: RunRow, entries: list[Entry]) -> set[str]:
    """The keys of what ended the run, of what cancelling it led to, and of what was compensated: none of that counts as done.

    A failure that the body handled stays: other steps may have been taken because of it. Children that the end of the run has
    stopped are started again, and then resumed. A run that died while it undid what it had done resumes that. The time limits of
    `ctx.timeout` that had not passed begin again.
    """
    if row.status == "dead" and any(entry.key.startswith(COMPENSATION_PREFIX) for entry in entries):
        return set()
    keys = _failed_keys(row, entries) | _cancelled_keys(entries) | compensated_keys(entries) | _open_limits(entries)
    return keys | _stopped_children(row.id, entries, keys)


def _failed_keys(row: RunRow, entries: list[Entry]) -> set[str]:
    if row.status != "failed":
        return set()
    failed = {entry.key for entry in entries if entry.phase == "close" and not entry.ok}
    known = failed_keys_of(row.outcome or b"null")
    # An error that the body raised by itself does not say which of the failures it was about.
    return failed if known is None else failed & known


def _cancelled_keys(entries: list[Entry]) -> set[str]:
    """The record of the cancellation, and what the body began after it to clean up. What it had begun before stays done."""
    cancel = next((entry for entry in entries if entry.kind == "cancel"), None)
    if cancel is None:
        return set()
    later = [entry for entry in entries if entry.seq > cancel.seq]
    # A step that must not run twice keeps its intent, although its call was cancelled.
    given_up = {entry.key for entry in later if entry.phase == "cancel"} - read_intents(entries).keys()
    begun = {entry.key for entry in later if entry.phase != "cancel" and entry.started_at > cancel.ended_at}
    return {cancel.key} | given_up | begun


def compensated_keys(entries: Sequence[Entry]) -> set[str]:
    """The keys of what was undone, and of what undid it."""
    return undone_keys((entry.key for entry in entries), {entry.key for entry in entries if entry.phase == "close" and entry.ok})


def _open_limits(entries: list[Entry]) -> set[str]:
    """Return the keys of time limits that have not passed: what is done again within them needs the time again."""
    limits = [entry for entry in entries if entry.kind in ("timeout", "timer")]
    return {entry.key for entry in limits} - {entry.key for entry in limits if entry.phase != "open"}


def _stopped_children(run_id: str, entries: list[Entry], dropped: set[str]) -> set[str]:
    """Return the keys of children whose outcome the body did not get, without those that are detached or that it gave up itself.

    A child that was given up because of a failure that is dropped is started again.
    """
    end = drop_entry(entries[-1].seq + 1 if entries else 1, dropped, 0, 0)
    void = void_cancellations([*entries, end])
    last = {entry.key: entry for entry in entries if entry.kind == "child" and entry.seq not in void}
    opened = [entry for entry in last.values() if entry.phase == "open"]
    try:
        return {entry.key for entry in opened if not msgspec.json.decode(entry.payload, type=OpenChild).detached}
    except msgspec.MsgspecError as reason:
        raise SnapshotCorrupt(run_id, "the id of a child", str(reason)) from reason
