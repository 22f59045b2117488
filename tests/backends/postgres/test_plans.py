"""What a claim reads does not depend on statistics: a new database has none, and PostgreSQL keeps the plans made then."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.postgres import PostgresStore
from perdure.backends.postgres.claiming import CLAIM
from perdure.backends.postgres.connections import SERVER_SETTINGS
from perdure.model.records import QueueLimits
from perdure.testing.contract.world import NOW, TTL, new_run

DUE = 600
TAKEN = 5
SLEEPING = 20_000


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


async def _add_sleeping_runs(dsn: str, store: PostgresStore) -> None:
    """So many copies of a sleeping run, by one statement, and no statistics of them."""
    (claim,) = (await store.claim(1, TTL, [("flow", 1)], now=NOW)).claims
    await store.suspend(claim.lease, wake_at=NOW + 10 * DUE, now=NOW)
    connection = await asyncpg.connect(dsn)
    await connection.execute("ALTER TABLE perdure_runs SET (autovacuum_enabled = false)")
    columns = [name for (name,) in await connection.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'perdure_runs'::regclass AND attnum > 0"
    )]  # fmt: skip
    copied = {"id": "'sleeper-' || n", "wake_at": "wake_at + n"}  # different instants, so that this index is the largest
    chosen = ", ".join(copied.get(name, name) for name in columns)
    await connection.execute(
        f"INSERT INTO perdure_runs ({', '.join(columns)}) SELECT {chosen} FROM perdure_runs, generate_series(1, {SLEEPING}) AS n"
    )
    await connection.close()


async def _explain_claim(dsn: str, store: PostgresStore) -> list[dict[str, Any]]:
    """The nodes of the plan with which a new connection claims, as they were executed."""
    connection = await asyncpg.connect(dsn, server_settings=SERVER_SETTINGS)
    await connection.execute(f"PREPARE claim AS {store._connections.tables.sql(CLAIM)}")
    transaction = connection.transaction()
    await transaction.start()
    execute = f"EXECUTE claim ('', 1000000, 'worker', {NOW + DUE}, {TAKEN}, '{{flow}}', '{{1}}', NULL, 1)"
    plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {execute}")
    await transaction.rollback()
    await connection.close()
    return list(_nodes(json.loads(plan)[0]["Plan"]))


def _rows_read(nodes: list[dict[str, Any]]) -> float:
    """How many rows of the table were read, those that a filter dropped included."""
    scans = (node for node in nodes if node.get("Relation Name") == "perdure_runs" and "Scan" in node["Node Type"])
    return float(sum((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in scans))


async def test_a_claim_without_statistics_reads_what_it_can_take(dsn: str) -> None:
    store = PostgresStore(dsn)
    await asyncio.gather(*(store.create(new_run(f"run-{n:03}"), now=NOW + n) for n in range(DUE)))
    fresh = await _explain_claim(dsn, store)
    assert {node["Index Name"] for node in fresh if node["Node Type"].startswith("Index Scan")} == {
        "perdure_runs_wake",
        "perdure_runs_pkey",
    }
    assert sum(node.get("Rows Removed by Join Filter", 0) for node in fresh) == 0
    assert _rows_read(fresh) <= TAKEN * 10 + 100 + 3 * TAKEN
    connection = await asyncpg.connect(dsn)
    await connection.execute("ANALYZE")
    await connection.close()
    assert _rows_read(await _explain_claim(dsn, store)) == _rows_read(fresh)
    claimed = await store.claim(TAKEN, TTL, [("flow", 1)], now=NOW + DUE)
    assert [claim.run.id for claim in claimed.claims] == [f"run-{n:03}" for n in range(TAKEN)]
    await store.close()


async def test_a_claim_reads_no_sleeping_run(dsn: str) -> None:
    """A table that has grown and was not analysed yet: then PostgreSQL knows its size, and all indexes look alike."""
    store = PostgresStore(dsn)
    await store.create(new_run("sleeper"), now=NOW)
    await _add_sleeping_runs(dsn, store)
    nodes = await _explain_claim(dsn, store)
    assert _rows_read(nodes) <= 5, [node.get("Index Name") for node in nodes]
    await store.close()


@pytest.mark.parametrize("limits", [QueueLimits(concurrency=TAKEN), QueueLimits(interval=1)])
async def test_a_claim_from_a_limited_queue_keeps_the_order(dsn: str, limits: QueueLimits) -> None:
    store = PostgresStore(dsn)
    await store.limit_queue("default", limits)
    await asyncio.gather(*(store.create(new_run(f"run-{n:02}"), now=NOW - n) for n in range(20)))
    claimed = await store.claim(10, TTL, [("flow", 1)], now=NOW)
    number = TAKEN if limits.interval is None else 1
    assert [claim.run.id for claim in claimed.claims] == [f"run-{n:02}" for n in range(19, 19 - number, -1)]
    await store.close()
