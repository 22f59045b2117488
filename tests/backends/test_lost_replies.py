"""A reply that is lost with its connection: the server has done the work, the store does not know, and sends the write again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from perdure.errors import LeaseHeld, LeaseLost, PersistenceError
from perdure.model.records import Claim, Item, Schedule
from perdure.store import FullStore
from perdure.testing.contract.world import EXPIRED, entry, new_input, new_run, run_row, signals
from tests.backends.opening import store_at
from tests.backends.registry import LIBSQL, MONGO, MYSQL, REDIS, ServerBackend, on
from tests.wire import Wire

DAILY = Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1)
LARGE = 1 << 20


class LossyStore:
    """A store whose replies can be lost, and an `observer`, a store on the same place whose replies arrive."""

    def __init__(self, store: FullStore, observer: FullStore, wire: Wire) -> None:
        self.store = store
        self.observer = observer
        self.wire = wire
        self.losses = 0

    async def start(self, run_id: str = "run", **columns: object) -> Claim:
        claim = (await self.observer.create(new_run(run_id, **columns), ttl=60)).claim
        assert claim is not None
        return claim

    def lose(self, *, later: int = 0) -> FullStore:
        """The store, whose next reply is lost, or the one that comes `later`."""
        self.wire.lose, self.wire.later = 1, later
        self.losses += 1
        return self.store


pytestmark = pytest.mark.slow_stores_too


@pytest.fixture
async def lossy(server_backend: ServerBackend, driver_options: str, shared_dsn: str, wire: Wire) -> AsyncIterator[LossyStore]:
    async with store_at(server_backend.through(wire, driver_options)) as store, store_at(shared_dsn) as observer:
        await warm_up(store)
        lossy = LossyStore(store, observer, wire)
        yield lossy
        assert wire.lost == lossy.losses


async def warm_up(store: FullStore) -> None:
    """Have every statement prepared and every script loaded, so that the lost reply is that of the work itself."""
    created = await store.create(new_run("warm", parent_id="none", parent_key="none"), ttl=60)
    assert created.claim is not None
    lease = created.claim.lease
    await store.record(lease)
    await store.signal("warm", "go", b"1")
    await store.renew([lease], 60)
    await store.release(lease)
    taken = await store.acquire("warm", 60)
    assert taken is not None
    await store.continue_as(taken.lease, new_input())
    taken = await store.acquire("warm", 60)
    assert taken is not None
    await store.suspend(taken.lease, wake_at=1)
    (claim,) = (await store.claim(1, 60, [("flow", 1)])).claims
    await store.finish(claim.lease, "failed", b"1")
    await store.reopen("warm", [])
    await store.cancel("warm")
    await store.hold("warm")
    await store.put_schedule(Schedule(id="warm", workflow="flow", spec="", input=b"", next_at=1))
    await store.fire("warm", expected_at=2, next_at=None, run=new_run("warm"))
    await store.drop_schedule("warm")
    await store.delete("warm")


async def test_a_run_is_created_once_and_its_creator_has_the_lease(lossy: LossyStore) -> None:
    created = await lossy.lose().create(new_run(), ttl=60)
    assert created.is_new
    assert created.claim is not None
    assert created.claim.run.attempts == 1
    await lossy.store.record(created.claim.lease, [entry(1)])


@on(MONGO, REDIS)
@pytest.mark.parametrize("driver_options", [""])
async def test_a_run_without_a_lease_is_created_once(lossy: LossyStore) -> None:
    created = await lossy.lose().create(new_run())
    assert (created.is_new, created.claim) == (True, None)


async def test_an_acquired_run_belongs_to_the_store_that_acquired_it(lossy: LossyStore) -> None:
    await lossy.observer.create(new_run())
    claim = await lossy.lose().acquire("run", 60)
    assert claim is not None
    assert claim.run.attempts == 1
    with pytest.raises(LeaseHeld):
        await lossy.observer.acquire("run", 60)


async def test_a_record_is_written_once(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.observer.signal("run", "go", b"1")
    items = [Item(stream="log", n=0, payload=b"0")]
    pulse = await lossy.lose().record(claim.lease, [entry(1), entry(2)], consume=[1], items=items)
    assert pulse.inbox_seq == 1
    assert await lossy.observer.journal("run") == [entry(1), entry(2)]
    assert await lossy.observer.items("run", "log") == items
    assert await lossy.observer.inbox("run") == []


async def test_a_large_record_is_written_once(lossy: LossyStore) -> None:
    claim = await lossy.start()
    large = [entry(seq, payload=b"x" * LARGE) for seq in (1, 2)]
    await lossy.lose().record(claim.lease, large)
    assert await lossy.observer.journal("run") == large


async def test_a_record_over_another_one_is_refused(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.observer.record(claim.lease, [entry(1, payload=b"other")])
    with pytest.raises(PersistenceError, match="seq 1 already"):
        await lossy.lose().record(claim.lease, [entry(1)])
    assert await lossy.observer.journal("run") == [entry(1, payload=b"other")]


async def test_a_record_under_a_lost_lease_is_refused(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.observer.acquire("run", 60, now=EXPIRED * 2)
    with pytest.raises(LeaseLost):
        await lossy.lose().record(claim.lease, [entry(1)])
    assert await lossy.observer.journal("run") == []


@pytest.mark.parametrize("size", [1, LARGE])
async def test_a_signal_is_sent_once(lossy: LossyStore, size: int) -> None:
    await lossy.start()
    payloads = [b"1" * size, b"2" * size]
    for seq, payload in enumerate(payloads, 1):
        assert await lossy.lose().signal("run", "go", payload) == seq
    assert [(row.seq, row.payload) for row in await lossy.observer.inbox("run")] == list(enumerate(payloads, 1))


async def test_a_suspended_run_is_suspended(lossy: LossyStore) -> None:
    claim = await lossy.start()
    assert await lossy.lose().suspend(claim.lease, wake_at=None, waiting_for=signals("go")) == []
    row = await lossy.observer.get("run")
    assert row is not None
    assert row.status == "suspended"


async def test_a_released_run_is_pending(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.lose().release(claim.lease)
    row = await lossy.observer.get("run")
    assert row is not None
    assert (row.status, row.attempts) == ("pending", 0)


async def test_whichever_reply_is_lost_a_finished_run_notifies_its_parent_once(
    lossy: LossyStore, server_backend: ServerBackend
) -> None:
    async def finish(run_id: str, store: FullStore) -> None:
        claim = await lossy.start(run_id, parent_id="parent", parent_key=run_id)
        await store.finish(claim.lease, "completed", run_id.encode(), entries=[entry(1)])
        row = await lossy.observer.get(run_id)
        assert row is not None
        assert (row.status, row.outcome, row.parent_notified) == ("completed", run_id.encode(), True)
        assert await lossy.observer.journal(run_id) == [entry(1)]
        assert [row.payload for row in await lossy.observer.inbox("parent")].count(run_id.encode()) == 1

    await lossy.start("parent")
    before = lossy.wire.round_trips
    await finish("unharmed", lossy.store)
    replies = lossy.wire.round_trips - before - server_backend.monitoring_round_trips
    for later in count():
        await finish(f"lost-{later}", lossy.lose(later=later))
        if lossy.wire.lose:  # there were no more replies
            break
    assert lossy.wire.lost >= max(1, replies)
    lossy.losses, lossy.wire.lose = lossy.wire.lost, 0


async def test_a_finished_run_is_not_finished_again(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.lose().finish(claim.lease, "completed", b"1")
    with pytest.raises(LeaseLost):
        await lossy.store.finish(claim.lease, "completed", b"1")


async def test_a_run_is_reopened_once(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.observer.finish(claim.lease, "failed", b"1")
    await lossy.lose().reopen("run", ["a"])
    assert len(await lossy.observer.journal("run")) == 1


async def test_whichever_reply_is_lost_a_run_starts_over_once(lossy: LossyStore) -> None:
    for later in count():
        run_id = f"run-{later}"
        claim = await lossy.start(run_id)
        await lossy.observer.record(claim.lease, [entry(1)])
        await lossy.lose(later=later).continue_as(claim.lease, new_input())
        row = await lossy.observer.get(run_id)
        assert row is not None
        assert (row.status, row.generation, row.input) == ("pending", 1, new_input().input)
        assert await lossy.observer.journal(run_id) == []
        if lossy.wire.lose:  # there were no more replies
            break
    lossy.losses, lossy.wire.lose = lossy.wire.lost, 0


async def test_a_run_is_restored_once(lossy: LossyStore) -> None:
    await lossy.observer.create(new_run())
    await lossy.lose().restore(run_row(), [entry(1)])
    assert await lossy.observer.journal("run") == [entry(1)]


async def test_a_schedule_is_fired_once_and_its_caller_knows(lossy: LossyStore) -> None:
    await lossy.observer.put_schedule(DAILY)
    assert await lossy.lose().fire("daily", expected_at=1, next_at=2, run=new_run("fired"))
    assert (await lossy.observer.schedules())[0].next_at == 2
    assert await lossy.observer.get("fired") is not None


async def test_a_dropped_schedule_was_there(lossy: LossyStore) -> None:
    await lossy.observer.put_schedule(DAILY)
    assert await lossy.lose().drop_schedule("daily")
    assert await lossy.observer.schedules() == []


@on(MYSQL, MONGO, REDIS, LIBSQL)
@pytest.mark.parametrize("driver_options", [""])  # on MongoDB the driver repeats this, not the store
async def test_claimed_runs_are_not_lost_for_the_length_of_a_lease(lossy: LossyStore) -> None:
    for n in range(3):
        await lossy.observer.create(new_run(f"run-{n}"))
    claims = (await lossy.lose().claim(2, 60, [("flow", 1)])).claims
    assert [claim.run.id for claim in claims] == ["run-0", "run-1"]
    assert [claim.run.attempts for claim in claims] == [1, 1]


async def test_a_read_is_repeated(lossy: LossyStore) -> None:
    claim = await lossy.start()
    await lossy.observer.record(claim.lease, [entry(1)])
    assert await lossy.lose().journal("run") == [entry(1)]
