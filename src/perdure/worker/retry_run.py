"""Retrying a run that has ended badly: which of its steps are executed again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.codec.outcomes import failed_keys_of
from perdure.errors import COMPENSATION_PREFIX, RunFinished, SnapshotCorrupt
from perdure.model.journal import Entry, OpenChild, entries_in_force, undone_keys
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
    dropped = keys_to_retry(row, entries)
    # What was compensated must not be taken for the same request by a service that tells requests apart by their key.
    was_compensated = any(key.startswith(COMPENSATION_PREFIX) for key in dropped)
    await store.reopen(row.id, dropped, new_generation=was_compensated, now=now)


def keys_to_retry(row: RunRow, entries: list[Entry]) -> set[str]:
    """The keys of what ended the run, of what cancelling it led to, and of what was compensated: none of that counts as done.

    A failure that the body handled stays: other steps may have been taken because of it. Children that the end of the run has
    stopped are started again, and then go on.
    """
    return _failed_keys(row, entries) | _cancelled_keys(entries) | compensated_keys(entries) | _stopped_children(row.id, entries)


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
    return {cancel.key, *(entry.key for entry in entries if entry.seq > cancel.seq and entry.started_at > cancel.ended_at)}


def compensated_keys(entries: Sequence[Entry]) -> set[str]:
    """The keys of what was undone, and of what undid it."""
    return undone_keys((entry.key for entry in entries), {entry.key for entry in entries if entry.phase == "close" and entry.ok})


def _stopped_children(run_id: str, entries: list[Entry]) -> set[str]:
    """The keys of children whose outcome the body did not get and that it did not give up, without those that are detached."""
    last = {entry.key: entry for entry in entries if entry.kind == "child"}
    opened = [entry for entry in last.values() if entry.phase == "open"]
    try:
        return {entry.key for entry in opened if not msgspec.json.decode(entry.payload, type=OpenChild).detached}
    except msgspec.MsgspecError as reason:
        raise SnapshotCorrupt(run_id, "the id of a child", str(reason)) from reason
