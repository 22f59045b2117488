"""The random sagas of `tests/sagas`, in worker processes that are killed: the same rules hold on disks and servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from pathlib import Path
from typing import Final

import pytest

from perdure import Runtime
from perdure.errors import PersistenceError
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import POSTGRES, SQLITE, Backend, on
from tests.backends.saga_jobs import Deployed, RealProcess, drive_sagas, prefix_of
from tests.campaign import IS_FULL
from tests.sagas.judge import Judge, Violation
from tests.sagas.known import unknown
from tests.sagas.operating import Operator
from tests.sagas.programs import Op, Program, random_program
from tests.sagas.provider import Provider

# How many programs share the worker processes, and how many there are by default.
TOGETHER: Final = 25 if IS_FULL else 15
PROGRAMS: Final = 300 if IS_FULL else TOGETHER
# What a process does to itself in virtual time is a kill here.
_KILLS: Final = frozenset({"crash", "flaky", "kill", "poison"})
# How often the end is looked for, in seconds, and for how long; after so many looks other code is tried.
_LOOK_EVERY: Final = 0.5
_LOOKS: Final = 120
_PATIENCE: Final = 16
_REPAIRS: Final = (60, 80, 100)


class Fleet:
    """One worker process after the other, for these programs."""

    def __init__(self, start: Start, dsn: str, book: Path, operators: list[Operator], lease_ttl: float, attempts: int) -> None:
        self._start = start
        self._dsn = dsn
        self._book = book
        self._operators = operators
        self._lease_ttl = lease_ttl
        self._attempts = attempts
        self._worker: Child | None = None
        self.kills = 0

    async def restart(self, *, gently: bool = False) -> None:
        """Put another process into the place of this one, with the code of now."""
        await self.kill(gently=gently)
        deployed = [Deployed(each.program.seed, each.versions, each.current) for each in self._operators]
        args = (drive_sagas, self._dsn, self._book, deployed, self._lease_ttl, self._attempts)
        self._worker = await asyncio.to_thread(self._start, *args)
        assert await asyncio.to_thread(self._worker.receive) == "ready"

    async def kill(self, *, gently: bool = False) -> None:
        """Kill the process, or let it drain as at a deploy."""
        if self._worker is None:
            return
        if gently:
            self._worker.send("stop")
            assert await asyncio.to_thread(self._worker.receive) == "stopped"
        self.kills += not gently
        await asyncio.to_thread(self._worker.kill)


@on(SQLITE, POSTGRES)
@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
async def test_what_is_charged_is_refunded_or_kept_however_often_workers_are_killed(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, book = random.Random(first), tmp_path / "book"
    async with store_at(dsn) as store, Runtime(store, concurrency=0) as runtime:
        programs = [random_program(seed) for seed in range(first, first + TOGETHER)]
        operators = [Operator(runtime, program, prefix_of(program.seed)) for program in programs]
        fleet = Fleet(start, dsn, book, operators, 1.5 * backend.lease_ttl, rng.choice((3, 10)))
        for each in operators:
            await each.start(RealProcess(Provider(book), each.program.seed))
        await fleet.restart()
        for each, op in in_turn(operators, rng):
            await asyncio.sleep(rng.choice((0.0, 0.005, 0.02, 0.1)))
            await operate(fleet, each, op)
        await bring_to_an_end(fleet, operators)
        await fleet.kill()
        events = await asyncio.to_thread(Provider(book).read)
        hanging = [violation for each in operators for violation in await each.hanging()]
        runs = {run_id: run for each in operators for run_id, run in (await each.ended()).items()}
        found = hanging + Judge(events, runs).violations()
    with capsys.disabled():
        print(f"\n{backend}: {len(programs)} programs, {len(events)} requests, {fleet.kills} kills")
    wrong = {program: unknown(program, [each for each in found if is_about(each, program)]) for program in programs}
    assert not any(wrong.values()), "\n\n".join(explained(program, found) for program, found in wrong.items() if found)


def in_turn(operators: list[Operator], rng: random.Random) -> list[tuple[Operator, Op]]:
    """What is to be done to all programs, in an order that keeps that of each."""
    turns = [each for each in operators for _ in each.program.ops]
    rng.shuffle(turns)
    ops = {each.prefix: iter(each.program.ops) for each in operators}
    return [(each, next(ops[each.prefix])) for each in turns]


async def operate(fleet: Fleet, operator: Operator, op: Op) -> None:
    """Do this to the runs of a program; what concerns its process concerns those of the others too."""
    if op.kind in _KILLS:
        await fleet.restart()
    elif operator.deploy(op):
        await fleet.restart(gently=op.n % 2 == 0)
    else:
        with contextlib.suppress(PersistenceError):  # SQLite has one writer at a time
            await operator.change_runs(op)


async def bring_to_an_end(fleet: Fleet, operators: list[Operator]) -> None:
    """Send what is awaited; where that is not enough, go through the versions of the code."""
    for look in range(_LOOKS):
        left = [each for each in operators if await each.push_on()]
        if not left:
            return
        if look >= _PATIENCE and look % 4 == 0:
            for each in left:
                await (each.repair() if look in _REPAIRS else each.roll_back())
            await fleet.restart(gently=True)
        await asyncio.sleep(_LOOK_EVERY)


def is_about(violation: Violation, program: Program) -> bool:
    """Whether this is about a run of the program: violations name the run first."""
    about = re.search(r"['\"]([0-9]+):", violation.text)
    return about is None or int(about[1]) == program.seed


def explained(program: Program, found: list[Violation]) -> str:
    return "\n".join([str(program), "what is wrong:", *map(str, found)])
