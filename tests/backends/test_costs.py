"""What verbs of a store on a server cost, counted in round trips on the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from perdure import Context, Runtime, workflow
from perdure.errors import LeaseLost
from perdure.model.records import Lease, QueueLimits
from perdure.store import FullStore
from perdure.testing.contract.world import NOW, at, entry, new_run
from tests.backends.opening import store_at
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, REDIS, ServerBackend, on
from tests.wire import Wire

TTL: Final = 600.0
RECORDS: Final = 40
RUNS: Final = 100
STEPS: Final = 10
PASSED_OVER: Final = 100
# After a lease of a second, and after another.
SOON: Final = at(2)
LATER: Final = at(4)


@workflow
async def greet(ctx: Context, n: int) -> int:
    return n


@pytest.fixture
async def store(server_backend: ServerBackend, wire: Wire) -> AsyncIterator[FullStore]:
    """A store behind the proxy that has sent each statement and script before, which may take a round trip of its own."""
    async with store_at(server_backend.through(wire)) as store:
        await one_step_run(store, "warm")
        await store.delete("warm")
        yield store


async def leased(store: FullStore, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


async def one_step_run(store: FullStore, run_id: str) -> None:
    await store.finish(await leased(store, run_id), "completed", b"1", entries=[entry(1)])


@on(MYSQL, MONGO, REDIS, LIBSQL)  # PostgreSQL moves a loop that writes much to connections of its own
async def test_a_record_is_one_round_trip(server_backend: ServerBackend, store: FullStore, wire: Wire) -> None:
    lease = await leased(store)
    await store.record(lease, [entry(1)])  # sends the statement or script for the first time
    before = wire.round_trips
    for seq in range(2, RECORDS + 2):
        await store.record(lease, [entry(seq)])
    assert RECORDS <= wire.round_trips - before <= RECORDS + server_backend.monitoring_round_trips


@pytest.mark.parametrize("sleepers", [0, 3])
async def test_a_claim_by_an_idle_worker_is_one_round_trip(
    server_backend: ServerBackend, store: FullStore, wire: Wire, sleepers: int
) -> None:
    for n in range(sleepers):
        await store.suspend(await leased(store, f"run-{n}"), wake_at=2**60 + n)
    for _ in range(3):  # each statement was sent, and the store knows that nothing is due
        claims = await store.claim(10, TTL, [("flow", 1)])
    before = wire.round_trips
    for _ in range(10):
        claims = await store.claim(10, TTL, [("flow", 1)])
        assert (claims.claims, claims.next_wake_at) == ([], 2**60 if sleepers else None)
    assert 10 <= wire.round_trips - before <= 10 + server_backend.monitoring_round_trips
    await store.create(new_run("due"))
    assert [claim.run.id for claim in (await store.claim(10, TTL, [("flow", 1)])).claims] == ["due"]


@pytest.mark.parametrize("why", ["suspects", "their key is full"])
async def test_a_claim_costs_the_same_however_many_runs_it_passes_over(
    server_backend: ServerBackend, store: FullStore, wire: Wire, why: str
) -> None:
    """Runs that are due before all others, but suspected to kill their workers, or of a limit key that is full."""
    costs: list[int] = []
    await store.limit_queue("mail", QueueLimits(per_key=1))  # PostgreSQL has a way of its own for claims without limits
    await store.create(new_run("leased", queue="mail", limit_key="full"), now=NOW)
    await store.acquire("leased", TTL, now=NOW)
    for name, count in (("few", 1), ("many", PASSED_OVER)):
        runs = [new_run(f"{name}-{n}", queue="mail", limit_key=None if why == "suspects" else "full") for n in range(count)]
        await asyncio.gather(*(store.create(run, now=NOW) for run in runs))
        for instant in (NOW, SOON) if why == "suspects" else ():  # lost twice
            await asyncio.gather(*(store.acquire(run.id, 1.0, now=instant) for run in runs))
        for wanted in (f"{name}-wanted", f"{name}-then"):  # the first claim may send statements that its connection does not know
            await store.create(new_run(wanted, queue="mail"), now=LATER)
            before = wire.round_trips
            claims = await store.claim(1, TTL, [("flow", 1)], now=LATER, suspects=0)
            cost = wire.round_trips - before
            assert [claim.run.id for claim in claims.claims] == [wanted]
        costs.append(cost)
    assert costs[1] <= costs[0] + server_backend.monitoring_round_trips


async def test_a_one_step_run_is_two_round_trips(server_backend: ServerBackend, store: FullStore, wire: Wire) -> None:
    before = wire.round_trips
    for n in range(10):
        await one_step_run(store, f"run-{n}")
    assert 20 <= wire.round_trips - before <= 20 + server_backend.monitoring_round_trips
    row = await store.get("run-9")
    assert row is not None
    assert (row.status, row.outcome, row.lease_until) == ("completed", b"1", None)


async def test_concurrent_runs_share_round_trips(store: FullStore, wire: Wire) -> None:
    leases = await asyncio.gather(*(leased(store, f"run-{n}") for n in range(RUNS)))
    before = wire.round_trips

    async def drive(lease: Lease) -> None:
        for seq in range(1, STEPS + 1):
            await store.record(lease, [entry(seq)])

    await asyncio.gather(*map(drive, leases))
    assert wire.round_trips - before < 0.2 * RUNS * STEPS
    for lease in leases:
        assert await store.journal(lease.run_id) == [entry(seq) for seq in range(1, STEPS + 1)]


async def test_one_stale_run_fails_alone(server_backend: ServerBackend, store: FullStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    await store.delete("run-3")
    await store.acquire("run-5", TTL, now=leases[5].until + 1)
    batches = server_backend.record_batches(store)
    answers = await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases), return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, LeaseLost)] == [3, 5]
    assert not any(isinstance(answer, BaseException) for n, answer in enumerate(answers) if n not in {3, 5})
    assert server_backend.record_batches(store) - batches <= 2
    assert [await store.journal(f"run-{n}") for n in range(10)] == [[] if n in {3, 5} else [entry(1)] for n in range(10)]


async def test_the_same_record_twice_at_once_is_one(store: FullStore) -> None:
    lease = await leased(store)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(store.record(lease, [entry(1)]) for _ in range(10)))
    assert len(answers) == 10
    assert await store.journal("run") == [entry(1)]


async def test_runs_that_are_started_together_share_round_trips(store: FullStore, wire: Wire) -> None:
    runtime, inputs = Runtime(store, [greet], concurrency=0), [(n,) for n in range(3 * RUNS)]
    await runtime.start_many(greet, inputs[:2])  # sends the statement or script for the first time
    before = wire.round_trips
    runs = await runtime.start_many(greet, inputs, ids=lambda n: f"run-{n}")
    assert wire.round_trips - before < 0.1 * len(inputs)
    assert len({run.id for run in runs}) == len(inputs) == len(await store.list(prefix="run-", limit=10 * RUNS))


@workflow
async def nothing(ctx: Context) -> None:
    """Does nothing."""


@pytest.mark.chaos  # it takes two minutes, all of which it waits
async def test_an_idle_worker_asks_rarely(server_backend: ServerBackend, wire: Wire) -> None:
    """Signs of life and checks of listeners are among its round trips. PostgreSQL executes fewer than 0.2 statements a second,
    but its driver prepares each again after a while; MongoDB gets its getMore."""
    most = 2.0 if server_backend.listener is None else {POSTGRES: 0.5, MONGO: 0.8}.get(server_backend, 0.25)
    async with store_at(server_backend.through(wire)) as store, Runtime(store, [nothing]) as runtime:
        await (await runtime.start(nothing))
        await asyncio.sleep(40)  # by now it asks as rarely as it ever does
        before = wire.round_trips
        await asyncio.sleep(80)
        assert wire.round_trips - before <= 80 * most + server_backend.monitoring_round_trips
