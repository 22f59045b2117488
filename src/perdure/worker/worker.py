"""The worker: claims due runs and drives them. When it stops, it drains: running steps end, and the runs are given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from types import FrameType
from typing import Any, Final

from perdure.aio.own_tasks import own_context
from perdure.aio.store_watch import POLL_SECONDS
from perdure.body.leaving import give_up_left_tasks
from perdure.engine.heartbeat import describe_blockage
from perdure.errors import LeaseLost, NotUndone, PerdureError, name_step
from perdure.model.clock import elapsed
from perdure.model.durations import MICROSECOND, moment
from perdure.model.logs import log, run_fields
from perdure.model.records import RunRow, WorkflowVersion
from perdure.model.retention import RetentionRules
from perdure.model.run_filter import RunFilter
from perdure.result import Err, Outcome, Suspended
from perdure.store import require
from perdure.worker.active_runs import ActiveRun, active_runs
from perdure.worker.host import Host
from perdure.worker.retention import RetentionWork
from perdure.worker.scheduler import Scheduler
from perdure.worker.worker_registry import WorkerRegistration, list_workers

# How long a worker waits for a change in its store before it claims without one: at first, and at most. Doubled with each wait in
# which nothing changed, and up to a tenth less at random, so that the workers of a fleet spread out. The first is short because a
# claim misses a run that another worker is just claiming, and has to learn of that lease. The last is no longer than a lease: a
# lease that nothing reported is then known before it ends, and with it the time to take the run over.
IDLE_SECONDS: Final = (POLL_SECONDS, 10.0)

# How often a worker looks for runs that it leaves alone, at most: after changes in the store, and when nothing has changed.
LOOK_FOR_UNCLAIMED_SECONDS: Final = (60.0, 300.0)

# A run that has been due for longer should have been claimed: workers look every few seconds.
OVERDUE_AFTER: Final = 60 * MICROSECOND

# A claim that takes longer is logged, at most once in this time.
SLOW_CLAIM_SECONDS: Final = 1.0
SLOW_STORE_EVERY: Final = 60.0

# How long the store is given, in seconds, to say what has become of a run that was lost.
LOSS_PATIENCE: Final = 2.0

# How long to wait after a failure of the store: at first, and at most. Doubled with each failure in a row, and up to a quarter is
# added at random, so that the workers of a fleet do not ask a store that comes back all at once.
BACKOFF_SECONDS: Final = (0.1, 5.0)

# How many of the steps that a worker waits for are named.
_MAX_NAMED_STEPS: Final = 10


class Worker:
    """Drives up to `concurrency` runs at a time, of these queues, until `stop`."""

    def __init__(
        self, host: Host, concurrency: int, queues: Collection[str] | None, retention: RetentionRules | None = None
    ) -> None:
        self._host = host
        self._concurrency = concurrency
        self._queues = queues
        self._loop = asyncio.get_running_loop()
        # Set when something may be due, when a run has ended and another may be claimed, and when it is time to stop.
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._outage = _Outage()
        self._idle_pause = IDLE_SECONDS[0]
        self.registration = WorkerRegistration(host, concurrency, queues, self.count_driven)
        self.name = self.registration.name
        # When the last claim was answered, or when the worker began, or last had no room for another run.
        self._claimed_at = elapsed()
        self._last_claim_at: int | None = None
        self._logged_slowness_at: float | None = None
        # The runs that were stopped here last because their code cannot undo what they have done.
        self.not_undone: set[str] = set()
        # What finds out how runs were lost.
        self._losses: set[asyncio.Task[None]] = set()
        self._unclaimed = _UnclaimedRuns(queues)
        self.scheduler = Scheduler(host) if "schedules" in host.store.capabilities else None
        self._retention = RetentionWork(host, retention or {})
        # When it has drained: what still runs although it was cancelled, in words.
        self.left: list[str] = []

    @property
    def is_stopping(self) -> bool:
        """Whether it claims nothing more."""
        return self._stopping.is_set()

    @property
    def last_claim_at(self) -> datetime | None:
        """When the store last answered a claim, by its clock."""
        return None if self._last_claim_at is None else moment(self._last_claim_at)

    def count_driven(self) -> int:
        """How many runs it drives now."""
        return active_runs.count(self)

    def describe_blockage(self) -> str | None:
        """For how long its event loop has been blocked, and where; None when it is not, or it drives no runs."""
        return describe_blockage(self._loop)

    def seconds_without_claim(self) -> float:
        """For how long it has had room for another run, and no claim of it was answered."""
        return elapsed() - self._claimed_at if self.count_driven() < self._concurrency else 0.0

    def has_room(self, besides: int = 0) -> bool:
        """Whether one more run, `besides` so many, can be driven on the running event loop, which has to be the worker's own."""
        is_here = asyncio.get_running_loop() is self._loop
        return is_here and not self._stopping.is_set() and active_runs.count(self) + besides < self._concurrency

    def adopt(self, run: ActiveRun) -> None:
        """Count this run against the worker's concurrency."""
        active_runs.adopt(run, self)
        run.drive.waits.watches_after = 0.0
        if log.isEnabledFor(logging.INFO):
            self._log_claim(run.drive.run)

    async def work(self) -> None:
        """Claim and drive until `stop`, then drain."""
        started_at = elapsed()
        self._log_start()
        self.registration.start()
        scheduling: asyncio.Future[None] | None = None
        deleting: asyncio.Future[None] | None = None
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                watch = asyncio.ensure_future(self._watch())
                try:
                    await asyncio.sleep(0)  # starts the watch before the claim, so that no change falls between the two
                    next_wake_at = await self._claim()
                    if not self._outage.pause:
                        if scheduling is None and self.scheduler is not None:  # not before the store has answered
                            scheduling = asyncio.ensure_future(self.scheduler.work())
                        if deleting is None and self._retention.has_rules:
                            deleting = asyncio.ensure_future(self._retention.work())
                        await self._rest(next_wake_at)
                finally:
                    watch.cancel()
                if self._outage.pause:
                    await self._wait_out(self._outage.pause)
        finally:
            self._stopping.set()  # also when an error ends the worker: it takes no more runs
            for background in (scheduling, deleting):
                if background is not None:
                    background.cancel()
            await self._drain(started_at)

    async def _drain(self, started_at: float) -> None:
        """Wait for the runs that are driven here, and say what is left of them."""
        self._unclaimed.stop()
        fields = {"worker": self.name}
        log.info("worker %s drains: %d runs are driven here", self.name, active_runs.count(self), extra=fields)
        try:
            await self._host.drain()
            if self._losses:
                await asyncio.wait(self._losses)
        finally:
            self.registration.stop()
        await self.registration.remove()
        self.left = give_up_left_tasks()
        seconds = elapsed() - started_at
        if self.left:
            left = ", and ".join(self.left)
            log.warning("worker %s ends, after %.1f s, although this still runs: %s", self.name, seconds, left, extra=fields)
        else:
            log.info("worker %s has stopped, after %.1f s", self.name, seconds, extra=fields)

    def stop(self) -> None:
        """Claim nothing more; let running steps end and give the runs back."""
        self._stopping.set()
        self._wake.set()
        self._host.stop_drives()  # now: a claim that is under way may wait for its store for long

    def interrupt(self) -> None:
        """Stop, because a person at the terminal wants that, and say which steps this waits for."""
        self.stop()
        steps = [
            f"{name_step(key)} of run {run.drive.run.id!r}" for run in active_runs.of(self) for key in run.drive.executing.copy()
        ]
        if steps:
            more = f" and {len(steps) - _MAX_NAMED_STEPS} more" if len(steps) > _MAX_NAMED_STEPS else ""
            log.warning(
                "worker %s ends when its steps have ended, after %g s at the latest: %s%s; a second Ctrl-C ends it at once",
                self.name,
                self._host.settings.drain_after,
                ", ".join(steps[:_MAX_NAMED_STEPS]),
                more,
                extra={"worker": self.name},
            )

    async def _claim(self) -> int | None:
        """Claim and drive what is due, and give the time of the next wake-up in the store."""
        host = self._host
        room = self._concurrency - active_runs.count(self)
        if room <= 0:
            self._claimed_at = elapsed()
            return None
        asked_at = elapsed()
        try:
            claims = await host.claim(room, self._queues)
        except Exception as failure:  # noqa: BLE001 - a user's own store may raise anything; the worker goes on
            if "interpreter shutdown" in str(failure):  # the error of starting a thread at that time, from Python 3.12 on
                self.stop()
            else:
                self._outage.go_on(failure)
            return None
        self._outage.end()
        self._claimed_at, self._last_claim_at = elapsed(), claims.now
        self._log_slowness(self._claimed_at - asked_at)
        for claim in claims.claims:
            self.adopt(host.drive(host.definition_of(claim.run), claim, {}, is_background=True))
        if len(claims.claims) == room:
            self._wake.set()
        else:
            self._unclaimed.look_soon(host)
        return claims.next_wake_at

    async def _wait_out(self, pause: float) -> None:
        """Wait so long, whatever the watch reports and however many drives end meanwhile: only `stop` ends it sooner."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):  # not wait_for, which may lose a cancellation before Python 3.12
                await self._stopping.wait()

    async def _rest(self, next_wake_at: int | None) -> None:
        """Return when something may be due: when the watch reports a change, when a run has ended, or at the next wake-up."""
        timer = None if next_wake_at is None else self._host.clock.call_at(next_wake_at, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _watch(self) -> None:
        timeout = self._idle_pause * random.uniform(0.9, 1.0)  # noqa: S311 - to spread out, not to hide
        ends_at = self._loop.time() + timeout
        try:
            await self._host.store.watch(timeout)
        except Exception:  # noqa: BLE001 - as above; the claim that follows reports it
            await asyncio.sleep(POLL_SECONDS)
        if self._loop.time() < ends_at - 0.01:  # the timers of some loops have whole milliseconds
            self._on_change()
        else:
            self._idle_pause = min(2 * self._idle_pause, IDLE_SECONDS[1])
        self._wake.set()

    def _on_change(self) -> None:
        """The store has changed, or it cannot tell."""
        self._idle_pause = IDLE_SECONDS[0]
        self._unclaimed.has_changed = True
        if self.scheduler is not None:
            self.scheduler.note_change()

    def on_drive_over(self, run: ActiveRun) -> None:
        """Look for another run in its place, and log how the drive ended: no caller may be waiting for it."""
        self._wake.set()
        if run.task.cancelled():
            return
        drive, error = run.drive, run.task.exception()
        (self.not_undone.add if isinstance(error, NotUndone) else self.not_undone.discard)(drive.run.id)
        if error is None:
            outcome = run.task.result()
            if isinstance(outcome, Err) and drive.run.status != "cancelled":
                trace = _exc_info(outcome.error)
                log.warning("run %r failed: %r", drive.run.id, outcome.error, exc_info=trace, extra=self._fields(run))
            elif log.isEnabledFor(logging.INFO):
                self._log_end(run, outcome)
        elif isinstance(error, LeaseLost):
            explaining = self._loop.create_task(self._log_loss(run, error), name="perdure-loss", context=own_context())
            self._losses.add(explaining)
            explaining.add_done_callback(self._losses.discard)
        else:
            # A run that does not fit the code is tried every few minutes: the same problem is an error once.
            is_known = drive.problem is not None and drive.problem == drive.run.problem
            level, trace = logging.INFO if is_known else logging.ERROR, _unforeseen(error)
            log.log(level, "run %r will be tried again: %s", drive.run.id, error, exc_info=trace, extra=self._fields(run))

    async def _log_loss(self, run: ActiveRun, error: LeaseLost) -> None:
        """Log why the run is not ours any more: it was deleted, or another worker may have it."""
        is_deleted = False
        with contextlib.suppress(Exception):  # the store is down, perhaps: then leases expire
            async with asyncio.timeout(LOSS_PATIENCE):
                is_deleted = await self._host.store.get(run.drive.run.id) is None
        if is_deleted:
            log.warning("run %r was deleted while it was driven here", run.drive.run.id, extra=self._fields(run))
        else:
            log.warning("run %r was lost to another worker: %s", run.drive.run.id, error, extra=self._fields(run))

    def _fields(self, run: ActiveRun) -> dict[str, Any]:
        return run_fields(run.drive.run, worker=self.name)

    def _log_start(self) -> None:
        host = self._host
        log.info(
            "worker %s starts: up to %d runs at a time, leased for %g s, of %s in %s, on %r",
            self.name,
            self._concurrency,
            host.lease_ttl,
            ", ".join(sorted({name for name, _ in host.workflows})) or "no workflow yet",
            "every queue" if self._queues is None else f"the queues {', '.join(sorted(self._queues))}",
            host.store,
            extra={"worker": self.name},
        )

    def _log_claim(self, row: RunRow) -> None:
        fields = run_fields(row, worker=self.name)
        if row.attempts > 1 and row.problem is None:
            log.info("run %r is taken over from a worker that was lost", row.id, extra=fields)
        else:
            log.info("run %r is claimed", row.id, extra=fields)

    def _log_end(self, run: ActiveRun, outcome: Outcome[Any]) -> None:
        row, fields = run.drive.run, self._fields(run)
        if not isinstance(outcome, Suspended):
            seconds = (row.updated_at - row.created_at) / MICROSECOND
            log.info("run %r is %s, after %.3f s", row.id, row.status, seconds, extra=fields)
        elif row.status == "suspended":
            until = "a signal" if outcome.wake_at is None else outcome.wake_at.isoformat(timespec="milliseconds")
            names = ", ".join(map(str, outcome.waiting_for)) or "nothing else"
            log.info("run %r is suspended until %s, waiting for %s", row.id, until, names, extra=fields)
        elif run.drive.executing:
            log.warning("run %r is not given back while a step of it runs; its lease ends by itself", row.id, extra=fields)
        elif run.drive.is_continued:
            log.info("run %r starts over, in generation %d", row.id, row.generation, extra=fields)
        else:
            log.info("run %r is given back", row.id, extra=fields)

    def _log_slowness(self, seconds: float) -> None:
        now, logged_at = elapsed(), self._logged_slowness_at
        if seconds > SLOW_CLAIM_SECONDS and (logged_at is None or now - logged_at > SLOW_STORE_EVERY):
            self._logged_slowness_at = now
            log.warning("the store answers slowly: a claim took %.1f s", seconds, extra={"worker": self.name})


class _Outage:
    """The time in which the store does not answer: how long to wait before it is asked again, and what is logged."""

    def __init__(self) -> None:
        # How long to wait now; 0 while the store answers.
        self.pause = 0.0
        self._next_pause = BACKOFF_SECONDS[0]
        self._since = 0.0

    def go_on(self, failure: Exception) -> None:
        """The store has failed, perhaps again. The first failure is an error; after that there is one warning for each pause."""
        is_first, now = not self.pause, elapsed()
        self._since = now if is_first else self._since
        self.pause = self._next_pause * random.uniform(1.0, 1.25)  # noqa: S311 - to spread out, not to hide
        self._next_pause = min(self._next_pause * 2, BACKOFF_SECONDS[1])
        level = logging.ERROR if is_first else logging.WARNING
        trace = _unforeseen(failure) if is_first else None
        log.log(level, "the store did not answer, trying again in %.1f s: %s", self.pause, failure, exc_info=trace)

    def end(self) -> None:
        """The store has answered."""
        if self.pause:
            log.info("the store answers again, after %.1f s", elapsed() - self._since)
            self.pause, self._next_pause = 0.0, BACKOFF_SECONDS[0]


class _UnclaimedRuns:
    """Looks for runs that `claim` leaves alone, and logs why: this is how a renamed workflow or a missing version is noticed.

    Due runs of workflows or versions that are not registered here wait for another worker; each such workflow is logged once,
    and each queue that no worker takes. Runs whose holder is silent wait until their lease ends. It looks when the worker has
    room for more runs than are due, at most once a minute, more rarely while nothing changes, and in a task of its own: neither
    a claim nor a drain waits for it.
    """

    def __init__(self, queues: Collection[str] | None) -> None:
        self._queues = queues
        # Whether the store may have changed since the last look.
        self.has_changed = False
        self._looked_at: float | None = None
        self._logged: set[WorkflowVersion] = set()
        self._logged_queues: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def look_soon(self, host: Host) -> None:
        """Look again, if it is time to."""
        now, (often, seldom) = elapsed(), LOOK_FOR_UNCLAIMED_SECONDS
        if self._looked_at is None or now - self._looked_at >= (often if self.has_changed else seldom):
            self._looked_at, self.has_changed = now, False
            self.stop()
            self._task = asyncio.get_running_loop().create_task(self._look(host), name="perdure-unclaimed")

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self, host: Host) -> None:
        with contextlib.suppress(Exception):  # the store is down, or a user's own: the next claim reports that
            await self._look_at_holders(host)
            if "operators" in host.store.capabilities:
                due = await require(host.store, "operators").due(now=host.clock.store_now())
                rows = [row for run_id in due if (row := await host.store.get(run_id)) is not None]
                for row in rows:
                    if self._queues is None or row.queue in self._queues:
                        self._log_unknown(host, row)
                await self._look_at_other_queues(host, rows)

    async def _look_at_other_queues(self, host: Host, rows: Sequence[RunRow]) -> None:
        """Log the queues of runs that should have been claimed long ago, and that no worker takes."""
        overdue = {row.queue: row for row in reversed(rows) if is_overdue(row, host.clock.now())}
        others = overdue.keys() - (overdue.keys() if self._queues is None else self._queues) - self._logged_queues
        workers = await list_workers(host) if others else []
        for queue in sorted(others):
            if not any(worker.takes(queue) for worker in workers):
                self._logged_queues.add(queue)
                log.warning(
                    "runs in queue %r, such as %r, are due and no worker takes this queue; "
                    "start one without only_queues=, or with only_queues=[%r]",
                    queue,
                    overdue[queue].id,
                    queue,
                    extra=run_fields(overdue[queue]),
                )

    async def _look_at_holders(self, host: Host) -> None:
        for info in await host.store.list(RunFilter(status=("running",))):
            if active_runs.find(host.store, info.id) is None and (row := await host.store.get(info.id)) is not None:
                host.log_silent_holder(row)

    def _log_unknown(self, host: Host, row: RunRow) -> None:
        version = row.workflow, row.version
        if version in host.workflows or version in self._logged or not row.version:
            return
        self._logged.add(version)
        log.warning(
            "runs of workflow %r in version %d, such as %r, wait for another worker: registered here is %s",
            row.workflow,
            row.version,
            row.id,
            host.describe_registered(row.workflow),
            extra=run_fields(row),
        )


def is_overdue(row: RunRow, now: int) -> bool:
    """Return whether a run that is due at `now` should have been claimed before."""
    return (row.wake_at or row.updated_at) <= now - OVERDUE_AFTER


def _exc_info(error: object) -> BaseException | None:
    """The error if it was raised: the text of one that was not is in the message already."""
    if not isinstance(error, BaseException):
        return None
    # An error that was rebuilt has its traceback as the text of a cause.
    shown = (error.__traceback__, error.__cause__, error.__context__)
    return error if any(each is not None for each in shown) else None


def _unforeseen(error: BaseException) -> BaseException | None:
    """The error if its traceback helps: those of perdure say what is wrong, and where."""
    return None if isinstance(error, PerdureError) else error


@contextlib.contextmanager
def stop_on_signals(worker: Worker) -> Iterator[None]:
    """Stop the worker on SIGTERM and SIGINT, in the main thread. A second SIGINT does what it would do without this worker.

    The handlers are Python's, not the event loop's: the second SIGINT counts also while the loop is blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, process = asyncio.get_running_loop(), os.getpid()
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child, such as that of a process pool, which has no worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
        loop.call_soon_threadsafe(worker.interrupt if number == signal.SIGINT else worker.stop)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
