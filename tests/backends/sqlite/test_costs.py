"""What verbs cost, in steps of SQLite's virtual machine rather than in time, and that no statement reads through a table."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import msgspec
import pytest

from perdure.backends.base.new_runs import new_row
from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import claims, inbox, reading, recording, restoring, runs, schedules
from perdure.backends.sqlite.link import Link
from perdure.backends.sqlite.schema import Session, Tables, set_up
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Item, Lease, NewRun, QueueLimits, RunRow, Signal

MODULES: Final = (runs, recording, inbox, claims, schedules, reading, restoring)
# Sorting is allowed where what is sorted is bounded by something else: leases, awaited rows, runs with a prefix.
SORTING: Final = {"_LEASED", "_UNCONSUMED", "_LIST_PREFIX"}
FUTURE: Final = 4_000_000_000_000_000
NOW: Final = 2_000_000_000_000_000
OWNERS: Final = Owners()
MINUTE: Final = 60_000_000


class Meter:
    """A database that counts steps."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        tables = Tables("perdure")
        link = Link(self.connection)
        set_up(link, tables, "", allowed=True)
        self.session = Session(link, tables, "")
        self.steps = 0

    def cost(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """The steps one call takes, in a transaction that is rolled back."""

        def count() -> int:
            self.steps += 1
            return 0

        self.connection.execute("BEGIN")
        self.steps = 0
        self.connection.set_progress_handler(count, 1)
        try:
            verb(self.session, *args, **kwargs)
        finally:
            self.connection.set_progress_handler(None, 0)
            self.connection.execute("ROLLBACK")
        return self.steps

    def add_runs(self, count: int, prefix: str, **columns: Any) -> None:
        """Many runs like one that is created."""
        new = {"id": f"{prefix}seed", "workflow": "flow", "input": b"", "input_hash": b"h", "seed": b"", **columns}
        run = new_row(NewRun(**new), NOW)
        runs.insert(self.session, run, None)
        names = [row[1] for row in self.connection.execute("PRAGMA table_info(perdure_runs)")]
        listed = ", ".join("? || n" if name == "id" else name for name in names)
        numbers = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)"
        self.connection.execute(
            f"{numbers} INSERT INTO perdure_runs SELECT {listed} FROM perdure_runs, numbers WHERE id = ?", (count, prefix, run.id)
        )


@pytest.fixture
def new_meter() -> Iterator[Callable[[], Meter]]:
    """Makes fresh meters."""
    made: list[Meter] = []

    def make() -> Meter:
        made.append(Meter())
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


def statements() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        yield from _templates(module)


