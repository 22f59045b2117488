"""`Run`: a handle on one run, wherever it is driven."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Generic, Literal, TypeVar, overload

from perdure.engine.subscriptions import Coalesce, Mode, Subscription, subscriptions_of
from perdure.events import Listener
from perdure.model.durations import Duration
from perdure.model.records import Status
from perdure.model.stream_items import StreamItem
from perdure.result import Outcome
from perdure.snapshots.consistent_view import Include, Selection
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.worker.active_runs import drive_key
from perdure.worker.host import Host
from perdure.worker.outcomes import wait_for_outcome
from perdure.worker.stream_reader import StreamReader

V = TypeVar("V")
T_co = TypeVar("T_co", covariant=True)


class Run(Generic[T_co]):
    """One run. `await run` gives its value, or raises, when it has ended."""

    def __init__(self, host: Host, run_id: str) -> None:
        self._host = host
        self.id = run_id

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._value().__await__()

    async def status(self) -> Status:
        """Where the run stands now."""
        return (await self._host.row(self.id)).status

    async def problem(self) -> str | None:
        """Why the run could not go on when it was last tried, or None. It is tried again by itself."""
        return (await self._host.row(self.id)).problem

    async def progress(self) -> Any:
        """What the run last showed with `ctx.set_progress`, or None; also after its end."""
        return await self._host.progress(self.id)

    async def outcome(self) -> Outcome[T_co]:
        """How the run ended, or that it is suspended; waits while it is neither. `await run` waits through suspensions too."""
        return await wait_for_outcome(self._host, self.id)

    async def snapshot(
        self,
        *,
        include: Include = "all",
        metadata: Mapping[str, Any] | None = None,
        limit: int | None = None,
        since: str | None = None,
    ) -> Snapshot:
        """The run as a value, its steps in the order in which they were recorded.

        `include` picks those that completed or failed, `since` those after that key, `limit` the oldest of them. `metadata` is
        added to the run's own.
        """
        selection = Selection(include, limit, since).check()
        return (await self._host.view(self.id)).snapshot(selection, metadata)

    async def resume_state(self) -> ResumeState:
        """The results of the run's steps, from which another run can go on."""
        return (await self._host.view(self.id)).resume_state()

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
    ) -> StreamReader[StreamItem]: ...
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
    ) -> StreamReader[V]: ...
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
    ) -> StreamReader[Any]: ...
    def stream(
        self,
        name: str,
        *,
        start: int = 0,
        timeout: Duration | None = None,
        returns: Any = Any,
        drop_failed: bool = False,
        details: bool = False,
    ) -> StreamReader[Any]:
        """`async for item in run.stream("tokens")`: what the run emits to this stream, from `start` on, until it ends.

        `timeout=` is how long each read waits: then `TimeoutError` is raised, and the reader can go on. `returns=` is the type of
        the values. With `details` items are `StreamItem`s, which tell position, step and attempt. `drop_failed` leaves out items
        of attempts that, when they are read, are known to have failed. Raises `StoreCapabilityError` when the store keeps no
        streams.
        """
        return StreamReader(
            self._host,
            self.id,
            name,
            start=start,
            timeout=timeout,
            returns=returns,
            details=details,
            drop_failed=drop_failed,
        )

    def subscribe(self, listener: Listener, *, mode: Mode = "sync", coalesce: Coalesce = "none") -> Subscription:
        """Call `listener` with what happens to this run while this process drives it. Call the subscription to unsubscribe.

        In mode `sync` the run waits for the listener, also for an async one; in mode `async` events are queued, and
        `coalesce="latest"` leaves only the newest in the queue. Nothing that a listener raises changes the run.
        """
        return Subscription(listener, mode, coalesce).join(subscriptions_of(drive_key(self._host.store, self.id)))

    async def signal(self, name: str, payload: Any = None, *, dedupe: str | None = None) -> None:
        """Put a signal into the run's inbox; the run gets it exactly once. `dedupe` makes repeating this call harmless."""
        await self._host.signal(self.id, name, payload, dedupe=dedupe)

    async def cancel(self, *, undo: bool = True) -> None:
        """Ask the run to stop. It ends as cancelled when its worker has seen that.

        With `undo=False` nothing that it has done is compensated.
        """
        await self._host.cancel(self.id, undo=undo)

    async def _value(self) -> T_co:
        outcome: Outcome[T_co] = await wait_for_outcome(self._host, self.id, through_waits=True)
        return outcome.unwrap()
