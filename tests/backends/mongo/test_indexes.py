"""Every verb finds what it needs by an index: the server's profiler says how each command was carried out."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.backends.mongo import MongoStore
from perdure.model.records import Item, QueueLimits
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.capabilities import CORE_VERBS, PART_VERBS
from perdure.testing.contract.world import EXPIRED, NOW, SCHEDULE, TTL, entry, new_run, signals


async def _busy(store: MongoStore) -> None:
    """Three hundred runs, and one of them with something of everything."""
    await asyncio.gather(*(store.create(new_run(f"run-{n}", workflow=f"flow-{n % 3}"), now=NOW) for n in range(300)))
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await store.limit_queue("default", QueueLimits(concurrency=5, key_concurrency=5))
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
