"""One life of a process: a Runtime on a store of its own, from its start until it is lost, drains, or every run has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from perdure import Runtime, Workflow, current_step
from perdure.errors import PerdureError, RunFinished
from perdure.model.journal import Entry
from perdure.model.records import Claim, Lease
from tests.fuzz.mortal_store import MortalStore
from tests.fuzz.world import Place, World

MAIN: Final = "main"
# A process that cannot be stopped in this time is stuck. No test waits for it otherwise.
PATIENCE: Final = 30.0


@dataclass(frozen=True)
class End:
    """How a process ends before its runs do.

    It is lost at a length of the main run's journal (`length`), at the write that would end it (`finish`), or after a while
    (`time`); or it drains after a while (`drain`).
    """

    kind: Literal["length", "finish", "time", "drain"]
    at: float = 0
    # Whether the write at which the process is lost takes effect.
    is_after: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.at:g}{' after the write' if self.is_after else ''}"


class Stuck(Exception):
    """Nothing happens any more."""


class Showing:
    """What a body shows in one attempt, until it begins to leave memory: what it does then depends on when that is."""

    def __init__(self, world: World, place: Place) -> None:
        self._world = world
        self._place = place
        self.is_open = True
        # Numbers in the order in which branches ask: part of keys and of the trace.
        self.asked = 0

    def close(self) -> None:
        """Show nothing any more."""
        self.is_open = False

    def note(self, what: Sequence[Any]) -> None:
        if self.is_open:
            self._world.tell("note", self._place, what)

    def complete(self, *, was_cancelled: bool, leaves_tasks: bool) -> None:
        """Show that the workflow function has come to its end."""
        if self.is_open:
            self._world.tell("complete", self._place, was_cancelled, leaves_tasks)
        self.close()

    @property
    def is_first(self) -> bool:
        """Whether no other attempt was before this one."""
        return self._place[2] == 0

    @property
    def running(self) -> dict[str, str]:
        """The nodes that run now, by their places."""
        return {} if not self._place[0] else self._world.attempt_at(self._place).running


class Process:
    """A process that drives the runs of a world. Once it is dead, nothing that it does counts."""

    def __init__(self, number: int, store: Any, world: World, end: End | None, place: str = "") -> None:
        # What tells the rows of this trial's world apart.
        self.place = place
        self.name = f"{id(world):x}-{number}"
        self.world = world
        self.end = end
        self.is_dead = False
        self.over = asyncio.Event()
        self.store = MortalStore(store, self)
        # What bodies call: the workflow of children, and a client that their steps use.
        self.child: Workflow[[str], str]
        self.client: Runtime
        self._sent = 0
        self._leases: dict[str, Lease] = {}
        self._showing: dict[str, Showing] = {}

    @property
    def dies_after(self) -> bool:
        return self.end is not None and self.end.is_after

    def dies_at(self, run_id: str, verb: str, entries: Sequence[Entry]) -> bool:
        """Return whether the process is lost at this write."""
        if self.end is None or run_id != MAIN:
            return False
        if self.end.kind == "finish":
            return verb in {"finish", "continue_as"}
        return self.end.kind == "length" and any(entry.seq >= self.end.at for entry in entries)

    def die(self) -> None:
        """Be lost, as by SIGKILL."""
        self.is_dead = True
        for showing in self._showing.values():
            showing.close()
        self.over.set()

    def hold(self, claim: Claim | None) -> None:
        """Note a lease of this process."""
        if claim is not None:
            self._leases[claim.lease.run_id] = claim.lease

    def begin(self, run_id: str, round_: int) -> Showing:
        """Note that a body begins from the top."""
        if self.is_dead:
            showing = Showing(self.world, ("", 0, 0))
            showing.close()
            return showing
        number = len(self.world.attempts[run_id, round_])
        self.world.tell("attempt", run_id, round_, number)
        showing = self._showing[run_id] = Showing(self.world, (run_id, round_, number))
        return showing

    def leave(self, lease: Lease) -> None:
        """Note that the run is not driven here any more."""
        if self._leases.get(lease.run_id) == lease:
            del self._leases[lease.run_id]
            if lease.run_id in self._showing:
                self._showing.pop(lease.run_id).close()

    def release(self, lease: Lease, problem: str | None) -> None:
        """Note that the run is given up. Only one that cannot go on has a problem, and none may be like that."""
        self.leave(lease)
        if problem is not None and not self.is_dead:
            self.world.tell("wrong", f"run {lease.run_id!r} has a problem: {problem}")

    async def send_from_step(self, name: str, text: str) -> None:
        """Send a signal to the run of this step, once however often the step is called."""
        step = current_step()
        with contextlib.suppress(RunFinished):
            await self.client.signal(step.run_id, name, f"step {text}", dedupe=step.idempotency_key)

    async def send_before_reply(self, run_id: str) -> None:
        """Send a signal while the reply to a record is under way."""
        self._sent += 1
        with contextlib.suppress(RunFinished):
            await self.client.signal(run_id, "ab"[self._sent % 2], f"during {self.name} {self._sent}")

    async def cancel_from_step(self) -> None:
        """Cancel the run of this step."""
        await self.client.cancel(current_step().run_id)

    async def live(self, runtime: Runtime, start: Any) -> None:
        """Work until this process is lost, has drained, or every run has ended. Raises `Stuck`."""
        loop = asyncio.get_running_loop()
        timer = None
        if self.end is not None and self.end.kind in {"time", "drain"}:
            timer = loop.call_later(self.end.at, self.die if self.end.kind == "time" else self.over.set)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._work(runtime, start)
        except TimeoutError:
            raise Stuck from None
        finally:
            if timer is not None:
                timer.cancel()
            self.is_dead = True

    async def _work(self, runtime: Runtime, start: Any) -> None:
        try:
            async with runtime:
                with contextlib.suppress(PerdureError):
                    await start(runtime)
                while not (self.over.is_set() or self.world.has_ended or self.world.wrong):
                    await _first(self.over.wait(), self.world.changed.wait())
                    self.world.changed.clear()
        except PerdureError:
            if not self.is_dead:
                raise

    async def bury(self, store: Any) -> None:
        """Give up the leases that the process had when it was lost, as a store does that sees its death."""
        for lease in list(self._leases.values()):
            with contextlib.suppress(PerdureError):
                await store.release(lease)


async def _first(*waits: Any) -> None:
    """Return when one of these is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