def _templates(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        for template in value if isinstance(value, tuple) else (value,):
            if name.isupper() and isinstance(template, str) and re.match(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE) ", template):
                yield name, template


def test_every_statement_is_looked_at() -> None:
    assert len(list(statements())) > 45


@pytest.mark.parametrize(("name", "template"), [pytest.param(*pair, id=f"{n}{pair[0]}") for n, pair in enumerate(statements())])
def test_no_statement_reads_through_a_table(new_meter: Callable[[], Meter], name: str, template: str) -> None:
    meter = new_meter()
    sql = meter.session.tables.statements[template].sql
    plan = [row[3] for row in meter.connection.execute(f"EXPLAIN QUERY PLAN {sql}", [None] * sql.count("?"))]
    assert not [line for line in plan if line.startswith("SCAN perdure") or "AUTOMATIC" in line]
    assert name in SORTING or not [line for line in plan if "TEMP B-TREE" in line]


def _claim(meter: Meter) -> int:
    wanted = claims.Wanted.of(["flow"], None)
    return meter.cost(claims.claim, 5, MINUTE, wanted, OWNERS, NOW)


def _look(meter: Meter) -> int:
    return meter.cost(claims.nothing_to_claim, 5, claims.Wanted.of(["flow"], None), OWNERS, NOW)


CROWDS: Final[dict[str, dict[str, Any]]] = {
    "sleeping": {"start_at": FUTURE},
    "sleeping with priority": {"start_at": FUTURE, "priority": 5},
    "of another workflow": {"workflow": "a-other", "priority": 9},
    "in another queue": {"queue": "a-full"},
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_claim_costs_the_same_however_many_runs_cannot_be_claimed(new_meter: Callable[[], Meter], crowd: str) -> None:
    costs = []
    for size in (10, 20_000):
        meter = new_meter()
        schedules.limit_queue(meter.session, "a-full", QueueLimits(concurrency=0))
        meter.add_runs(size, "crowd-", **CROWDS[crowd])
        looking = _look(meter)
        meter.add_runs(20, "due-", start_at=NOW - 1)
        costs.append((looking, _claim(meter)))
    assert costs[0] == costs[1]


def test_a_claim_takes_steps_for_what_it_takes_not_for_what_is_due(new_meter: Callable[[], Meter]) -> None:
    costs = []
    for size in (20, 5000):
        meter = new_meter()
        meter.add_runs(size, "due-", start_at=NOW - 1)
        costs.append(_claim(meter))
    assert costs[1] < costs[0] * 1.1


def test_a_queue_that_is_full_by_now_is_left_at_once(new_meter: Callable[[], Meter]) -> None:
    costs = []
    for size in (20, 5000):
        meter = new_meter()
        schedules.limit_queue(meter.session, "default", QueueLimits(concurrency=3))
        meter.add_runs(size, "due-", start_at=NOW - 1)
        costs.append(_claim(meter))
    assert costs[1] < costs[0] * 1.1


def test_lists_and_due_cost_the_same_however_many_runs_there_are(new_meter: Callable[[], Meter]) -> None:
    costs = []
    for size in (200, 20_000):
        meter = new_meter()
        meter.add_runs(size, "run-")
        costs.append(
            (
                meter.cost(reading.list_runs, "", None, None, None, 100),
                meter.cost(reading.list_runs, "", "dead", None, None, 100),
                meter.cost(reading.list_runs, "", None, "flow", (NOW + 1, "z"), 100),
                meter.cost(reading.list_runs, "no such", None, None, None, 100),
                meter.cost(reading.due, 100, OWNERS, NOW),
            )
        )
    assert costs[0] == costs[1]


def test_a_verb_of_the_holder_costs_the_same_at_any_length_of_the_run(new_meter: Callable[[], Meter]) -> None:
    costs = []
    for size in (10, 5000):
        meter = new_meter()
        lease = _long_run(meter, size)
        last = Entry(seq=size + 1, key="next")
        costs.append(
            (
                meter.cost(recording.record, lease, [last], [], [Item(stream="log", n=size, payload=b"")]),
                meter.cost(recording.suspend, lease, None, [Awaited("signal", "other")], [last], [], NOW),
                meter.cost(recording.finish, lease, "completed", b"", [last], [], NOW),
                meter.cost(claims.renew, [lease], MINUTE, OWNERS, NOW),
                meter.cost(claims.release, lease, NOW),
                meter.cost(inbox.signal, "run", "new", b"", "dedupe", NOW),
                meter.cost(inbox.unconsumed, "run"),
                meter.cost(claims.acquire, "run", MINUTE, OWNERS, FUTURE, due_only=True),
                meter.cost(runs.cancel, "run", NOW),
            )
        )
    assert costs[0] == costs[1]


def _long_run(meter: Meter, size: int) -> Lease:
    """A run with so many entries, items and consumed signals."""
    new = NewRun(id="run", workflow="flow", input=b"", input_hash=b"h", seed=b"")
    claim = runs.create(meter.session, new, MINUTE, OWNERS, NOW).claim
    assert claim is not None
    for _ in range(size):
        inbox.signal(meter.session, "run", "go", b"", None, NOW)
    numbers = range(size)
    entries = [Entry(seq=n + 1, key=f"step-{n}") for n in numbers]
    items = [Item(stream="log", n=n, payload=b"") for n in numbers]
    recording.record(meter.session, claim.lease, entries, [n + 1 for n in numbers], items)
    return claim.lease


def _statements(meter: Meter, verb: Callable[..., Any], *args: Any) -> list[str]:
    said: list[str] = []
    meter.connection.set_trace_callback(said.append)
    verb(meter.session, *args)
    meter.connection.set_trace_callback(None)
    return [line.split()[0] for line in said if "perdure_" in line]


def test_beginning_a_run_takes_one_statement_and_one_for_each_entry(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    new = [NewRun(id=f"run-{n}", workflow="flow", input=b"", input_hash=b"h", seed=b"") for n in range(3)]
    assert _statements(meter, runs.create, new[0], None, OWNERS, NOW) == ["INSERT"]
    assert _statements(meter, runs.create, new[1], MINUTE, OWNERS, NOW) == ["INSERT"]
    assert _statements(meter, runs.create, new[1], MINUTE, OWNERS, NOW) == ["INSERT", "SELECT"]
    entries = [Entry(seq=n, key=f"step-{n}") for n in range(1, 4)]
    begun = runs.Begun(entries, created_at=NOW - 1)
    assert _statements(meter, runs.create, new[2], MINUTE, OWNERS, NOW, begun) == ["INSERT"] * 4


def test_restoring_a_run_takes_as_many_statements_as_it_has_rows(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    meter.add_runs(1, "other-")
    row = new_row(NewRun(id="run", workflow="flow", input=b"", input_hash=b"", seed=b""), NOW)
    entries = [Entry(seq=n, key=f"step-{n}") for n in range(1, 4)]
    rows = [Signal(seq=n, name="go", payload=b"") for n in range(1, 3)]
    assert _statements(meter, restoring.restore, row, entries, rows, OWNERS, NOW) == ["SELECT", *["INSERT"] * 6]
    replaced = _statements(meter, restoring.restore, row, [], [], OWNERS, NOW)
    assert replaced == ["SELECT", *["DELETE"] * 4, "INSERT"]
    assert _statements(meter, runs.create, msgspec.structs.replace(_new(row), input_hash=b"h"), None, OWNERS, NOW) == [
        "INSERT",
        "SELECT",
        "UPDATE",
    ]


def _new(row: RunRow) -> NewRun:
    return NewRun(**{name: getattr(row, name) for name in NewRun.__struct_fields__})


def test_restoring_costs_the_same_however_many_other_runs_there_are(new_meter: Callable[[], Meter]) -> None:
    costs = []
    for size in (10, 5000):
        meter = new_meter()
        _long_run(meter, 10)
        meter.add_runs(size, "crowd-")
        row = runs.get(meter.session, "run")
        assert row is not None
        costs.append(meter.cost(restoring.restore, row, [Entry(seq=1, key="step")], [], OWNERS, NOW + 2 * MINUTE))
    assert costs[1] < costs[0] * 1.1


def test_the_journal_has_one_index(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    assert len(meter.connection.execute("PRAGMA index_list(perdure_steps)").fetchall()) == 1


@pytest.mark.parametrize("table", ["runs", "steps", "signals", "items", "queues", "schedules"])
def test_every_primary_key_begins_with_the_namespace(new_meter: Callable[[], Meter], table: str) -> None:
    meter = new_meter()
    columns = meter.connection.execute(f"PRAGMA table_info(perdure_{table})").fetchall()
    assert {row[5]: row[1] for row in columns}[1] == "namespace"
