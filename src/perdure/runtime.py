"""`Runtime`: a store, the workflows known here, and a worker.

    async with Runtime(store="sqlite:///app.db", workflows=[checkout]) as runtime:
        run = await runtime.start(checkout, order, id="order-1")
        receipt = await run

Inside `async with` it works in the background and drains on exit. Outside it is a client: `start` writes the row, and
workers elsewhere drive it. `work()` is the worker in the foreground, `sweep()` resumes once what is due.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

from perdure.aio.own_tasks import own_context
from perdure.aio.threads import STEP_THREADS, ThreadPool
from perdure.errors import InvalidInput, OnChange, OnDivergence, StepNotStopped
from perdure.model.clock import Clock, NotBefore, SystemClock
from perdure.model.durations import Duration, instant, microseconds, seconds
from perdure.model.ids import check_id
from perdure.model.records import END_STATUSES, MAX_CONCURRENCY, EndStatus, RunInfo, check_positive
from perdure.model.retention import Retention, check_retention
from perdure.model.run_filter import RunFilter
from perdure.operations.approval_tokens import (
    DecidingAction,
    Secret,
    TokenAction,
    TokenSigner,
    decide_by_token,
    make_token,
)
from perdure.operations.approvals import UNCHANGED, PendingApproval, Verdict, decide, pending_approvals, unfinished
from perdure.operations.check_runs import CheckReport, check_runs
from perdure.operations.describe_run import RunDescription, describe_run
from perdure.operations.fork_run import fork_run
from perdure.operations.health import HealthCheck, RuntimeHealth
from perdure.operations.many_runs import BulkOptions, BulkReport, change_many
from perdure.operations.run_selection import RunSelection, run_filter
from perdure.operations.stuck_runs import stuck_runs
from perdure.options import (
    LEASE_TTL,
    EngineSettings,
    ProcessOptions,
    ScheduleOptions,
    StartOptions,
    StoredOptions,
    check_options,
    check_stored_options,
    counts_from_now,
)
from perdure.result import Err, Ok, Outcome
from perdure.run import Run
from perdure.simple_stores import WorkflowStore
from perdure.snapshots.importer import RunStart
from perdure.store import Store, require
from perdure.stores import Choice, choose_store
from perdure.worker.host import Host
from perdure.worker.outcomes import resume, run_to_outcome
from perdure.worker.queues import Queue, check_queue_names, check_queues
from perdure.worker.scheduler import Scheduler
from perdure.worker.schedules import CatchUp, Overlap, RuntimeSchedules, ScheduleInfo
from perdure.worker.worker import Worker, stop_on_signals
from perdure.worker.worker_registry import WorkerInfo, list_workers
from perdure.worker.workflow_body import WorkflowDefinition

if TYPE_CHECKING:
    from perdure.caches import StepCache
    from perdure.definition import Workflow
    from perdure.events import Listener
    from perdure.operations.approval_app import ApprovalApp
    from perdure.sync import SyncRuntime

log: Final = logging.getLogger("perdure")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Tuning(TypedDict, total=False):
    """Options of a `Runtime` that are rarely needed.

    - `unload_grace`: how long a run that waits, and whose body does I/O of its own, stays in memory without a ctx call.
    - `max_attempts`: how many attempts in a row may fail without recording anything before a run is `dead`.
    - `drain_after`: how long a worker that stops lets running steps go on; what is left then is called again elsewhere.
    - `cancel_grace`: how long a body that was cancelled may clean up; after that it is left, and its compensations run.
    - `max_blocked`: how long the event loop may be blocked before other workers take its runs over. None: it is only logged.
    - `clock`: where the time comes from; for tests.
    """

    unload_grace: Duration
    max_attempts: int
    drain_after: Duration
    cancel_grace: Duration
    max_blocked: Duration | None
    clock: Clock


class Runtime:
    """Starts, drives, signals and lists the runs of one store.

    - `store`: a store or a DSN. Without it, `PERDURE_STORE` in the environment; without that, the memory of this process.
    - `workflows`: the workflows whose runs may be driven here, all versions.
    - `deps`: what bodies get as `ctx.deps`.
    - `cache`: where keyed steps share their results between runs.
    - `on_event`: a listener for the events of the runs that are driven here.
    - `strict`: whether a value that can be stored only in part is refused. By default it is, if there is a store.
    - `on_changed_arguments`: what happens when a recorded step is called with other arguments: `warn`, `error` or `ignore`.
    - `on_unknown_steps`: what happens when a function has ended and never asked for a step of the snapshot or resume state with
      which the run began: `warn`, `error` or `ignore`.
    - `on_definition_change`: what happens when a run goes on in other code: `warn`, `error` or `ignore`.
    - `on_divergence`: what happens when the code asks for something new, or ends, while recorded results are unused: `stop`, or
      `run` it all the same. By default `stop`, but `run` where these results come from a snapshot or resume state.
    - `executors`: executors by name, for steps with `executor="name"`.
    - `concurrency`: how many runs are driven at a time in this process, and how many threads plain steps have. 0 is a client.
    - `lease_ttl`: how long a worker may be silent before its runs are taken over. Leases are renewed after each third of it.
    - `queues`: limits of queues, `[Queue("mail", concurrency=5)]`, set when the runtime begins to work. They exclude no queue.
    - `only_queues`: the names of the queues whose runs are claimed here, `["mail"]`. By default all.
    - `retention`: how long ended runs are kept: `{"completed": "30d"}`, or one length for every end. By default for ever.
    - `secret`: what signs approval tokens, at least 32 bytes. Of several the first signs, and what any of them signed is good.
    """

    def __init__(
        self,
        store: Store | WorkflowStore | str | None = None,
        workflows: Iterable[Workflow[Any, Any]] = (),
        *,
        deps: Any = None,
        cache: StepCache | MutableMapping[str, str] | None = None,
        on_event: Listener | None = None,
        strict: bool | None = None,
        on_changed_arguments: OnChange | None = None,
        on_unknown_steps: OnChange | None = None,
        on_definition_change: OnChange | None = None,
        on_divergence: OnDivergence | None = None,
        executors: Mapping[str, Executor] | None = None,
        concurrency: int = 100,
        lease_ttl: Duration = LEASE_TTL,
        queues: Collection[Queue] | None = None,
        only_queues: Collection[str] | None = None,
        retention: Retention | None = None,
        secret: Secret | Sequence[Secret] | None = None,
        **tuning: Unpack[Tuning],
    ) -> None:
        self._concurrency = _check_concurrency(concurrency)
        self._token_signer = None if secret is None else TokenSigner(secret)
        ttl = seconds(lease_ttl, what="lease_ttl")
        if ttl <= 0:
            raise ValueError("lease_ttl must be longer than zero")
        self._limited_queues = check_queues(queues)
        self._only_queues = check_queue_names(only_queues)
        if not isinstance(workflows, Iterable):
            raise TypeError(f"workflows= takes a list: [{workflows!r}]")
        options = {
            "deps": deps,
            "cache": cache,
            "on_event": on_event,
            "strict": strict,
            "on_changed_arguments": on_changed_arguments,
            "on_unknown_steps": on_unknown_steps,
            "on_definition_change": on_definition_change,
            "on_divergence": on_divergence,
            "executors": executors,
        }
        process_options = check_options({name: value for name, value in options.items() if value is not None}, ProcessOptions)
        self._retention = check_retention(retention)
        self._is_closed = False
        self._is_entered = False
        self._worker: Worker | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._work_on(choose_store(store, is_for_workers=True), _settings(tuning), ttl, process_options)
        for workflow in workflows:
            self.register(workflow)

    def _work_on(self, store: Choice, settings: EngineSettings, lease_ttl: float, process_options: dict[str, Any]) -> None:
        """Make what belongs to this store, and the threads for plain steps."""
        self._choice = store
        self._store = store.store
        # A client drives too, in `run` and `sweep`.
        self._threads = ThreadPool("perdure-step", self._concurrency or STEP_THREADS)
        self._host = Host(
            self._store,
            replace(settings, threads=self._threads, said_changes=set()),
            lease_ttl=lease_ttl,
            process_options=process_options,
            is_implicit=store.is_implicit,
        )
        self._host.find_worker = self._worker_serving
        self._host.has_worker = self._is_working
        self._schedules = RuntimeSchedules(self._host)
        self._health = HealthCheck(self._store, self._started_worker)
        if self._retention:
            require(self._store, "operators")

    def configure(
        self,
        *,
        store: Store | WorkflowStore | str | None = None,
        concurrency: int | None = None,
        only_queues: Collection[str] | None = None,
    ) -> None:
        """Replace what this Runtime was made with, before it is used; None leaves it. `perdure worker` passes its options so."""
        if self._is_closed or self._is_entered or self._is_working():
            raise RuntimeError("configure() comes before a Runtime is entered or works")
        if only_queues is not None:
            self._only_queues = check_queue_names(only_queues)
        if concurrency is not None:
            self._concurrency = _check_concurrency(concurrency)
        before, old_threads = self._host, self._threads
        chosen = self._choice if store is None else choose_store(store, is_for_workers=True)
        self._work_on(chosen, before.settings, before.lease_ttl, before.process_options)
        self._host.workflows = before.workflows
        old_threads.close()

    async def __aenter__(self) -> Self:
        if self._is_closed:
            raise RuntimeError("this Runtime was closed; make a new one")
        if self._is_entered or self._is_working():
            raise RuntimeError("this Runtime works already; use its methods, or runtime.sync, without entering it again")
        await self._set_up()
        self._is_entered = True  # not before: after a failure it may be entered again
        if self._concurrency:
            self._start_worker()[1].add_done_callback(_log_failure)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._worker is not None and self._worker_task is not None:
                self._worker.stop()
                await self._worker_task  # raises the error that ended the worker, if there was one
        finally:
            await self.close()

    async def close(self) -> None:
        """Give back the runs that are still driven here, shut down the threads, and close the store if this runtime opened it."""
        self._is_closed = True
        self._health.close()
        await self._host.drain()
        self._threads.close()
        if self._choice.is_owned:
            await self._store.close()

    @property
    def store(self) -> Store:
        """The store this runtime works on."""
        return self._store

    @property
    def sync(self) -> SyncRuntime:
        """The same methods, blocking, for programs without an event loop."""
        from perdure.sync import SyncRuntime

        return SyncRuntime(self)

    def register(self, workflow: Workflow[Any, Any]) -> None:
        """Let runs of this workflow be driven here, in its version. Runs that are started by its name take the highest one."""
        self._host.register(workflow)
        if workflow.retention:
            require(self._store, "operators")

    async def work(self) -> None:
        """Work in the foreground until SIGTERM, SIGINT or cancellation; then let running steps end and give the runs back.

        A Runtime has one worker: inside `async with` this waits for the one that works already, and stops it. Raises
        `StepNotStopped` when a step ignores its cancellation and still runs.
        """
        if not self._concurrency:
            raise ValueError("a runtime with concurrency=0 is a client and works on nothing; give it a higher one")
        if self._is_closed:
            raise RuntimeError("this Runtime was closed; make a new one")
        await self._set_up()
        worker, working = self._worker, self._worker_task
        if worker is None or working is None or working.done():
            worker, working = self._start_worker()
        if working.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this Runtime works already, on another event loop; leave that one running instead")
        with stop_on_signals(worker):
            await _wait_for_worker(worker, working)
        if worker.left:
            raise StepNotStopped(worker.left)

    async def sweep(self, now: datetime | None = None, limit: int = 100) -> dict[str, Outcome[Any]]:
        """The outcomes of up to `limit` due runs, each resumed once. A run that could not be driven has an `Err`.

        Schedules that are due start their runs first.
        """
        host = self._host
        check_positive(limit, "limit")
        if now is not None:
            await host.ask_time()
            host = self._host_at(NotBefore(host.clock, instant(now, what="now")))
        if "schedules" in self._store.capabilities:
            await Scheduler(host).fire_due()
        claims = await host.claim(limit, self._only_queues)
        drives = {claim.run.id: host.drive(host.definition_of(claim.run), claim, {}) for claim in claims.claims}
        outcomes = await asyncio.gather(*(active.join() for active in drives.values()), return_exceptions=True)
        return {
            run_id: Err(outcome) if isinstance(outcome, BaseException) else outcome
            for run_id, outcome in zip(drives, outcomes, strict=True)
        }

    @overload
    async def start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        connection: Any = None,
        **options: Unpack[StoredOptions],
    ) -> Run[T]: ...
    @overload
    async def start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        connection: Any = None,
        **options: Unpack[StoredOptions],
    ) -> Run[T]: ...
    @overload
    async def start(self, workflow: str, /, *args: Any, connection: Any = None, **options: Unpack[StoredOptions]) -> Run[Any]: ...
    async def start(self, workflow: Any, /, *args: Any, connection: Any = None, **options: Any) -> Run[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """A new run, at once; a worker drives it. The same id with the same input is the same run.

        With `connection=`, one of the database's driver or of SQLAlchemy on which a transaction of yours is open, the run is
        written in that transaction: it exists if you commit, and then a worker claims it.
        """
        definition = self._definition(workflow)
        start = await self._new_run(definition, args, options)
        if connection is not None:
            await self._host.create_in(connection, definition, start)
            return self._run_with(start.new.id)
        worker = self._worker_for(start)
        active = await self._host.create_and_drive(definition, start, {}, may_drive=worker is not None, is_background=True)
        if worker is not None and active is not None:
            worker.adopt(active)
        return self._run_with(start.new.id)

    @overload
    async def start_many(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        inputs: Iterable[tuple[Unpack[Ts]]],
        /,
        *,
        ids: Callable[[Unpack[Ts]], str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[Run[T]]: ...
    @overload
    async def start_many(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        inputs: Iterable[tuple[Unpack[Ts]]],
        /,
        *,
        ids: Callable[[Unpack[Ts]], str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[Run[T]]: ...
    @overload
    async def start_many(
        self,
        workflow: str,
        inputs: Iterable[tuple[Any, ...]],
        /,
        *,
        ids: Callable[..., str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[Run[Any]]: ...
    async def start_many(
        self,
        workflow: Any,
        inputs: Iterable[tuple[Any, ...]],
        /,
        *,
        ids: Callable[..., str] | Sequence[str] | None = None,
        **options: Any,
    ) -> builtins.list[Run[Any]]:
        """Runs of one workflow for many inputs, each a tuple of its arguments, in the order of the inputs. They share commits.

        `ids` has an id for each input, or makes one from its arguments: then repeating the call starts what is missing, and
        nothing twice. Nothing is written if an input does not fit. Otherwise each run that can be created is, before the error of
        another, such as `RunConflict`, is raised. A worker claims the runs: none is driven by this call.
        """
        definition = self._definition(workflow)
        starts = []
        for index, (args, run_id) in enumerate(_name_inputs(inputs, ids)):
            named = options if run_id is None else {**options, "id": run_id}
            try:
                starts.append(await self._new_run(definition, args, named))
            except InvalidInput as error:
                error.add_note(f"in inputs[{index}] of start_many; nothing was written")
                raise
        await self._host.create_many(definition, starts)
        return [self._run_with(start.new.id) for start in starts]

    @overload
    async def signal_with_start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> Run[T]: ...
    @overload
    async def signal_with_start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> Run[T]: ...
    @overload
    async def signal_with_start(
        self,
        workflow: str,
        /,
        *args: Any,
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> Run[Any]: ...
    async def signal_with_start(  # type: ignore[misc]  # mypy holds ** against required arguments
        self,
        workflow: Any,
        /,
        *args: Any,
        id: str,  # noqa: A002 - the name that everything else here has
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Any,
    ) -> Run[Any]:
        """The run with this id, which gets the signal. If there is none, it is started with the signal in its inbox.

        A run that is there keeps its input and options, whatever is passed here. A repeated `dedupe` is ignored, as by `signal`.
        Raises `RunFinished`, and `RunConflict` if the id belongs to a run of another workflow.
        """
        definition = self._definition(workflow)
        start = await self._new_run(definition, args, {**options, "id": id})
        worker = self._worker_for(start)
        claim = await self._host.signal_or_create(definition, start, signal, payload, dedupe=dedupe, may_lease=worker is not None)
        if worker is not None and claim is not None:
            worker.adopt(self._host.drive(definition, claim, {}, arguments=start.arguments, is_background=True))
        return self._run_with(id)

    @overload
    async def run(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StoredOptions],
    ) -> Outcome[T]: ...
    @overload
    async def run(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StoredOptions],
    ) -> Outcome[T]: ...
    @overload
    async def run(self, workflow: str, /, *args: Any, **options: Unpack[StoredOptions]) -> Outcome[Any]: ...
    async def run(self, workflow: Any, /, *args: Any, **options: Any) -> Outcome[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """The outcome of a run, created or found, that is driven here until it ends or suspends.

        In a queue with limits it waits for its turn, as every other run of the queue does.
        """
        definition = self._definition(workflow)
        start = await self._new_run(definition, args, options)
        return await run_to_outcome(self._host, definition, start, {})

    async def resume(self, run_id: str) -> Outcome[Any]:
        """The outcome of the run after driving it, if it is due; otherwise its present state. It waits for room in its queue."""
        return await resume(self._host, check_id(run_id, "a run's id"), {})

    async def signal(
        self, run_id: str, name: str, payload: Any = None, *, dedupe: str | None = None, connection: Any = None
    ) -> None:
        """Put a signal into the run's inbox and return. The run gets it exactly once, also when it does not wait yet.

        A repeated `dedupe` is ignored, so that a webhook may be delivered twice. With `connection=`, as for `start`, it is sent
        if your transaction commits. Raises `RunNotFound`, `RunFinished`.
        """
        await self._host.signal(run_id, name, payload, dedupe=dedupe, connection=connection)

    async def approve(self, run_id: str, name: str, *, by: str, payload: Any = UNCHANGED, key: str | None = None) -> None:
        """Approve what the run asks with `ctx.approve(name, ...)`, as it is or with another payload. `by` is recorded.

        Of several decisions the first counts. Raises `ApprovalDecided` when this is not the first, `ApprovalExpired`,
        `NotAssigned`, `ApprovalNotFound` when the run does not wait for it (now), `ApprovalAmbiguous` when `key` must say which
        one is meant, `InvalidInput` when the payload is not of the type that was asked about, `RunNotFound`, `RunFinished`.
        """
        await decide(self._host, run_id, name, Verdict("approved", by, payload), key=key)

    async def reject(self, run_id: str, name: str, *, by: str, reason: str | None = None, key: str | None = None) -> None:
        """Reject what the run asks. Otherwise as `approve`."""
        await decide(self._host, run_id, name, Verdict("rejected", by, reason=reason), key=key)

    async def approvals(
        self, *, assignee: str | None = None, limit: int = 100, **selection: Unpack[RunSelection]
    ) -> builtins.list[PendingApproval]:
        """What runs ask and can be decided now, of runs selected as for `list`, last changed first.

        With `assignee`, what this person may decide: what is assigned to them, and what everyone may decide.
        """
        if assignee is not None:
            check_id(assignee, "an assignee")
        check_positive(limit, "limit")
        return await pending_approvals(self._host, unfinished(self._run_filter(selection)), assignee, limit)

    async def approval_token(
        self,
        run_id: str,
        name: str,
        *,
        by: str,
        action: TokenAction = "both",
        expires_in: Duration = "7d",
        key: str | None = None,
    ) -> str:
        """A text for a link by which this person may approve, reject, or both, without any other proof of who it is.

        It is signed with the runtime's `secret`, and is good for this approval only, until it expires or the approval is decided.
        `approval_app` serves the link. Raises as `approve` does.
        """
        return await make_token(self._host, self._signer(), run_id, name, by, action, expires_in, key)

    async def decide_by_token(
        self, token: str, action: DecidingAction, *, payload: Any = UNCHANGED, reason: str | None = None
    ) -> None:
        """Approve or reject what the token is about, as the person for whom it was made.

        Raises as `approve` does, and `TokenInvalid`, `TokenExpired`, `TokenNotAllowed`.
        """
        await decide_by_token(self._host, self._signer(), token, action, payload, reason)

    def approval_app(self) -> ApprovalApp:
        """An ASGI application that shows and decides approvals by their tokens: `GET /TOKEN` shows, `POST /TOKEN` decides.

        Mount it under any path, in any framework; the link is that path with the token after it.
        """
        from perdure.operations.approval_app import ApprovalApp

        return ApprovalApp(self._host, self._signer())

    def _signer(self) -> TokenSigner:
        if self._token_signer is None:
            raise ValueError(
                "approval tokens are signed: pass Runtime(secret=...), at least 32 random bytes, such as from secrets"
            )
        return self._token_signer

    async def get(self, run_id: str) -> Run[Any] | None:
        """The run with this id, or None."""
        row = await self._store.get(check_id(run_id, "a run's id"))
        return None if row is None else self._run_with(run_id)

    async def describe(self, run_id: str) -> RunDescription:
        """The run with every step it has recorded, what it does or waits for now, and which worker has it.

        Of a run that another process drives, the steps under way are those of its last heartbeat. Raises `RunNotFound`.
        """
        return await describe_run(self._host, run_id)

    async def list(self, *, limit: int = 100, cursor: RunInfo | None = None, **selection: Unpack[RunSelection]) -> list[RunInfo]:
        """Runs, last changed first. `cursor` is the last item of the page before.

        They are selected by `workflow`, `status` (one or several), `queue`, `prefix` of the id, `updated_after` and
        `updated_before` (a datetime, or how long ago), and one key of their `metadata`; those that have all of it are listed.
        """
        wanted = self._run_filter(selection)
        check_positive(limit, "limit")
        before = None if cursor is None else (instant(cursor.updated_at), cursor.id)
        return await self._store.list(wanted, before=before, limit=limit)

    async def count(self, **selection: Unpack[RunSelection]) -> int:
        """How many runs there are, selected as for `list`."""
        return await require(self._store, "operators").count(self._run_filter(selection))

    async def stuck_runs(self, *, limit: int = 100, **selection: Unpack[RunSelection]) -> builtins.list[RunInfo]:
        """Runs that have a problem, or were due for a minute and not claimed, or whose worker is blocked, selected as for `list`.

        `problem` says what it is: also that no worker takes the run's queue.
        """
        wanted = self._run_filter(selection)
        check_positive(limit, "limit")
        return await stuck_runs(self._host, wanted, limit)

    async def check(
        self,
        *,
        workflow: Workflow[Any, Any] | str | None = None,
        prefix: str = "",
        limit: int | None = None,
        patience: Duration = "5s",
    ) -> CheckReport:
        """Which runs that have not ended fit the workflows registered here: each is replayed, no step is called, nothing written.

        Bodies run their own code between ctx calls; one that is busy with it for longer than `patience` gets the verdict unknown.
        """
        if limit is not None:
            check_positive(limit, "limit")
        length = seconds(patience, what="patience")
        if length <= 0:
            raise ValueError("patience must be longer than zero")
        names: tuple[str | None, ...] = (workflow,) if workflow is None or isinstance(workflow, str) else ()
        if not names:
            definition = self._definition(workflow)
            names = (definition.name, *definition.aliases)
        return await check_runs(self._host, names, prefix, limit, length)

    async def workers(self) -> builtins.list[WorkerInfo]:
        """The workers on this store, by name: what each drives, and whether it has been silent for too long.

        A worker shows itself a second after its start. One that was killed is silent, and is removed after an hour.
        """
        if self._worker is not None and self._is_working():
            await self._worker.registration.ensure()
        return await list_workers(self._host)

    async def health(self, timeout: Duration = "2s") -> RuntimeHealth:
        """Whether the store replies and the worker claims runs, for probes. It never raises, and takes at most this long."""
        return await self._health.check(self._concurrency, seconds(timeout, what="timeout"), is_closed=self._is_closed)

    async def cancel(self, run_id: str, *, undo: bool = True) -> None:
        """Ask the run to stop: CancelledError is raised at its waits. Raises `RunNotFound`, `RunFinished`.

        With `undo=False` nothing that it has done is compensated, in its children neither. If it does not fit its code, it ends
        at once. `RunCancelled.not_undone` says what was left.
        """
        await self._host.cancel(run_id, undo=undo)

    async def retry(self, run_id: str) -> Run[Any]:
        """Let a failed, cancelled or dead run go on: what failed is set aside, what succeeded is kept."""
        await self._host.reopen(check_id(run_id, "a run's id"))
        return self._run_with(run_id)

    async def fork(
        self,
        run_id: str,
        *,
        from_step: str,
        id: str | None = None,  # noqa: A002 - the name that everything else here has
        take_over: bool = False,
    ) -> Run[Any]:
        """A new run of the same workflow and input that has what this run recorded before the step, and calls the step anew.

        Everything that the journal has before the first record of the step is kept. The old run stays as it is. `from_step` is
        the step's key. If the fork fails, it undoes what it has done itself; with `take_over=True` also what the old run has done
        up to that step. Raises `RunNotFound`, `StepNotFound`, and `RunConflict` when `id` is taken.
        """
        check_id(from_step, "a step's key")
        new_id = str(uuid.uuid4()) if id is None else check_id(id, "a run's id")
        await fork_run(self._host, run_id, from_step, new_id, take_over=take_over)
        return self._run_with(new_id)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven until `unhold`; an attempt under way goes on until it suspends or ends."""
        await require(self._store, "operators").hold(check_id(run_id, "a run's id"))

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        await require(self._store, "operators").unhold(check_id(run_id, "a run's id"), now=self._host.clock.store_now())

    async def delete(self, run_id: str, *, force: bool = False) -> None:
        """Remove the run and everything recorded for it.

        Raises `NotUndone` for a run that has not ended because it cannot undo what it has done, unless `force` is True.
        """
        if not force:
            await self._host.refuse_not_undone(run_id)
        await require(self._store, "operators").delete(check_id(run_id, "a run's id"))

    async def cancel_many(self, *, undo: bool = True, **options: Unpack[BulkOptions]) -> BulkReport:
        """Ask many runs to stop, selected as for `list`; without `status`, those that have not ended.

        `batch` runs are changed at a time; after each batch `on_progress` is called with how many runs were dealt with and how
        many there are (None: the store cannot count). A refusal (`RunFinished`, `LeaseHeld`, `RunNotFound`) is counted and
        reported, not raised. An empty selection needs `all=True`. With `dry_run` nothing changes, and `done` says how many runs
        are selected. `undo` is as for `cancel`.
        """
        return await change_many(self._host, "cancel", partial(self.cancel, undo=undo), options)

    async def retry_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Let many runs go on that ended badly: failed and dead ones, unless `status` names others. Options as `cancel_many`."""
        return await change_many(self._host, "retry", self.retry, options)

    async def hold_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Keep many runs from being driven: those that have not ended, unless `status` names others. Options as `cancel_many`."""
        return await change_many(self._host, "hold", self.hold, options)

    async def unhold_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Undo `hold` for many runs: those that have not ended, unless `status` names others. Options as `cancel_many`."""
        return await change_many(self._host, "unhold", self.unhold, options)

    async def delete_many(self, *, force: bool = False, **options: Unpack[BulkOptions]) -> BulkReport:
        """Remove many runs with everything recorded: ended ones, unless `status` names others.

        `force` is as for `delete`, the other options are as for `cancel_many`.
        """
        return await change_many(self._host, "delete", partial(self.delete, force=force), options)

    async def purge(
        self,
        older_than: Duration,
        *,
        status: EndStatus | Collection[EndStatus] | None = None,
        workflow: Workflow[Any, Any] | str | None = None,
    ) -> int:
        """Delete runs that ended longer ago than this, of these statuses and of this workflow, and say how many.

        A run that was reopened stays, and one whose parent has not ended.
        """
        store, age, total = require(self._store, "operators"), seconds(older_than, what="older_than"), 0
        statuses = END_STATUSES if status is None else (status,) if isinstance(status, str) else tuple(status)
        name = workflow if workflow is None or isinstance(workflow, str) else self._definition(workflow).name
        while deleted := await store.purge(age, status=statuses, workflow=name, now=self._host.clock.store_now()):
            total += deleted
        return total

    async def schedule(
        self,
        workflow: Workflow[Any, Any] | str,
        /,
        *args: Any,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | None = None,
        id: str | None = None,  # noqa: A002 - the name that everything else here has
        overlap: Overlap = "skip",
        catch_up: CatchUp = "last",
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleInfo:
        """Start the workflow with these arguments by the clock: `cron="0 3 * * *", tz="Europe/Berlin"` or `every="5m"`.

        Inserts or replaces the schedule with this id, the workflow's name by default; one that recurs as before keeps its next
        instant. Each instant has one run, `{id}:{instant}`. `overlap` says what happens while an earlier run has not ended: the
        instant is skipped, allowed, or waits (queue). `catch_up` says what happens with instants at which no worker was there:
        the last of them is made up for, all are, or none.
        """
        unknown = options.keys() - ScheduleOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"schedule has no option {', '.join(sorted(unknown))}; pass the workflow's arguments by position")
        made = await self._schedules.put(
            self._definition(workflow),
            args,
            cron=cron,
            every=every,
            tz=tz,
            schedule_id=id,
            overlap=overlap,
            catch_up=catch_up,
            options=dict(options),
        )
        self._look_at_schedules()
        return made

    async def schedules(self) -> builtins.list[ScheduleInfo]:
        """All schedules, by id."""
        return await self._schedules.all()

    async def hold_schedule(self, schedule_id: str) -> None:
        """Let the schedule start no run until `unhold_schedule`. Raises `ScheduleNotFound`."""
        await self._schedules.hold(schedule_id)

    async def unhold_schedule(self, schedule_id: str) -> None:
        """Undo `hold_schedule`; what came meanwhile is not made up for. Raises `ScheduleNotFound`."""
        await self._schedules.unhold(schedule_id)
        self._look_at_schedules()

    async def run_schedule(self, schedule_id: str) -> Run[Any]:
        """Start a run of the schedule now; its next instant stays. Raises `ScheduleNotFound`."""
        return self._run_with((await self._schedules.run_now(schedule_id)).id)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; False when there was none. Its runs stay."""
        return await self._schedules.drop(schedule_id)

    async def set_queue(self, queue: Queue) -> None:
        """Replace the limits of a queue, for all workers of this store and at once; a limit that is None is removed.

        A worker that starts later with another `Queue` of this name sets the limits of that.
        """
        if not isinstance(queue, Queue):
            raise TypeError(f'set_queue takes a Queue("mail", concurrency=5, ...), not {queue!r}')
        await require(self._store, "schedules").limit_queue(queue.name, queue.limits)

    async def queues(self) -> builtins.list[Queue]:
        """The queues that have limits, by name."""
        limits = await require(self._store, "schedules").queue_limits()
        return [Queue.of(name, limits[name]) for name in sorted(limits)]

    def _look_at_schedules(self) -> None:
        if self._worker is not None and self._worker.scheduler is not None:
            self._worker.scheduler.look_soon()

    async def _new_run(self, workflow: WorkflowDefinition, args: tuple[Any, ...], options: dict[str, Any]) -> RunStart:
        """The run as it is to be created, from the state that the workflow has for it."""
        stored = check_stored_options(options)
        if counts_from_now(stored):
            await self._host.ask_time()
        start = self._host.new_run(workflow, args, {}, stored)
        return await self._host.with_state(workflow, start, {}, is_named="id" in stored)

    def _definition(self, workflow: Any) -> WorkflowDefinition:
        if isinstance(workflow, str):
            return self._host.definition(workflow)
        if not getattr(workflow, "is_perdure_workflow", False):
            raise TypeError(f"start and run take a workflow or its name, not {workflow!r}; decorate the function with @workflow")
        self._host.register(workflow)
        definition: WorkflowDefinition = workflow
        return definition

    async def _set_up(self) -> None:
        """Create the store's schema and, once, set the limits of the queues that were given with limits."""
        await self._store.setup()
        for queue in self._limited_queues:
            await self.set_queue(queue)
        self._limited_queues = ()  # `work()` inside `async with` must not undo a later `set_queue`

    def _worker_for(self, start: RunStart) -> Worker | None:
        """The worker, if it has room for this run. Then the run is leased as it is created, which saves a write."""
        worker = self._worker_serving(start.new.queue)
        return worker if worker is not None and worker.has_room() else None

    def _worker_serving(self, queue: str) -> Worker | None:
        """The worker, if it drives runs of this queue."""
        return self._worker if self._only_queues is None or queue in self._only_queues else None

    def _run_filter(self, selection: RunSelection) -> RunFilter:
        return run_filter(selection, self._host.clock.now())

    def _start_worker(self) -> tuple[Worker, asyncio.Task[None]]:
        worker = self._worker = Worker(self._host, self._concurrency, self._only_queues, self._retention)
        loop, context = asyncio.get_running_loop(), own_context()
        task = self._worker_task = loop.create_task(worker.work(), name="perdure-worker", context=context)
        return worker, task

    def _started_worker(self) -> tuple[Worker, asyncio.Task[None]] | None:
        return None if self._worker is None or self._worker_task is None else (self._worker, self._worker_task)

    def _is_working(self) -> bool:
        return self._worker_task is not None and not self._worker_task.done()

    def _run_with(self, run_id: str) -> Run[Any]:
        """Return the handle on this run. Every method that gives a run makes it here."""
        return Run(self._host, run_id)

    def _host_at(self, clock: Clock) -> Host:
        host = Host(
            self._store,
            replace(self._host.settings, clock=clock),
            lease_ttl=self._host.lease_ttl,
            process_options=self._host.process_options,
        )
        host.workflows = self._host.workflows
        return host


