"""`runtime.check()`: which stored runs fit the code of this process, before workers with that code claim them.

Only the store's read verbs are used, so runs that another process drives are checked as well: a journal is only appended to, and
whatever part of it was read is a state in which the run could have been left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from perdure.errors import SnapshotError
from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import UNFINISHED, RunInfo
from perdure.model.run_filter import RunFilter
from perdure.operations.replay_check import ReplayCheck, RunCheck, Verdict, claim_to_check
from perdure.options import Options
from perdure.snapshots.consistent_view import load_view
from perdure.store import Store
from perdure.worker.host import Host
from perdure.worker.workflow_body import body_of

_PAGE: Final = 100
# How many runs are named of those that have one reason.
_MAX_NAMED: Final = 5


class CheckReason(msgspec.Struct, frozen=True):
    """Why some runs of a workflow stop, are unknown or warn: `at` is the key where there is one."""

    verdict: Verdict
    workflow: str
    version: int
    at: str | None
    reason: str
    run_ids: tuple[str, ...]

    def __str__(self) -> str:
        number, more = len(self.run_ids), len(self.run_ids) - _MAX_NAMED
        ids = ", ".join(self.run_ids[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        where = "" if self.at is None else f" at {self.at!r}"
        runs = f"{number} {'run' if number == 1 else 'runs'} of {self.workflow} (version {self.version})"
        return f"{self.verdict}: {runs}{where}: {ids}\n  {self.reason}"


@dataclass(frozen=True)
class CheckReport:
    """What `runtime.check()` found, a line for each run. True when no run would stop; `print` it to read it."""

    results: tuple[RunCheck, ...]

    @property
    def fits(self) -> tuple[RunCheck, ...]:
        """Runs that go on without a word."""
        return self._with("fits")

    @property
    def warns(self) -> tuple[RunCheck, ...]:
        """Runs that go on and warn."""
        return self._with("warns")

    @property
    def stops(self) -> tuple[RunCheck, ...]:
        """Runs that would stop, or fail, before they go on."""
        return self._with("stops")

    @property
    def unknown(self) -> tuple[RunCheck, ...]:
        """Runs that could not be checked."""
        return self._with("unknown")

    def _with(self, verdict: Verdict) -> tuple[RunCheck, ...]:
        return tuple(each for each in self.results if each.verdict == verdict)

    @property
    def reasons(self) -> tuple[CheckReason, ...]:
        """Why runs do not simply fit: each reason once, with its runs; what stops first, then what is unknown, then warnings."""
        groups: dict[tuple[Verdict, str, int, str | None, str], list[str]] = {}
        for each in (*self.stops, *self.unknown, *self.warns):
            groups.setdefault((each.verdict, each.workflow, each.version, each.at, each.reason), []).append(each.run_id)
        return tuple(CheckReason(*group, tuple(run_ids)) for group, run_ids in groups.items())

    def __bool__(self) -> bool:
        return not self.stops

    def __str__(self) -> str:
        found = {"fits": self.fits, "stops": self.stops, "unknown": self.unknown, "warns": self.warns}
        counts = ", ".join(f"{verdict} {len(runs)}" for verdict, runs in found.items())
        return "\n".join([f"checked {len(self.results)}: {counts}", *map(str, self.reasons)])


async def check_runs(host: Host, workflows: Iterable[str | None], prefix: str, limit: int | None, patience: float) -> CheckReport:
    """The report on up to `limit` runs of these workflows (None: of all) that have not ended."""
    results: dict[str, RunCheck] = {}
    names = list(workflows)
    for _ in range(2):  # a run that a worker moved while the first list was read is in the second
        async with aclosing(_open_runs(host.store, names, prefix)) as infos:
            async for info in infos:
                if limit is not None and len(results) >= limit:
                    break
                if info.id not in results and (found := await _check_run(host, info, patience)) is not None:
                    results[info.id] = found
    return CheckReport(tuple(results.values()))


async def _open_runs(store: Store, workflows: list[str | None], prefix: str) -> AsyncGenerator[RunInfo, None]:
    for workflow in workflows:
        wanted, before = RunFilter(prefix=prefix, status=UNFINISHED, workflow=workflow), None
        while page := await store.list(wanted, before=before, limit=_PAGE):
            for info in page:
                yield info
            before = instant(page[-1].updated_at), page[-1].id


async def _check_run(host: Host, info: RunInfo, patience: float) -> RunCheck | None:
    """The verdict on this run; None when it has ended meanwhile."""
    try:
        view = await load_view(host.store, info.id)
    except SnapshotError as unreadable:
        return RunCheck.of(info, "stops", str(unreadable))
    if view is None or view.row.ended:
        return None
    if view.row.lacks_input:
        return RunCheck.of(view.row, "unknown", "it was restored without its input, and waits for a start that brings it")
    try:
        workflow = host.definition_of(view.row)
    except LookupError as missing:
        return RunCheck.of(view.row, "unknown", str(missing.args[0]))
    claim, settings = claim_to_check(view), host.settings
    # A body that rests is judged after the grace, which has to pass within the patience.
    grace = min(settings.unload_grace, round(patience * MICROSECOND / 2))
    check = ReplayCheck(
        body_of(workflow, claim, settings.codec),
        workflow.hints,
        claim,
        replace(settings, unload_grace=grace),
        Options.nearest(workflow.process_options, host.process_options),
        workflow.retired,
    )
    return await check.check(patience)
