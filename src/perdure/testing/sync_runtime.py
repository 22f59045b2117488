"""`testing.runtime_sync(signup)`: the runtime of `testing.runtime`, blocking, for tests that are no coroutines.

It has an event loop of its own, which runs only while one of its methods does: between two calls nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

from perdure.definition import Workflow
from perdure.model.durations import Duration
from perdure.operations.approvals import UNCHANGED
from perdure.sync import SyncRun, SyncRuntime
from perdure.testing.clock import ManualClock
from perdure.testing.history import HistoryItem
from perdure.testing.stubs import _NOTHING, Stub
from perdure.testing.virtual_runtime import VirtualRuntime

T = TypeVar("T")


class SyncVirtualRuntime(SyncRuntime):
    """A `VirtualRuntime` whose methods block, as those of `runtime.sync` do. The runs that it gives are blocking ones too."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self._runner = asyncio.Runner()
        self._virtual = runtime
        super().__init__(runtime, self._run_on_own_loop)

    def _run_on_own_loop(self, coro: Coroutine[Any, Any, T], by: str = "", /) -> T:
        del by
        try:
            return self._runner.run(coro)
        finally:
            coro.close()  # it was not begun if an event loop runs in this thread

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._runner.close()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._runner.close()

    @property
    def clock(self) -> ManualClock:
        """The clock of this runtime."""
        return self._virtual.clock

    def now(self) -> datetime:
        """Return the virtual time."""
        return self._virtual.now()

    def skip(self, duration: Duration) -> None:
        """Let this much time pass: everything that it brings happens, in its order, and comes to rest."""
        self._block(self._virtual.skip(duration))

    def skip_to(self, at: datetime) -> None:
        """Let time pass until this instant, as `skip` does."""
        self._block(self._virtual.skip_to(at))

    def settle(self) -> None:
        """Return when everything is at rest. No time passes."""
        self._block(self._virtual.settle())

    def stub(
        self, target: Any, /, *, returns: Any = _NOTHING, raises: Any = _NOTHING, calls: Any = _NOTHING, times: int | None = None
    ) -> Stub:
        """Call something else in place of a step's function, as `VirtualRuntime.stub` says."""
        return self._virtual.stub(target, returns=returns, raises=raises, calls=calls, times=times)

    def signal_when_waiting(self, name: str, payload: Any = None, *, run_id: str | None = None) -> None:
        """Send this signal to each run as soon as it waits for it, or only to `run_id`. A second one is for the second wait."""
        self._virtual.signal_when_waiting(name, payload, run_id=run_id)

    def approve_when_waiting(self, name: str, *, by: str, payload: Any = UNCHANGED, run_id: str | None = None) -> None:
        """Approve what each run asks with `ctx.approve(name)`, as soon as it does, or only what `run_id` asks."""
        self._virtual.approve_when_waiting(name, by=by, payload=payload, run_id=run_id)

    def reject_when_waiting(self, name: str, *, by: str, reason: str | None = None, run_id: str | None = None) -> None:
        """Reject what each run asks with `ctx.approve(name)`, as soon as it does, or only what `run_id` asks."""
        self._virtual.reject_when_waiting(name, by=by, reason=reason, run_id=run_id)

    def history(self, run: SyncRun[Any] | str) -> list[HistoryItem]:
        """Return what the run has recorded, in order; `str(item)` is a line to read."""
        return self._block(self._virtual.history(_id_of(run)))

    def assert_history(self, run: SyncRun[Any] | str, expected: list[str]) -> None:
        """Raise AssertionError, with the difference line by line, unless the run has recorded exactly this."""
        self._block(self._virtual.assert_history(_id_of(run), expected))


def _id_of(run: SyncRun[Any] | str) -> str:
    return run if isinstance(run, str) else run.id


def runtime_sync(*workflows: Workflow[Any, Any], **options: Any) -> SyncVirtualRuntime:
    """As `testing.runtime`, blocking: `with testing.runtime_sync(signup) as rt: assert rt.run(signup, "ada") == Ok(...)`."""
    return SyncVirtualRuntime(VirtualRuntime(workflows, **options))
