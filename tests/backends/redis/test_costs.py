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

RUNS = 100
STEPS = 20


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


async def test_a_record_is_one_round_trip(counted: tuple[RedisStore, Wire]) -> None:
    store, seen = counted
    mine = await lease(store, "run")
    before = seen.round_trips
    for seq in range(1, 51):
        await store.record(mine, [entry(seq)])
    assert seen.round_trips - before == 50


async def test_records_of_many_runs_share_round_trips(counted: tuple[RedisStore, Wire]) -> None:
    store, seen = counted
    leases = await asyncio.gather(*(lease(store, f"run-{n}") for n in range(RUNS)))

    async def drive(mine: Lease) -> None:
        for seq in range(1, STEPS + 1):
            await store.record(mine, [entry(seq)])

    before = seen.round_trips
    await asyncio.gather(*map(drive, leases))
    assert (seen.round_trips - before) / (RUNS * STEPS) <= 0.2
    assert [len(await store.journal(f"run-{n}")) for n in range(RUNS)] == [STEPS] * RUNS


async def test_a_one_step_run_is_two_round_trips(counted: tuple[RedisStore, Wire]) -> None:
    store, seen = counted
    await store.finish(await lease(store, "first"), "completed", b"1", entries=[entry(1)])  # the server learns the script
    before = seen.round_trips
    await store.finish(await lease(store, "second"), "completed", b"1", entries=[entry(1)])
    assert seen.round_trips - before == 2


async def test_a_claim_with_its_journals_is_one_round_trip(counted: tuple[RedisStore, Wire]) -> None:
    store, seen = counted
    for n in range(5):
        await store.create(new_run(f"run-{n}"), entries=[entry(1)])
    await store.claim(0, 60, ["flow"])  # the server learns the script
    before = seen.round_trips
    claims = (await store.claim(5, 60, ["flow"])).claims
    assert [len(claim.journal) for claim in claims] == [1] * 5
    assert seen.round_trips - before == 1


async def test_sleeping_runs_do_not_make_a_claim_dearer(server: RedisServer, store: RedisStore) -> None:
    await asyncio.gather(*(store.create(new_run(f"asleep-{n}", start_at=2**52)) for n in range(2000)))
    await store.create(new_run("ready"))
    before = await asyncio.to_thread(_commands, server)
    claims = (await store.claim(1, 60, ["flow"])).claims
    assert [claim.run.id for claim in claims] == ["ready"]
    assert await asyncio.to_thread(_commands, server) - before < 100


def _commands(server: RedisServer) -> int:
    """How many commands the server has run, those inside scripts included."""
    lines = server.ask("INFO commandstats").splitlines()
    return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines if line.startswith("cmdstat_"))
