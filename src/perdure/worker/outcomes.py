"""How a caller gets the outcome of a run: it drives the run, joins a drive in this process, or waits for another process.

A run that another process drives is looked at again when its store may have changed. Waiting for a run survives failures of the
store, as the worker does: it goes on when the store answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from perdure.aio.own_tasks import start_own_task
from perdure.errors import (
    InvalidInput,
    LeaseHeld,
    LeaseLost,
    PerdureWarning,
    PersistenceError,
    RunInterrupted,
    RunNotFound,
    StoreClosed,
)
from perdure.model.clock import elapsed
from perdure.model.durations import instant, moment
from perdure.model.logs import run_fields
from perdure.model.records import RunRow
from perdure.result import Outcome, Suspended
from perdure.snapshots.importer import RunStart
from perdure.worker.active_runs import active_runs
from perdure.worker.host import Host
from perdure.worker.worker_registry import is_worker_known
from perdure.worker.workflow_body import WorkflowDefinition

T = TypeVar("T")

# How long a wait for a run pauses after a failure of the store: at first, and at most. Doubled with each failure in a row.
PAUSE_SECONDS: Final = (0.1, 5.0)
# A failure so long after the last is another outage: the pauses start over, and it is logged again.
NEW_OUTAGE_SECONDS: Final = 60.0
# How long a run is waited for before a warning says that nobody drives it. A worker shows itself in its store sooner.
WARN_AFTER_SECONDS: Final = 5.0
# When a wait for a run failed last, by store. Thousands may wait, and one line says it for all.
_failed_at: Final[dict[tuple[str, ...], float]] = {}

log: Final = logging.getLogger("perdure")


async def run_to_outcome(
    host: Host,
    workflow: WorkflowDefinition,
    start: RunStart,
    options: dict[str, Any],
    *,
    retry_failed: bool = False,
    wait: bool = True,
) -> Outcome[Any]:
    """Create the run, or find it, and drive it here until it ends or suspends."""
    run_id = start.new.id
    is_driven = active_runs.find(host.store, run_id) is not None
    active = await host.create_and_drive(workflow, start, options, may_drive=not is_driven, retry_failed=retry_failed)
    outcome = None if active is None else await active.join()
    is_over = active is not None and not active.drive.is_continued
    return outcome if outcome is not None and is_over else await resume(host, run_id, options, wait=wait)


async def resume(host: Host, run_id: str, options: dict[str, Any], *, wait: bool = True, at_once: bool = True) -> Outcome[Any]:
    """Drive a run that exists, if it is due; otherwise give its present state. Waits for another process that has leased it.

    Waits also while the limits of its queue keep it back: it is tried again when the store has changed, or after a second.
    A run with a problem is tried `at_once`, whatever its pause: the caller may have removed the cause.
    With `wait=False` it raises `LeaseHeld` instead of waiting, and gives `Suspended` for a run that its queue keeps back. Raises
    `LookupError`, and changes nothing, when the run's workflow is not registered here in the version in which the run goes on.
    """
    is_logged = False

    async def look() -> Outcome[Any] | None:
        nonlocal is_logged
        active = active_runs.find(host.store, run_id)
        if active is not None:
            outcome = await active.join()
            # It may have become due again before it had left memory.
            if not isinstance(outcome, Suspended) or not _is_due(host, await host.row(run_id)):
                return outcome
        row = await host.row(run_id)
        if row.ended:
            return host.ended_outcome(row)
        if row.lacks_input:
            reason = f"run {run_id!r} was saved without its arguments; give it them with wf.run(..., id={run_id!r})"
            raise InvalidInput(row.workflow or "of this run", reason)
        definition = host.definition_of(row)
        try:
            claim = await host.acquire(run_id, due_only=row.problem is None or not at_once)
        except LeaseHeld:
            if not wait or row.held:
                raise
            is_logged = is_logged or host.log_silent_holder(row)
            return None
        if claim is None:  # not due, or ended since it was read, or its queue has no room
            await host.ask_time()
            return _undriven_outcome(host, await host.row(run_id), wait=wait)
        active = host.drive(definition, claim, options)
        outcome = await active.join()
        return None if active.drive.is_continued else outcome  # then it is due again, and this goes on with it

    return await _look_until_found(host, run_id, look)


async def wait_for_outcome(host: Host, run_id: str, *, through_waits: bool = False) -> Outcome[Any]:
    """The outcome when the run has ended, or (unless `through_waits`) is suspended. Drives nothing. Raises `RunNotFound`."""

    async def join() -> Outcome[Any] | None:
        """What the drive here comes to; None when there is none, or the waiting goes on after it."""
        active = active_runs.find(host.store, run_id)
        if active is not None:
            with contextlib.suppress(LeaseLost, RunInterrupted):  # then another attempt goes on with it
                outcome = await active.join()
                goes_on = active.drive.is_continued or (through_waits and isinstance(outcome, Suspended))
                return None if goes_on else outcome
        return None

    is_logged = False

    async def look() -> Outcome[Any] | None:
        nonlocal is_logged
        if active_runs.find(host.store, run_id) is not None:
            return await join()
        row = await host.row(run_id)
        if row.ended:
            return host.ended_outcome(row)
        is_logged = is_logged or host.log_silent_holder(row)
        if row.status == "suspended" and row.wake_at is not None:
            await host.ask_time()
        is_waiting = row.status == "suspended" and not _is_due(host, row)
        return _suspended(row) if is_waiting and not through_waits else None

    async def wait() -> Outcome[Any]:
        # First without watching the store, which is not needed for a run that is driven here to its end.
        outcome = await join()
        return outcome if outcome is not None else await _look_until_found(host, run_id, look)

    warning = None if host.has_worker() else start_own_task(_warn_if_nobody_drives(host, run_id))
    try:
        return await _outlast_failures(host, run_id, wait)
    finally:
        if warning is not None:
            warning.cancel()


async def _warn_if_nobody_drives(host: Host, run_id: str) -> None:
    """Warn, after a while and once for each Runtime, that the run is waited for and nobody seems to drive it."""
    await asyncio.sleep(WARN_AFTER_SECONDS)
    try:
        row = await host.row(run_id)
        is_driven = row.ended or row.status == "running" or host.has_worker() or await is_worker_known(host)
    except Exception:  # noqa: BLE001 - the store fails, which the wait itself reports
        return
    if is_driven or host.has_warned_of_worker:
        return
    host.has_warned_of_worker = True
    message = (
        f"run {run_id!r} is awaited and nothing drives it: this Runtime was not entered, and no worker is known on its store; "
        "use it in `async with runtime:`, or start one with `perdure worker`"
    )
    if log.hasHandlers():  # otherwise it would be printed twice
        log.warning("there is no worker: %s", message, extra=run_fields(row))
    warnings.warn(message, PerdureWarning, stacklevel=2)


async def drive_whenever_due(host: Host, run_id: str, options: dict[str, Any]) -> None:
    """Drive the run each time it is due, until it has ended or was deleted."""
    while not await _outlast_failures(host, run_id, lambda: _drive_when_due(host, run_id, options)):
        pass


async def _drive_when_due(host: Host, run_id: str, options: dict[str, Any]) -> bool:
    """Drive the run if it is due; whether it has ended or was deleted. Otherwise returns when it may be due again."""
    with active_runs.expect_change(host.store, run_id) as change:
        await asyncio.sleep(0)  # starts the watch before the run is read, so that no change falls between the two
        try:
            outcome = await resume(host, run_id, options, at_once=False)
        except (LeaseHeld, LeaseLost, RunInterrupted):  # another worker has it for the time being, or its pause is not over
            outcome = Suspended(run_id)
        except RunNotFound:
            return True
        if not isinstance(outcome, Suspended):
            return True
        timer = None if outcome.wake_at is None else host.clock.call_at(instant(outcome.wake_at), change.cancel)
        try:
            await asyncio.wait([change])
        finally:
            if timer is not None:
                timer.cancel()
        return False


async def _outlast_failures(host: Host, run_id: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` gives once the store does not fail. Pauses longer and longer between attempts, and logs the first failure.

    Raises `StoreClosed`, and whatever is no failure of the store, such as `RunNotFound`.
    """
    pause, failed_at = PAUSE_SECONDS[0], None
    while True:
        try:
            return await attempt()
        except StoreClosed:
            raise
        except PersistenceError as failure:
            if _is_new_outage(failed_at):
                pause = PAUSE_SECONDS[0]
            _log_outage(host.store.key, run_id, failure)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the load
        pause, failed_at = min(pause * 2, PAUSE_SECONDS[1]), elapsed()


