"""Runs of one store, driven in this process.

A host turns calls into store verbs and drives: whatever runs a workflow, a `Runtime` or `wf.run`, does it through one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import warnings
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from perdure.aio.pending_write import answered
from perdure.codec import Codec
from perdure.codec.outcomes import Hints, failed_keys_of, outcome_of
from perdure.engine.drive import Drive
from perdure.engine.heartbeat import heartbeat_of
from perdure.engine.subscriptions import listeners_of
from perdure.errors import (
    InvalidInput,
    LeaseHeld,
    LeaseLost,
    PerdureWarning,
    RunFinished,
    RunNotFound,
    SnapshotCorrupt,
    SnapshotMismatch,
    ValueNotStorable,
)
from perdure.model.clock import elapsed
from perdure.model.durations import instant, moment
from perdure.model.ids import check_id, random_bytes
from perdure.model.journal import Entry, entries_in_force
from perdure.model.records import Claim, Claims, Created, NewRun, RunRow, is_changed
from perdure.options import Options, Settings, columns_of
from perdure.result import Outcome, Suspended
from perdure.snapshots.importer import Arguments, RunStart
from perdure.snapshots.view import View, load_view
from perdure.store import Store
from perdure.worker.active_runs import Driving, drive_key, joinable

T = TypeVar("T")
log: Final = logging.getLogger("perdure")

# How long a change in the store may go unnoticed where the store cannot tell of it.
POLL_SECONDS: Final = 1.0
STEP_THREADS: Final = 100


# Runs that were started without a runtime: a loop alone would let go of their tasks.
_seen_through: set[asyncio.Task[None]] = set()
# Stores in memory that nobody asked for, and about which that was said.
_told: weakref.WeakSet[Store] = weakref.WeakSet()


@lru_cache(maxsize=1)
def shared_threads() -> ThreadPoolExecutor:
    """The threads for plain step functions outside a Runtime."""
    return ThreadPoolExecutor(STEP_THREADS, thread_name_prefix="perdure-step")


class WorkflowInput(NamedTuple):
    """The checked arguments of a run, as stored and as the body gets them."""

    encoded: bytes
    digest: bytes
    arguments: Arguments


class WorkflowDefinition(Protocol):
    """What driving a run asks of its workflow; `Workflow` is the one there is."""

    @property
    def name(self) -> str: ...
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def hints(self) -> Hints: ...
    @property
    def process_options(self) -> dict[str, Any]: ...
    @property
    def definition_hash(self) -> str | None: ...
    def input(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WorkflowInput: ...
    def decoded(self, codec: Codec, encoded: bytes) -> Arguments: ...
    def body(self, drive: Drive, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]: ...


class Host:
    """What it takes to drive runs of one store here."""

    def __init__(
        self, store: Store, settings: Settings, *, lease_ttl: float, options: dict[str, Any], is_implicit: bool = False
    ) -> None:
        self.store = store
        self.settings = settings if settings.executor is not None else replace(settings, executor=shared_threads())
        self.clock = settings.clock
        self.lease_ttl = lease_ttl
        self.workflows: dict[str, WorkflowDefinition] = {}
        # Process options for all workflows driven here.
        self.process_options = options
        self._heartbeat = heartbeat_of(store, lease_ttl, settings.clock)
        self._drives: set[Driving] = set()
        # When the leases that are not driven yet were asked for: they are ours for certain from then on.
        self._asked_at: dict[str, float] = {}
        # An in-memory store that nobody asked for: whoever relies on it by suspending is told.
        self._is_implicit = is_implicit

    def register(self, workflow: WorkflowDefinition) -> None:
        """Let runs of this workflow be driven here."""
        if not getattr(workflow, "is_perdure_workflow", False):
            raise TypeError(f"{workflow!r} is not a workflow; decorate the function with @workflow")
        known = self.workflows.setdefault(workflow.name, workflow)
        if known is not workflow and known.fn is not workflow.fn:
            raise ValueError(f"two workflows are called {workflow.name!r}; give one another name: @workflow(name=...)")
        self.workflows[workflow.name] = workflow

    def beginning(
        self, workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
    ) -> RunStart:
        """The run as it is to be created. Raises `InvalidInput` and refuses bad ids; nothing is written."""
        encoded, digest, arguments = workflow.input(self.settings.codec, args, kwargs)
        new = NewRun(
            id=check_id(options["id"], "a run's id") if "id" in options else str(uuid.uuid4()),
            workflow=workflow.name,
            input=encoded,
            input_hash=digest,
            seed=random_bytes(),
            definition_hash=workflow.definition_hash,
            **columns_of(options),
        )
        return RunStart(new, arguments=arguments)

    async def begin(
        self, workflow: WorkflowDefinition, start: RunStart, near: dict[str, Any], *, retry_failed: bool = False
    ) -> Driving | None:
        """Create the run and start driving it. None when it is there already, or is not to start now: then it may `go_on`."""
        run_id = start.new.id
        joined = joinable(self.store, run_id)
        # A run that is to start later is left to whoever works then.
        ttl = None if joined or start.new.start_at is not None else self.lease_ttl
        created = await self.create(start, ttl)
        if created.claim is not None:
            return self.drive(workflow, created.claim, near, arguments=start.arguments)
        if retry_failed and created.run.ended and created.run.status != "completed":
            await self.reopen(run_id)
        return None

    async def go_on(self, run_id: str, workflow: WorkflowDefinition | None, near: dict[str, Any], *, wait: bool) -> Outcome[Any]:
        """Drive a run that exists if it is due; otherwise give its present state. Waits for a live worker that has it."""

        async def look() -> Outcome[Any] | None:
            joined = joinable(self.store, run_id)
            if joined is not None:
                outcome = await joined.joined()
                # It may have become due again before it had left memory.
                if not isinstance(outcome, Suspended) or not self._is_due(await self.row(run_id)):
                    return outcome
            row = await self.row(run_id)
            if row.ended:
                return self.ended(row)
            if row.lacks_input:
                reason = f"run {run_id!r} was saved without its arguments; give it them with wf.run(..., id={run_id!r})"
                raise InvalidInput(row.workflow or "of this run", reason)
            definition = workflow or self.definition(row.workflow)
            try:
                claim = await self.acquire(run_id)
            except LeaseHeld:
                if not wait or row.held:
                    raise
                return None
            if claim is None:  # not due, or ended since it was looked at
                return self._standing(await self.row(run_id))
            return await self.drive(definition, claim, near).joined()

        return await self.until(look)

    async def create(self, start: RunStart, ttl: float | None) -> Created:
        """Create the run, or find it; with `ttl` a new one is leased."""
        asked_at = elapsed()
        verb = self.store.create(
            start.new,
            ttl=ttl,
            entries=start.entries,
            inbox=start.inbox,
            created_at=start.created_at,
            now=self.clock.store_now(),
        )
        created = await answered(verb, self._give_back_created)
        if created.claim is not None:
            self._asked_at[created.claim.lease.token] = asked_at
        return created

    async def claim(self, limit: int, queues: Collection[str] | None) -> Claims:
        """Claim due runs of the workflows known here."""
        asked_at = elapsed()
        verb = self.store.claim(limit, self.lease_ttl, tuple(self.workflows), queues, now=self.clock.store_now())
        claims = await answered(verb, self._give_back_claims)
        self._asked_at.update((claim.lease.token, asked_at) for claim in claims.claims)
        return claims

    async def acquire(self, run_id: str) -> Claim | None:
        """Lease this run if it is due."""
        asked_at = elapsed()
        verb = self.store.acquire(run_id, self.lease_ttl, now=self.clock.store_now())
        claim = await answered(verb, self._give_back)
        if claim is not None:
            self._asked_at[claim.lease.token] = asked_at
        return claim

    async def _give_back(self, claim: Claim | None) -> None:
        """Whoever asked for it was cancelled. If this does not work, the lease expires by itself."""
        if claim is not None:
            with contextlib.suppress(Exception):
                await self.store.release(claim.lease, now=self.clock.store_now())

    async def _give_back_created(self, created: Created) -> None:
        await self._give_back(created.claim)

    async def _give_back_claims(self, claims: Claims) -> None:
        for claim in claims.claims:
            await self._give_back(claim)

    def drive(
        self,
        workflow: WorkflowDefinition,
        claim: Claim,
        near: dict[str, Any],
        *,
        arguments: Arguments | None = None,
        is_background: bool = False,
    ) -> Driving:
        """Start driving a claimed run. With `arguments` it was created just now: nothing need be read, nothing has changed."""
        drive = Drive(
            _body(workflow, claim, self.settings) if arguments is None else partial(_called, workflow, arguments),
            workflow.hints,
            claim,
            self.settings,
            Options.nearest(workflow.process_options, self.process_options, near),
            self.store,
            heartbeat=self._heartbeat,
            ttl=self.lease_ttl,
            asked_at=self._asked_at.pop(claim.lease.token, elapsed()),
            listeners=listeners_of(key := drive_key(self.store, claim.run.id)),
        )
        driving = Driving(drive, key, self.driven, is_background=is_background)
        self._drives.add(driving)
        return driving

    async def view(self, run_id: str) -> View:
        """The run as it stands: from memory if it is driven here, otherwise from the store. Raises `RunNotFound`."""
        joined = joinable(self.store, run_id)
        if joined is not None:
            return joined.drive.view()
        view = await load_view(self.store, check_id(run_id, "a run's id"))
        if view is None:
            raise RunNotFound(run_id)
        return view

    def see_through(self, run_id: str, workflow: WorkflowDefinition, near: dict[str, Any]) -> None:
        """Drive the run in the background whenever it is due, until it has ended."""
        seeing = self._drive_whenever_due(run_id, workflow, near)
        task = asyncio.get_running_loop().create_task(seeing, name=f"perdure-run:{run_id}")
        _seen_through.add(task)
        task.add_done_callback(lambda task: _no_longer_seen_through(run_id, task))

    async def _drive_whenever_due(self, run_id: str, workflow: WorkflowDefinition, near: dict[str, Any]) -> None:
        while True:
            watch = asyncio.ensure_future(self.store.watch(POLL_SECONDS))
            timer = None
            try:
                await asyncio.sleep(0)  # the watch begins before the look, so that nothing happens in between
                outcome = await self._driven_once(run_id, workflow, near)
                if not isinstance(outcome, Suspended):
                    return
                if outcome.wake_at is not None:
                    timer = self.clock.call_at(instant(outcome.wake_at), watch.cancel)
                await asyncio.wait([watch])
                if not watch.cancelled():
                    watch.result()
            finally:
                watch.cancel()
                if timer is not None:
                    timer.cancel()

    async def _driven_once(self, run_id: str, workflow: WorkflowDefinition, near: dict[str, Any]) -> Outcome[Any] | None:
        """How the run stands after it was driven, if it was due; None when it is gone."""
        try:
            return await self.go_on(run_id, workflow, near, wait=True)
        except (LeaseHeld, LeaseLost):  # an operator or another worker has it, for the time being
            return Suspended(run_id)
        except RunNotFound:
            return None

    async def outcome(self, run_id: str, *, through_waits: bool = False) -> Outcome[Any]:
        """The outcome when the run has ended, or (unless `through_waits`) is suspended; waits while it is neither."""

        async def join() -> Outcome[Any] | None:
            """What the drive here comes to; None when there is none, or the waiting goes on after it."""
            joined = joinable(self.store, run_id)
            if joined is not None:
                with contextlib.suppress(LeaseLost):  # then it goes on elsewhere
                    outcome = await joined.joined()
                    return None if through_waits and isinstance(outcome, Suspended) else outcome
            return None

        async def look() -> Outcome[Any] | None:
            if joinable(self.store, run_id) is not None:
                return await join()
            row = await self.row(run_id)
            if row.ended:
                return self.ended(row)
            is_waiting = row.status == "suspended" and not self._is_due(row)
            return _suspended(row) if is_waiting and not through_waits else None

        # First without watching the store, which is not needed for a run that is driven here to its end.
        ended = await join()
        return ended if ended is not None else await self.until(look)

    async def until(self, look: Callable[[], Awaitable[T | None]]) -> T:
        """What `look` gives once it gives something; looked for again whenever the store may have changed."""
        while True:
            watch = asyncio.ensure_future(self.store.watch(POLL_SECONDS))
            try:
                await asyncio.sleep(0)  # the watch begins before the look, so that nothing happens in between
                found = await look()
                if found is not None:
                    return found
                await watch
            finally:
                watch.cancel()

    async def signal(self, run_id: str, name: str, payload: Any, *, dedupe: str | None) -> None:
        """Put a signal into the run's inbox and let a drive here know."""
        check_id(name, "a signal's name")
        try:
            encoded, _ = self.settings.codec.dump(payload, path="payload")
        except ValueNotStorable as reason:
            raise InvalidInput(f"signal {name}", str(reason)) from reason
        now = self.clock.store_now()
        await self.store.signal(check_id(run_id, "a run's id"), name, encoded, dedupe=dedupe, now=now)
        joined = joinable(self.store, run_id)
        if joined is not None:
            joined.drive.look_at_inbox()

    async def cancel(self, run_id: str) -> None:
        """Ask the run to stop and let a drive here know."""
        await self.store.cancel(check_id(run_id, "a run's id"), now=self.clock.store_now())
        joined = joinable(self.store, run_id)
        if joined is not None:
            joined.drive.cancel()

    async def reopen(self, run_id: str) -> None:
        """Let a failed, cancelled or dead run go on without what failed."""
        row = await self.row(run_id)
        if row.status == "completed":
            raise RunFinished(run_id, row.status)
        try:
            entries = entries_in_force(await self.store.journal(run_id))
        except ValueError as reason:
            raise SnapshotCorrupt(run_id, "the journal", str(reason)) from reason
        await self.store.reopen(run_id, _to_set_aside(row, entries), now=self.clock.store_now())

    async def row(self, run_id: str) -> RunRow:
        """The run's row. Raises `RunNotFound`."""
        row = await self.store.get(check_id(run_id, "a run's id"))
        if row is None:
            raise RunNotFound(run_id)
        return row

    def ended(self, row: RunRow) -> Outcome[Any]:
        """The outcome of a run that has ended."""
        workflow = self.workflows.get(row.workflow)
        return outcome_of(self.settings.codec, row, workflow.hints if workflow is not None else Hints())

    def _standing(self, row: RunRow) -> Outcome[Any] | None:
        """How a run stands that nobody drives; None when somebody does by now."""
        if row.ended:
            return self.ended(row)
        return None if row.status == "running" else _suspended(row)

    def definition(self, name: str) -> WorkflowDefinition:
        """The registered workflow with this name."""
        try:
            return self.workflows[name]
        except KeyError:
            known = ", ".join(sorted(self.workflows)) or "none"
            raise LookupError(f"workflow {name!r} is not registered here (registered: {known}); pass it in workflows=") from None

    async def close_store(self) -> None:
        """Close the store; when others have joined a drive of ours, after that."""
        if self._drives:
            await answered(asyncio.wait([driving.task for driving in self._drives]))
        await self.store.close()

    async def drain(self) -> None:
        """Let the steps that run here end, and give every run back. Those who wait for one are told that it is suspended."""
        for driving in self._drives:
            driving.drive.stop()
        if self._drives:
            await asyncio.wait([driving.task for driving in self._drives])

    def _is_due(self, row: RunRow) -> bool:
        return row.wake_at is not None and row.wake_at <= self.clock.now()

    def driven(self, driving: Driving) -> None:
        """A drive of ours is over."""
        task = driving.task
        self._drives.discard(driving)
        outcome = None if task.cancelled() or task.exception() is not None else task.result()
        is_suspended = isinstance(outcome, Suspended)
        driving.drive.telling.listeners.no_longer_driven(has_ended=outcome is not None and not is_suspended)
        if is_suspended and self._is_implicit and self.store not in _told:
            _told.add(self.store)
            warnings.warn(
                f"run {driving.drive.run.id!r} is suspended in memory and gone when this process ends; "
                'pass store="sqlite:///app.db" or set PERDURE_STORE',
                PerdureWarning,
                stacklevel=2,
            )


