"""perdure without a store: a workflow that is just called."""

from __future__ import annotations

from benchmarks.program import Program
from benchmarks.programs.flows import steps


class PerdureInMemory(Program):
    """There is nothing to open."""

    async def open(self, place: str) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""

    async def run(self, steps_: int, size: int) -> None:
        """Call it."""
        await steps(steps_, size)


PROGRAM = PerdureInMemory()
