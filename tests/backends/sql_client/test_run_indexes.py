"""`list`, `count`, `due` and `claim` find runs by the index that docs/stores.md names, among thousands of others.

The planner chooses freely: the tables are large and it has their statistics. Under `make chaos` there are a million runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from perdure.backends.sql_client.store import SqlClientStore
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import NOW, TTL, new_run
from tests.backends.sql_client.places import Place
from tests.backends.sql_client.test_plans import Noting
from tests.campaign import IS_FULL

# A power of ten.
RUNS: Final = 1_000_000 if IS_FULL else 10_000
LIMIT: Final = 10
# How many rows a list of ten may read: those of a few groups, and the lines.
FEW: Final = 400

CHANGED, OF_WORKFLOW, KEY = "runs_changed", "runs_of_workflow", "primary key"
FILTERS: Final[Mapping[str, tuple[RunFilter, str]]] = {
    "all": (RunFilter(), CHANGED),
    "status": (RunFilter(status=("completed",)), CHANGED),
    "rare status": (RunFilter(status=("dead",)), CHANGED),
    "statuses": (RunFilter(status=("failed", "dead")), CHANGED),
    "time": (RunFilter(updated_after=NOW - RUNS // 2, updated_before=NOW - RUNS // 4), CHANGED),
    "status and time": (RunFilter(status=("completed",), updated_before=NOW - RUNS // 2), CHANGED),
    "workflow": (RunFilter(workflow="flow"), OF_WORKFLOW),
    "rare workflow": (RunFilter(workflow="rare"), OF_WORKFLOW),
    "workflow and status": (RunFilter(workflow="flow", status=("failed",)), OF_WORKFLOW),
    "workflow, statuses and time": (
        RunFilter(workflow="flow", status=("failed", "completed"), updated_after=NOW - RUNS // 2), OF_WORKFLOW,
    ),
    "queue": (RunFilter(queue="default"), OF_WORKFLOW),
    "rare queue": (RunFilter(queue="mail"), OF_WORKFLOW),
    "queue and status": (RunFilter(queue="mail", status=("pending", "running")), OF_WORKFLOW),
    "queue, workflow and time": (RunFilter(queue="mail", workflow="flow", updated_after=NOW - RUNS // 2), OF_WORKFLOW),
    "prefix": (RunFilter(prefix="run-00001"), KEY),
    "prefix and status": (RunFilter(prefix="run-00001", status=("completed",), updated_after=NOW - RUNS), KEY),
    "metadata": (RunFilter(metadata=("customer", "c-7"), status=("failed",)), CHANGED),
}  # fmt: skip


# Filters that most runs pass: to count those, reading all of them is no worse.
COMMON: Final = {"all", "status", "status and time", "workflow", "workflow, statuses and time", "queue"}
# What run `n` is in, by its remainder; the others are pending.
STATUSES: Final = ((100, "< 94", "completed"), (100, "< 96", "failed"), (100, "< 98", "suspended"), (1000, "= 99", "dead"))


class Access(NamedTuple):
    """How a statement reads the runs: `by` which index, or None, and how many rows if that is known."""

    by: str | None
    rows: int


def _expression(dialect: str, column: str) -> str:
    """The column of run `n`. Most runs have completed, and are of one workflow and queue."""
    number = {"sqlite": "CAST(n AS TEXT)", "postgres": "n::text", "mysql": "CAST(n AS CHAR)"}[dialect]
    joined = f"CONCAT('run-', LPAD({number}, 7, '0'))"
    if dialect == "sqlite":
        joined = "printf('run-%07d', n)"
    status = (
        "CASE WHEN n % 100 < 94 THEN 'completed' WHEN n % 100 < 96 THEN 'failed' WHEN n % 100 < 98 THEN 'suspended' "
        "WHEN n % 1000 = 99 THEN 'dead' ELSE 'pending' END"
    )
    is_timed = "n % 100 >= 96 AND n % 1000 <> 99"
    made = {
        "id": joined,
        "status": status,
        "workflow": "CASE WHEN n % 1000 = 7 THEN 'rare' WHEN n % 10 = 3 THEN 'other' ELSE 'flow' END",
        "queue": "CASE WHEN n % 500 = 1 OR n % 500 = 98 THEN 'mail' ELSE 'default' END",
        "created_at": f"{NOW} - n",
        "updated_at": f"{NOW} - n",
        "wake_at": f"CASE WHEN {is_timed} THEN {NOW} - 5000 + n % 7777 END",
        "lease_until": "NULL",
    }  # fmt: skip
    return made.get(column, column)


async def _fill(here: Place, client: Any) -> None:
    """Insert the runs as copies of one, by one statement."""
    store = here.store(client)
    await store.setup()
    await store.create(new_run("copied", metadata=b'{"customer":"c-7"}'), now=NOW)
    columns = await _columns(here, client)
    digits = " UNION ALL ".join(f"SELECT {n} AS d" for n in range(10))
    powers = len(str(RUNS)) - 1
    number = " + ".join(f"{10**power} * t{power}.d" for power in range(powers))
    tables = " CROSS JOIN ".join(f"({digits}) AS t{power}" for power in range(powers))
    chosen = ", ".join(_expression(here.dialect, column) for column in columns)
    await client.query(
        f"INSERT INTO perdure_runs ({', '.join(columns)}) SELECT {chosen} "
        f"FROM perdure_runs CROSS JOIN (SELECT {number} AS n FROM {tables}) AS numbers WHERE id = 'copied'", (),
    )  # fmt: skip
    await client.query("ANALYZE TABLE perdure_runs" if here.dialect == "mysql" else "ANALYZE perdure_runs", ())


async def _columns(here: Place, client: Any) -> list[str]:
    if here.dialect == "sqlite":
        rows, _ = await client.query("SELECT name FROM pragma_table_info('perdure_runs')", ())
    else:
        rows, _ = await client.query(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'perdure_runs' AND table_schema = "
            + ("DATABASE()" if here.dialect == "mysql" else "current_schema()"), (),
        )  # fmt: skip
    names = [row[0] if isinstance(row[0], str) else row[0].decode() for row in rows]
    return [name for name in names if name not in ("may_wake", "is_started")]  # which MySQL makes itself


async def _accesses(here: Place, client: Any, sql: str, params: Any) -> list[Access]:
    """Every access to the runs that the statement makes."""
    if here.dialect == "sqlite":
        rows, _ = await client.query(f"EXPLAIN QUERY PLAN {sql}", params)
        return [found for row in rows if (found := _sqlite_access(row[3])) is not None]
    if here.dialect == "postgres":
        async with client.transaction() as queries:
            rows, _ = await queries.query(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)
            plan = json.loads(rows[0][0])[0]["Plan"]
        return list(_postgres_accesses(plan))
    rows, _ = await client.query(f"EXPLAIN {sql}", params)
    return [
        Access(_index_name(row[5]) if row[3] not in {"ALL", "index"} else None, 0)
        for row in rows
        if row[2] in {"perdure_runs", "here"} and row[3] is not None
    ]


_SQLITE: Final = re.compile(r"(SCAN|SEARCH) (perdure_runs|here)(?: USING (?:COVERING )?(?:INDEX (\w+)|(PRIMARY KEY)))?")


def _sqlite_access(line: str) -> Access | None:
    found = _SQLITE.match(line)
    if found is None:
        return None
    return Access(None if found[1] == "SCAN" else _index_name(found[3] or found[4]), 0)


def _postgres_accesses(plan: dict[str, Any]) -> Iterator[Access]:
    if plan.get("Relation Name") == "perdure_runs" or (plan["Node Type"] == "Bitmap Index Scan"):
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        rows = round((plan["Actual Rows"] + removed) * plan["Actual Loops"])
        if plan["Node Type"] != "Bitmap Heap Scan":
            yield Access(_index_name(plan.get("Index Name")), rows)
    for part in plan.get("Plans", ()):
        yield from _postgres_accesses(part)


def _index_name(name: str | bytes | None) -> str | None:
    text = name.decode() if isinstance(name, bytes) else name
    if text is None:
        return None
    return KEY if text.upper().startswith("PRIMARY") or text.endswith("_pkey") else text.removeprefix("perdure_")


class Read(NamedTuple):
    """What a verb gave, and how its statements accessed the runs."""

    result: Any
    accesses: list[Access]

    @property
    def indexes(self) -> set[str | None]:
        return {access.by for access in self.accesses}

    @property
    def rows(self) -> int:
        return sum(access.rows for access in self.accesses)


async def _read(here: Place, verb: Any) -> Read:
    client = here.client()
    noting = Noting(client)
    store: SqlClientStore = here.store(noting)
    await store.setup()
    noting.asked.clear()
    result = await verb(store)
    asked = [(sql, params) for sql, params in noting.asked if sql.split()[0] in {"SELECT", "WITH"}]
    return Read(result, [one for sql, params in asked for one in await _accesses(here, client, sql, params)])


def _problem(found: Read, index: str, others: set[str], most: int) -> str | None:
    """What is wrong with how the runs were found."""
    if index not in found.indexes or not found.indexes <= {index, *others}:
        return f"not by {index}: {found.accesses}"
    return f"{found.rows} rows were read: {found.accesses}" if found.rows > most else None


async def test_runs_are_found_by_their_index(here: Place) -> None:
    await _fill(here, here.client())
    problems: dict[str, str | None] = {}
    for name, (wanted, index) in FILTERS.items():
        most = RUNS // 20 if index == KEY else FEW
        for before in (None, (NOW - RUNS // 3, "run-")):
            found = await _read(here, lambda store: store.list(wanted, before=before, limit=LIMIT))  # noqa: B023 - called at once
            assert found.result or before, name
            problems[f"list by {name} before {before}"] = _problem(found, index, {KEY}, most)
        if name not in COMMON:
            found = await _read(here, lambda store: store.count(wanted))  # noqa: B023 - as above
            assert found.result > 0, name
            problems[f"count by {name}"] = _problem(found, index, set(), RUNS)
    found = await _read(here, lambda store: store.due(now=NOW, limit=LIMIT))
    assert found.result
    problems["due"] = _problem(found, "runs_due", set(), FEW)
    found = await _read(here, lambda store: store.claim(3, TTL, [("flow", 1), ("rare", 1)], now=NOW))
    assert len(found.result.claims) == 3
    problems["claim"] = _problem(found, "runs_wake", {"runs_leased", KEY}, FEW // 4)  # of hundreds that are due
    wrong = [f"{what}: {problem}" for what, problem in problems.items() if problem]
    assert not wrong, "\n".join(wrong)
