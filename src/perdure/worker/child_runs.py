"""The children of runs that this process drives: created in the same store, or in memory for a run without one.

A child is a run like any other. A worker that has room and knows its workflow drives it at once; otherwise it is claimed as every
run is, here or by another process. `wf.run` has no worker: there a child is driven for its parent, and the parent comes back when
the child is due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from perdure.aio.own_tasks import start_own_task
from perdure.codec.outcomes import store_exception
from perdure.engine.drive import Drive
from perdure.errors import PerdureError, PersistenceError, RunFinished, RunNotFound
from perdure.model.durations import instant
from perdure.model.records import Claim, Created, Lease, NewRun, RunRow, Signal
from perdure.options import EngineSettings, Options
from perdure.result import Outcome, Suspended
from perdure.snapshots.importer import Arguments, RunStart, import_state, resolve_state
from perdure.store import Store
from perdure.worker.active_runs import ActiveRun
from perdure.worker.workflow_body import WorkflowDefinition, body_of, body_with, call_body

T = TypeVar("T")


class ChildWorker(Protocol):
    """The worker that may drive a child at once."""

    def has_room(self, besides: int = 0) -> bool: ...
    def adopt(self, run: ActiveRun, /) -> None: ...


def no_worker(_: str) -> None:
    """Stands for a host on which no worker drives children at once."""


class ChildHost(Protocol):
    """What children ask of the host of their parent."""

    leasing: int

    @property
    def find_worker(self) -> Callable[[str], ChildWorker | None]: ...
    @property
    def store(self) -> Store: ...
    @property
    def workflows(self) -> dict[tuple[str, int], WorkflowDefinition]: ...
    async def with_state(
        self, workflow: WorkflowDefinition, start: RunStart, options: Mapping[str, Any], *, is_named: bool
    ) -> RunStart: ...
    async def create(self, workflow: WorkflowDefinition, start: RunStart, *, may_lease: bool = False) -> Created: ...
    def drive(
        self,
        workflow: WorkflowDefinition,
        claim: Claim,
        options: dict[str, Any],
        *,
        arguments: Arguments | None = None,
        is_background: bool = False,
    ) -> ActiveRun: ...
    async def cancel(self, run_id: str, *, undo: bool = True) -> None: ...
    async def reopen(self, run_id: str) -> None: ...
    def register(self, workflow: WorkflowDefinition) -> None: ...


class StoredChildren:
    """Children in the store of their parent."""

    def __init__(self, host: ChildHost) -> None:
        self._host = host

    async def create(self, workflow: WorkflowDefinition, new: NewRun, arguments: Arguments) -> RunRow:
        """The child, new or found; driven here at once if a worker has room for it."""
        host = self._host
        worker = host.find_worker(new.queue) if (new.workflow, new.version) in host.workflows else None
        may_lease = worker is not None and worker.has_room(host.leasing)
        host.leasing += may_lease
        try:
            start = await _load(new.id, host.with_state(workflow, RunStart(new, arguments=arguments), {}, is_named=True))
            created = await host.create(workflow, start, may_lease=may_lease)
            if created.claim is not None and worker is not None:
                worker.adopt(host.drive(workflow, created.claim, {}, arguments=start.arguments, is_background=True))
        finally:
            host.leasing -= may_lease
        return created.run

    async def get(self, run_id: str) -> RunRow | None:
        """The child as it stands."""
        return await self._host.store.get(run_id)

    async def cancel(self, run_id: str, *, undo: bool = True) -> None:
        """Ask the child to stop."""
        with contextlib.suppress(RunNotFound, RunFinished):
            await self._host.cancel(run_id, undo=undo)

    async def reopen(self, run_id: str) -> None:
        """Let a child go on that ended badly."""
        await self._host.reopen(run_id)

    def resume(self, workflow: WorkflowDefinition, run: RunRow) -> None:
        """Workers drive it."""

    def keeps_parent_in_memory(self) -> bool:
        """Not here: a parent that waits leaves its place in the worker to others."""
        return False

    def wake_at(self) -> int | None:
        """The child's end wakes the parent."""
        return None

    def attend(self, parent: Drive) -> None:
        """This drive is the parent: told by its inbox, as every run is."""


class ChildrenWithoutWorker(StoredChildren):
    """Children of one run of `wf.run` or `wf.start`: driven for their parent, which waits for them in memory."""

    def __init__(self, host: ChildHost, drive_child: Callable[[str], Any]) -> None:
        super().__init__(host)
        self._drive_child = drive_child
        self._driven: set[str] = set()
        self._wake_at: dict[str, int] = {}
        self._parent: Drive | None = None

    async def create(self, workflow: WorkflowDefinition, new: NewRun, arguments: Arguments) -> RunRow:
        self._host.register(workflow)
        return await super().create(workflow, new, arguments)

    def resume(self, workflow: WorkflowDefinition, run: RunRow) -> None:
        """Drive it until it ends or suspends."""
        self._host.register(workflow)
        self._drive_until_rest(run.id)

    async def cancel(self, run_id: str, *, undo: bool = True) -> None:
        await super().cancel(run_id, undo=undo)
        self._drive_until_rest(run_id)  # to its end: it may be suspended

    def _drive_until_rest(self, run_id: str) -> None:
        if run_id not in self._driven:
            self._driven.add(run_id)
            self._wake_at.pop(run_id, None)
            driving = start_own_task(self._drive_child(run_id))
            driving.add_done_callback(lambda done: self._note_end(run_id, done))

    def keeps_parent_in_memory(self) -> bool:
        return bool(self._driven)

    def wake_at(self) -> int | None:
        return min(self._wake_at.values(), default=None)

    def attend(self, parent: Drive) -> None:
        self._parent = parent

    def _note_end(self, run_id: str, driving: Any) -> None:
        self._driven.discard(run_id)
        if not driving.cancelled() and driving.exception() is None:
            outcome = driving.result()
            if isinstance(outcome, Suspended) and outcome.wake_at is not None:
                self._wake_at[run_id] = instant(outcome.wake_at)
        if self._parent is not None and not self._parent.is_closed:
            self._parent.waits.look()
            self._parent.body.schedule()