def _body(workflow: WorkflowDefinition, claim: Claim, settings: Settings) -> Callable[[Drive], Any]:
    try:
        arguments = workflow.decoded(settings.codec, claim.run.input)
    except ValueError as reason:
        corrupt = SnapshotCorrupt(claim.run.id, "the input", str(reason))

        async def refuse(drive: Drive) -> Any:
            drive.fail(corrupt)

        return refuse
    if is_changed(claim.run.definition_hash, workflow.definition_hash):
        return _after_change(workflow, arguments)
    return partial(_called, workflow, arguments)


def _called(workflow: WorkflowDefinition, arguments: Arguments, drive: Drive) -> Coroutine[Any, Any, Any]:
    return workflow.body(drive, *arguments)


def _after_change(workflow: WorkflowDefinition, arguments: Arguments) -> Callable[[Drive], Any]:
    async def body(drive: Drive) -> Any:
        reason = f"the code of {workflow.name!r} has changed since the run was created; what is recorded is matched by key"
        drive.react(drive.options.on_definition_change, SnapshotMismatch(drive.run.id, reason))
        return await workflow.body(drive, *arguments)

    return body


def _suspended(row: RunRow) -> Suspended:
    wake_at = None if row.wake_at is None else moment(row.wake_at)
    return Suspended(row.id, wake_at, tuple(address.name for address in row.waiting_for))


def _to_set_aside(row: RunRow, entries: list[Entry]) -> set[str]:
    """The keys of what ended the run. A failure that the body handled stays: other steps may have been taken because of it."""
    if row.status != "failed":
        return set()
    failed = {entry.key for entry in entries if entry.phase == "close" and not entry.ok}
    known = failed_keys_of(row.outcome or b"null")
    # Where the body ended by an error of its own nobody can tell which failure it was about.
    return failed if known is None else failed & known


def _no_longer_seen_through(run_id: str, task: asyncio.Task[None]) -> None:
    _seen_through.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("run %r is no longer driven here: %s", run_id, error)
