"""`runtime.sync`: the methods of `Runtime`, blocking.

with Runtime(store="sqlite:///app.db", workflows=[checkout]).sync as runtime:
    run = runtime.start(checkout, order, id="order-1")
    receipt = run.result()
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, TypeVarTuple, Unpack, overload

from perdure.aio.loop_thread import BlockOn, block_on
from perdure.definition import Workflow
from perdure.engine.subscriptions import Coalesce, Mode, Subscription
from perdure.events import Listener
from perdure.model.durations import Duration
from perdure.model.records import EndStatus, RunInfo, Status
from perdure.model.stream_items import StreamItem
from perdure.operations.approval_tokens import DecidingAction, TokenAction
from perdure.operations.approvals import UNCHANGED, PendingApproval
from perdure.operations.check_runs import CheckReport
from perdure.operations.describe_run import RunDescription
from perdure.operations.health import RuntimeHealth
from perdure.operations.many_runs import BulkOptions, BulkReport
from perdure.operations.run_selection import RunSelection
from perdure.options import ScheduleOptions, StartOptions, StoredOptions
from perdure.result import Err, Ok, Outcome
from perdure.run import Run
from perdure.snapshots.consistent_view import Include
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.stepspec import name_caller
from perdure.worker.queues import Queue
from perdure.worker.schedules import CatchUp, Overlap, ScheduleInfo
from perdure.worker.stream_reader import StreamReader
from perdure.worker.worker_registry import WorkerInfo

T = TypeVar("T")
V = TypeVar("V")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")


class AsyncRuntime(Protocol):
    """What is used here of `Runtime`, which stands in the layer above."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def close(self) -> None: ...
    def register(self, workflow: Workflow[Any, Any]) -> None: ...
    @property
    def start(self) -> Callable[..., Coroutine[Any, Any, Run[Any]]]: ...
    @property
    def run(self) -> Callable[..., Coroutine[Any, Any, Outcome[Any]]]: ...
    @property
    def start_many(self) -> Callable[..., Coroutine[Any, Any, builtins.list[Run[Any]]]]: ...
    @property
    def signal_with_start(self) -> Callable[..., Coroutine[Any, Any, Run[Any]]]: ...
    @property
    def list(self) -> Callable[..., Coroutine[Any, Any, list[RunInfo]]]: ...
    @property
    def count(self) -> Callable[..., Coroutine[Any, Any, int]]: ...
    @property
    def stuck_runs(self) -> Callable[..., Coroutine[Any, Any, builtins.list[RunInfo]]]: ...
    @property
    def check(self) -> Callable[..., Coroutine[Any, Any, CheckReport]]: ...
    async def sweep(self, now: datetime | None = None, limit: int = 100) -> dict[str, Outcome[Any]]: ...
    async def resume(self, run_id: str) -> Outcome[Any]: ...
    @property
    def approve(self) -> Callable[..., Coroutine[Any, Any, None]]: ...
    @property
    def reject(self) -> Callable[..., Coroutine[Any, Any, None]]: ...
    @property
    def approvals(self) -> Callable[..., Coroutine[Any, Any, builtins.list[PendingApproval]]]: ...
    @property
    def approval_token(self) -> Callable[..., Coroutine[Any, Any, str]]: ...
    @property
    def decide_by_token(self) -> Callable[..., Coroutine[Any, Any, None]]: ...
    async def signal(
        self, run_id: str, name: str, payload: Any = None, *, dedupe: str | None = None, connection: Any = None
    ) -> None: ...
    async def get(self, run_id: str) -> Run[Any] | None: ...
    async def describe(self, run_id: str) -> RunDescription: ...
    @property
    def workers(self) -> Callable[[], Coroutine[Any, Any, builtins.list[WorkerInfo]]]: ...
    async def health(self, timeout: Duration = "2s") -> RuntimeHealth: ...
    async def cancel(self, run_id: str, *, undo: bool = True) -> None: ...
    async def retry(self, run_id: str) -> Run[Any]: ...
    @property
    def fork(self) -> Callable[..., Coroutine[Any, Any, Run[Any]]]: ...
    async def hold(self, run_id: str) -> None: ...
    async def unhold(self, run_id: str) -> None: ...
    async def delete(self, run_id: str, *, force: bool = False) -> None: ...
    async def cancel_many(self, *, undo: bool = True, **options: Unpack[BulkOptions]) -> BulkReport: ...
    async def retry_many(self, **options: Unpack[BulkOptions]) -> BulkReport: ...
    async def hold_many(self, **options: Unpack[BulkOptions]) -> BulkReport: ...
    async def unhold_many(self, **options: Unpack[BulkOptions]) -> BulkReport: ...
    async def delete_many(self, *, force: bool = False, **options: Unpack[BulkOptions]) -> BulkReport: ...
    @property
    def purge(self) -> Callable[..., Coroutine[Any, Any, int]]: ...
    @property
    def schedule(self) -> Callable[..., Coroutine[Any, Any, ScheduleInfo]]: ...
    @property
    def schedules(self) -> Callable[[], Coroutine[Any, Any, builtins.list[ScheduleInfo]]]: ...
    async def hold_schedule(self, schedule_id: str) -> None: ...
    async def unhold_schedule(self, schedule_id: str) -> None: ...
    async def run_schedule(self, schedule_id: str) -> Run[Any]: ...
    async def drop_schedule(self, schedule_id: str) -> bool: ...
    async def set_queue(self, queue: Queue) -> None: ...
    @property
    def queues(self) -> Callable[[], Coroutine[Any, Any, builtins.list[Queue]]]: ...


