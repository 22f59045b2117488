"""Shared by tests in which a run goes on in another world: that world, and the ways to move a run into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from perdure import Err, Outcome, Run, Runtime, Workflow, stores
from perdure.errors import SnapshotCorrupt, StepChanged
from perdure.snapshots.snapshot import Snapshot
from perdure.state import dump_state
from perdure.testing import ManualClock


class There:
    """Another place to go on in: a store of its own, and the time both places go by."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.store = stores.memory()
        self.runtime = Runtime(self.store, clock=clock, concurrency=0, unload_grace=0)

    async def begin(self, flow: Workflow[..., Any], *args: Any, **options: Any) -> Outcome[Any]:
        """The outcome; an `Err` also when the state does not fit the code, which is raised."""
        self.runtime.register(flow)
        try:
            return await flow.run(*args, id="there", store=self.store, **options)
        except (StepChanged, SnapshotCorrupt) as misfit:
            return Err(misfit)

    async def later(self, duration: str) -> Outcome[Any]:
        self.clock.advance(duration)
        return (await self.runtime.sweep())["there"]

    async def run(self) -> Run[Any]:
        run = await self.runtime.get("there")
        assert run is not None
        return run

    async def snapshot(self) -> Snapshot:
        return await (await self.run()).snapshot()


def through_text(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as it arrives elsewhere."""
    tree: dict[str, Any] = json.loads(json.dumps(snapshot.to_dict()))
    return tree


async def exported(run: Run[Any], *, as_state: bool) -> Any:
    """The run as it arrives elsewhere, as a snapshot or as a resume state."""
    if as_state:
        return json.loads(dump_state(await run.resume_state()))
    return through_text(await run.snapshot())


def returning(value: Any) -> Callable[[], Any]:
    """A step's function that gives this."""
    return lambda: value
