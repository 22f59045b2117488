"""What a step costs: transactions and statements, counted at the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from perdure.model.records import Lease
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import NOW, TTL, entry, new_run
from tests.backends.sql_client.places import Place

RUNS, STEPS = 100, 10


class Counting:
    """A client that counts what goes through it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.transactions = 0
        self.statements = 0

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.statements += 1
        return await self._client.query(sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        self.transactions += 1
        async with self._client.transaction() as queries:
            inner = Counting(queries)
            yield inner
            self.statements += inner.statements


async def test_a_record_alone_is_one_transaction_of_two_statements(here: Place) -> None:
    client = Counting(here.client())
    store = here.store(client)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    client.transactions = client.statements = 0
    await store.record(claim.lease, [entry(1)], now=NOW)
    assert client.transactions == 1
    assert client.statements == (3 if here.dialect == "sqlite" else 2)  # there one more makes it the only writer


async def test_a_hundred_runs_at_once_share_their_transactions(here: Place) -> None:
    client = Counting(here.client())
    store = here.store(client)
    made = await asyncio.gather(*(store.create(new_run(f"run-{n}"), ttl=TTL, now=NOW) for n in range(RUNS)))

    async def drive(lease: Lease) -> None:
        for seq in range(1, STEPS + 1):
            await store.record(lease, [entry(seq)], now=NOW)
        await store.finish(lease, "completed", b"1", entries=[entry(STEPS + 1)], now=NOW)

    client.transactions = 0
    await asyncio.gather(*(drive(created.claim.lease) for created in made if created.claim is not None))
    assert client.transactions / (RUNS * STEPS) < 0.2
    assert await store.count(RunFilter(status=("completed",))) == RUNS
    assert [line.seq for line in await store.journal("run-7")] == list(range(1, STEPS + 2))
