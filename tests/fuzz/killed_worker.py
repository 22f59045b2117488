"""A process that drives programs and kills itself with SIGKILL at the places that it is told; `killed` starts it.

Events of its worlds go to files, a line each, before anything else happens: what a kill leaves there is what was shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from perdure import Runtime, open_store
from perdure.store import FullStore
from tests.fuzz import constructs
from tests.fuzz.body import workflows_of
from tests.fuzz.hosting import Hosting, hosting
from tests.fuzz.mortal_store import ClientStore
from tests.fuzz.process import MAIN, End, Process
from tests.fuzz.programs import Program, available, random_program
from tests.fuzz.world import World


class Task(NamedTuple):
    """What a worker process is to drive: the program of a seed, on a store, until its end."""

    seed: int
    dsn: str
    events: str
    # Which life of the program this is, and how it ends, if not by itself.
    life: int
    end: tuple[str, float, bool] | None

    @property
    def program(self) -> Program:
        return random_program(self.seed, available(self.dsn.partition(":")[0]))

    def open_store(self) -> FullStore:
        """Return the store, in which every program has a place of its own."""
        return open_store(f"{self.dsn}{'&' if '?' in self.dsn else '?'}prefix=fuzz-{self.seed}")


class LoggedWorld(World):
    """A world whose events are in a file, from the beginning."""

    def __init__(self, rng: random.Random, path: Path) -> None:
        super().__init__(rng)
        for event, *what in read_events(path):
            super().tell(event, *what)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, event: str, *what: Any) -> None:
        os.write(self._file, json.dumps([event, *what]).encode() + b"\n")
        super().tell(event, *what)

    def close(self) -> None:
        os.close(self._file)


def read_events(path: Path) -> Iterator[list[Any]]:
    """Yield the events in this file; a kill may have cut off the last one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if line.endswith(b"\n"):
            yield json.loads(line)


class Killed(Process):
    """A process that is really killed."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def _drive(task: Task, host: Hosting) -> None:
    program, rng = task.program, random.Random(f"{task.seed} {task.life}")
    world = LoggedWorld(rng, Path(task.events))
    end = None if task.end is None else End(*task.end)  # type: ignore[arg-type]  # a word of the literal type
    store, client_store = task.open_store(), task.open_store()
    process = Killed(task.life, store, world, end, place=str(task.seed))
    workflows = workflows_of(program, process, host)
    client = Runtime(ClientStore(client_store, world), concurrency=0)
    process.child, process.client = workflows[1], client
    grace = 1.0 if program.has_own_io else rng.choice((0.0, 0.01, 1.0))
    options: dict[str, Any] = {} if program.deadline is None else {"deadline": program.deadline}

    async def start(runtime: Runtime) -> None:
        if MAIN not in world.created:
            await runtime.start(workflows[0], 0, id=MAIN, **options)

    await process.live(Runtime(process.store, workflows, unload_grace=grace, lease_ttl="2s", drain_after=1.0, cache={}), start)
    await client.close()
    await store.close()
    await client_store.close()
    world.close()


async def _drive_all(tasks: list[Task]) -> None:
    constructs.prepare()
    async with hosting() as host:
        await asyncio.gather(*(_drive(task, host) for task in tasks))


if __name__ == "__main__":
    asyncio.run(_drive_all([Task(*each) for each in json.load(sys.stdin)]))
