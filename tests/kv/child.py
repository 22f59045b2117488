"""What the processes of these tests do: `python -m tests.kv.child WORD DSN ...`. They report by printing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perdure import Context, workflow
from perdure.events import Event
from perdure.kv import open_key_value_store
from perdure.state import ResumeStateCollector, StatePersistence


def say(*words: object) -> None:
    print(*words, flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def begin(kv: Any, name: str) -> None:
    """Use a new database when the parent says so, at the same moment as the other processes."""
    say("ready")
    sys.stdin.readline()
    await kv.set(name, "1")
    await kv.set(f"short {name}", "1", 0.001)
    say(await kv.get(name))
    await kv.close()


async def write(kv: Any) -> None:
    """Write ever higher numbers under a few keys, and say so when they are written."""
    for n in itertools.count(int(await kv.get("top") or 0) + 1):
        await kv.set(f"key {n % 3}", f"{n} " * 1000, None if n % 2 else 3600)
        await kv.set("top", f"{n}")
        await kv.set(f"gone {n}", "", 0.001)
        say(n)


def fork(kv: Any) -> None:
    """Go on with the same handle on both sides of a fork."""
    asyncio.run(kv.set("before", "1"))
    child = os.fork()
    name = "parent" if child else "child"
    for n in range(10):
        asyncio.run(kv.set(f"{name} {n}", name))
    if not child:
        asyncio.run(kv.close())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(kv.set("after", "1"))
    say(len(asyncio.run(kv.keys("* *"))), asyncio.run(kv.get("child 9")))
    asyncio.run(kv.close())


class Deps:
    """What the steps of a life have: a ledger that survives it, and where it ends."""

    def __init__(self, ledger: Path, step: str, when: str) -> None:
        self.ledger = ledger
        self.step = step
        self.when = when

    def charge(self, step: str) -> str:
        """The effect that must not happen twice."""
        with self.ledger.open("a") as ledger:
            ledger.write(f"{step} ")
        if (self.step, self.when) == (step, "in the step"):
            die()
        return f"receipt {step}"


@workflow
async def order(ctx: Context[Deps]) -> list[str]:
    return [await ctx.step("charge", ctx.deps.charge, step, key=f"charge:{step}") for step in "0123"]


async def recover(dsn: str, deps: Deps) -> None:
    """One life of the process: go on from the saved state, save at every event, and die where the parent says."""
    async with StatePersistence.open(dsn) as states:
        collector = ResumeStateCollector()

        async def save(event: Event) -> None:
            collector.handle_event(event)
            state = collector.resume_state()
            is_last = f"charge:{deps.step}" in state.steps
            if is_last and deps.when == "before the save":
                die()
            await states.save("order-1", state)
            if is_last and deps.when == "after the save":
                die()

        known = await states.load("order-1")
        outcome = await order.run(id="order-1", resume_state=known, on_event=save, deps=deps)
        say(outcome)


if __name__ == "__main__":
    word, dsn, *rest = sys.argv[1:]
    if word == "recover":
        asyncio.run(recover(dsn, Deps(Path(rest[0]), rest[1], rest[2])))
    elif word == "fork":
        fork(open_key_value_store(dsn))
    elif word == "begin":
        asyncio.run(begin(open_key_value_store(dsn), *rest))
    else:
        asyncio.run(write(open_key_value_store(dsn)))
