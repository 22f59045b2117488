"""The step functions of random programs. Each call is noted; how long it takes is random, and another time it is another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from perdure import current_step
from tests.fuzz.world import World

if TYPE_CHECKING:
    from tests.fuzz.process import Process

_LONGEST: Final = 0.008


class Boom(Exception):
    """What failing steps raise."""


class Steps:
    """The step functions of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world
        self._rng: random.Random = process.world.rng

    def _called(self, label: str, *, at_most_once: bool = False, is_compensated: bool = False) -> str:
        """Note that the function of this step is called, and return a value that no other call of it has.

        A result that a body sees before it is acknowledged is another one after a crash. A process that is dead calls nothing.
        """
        if self._process.is_dead:
            return "the process is dead"
        step = current_step()
        self._world.tell("called", step.idempotency_key, step.run_id, step.key, at_most_once, is_compensated)
        return f"<{label} #{self._world.effects[step.idempotency_key].calls}>"

    async def _take_a_while(self) -> None:
        for _ in range(self._rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        await asyncio.sleep(self._rng.random() * _LONGEST)

    async def quick(self, label: str) -> str:
        return self._called(label)

    async def slow(self, label: str) -> str:
        value = self._called(label)
        await self._take_a_while()
        return value

    def in_thread(self, label: str) -> str:
        value = self._called(label)
        time.sleep(self._rng.random() * 0.002)
        return value

    async def fail(self, label: str) -> str:
        value = self._called(label)
        await self._take_a_while()
        raise Boom(value)

    async def fail_at_first(self, label: str) -> str:
        value = self._called(label)
        await asyncio.sleep(0)
        if current_step().attempt < 3:
            raise Boom(value)
        return value

    async def hang(self, label: str) -> str:
        """Run until it is cancelled, or for far longer than any limit in a program."""
        value = self._called(label)
        await asyncio.sleep(0.1)
        return value

    async def once(self, label: str) -> str:
        value = self._called(label, at_most_once=True)
        await self._take_a_while()
        return value

    async def compensated(self, label: str) -> str:
        value = self._called(label, is_compensated=True)
        await self._take_a_while()
        return value

    async def unwind(self, label: str) -> str:
        """Take a while to end when it is cancelled."""
        value = self._called(label)
        try:
            await self._take_a_while()
        except asyncio.CancelledError:
            await asyncio.sleep(self._rng.choice((0, 0.002)))
            raise
        return value

    async def stubborn(self, label: str) -> str:
        """Return although it is cancelled."""
        value = self._called(label)
        try:
            await self._take_a_while()
        except asyncio.CancelledError:
            await asyncio.sleep(self._rng.choice((0, 0.001)))
        return value

    async def emitting(self, label: str) -> str:
        value = self._called(label)
        for number in range(3):
            await current_step().emit("steps", f"{label}:{number}")
            await asyncio.sleep(0)
        return value

    async def undo(self, result: Any) -> None:
        """Undo a step that had this result."""
        self._called("undo")
        if not self._process.is_dead:
            undoes = current_step().undoes
            assert undoes is not None
            self._world.tell("undone", undoes)
        await asyncio.sleep(self._rng.choice((0, 0.001)))

    def sender(self, send: Callable[[str, str], Any], name: str) -> Callable[[str], Any]:
        """Return a step function that sends a signal."""

        async def send_signal(label: str) -> str:
            value = self._called(label)
            await self._take_a_while()
            await send(name, label)
            return value

        return send_signal

    def cancelling(self, cancel: Callable[[], Any]) -> Callable[[str], Any]:
        """Return a step function that has its run cancelled, and goes on until it is cancelled itself."""

        async def cancel_run(label: str) -> str:
            value = self._called(label)
            await cancel()
            await asyncio.sleep(30)
            return value

        return cancel_run

    async def write_row(self, transaction: Any, label: str) -> str:
        """Write a row in the transaction of the record. A second one of this step is refused by the database."""
        value = self._called(label)
        await transaction.execute("CREATE TABLE IF NOT EXISTS fuzz_rows (name TEXT PRIMARY KEY)")
        name = f"{self._process.place} {current_step().idempotency_key}"
        await transaction.execute("INSERT INTO fuzz_rows (name) VALUES (?)", [name])
        await asyncio.sleep(self._rng.choice((0, 0.001)))
        return value
