"""Every verb finds what it needs by an index: the server's profiler says how each command was carried out."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from perdure.backends.mongo import MongoStore
from perdure.model.records import Item, QueueLimits
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.capabilities import CORE_VERBS, PART_VERBS
from perdure.testing.contract.world import EXPIRED, NOW, SCHEDULE, TTL, entry, new_run, signals
from tests.backends.mongo.conftest import Client
from tests.campaign import IS_FULL


async def _busy(store: MongoStore) -> None:
    """Three hundred runs, and one of them with something of everything."""
    await asyncio.gather(*(store.create(new_run(f"run-{n}", workflow=f"flow-{n % 3}"), now=NOW) for n in range(300)))
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await store.limit_queue("default", QueueLimits(concurrency=5, per_key=5))
    await asyncio.gather(*(store.signal("run", "go", b"1", dedupe=f"d-{n}", now=NOW) for n in range(70)))
    parts = [([entry(n + 1)], [Item(stream="log", n=n, payload=b"1")]) for n in range(70)]
    await asyncio.gather(*(store.record(claim.lease, entries, items=items, now=NOW) for entries, items in parts))


async def test_no_verb_reads_more_than_it_needs(store: MongoStore) -> None:
    await _busy(store)
    database = store._connections.collections("").database
    await store._connections.run(database.command("profile", 2))
    claim = await store.acquire("run", TTL, now=EXPIRED)
    assert claim is not None
    await store.put_schedule(SCHEDULE)
    assert await store.suspend(claim.lease, wake_at=None, waiting_for=signals("go"), now=EXPIRED)
    # Operators last, as they delete the run.
    for verb in [*CORE_VERBS.values(), *(verb for part in reversed(PART_VERBS.values()) for verb in part.values())]:
        await asyncio.gather(verb(store, claim.lease), return_exceptions=True)
    await store.signal("run-1", "go", b"1", dedupe="d-3", now=NOW)
    await store.claim(3, TTL, [("flow-0", 1), ("flow-1", 1)], ["default"], now=NOW)
    await store.list(RunFilter(status=("pending",), workflow="flow-1", prefix="run-2"), limit=5)
    await store.purge(0, now=EXPIRED)
    await store._connections.run(database.command("profile", 0))
    cursor = database["system.profile"].find({"ns": {"$regex": "perdure_"}})
    lines: list[dict[str, Any]] = await store._connections.run(cursor.to_list())
    assert len(lines) > 30
    assert [line["command"] for line in lines if "COLLSCAN" in line.get("planSummary", "")] == []
    assert [line["command"] for line in lines if line.get("hasSortStage")] == []


# Fewer than on the other servers: this one is emulated.
RUNS: Final = 50_000 if IS_FULL else 1_500
BY_STATUS, BY_WORKFLOW, BY_QUEUE = (
    "status: 1, updated_at",
    "workflow: 1, status: 1, updated_at",
    "queue: 1, status: 1, updated_at",
)
FILTERS: Final[list[tuple[RunFilter, str]]] = [
    (RunFilter(), BY_STATUS),
    (RunFilter(status=("failed",)), BY_STATUS),
    (RunFilter(status=("failed", "dead"), updated_after=NOW - RUNS // 2), BY_STATUS),
    (RunFilter(updated_after=NOW - RUNS // 2, updated_before=NOW - RUNS // 4), BY_STATUS),
    (RunFilter(workflow="rare"), BY_WORKFLOW),
    (RunFilter(workflow="rare", status=("completed",)), BY_WORKFLOW),
    (RunFilter(queue="mail"), BY_QUEUE),
    (RunFilter(queue="mail", status=("completed", "failed"), updated_before=NOW - RUNS // 2), BY_QUEUE),
]


def _fill(runs: Any) -> None:
    """Insert copies of the one run that is there. Most have completed, and are of one workflow and queue."""
    copied = runs.find_one()
    for first in range(0, RUNS, 10_000):
        runs.insert_many(
            {
                **copied,
                "_id": f"run-{n:07}",
                "status": "failed" if n % 100 == 1 else "dead" if n % 500 == 2 else "completed",
                "workflow": "rare" if n % 100 in {3, 4} else "flow",
                "queue": "mail" if n % 100 in {1, 5} else "default",
                "updated_at": NOW - n,
                "wake_at": None,
            }
            for n in range(first, min(first + 10_000, RUNS))
        )


async def test_lists_and_counts_are_read_by_their_index(store: MongoStore, client: Client, database: str) -> None:
    await store.create(new_run("copied"), now=NOW)
    await asyncio.to_thread(_fill, client[database]["perdure_runs"])
    for wanted, index in FILTERS:
        await store._connections.run(store._connections.collections("").database.command("profile", 2))
        found = await store.list(wanted, limit=10)
        number = await store.count(wanted)
        await store._connections.run(store._connections.collections("").database.command("profile", 0))
        assert len(found) == min(10, number) > 0, wanted
        listed, counted = await asyncio.to_thread(_profile, client[database])
        assert index in listed["planSummary"], (wanted, listed)
        assert not listed.get("hasSortStage"), (wanted, listed)
        assert listed["docsExamined"] <= 10 * len(wanted.statuses), (wanted, listed)
        if wanted != RunFilter():  # which any index can count
            assert "IXSCAN" in counted["planSummary"] or "COUNT_SCAN" in counted["planSummary"], (wanted, counted)
            assert counted["keysExamined"] <= number + 20, (wanted, counted)


def _profile(database: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the profiler says of the last list and the last count."""
    lines = list(database["system.profile"].find({"ns": {"$regex": "perdure_runs"}}))
    database.drop_collection("system.profile")
    listed = [line for line in lines if "find" in line["command"]]
    counted = [line for line in lines if "aggregate" in line["command"] or "count" in line["command"]]
    return listed[-1], counted[-1]  # a busy server may abort the first, which is then repeated