def _name_inputs(
    inputs: Iterable[tuple[Any, ...]], ids: Callable[..., str] | Sequence[str] | None
) -> Iterator[tuple[tuple[Any, ...], str | None]]:
    """The inputs of `start_many`, each with the id of its run, if it has one."""
    if isinstance(ids, str):
        raise TypeError("ids= takes a sequence of ids, or a function that makes one from the arguments")
    given = list(inputs)
    if ids is not None and not callable(ids) and len(ids) != len(given):
        raise ValueError(f"there are {len(given)} inputs and {len(ids)} ids")
    for index, args in enumerate(given):
        if type(args) is not tuple:
            raise TypeError(
                f"inputs[{index}] is {args!r}; each is a tuple of the workflow's arguments: [(order,) for order in orders]"
            )
        yield args, None if ids is None else ids(*args) if callable(ids) else ids[index]


async def _wait_for_worker(worker: Worker, working: asyncio.Task[None]) -> None:
    """Return when the worker has stopped. Cancelling this stops it and waits until it has drained.

    Cancelling again ends that, and so does cancelling a worker that a signal has stopped.
    """
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        if worker.is_stopping:
            working.cancel()
            raise
        worker.stop()
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            working.cancel()
            raise
        raise


def _log_failure(worker: asyncio.Task[None]) -> None:
    """Log the error that ended the worker now: leaving the Runtime, which raises it, may come much later."""
    if not worker.cancelled() and (error := worker.exception()) is not None:
        log.error("the worker has ended, and drives no more runs: %r", error, exc_info=error)


