"""A reply that is lost with its connection: the script has run, nobody was told, and the store asks again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.backends.redis import RedisStore
from perdure.errors import LeaseHeld
from perdure.model.records import Awaited, Claim, Item, NewRun, Schedule
from perdure.testing.contract.world import entry, new_run
from tests.wire import Wire


class Losing:
    """A store whose next reply is lost, and another that sees what became of it."""

    def __init__(self, store: RedisStore, seen: RedisStore, wire: Wire) -> None:
        self.store = store
        self.seen = seen
        self.wire = wire

    async def start(self, run_id: str = "run", **columns: object) -> Claim:
        claim = (await self.seen.create(new_run(run_id, **columns), ttl=60)).claim
        assert claim is not None
        return claim

    def lose(self) -> RedisStore:
        self.wire.lose = 1
        return self.store


@pytest.fixture
async def losing(proxy: Wire, table: str, store: RedisStore) -> AsyncIterator[Losing]:
    through = RedisStore(proxy.url, table=table)
    # Every script is known to the server beforehand, so that the lost reply is that of the script itself.
    await warm_up(through)
    yield Losing(through, store, proxy)
    await through.close()
    assert proxy.lost == 1


async def warm_up(store: RedisStore) -> None:
    created = await store.create(new_run("warm", parent_id="none", parent_key="none"), ttl=60)
    assert created.claim is not None
    lease = created.claim.lease
    await store.record(lease)
    await store.signal("warm", "go", b"1")
    await store.renew([lease], 60)
    await store.release(lease)
    taken = await store.acquire("warm", 60)
    assert taken is not None
    await store.suspend(taken.lease, wake_at=1)
    (claim,) = (await store.claim(1, 60, ["flow"])).claims
    await store.finish(claim.lease, "failed", b"1")
    await store.reopen("warm", [])
    await store.cancel("warm")
    await store.hold("warm")
    await store.put_schedule(Schedule(id="warm", workflow="flow", spec="", input=b"", next_at=1))
    await store.fire("warm", expected_at=2, next_at=None, run=new_run("warm"))
    await store.drop_schedule("warm")
    await store.delete("warm")


async def test_a_run_is_created_once_and_its_creator_has_the_lease(losing: Losing) -> None:
    created = await losing.lose().create(new_run(), ttl=60)
    assert created.is_new
    assert created.claim is not None
    assert created.claim.run.attempts == 1
    await losing.store.record(created.claim.lease, [entry(1)])


async def test_a_run_without_a_lease_is_created_once(losing: Losing) -> None:
    created = await losing.lose().create(new_run())
    assert (created.is_new, created.claim) == (True, None)


async def test_who_acquired_a_run_has_it(losing: Losing) -> None:
    await losing.seen.create(new_run())
    claim = await losing.lose().acquire("run", 60)
    assert claim is not None
    assert claim.run.attempts == 1
    with pytest.raises(LeaseHeld):
        await losing.seen.acquire("run", 60)


async def test_a_record_is_there_once(losing: Losing) -> None:
    claim = await losing.start()
    items = [Item(stream="log", n=0, payload=b"0")]
    await losing.lose().record(claim.lease, [entry(1)], items=items)
    assert await losing.seen.journal("run") == [entry(1)]
    assert await losing.seen.items("run", "log") == items


async def test_a_signal_is_there_once(losing: Losing) -> None:
    await losing.start()
    assert await losing.lose().signal("run", "go", b"1") == 1
    assert [row.seq for row in await losing.seen.inbox("run")] == [1]


async def test_a_run_that_was_suspended_is(losing: Losing) -> None:
    claim = await losing.start()
    assert await losing.lose().suspend(claim.lease, wake_at=None, waiting_for=[Awaited("signal", "go")]) == []
    row = await losing.seen.get("run")
    assert row is not None
    assert row.status == "suspended"


async def test_a_run_that_was_given_back_is(losing: Losing) -> None:
    claim = await losing.start()
    await losing.lose().release(claim.lease)
    row = await losing.seen.get("run")
    assert row is not None
    assert (row.status, row.attempts) == ("pending", 0)


async def test_a_run_that_ended_has_and_told_its_parent_once(losing: Losing) -> None:
    await losing.start("parent")
    claim = await losing.start(parent_id="parent", parent_key="pay")
    await losing.lose().finish(claim.lease, "completed", b"1")
    assert len(await losing.seen.inbox("parent")) == 1


async def test_a_run_is_reopened_once(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.finish(claim.lease, "failed", b"1")
    await losing.lose().reopen("run", ["a"])
    assert len(await losing.seen.journal("run")) == 1


async def test_a_schedule_is_fired_by_who_fired_it(losing: Losing) -> None:
    await losing.seen.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    run: NewRun = new_run("fired")
    assert await losing.lose().fire("daily", expected_at=1, next_at=2, run=run)
    assert (await losing.seen.schedules())[0].next_at == 2


async def test_claimed_runs_are_not_lost_for_the_length_of_a_lease(losing: Losing) -> None:
    for n in range(3):
        await losing.seen.create(new_run(f"run-{n}"))
    claims = (await losing.lose().claim(2, 60, ["flow"])).claims
    assert [claim.run.id for claim in claims] == ["run-0", "run-1"]
    assert [claim.run.attempts for claim in claims] == [1, 1]


async def test_a_dropped_schedule_was_there(losing: Losing) -> None:
    await losing.seen.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    assert await losing.lose().drop_schedule("daily")
    assert await losing.seen.schedules() == []
