"""What every contender can do. Each shape of work is a method, so that a program reads like the tutorial of its library."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final, NamedTuple

from benchmarks.work import Work

# How many runs or steps go on at once in a warm-up: enough to open every connection that a pool of the usual size has.
_WARM_UP: Final = 20


class OwnTime(NamedTuple):
    """What a program measured itself, because a clock around it would see what is not meant."""

    seconds: float
    resident_bytes: int = 0


class Program(ABC):
    """One library on one store. `open` and `close` stand around every sample, outside of its time."""

    @abstractmethod
    async def open(self, place: str) -> None:
        """Be ready to run, with tables and connections."""

    @abstractmethod
    async def close(self) -> None:
        """Leave nothing behind in this process."""

    @abstractmethod
    async def run(self, steps: int, size: int) -> None:
        """One run of steps that follow one another."""

    async def runs(self, work: Work) -> None:
        """Many runs. Whoever has a better way than a task for each overrides it."""
        for wave in work.waves:
            if wave == 1:
                await self.run(work.steps, work.size)
            else:
                await asyncio.gather(*(self.run(work.steps, work.size) for _ in range(wave)))

    async def fan_out(self, steps: int) -> None:
        """One run whose steps are all started at once."""
        raise NotImplementedError

    async def record(self, steps: int) -> None:
        """Make a whole run that `replay` can drive again."""
        raise NotImplementedError

    async def replay(self, steps: int) -> OwnTime | None:
        """Drive it again."""
        raise NotImplementedError

    async def prepare(self, work: Work) -> None:
        """What this work needs before its time begins: a warm-up, or the run to replay."""
        if work.shape == "replay":
            await self.record(work.steps)
        elif work.shape == "fan out":
            await self.fan_out(_WARM_UP)
        else:
            width = min(work.at_once, _WARM_UP)
            await self.runs(Work(runs=width, steps=5, at_once=width, size=work.size))

    async def perform(self, work: Work) -> OwnTime | None:
        """The work."""
        match work.shape:
            case "replay":
                return await self.replay(work.steps)
            case "fan out":
                await self.fan_out(work.steps)
            case "runs":
                await self.runs(work)
            case _:
                pass
        return None


def result(n: int, size: int) -> str:
    """What step number `n` returns: the same for everybody."""
    return f"result number {n:06}".ljust(size, "x")
