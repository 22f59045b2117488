"""One program through several lives: what a process leaves behind another takes up, until every run has ended."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from perdure import Runtime
from perdure.model.journal import Entry
from perdure.model.records import RunRow
from perdure.store import Store
from tests.fuzz.body import workflows_of
from tests.fuzz.hosting import Hosting
from tests.fuzz.judge import compared, violations
from tests.fuzz.mortal_store import ClientStore
from tests.fuzz.outside import Outside
from tests.fuzz.process import MAIN, End, Process, Stuck
from tests.fuzz.programs import Program
from tests.fuzz.world import World

# A journal of so many entries is cut at each of them; of a longer one, a few lengths are chosen.
SMALL: Final = 10
LEASE: Final = "6s"


@dataclass
class Count:
    """What a campaign has done."""

    programs: int = 0
    rounds: int = 0
    attempts: int = 0
    crashes: int = 0
    drains: int = 0
    entries: int = 0
    compared: int = 0
    ends: dict[str, int] = field(default_factory=dict)


@dataclass
class Failure:
    """A program and what was wrong with it."""

    program: Program
    ends: list[End]
    wrong: list[str]
    traces: list[str] = field(default_factory=list)
    journals: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        plan = ", then ".join(map(str, self.ends)) or "undisturbed"
        parts = [f"== seed {self.program.seed}: {self.wrong[0].splitlines()[0]}", str(self.program), f"processes end: {plan}"]
        return "\n".join([*parts, *(f"- {each}" for each in self.wrong), *self.traces, *self.journals])


@dataclass
class Surroundings:
    """What the programs of a campaign share: where runs are stored, what serves bodies, and how thoroughly each is tried."""

    open_store: Callable[[str], Store]
    hosting: Hosting
    count: Count
    # In how many rounds the processes are lost, after the first in which only the last write is; at every length if None.
    rounds: int | None = 2
    # Numbers that make names of places in a store unique.
    places: Iterator[int] = field(default_factory=itertools.count)


class Trial:
    """A program, run in rounds in which processes end at different places."""

    def __init__(self, program: Program, surroundings: Surroundings) -> None:
        self.program = program
        self.surroundings = surroundings
        self._rng = random.Random(program.seed + 1)

    async def run(self) -> Failure | None:
        """Run the program, round after round, and return what was wrong."""
        self.surroundings.count.programs += 1
        plans: list[list[End]] = [[End("finish", is_after=False)]]
        number = 0
        while plans:
            plan = plans.pop(0)
            number += 1
            length, failure = await Round(self, number, plan).run()
            if failure is not None:
                return failure
            if number == 1:
                plans = self._plans(length)
        return None

    def _plans(self, length: int) -> list[list[End]]:
        """Return how the processes of the other rounds end."""
        rng, rounds = self._rng, self.surroundings.rounds
        if rounds is None and length <= SMALL:
            return [[End("length", at, rng.random() < 0.5), End("finish")] for at in range(1, length + 1)]
        return [self._random_plan(length) for _ in range(2 if rounds is None else rounds)]

    def _random_plan(self, length: int) -> list[End]:
        rng = self._rng
        plan: list[End] = []
        at = 0
        for _ in range(rng.randint(1, 3)):
            match rng.choice(("length", "length", "time", "drain")):
                case "length":
                    at += rng.randint(1, max(1, length // 2))
                    plan.append(End("length", at, rng.random() < 0.5))
                case "time":
                    plan.append(End("time", rng.random() * 0.03))
                case _:
                    plan.append(End("drain", rng.random() * 0.03))
        return [*plan, End("finish")]


class Round:
    """The program once from its start to its end."""

    def __init__(self, trial: Trial, number: int, plan: list[End]) -> None:
        self._trial = trial
        self._plan = plan
        self._rng = random.Random(f"{trial.program.seed} {number}")
        self._place = f"{trial.program.seed}-{number}-{next(trial.surroundings.places)}"
        self._store = trial.surroundings.open_store(self._place)
        self._world = World(self._rng)
        self._lives = 0

    async def run(self) -> tuple[int, Failure | None]:
        """Return how long the main run's journal became, and what was wrong."""
        program, world, count = self._trial.program, self._world, self._trial.surroundings.count
        client = Runtime(ClientStore(self._store, world), concurrency=0)
        stuck: list[str] = []
        try:
            async with Outside(client, program, self._rng, self._unfinished).at_work():
                for end in (*self._plan, None):
                    process = Process(self._lives, self._store, world, end, self._place)
                    self._lives += 1
                    await self._live(process, client)
                    await process.bury(self._store)
                    if world.has_ended or world.wrong:
                        break
        except Stuck:
            stuck = [self._explain_stuck()]
        journals = {run_id: await self._store.journal(run_id) for run_id in sorted(world.created)}
        inboxes = {run_id: {each.seq for each in await self._store.inbox(run_id)} for run_id in world.created}
        rows = [row for run_id in sorted(world.created) if (row := await self._store.get(run_id)) is not None]
        outcomes = [shown_row(row) for row in rows]
        wrong = stuck or violations(program, world, inboxes)
        await client.close()
        count.rounds += 1
        count.attempts += sum(map(len, world.attempts.values()))
        count.entries += sum(map(len, journals.values()))
        count.compared += compared(world)
        await self._store.close()
        if not wrong:
            return world.lengths.get(MAIN, 0), None
        return 0, Failure(program, self._plan, wrong, shown_traces(world), [*outcomes, *shown_journals(journals)])

    async def _unfinished(self) -> list[str]:
        return sorted(self._world.created - self._world.ended.keys())

    async def _live(self, process: Process, client: Runtime) -> None:
        program, rng = self._trial.program, self._rng
        workflows = workflows_of(program, process, self._trial.surroundings.hosting)
        process.child, process.client = workflows[1], client
        # What a body awaits by itself may be over late: it has a second then, as by default.
        grace = 1.0 if program.has_own_io else rng.choice((0.0, 0.0, 0.01, 1.0))
        runtime = Runtime(process.store, workflows, unload_grace=grace, lease_ttl=LEASE, drain_after=1.0, cache=_CACHE)
        options: dict[str, Any] = {} if program.deadline is None else {"deadline": program.deadline}

        async def start(runtime: Runtime) -> None:
            if MAIN not in self._world.created:
                await runtime.start(workflows[0], 0, id=MAIN, **options)

        await process.live(runtime, start)
        kind = None if process.end is None or not process.over.is_set() else process.end.kind
        self._trial.surroundings.count.drains += kind == "drain"
        self._trial.surroundings.count.crashes += kind not in {None, "drain"}

    def _explain_stuck(self) -> str:
        world = self._world
        lines = ["nothing happens any more"]
        lines += [f"run {run_id!r} has not ended" for run_id in sorted(world.created - world.ended.keys())]
        for (run_id, _), attempts in world.attempts.items():
            running = attempts[-1].running if attempts else {}
            lines += [f"run {run_id!r} is in {kind} at {at}" for at, kind in running.items()]
        for task in asyncio.all_tasks():
            if (coroutine := task.get_coro()) is not None and "fuzz" in repr(coroutine):
                lines.append(f"task {_shown_wait(coroutine)}")
        return "\n  ".join(lines)


