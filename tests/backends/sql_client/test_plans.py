"""Every statement finds its rows by an index, also where there are thousands of runs that do not concern it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.backends.sql import runs
from perdure.backends.sql_client.store import SqlClientStore
from perdure.model.records import MAX_INTERVAL, Awaited, Item, QueueLimits
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import EXPIRED, NOW, TTL, at, entry, new_run, run_row
from tests.backends.sql_client.places import Place

MANY = 1500
FILTERS = (
    RunFilter(),
    RunFilter(status=("completed",)),
    RunFilter(status=("failed", "completed"), updated_after=NOW - 50),
    RunFilter(workflow="flow"),
    RunFilter(queue="full"),
    RunFilter(queue="full", workflow="flow", updated_before=NOW - 50),
    RunFilter(prefix="over-00"),
)
BIG = ("perdure_runs", "perdure_steps", "perdure_signals", "perdure_items")


_REMOVED = re.compile(r"Rows Removed by \w+: (\d+)")


class Noting:
    """A client that notes what it is asked."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked: list[tuple[str, Sequence[Any]]] = []

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.asked.append((sql, params))
        return await self._client.query(sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.transaction() as queries:
            inner = Noting(queries)
            inner.asked = self.asked
            yield inner


async def fill(store: SqlClientStore, first: int, last: int) -> None:
    """Runs of another workflow that are due, runs of ours that sleep, wait behind a full queue or have ended."""
    kinds: list[dict[str, Any]] = [
        {"workflow": "other"},
        {"start_at": at(10**6)},
        {"queue": "full"},
    ]
    begins = [
        runs.RunCreation(new_run(f"{number}-{n:04}", **columns), now=NOW - n, entries=[entry(1)])
        for number, columns in enumerate(kinds)
        for n in range(first, last)
    ]
    await store.setup()
    for start in range(0, len(begins), 500):
        await store._create_all(begins[start : start + 500])
    for n in range(first, last, 5):
        await store.restore(run_row(f"over-{n:04}", status="completed", outcome=b"1", wake_at=None), [], now=NOW - n)


async def use_up_queues(store: SqlClientStore) -> None:
    """Limit the queues, and lease the one run that each lets in."""
    for queue, limits in {"full": QueueLimits(concurrency=1), "slow": QueueLimits(interval=MAX_INTERVAL)}.items():
        await store.limit_queue(queue, limits)
        assert (await store.create(new_run(f"of-{queue}", queue=queue), ttl=TTL, now=NOW)).claim is None
        assert await store.acquire(f"of-{queue}", 10**6, now=NOW) is not None


async def use(store: SqlClientStore) -> None:
    """Every verb that looks for runs or writes to one."""
    await use_up_queues(store)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    lease = claim.lease
    await store.signal("run", "go", b"1", dedupe="d", now=NOW)
    await store.record(lease, [entry(1)], now=NOW)
    await store.record(lease, [entry(2)], consume=[1], items=[Item(stream="log", n=0, payload=b"1")], now=NOW)
    await store.renew([lease], TTL, now=NOW)
    await store.suspend(lease, wake_at=NOW, waiting_for=[Awaited("signal", "go")], entries=[entry(3)], now=NOW)
    claimed = (await store.claim(5, TTL, [("flow", 1)], now=EXPIRED)).claims
    assert [one.run.id for one in claimed] == ["run"]
    await store.report(claimed[0].lease, b"1")
    await store.finish(claimed[0].lease, "failed", b"1", entries=[entry(4)], now=EXPIRED)
    await store.reopen("run", [], now=EXPIRED)
    await store.cancel("run", now=EXPIRED)
    assert await store.acquire("run", TTL, now=EXPIRED) is not None
    await store.get("run")
    await store.inbox("run")
    await store.items("run", "log")
    await store.due(limit=10)
    for wanted in FILTERS:
        await store.list(wanted, limit=10, before=(NOW - 9, "over-0010"))
        await store.list(wanted, limit=10)
    await store.purge(0, limit=10, now=EXPIRED)
    await store.delete("run")


async def scans(here: Place, client: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """What the database would read as a whole for this."""
    if here.dialect == "sqlite":
        rows, _ = await client.query(f"EXPLAIN QUERY PLAN {sql}", params)
        return [row[3] for row in rows if row[3].startswith("SCAN") and _is_big(row[3])]
    if here.dialect == "postgres":
        return await _postgres_scans(client, sql, params)
    rows, _ = await client.query(f"EXPLAIN {sql}", params)
    return [tuple(row) for row in rows if row[3] == "ALL" and int(row[8] or 0) > MANY / 2]


async def _postgres_scans(client: Any, sql: str, params: Sequence[Any]) -> list[str]:
    """It reads small tables as a whole because that is cheaper, so there it is asked what it would do otherwise."""
    how = "EXPLAIN ANALYZE" if sql.split(maxsplit=1)[0] in {"SELECT", "WITH"} else "EXPLAIN"
    async with client.transaction() as queries:
        rows, _ = await queries.query(f"{how} {sql}", params)
        await queries.query("SET LOCAL enable_seqscan = off", ())
        others, _ = await queries.query(f"EXPLAIN {sql}", params)
    big = [row[0] for row in rows if any(f"Seq Scan on {name}" in row[0] for name in BIG[:2])]
    big += [row[0] for row in rows if (found := _REMOVED.search(row[0])) and int(found[1]) > MANY / 2]
    return big + [row[0] for row in others if any(f"Seq Scan on {name}" in row[0] for name in BIG)]


def _is_big(line: str) -> bool:
    aliases = {*BIG, "run", "here", "there", "step"}
    return line.split()[1] in aliases and "USING" not in line


async def test_nothing_reads_a_table_as_a_whole(here: Place) -> None:
    client = here.client()
    await fill(here.store(client), 0, MANY)
    if here.dialect != "mysql":
        await client.query("ANALYZE", ())
    noting = Noting(client)
    await use(here.store(noting))
    seen = {
        sql: found
        for sql, params in noting.asked
        if sql.split()[0] in {"SELECT", "UPDATE", "DELETE", "WITH", "INSERT"} and "perdure_" in sql and "pg_class" not in sql
        if (found := await scans(here, client, sql, params))
    }
    assert seen == {}


async def rows_read(here: Place, client: Any) -> int:
    """How much was read so far: steps of SQLite's machine, or MySQL's own count."""
    if here.dialect == "sqlite":
        return int(client.steps)
    rows, _ = await client.query("SHOW GLOBAL STATUS LIKE 'Handler_read%'", ())
    return sum(int(row[1]) for row in rows)


@pytest.mark.parametrize("here", ["sqlite", "mysql"], indirect=True)
async def test_a_claim_reads_as_much_whoever_else_is_there(here: Place) -> None:
    client = here.client()
    store = here.store(client)
    await use_up_queues(store)
    costs = []
    for first, last in ((0, 20), (20, MANY)):
        await fill(store, first, last)
        before = await rows_read(here, client)
        assert (await store.claim(3, TTL, [("flow", 1)], now=EXPIRED)).claims == []
        assert len(await store.due(now=EXPIRED, limit=3)) == 3
        costs.append(await rows_read(here, client) - before)
    assert costs[1] < 3 * costs[0] + 50, costs
