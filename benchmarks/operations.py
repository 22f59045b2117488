"""What a step and a run of perdure cost in operations: `python -m benchmarks.operations`. A test compares it with a baseline.

Each cost is a difference of two sizes of the same work, so that what is done once does not count.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.counting import counted
from benchmarks.meters import SqliteMeter
from benchmarks.programs.flows import fans_out, steps, waits_at_the_end
from benchmarks.work import RESULT_BYTES
from perdure import stores
from perdure.store import Store

BASELINE: Final = Path(__file__).parent.parent / "tests" / "benchmarks" / "baseline.json"
# What depends on how fast the disk is, because writers share commits.
_VARYING: Final = frozenset({"transactions", "handles", "calls from other threads", "calls", "calls into C", "timers"})

Costs = dict[str, float]
# The costs of each piece of work, for each minor version of Python: newer ones call less for the same.
Baseline = dict[str, dict[str, Costs]]


def costs() -> dict[str, Costs]:
    """All of it."""
    return {
        "step without a store": _each(_steps_without_store, 20, 220),
        "run without a store": _each(_runs_without_store, 5, 25),
        "step on SQLite": _each(_on_sqlite(_one_run), 20, 120),
        "one-step run on SQLite": _each(_on_sqlite(_one_step_runs), 5, 25),
        "replayed step on SQLite": _each(_on_sqlite(_replay, _recorded), 20, 220),
        "step of many at once on SQLite": _each(_on_sqlite(_fan_out), 100, 600, without=_VARYING),
        "step on SQLite, on disk": _each(_written_on_sqlite, 100, 400),
    }


def version() -> str:
    """The minor version of this Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _each(count: Callable[[int], Counter[str]], few: int, many: int, without: frozenset[str] = frozenset()) -> Costs:
    less, more = count(few), count(many)
    names = sorted((less.keys() | more.keys()) - without)
    # The first decimal: a statement more or less in a hundred steps is one of the store's own, such as looking for leases.
    return {name: round((more[name] - less[name]) / (many - few), 1) + 0.0 for name in names}


async def _nothing() -> None:
    """There is nothing to prepare."""


def _steps_without_store(size: int) -> Counter[str]:
    async def work() -> None:
        await steps(size, RESULT_BYTES)

    return counted(work, _nothing)


def _runs_without_store(size: int) -> Counter[str]:
    async def work() -> None:
        for _ in range(size):
            await steps(1, RESULT_BYTES)

    return counted(work, _nothing)


Verb = Callable[[Store, int], Any]


async def _warm_up(store: Store, _: int) -> None:
    await steps.run(1, RESULT_BYTES, id="warm-up", store=store)


async def _one_run(store: Store, size: int) -> None:
    await steps.run(size, RESULT_BYTES, id="run", store=store)


async def _one_step_runs(store: Store, size: int) -> None:
    for n in range(size):
        await steps.run(1, RESULT_BYTES, id=f"run{n:06}", store=store)


async def _fan_out(store: Store, size: int) -> None:
    await fans_out.run(size, RESULT_BYTES, id="run", store=store)


async def _recorded(store: Store, size: int) -> None:
    await waits_at_the_end.run(size, RESULT_BYTES, id="run", store=store)
    await store.signal("run", "go", b"null")


async def _replay(store: Store, size: int) -> None:
    await waits_at_the_end.run(size, RESULT_BYTES, id="run", store=store)


def _on_sqlite(verb: Verb, prepare: Verb = _warm_up) -> Callable[[int], Counter[str]]:
    def count(size: int) -> Counter[str]:
        with tempfile.TemporaryDirectory() as directory:
            store = stores.sqlite(Path(directory) / "operations.db")
            try:
                return counted(lambda: verb(store, size), lambda: prepare(store, size))
            finally:
                asyncio.run(store.close())

    return count


def _written_on_sqlite(size: int) -> Counter[str]:
    """Asked of the file itself, so that it holds whatever the statements are."""

    async def written(path: Path) -> Counter[str]:
        store = stores.sqlite(path)
        await _warm_up(store, size)
        meter = SqliteMeter(str(path))
        await meter.start()
        await _one_run(store, size)
        found = await meter.stop()
        await store.close()
        return Counter({"commits": found.commits, "bytes written": found.bytes_written, "bytes stored": found.bytes_stored})

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(written(Path(directory) / "operations.db"))


def read_baseline() -> Baseline:
    """What was written down, by version of Python."""
    return msgspec.json.decode(BASELINE.read_bytes(), type=Baseline) if BASELINE.exists() else {}


def main() -> None:
    """Print the costs, or with `--baseline` write them down for this version of Python."""
    found = costs()
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    if "--baseline" in sys.argv[1:]:
        baseline = {**read_baseline(), version(): found}
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(baseline.items())))) + b"\n")


if __name__ == "__main__":
    main()
