"""What tests of events share: listeners, and workflows to listen to."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import pytest

from perdure import Context, Run, Workflow
from perdure.events import Event, LeaseChangedEvent, SignalReceivedEvent, StepCompleteEvent, StepEvent

# How everything begins that is in a store.
BEGUN: Final = ["lease acquired", "run_start"]


def said(event: Event) -> str:
    """An event in a few words: its type, what it is about, and its attempt if that is not the first."""
    match event:
        case StepEvent(key=key, attempt=attempt):
            again = " again" if isinstance(event, StepCompleteEvent) and event.is_replayed else ""
            return f"{event.type} {key}{'' if attempt == 1 else f' #{attempt}'}{again}"
        case LeaseChangedEvent(action=action):
            return f"lease {action}"
        case SignalReceivedEvent(key=key):
            return f"signal {key}"
    return event.type


class Heard:
    """A listener that remembers its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def said(self) -> list[str]:
        return [said(event) for event in self.events]

    @property
    def types(self) -> list[str]:
        return [event.type for event in self.events]

    def take(self) -> list[str]:
        """What was said since the last time."""
        taken, self.events = self.said, []
        return taken

    def one(self, kind: type[Any]) -> Any:
        """The only event of this kind."""
        (found,) = [event for event in self.events if isinstance(event, kind)]
        return found


class Slow(Heard):
    """A listener that takes turns of the loop, or time, differently long each time."""

    def __init__(self, seed: int, *, most_seconds: float = 0.05) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._most_seconds = most_seconds
        self.is_listening = 0

    def __call__(self, event: Event) -> Any:
        return self._listen(event) if self._rng.random() < 0.8 else super().__call__(event)

    async def _listen(self, event: Event) -> None:
        self.is_listening += 1
        assert self.is_listening == 1, "called with two events at once"
        if self._rng.random() < 0.5:
            for _ in range(self._rng.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._rng.random() * self._most_seconds)
        self.is_listening -= 1
        self.events.append(event)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of listeners that raised, failed assertions included: nothing else would show them."""
    records = [record for record in caplog.get_records("call") if record.name == "perdure"]
    return [
        f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}"
        for record in records
        if record.getMessage().startswith("a listener")
    ]


async def work(value: Any = None) -> Any:
    return value


async def fails() -> int:
    raise ValueError("not today")


async def hangs() -> None:
    await asyncio.get_running_loop().create_future()


def step(key: str) -> list[str]:
    """What is said of a step that goes well."""
    return [f"step_start {key}", "persist", f"step_success {key}", f"step_complete {key}"]


def skipped(key: str) -> list[str]:
    """What is said of a step that was recorded before."""
    return [f"step_skipped {key}", f"step_complete {key} again"]


class Flaky:
    """Fails so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise ValueError(f"{self.left} left")
        return "at last"


async def two_steps(ctx: Context[Any]) -> str:
    first = await ctx.step("a", work, "a")
    return f"{first}{await ctx.step('b', work, 'b')}"


async def waits(ctx: Context[Any]) -> Any:
    await ctx.step("a", work)
    answer = await ctx.wait_for_signal("go")
    await ctx.step("b", work)
    return answer


async def standing(run: Run[Any], status: str) -> None:
    """Return when the run stands like this."""
    while await run.status() != status:  # noqa: ASYNC110 - what is in a store is no event
        await asyncio.sleep(0.001)


TWO_STEPS: Final[Workflow[[], str]] = Workflow("two_steps", two_steps)
WAITS: Final[Workflow[[], Any]] = Workflow("waits", waits)
TWO_STEPS_SAID: Final = [*BEGUN, *step("a"), *step("b"), "run_complete"]
