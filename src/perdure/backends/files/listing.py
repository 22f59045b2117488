"""Which runs there are: `due`, `list`, `count` and `purge`, from what the index says."""

from __future__ import annotations

from perdure.backends.base.leases import length_in_microseconds
from perdure.backends.base.process_owner import Owners
from perdure.backends.files.claims import claimable, is_due
from perdure.backends.files.index import Summary
from perdure.backends.files.place import Place
from perdure.backends.files.upkeep import look_around
from perdure.backends.files.verbs import clock
from perdure.model.records import RunInfo, Status


def due(place: Place, limit: int, owners: Owners, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed now."""
    at = clock(now)
    look_around(place)
    found = [(min(one.wake_at or 0, at), one.id) for one in claimable(place) if is_due(one, owners, at)]
    return [run_id for _, run_id in sorted(found)[:limit]]


def list_runs(
    place: Place, prefix: str, status: Status | None, workflow: str | None, before: tuple[int, str] | None, limit: int
) -> list[RunInfo]:
    """Runs, last changed first."""
    place.look_around()
    lines = sorted((-one.updated_at, one.id, one.workflow, one.status) for one in _selected(place, prefix, status, workflow))
    if before is not None:
        lines = [line for line in lines if line[:2] > (-before[0], before[1])]
    return [RunInfo.of(run_id, workflow, status, -minus) for minus, run_id, workflow, status in lines[:limit]]


def count(place: Place, prefix: str, status: Status | None, workflow: str | None) -> int:
    """How many runs there are."""
    place.look_around()
    return len(_selected(place, prefix, status, workflow))


def _selected(place: Place, prefix: str, status: Status | None, workflow: str | None) -> list[Summary]:
    return [
        one
        for _, one in place.index.all()
        if one.id.startswith(prefix) and status in (None, one.status) and workflow in (None, one.workflow)
    ]


def purge(place: Place, older_than: float, limit: int, now: int | None) -> int:
    """Delete ended runs, oldest first."""
    last = clock(now) - length_in_microseconds(older_than)
    look_around(place)
    old = sorted((one.updated_at, one.id) for _, one in place.index.all() if one.ended and one.updated_at <= last)
    return place.remove([run_id for _, run_id in old[:limit]], lambda row: row.ended and row.updated_at <= last)
