"""What verbs cost, in steps of SQLite's virtual machine rather than in time, and that no statement reads through a table."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import product
from typing import Any, Final

import msgspec
import pytest

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release
from perdure.backends.base.new_runs import new_row
from perdure.backends.sql import claims, inbox, listing, reading, runs, schedules
from perdure.backends.sql.recording import report
from perdure.backends.sqlite import creating, process_leases, recording
from perdure.backends.sqlite.session import SqliteSession, SqliteTables, run_verb, set_up_tables
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.model.journal import Entry
from perdure.model.process_owner import Owners, current
from perdure.model.records import END_STATUSES, MAX_INTERVAL, Awaited, Item, Lease, NewRun, QueueLimits, RunRow, Schedule, Signal
from perdure.model.run_filter import RunFilter

FUTURE: Final = 4_000_000_000_000_000
NOW: Final = 2_000_000_000_000_000
OWNERS: Final = Owners()
MINUTE: Final = 60_000_000
REQUEST: Final = ClaimRequest(filter=ClaimFilter.of([("flow", 1)], None), limit=5, length=MINUTE, owner="", now=NOW)


class Meter:
    """A database that counts steps."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        tables = SqliteTables("perdure")
        self.writer = WriterConnection(self.connection)
        set_up_tables(self.writer, tables, "", allowed=True)
        self.session = SqliteSession(self.writer, tables, "")
        self.steps = 0

    def run(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What one call gives."""
        found = verb(self.session, *args, **kwargs)
        return run_verb(found) if isinstance(found, Coroutine) else found

    def cost(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """The steps one call takes, in a transaction that is rolled back."""

        def count() -> int:
            self.steps += 1
            return 0

        self.connection.execute("BEGIN")
        self.steps = 0
        self.connection.set_progress_handler(count, 1)
        try:
            self.run(verb, *args, **kwargs)
        finally:
            self.connection.set_progress_handler(None, 0)
            self.connection.execute("ROLLBACK")
            self.writer.fences.clear()
        return self.steps

    def add_runs(self, count: int, prefix: str, **columns: Any) -> None:
        """Many runs like one that is created."""
        new = {"id": f"{prefix}seed", "workflow": "flow", "input": b"", "input_hash": b"h", "seed": b"", **columns}
        run = creating.create(self.session, NewRun(**new), None, OWNERS, NOW).run
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


def _everything(meter: Meter) -> None:
    """Every verb, at least once."""
    run = meter.run
    lease = _long_run(meter, 3)
    meter.add_runs(3, "due-", start_at=NOW - 1)
    ended = str(current()._replace(boot="an-earlier-one"))
    meter.connection.execute("UPDATE perdure_runs SET lease_owner = ?, lease_until = ? WHERE id = 'due-1'", (ended, FUTURE))
    for name in ("child", "other"):
        new = NewRun(id=name, workflow="flow", input=b"", input_hash=b"h", seed=b"", parent_id="run", parent_key="child")
        child = run(creating.create, new, MINUTE, OWNERS, NOW, [Entry(seq=1, key="a")], [Signal(seq=1, name="go", payload=b"")])
        meter.writer.begin(defers=name == "child")
        run(recording.record, child.claim.lease, [Entry(seq=2, key="b")], [1], [Item(stream="log", n=0, payload=b"")])
        run(recording.finish, child.claim.lease, "failed", b"", [], [], NOW)
        meter.writer.run_deferred()
        meter.writer.commit()
    run(process_leases.find_nothing_due, REQUEST, OWNERS)
    run(process_leases.due, 5, OWNERS, NOW)
    run(schedules.limit_queue, "default", QueueLimits(concurrency=10, per_key=1))
    run(claims.load, run(process_leases.claim, REQUEST, OWNERS).leased)
    run(process_leases.find_nothing_due, REQUEST, OWNERS)
    run(process_leases.renew, [lease], MINUTE, {}, OWNERS, NOW)
    run(report, lease, b"")
    run(inbox.signal, "run", "go", b"", "dedupe", "sent", NOW)
    run(inbox.read, "run")
    run(runs.cancel, "run", NOW)
    run(runs.unhold, "run", NOW)
    run(runs.get, "run")
    run(reading.journal, "run", 0)
    run(reading.items, "run", "log", -1, 10)
    for given in product(("", "due-"), (None, ("failed", "dead")), (None, "flow"), (None, "default"), (None, NOW)):
        prefix, status, workflow, queue, after = given
        wanted = RunFilter(prefix=prefix, status=status, workflow=workflow, queue=queue, updated_after=after)  # type: ignore[arg-type]
        run(listing.count, wanted)
        run(listing.list_runs, wanted, None, 10)
        run(listing.list_runs, wanted, (NOW, "a"), 10)
    assert run(recording.suspend, lease, None, [Awaited("signal", "go")], [], [], NOW)
    run(recording.suspend, lease, None, [], [], [], NOW)
    run(claims.release, run(process_leases.acquire, "run", MINUTE, OWNERS, NOW, due_only=False).lease, Release(), NOW)
    run(runs.reopen, "child", [], NOW)
    run(process_leases.restore, run(runs.get, "run"), [Entry(seq=1, key="a")], [], OWNERS, NOW)
    run(runs.delete, "run")
    assert run(runs.purge, 0, END_STATUSES, None, 10, NOW) == 1
    schedule = Schedule(id="s", workflow="flow", spec="", input=b"", next_at=NOW, metadata=b"")
    run(schedules.put_schedule, schedule)
    run(schedules.schedules)
    run(schedules.fire, "s", NOW, FUTURE, NewRun(id="fired", workflow="flow", input=b"", input_hash=b"h", seed=b""), NOW)
    run(schedules.drop_schedule, "s")
    run(schedules.queue_limits)


def test_no_statement_reads_through_a_table_or_by_the_namespace_alone(new_meter: Callable[[], Meter]) -> None:
    plans = _plans(new_meter(), _everything)
    assert len(plans) > 80
    through = {
        (sql, line)
        for sql, lines in plans.items()
        for line in lines
        if line.startswith("SCAN perdure") or "AUTOMATIC" in line or line.endswith("(namespace=?)")
    }
    # Few rows: the limits that were set, the schedules, the leases in force, and counts, which count every row.
    few = ('FROM "perdure_queues"', 'FROM "perdure_schedules"', "lease_until > ?", "SELECT count(*)", "min(workflow)")
    first = "WITH RECURSIVE first"  # begins with the first row of the index
    assert {(sql, line) for sql, line in through if not any(part in sql for part in (*few, first))} == set()


def test_what_is_sorted_is_bounded_by_something_else(new_meter: Callable[[], Meter]) -> None:
    """The unconsumed rows of an inbox, the leases in force, runs with a prefix, and what was found and limited before."""
    plans = _plans(new_meter(), _everything)
    sorting = {sql for sql, lines in plans.items() if any("USE TEMP B-TREE FOR ORDER BY" in line for line in lines)}
    few = ("consumed_by IS NULL", "lease_until", "id >= ?", ") AS newest", ") AS old")
    assert {sql for sql in sorting if not any(part in sql for part in few)} == set()


def _plans(meter: Meter, work: Callable[[Meter], None]) -> dict[str, list[str]]:
    """How SQLite goes about every statement of the work."""
    said: list[tuple[str, Sequence[Any]]] = []
    real = meter.connection

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
            said.append((sql, values))
            return real.execute(sql, values)

        def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> sqlite3.Cursor:
            said.append((sql, rows[0]))
            return real.executemany(sql, rows)

    listening: Any = Listening()
    meter.writer.connection = listening
    work(meter)
    return {
        sql: [row[3] for row in real.execute(f"EXPLAIN QUERY PLAN {sql}", values)] for sql, values in said if "perdure_" in sql
    }


def _claim(meter: Meter) -> int:
    return meter.cost(process_leases.claim, REQUEST, OWNERS)


def _look(meter: Meter) -> int:
    return meter.cost(process_leases.find_nothing_due, REQUEST, OWNERS)


CROWDS: Final[dict[str, dict[str, Any]]] = {
    "sleeping": {"start_at": FUTURE},
    "sleeping with priority": {"start_at": FUTURE, "priority": 5},
    "of another workflow": {"workflow": "a-other", "priority": 9},
    "in a full queue": {"queue": "a-full"},
    "in a queue whose rate is spent": {"queue": "b-slow"},
}


def _use_up(meter: Meter, queue: str, limits: QueueLimits) -> None:
    """Limit the queue, and lease the one run that it lets in."""
    meter.run(schedules.limit_queue, queue, limits)
    new = NewRun(id=f"of-{queue}", workflow="flow", queue=queue, input=b"", input_hash=b"h", seed=b"")
    assert creating.create(meter.session, new, MINUTE, OWNERS, NOW).claim is None
    assert meter.run(process_leases.acquire, new.id, MINUTE, OWNERS, NOW, due_only=True) is not None


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_claim_costs_the_same_however_many_runs_cannot_be_claimed(new_meter: Callable[[], Meter], crowd: str) -> None:
    costs = []
    for size in (10, 20_000):
        meter = new_meter()
        _use_up(meter, "a-full", QueueLimits(concurrency=1))
        _use_up(meter, "b-slow", QueueLimits(interval=MAX_INTERVAL))
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
        meter.run(schedules.limit_queue, "default", QueueLimits(concurrency=3))
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
                meter.cost(listing.list_runs, RunFilter(), None, 100),
                meter.cost(listing.list_runs, RunFilter(status=("dead", "failed")), None, 100),
                meter.cost(listing.list_runs, RunFilter(workflow="flow"), (NOW + 1, "z"), 100),
                meter.cost(listing.list_runs, RunFilter(queue="default"), None, 100),
                meter.cost(listing.list_runs, RunFilter(queue="none", updated_after=NOW), None, 100),
                meter.cost(listing.list_runs, RunFilter(workflow="flow", queue="default", updated_before=NOW), None, 100),
                meter.cost(listing.list_runs, RunFilter(prefix="no such"), None, 100),
                meter.cost(listing.count, RunFilter(queue="none")),
                meter.cost(listing.count, RunFilter(updated_after=NOW + 1)),
                meter.cost(process_leases.due, 100, OWNERS, NOW),
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
                meter.cost(process_leases.renew, [lease], MINUTE, {}, OWNERS, NOW),
                meter.cost(claims.release, lease, Release(), NOW),
                meter.cost(inbox.signal, "run", "new", b"", "dedupe", "sent", NOW),
                meter.cost(inbox.read, "run"),
                meter.cost(process_leases.acquire, "run", MINUTE, OWNERS, FUTURE, due_only=True),
                meter.cost(runs.cancel, "run", NOW),
            )
        )
    assert costs[0] == costs[1]


def _long_run(meter: Meter, size: int) -> Lease:
    """A run with so many entries, items and consumed signals."""
    new = NewRun(id="run", workflow="flow", input=b"", input_hash=b"h", seed=b"")
    claim = creating.create(meter.session, new, MINUTE, OWNERS, NOW).claim
    assert claim is not None
    for _ in range(size):
        meter.run(inbox.signal, "run", "go", b"", None, None, NOW)
    numbers = range(size)
    entries = [Entry(seq=n + 1, key=f"step-{n}") for n in numbers]
    items = [Item(stream="log", n=n, payload=b"") for n in numbers]
    recording.record(meter.session, claim.lease, entries, [n + 1 for n in numbers], items)
    return claim.lease


def _statements(meter: Meter, verb: Callable[..., Any], *args: Any) -> list[str]:
    said: list[str] = []
    meter.connection.set_trace_callback(said.append)
    meter.run(verb, *args)
    meter.connection.set_trace_callback(None)
    return [line.split()[0] for line in said if "perdure_" in line]


def test_beginning_a_run_takes_one_statement_and_one_for_its_entries(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    new = [NewRun(id=f"run-{n}", workflow="flow", input=b"", input_hash=b"h", seed=b"") for n in range(3)]
    assert _statements(meter, creating.create, new[0], None, OWNERS, NOW) == ["INSERT"]
    assert _statements(meter, creating.create, new[1], MINUTE, OWNERS, NOW) == ["INSERT"]
    assert _statements(meter, creating.create, new[1], MINUTE, OWNERS, NOW) == ["INSERT", "SELECT"]
    entries = [Entry(seq=n, key=f"step-{n}") for n in range(1, 4)]
    assert _statements(meter, creating.create, new[2], MINUTE, OWNERS, NOW, entries, (), NOW - 1) == ["INSERT"] * 2


def test_restoring_a_run_takes_the_same_statements_however_many_rows_it_has(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    meter.add_runs(1, "other-")
    row = new_row(NewRun(id="run", workflow="flow", input=b"", input_hash=b"", seed=b""), NOW)
    entries = [Entry(seq=n, key=f"step-{n}") for n in range(1, 4)]
    rows = [Signal(seq=n, name="go", payload=b"") for n in range(1, 3)]
    assert _statements(meter, process_leases.restore, row, entries, rows, OWNERS, NOW) == ["WITH", "SELECT", *["INSERT"] * 3]
    replaced = _statements(meter, process_leases.restore, row, [], [], OWNERS, NOW)
    assert replaced == ["WITH", "SELECT", "UPDATE", *["DELETE"] * 3]
    assert _statements(meter, creating.create, msgspec.structs.replace(_new(row), input_hash=b"h"), None, OWNERS, NOW) == [
        "INSERT",
        "SELECT",
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
        row = meter.run(runs.get, "run")
        assert row is not None
        costs.append(meter.cost(process_leases.restore, row, [Entry(seq=1, key="step")], [], OWNERS, NOW + 2 * MINUTE))
    assert costs[1] < costs[0] * 1.1


def test_the_journal_has_one_index(new_meter: Callable[[], Meter]) -> None:
    meter = new_meter()
    assert len(meter.connection.execute("PRAGMA index_list(perdure_steps)").fetchall()) == 1


@pytest.mark.parametrize("table", ["runs", "steps", "signals", "items", "queues", "schedules"])
def test_every_primary_key_begins_with_the_namespace(new_meter: Callable[[], Meter], table: str) -> None:
    meter = new_meter()
    columns = meter.connection.execute(f"PRAGMA table_info(perdure_{table})").fetchall()
    assert {row[5]: row[1] for row in columns}[1] == "namespace"
