"""`migrate_store`: everything in one store put into another, as often as it takes.

A run is copied whole and in one transition, so that the target never has half of one, and then read back. What is there already
is left as it is, so that a call that was killed is simply made again. Only a copy that nobody has touched is replaced by a newer
one: whatever the target has that the source has not stays, and is reported.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.backends.base.new_runs import restored_row
from perdure.errors import LeaseHeld, PersistenceError
from perdure.model.durations import instant, moment
from perdure.model.journal import Entry
from perdure.model.records import RunInfo, Schedule, Signal
from perdure.snapshots.view import View, stored_view
from perdure.store import OperatorStore, Store, require
from perdure.stores import open_store

# How often it is looked for what has changed meanwhile: a source that is worked on is never caught up with.
ROUNDS: Final = 10

Kind: TypeAlias = Literal["run", "schedule", "queue"]


class Skipped(NamedTuple):
    """Something that was left out, and why."""

    kind: Kind
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Migration:
    """What a call of `migrate_store` did: how many runs were copied or there, and which runs, schedules and limits were not."""

    copied: int
    already_there: int
    skipped: tuple[Skipped, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the target has everything that the source had."""
        return not self.skipped


async def migrate_store(source: Store | str, target: Store | str, *, batch: int = 100) -> Migration:
    """Copy all runs with their steps and signals, the schedules and the queue limits, and say what was done.

    `batch` runs are copied at a time. One that a worker drives in the source is not copied but reported, and so is one that has
    gone on in the target. Call it again to go on after a failure, and for what has changed since; the last call belongs after the
    last worker on the source has stopped and before the first one on the target starts. Raises `PersistenceError` when a copy
    does not read back as what was copied, and `StoreCapabilityError` when the target cannot restore runs, or has no schedules or
    queue limits where the source has some.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, not {batch!r}")
    async with AsyncExitStack() as opened:
        here, there = [_opened(store, opened) for store in (source, target)]
        if here.key == there.key:
            raise ValueError("source and target are the same store, so there is nothing to copy; pass two different ones")
        await here.setup()
        await there.setup()
        return await _Migrating(here, require(there, "operators"), batch).done()


def _opened(store: Any, opened: AsyncExitStack) -> Store:
    if isinstance(store, str):
        store = open_store(store)
        opened.push_async_callback(store.close)
    if isinstance(store, type) or not all(callable(getattr(store, verb, None)) for verb in ("record", "list")):
        raise TypeError(f"migrate_store takes two stores or DSNs, not {store!r}, which cannot list its runs")
    usable: Store = store
    return usable


@dataclass(slots=True)
class _Migrating:
    source: Store
    target: OperatorStore
    batch: int
    # What became of each run, by id, and of everything else that was left out.
    fates: dict[str, str] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    async def done(self) -> Migration:
        # Limits before the runs that they hold back, schedules after the runs that they have started.
        await self._copy_limits()
        await self._copy_runs()
        await self._copy_schedules()
        fates = list(self.fates.values())
        copied, already_there = fates.count(COPIED), fates.count(ALREADY_THERE)
        runs = [Skipped("run", run_id, fate) for run_id, fate in self.fates.items() if fate not in (COPIED, ALREADY_THERE)]
        counted = await self.target.count()
        if counted < copied + already_there:
            reason = f"{copied + already_there} runs were copied or there, but it has only {counted}"
            raise PersistenceError("the target has lost runs", f"{reason}; stop what deletes them and migrate again")
        return Migration(copied, already_there, (*self.skipped, *runs))

    async def _copy_runs(self) -> None:
        """Copy what there is, and then what has changed meanwhile: that comes first in a list, where nobody would look again."""
        newest: int | None = None
        for number in range(ROUNDS):
            copied, since, newest = 0, newest, None
            async for page in self._pages(since):
                newest = max(newest or 0, *(instant(line.updated_at) for line in page))
                copied += await self._copy_page(page)
            if number > 0 and copied == 0:
                return

    async def _pages(self, since: int | None) -> AsyncIterator[list[RunInfo]]:
        """The runs that were changed at `since` or later, last changed first."""
        before: tuple[int, str] | None = None
        while True:
            page = await self.source.list(before=before, limit=self.batch)
            fresh = [line for line in page if since is None or instant(line.updated_at) >= since]
            if fresh:
                yield fresh
            if len(fresh) < self.batch:
                return
            before = (instant(page[-1].updated_at), page[-1].id)

    async def _copy_page(self, page: Iterable[RunInfo]) -> int:
        """How many of these were copied. All of them have their answer, also if some fail."""
        ids = [line.id for line in page]
        fates = await asyncio.gather(*(copy_run(self.source, self.target, run_id) for run_id in ids), return_exceptions=True)
        copied = 0
        for run_id, fate in zip(ids, fates, strict=True):
            if isinstance(fate, BaseException):
                raise fate
            copied += fate == COPIED
            self._note(run_id, fate)
        return copied

    def _note(self, run_id: str, fate: str | None) -> None:
        if fate is None:  # deleted in the source since it was listed
            self.fates.pop(run_id, None)
        elif fate != ALREADY_THERE or self.fates.get(run_id) != COPIED:
            self.fates[run_id] = fate

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
    """`COPIED`, `ALREADY_THERE`, or why the run was left out; None when it is gone. Raises `PersistenceError`."""
    given = await stored_view(source, run_id)
    if given is None:
        return None
    if given.row.lease_until is not None and given.row.lease_until > time_ns() // 1000:
        return f"a worker drives it in the source, with a lease until {moment(given.row.lease_until).isoformat()}"
    copy, found = _copy_of(given), await stored_view(target, run_id)
    if found is not None:
        if _is_copy(found, given, copy):
            return ALREADY_THERE
        reason = _why_not_replaced(found, given, copy)
        if reason is not None:
            return reason
    try:
        await target.restore(given.row, given.journal, given.inbox, now=copy.row.updated_at)
    except LeaseHeld as reason:
        return f"{reason} in the target"
    await _check(target, given, copy)
    return COPIED


def _copy_of(given: View) -> View:
    """What the target must have then, if it had nothing before."""
    row = given.row
    at = max(row.updated_at, row.epoch)
    return View(restored_row(row, given.inbox, None, at), given.journal, given.length, given.inbox)


def _is_copy(found: View, given: View, copy: View) -> bool:
    return digest(found) == digest(copy) and found.row.epoch >= given.row.epoch


def digest(view: View) -> bytes:
    """A hash of everything that a run and its copy have in common."""
    row = msgspec.structs.replace(view.row, epoch=0, held=False, waiting_for=tuple(sorted(view.row.waiting_for, key=_by_name)))
    parts = (row, sorted(view.journal[: view.length], key=_by_seq), sorted(view.inbox, key=_by_seq))
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _why_not_replaced(found: View, given: View, copy: View) -> str | None:
    """Why what the target has must stay; None when it is an older copy that nobody has touched."""
    if (found.row.workflow, found.row.seed, found.row.created_at) != (given.row.workflow, given.row.seed, given.row.created_at):
        return "another run has this id in the target"
    added = given.journal[found.length :]
    is_older = (
        found.row.updated_at <= copy.row.updated_at
        and found.row.cancel_requested <= given.row.cancel_requested
        and list(found.journal) == list(given.journal[: found.length])
        and (bool(added) or not found.row.ended)
        and _were_consumed([row for row in found.inbox if row not in given.inbox], added)
    )
    return None if is_older else "it has gone on in the target since it was copied"


def _were_consumed(rows: Sequence[Signal], added: Sequence[Entry]) -> bool:
    """Whether the run took these inbox rows when it recorded these entries. If not, somebody sent them to the target."""
    taken = Counter((entry.kind, entry.payload) for entry in added if entry.phase == "close")
    return Counter((row.kind, row.payload) for row in rows) <= taken


async def _check(target: Store, given: View, copy: View) -> None:
    """Refuse a copy that does not read back as what was copied. A worker may be at it already."""
    found = await stored_view(target, given.row.id)
    if found is None or not (_is_copy(found, given, copy) or _has_gone_on(found, copy)):
        raise PersistenceError(
            f"run {given.row.id!r} was copied, but does not read back the same",
            "stop what changes it in the target, then migrate again; the source is as it was",
        )


def _has_gone_on(found: View, copy: View) -> bool:
    is_begun_with = list(found.journal[: copy.length]) == list(copy.journal[: copy.length])
    return is_begun_with and found.row.epoch > copy.row.epoch


def _by_name(awaited: Any) -> tuple[str, str]:
    return awaited.kind, awaited.name


def _by_seq(row: Entry | Signal) -> int:
    return row.seq
