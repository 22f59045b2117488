"""`await coroutine()` where the coroutine is empty: the unit in which costs in memory are told."""

from __future__ import annotations

from benchmarks.program import Program


async def nothing() -> None:
    """Do nothing."""


class BareAwait(Program):
    """The cheapest thing that a step could be."""

    async def open(self, place: str) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""

    async def run(self, steps: int, size: int) -> None:
        """Await so often. The loop around it costs a tenth of that, and counts as well."""
        for _ in range(steps):
            await nothing()


PROGRAM = BareAwait()
