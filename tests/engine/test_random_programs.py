"""Random programs, killed at random writes and resumed until they end: nothing is stopped, repeated, reordered or hanging."""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

from perdure import Err, Ok, Runtime, Suspended, stores
from perdure.errors import PersistenceError, RunDiverged, RunFinished, RunNotFound, StepChanged
from perdure.events import Event
from tests.campaign import IS_FULL, times
from tests.engine.random_programs import (
    BRANCHING,
    BY_THE_CLOCK,
    CANCELLING,
    LEAVES,
    Program,
    World,
    flow_of,
    is_by_the_clock,
    mutate,
    random_program,
)
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate

MOST_DRIVES: Final = 200
MOST_STOPS: Final = 4
MOST_SECONDS: Final = 50_000


class FlakyStore(MortalStore):
    """A store that fails at its n-th write only, before or after the commit, and works again after that."""

    def _around(self, method: Any) -> Any:
        mortal = super()._around(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.writes_left < 0:
                return await method(*args, **kwargs)
            return await mortal(*args, **kwargs)

        return call


@dataclass
class Trial:
    """One program and what became of it."""

    seed: int
    program: Program
    mutates: bool = False
    stops: list[str] = field(default_factory=list)
    outcome: Any = None

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.world.is_order_checked = not is_by_the_clock(self.program) and not self.mutates
        self.world.are_effects_checked = not is_by_the_clock(self.program)
        self.rng = random.Random(self.seed + 1)
        self.store = stores.memory()

    async def run(self) -> list[str]:
        """What went wrong."""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                sending = asyncio.ensure_future(self._send_signals())
                await self._until_ended()
                sending.cancel()
        except TimeoutError:
            self.world.wrong.append("it does not end")
        wrong = self.world.wrong
        match self.outcome:
            case Ok():
                pass
            case other:
                wrong.append(f"it ended with {other!r}")
        if self.world.is_order_checked and len(self.world.seen) < len(self.world.expected) and not self._died_at_the_end:
            wrong.append("the body saw less than before the kill")
        closed = [entry.key for entry in await self.store.journal("run") if entry.phase == "close"]
        wrong += [f"{key!r} is recorded twice" for key in set(closed) if closed.count(key) > 1]
        return wrong

    async def _send_signals(self) -> None:
        runtime = Runtime(self.store, clock=LoopClock(), concurrency=0)
        while True:
            await asyncio.sleep(self.rng.choice([0.002, 0.02, 3]))
            with contextlib.suppress(RunNotFound, RunFinished):
                await runtime.signal("run", self.rng.choice("abc"), self.rng.random())

    _died_at_the_end = False

    async def _until_ended(self) -> None:
        kills = self.rng.randint(1, 4)
        for number in range(MOST_DRIVES):
            is_last = number >= kills
            store: Any = SlowStore(self.store, self.rng)
            if not is_last:
                kind = MortalStore if self.rng.random() < 0.7 else FlakyStore
                store = kind(store, self.rng.randint(1, 25), after_commit=self.rng.random() < 0.5)
            program, is_mutated = self.program, False
            if self.mutates and 0 < number < kills:
                program, is_mutated = mutate(self.program, self.rng), True
            known = await self._keys()
            outcome = await self._drive(store, program)
            if outcome is not None:
                self.outcome = outcome
                return
            if is_mutated and await self._keys("close") - known:
                self.program = program  # it began something of its own, so this is the code that the run fits from now on
            row = await self.store.get("run")
            if row is not None and row.ended:
                self._died_at_the_end = True
            await asyncio.sleep(31 if self.rng.random() < 0.8 else 400)
        self.world.wrong.append("it does not end after many drives")

    async def _keys(self, *phases: str) -> set[str]:
        if await self.store.get("run") is None:
            return set()
        return {entry.key for entry in await self.store.journal("run") if not phases or entry.phase in phases}

    async def _drive(self, store: Any, program: Program) -> Any:
        """The outcome, through suspensions, as one process gets it; None when it died or the run was stopped."""
        grace = self.rng.choice([0, 0.5, 1])
        flow = flow_of(program, self.world)
        listener = self.rng.choice([None, None, self._listen, self._listen_slowly])
        runtime = Runtime(store, [flow], clock=LoopClock(), unload_grace=grace, concurrency=0, on_event=listener)
        try:
            self.world.recorded = await self._keys("close")
            outcome = await runtime.run(flow, id="run")
            while isinstance(outcome, Suspended):
                await asyncio.sleep(self.rng.choice([0.5, 8]))
                self.world.recorded = await self._keys("close")
                outcome = await runtime.resume("run")
        except PersistenceError:
            return None
        except (RunDiverged, StepChanged) as stop:
            self.stops.append(f"{type(stop).__name__}: {stop}")
            if not self.mutates and (self.world.is_order_checked or len(self.stops) > MOST_STOPS):
                self.world.wrong.append(f"stopped: {stop}")
                return Err(stop)
            return None
        finally:
            await runtime.close()
        return outcome

    def _listen(self, event: Event) -> None:
        pass

    async def _listen_slowly(self, event: Event) -> None:
        await asyncio.sleep(self.rng.choice([0, 0, 0.002]))


def judge(seed: int, program: Program, *, mutates: bool = False) -> list[str]:
    """What goes wrong with this program."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wrong = simulate(Trial(seed, program, mutates=mutates).run())
    return wrong + [str(each.message) for each in warned if "does not end" in str(each.message)]


def failures(count: int, kinds: tuple[str, ...], *, mutates: bool = False) -> dict[str, list[str]]:
    """What goes wrong with so many random programs, by seed and program."""
    found: dict[str, list[str]] = {}
    for seed in range(count):
        program = random_program(random.Random(seed), kinds)
        if wrong := judge(seed, program, mutates=mutates):
            found[f"{seed}: {' '.join(map(str, program))}"] = wrong
    return found


def test_unchanged_code_sees_the_same_again_and_is_never_stopped() -> None:
    assert not failures(5000 if IS_FULL else 150, (*LEAVES, *BRANCHING))


def test_code_with_time_limits_of_asyncio_is_not_stopped_for_ever_and_repeats_nothing() -> None:
    assert not failures(times(1000), (*LEAVES, *BRANCHING, *BY_THE_CLOCK, *BY_THE_CLOCK))


def test_code_that_waits_for_something_of_its_own_is_never_stopped() -> None:
    """Keys that depend on the order of events are left out: what a body awaits by itself may be over earlier or later."""
    kinds = ("step", "retry", "once", "fails", "sleep", "signal", "patched", "gather", "group", "map", "shield")
    assert not failures(times(500), (*kinds, "io", "io"))


def test_changed_code_repeats_no_effect_and_the_run_ends_with_the_code_that_it_fits() -> None:
    """Without constructs that cancel steps by something which is not recorded: what follows that is not owed."""
    kinds = tuple(kind for kind in (*LEAVES, *BRANCHING) if kind not in CANCELLING)
    assert not failures(times(1000), kinds, mutates=True)
