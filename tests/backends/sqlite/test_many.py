"""More runs and workflows than SQLite joins SELECTs in one statement (500)."""

from __future__ import annotations

import asyncio

from perdure.backends.sqlite import SQLiteStore
from perdure.model.records import Item, NewRun
from perdure.model.run_filter import RunFilter

WORKFLOWS = [f"flow-{n}" for n in range(120)]


async def test_as_many_runs_and_workflows_as_there_are_can_be_listed_claimed_and_purged(store: SQLiteStore) -> None:
    new = [NewRun(id=f"run-{n}", workflow=WORKFLOWS[n % 120], input=b"", input_hash=b"h", seed=b"") for n in range(720)]
    await asyncio.gather(*map(store.create, new))
    ids = {run.id for run in new}
    assert {line.id for line in await store.list(limit=1000)} == set(await store.due(limit=1000)) == ids
    assert await store.count(RunFilter(status=("pending",))) == len(ids)
    claims = (await store.claim(1000, 60, [(name, 1) for name in WORKFLOWS])).claims
    assert {claim.run.id for claim in claims} == ids
    items = [Item(stream=stream, n=n, payload=b"") for stream in ("a", "b") for n in range(3)]
    await store.record(claims[0].lease, items=items)
    await store.release(claims[0].lease)
    (again,) = (await store.claim(1000, 60, [(name, 1) for name in WORKFLOWS])).claims
    assert again.item_counts == {"a": 3, "b": 3}
    await asyncio.gather(*(store.finish(claim.lease, "completed", b"") for claim in [again, *claims[1:]]))
    assert await store.purge(0, limit=700) == 700
    assert await store.count(RunFilter(status=("completed",))) == 20
