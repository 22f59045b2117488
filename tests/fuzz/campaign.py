"""Many programs side by side on one loop, and what is left behind when none of them runs any more."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from perdure import Context, stores
from perdure.store import Store
from tests.fuzz import constructs
from tests.fuzz.body import IN_BODY
from tests.fuzz.hosting import hosting
from tests.fuzz.programs import Program, available, random_program
from tests.fuzz.trial import Count, Failure, Surroundings, Trial

# After so many programs everything comes to rest, and what is left behind is looked for.
BATCH: Final = 100
# The methods of a loop that the engine replaces while bodies are in memory.
LOOP_METHODS: Final = ("call_soon", "call_soon_threadsafe", "create_task", "call_later", "call_at", "time")


@dataclass
class Settings:
    """How a campaign runs its programs."""

    store: Literal["memory", "sqlite"] = "memory"
    loop: Literal["asyncio", "uvloop", "debug"] = "asyncio"
    is_eager: bool = False
    side_by_side: int = 8
    # In how many rounds processes are lost; None: at every length of a small journal.
    rounds: int | None = 2
    shows_failures: bool = True
    stops_at: int = 20


@dataclass
class Report:
    """What a campaign has found."""

    count: Count = field(default_factory=Count)
    failures: list[Failure] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    noise: Counter[str] = field(default_factory=Counter)
    seconds: float = 0

    @property
    def is_clean(self) -> bool:
        return not self.failures and not self.left

    def __str__(self) -> str:
        count = self.count
        done = (
            f"Python {sys.version.split()[0]}: {count.programs} programs, {count.rounds} rounds, {count.attempts} attempts, "
            f"{count.crashes} crashes, {count.drains} unloads, {count.entries} entries, {count.compared} compared"
        )
        lines = [f"{done}, {len(self.failures)} bad, {len(self.left)} leaks, {self.seconds:.1f} s"]
        lines += [f"seeds that are bad: {' '.join(str(each.program.seed) for each in self.failures)}"] if self.failures else []
        lines += [f"left behind: {each}" for each in self.left]
        lines += [f"noise: {times} x {text}" for text, times in self.noise.most_common(5)]
        return "\n".join(lines)


def run(seeds: Iterable[int], settings: Settings) -> Report:
    """Run the programs of these seeds, on a loop of its own."""
    haves = available(settings.store)
    return try_programs([random_program(seed, haves) for seed in seeds], settings)


def try_programs(programs: Sequence[Program], settings: Settings) -> Report:
    """Run these programs, on a loop of its own."""
    logger = logging.getLogger("perdure")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if settings.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory, debug=settings.loop == "debug") as runner:
            return runner.run(_campaign(programs, settings))
    finally:
        logger.setLevel(level)
        gc.unfreeze()


async def _campaign(programs: Sequence[Program], settings: Settings) -> Report:
    report, began = Report(), time.monotonic()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: report.noise.update([_described(context)]))
    loop.slow_callback_duration = 3600
    if settings.is_eager and sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    constructs.prepare()
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="perdure-fuzz-"))
    open_store = _opener(settings, folder)
    try:
        async with hosting() as host:
            before = _Leftovers()
            for at in range(0, len(programs), BATCH):
                batch = programs[at : at + BATCH]
                await _run_batch(batch, settings, Surroundings(open_store, host, report.count, settings.rounds), report)
                report.left += [f"{each}, after seed {batch[-1].seed}" for each in await before.since()]
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    report.seconds = time.monotonic() - began
    if report.count.programs and not report.count.compared and not report.failures:
        report.left.append("nothing was compared: the fuzzer does not see anything")
    return report


async def _run_batch(programs: Sequence[Program], settings: Settings, surroundings: Surroundings, report: Report) -> None:
    places = asyncio.Semaphore(settings.side_by_side)

    async def run_one(program: Program) -> None:
        async with places:
            if len(report.failures) >= settings.stops_at:
                return
            try:
                failure = await Trial(program, surroundings).run()
            except Exception:
                failure = Failure(program, [], [f"the fuzzer broke: {traceback.format_exc()}"])
            if failure is not None:
                report.failures.append(failure)
                if settings.shows_failures:
                    print(failure, flush=True)

    await asyncio.gather(*map(run_one, programs))


def _opener(settings: Settings, folder: Path) -> Callable[[str], Store]:
    def open_store(name: str) -> Store:
        if settings.store == "memory":
            return stores.memory()
        return stores.sqlite(folder / "fuzz.db", prefix=name, synchronous="normal")

    return open_store


def _described(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message', '')[:60]} {error!r}"[:160]


class _Leftovers:
    """What is alive when no program runs: tasks, contexts of bodies, armed timers, methods of the loop that were replaced."""

    def __init__(self) -> None:
        self._tasks = set(map(id, asyncio.all_tasks()))

    async def since(self) -> list[str]:
        """Return what was left behind, for longer than a heartbeat: its thread may hold the runs that it has just renewed."""
        loop = asyncio.get_running_loop()
        found: list[str] = []
        for _ in range(100):
            gc.collect()
            found = [*self._alive(loop)]
            if not found:
                return []
            await asyncio.sleep(0.05)
        return found

    def _alive(self, loop: asyncio.AbstractEventLoop) -> Iterable[str]:
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current and id(task) not in self._tasks:
                yield f"task {task!r}"[:300]
        contexts = sum(isinstance(each, Context) for each in gc.get_objects())
        if contexts:
            yield f"{contexts} contexts of bodies"
        for handle in getattr(loop, "_scheduled", ()):
            if not handle.cancelled() and IN_BODY in getattr(handle, "_context", ()):
                yield f"timer {handle!r}"[:300]
        for name in LOOP_METHODS:
            if name in vars(loop):
                yield f"the loop's own {name}"


__all__ = ["Report", "Settings", "run"]
