import asyncio

from perdure.backends.mongo import MongoStore
from perdure.errors import PersistenceError
from perdure.model.records import Lease
from perdure.testing.contract.world import entry, new_run
from tests.wire import Wire

TTL = 60.0


async def leased(store: MongoStore, run_id: str) -> Lease:
    created = await store.create(new_run(run_id), ttl=TTL)
    assert created.claim is not None
    return created.claim.lease


async def test_a_long_run_pays_little_for_moving_its_journal(wire: Wire) -> None:
    store = MongoStore(wire.url)
    lease = await leased(store, "run")
    before = wire.round_trips
    for seq in range(1, 141):  # it is moved twice
        await store.record(lease, [entry(seq)])
    assert wire.round_trips - before <= 140 * 1.1
    assert [line.seq for line in await store.journal("run")] == list(range(1, 141))
    await store.close()


async def test_parallel_steps_of_one_run_share_round_trips(wire: Wire) -> None:
    store = MongoStore(wire.url)
    costs: list[int] = []
    for run_id in ("first", "second", "third"):
        lease = await leased(store, run_id)
        before = wire.round_trips
        await asyncio.gather(*(store.record(lease, [entry(seq)]) for seq in range(1, 201)))
        costs.append(wire.round_trips - before)
        assert len(await store.journal(run_id)) == 200
    # How many fewer depends on how slow the server is: after a while another write starts beside one that takes long, and when
    # the two get into each other's way their records are sent one by one.
    assert min(costs) < 200
    await store.close()


async def test_what_mongodb_cannot_hold_fails_alone(store: MongoStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    calls = [store.record(lease, [entry(1, attempt=2**70 if n == 3 else 1)]) for n, lease in enumerate(leases)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, PersistenceError)] == [3]
    assert not any(isinstance(answer, Exception) for n, answer in enumerate(answers) if n != 3)
