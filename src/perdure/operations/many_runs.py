"""One verb for many runs: `runtime.cancel_many(...)` and the like.

Lists are in the order of `updated_at`, which changes while the work goes on: a worker renews a lease, and the run moves to the
front of the list, behind the place that has been reached. So there are several passes. Each looks at what has changed since the
one before began, until one finds no run that was not dealt with. A run is dealt with once, and runs that were created later are
left alone, so the work ends however busy the store is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias, cast

import msgspec

from perdure.errors import PerdureError, PersistenceError, StoreCapabilityError
from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import END_STATUSES, UNFINISHED, RunInfo, Status, check_positive
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.operations.run_selection import RunSelection, run_filter
from perdure.store import require
from perdure.worker.host import Host

BulkVerb: TypeAlias = Literal["cancel", "retry", "hold", "unhold", "delete"]
OnProgress: TypeAlias = Callable[[int, int | None], object]

# The runs that a verb is for, where the caller names no status: a cancelled run is not retried by the way, and one that has not
# ended is not deleted.
_MEANT_FOR: Final[dict[BulkVerb, tuple[Status, ...]]] = {
    "cancel": UNFINISHED,
    "hold": UNFINISHED,
    "unhold": UNFINISHED,
    "retry": ("failed", "dead"),
    "delete": END_STATUSES,
}
# How many refusals a report has.
MOST_REFUSALS: Final = 100
# How much earlier than it began a pass is taken to have begun, in microseconds: the store's time is known by its replies only.
_MARGIN: Final = 5 * MICROSECOND


class BulkRefusal(msgspec.Struct, frozen=True):
    """A run for which the verb was refused: the name of the error, and what it says."""

    run_id: str
    error: str
    reason: str


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """For how many runs the verb was done and refused. `refusals` has the first 100 of the latter."""

    done: int
    refused: int = 0
    refusals: tuple[BulkRefusal, ...] = ()


class BulkOptions(RunSelection, total=False):
    """Which runs a verb for many is for, and how it goes about it.

    `batch` runs are changed at a time; after each batch `on_progress` is called with how many runs were dealt with and how many
    there are (None: the store cannot count). An empty selection needs `all=True`. With `dry_run` nothing changes.
    """

    all: bool
    on_progress: OnProgress | None
    batch: int
    dry_run: bool


_HOW: Final = BulkOptions.__annotations__.keys() - RunSelection.__annotations__.keys()


async def change_many(host: Host, verb: BulkVerb, change: Callable[[str], Awaitable[object]], options: BulkOptions) -> BulkReport:
    """Call `change` with the id of each run that is asked for and was there when this began.

    A refusal is counted and reported. A store that fails, or cannot do it, raises.
    """
    selection = cast("RunSelection", {name: value for name, value in options.items() if name not in _HOW})
    wanted = _narrow(verb, run_filter(selection, host.clock.now()), is_all=options.get("all", False))
    on_progress, batch = options.get("on_progress"), check_positive(options.get("batch", 100), "batch")
    if options.get("dry_run", False):
        return BulkReport(done=await require(host.store, "operators").count(wanted))
    await host.ask_time()
    total = None
    if on_progress is not None and "operators" in host.store.capabilities:
        total = await require(host.store, "operators").count(wanted)
    work = _BulkWork(host, change, batch, on_progress, total)
    while await work.go_through(wanted):
        after = work.began_at - _MARGIN
        wanted = msgspec.structs.replace(wanted, updated_after=max(after, wanted.updated_after or after))
    return BulkReport(done=work.done, refused=work.refused, refusals=tuple(work.refusals))


def _narrow(verb: BulkVerb, wanted: RunFilter, *, is_all: bool) -> RunFilter:
    """The filter for this verb, with the statuses that it is for if it names none. Raises `ValueError` for an empty one."""
    if wanted == EVERY_RUN and not is_all:
        raise ValueError(
            f"{verb}_many without a filter would {verb} every run of the store; pass all=True if that is what you mean"
        )
    if wanted != EVERY_RUN and is_all:
        raise ValueError("all=True means every run of the store; leave it out, or the filter")
    return wanted if wanted.status is not None else msgspec.structs.replace(wanted, status=_MEANT_FOR[verb])


class _BulkWork:
    """What was done so far."""

    def __init__(
        self,
        host: Host,
        change: Callable[[str], Awaitable[object]],
        batch: int,
        on_progress: OnProgress | None,
        total: int | None,
    ) -> None:
        self._host = host
        self._change = change
        self._batch = batch
        self._on_progress = on_progress
        self._total = total
        self._created_until = host.clock.now() + MICROSECOND
        self._dealt_with: set[str] = set()
        # When the last pass began.
        self.began_at = 0
        self.done = 0
        self.refused = 0
        self.refusals: list[BulkRefusal] = []

    async def go_through(self, wanted: RunFilter) -> bool:
        """One pass over these runs; whether it found one that was not dealt with before."""
        self.began_at, before = self._host.clock.now(), None
        dealt_with = len(self._dealt_with)
        while page := await self._host.store.list(wanted, before=before, limit=self._batch):
            chosen = [info.id for info in page if self._is_chosen(info)]
            if chosen:
                await self._change_all(chosen)
            if len(page) < self._batch:
                break
            before = instant(page[-1].updated_at), page[-1].id
        return len(self._dealt_with) > dealt_with

    def _is_chosen(self, info: RunInfo) -> bool:
        return info.id not in self._dealt_with and instant(info.created_at) <= self._created_until

    async def _change_all(self, run_ids: list[str]) -> None:
        self._dealt_with.update(run_ids)
        replies = await asyncio.gather(*map(self._change, run_ids), return_exceptions=True)
        for run_id, reply in zip(run_ids, replies, strict=True):
            if not isinstance(reply, BaseException):
                self.done += 1
            elif isinstance(reply, PerdureError) and not isinstance(reply, PersistenceError | StoreCapabilityError):
                self.refused += 1
                if len(self.refusals) < MOST_REFUSALS:
                    self.refusals.append(BulkRefusal(run_id, type(reply).__name__, str(reply)))
            else:
                raise reply
        if self._on_progress is not None:
            dealt_with = self.done + self.refused
            self._on_progress(dealt_with, None if self._total is None else max(self._total, dealt_with))