class SyncStreamReader(Generic[T_co]):
    """A `StreamReader` whose reads block: an iterator over a stream of a run. `position` is that of the next item."""

    def __init__(self, reader: StreamReader[T_co], block: BlockOn = block_on) -> None:
        self._reader = reader
        self._block = block

    @property
    def position(self) -> int:
        """Where the reader stands: `start=` of a reader that goes on here."""
        return self._reader.position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        """The next item; `TimeoutError` when none came in time."""
        items = self._block(self._next(), name_caller())
        if not items:
            raise StopIteration
        return items[0]

    async def _next(self) -> tuple[T_co] | None:
        try:
            return (await anext(self._reader),)
        except StopAsyncIteration:
            return None


def _run_here(verb: Coroutine[Any, Any, T]) -> T:
    """The result of the verb on a loop of its own in this thread, to which a connection of a synchronous driver belongs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(verb)
    verb.close()
    raise RuntimeError("an event loop runs in this thread: await runtime.start or runtime.signal there, with the connection")


class SyncRun(Generic[T_co]):
    """A `Run` whose methods block."""

    def __init__(self, run: Run[T_co], block: BlockOn = block_on) -> None:
        self._run = run
        self._block = block
        self.id = run.id

    def __repr__(self) -> str:
        return f"<SyncRun {self.id}>"

    def result(self) -> T_co:
        """The run's value when it has ended, or its error raised: the blocking `await run`."""
        return self._block(self._result(), name_caller())

    def problem(self) -> str | None:
        """Why the run could not go on when it was last tried, or None."""
        return self._block(self._run.problem())

    def progress(self) -> Any:
        """What the run last showed with `ctx.set_progress`, or None; also after its end."""
        return self._block(self._run.progress())

    def status(self) -> Status:
        """Where the run stands now."""
        return self._block(self._run.status())

    def outcome(self) -> Outcome[T_co]:
        """How the run ended, or that it is suspended; waits while it is neither. `result()` waits through suspensions too."""
        return self._block(self._run.outcome(), name_caller())

    def signal(self, name: str, payload: Any = None, *, dedupe: str | None = None) -> None:
        """Put a signal into the run's inbox."""
        self._block(self._run.signal(name, payload, dedupe=dedupe))

    def cancel(self, *, undo: bool = True) -> None:
        """Ask the run to stop. With `undo=False` nothing that it has done is compensated."""
        self._block(self._run.cancel(undo=undo))

    def snapshot(
        self,
        *,
        include: Include = "all",
        metadata: Mapping[str, Any] | None = None,
        limit: int | None = None,
        since: str | None = None,
    ) -> Snapshot:
        """The run as a value, its steps in the order in which they were recorded."""
        return self._block(self._run.snapshot(include=include, metadata=metadata, limit=limit, since=since))

    def resume_state(self) -> ResumeState:
        """The results of the run's steps, from which another run can go on."""
        return self._block(self._run.resume_state())

    @overload
    def stream(
        self,
        name: str,
        *,
        start: int = 0,
        timeout: Duration | None = None,
        returns: Any = Any,
        drop_failed: bool = False,
        details: Literal[True],
    ) -> SyncStreamReader[StreamItem]: ...
    @overload
    def stream(
        self,
        name: str,
        *,
        start: int = 0,
        timeout: Duration | None = None,
        returns: type[V],
        drop_failed: bool = False,
        details: Literal[False] = False,
    ) -> SyncStreamReader[V]: ...
    @overload
    def stream(
        self,
        name: str,
        *,
        start: int = 0,
        timeout: Duration | None = None,
        returns: Any = Any,
        drop_failed: bool = False,
        details: bool = False,
    ) -> SyncStreamReader[Any]: ...
    def stream(self, name: str, **options: Any) -> SyncStreamReader[Any]:
        """`for item in run.stream("tokens")`: as `Run.stream`, blocking."""
        return SyncStreamReader(self._run.stream(name, **options), self._block)

    def subscribe(self, listener: Listener, *, mode: Mode = "sync", coalesce: Coalesce = "none") -> Subscription:
        """Call `listener`, on the background loop, with what happens to this run. Call the subscription to unsubscribe."""
        return self._block(self._subscribed(listener, mode, coalesce))

    async def _subscribed(self, listener: Listener, mode: Mode, coalesce: Coalesce) -> Subscription:
        return self._run.subscribe(listener, mode=mode, coalesce=coalesce)

    async def _result(self) -> T_co:
        return await self._run


