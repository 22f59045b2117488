"""`migrate_store`: copies everything in one store into another, and can be repeated until nothing is left out.

A run is copied whole in one transition, so the target never has half of one, and is then read back. What the target has already
is left as it is, so a call that was killed can be made again. Only an unchanged copy is replaced by a newer one: a run that has
changed in the target stays as it is there, and is reported.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.backends.base.new_runs import row_after_restore
from perdure.errors import LeaseHeld, PersistenceError
from perdure.model.durations import instant, moment
from perdure.model.journal import Entry
from perdure.model.records import RunInfo, Schedule, Signal, check_positive
from perdure.snapshots.consistent_view import View, load_view
from perdure.store import OperatorStore, Store, require
from perdure.stores import open_store

# How many times the source is searched for runs that changed meanwhile: while workers use it, there are always some.
ROUNDS: Final = 10

SkippedKind: TypeAlias = Literal["run", "schedule", "queue"]


class Skipped(NamedTuple):
    """Something that was left out, and why."""

    kind: SkippedKind
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Migration:
    """What `migrate_store` did: how many runs it copied or found, and which runs, schedules and limits it left out."""

    copied: int
    already_there: int
    skipped: tuple[Skipped, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the target has everything that the source had."""
        return not self.skipped


async def migrate_store(
    source: Store | str,
    target: Store | str,
    *,
    batch: int = 100,
    on_progress: Callable[[int, int | None], object] | None = None,
) -> Migration:
    """Copy all runs with their steps and signals, the schedules and the queue limits, and report what was done.

    `batch` runs are copied at a time. After each batch `on_progress` is called with how many runs were compared and how many
    there are (None: the source cannot count). A run that a worker drives in the source is not copied but reported, and so is one
    that has changed in the target. Call it again after a failure, and for what has changed since; make the last call when the
    last worker on the source has stopped and none on the target has started. Raises `PersistenceError` when a copy reads back
    otherwise, and `StoreCapabilityError` when the target cannot restore runs, or has no schedules or queue limits where the
    source has some.
    """
    check_positive(batch, "batch")
    async with AsyncExitStack() as closing:
        here, there = [_open(store, closing) for store in (source, target)]
        if here.key == there.key:
            raise ValueError("source and target are the same store, so there is nothing to copy; pass two different ones")
        await here.setup()
        await there.setup()
        return await _StoreCopy(here, require(there, "operators"), batch, on_progress).copy_all()


def _open(store: Any, closing: AsyncExitStack) -> Store:
    if isinstance(store, str):
        store = open_store(store)
        closing.push_async_callback(store.close)
    if isinstance(store, type) or not all(callable(getattr(store, verb, None)) for verb in ("record", "list")):
        raise TypeError(f"migrate_store takes two stores or DSNs, not {store!r}, which cannot list its runs")
    usable: Store = store
    return usable


