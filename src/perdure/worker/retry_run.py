"""Retrying a run that has ended badly: which of its failed steps are executed again."""

from __future__ import annotations

from perdure.codec.outcomes import failed_keys_of
from perdure.errors import RunFinished, SnapshotCorrupt
from perdure.model.journal import Entry, entries_in_force
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
    """The keys of what ended the run. A failure that the body handled stays: other steps may have been taken because of it."""
    if row.status != "failed":
        return set()
    failed = {entry.key for entry in entries if entry.phase == "close" and not entry.ok}
    known = failed_keys_of(row.outcome or b"null")
    # An error that the body raised by itself does not say which of the failures it was about.
    return failed if known is None else failed & known
