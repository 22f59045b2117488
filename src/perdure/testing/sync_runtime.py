"""`testing.runtime_sync(signup)`: the runtime of `testing.runtime`, blocking, for tests that are no coroutines.

It has an event loop of its own, which runs only while one of its methods does: between two calls nothing happens.
"""

from __future__ import annotations

import asyncio
import inspect
from types import TracebackType
from typing import Any, Self, TypeVar

from perdure.definition import Workflow
from perdure.run import Run
from perdure.testing.virtual_runtime import VirtualRuntime

T = TypeVar("T")


class SyncVirtualRuntime:
    """Every method of `VirtualRuntime`, blocking. `result` waits for a run that was started."""

    def __init__(self, workflows: tuple[Workflow[Any, Any], ...], options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._workflows = workflows
        self._options = options
        self._runtime: VirtualRuntime | None = None

    def __enter__(self) -> Self:
        async def enter() -> VirtualRuntime:
            return await VirtualRuntime(self._workflows, **self._options).__aenter__()

        self._runtime = self._runner.run(enter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._runtime is not None
        try:
            self._runner.run(self._runtime.__aexit__(kind, error, trace))
        finally:
            self._runner.close()

    def result(self, run: Run[T]) -> T:
        """The value of the run, when it has ended; raises what it raised."""

        async def wait() -> T:
            return await run

        return self._runner.run(wait())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runtime, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self._runner.run(found(*args, **options))


def runtime_sync(*workflows: Workflow[Any, Any], **options: Any) -> SyncVirtualRuntime:
    """As `testing.runtime`, blocking: `with testing.runtime_sync(signup) as rt: assert rt.run(signup, "ada") == Ok(...)`."""
    return SyncVirtualRuntime(workflows, options)
