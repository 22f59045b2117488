"""The host: runs of one store, leased and driven in this process.

`Runtime`, `wf.run` and `wf.start` turn calls into store verbs and drives through a host.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from perdure.aio.pending_write import await_reply
from perdure.codec.outcomes import Hints, outcome_of
from perdure.engine.drive import Drive
from perdure.engine.heartbeat import heartbeat_of
from perdure.engine.subscriptions import subscriptions_of
from perdure.errors import InvalidInput, NotUndone, PerdureWarning, RunConflict, RunNotFound, SnapshotCorrupt, ValueNotStorable
from perdure.model.approvals import check_signal_name
from perdure.model.clock import Clock, StoreClock, elapsed
from perdure.model.durations import MICROSECOND, moment
from perdure.model.ids import check_id, random_bytes
from perdure.model.journal import CancelRequest
from perdure.model.logs import log, run_fields
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from perdure.model.records import Claim, Claims, Created, NewRun, RunRow, Signal, WorkflowVersion
from perdure.options import EngineSettings, Options, columns_of
from perdure.result import Outcome, Suspended
from perdure.snapshots.consistent_view import View, load_view
from perdure.snapshots.effects import not_undone
from perdure.snapshots.importer import Arguments, RunStart, given_state, has_state, import_state, read_state, resolve_state
from perdure.store import Outbox, Store, require
from perdure.worker.active_runs import ActiveRun, active_runs, drive_key, wait_until_over
from perdure.worker.child_runs import ChildWorker, StoredChildren, no_worker
from perdure.worker.retry_run import reopen_run
from perdure.worker.workflow_body import WorkflowDefinition, body_of, call_body

# How long a drain waits, beyond `drain_after`, for drives on the event loops of other threads.
FOREIGN_LOOP_PATIENCE: Final = 10.0

# How many runs of a batch are created at once: enough for few commits, and each is a task.
CREATED_AT_ONCE: Final = 1000

# Implicit stores in memory about which the user was warned.
_warned_about: weakref.WeakSet[Store] = weakref.WeakSet()


class Host:
    """Leases runs of one store and drives them.

    `is_implicit`: the store is in memory and the user did not ask for it, so a run that has an id or suspends causes a warning.
    """

    def __init__(
        self,
        store: Store,
        settings: EngineSettings,
        *,
        lease_ttl: float,
        process_options: dict[str, Any],
        is_implicit: bool = False,
    ) -> None:
        self.store = store
        # Under a clock that gives the store its instants there is no other time.
        self._store_clock = StoreClock(settings.clock, store) if settings.clock.store_now() is None else None
        self.clock: Clock = settings.clock if self._store_clock is None else self._store_clock
        self.settings = settings
        self.lease_ttl = lease_ttl
        self.process_options = process_options
        self.workflows: dict[WorkflowVersion, WorkflowDefinition] = {}
        self._heartbeat = heartbeat_of(store, lease_ttl)
        # When each lease that is not driven yet was asked for, by its token: its time-to-live counts from then at the earliest.
        self._asked_at: dict[str, float] = {}
        self._is_implicit = is_implicit
        # The worker that serves a queue, if there is one here, and how many children are being leased for it right now.
        self.find_worker: Callable[[str], ChildWorker | None] = no_worker
        # Whether a worker of this process drives its runs, or none is needed; and whether a call that waited for a run has said
        # that there is none.
        self.has_worker: Callable[[], bool] = lambda: True
        self.has_warned_of_worker = False
        self.leasing = 0

    def register(self, workflow: WorkflowDefinition) -> None:
        """Let runs of this workflow be driven here, in its version."""
        if not getattr(workflow, "is_perdure_workflow", False):
            raise TypeError(f"{workflow!r} is not a workflow; decorate the function with @workflow")
        for name in (workflow.name, *workflow.aliases):
            version = name, workflow.version
            known = self.workflows.setdefault(version, workflow)
            if known is not workflow and known.fn is not workflow.fn:
                raise ValueError(
                    f"two workflows are called {name!r} and have version {workflow.version}; "
                    "give one another name or version: @workflow(name=..., version=...)"
                )
            self.workflows[version] = workflow

    def definition(self, name: str) -> WorkflowDefinition:
        """The newest version of the workflow with this name that is registered."""
        versions = [version for known, version in self.workflows if known == name]
        if versions:
            return self.workflows[name, max(versions)]
        names = ", ".join(sorted({known for known, _ in self.workflows})) or "none"
        raise LookupError(f"workflow {name!r} is not registered here (registered: {names}); pass it in workflows=")

    def definition_of(self, run: RunRow) -> WorkflowDefinition:
        """The workflow of this run, in the version in which it was started. Raises `LookupError`."""
        found = self.workflows.get((run.workflow, run.version))
        if found is not None:
            return found
        self.definition(run.workflow)
        raise LookupError(
            f"run {run.id!r} goes on in version {run.version} of workflow {run.workflow!r}, and registered here is "
            f"{self.describe_registered(run.workflow)}; pass version {run.version} in workflows= too"
        )

    def describe_registered(self, name: str) -> str:
        """The registered versions of this workflow, in words; without one, the names of those that are registered."""
        versions = sorted(version for known, version in self.workflows if known == name)
        if not versions:
            return "no workflow of this name, but " + (", ".join(sorted({known for known, _ in self.workflows})) or "none at all")
        return f"{'version' if len(versions) == 1 else 'versions'} {', '.join(map(str, versions))}"

    def new_run(
        self,
        workflow: WorkflowDefinition,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
    ) -> RunStart:
        """The run as it is to be created. Raises `InvalidInput` and refuses bad ids; nothing is written."""
        encoded, digest, arguments = workflow.encode_input(self.settings.codec, args, kwargs)
        new = NewRun(
            id=check_id(options["id"], "a run's id") if "id" in options else str(uuid.uuid4()),
            workflow=workflow.name,
            version=workflow.version,
            input=encoded,
            input_hash=digest,
            seed=random_bytes(),
            definition_hash=workflow.definition_hash,
            **columns_of(options, self.clock.now()),
        )
        if "id" in options and self._is_implicit and not has_state(workflow.process_options, options):
            # At the caller of wf.run, wf.start, runtime.run or runtime.start.
            self._warn_of_memory(f"run {new.id!r} has an id, but there is no store: it is kept in memory", stacklevel=5)
        return RunStart(new, arguments=arguments)

    async def with_state(
        self, workflow: WorkflowDefinition, start: RunStart, options: Mapping[str, Any], *, is_named: bool
    ) -> RunStart:
        """Return the run with the state from which it is to start, if the options or the workflow name one.

        A run that is in the store already (only one that `is_named` can be) goes on with what is recorded there, and nothing is
        loaded. Memory that nobody asked for is no such store: a call that brings a state expects that, so there the state takes
        the place of a run that has failed or was cancelled. Raises `SnapshotMismatch`, `SnapshotFormatError`, and whatever the
        user's function raises.
        """
        if not has_state(workflow.process_options, options):
            return start
        found = await self.store.get(start.new.id) if is_named else None
        is_replaced = (
            found is not None and self._is_implicit and has_state(options) and found.ended and found.status != "completed"
        )
        if found is not None and not is_replaced:
            if self._is_implicit:
                await self._warn_of_unused_state(found, options)
            return start
        state = await resolve_state(workflow.process_options, options)
        if state is None:
            return start
        if is_replaced:
            await require(self.store, "operators").delete(start.new.id)
        on_change = Options.nearest(workflow.process_options, self.process_options, options).on_definition_change
        without_failed = bool(options.get("retry_failed"))
        return import_state(start.new, state, on_change, without_failed=without_failed, is_named=is_named)

    async def _warn_of_unused_state(self, found: RunRow, options: Mapping[str, Any]) -> None:
        """Warn if the call brings results that the run in memory, which goes on without them, has not recorded."""
        given = given_state(options)
        if given is None or callable(given):
            return
        steps, known = read_state(given).steps, (await self.view(found.id)).resume_state().steps
        unused = [
            key for key, step in steps.items() if key not in known or (step.ok, step.value) != (known[key].ok, known[key].value)
        ]
        if unused:
            message = (
                f"run {found.id!r} is in the memory of this process, {found.status}, and goes on with what it has recorded; "
                f"the state that was passed, with another result of {', '.join(map(repr, unused[:5]))}, is not used: "
                "pass another id=, or a store="
            )
            warnings.warn(message, PerdureWarning, stacklevel=5)

    async def create_and_drive(
        self,
        workflow: WorkflowDefinition,
        start: RunStart,
        options: dict[str, Any],
        *,
        may_drive: bool = True,
        is_background: bool = False,
        retry_failed: bool = False,
    ) -> ActiveRun | None:
        """Create the run and start driving it.

        None when it was there already (a failed one is reopened with `retry_failed`), when it is to start later, or when it may
        not be driven here: then a worker may claim it.
        """
        created = await self.create(workflow, start, may_lease=may_drive)
        if created.claim is not None:
            return self.drive(workflow, created.claim, options, arguments=start.arguments, is_background=is_background)
        if retry_failed and created.run.ended and created.run.status != "completed":
            self.definition_of(created.run)  # refuses before anything has changed
            await self.reopen(start.new.id)
        return None

    async def create(self, workflow: WorkflowDefinition, start: RunStart, *, may_lease: bool = False) -> Created:
        """Create the run, or find it. A new one is leased if it `may_lease` and is not to start later."""
        is_leased = may_lease and start.new.start_at is None
        asked_at, sent_at = elapsed(), self.clock.now()
        created = await self._create(workflow, start, self.lease_ttl if is_leased else None)
        if created.is_new and self._store_clock is not None:
            self._store_clock.observe(created.run.updated_at, sent_at)
        if created.claim is not None:
            self._asked_at[created.claim.lease.token] = asked_at
        return created

    async def create_in(self, connection: Any, workflow: WorkflowDefinition, start: RunStart) -> None:
        """Create the run, or find it, in the transaction of the caller's that is open on this connection."""
        outbox = await require(self.store, "outbox").outbox(connection)
        await self._create(workflow, start, None, outbox)

    async def create_many(self, workflow: WorkflowDefinition, starts: Sequence[RunStart]) -> None:
        """Create these runs, or find them: all at once, so that they share the commits of the store.

        One that cannot be created does not keep the others from it, unless the store failed. The first error is raised when each
        has its reply.
        """
        failure: BaseException | None = None
        for first in range(0, len(starts), CREATED_AT_ONCE):
            batch = starts[first : first + CREATED_AT_ONCE]
            replies = await asyncio.gather(*(self.create(workflow, start) for start in batch), return_exceptions=True)
            failures = [reply for reply in replies if isinstance(reply, BaseException)]
            failure = failure or next(iter(failures), None)
            if any(not isinstance(each, RunConflict | InvalidInput) for each in failures):
                break
        if failure is not None:
            raise failure

    async def signal_or_create(
        self, workflow: WorkflowDefinition, start: RunStart, name: str, payload: Any, *, dedupe: str | None, may_lease: bool
    ) -> Claim | None:
        """Create the run with this signal in its inbox, or signal the one that is there, whatever its input.

        The claim of a new run, if it was leased. Raises `RunFinished`, and `RunConflict` if the run is of another workflow.
        """
        encoded = self._encode_signal(name, payload)
        seq = max((row.seq for row in start.inbox), default=0) + 1
        row = Signal(seq=seq, name=name, payload=encoded, dedupe=dedupe)
        first = start._replace(inbox=(*start.inbox, row))
        while True:
            try:
                created = await self.create(workflow, first, may_lease=may_lease)
                if created.is_new:
                    return created.claim
            except RunConflict:
                found = await self.store.get(start.new.id)
                if found is not None and found.workflow not in (workflow.name, *workflow.aliases):
                    raise
            with contextlib.suppress(RunNotFound):  # deleted since it was found: it is created after all
                await self.send_signal(start.new.id, name, encoded, dedupe)
                return None

    async def _create(
        self, workflow: WorkflowDefinition, start: RunStart, ttl: float | None, outbox: Outbox | None = None
    ) -> Created:
        """Create the run, or find it, also under a former name of the workflow."""

        def create(new: NewRun) -> Coroutine[Any, Any, Created]:
            if outbox is not None:
                return outbox.create(new, now=self.clock.store_now())
            verb = self.store.create(
                new,
                ttl=ttl,
                entries=start.entries,
                inbox=start.inbox,
                created_at=start.created_at,
                now=self.clock.store_now(),
            )
            return await_reply(verb, self._give_back)

        try:
            return await create(start.new)
        except ValueNotStorable as reason:
            raise InvalidInput(workflow.name, str(reason)) from reason
        except RunConflict:
            found = await self.store.get(start.new.id) if workflow.aliases else None
            if found is None or found.workflow not in workflow.aliases:
                raise
            return await create(msgspec.structs.replace(start.new, workflow=found.workflow))

    async def claim(self, limit: int, queues: Collection[str] | None) -> Claims:
        """Claim due runs of the workflows known here.

        Of runs that were lost with their workers this process drives one at a time: if it is what ends the process, the others
        are not lost with it once more.
        """
        asked_at, sent_at, suspects = elapsed(), self.clock.now(), 0 if active_runs.has_suspect() else 1
        now = self.clock.store_now()
        claim = self.store.claim(limit, self.lease_ttl, tuple(self.workflows), queues, suspects=suspects, now=now)
        claims = await await_reply(claim, self._give_back)
        if self._store_clock is not None:
            self._store_clock.observe(claims.now, sent_at)
        self._asked_at.update((claim.lease.token, asked_at) for claim in claims.claims)
        return claims

    async def acquire(self, run_id: str, *, due_only: bool = True) -> Claim | None:
        """Lease this run if it is due, or at any time."""
        asked_at, sent_at = elapsed(), self.clock.now()
        acquire = self.store.acquire(run_id, self.lease_ttl, due_only=due_only, now=self.clock.store_now())
        claim = await await_reply(acquire, self._give_back)
        if claim is not None:
            self._asked_at[claim.lease.token] = asked_at
            if self._store_clock is not None:
                self._store_clock.observe(claim.run.updated_at, sent_at)
        return claim

    async def ask_time(self, *, again: bool = False) -> None:
        """Return when this host has the store's time: a claim that takes nothing tells it, unless another reply has.

        A host that has never claimed since then asks `again` for what must be right to the second: clocks drift in a month.
        """
        if self._store_clock is not None and (again or not self._store_clock.has_store_time):
            sent_at = self.clock.now()
            self._store_clock.observe((await self.store.claim(0, self.lease_ttl, ())).now, sent_at)

    async def _give_back(self, leased: Created | Claims | Claim | None) -> None:
        """Release the leases in this answer of the store, whose caller was cancelled before it came."""
        if isinstance(leased, Claims):
            claims = leased.claims
        else:
            claim = leased.claim if isinstance(leased, Created) else leased
            claims = [] if claim is None else [claim]
        for claim in claims:
            with contextlib.suppress(Exception):  # if this fails, the lease expires by itself
                await self.store.release(claim.lease, now=self.clock.store_now())

    def drive(
        self,
        workflow: WorkflowDefinition,
        claim: Claim,
        options: dict[str, Any],
        *,
        arguments: Arguments | None = None,
        is_background: bool = False,
    ) -> ActiveRun:
        """Start driving a claimed run. With `arguments` it was created just now: nothing need be read, nothing has changed."""
        key, children = drive_key(self.store, claim.run.id), self._children_of_drive()
        asked_at = self._asked_at.pop(claim.lease.token, None)
        drive = Drive(
            body_of(workflow, claim, self.settings.codec) if arguments is None else partial(call_body, workflow, arguments),
            workflow.hints,
            claim,
            self.settings,
            Options.nearest(workflow.process_options, self.process_options, options),
            self.store,
            heartbeat=self._heartbeat,
            ttl=self.lease_ttl,
            asked_at=elapsed() if asked_at is None else asked_at,
            subscriptions=subscriptions_of(key),
            retired=workflow.retired,
            clock=self.clock,
            child_runs=children,
        )
        children.attend(drive)
        return active_runs.start(drive, key, self, is_background=is_background)

    def _children_of_drive(self) -> StoredChildren:
        """What creates the children of one more drive."""
        return StoredChildren(self)

    def on_drive_over(self, run: ActiveRun) -> None:
        """Let listeners and the parent know whether the run may come back, and warn if it is in memory only."""
        task, parent_id = run.task, run.drive.run.parent_id
        if parent_id is not None:
            for parent in active_runs.find_all(self.store, parent_id):
                parent.call_threadsafe(parent.drive.waits.look)
        outcome = None if task.cancelled() or task.exception() is not None else task.result()
        is_suspended = isinstance(outcome, Suspended)
        run.drive.publisher.subscriptions.remove_drive(has_ended=outcome is not None and not is_suspended)
        if is_suspended and self._is_implicit and not run.drive.is_continued:
            self._warn_of_memory(f"run {run.drive.run.id!r} is suspended in memory", stacklevel=2)

    def _warn_of_memory(self, what: str, stacklevel: int) -> None:
        """Warn, once for each store, that nothing of it survives this process."""
        if self.store not in _warned_about:
            _warned_about.add(self.store)
            message = f'{what} and gone when this process ends; pass store="sqlite:///app.db" or set PERDURE_STORE'
            if log.hasHandlers():  # otherwise it would be printed twice
                log.warning("there is no store: %s", message)
            warnings.warn(message, PerdureWarning, stacklevel)

    def stop_drives(self) -> None:
        """Let the steps that run here end, start no other, and then give every run back."""
        for run in active_runs.of(self):
            run.call_threadsafe(run.drive.stop)

    async def drain(self) -> None:
        """Let the steps that run here end, and give every run back. Calls that wait for one get `Suspended`."""
        self.stop_drives()
        driven = active_runs.of(self)
        if driven:
            await wait_until_over(driven, self.settings.drain_after + FOREIGN_LOOP_PATIENCE)

    async def close_store(self) -> None:
        """Close the store, after the drives of this host that other calls have joined."""
        driven = active_runs.of(self)
        if driven:
            await await_reply(wait_until_over(driven, FOREIGN_LOOP_PATIENCE))
        await self.store.close()

    async def view(self, run_id: str) -> View:
        """The run as it stands: from memory if it is driven here, otherwise from the store. Raises `RunNotFound`."""
        active = active_runs.find(self.store, run_id)
        if active is not None:
            return active.drive.view()
        view = await load_view(self.store, check_id(run_id, "a run's id"))
        if view is None:
            raise RunNotFound(run_id)
        return view

    async def row(self, run_id: str) -> RunRow:
        """The run's row. Raises `RunNotFound`."""
        row = await self.store.get(check_id(run_id, "a run's id"))
        if row is None:
            raise RunNotFound(run_id)
        return row

    async def progress(self, run_id: str) -> Any:
        """What the run last showed as its progress, or None. Raises `RunNotFound`."""
        row = await self.row(run_id)
        try:
            return None if row.progress is None else self.settings.codec.load(row.progress)
        except ValueError as reason:
            raise SnapshotCorrupt(run_id, "the progress", str(reason)) from reason

    def log_silent_holder(self, row: RunRow) -> bool:
        """Log that the run has to wait for the end of its lease, if its holder has missed a renewal; whether it was logged."""
        silent = self.clock.now() - row.updated_at
        if row.status != "running" or row.lease_until is None or silent < self.lease_ttl * MICROSECOND / 2:
            return False
        until = moment(row.lease_until).isoformat(timespec="seconds")
        log.info("run %r is leased by %s until %s; waiting", row.id, row.lease_owner, until, extra=run_fields(row))
        return True

    def ended_outcome(self, row: RunRow) -> Outcome[Any]:
        """The outcome of a run that has ended."""
        workflow = self.workflows.get((row.workflow, row.version))
        return outcome_of(self.settings.codec, row, workflow.hints if workflow is not None else Hints())

    async def signal(self, run_id: str, name: str, payload: Any, *, dedupe: str | None, connection: Any = None) -> None:
        """Put a signal into the run's inbox and let a drive here know; with a connection, in its transaction."""
        encoded = self._encode_signal(name, payload)
        if connection is not None:
            outbox = await require(self.store, "outbox").outbox(connection)
            await outbox.signal(check_id(run_id, "a run's id"), name, encoded, dedupe=dedupe, now=self.clock.store_now())
            return
        await self.send_signal(check_id(run_id, "a run's id"), name, encoded, dedupe)

    def _encode_signal(self, name: str, payload: Any) -> bytes:
        check_signal_name(name)
        try:
            return self.settings.codec.dump(payload, path="payload")[0]
        except ValueNotStorable as reason:
            raise InvalidInput(f"signal {name}", str(reason)) from reason

    async def send_signal(self, run_id: str, name: str, payload: bytes, dedupe: str | None) -> None:
        """Put an encoded signal into the run's inbox and let a drive here know. Raises `RunNotFound`, `RunFinished`."""
        try:
            await self.store.signal(run_id, name, payload, dedupe=dedupe, now=self.clock.store_now())
        except ValueNotStorable as reason:
            raise InvalidInput(f"signal {name}", str(reason)) from reason
        active_runs.note_change(self.store, run_id)
        for active in active_runs.find_all(self.store, run_id):
            active.call_threadsafe(active.drive.waits.look)

    async def cancel(self, run_id: str, *, undo: bool = True) -> None:
        """Ask the run to stop and let a drive here know. Raises `RunNotFound`, `RunFinished`."""
        if not undo:
            # First: the run finds it in its inbox when it is cancelled, and is cancelled by it if this process dies here.
            request = msgspec.json.encode(CancelRequest((await self.row(run_id)).epoch))
            await self.store.signal(run_id, CANCEL_WITHOUT_UNDO, request, now=self.clock.store_now())
        await self.store.cancel(check_id(run_id, "a run's id"), now=self.clock.store_now())
        active_runs.note_change(self.store, run_id)
        for active in active_runs.find_all(self.store, run_id):
            active.call_threadsafe(active.drive.cancel)

    async def refuse_not_undone(self, run_id: str) -> None:
        """Raise `NotUndone` if the run has not ended and cannot undo what it has done."""
        row = await self.store.get(check_id(run_id, "a run's id"))
        if row is not None and not row.ended and (keys := not_undone(row, await self.store.journal(run_id))):
            raise NotUndone(run_id, keys)

    async def reopen(self, run_id: str) -> None:
        """Let a failed, cancelled or dead run go on without what failed. Raises `RunNotFound`, `RunFinished`."""
        await reopen_run(self.store, await self.row(run_id), self.clock.store_now())
        active_runs.note_change(self.store, run_id)