class ChildrenInMemory:
    """Children of a run without a store: each is driven here, and its end is put into the inbox of its parent's drive."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        # Each child as it was created, or as it stands since its end.
        self._rows: dict[str, RunRow] = {}
        self._drives: dict[str, Drive] = {}
        # Set when the drive exists, of which these are the children.
        self.parent: Drive | None = None

    async def create(self, workflow: WorkflowDefinition, new: NewRun, arguments: Arguments) -> RunRow:
        """The child, driven from now on."""
        now, options = self._settings.clock.now(), Options.nearest(workflow.process_options)
        values = {name: getattr(new, name) for name in NewRun.__struct_fields__}
        row = RunRow(**values, status="running", wake_at=None, attempts=1, created_at=now, updated_at=now)
        lease = Lease(run_id=row.id, epoch=0, token="", until=0)
        claim = Claim(lease=lease, run=row, journal=[], inbox=[], inbox_seq=0, item_counts={})
        claim, body = await _load(new.id, start_in_memory(workflow, claim, arguments, options))
        self._rows[new.id] = claim.run
        start_own_task(self._see_through(workflow, claim, body, options))
        return claim.run

    async def _see_through(
        self, workflow: WorkflowDefinition, claim: Claim, body: Callable[[Drive], Coroutine[Any, Any, Any]], options: Options
    ) -> None:
        """Drive the child, and tell the parent when it has ended."""
        row = claim.run
        try:
            await drive_in_memory(workflow, body, claim, self._settings, options, partial(self._drives.__setitem__, row.id))
            self._rows[row.id] = self._drives[row.id].run
        except PerdureError as error:
            self._rows[row.id] = msgspec.structs.replace(row, status="failed", outcome=store_exception(error))
        finally:
            parent = self.parent
            if parent is not None and not parent.is_closed:
                seq = parent.waits.inbox_seq = parent.waits.inbox_seq + 1
                parent.waits.receive([Signal(seq=seq, kind="child", name=row.parent_key or "", payload=b"null")])

    async def get(self, run_id: str) -> RunRow | None:
        """The child as it stands."""
        return self._rows.get(run_id)

    async def cancel(self, run_id: str, *, undo: bool = True) -> None:
        """Ask the child to stop."""
        drive = self._drives.get(run_id)
        if drive is not None and not drive.is_closed:
            drive.cancel(undo=undo)

    async def reopen(self, run_id: str) -> None:
        """Nothing in memory is retried."""

    def resume(self, workflow: WorkflowDefinition, run: RunRow) -> None:
        """It is driven already."""

    def keeps_parent_in_memory(self) -> bool:
        """Nothing leaves memory."""
        return True

    def wake_at(self) -> int | None:
        """Nothing leaves memory."""
        return None


async def _load(run_id: str, loading: Awaitable[T]) -> T:
    """Return what the child starts with. If its state cannot be loaded, the parent's attempt ends, as if the store failed."""
    try:
        return await loading
    except PersistenceError:
        raise
    except Exception as failure:  # of the user's function
        raise PersistenceError(f"the state for run {run_id!r} could not be loaded", repr(failure)) from failure


async def start_in_memory(
    workflow: WorkflowDefinition, claim: Claim, arguments: Arguments, options: Options
) -> tuple[Claim, Callable[[Drive], Coroutine[Any, Any, Any]]]:
    """Return the claim on a new run without a store, with the state that the workflow has for it, and its body."""
    state = await resolve_state(workflow.process_options)
    if state is None:
        return claim, partial(call_body, workflow, arguments)
    row = msgspec.structs.replace(claim.run, definition_hash=workflow.definition_hash)
    start = import_state(row, state, options.on_definition_change)
    run = msgspec.structs.replace(
        row,
        seed=start.new.seed,
        definition_hash=start.new.definition_hash,
        metadata=start.new.metadata,
        generation=start.new.generation,
        created_at=row.created_at if start.created_at is None else start.created_at,
    )
    last = max((signal.seq for signal in start.inbox), default=0)
    loaded = msgspec.structs.replace(claim, run=run, journal=list(start.entries), inbox=list(start.inbox), inbox_seq=last)
    return loaded, body_with(workflow, arguments, run.definition_hash)


async def drive_in_memory(
    workflow: WorkflowDefinition,
    body: Callable[[Drive], Coroutine[Any, Any, Any]],
    claim: Claim,
    settings: EngineSettings,
    options: Options,
    on_drive: Callable[[Drive], None] | None = None,
) -> Outcome[Any]:
    """The outcome of a run without a store, driven to its end, however often it starts over. `on_drive` gets each drive."""
    while True:
        children = ChildrenInMemory(settings)
        children.parent = drive = Drive(body, workflow.hints, claim, settings, options, child_runs=children)
        if on_drive is not None:
            on_drive(drive)
        outcome = await drive.drive()
        if not drive.is_continued:
            return outcome
        claim = _claim_again(claim, drive)
        body = body_of(workflow, claim, settings.codec)


def _claim_again(claim: Claim, drive: Drive) -> Claim:
    """The claim on a run that has started over."""
    run = msgspec.structs.replace(drive.run, status="running", wake_at=None, attempts=1)
    return msgspec.structs.replace(claim, run=run, journal=[], inbox=list(drive.waits.inbox))