def _log_outage(store: tuple[str, ...], run_id: str, failure: PersistenceError) -> None:
    if _is_new_outage(_failed_at.get(store)):
        log.warning("the store failed, and waiting for run %r, and others, goes on when it answers: %s", run_id, failure)
    _failed_at[store] = elapsed()


def _is_new_outage(failed_at: float | None) -> bool:
    return failed_at is None or elapsed() - failed_at > NEW_OUTAGE_SECONDS


async def _look_until_found(host: Host, run_id: str, look: Callable[[], Awaitable[T | None]]) -> T:
    """What `look` gives once it gives something. It is called again whenever the run may have changed."""
    while True:
        with active_runs.expect_change(host.store, run_id) as change:
            await asyncio.sleep(0)  # as above
            found = await look()
            if found is not None:
                return found
            await change


def _undriven_outcome(host: Host, row: RunRow, *, wait: bool) -> Outcome[Any] | None:
    """The state of a run that could not be leased; None when another worker drives it by now, or it waits for room in its queue.

    A run that is due and still was not leased has to wait for its turn: the limits of its queue keep it back.
    """
    if row.ended:
        return host.ended_outcome(row)
    return None if row.status == "running" or (wait and _is_due(host, row)) else _suspended(row)


def _is_due(host: Host, row: RunRow) -> bool:
    return row.wake_at is not None and row.wake_at <= host.clock.now()


def _suspended(row: RunRow) -> Suspended:
    wake_at = None if row.wake_at is None else moment(row.wake_at)
    return Suspended(row.id, wake_at, tuple(address.by_user for address in row.waiting_for))
