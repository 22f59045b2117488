"""The workflow of the kill and restart campaigns, the ledger that its steps write to, and the check of that ledger.

A line is `generation drive run step`, appended in one write: which process ran the step, in which of its drives of the run. Three
chains of four steps run concurrently; after them come a retried step, two signals that the run sends to itself, the signals that
its input names, and a sleep.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure import Context, Retry, Runtime, Workflow, current_step

# The chain of each step, and its number in the chain.
PLACES: Final = {f"{chain}{n}": (chain, n) for chain in "abc" for n in range(4)} | {
    step: ("end", n) for n, step in enumerate(["flaky1", "flaky2", "flaky3", "ask", "last"])
}
LENGTHS: Final = {"a": 4, "b": 4, "c": 4, "end": 5}


class Line(NamedTuple):
    """One step that ran."""

    generation: str
    drive: str
    run: str
    step: str


class Ledger:
    """A file that every process appends to. A line is in it even if its process is killed right after the write."""

    def __init__(self, path: Path, generation: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._generation = generation

    def note(self, *words: str) -> None:
        os.write(self._file, " ".join([str(self._generation), *words, "\n"]).encode())


def lines_of(path: Path) -> list[Line]:
    """Return the lines, but not one that another process is just writing."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Line(*text.split()) for text in texts if text.endswith("\n")]


def result_of(number: int, *outside: str) -> list[Any]:
    """The result of a run."""
    return ["a3", "b3", "c3", "flaky", f"answer {number}", f"thanks {number}", *outside, "last"]


class Steps:
    """The steps of one drive of a run."""

    def __init__(self, ledger: Ledger, runtime: Runtime) -> None:
        self._ledger = ledger
        self._runtime = runtime
        self._drive = secrets.token_hex(4)

    def note(self, step: str) -> str:
        self._ledger.note(self._drive, current_step().run_id, step)
        return step

    async def effect(self, step: str) -> str:
        self.note(step)
        await asyncio.sleep(0.01)
        return step

    async def flaky(self) -> str:
        self.note(f"flaky{current_step().attempt}")
        if current_step().attempt < 3:
            raise OSError("not yet")
        return "flaky"

    async def ask(self, number: int) -> None:
        """Send the run itself two signals, which it will wait for."""
        self.note("ask")
        info = current_step()
        for word in ("answer", "thanks"):
            await self._runtime.signal(info.run_id, word, f"{word} {number}", dedupe=info.idempotency_key)

    async def chain(self, ctx: Context[Any], name: str) -> str:
        """Four steps in sequence, the last of them in a thread."""
        for n in range(3):
            await ctx.step("effect", self.effect, f"{name}{n}", key=f"{name}{n}")
        return await ctx.step("note", self.note, f"{name}3", key=f"{name}3")


def order_of(ledger: Ledger, runtime: Callable[[], Runtime]) -> Workflow[Any, Any]:
    """The workflow, whose steps write to this ledger and signal through this runtime."""

    async def order(ctx: Context[Any], number: int, outside: list[str]) -> list[Any]:
        steps = Steps(ledger, runtime())
        ends: list[Any] = list(await asyncio.gather(*(steps.chain(ctx, name) for name in "abc")))
        ends.append(await ctx.step("flaky", steps.flaky, retry=Retry(attempts=3, wait_initial="5ms", wait_jitter=0)))
        await ctx.step("ask", steps.ask, number)
        ends += [await ctx.wait_for_signal(name) for name in ("answer", "thanks", *outside)]
        await ctx.sleep("pause", "20ms")
        return [*ends, await ctx.step("last", steps.effect, "last")]

    return Workflow("order", order)


def check(lines: list[Line]) -> None:
    """Only steps in flight when their process died ran again: what was acknowledged never did, and nothing was skipped."""
    in_one_drive = Counter((line.drive, line.step) for line in lines)
    assert max(in_one_drive.values()) == 1, "a step ran twice in one drive"
    furthest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    for line in lines:
        chain, n = PLACES[line.step]
        # A step is acknowledged before the next one of its chain runs.
        assert n >= furthest[line.run, chain], f"{line} ran again after it was acknowledged"
        assert n <= furthest[line.run, chain] + 1, f"a step before {line} was skipped"
        furthest[line.run, chain] = n
    short = {place: n for place, n in furthest.items() if n != LENGTHS[place[1]] - 1}
    assert not short, "runs that did not reach their end"


def count_repeats(lines: list[Line]) -> int:
    """How many times a step that had run in one process ran again in another."""
    generations = defaultdict(set)
    for line in lines:
        generations[line.run, line.step].add(line.generation)
    return sum(len(found) - 1 for found in generations.values())
