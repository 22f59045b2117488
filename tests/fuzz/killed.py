"""Programs in worker processes that are killed with SIGKILL, on a store that outlives them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perdure import Runtime
from perdure.model.records import UNFINISHED
from perdure.store import FullStore
from tests.fuzz.judge import compared, violations
from tests.fuzz.killed_worker import LoggedWorld, Task
from tests.fuzz.mortal_store import ClientStore
from tests.fuzz.outside import Outside
from tests.fuzz.process import MAIN
from tests.fuzz.trial import Failure, shown_journals, shown_row, shown_traces
from tests.fuzz.world import World

# How many programs share a worker process: starting one takes longer than a program.
TOGETHER: Final = 10
_MOST_LIVES: Final = 40
# A worker that takes longer than this is stuck.
_PATIENCE: Final = 90.0


@dataclass
class KilledReport:
    """What a campaign of kills has done and found."""

    programs: int = 0
    kills: int = 0
    entries: int = 0
    compared: int = 0
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        bad = " ".join(str(each.program.seed) for each in self.failures)
        return (
            f"Python {sys.version.split()[0]}: {self.programs} programs, {self.kills} kills, {self.entries} entries, "
            f"{self.compared} compared, {len(self.failures)} bad{': ' if bad else ''}{bad}"
        )


def run_killed(seeds: Sequence[int], dsn: str) -> KilledReport:
    """Run the programs of these seeds in processes that are killed."""
    report = KilledReport()
    with tempfile.TemporaryDirectory(prefix="perdure-fuzz-") as folder:
        for at in range(0, len(seeds), TOGETHER):
            tasks = [Task(seed, dsn, f"{folder}/{seed}", 0, None) for seed in seeds[at : at + TOGETHER]]
            asyncio.run(_Fleet(tasks, report).run())
    return report


class _Fleet:
    """One worker process after the other, for these programs."""

    def __init__(self, tasks: list[Task], report: KilledReport) -> None:
        self._tasks = tasks
        self._report = report
        self._rng = random.Random(tasks[0].seed)
        self._programs = {task.seed: task.program for task in tasks}

    async def run(self) -> None:
        stores = {task.seed: task.open_store() for task in self._tasks}
        worlds = {task.seed: LoggedWorld(self._rng, Path(task.events)) for task in self._tasks}
        clients = {seed: Runtime(ClientStore(store, worlds[seed]), concurrency=0) for seed, store in stores.items()}
        outside = [asyncio.create_task(self._at_work(seed, clients[seed], worlds[seed])) for seed in stores]
        output = await self._until_ended(stores)
        for each in outside:
            each.cancel()
        await asyncio.gather(*outside, return_exceptions=True)
        for task in self._tasks:
            worlds[task.seed].close()
            await self._judge(task, stores[task.seed], output)
            await clients[task.seed].close()
            await stores[task.seed].close()

    async def _at_work(self, seed: int, client: Runtime, world: World) -> None:
        async def runs() -> list[str]:
            return [info.id for info in await client.list(status=UNFINISHED)]

        async with Outside(client, self._programs[seed], world.rng, runs, longest_pause=0.1).at_work():
            await asyncio.Event().wait()

    async def _until_ended(self, stores: dict[int, FullStore]) -> str:
        """Start a process in the place of each that was killed, until every run has ended. Return what the last one said."""
        tasks = self._tasks
        for life in range(_MOST_LIVES):
            is_last = life > 6  # by then every place was tried, and the runs are to end
            tasks = [task._replace(life=life, end=None if is_last else self._random_end()) for task in tasks]
            code, output = await _work(tasks)
            self._report.kills += code < 0
            if code > 0:
                return output
            tasks = [task for task in tasks if not await self._take_up(task, stores[task.seed])]
            if not tasks:
                break
        return ""

    def _random_end(self) -> tuple[str, float, bool] | None:
        """Return how a program ends its process, if it is the one that does: a kill ends the lives of all that share it."""
        rng = self._rng
        kind = rng.choice(("", "", "", "", "finish", "time", "length", "length"))
        match kind:
            case "time":
                return kind, 0.1 + rng.random() * 0.5, False
            case "length":
                return kind, rng.randint(1, 60), rng.random() < 0.5
            case "finish":
                return kind, 0, False
        return None

    async def _take_up(self, task: Task, store: FullStore) -> bool:
        """Note what the store accepted and the process could not note any more. Return whether every run has ended."""
        world = LoggedWorld(self._rng, Path(task.events))
        rows = [row for info in await store.list(limit=1000) if (row := await store.get(info.id)) is not None]
        for row in rows:
            if row.id not in world.created:
                world.tell("created", row.id)
            for _ in range(row.generation - world.rounds[row.id]):
                world.tell("started_over", row.id)
            world.accept(row.id, await store.journal(row.id))
            if row.ended and row.id not in world.ended:
                world.tell("ended", row.id, row.status)
        world.close()
        return world.has_ended and MAIN in world.ended

    async def _judge(self, task: Task, store: FullStore, output: str) -> None:
        world, report, program = LoggedWorld(self._rng, Path(task.events)), self._report, self._programs[task.seed]
        world.close()
        rows = [row for run_id in sorted(world.created) if (row := await store.get(run_id)) is not None]
        journals = {row.id: await store.journal(row.id) for row in rows}
        inboxes = {row.id: {each.seq for each in await store.inbox(row.id)} for row in rows}
        _complete_consumed(world, inboxes)
        wrong = violations(program, world, inboxes)
        if output and not world.has_ended:
            wrong.insert(0, f"the worker process failed: {output[-3000:]}")
        report.programs += 1
        report.entries += sum(map(len, journals.values()))
        report.compared += compared(world)
        if wrong:
            shown = [*map(shown_row, rows), *shown_journals(journals)]
            report.failures.append(Failure(program, [], wrong, shown_traces(world), shown))


def _complete_consumed(world: World, inboxes: dict[str, set[int]]) -> None:
    """Count signals as consumed that bodies have seen: the process may have been killed before it could note that."""
    for run_id, sent in world.sent.items():
        seen: Counter[tuple[str, str]] = Counter()
        for (owner, _), attempts in world.attempts.items():
            if owner == run_id:
                for attempt in attempts:
                    seen.update({(each[2], each[3]) for each in attempt.trace if each[1:2] == ("got",)})
        missing = sent.keys() - inboxes.get(run_id, set()) - set(world.consumed[run_id])
        world.consumed[run_id] = sorted({*world.consumed[run_id], *(seq for seq in missing if seen[sent[seq]])})


async def _work(tasks: Sequence[Task]) -> tuple[int, str]:
    """Run a worker process to its end, and return its exit code and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fuzz.killed_worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent.parent,
    )
    try:
        async with asyncio.timeout(_PATIENCE):
            output, _ = await process.communicate(json.dumps(tasks).encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, "it did not end"
    return process.returncode or 0, output.decode()
