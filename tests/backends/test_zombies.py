"""A holder that is stopped past its lease and goes on later changes nothing any more."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, Final

import pytest

from perdure import Context, Ok, Runtime, Workflow
from perdure.errors import LeaseHeld
from perdure.model.journal import Entry
from perdure.model.records import Claim, Lease
from perdure.store import FullStore
from perdure.testing.contract.world import entry
from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import Backend

TTL: Final = 0.25
# How long a takeover may take once the lease has run out, before the stopped process is let go on: it may have been stopped
# inside a lock of the store's own, which SQLite holds while it writes, and then nobody gets past it.
PATIENCE: Final = 0.5
TOGETHER: Final = [f"run-{n}" for n in range(4)]


async def take_over(store: FullStore, run_id: str) -> Claim:
    """The run, as soon as its lease has expired."""
    while True:
        try:
            claim = await store.acquire(run_id, 600)
        except LeaseHeld:
            await asyncio.sleep(0.01)  # a lease's end is no event
        else:
            assert claim is not None
            return claim


async def everything(store: FullStore) -> tuple[Any, ...]:
    return await store.get("run"), await store.journal("run"), await store.inbox("run"), await store.items("run", "log")


@pytest.mark.slow_stores_too
@pytest.mark.parametrize("ends", [False, True], ids=["the run goes on", "the run ended"])
def test_every_write_of_a_stopped_holder_is_refused_and_nothing_changes(
    backend: Backend, dsn: str, start: Start, ends: bool
) -> None:
    async def succeed() -> tuple[Any, ...]:
        async with store_at(dsn) as store:
            await store.signal("run", "go", b"1")
            claim = await take_over(store, "run")
            await store.record(claim.lease, [entry(1, "ours")])
            if ends:
                await store.finish(claim.lease, "completed", b'"ours"')
            return await everything(store)

    async def look() -> tuple[Any, ...]:
        async with store_at(dsn) as store:
            return await everything(store)

    zombie = start(jobs.stopped_holder, dsn, TTL)
    assert zombie.receive() == "stopping"
    zombie.wait_until_stopped()
    before = asyncio.run(succeed())
    zombie.resume()
    results = zombie.receive()
    zombie.wait_for_exit()
    assert results.pop("renew") == "[None]"
    assert results == dict.fromkeys(results, "LeaseLost")
    assert len(results) >= 7
    assert asyncio.run(look()) == before


@pytest.mark.same_everywhere
def test_a_worker_stopped_in_a_step_stops_for_good_when_its_lease_is_gone(backend: Backend, dsn: str, start: Start) -> None:
    async def first() -> str:
        return "from the new worker"

    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(jobs.second, await ctx.step(first))

    async def drive() -> tuple[Any, ...]:
        async with store_at(dsn) as store:
            runtime = Runtime(store, concurrency=0, on_definition_change="ignore")
            assert await runtime.run(Workflow("two steps", flow), id="run") == Ok("from the new worker, again")
            await runtime.close()
            return await everything(store)

    async def look() -> tuple[Any, ...]:
        async with store_at(dsn) as store:
            return await everything(store)

    stopped = start(jobs.stopped_worker, dsn, backend.lease_ttl)
    assert stopped.receive() == "stopping"
    stopped.wait_until_stopped()
    before = asyncio.run(drive())
    stopped.resume()
    assert stopped.receive() == "LeaseLost"
    stopped.wait_for_exit()
    assert asyncio.run(look()) == before


def test_a_write_under_way_when_its_holder_is_stopped_is_there_at_the_takeover_or_never(
    backend: Backend, dsn: str, start: Start
) -> None:
    rng = random.Random(backend.name)
    holder = start(jobs.busy_holder, dsn, TTL)
    for n in range(backend.times(60)):
        one_takeover(dsn, holder, [f"{n}/{run_id}" for run_id in TOGETHER], rng)
    holder.send([])
    holder.wait_for_exit()


def one_takeover(dsn: str, holder: Child, run_ids: list[str], rng: random.Random) -> None:
    holder.send(run_ids)
    assert holder.receive() == "busy"
    time.sleep(rng.random() * 0.06)
    holder.stop()
    expected = asyncio.run(taken_over(dsn, holder, run_ids))
    for told, (loaded, ours) in zip(holder.receive(), expected, strict=True):
        assert told.ended_by == "LeaseLost"
        assert set(told.acknowledged) <= {line.seq for line in loaded}, "an acknowledged write was not there at the takeover"
        assert {line.payload for line in loaded} <= {loaded[0].payload if loaded else b""}
        assert ours, "nothing was written after the takeover"
    found = asyncio.run(journals(dsn, run_ids))
    assert found == [[*loaded, *ours] for loaded, ours in expected], "a write appeared after the takeover"


async def taken_over(dsn: str, holder: Child, run_ids: list[str]) -> list[tuple[list[Entry], list[Entry]]]:
    """What each run's new holder loaded, and what it wrote, before and after the old one went on."""
    async with store_at(dsn) as store:
        taking = asyncio.gather(*(take_over(store, run_id) for run_id in run_ids))
        await asyncio.wait([taking], timeout=TTL + PATIENCE)
        was_in_the_way = not taking.done()
        if was_in_the_way:
            holder.resume()
        claims = await taking
        # Far above, so that the numbers which the old holder would use next are free for it.
        first = [await written(store, claim.lease, 1_000_001) for claim in claims]
        holder.resume()
        second = [await written(store, claim.lease, 1_000_011) for claim in claims]
        return [(claim.journal, [*one, *two]) for claim, one, two in zip(claims, first, second, strict=True)]


async def written(store: FullStore, lease: Lease, seq: int) -> list[Entry]:
    entries = [entry(seq + n, payload=b"ours") for n in range(3)]
    for line in entries:
        await store.record(lease, [line])
    return entries


async def journals(dsn: str, run_ids: list[str]) -> list[list[Entry]]:
    async with store_at(dsn) as store:
        return [await store.journal(run_id) for run_id in run_ids]