_CACHE: Final[dict[str, str]] = {}


def _shown_wait(coroutine: Any) -> str:
    """Return the chain of what a coroutine awaits."""
    chain = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        chain.append(f"{getattr(coroutine, '__qualname__', repr(coroutine)[:80])}{f':{frame.f_lineno}' if frame else ''}")
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(chain)


def shown_traces(world: World) -> list[str]:
    """Return the traces of every attempt as lines of text."""
    lines: list[str] = []
    for (run_id, round_), attempts in world.attempts.items():
        for attempt in attempts:
            lines.append(f"trace of run {run_id!r}, round {round_}, {attempt}:")
            lines += [f"    {number:3} {each}" for number, each in enumerate(attempt.trace)]
    return lines


def shown_row(row: RunRow) -> str:
    if row.ended:
        return f"run {row.id!r} is {row.status}: {(row.outcome or b'')[:400].decode()}"
    waiting = ", ".join(str(each.by_user) for each in row.waiting_for)
    return f"run {row.id!r} is {row.status}, wakes at {row.wake_at}, waits for {waiting or 'nothing'}, lease {row.lease_owner}"


def shown_journals(journals: dict[str, list[Entry]]) -> list[str]:
    """Return journals as lines of text; of errors, the whole record."""
    lines: list[str] = []
    for run_id, entries in journals.items():
        lines.append(f"journal of run {run_id!r}:")
        for each in entries:
            payload = each.payload[:60] if each.ok else each.payload
            lines.append(f"    {each.seq:3} {each.phase:6} {each.kind:8} {each.key} {'' if each.ok else 'failed '}{payload!r}")
    return lines
