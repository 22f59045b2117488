"""Which runs there are: `due`, `list`, `count` and `purge`, from the summaries in the index."""

from __future__ import annotations

from collections.abc import Collection

from perdure.backends.base.leases import length_in_microseconds, store_time
from perdure.backends.base.process_owner import Owners
from perdure.backends.files.claims import claimable, may_be_claimed
from perdure.backends.files.index_repair import repair, update_index
from perdure.backends.files.namespace import FilesNamespace
from perdure.model.records import EndStatus, RunInfo, RunRow
from perdure.model.run_filter import RunFilter, page_of


def list_due(namespace: FilesNamespace, limit: int, owners: Owners, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed now."""
    at = store_time(now)
    repair(namespace)
    found = [(min(one.wake_at or 0, at), one.id) for one in claimable(namespace) if may_be_claimed(one, owners, at)]
    return [run_id for _, run_id in sorted(found)[:limit]]


def list_runs(namespace: FilesNamespace, wanted: RunFilter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """The runs that are asked for, last changed first."""
    update_index(namespace)
    found = [summary for summary in namespace.index.all() if wanted.matches(summary)]
    return [summary.line() for summary in page_of(found, before, limit)]


def count_runs(namespace: FilesNamespace, wanted: RunFilter) -> int:
    """How many runs that are asked for there are."""
    update_index(namespace)
    return sum(wanted.matches(summary) for summary in namespace.index.all())


def purge(
    namespace: FilesNamespace,
    older_than: float,
    status: Collection[EndStatus],
    workflow: str | None,
    limit: int,
    now: int | None,
) -> int:
    """Delete ended runs, oldest first."""
    last = store_time(now) - length_in_microseconds(older_than)
    repair(namespace)
    known = list(namespace.index.all())
    live = {one.id for one in known if not one.ended}
    old = sorted(
        (one.updated_at, one.id)
        for one in known
        if one.status in status and one.updated_at <= last and workflow in (None, one.workflow)
    )

    def may_remove(row: RunRow) -> bool:
        return row.status in status and row.updated_at <= last and row.parent_id not in live

    removed, at = 0, 0
    while removed < limit and at < len(old):
        some = old[at : at + limit - removed]
        removed += namespace.remove([run_id for _, run_id in some], may_remove)
        at += len(some)
    return removed
