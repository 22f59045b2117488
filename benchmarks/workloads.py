"""What is measured: every workload with its sides, from the one that is asked about to what it is compared with.

Slow peers do less of the same and are compared by their rates. Where a peer is missing it would need minutes, or the question is
only whether perdure gets slower than itself.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from benchmarks.work import Work

Measurement = Literal["time", "counts", "import", "latency"]


class Side(msgspec.Struct, frozen=True):
    """A contender and its work."""

    contender: str
    work: Work


class Workload(msgspec.Struct, frozen=True):
    """The same work for several sides. The first is compared with each of the others."""

    name: str
    sides: dict[str, Side]
    # Counts do not vary with the machine, so they are taken in the first round only.
    measured: Measurement = "time"


_ON_SQLITE: Final = {"floor": "plain sqlite3", "dbos": "DBOS on SQLite", "langgraph": "LangGraph on SQLite"}
_QUEUES: Final = {
    "SQLite": {"perdure": "perdure's queue on SQLite", "dbos": "DBOS's queue on SQLite"},
    "PostgreSQL": {
        "perdure": "perdure's queue on PostgreSQL",
        "dbos": "DBOS's queue on PostgreSQL",
        "absurd": "absurd's queue on PostgreSQL",
        "procrastinate": "procrastinate on PostgreSQL",
    },
}
_ON_POSTGRES: Final = {"floor": "plain asyncpg", "dbos": "DBOS on PostgreSQL", "absurd": "absurd on PostgreSQL"}


def _on_both(name: str, work: Work, measured: Measurement = "time", **others: Work) -> list[Workload]:
    """The workload on SQLite and on PostgreSQL. Who of `floor`, `dbos`, `langgraph` and `absurd` has no work takes no part."""
    return [
        Workload(
            f"{name}, {store}",
            {
                f"perdure on {store}": Side(f"perdure on {store}", work),
                **{names[who]: Side(names[who], part) for who, part in others.items() if who in names},
            },
            measured,
        )
        for store, names in (("SQLite", _ON_SQLITE), ("PostgreSQL", _ON_POSTGRES))
    ]


def _with_runs_stored(name: str, runs: int, steps: int, at_once: int) -> list[Workload]:
    """The library beside itself, with more and more finished runs in the store."""
    return [
        Workload(
            f"{name} beside stored runs, {store}",
            {
                f"{stored:,} stored": Side(f"perdure on {store}", Work(runs=runs, steps=steps, at_once=at_once, stored=stored))
                for stored in (100_000, 10_000, 0)
            },
        )
        for store in ("SQLite", "PostgreSQL")
    ]


def _queued(workers: int, **runs: int) -> list[Workload]:
    """One-step runs that were queued before, worked on by so many processes. Each contender has its number of runs."""
    return [
        Workload(
            f"queued one-step runs, {store}, {workers} {'worker' if workers == 1 else 'workers'}",
            {name: Side(name, Work(shape="queued", runs=runs[who], workers=workers)) for who, name in names.items()},
        )
        for store, names in _QUEUES.items()
    ]


def _first_steps(**runs: int) -> list[Workload]:
    """From the call that queues a run to the beginning of its step in an idle worker process."""
    return [
        Workload(
            f"from start to first step, {store}",
            {name: Side(name, Work(shape="first step", runs=runs[who])) for who, name in names.items()},
            "latency",
        )
        for store, names in _QUEUES.items()
    ]


def _by_length(name: str, stores: tuple[str, ...], lengths: dict[str, Work]) -> list[Workload]:
    """The library beside itself, with shorter and shorter runs."""
    return [
        Workload(f"{name}, {store}", {label: Side(f"perdure on {store}", work) for label, work in lengths.items()})
        for store in stores
    ]


def _imports() -> Workload:
    # perdure brings its names when they are first used, so the second line is what a program pays that uses them.
    statements = {
        "import perdure": 5,
        "from perdure import Context, Runtime, workflow": 5,
        "import asyncio, msgspec": 5,
        "import dbos": 1,
        "import langgraph.func, langgraph.checkpoint.sqlite.aio": 1,
        "import absurd_sdk": 1,
    }
    return Workload(
        "import in a fresh interpreter",
        {
            statement: Side("interpreter", Work(shape="import", runs=times, statement=statement))
            for statement, times in statements.items()
        },
        measured="import",
    )


IN_MEMORY: Final = Workload(
    "steps without a store",
    {
        "perdure without a store": Side("perdure without a store", Work(steps=20_000)),
        "bare await": Side("bare await", Work(steps=1_000_000)),
    },
)

_ALONE: Final = Work(steps=1000)
_AT_ONCE: Final = Work(runs=100, steps=10, at_once=100)

WORKLOADS: Final[list[Workload]] = [
    IN_MEMORY,
    *_on_both(
        "one-step runs, one after the other", Work(runs=200),
        floor=Work(runs=200), dbos=Work(runs=20), langgraph=Work(runs=40), absurd=Work(runs=50),
    ),
    *_on_both(
        "one-step runs, 100 at once", Work(runs=500, at_once=100),
        floor=Work(runs=500, at_once=100), dbos=Work(runs=100, at_once=100),
        langgraph=Work(runs=100, at_once=100), absurd=Work(runs=200, at_once=100),
    ),
    *_on_both("one-step runs, 1,000 at once", Work(runs=1000, at_once=1000), floor=Work(runs=1000, at_once=1000)),
    *_on_both(
        "one run of 1,000 steps", _ALONE,
        floor=_ALONE, dbos=Work(steps=300), langgraph=Work(steps=300), absurd=Work(steps=500),
    ),
    *_by_length(
        "runs by their length", ("SQLite", "PostgreSQL"),
        {
            "10,000 steps": Work(steps=10_000),
            "1,000 steps": Work(steps=1000),
            "100 steps": Work(runs=5, steps=100),
            "10 steps": Work(runs=50, steps=10),
        },
    ),
    *_on_both(
        "100 runs of 10 steps at once", Work(runs=300, steps=10, at_once=100),
        floor=_AT_ONCE, dbos=_AT_ONCE, langgraph=_AT_ONCE, absurd=_AT_ONCE,
    ),
    *_on_both(
        "1,000 steps at once in one run", Work(shape="fan out", steps=1000),
        floor=Work(shape="fan out", steps=1000), dbos=Work(shape="fan out", steps=200),
        langgraph=Work(shape="fan out", steps=500), absurd=Work(shape="fan out", steps=300),
    ),
    *_on_both(
        "replay of 1,000 steps", Work(shape="replay", steps=1000),
        dbos=Work(shape="replay", steps=300), langgraph=Work(shape="replay", steps=300), absurd=Work(shape="replay", steps=300),
    ),
    *_by_length(
        "replay by length of the run", ("SQLite",),
        {"10,000 steps": Work(shape="replay", steps=10_000), "1,000 steps": Work(shape="replay", steps=1000)},
    ),
    *_on_both(
        "results of 100 KB", Work(steps=50, size=100_000),
        floor=Work(steps=50, size=100_000), dbos=Work(steps=20, size=100_000),
        langgraph=Work(steps=20, size=100_000), absurd=Work(steps=20, size=100_000),
    ),
    *_on_both("results of 1 MB", Work(steps=10, size=1_000_000), floor=Work(steps=10, size=1_000_000)),
    *_with_runs_stored("one run of 500 steps", runs=1, steps=500, at_once=1),
    *_with_runs_stored("100 one-step runs at once", runs=300, steps=1, at_once=100),
    *_on_both(
        "written by one run of 1,000 steps", _ALONE, "counts",
        floor=_ALONE, dbos=Work(steps=300), langgraph=Work(steps=300), absurd=Work(steps=500),
    ),
    *_on_both(
        "written by 100 runs of 10 steps at once", _AT_ONCE, "counts",
        floor=_AT_ONCE, dbos=_AT_ONCE, langgraph=_AT_ONCE, absurd=_AT_ONCE,
    ),
    *_queued(1, perdure=2000, dbos=200, absurd=500, procrastinate=1000),
    *_queued(2, perdure=2000, dbos=200, absurd=500, procrastinate=1000),
    *_queued(4, perdure=2000, dbos=200, absurd=500, procrastinate=1000),
    *_first_steps(perdure=30, dbos=5, absurd=15, procrastinate=30),
    _imports(),
]  # fmt: skip
