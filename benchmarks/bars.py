"""What perdure's speed has to reach: the one list of bars. Every bar is a ratio of two sides, taken round by round."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Measure = Literal["rate", "time", "CPU", "commits", "bytes written", "bytes stored"]
# How much slower something may look that costs the same, on a machine that is not quite quiet.
NOISE: Final = 1.25


class Bar(msgspec.Struct, frozen=True):
    """The ratio of a measure of `subject` to a measure of `other`, both as (workload, side), and what it has to be."""

    promise: str
    measure: Measure
    subject: tuple[str, str]
    other: tuple[str, str]
    at_least: float | None = None
    at_most: float | None = None
    # When the two sides are measured in different ways, such as CPU against the time of an await.
    other_measure: Measure | None = None

    def is_met_by(self, ratio: float) -> bool:
        """Whether a ratio reaches it."""
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    @property
    def bound(self) -> str:
        """The bar in a table."""
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


_AWAIT: Final = ("steps without a store", "bare await")
_REPLAY: Final = "replay by length of the run, SQLite"
_IMPORT: Final = "import in a fresh interpreter"


def _faster(workload: str, store: str, other: str, at_least: float) -> Bar:
    where = f"{workload}, {store}"
    return Bar(f"{where}: steps/s against {other}", "rate", (where, f"perdure on {store}"), (where, other), at_least=at_least)


def _faster_queue(other: str, at_least: float) -> Bar:
    where = "queued one-step runs, PostgreSQL, 2 workers"
    subject = where, "perdure's queue on PostgreSQL"
    return Bar(f"{where}: runs/s against {other}", "rate", subject, (where, other), at_least=at_least)


def _smaller(measure: Measure, store: str, floor: str) -> Bar:
    where = f"written by one run of 1,000 steps, {store}"
    promise = f"{measure} per step, {store}, against the plain row"
    return Bar(promise, measure, (where, f"perdure on {store}"), (where, floor), at_most=2)


def _flat_in_steps(store: str) -> Bar:
    where = f"runs by their length, {store}"
    promise = f"cost per step, {store}: runs of 10,000 steps against runs of 10"
    return Bar(promise, "time", (where, "10,000 steps"), (where, "10 steps"), at_most=NOISE)


def _flat_in_runs(workload: str, store: str) -> Bar:
    where = f"{workload} beside stored runs, {store}"
    promise = f"cost per step, {workload}, {store}: 100,000 stored runs against none"
    return Bar(promise, "time", (where, "100,000 stored"), (where, "0 stored"), at_most=NOISE)


BARS: Final[list[Bar]] = [
    _faster("one run of 1,000 steps", "SQLite", "plain sqlite3", 0.7),
    _faster("one run of 1,000 steps", "SQLite", "DBOS on SQLite", 6),
    _faster("100 runs of 10 steps at once", "SQLite", "plain sqlite3", 5),
    _faster("100 runs of 10 steps at once", "SQLite", "DBOS on SQLite", 40),
    _faster("one run of 1,000 steps", "PostgreSQL", "plain asyncpg", 0.7),
    _faster("one run of 1,000 steps", "PostgreSQL", "absurd on PostgreSQL", 2),
    _faster("one run of 1,000 steps", "PostgreSQL", "DBOS on PostgreSQL", 6),
    _faster("100 runs of 10 steps at once", "PostgreSQL", "plain asyncpg", 1.5),
    _faster("100 runs of 10 steps at once", "PostgreSQL", "DBOS on PostgreSQL", 30),
    Bar(
        "a step without a store, in bare awaits",
        "time", ("steps without a store", "perdure without a store"), _AWAIT, at_most=77,
    ),
    Bar(
        "a replayed step of 10,000, SQLite, in bare awaits",
        "time", (_REPLAY, "10,000 steps"), _AWAIT, at_most=40,
    ),
    Bar(
        "replay is linear, SQLite: a step of 10,000 against one of 1,000",
        "time", (_REPLAY, "10,000 steps"), (_REPLAY, "1,000 steps"), at_most=NOISE,
    ),
    Bar(
        "client CPU per step, one run, SQLite, against plain sqlite3",
        "CPU", ("one run of 1,000 steps, SQLite", "perdure on SQLite"), ("one run of 1,000 steps, SQLite", "plain sqlite3"),
        at_most=1.3,
    ),
    Bar(
        "client CPU per step, 100 runs at once, SQLite, in bare awaits",
        "CPU", ("100 runs of 10 steps at once, SQLite", "perdure on SQLite"), _AWAIT, at_most=400, other_measure="time",
    ),
    Bar(
        "client CPU per step, 100 runs at once, PostgreSQL, in bare awaits",
        "CPU", ("100 runs of 10 steps at once, PostgreSQL", "perdure on PostgreSQL"), _AWAIT, at_most=400, other_measure="time",
    ),
    _smaller("bytes written", "SQLite", "plain sqlite3"),
    _smaller("bytes stored", "SQLite", "plain sqlite3"),
    _smaller("bytes written", "PostgreSQL", "plain asyncpg"),
    _smaller("bytes stored", "PostgreSQL", "plain asyncpg"),
    _flat_in_steps("SQLite"),
    _flat_in_steps("PostgreSQL"),
    _flat_in_runs("one run of 500 steps", "SQLite"),
    _flat_in_runs("one run of 500 steps", "PostgreSQL"),
    _flat_in_runs("100 one-step runs at once", "SQLite"),
    _flat_in_runs("100 one-step runs at once", "PostgreSQL"),
    _faster_queue("DBOS's queue on PostgreSQL", 20),
    _faster_queue("absurd's queue on PostgreSQL", 3),
    _faster_queue("procrastinate on PostgreSQL", 3),
    *(
        Bar(f"{what} against import asyncio, msgspec", "time", (_IMPORT, what), (_IMPORT, "import asyncio, msgspec"), at_most=1.5)
        for what in ("import perdure", "from perdure import Context, Runtime, workflow")
    ),
]  # fmt: skip
