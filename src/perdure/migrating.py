"""`migrate_store`: everything in one store put into another, as often as it takes.

A run is copied whole and in one transition, so that the target never has half of one, and then read back. What is there already
is left as it is, so that a call that was killed is simply made again. Only a copy that nobody has touched is replaced by a newer
one: whatever the target has that the source has not stays, and is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from perdure.duration import instant
from perdure.errors import PersistenceError
from perdure.migrating_runs import ALREADY_THERE, COPIED, copy_run
from perdure.records import RunInfo, Schedule
from perdure.store import Store
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
    does not read back as what was copied.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, not {batch!r}")
    async with AsyncExitStack() as opened:
        here, there = [_opened(store, opened) for store in (source, target)]
        if here.key == there.key:
            raise ValueError("source and target are the same store, so there is nothing to copy; pass two different ones")
        await here.setup()
        await there.setup()
        return await _Migrating(here, there, batch).done()


def _opened(store: Any, opened: AsyncExitStack) -> Store:
    if isinstance(store, str):
        store = open_store(store)
        opened.push_async_callback(store.close)
    if isinstance(store, type) or not all(callable(getattr(store, verb, None)) for verb in ("record", "restore", "list")):
        raise TypeError(f"migrate_store takes two stores or DSNs, not {store!r}, which cannot list and restore whole runs")
    usable: Store = store
    return usable


@dataclass(slots=True)
class _Migrating:
    source: Store
    target: Store
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
        there = await self.target.queue_limits()
        for queue, limits in sorted((await self.source.queue_limits()).items()):
            if queue not in there:
                await self.target.limit_queue(queue, limits)
            elif there[queue] != limits:
                self.skipped.append(Skipped("queue", queue, f"it has other limits in the target: {there[queue]}"))

    async def _copy_schedules(self) -> None:
        there = {schedule.id: schedule for schedule in await self.target.schedules()}
        for schedule in await self.source.schedules():
            found = there.get(schedule.id)
            if found is None or _is_behind(found, schedule):
                await self.target.put_schedule(schedule)
            elif found != schedule:
                self.skipped.append(Skipped("schedule", schedule.id, "the target has it otherwise, or has fired it since"))


def _is_behind(found: Schedule, schedule: Schedule) -> bool:
    """Whether this is the same schedule before it was last fired."""
    is_same = (found.workflow, found.spec, found.input) == (schedule.workflow, schedule.spec, schedule.input)
    return is_same and found.next_at is not None and (schedule.next_at is None or schedule.next_at > found.next_at)