@dataclass(slots=True)
class _StoreCopy:
    source: Store
    target: OperatorStore
    batch: int
    on_progress: Callable[[int, int | None], object] | None = None
    # COPIED, ALREADY_THERE or the reason why it was left out, for each run by its id.
    results: dict[str, str] = field(default_factory=dict)
    # Schedules and queue limits that were left out.
    skipped: list[Skipped] = field(default_factory=list)
    # How many runs the source had at the start, if it can count.
    total: int | None = None

    async def copy_all(self) -> Migration:
        # Limits before the runs that they hold back, schedules after the runs that they have started.
        await self._copy_limits()
        if self.on_progress is not None and "operators" in self.source.capabilities:
            self.total = await require(self.source, "operators").count()
        await self._copy_runs()
        await self._copy_schedules()
        results = list(self.results.values())
        copied, already_there = results.count(COPIED), results.count(ALREADY_THERE)
        runs = [
            Skipped("run", run_id, reason) for run_id, reason in self.results.items() if reason not in (COPIED, ALREADY_THERE)
        ]
        counted = await self.target.count()
        if counted < copied + already_there:
            reason = f"{copied + already_there} runs were copied or there, but it has only {counted}"
            raise PersistenceError("the target has lost runs", f"{reason}; stop what deletes them and migrate again")
        return Migration(copied, already_there, (*self.skipped, *runs))

    async def _copy_runs(self) -> None:
        """Copy all runs, then those that changed meanwhile: a change moves a run to the front, to pages that were read before."""
        newest: int | None = None
        for number in range(ROUNDS):
            copied, since, newest = 0, newest, None
            async for page in self._pages(since):
                newest = max(newest or 0, *(instant(info.updated_at) for info in page))
                copied += await self._copy_page(page)
            if number > 0 and copied == 0:
                return

    async def _pages(self, since: int | None) -> AsyncIterator[list[RunInfo]]:
        """The runs that were changed at `since` or later, last changed first."""
        before: tuple[int, str] | None = None
        while True:
            page = await self.source.list(before=before, limit=self.batch)
            fresh = [info for info in page if since is None or instant(info.updated_at) >= since]
            if fresh:
                yield fresh
            if len(fresh) < self.batch:
                return
            before = (instant(page[-1].updated_at), page[-1].id)

    async def _copy_page(self, page: Iterable[RunInfo]) -> int:
        """How many of these were copied. If one fails, this raises after all have ended."""
        ids = [info.id for info in page]
        results = await asyncio.gather(*(copy_run(self.source, self.target, run_id) for run_id in ids), return_exceptions=True)
        copied = 0
        for run_id, result in zip(ids, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            copied += result == COPIED
            self._add_result(run_id, result)
        if self.on_progress is not None:
            self.on_progress(len(self.results), self.total)
        return copied

    def _add_result(self, run_id: str, result: str | None) -> None:
        if result is None:  # deleted in the source since it was listed
            self.results.pop(run_id, None)
        elif result != ALREADY_THERE or self.results.get(run_id) != COPIED:
            self.results[run_id] = result

    async def _copy_limits(self) -> None:
        here = await require(self.source, "schedules").queue_limits() if "schedules" in self.source.capabilities else {}
        if not here:
            return
        target = require(self.target, "schedules")
        there = await target.queue_limits()
        for queue, limits in sorted(here.items()):
            if queue not in there:
                await target.limit_queue(queue, limits)
            elif there[queue] != limits:
                self.skipped.append(Skipped("queue", queue, f"it has other limits in the target: {there[queue]}"))

    async def _copy_schedules(self) -> None:
        here = await require(self.source, "schedules").schedules() if "schedules" in self.source.capabilities else ()
        if not here:
            return
        target = require(self.target, "schedules")
        there = {schedule.id: schedule for schedule in await target.schedules()}
        for schedule in here:
            found = there.get(schedule.id)
            if found is None or _is_behind(found, schedule):
                await target.put_schedule(schedule)
            elif found != schedule:
                self.skipped.append(Skipped("schedule", schedule.id, "the target has it otherwise, or has fired it since"))


def _is_behind(found: Schedule, schedule: Schedule) -> bool:
    """Whether this is the same schedule before it was last fired."""
    is_same = (found.workflow, found.spec, found.input) == (schedule.workflow, schedule.spec, schedule.input)
    return is_same and found.next_at is not None and (schedule.next_at is None or schedule.next_at > found.next_at)


COPIED: Final = "copied"
ALREADY_THERE: Final = "already there"


async def copy_run(source: Store, target: OperatorStore, run_id: str) -> str | None:
    """`COPIED`, `ALREADY_THERE`, or why the run was left out; None when the source has it no more. Raises `PersistenceError`."""
    original = await load_view(source, run_id)
    if original is None:
        return None
    if original.row.lease_until is not None and original.row.lease_until > time_ns() // 1000:
        return f"a worker drives it in the source, with a lease until {moment(original.row.lease_until).isoformat()}"
    copy, found = _copy_of(original), await load_view(target, run_id)
    if found is not None:
        if _is_copy(found, original, copy):
            return ALREADY_THERE
        reason = _why_not_replaced(found, original, copy)
        if reason is not None:
            return reason
    try:
        await target.restore(original.row, original.journal, original.inbox, now=copy.row.updated_at)
    except LeaseHeld as reason:
        return f"{reason} in the target"
    await _check(target, original, copy)
    return COPIED


def _copy_of(original: View) -> View:
    """What an empty target must have after the copy."""
    row = original.row
    at = max(row.updated_at, row.epoch)
    return View(row_after_restore(row, original.inbox, None, at), original.journal, original.length, original.inbox)


def _is_copy(found: View, original: View, copy: View) -> bool:
    return digest(found) == digest(copy) and found.row.epoch >= original.row.epoch


def digest(view: View) -> bytes:
    """A hash of everything that must be the same in a run and its copy."""
    row = msgspec.structs.replace(view.row, epoch=0, held=False, waiting_for=tuple(sorted(view.row.waiting_for, key=_by_name)))
    parts = (row, sorted(view.journal[: view.length], key=_by_seq), sorted(view.inbox, key=_by_seq))
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _why_not_replaced(found: View, original: View, copy: View) -> str | None:
    """Why the target's run must stay; None when it is an older copy that has not changed there."""
    if _identity(found) != _identity(original):
        return "another run has this id in the target"
    added = original.journal[found.length :]
    is_older = (
        found.row.updated_at <= copy.row.updated_at
        and found.row.cancel_requested <= original.row.cancel_requested
        and list(found.journal) == list(original.journal[: found.length])
        and (bool(added) or not found.row.ended)
        and _were_consumed([row for row in found.inbox if row not in original.inbox], added)
    )
    return None if is_older else "it has gone on in the target since it was copied"


def _identity(view: View) -> tuple[str, bytes, int]:
    return view.row.workflow, view.row.seed, view.row.created_at


def _were_consumed(rows: Sequence[Signal], added: Sequence[Entry]) -> bool:
    """Whether the run consumed these inbox rows with these entries. If not, they were sent to the target."""
    closed = [entry for entry in added if entry.phase == "close"]
    consumed = Counter(("signal" if entry.kind == "approval" else entry.kind, entry.payload) for entry in closed)
    return Counter((row.kind, row.payload) for row in rows) <= consumed


async def _check(target: Store, original: View, copy: View) -> None:
    """Raise if the copy does not read back the same, unless a worker on the target has driven it on already."""
    found = await load_view(target, original.row.id)
    if found is None or not (_is_copy(found, original, copy) or _has_gone_on(found, copy)):
        raise PersistenceError(
            f"run {original.row.id!r} was copied, but does not read back the same",
            "stop what changes it in the target, then migrate again; the source is as it was",
        )


def _has_gone_on(found: View, copy: View) -> bool:
    starts_with_copy = list(found.journal[: copy.length]) == list(copy.journal[: copy.length])
    return starts_with_copy and found.row.epoch > copy.row.epoch


def _by_name(awaited: Any) -> tuple[str, str]:
    return awaited.kind, awaited.name


def _by_seq(row: Entry | Signal) -> int:
    return row.seq