def _check_concurrency(concurrency: Any) -> int:
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 0 <= concurrency <= MAX_CONCURRENCY:
        raise ValueError(
            f"concurrency must be a whole number from 0, for a client only, to {MAX_CONCURRENCY}, not {concurrency!r}"
        )
    return concurrency


def _settings(tuning: Tuning) -> EngineSettings:
    unknown = tuning.keys() - Tuning.__annotations__.keys()
    if unknown:
        raise TypeError(f"Runtime has no option {', '.join(sorted(unknown))}; see help(Runtime) for those it has")
    return EngineSettings(
        clock=tuning.get("clock") or SystemClock(),
        unload_grace=microseconds(tuning.get("unload_grace", 1), what="unload_grace"),
        max_attempts=tuning.get("max_attempts", 10),
        drain_after=seconds(tuning.get("drain_after", 10), what="drain_after"),
        cancel_grace=seconds(tuning.get("cancel_grace", 30), what="cancel_grace"),
        max_blocked=_max_blocked(tuning.get("max_blocked", 60)),
    )


def _max_blocked(length: Duration | None) -> float | None:
    if length is None:
        return None
    found = seconds(length, what="max_blocked")
    if found <= 0:
        raise ValueError(f"max_blocked must be longer than zero, or None for no limit, not {length!r}")
    return found