class SyncRuntime:
    """A `Runtime` whose methods block. `with` works in the background, as `async with` does there."""

    def __init__(self, runtime: AsyncRuntime, block: BlockOn = block_on) -> None:
        self._runtime = runtime
        self._block = block

    def __enter__(self) -> Self:
        self._block(self._runtime.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._block(self._runtime.__aexit__(kind, error, trace))

    def close(self) -> None:
        """Give back the runs that are still driven, shut down the threads, and close the store if this runtime opened it."""
        self._block(self._runtime.close())

    def register(self, workflow: Workflow[Any, Any]) -> None:
        """Let runs of this workflow be driven here."""
        self._runtime.register(workflow)

    @overload
    def start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        connection: Any = None,
        **options: Unpack[StoredOptions],
    ) -> SyncRun[T]: ...
    @overload
    def start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        connection: Any = None,
        **options: Unpack[StoredOptions],
    ) -> SyncRun[T]: ...
    @overload
    def start(self, workflow: str, /, *args: Any, connection: Any = None, **options: Unpack[StoredOptions]) -> SyncRun[Any]: ...
    def start(self, workflow: Any, /, *args: Any, connection: Any = None, **options: Any) -> SyncRun[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """A new run, at once; a worker drives it. With `connection=`, of a synchronous driver, it exists if you commit."""
        if connection is not None:
            return SyncRun(_run_here(self._runtime.start(workflow, *args, connection=connection, **options)), self._block)
        return SyncRun(self._block(self._runtime.start(workflow, *args, **options)), self._block)

    @overload
    def start_many(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        inputs: Iterable[tuple[Unpack[Ts]]],
        /,
        *,
        ids: Callable[[Unpack[Ts]], str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncRun[T]]: ...
    @overload
    def start_many(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        inputs: Iterable[tuple[Unpack[Ts]]],
        /,
        *,
        ids: Callable[[Unpack[Ts]], str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncRun[T]]: ...
    @overload
    def start_many(
        self,
        workflow: str,
        inputs: Iterable[tuple[Any, ...]],
        /,
        *,
        ids: Callable[..., str] | Sequence[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncRun[Any]]: ...
    def start_many(
        self,
        workflow: Any,
        inputs: Iterable[tuple[Any, ...]],
        /,
        *,
        ids: Callable[..., str] | Sequence[str] | None = None,
        **options: Any,
    ) -> builtins.list[SyncRun[Any]]:
        """Runs of one workflow for many inputs, each a tuple of its arguments, in the order of the inputs. They share commits."""
        return [SyncRun(run, self._block) for run in self._block(self._runtime.start_many(workflow, inputs, ids=ids, **options))]

    @overload
    def signal_with_start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> SyncRun[T]: ...
    @overload
    def signal_with_start(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> SyncRun[T]: ...
    @overload
    def signal_with_start(
        self,
        workflow: str,
        /,
        *args: Any,
        id: str,
        signal: str,
        payload: Any = None,
        dedupe: str | None = None,
        **options: Unpack[StartOptions],
    ) -> SyncRun[Any]: ...
    def signal_with_start(self, workflow: Any, /, *args: Any, **options: Any) -> SyncRun[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """The run with this id, which gets the signal. If there is none, it is started with the signal in its inbox."""
        return SyncRun(self._block(self._runtime.signal_with_start(workflow, *args, **options)), self._block)

    @overload
    def run(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StoredOptions],
    ) -> Outcome[T]: ...
    @overload
    def run(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StoredOptions],
    ) -> Outcome[T]: ...
    @overload
    def run(self, workflow: str, /, *args: Any, **options: Unpack[StoredOptions]) -> Outcome[Any]: ...
    def run(self, workflow: Any, /, *args: Any, **options: Any) -> Outcome[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """The outcome of a run that is driven here until it ends or suspends."""
        outcome: Outcome[Any] = self._block(self._runtime.run(workflow, *args, **options), name_caller())
        return outcome

    def sweep(self, now: datetime | None = None, limit: int = 100) -> dict[str, Outcome[Any]]:
        """The outcomes of the runs that are due, each resumed once."""
        return self._block(self._runtime.sweep(now, limit), name_caller())

    def resume(self, run_id: str) -> Outcome[Any]:
        """The outcome of the run after driving it, if it is due; otherwise its present state."""
        return self._block(self._runtime.resume(run_id), name_caller())

    def signal(self, run_id: str, name: str, payload: Any = None, *, dedupe: str | None = None, connection: Any = None) -> None:
        """Put a signal into the run's inbox. With `connection=`, of a synchronous driver, it is sent if you commit."""
        if connection is not None:
            _run_here(self._runtime.signal(run_id, name, payload, dedupe=dedupe, connection=connection))
        else:
            self._block(self._runtime.signal(run_id, name, payload, dedupe=dedupe))

    def approve(self, run_id: str, name: str, *, by: str, payload: Any = UNCHANGED, key: str | None = None) -> None:
        """Approve what the run asks, as it is or with another payload. Of several decisions the first counts."""
        self._block(self._runtime.approve(run_id, name, by=by, payload=payload, key=key))

    def reject(self, run_id: str, name: str, *, by: str, reason: str | None = None, key: str | None = None) -> None:
        """Reject what the run asks. Of several decisions the first counts."""
        self._block(self._runtime.reject(run_id, name, by=by, reason=reason, key=key))

    def approvals(
        self, *, assignee: str | None = None, limit: int = 100, **selection: Unpack[RunSelection]
    ) -> builtins.list[PendingApproval]:
        """What runs ask and can be decided now, by this person if one is given."""
        return self._block(self._runtime.approvals(assignee=assignee, limit=limit, **selection))

    def approval_token(
        self,
        run_id: str,
        name: str,
        *,
        by: str,
        action: TokenAction = "both",
        expires_in: Duration = "7d",
        key: str | None = None,
    ) -> str:
        """A text for a link by which this person may approve, reject, or both."""
        return self._block(self._runtime.approval_token(run_id, name, by=by, action=action, expires_in=expires_in, key=key))

    def decide_by_token(self, token: str, action: DecidingAction, *, payload: Any = UNCHANGED, reason: str | None = None) -> None:
        """Approve or reject what the token is about, as the person for whom it was made."""
        self._block(self._runtime.decide_by_token(token, action, payload=payload, reason=reason))

    def get(self, run_id: str) -> SyncRun[Any] | None:
        """The run with this id, or None."""
        run = self._block(self._runtime.get(run_id))
        return None if run is None else SyncRun(run, self._block)

    def describe(self, run_id: str) -> RunDescription:
        """The run with every step it has recorded, and what it does or waits for now. Raises `RunNotFound`."""
        return self._block(self._runtime.describe(run_id))

    def workers(self) -> builtins.list[WorkerInfo]:
        """The workers on this store, by name: what each drives, and whether it has been silent for too long."""
        return self._block(self._runtime.workers())

    def health(self, timeout: Duration = "2s") -> RuntimeHealth:
        """Whether the store replies and the worker claims runs, for probes. It never raises, and takes at most this long."""
        return self._block(self._runtime.health(timeout))

    def list(self, *, limit: int = 100, cursor: RunInfo | None = None, **selection: Unpack[RunSelection]) -> list[RunInfo]:
        """Runs, last changed first."""
        return self._block(self._runtime.list(limit=limit, cursor=cursor, **selection))

    def count(self, **selection: Unpack[RunSelection]) -> int:
        """How many runs there are."""
        return self._block(self._runtime.count(**selection))

    def stuck_runs(self, *, limit: int = 100, **selection: Unpack[RunSelection]) -> builtins.list[RunInfo]:
        """Runs that do not go on by themselves."""
        return self._block(self._runtime.stuck_runs(limit=limit, **selection))

    def check(
        self,
        *,
        workflow: Workflow[Any, Any] | str | None = None,
        prefix: str = "",
        limit: int | None = None,
        patience: Duration = "5s",
    ) -> CheckReport:
        """Which runs that have not ended fit the workflows registered here."""
        return self._block(self._runtime.check(workflow=workflow, prefix=prefix, limit=limit, patience=patience))

    def cancel(self, run_id: str, *, undo: bool = True) -> None:
        """Ask the run to stop. With `undo=False` nothing that it has done is compensated."""
        self._block(self._runtime.cancel(run_id, undo=undo))

    def retry(self, run_id: str) -> SyncRun[Any]:
        """Let a failed, cancelled or dead run go on."""
        return SyncRun(self._block(self._runtime.retry(run_id)), self._block)

    def fork(
        self,
        run_id: str,
        *,
        from_step: str,
        id: str | None = None,  # noqa: A002 - the name that everything else here has
        take_over: bool = False,
    ) -> SyncRun[Any]:
        """A new run that has what this run recorded before the step, and calls the step anew."""
        forked = self._runtime.fork(run_id, from_step=from_step, id=id, take_over=take_over)
        return SyncRun(self._block(forked), self._block)

    def hold(self, run_id: str) -> None:
        """Keep the run from being driven until `unhold`."""
        self._block(self._runtime.hold(run_id))

    def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        self._block(self._runtime.unhold(run_id))

    def delete(self, run_id: str, *, force: bool = False) -> None:
        """Remove the run and everything recorded for it."""
        self._block(self._runtime.delete(run_id, force=force))

    def cancel_many(self, *, undo: bool = True, **options: Unpack[BulkOptions]) -> BulkReport:
        """Ask many runs to stop, selected as for `list`; without `status`, those that have not ended."""
        return self._block(self._runtime.cancel_many(undo=undo, **options))

    def retry_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Let many runs go on that ended badly: failed and dead ones, unless `status` names others."""
        return self._block(self._runtime.retry_many(**options))

    def hold_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Keep many runs from being driven: those that have not ended, unless `status` names others."""
        return self._block(self._runtime.hold_many(**options))

    def unhold_many(self, **options: Unpack[BulkOptions]) -> BulkReport:
        """Undo `hold` for many runs: those that have not ended, unless `status` names others."""
        return self._block(self._runtime.unhold_many(**options))

    def delete_many(self, *, force: bool = False, **options: Unpack[BulkOptions]) -> BulkReport:
        """Remove many runs with everything recorded: ended ones, unless `status` names others."""
        return self._block(self._runtime.delete_many(force=force, **options))

    def purge(
        self,
        older_than: Duration,
        *,
        status: EndStatus | Collection[EndStatus] | None = None,
        workflow: Workflow[Any, Any] | str | None = None,
    ) -> int:
        """Delete runs that ended longer ago than this, of these statuses and of this workflow, and say how many."""
        return self._block(self._runtime.purge(older_than, status=status, workflow=workflow))

    def schedule(
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
        """Start the workflow with these arguments by the clock: `cron="0 3 * * *", tz="Europe/Berlin"` or `every="5m"`."""
        made = self._runtime.schedule(
            workflow, *args, cron=cron, every=every, tz=tz, id=id, overlap=overlap, catch_up=catch_up, **options
        )
        return self._block(made)

    def schedules(self) -> builtins.list[ScheduleInfo]:
        """All schedules, by id."""
        return self._block(self._runtime.schedules())

    def hold_schedule(self, schedule_id: str) -> None:
        """Let the schedule start no run until `unhold_schedule`."""
        self._block(self._runtime.hold_schedule(schedule_id))

    def unhold_schedule(self, schedule_id: str) -> None:
        """Undo `hold_schedule`."""
        self._block(self._runtime.unhold_schedule(schedule_id))

    def run_schedule(self, schedule_id: str) -> SyncRun[Any]:
        """Start a run of the schedule now."""
        return SyncRun(self._block(self._runtime.run_schedule(schedule_id)), self._block)

    def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; False when there was none."""
        return self._block(self._runtime.drop_schedule(schedule_id))

    def set_queue(self, queue: Queue) -> None:
        """Replace the limits of a queue, for all workers of this store."""
        self._block(self._runtime.set_queue(queue))

    def queues(self) -> builtins.list[Queue]:
        """The queues that have limits, by name."""
        return self._block(self._runtime.queues())
