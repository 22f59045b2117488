"""What a step costs, counted on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from perdure.backends.redis import RedisStore
from perdure.model.records import Lease
from perdure.testing.contract.world import entry, new_run
from tests.servers.redis import RedisServer
from tests.wire import Wire


@pytest.fixture
async def counted(proxy: Wire, table: str) -> AsyncIterator[tuple[RedisStore, Wire]]:
    store = RedisStore(proxy.url, table=table)
    await store.record(await lease(store, "warm"))
    yield store, proxy
    await store.close()


async def lease(store: RedisStore, run_id: str) -> Lease:
    claim = (await store.create(new_run(run_id), ttl=600)).claim
    assert claim is not None
    return claim.lease


async def test_a_claim_with_its_journals_is_one_round_trip(counted: tuple[RedisStore, Wire]) -> None:
    store, seen = counted
    for n in range(5):
        await store.create(new_run(f"run-{n}"), entries=[entry(1)])
    await store.claim(0, 60, [("flow", 1)])  # the server learns the script
    before = seen.round_trips
    claims = (await store.claim(5, 60, [("flow", 1)])).claims
    assert [len(claim.journal) for claim in claims] == [1] * 5
    assert seen.round_trips - before == 1


async def test_sleeping_runs_do_not_make_a_claim_dearer(server: RedisServer, store: RedisStore) -> None:
    await asyncio.gather(*(store.create(new_run(f"asleep-{n}", start_at=2**52)) for n in range(2000)))
    await store.create(new_run("ready"))
    before = await asyncio.to_thread(_commands, server)
    claims = (await store.claim(1, 60, [("flow", 1)])).claims
    assert [claim.run.id for claim in claims] == ["ready"]
    assert await asyncio.to_thread(_commands, server) - before < 100


def _commands(server: RedisServer) -> int:
    """How many commands the server has run, those inside scripts included."""
    lines = server.ask("INFO commandstats").splitlines()
    return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines if line.startswith("cmdstat_"))
