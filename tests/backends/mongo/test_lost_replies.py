"""A reply that is lost with its connection: the update was made, nobody was told, and the store asks again.

The driver repeats a write once by itself; that is switched off here, so that the store has to. `claim` keeps it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.backends.mongo import MongoStore
from perdure.errors import LeaseHeld
from perdure.model.records import Awaited, Claim, Item, Schedule
from perdure.testing.contract.world import entry, new_run, run_row
from tests.wire import Wire

DAILY = Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1)


class Losing:
    """A store whose next reply is lost, and another that sees what became of it."""

    def __init__(self, store: MongoStore, seen: MongoStore, wire: Wire) -> None:
        self.store = store
        self.seen = seen
        self.wire = wire

    async def start(self, run_id: str = "run", **columns: object) -> Claim:
        claim = (await self.seen.create(new_run(run_id, **columns), ttl=60)).claim
        assert claim is not None
        return claim

    def lose(self) -> MongoStore:
        self.wire.lose = 1
        return self.store


@pytest.fixture(params=["retryWrites=false", "retryWrites=true"])
def retrying(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def losing(wire: Wire, store: MongoStore, retrying: str) -> AsyncIterator[Losing]:
    through = MongoStore(f"{wire.url}&{retrying}")
    await through.setup()
    yield Losing(through, store, wire)
    await through.close()
    assert wire.lost == 1


async def test_a_run_is_created_once_and_its_creator_has_the_lease(losing: Losing) -> None:
    created = await losing.lose().create(new_run(), ttl=60)
    assert created.is_new
    assert created.claim is not None
    assert created.claim.run.attempts == 1
    await losing.store.record(created.claim.lease, [entry(1)])


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


async def test_a_large_record_is_there_once(losing: Losing) -> None:
    claim = await losing.start()
    large = [entry(seq, payload=b"x" * (1 << 20)) for seq in (1, 2)]
    await losing.lose().record(claim.lease, large)
    assert await losing.seen.journal("run") == large


async def test_a_signal_is_there_once(losing: Losing) -> None:
    await losing.start()
    assert await losing.lose().signal("run", "go", b"1") == 1
    assert [row.seq for row in await losing.seen.inbox("run")] == [1]


async def test_a_large_signal_is_there_once(losing: Losing) -> None:
    await losing.start()
    assert await losing.lose().signal("run", "go", b"1" * (1 << 20)) == 1
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


@pytest.mark.parametrize("place", range(1, 6))
async def test_a_run_that_ended_has_and_told_its_parent_once(losing: Losing, place: int) -> None:
    await losing.start("parent")
    claim = await losing.start(parent_id="parent", parent_key="pay")
    replies = iter(range(1, 100))
    really = losing.wire._is_lost

    def is_lost() -> bool:
        return next(replies) == place and really()

    losing.wire._is_lost = is_lost  # type: ignore[method-assign]
    await losing.lose().finish(claim.lease, "completed", b"1")
    losing.wire._is_lost = really  # type: ignore[method-assign]
    row = await losing.seen.get("run")
    assert row is not None
    assert (row.status, row.parent_notified, len(await losing.seen.inbox("parent"))) == ("completed", True, 1)


async def test_a_run_is_reopened_once(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.finish(claim.lease, "failed", b"1")
    await losing.lose().reopen("run", ["a"])
    assert len(await losing.seen.journal("run")) == 1


async def test_a_run_is_restored_once(losing: Losing) -> None:
    await losing.seen.create(new_run())
    await losing.lose().restore(run_row(), [entry(1)])
    assert await losing.seen.journal("run") == [entry(1)]


async def test_a_schedule_is_fired_by_who_fired_it(losing: Losing) -> None:
    await losing.seen.put_schedule(DAILY)
    assert await losing.lose().fire("daily", expected_at=1, next_at=2, run=new_run("fired"))
    assert (await losing.seen.schedules())[0].next_at == 2
    assert await losing.seen.get("fired") is not None


async def test_a_dropped_schedule_was_there(losing: Losing) -> None:
    await losing.seen.put_schedule(DAILY)
    assert await losing.lose().drop_schedule("daily")
    assert await losing.seen.schedules() == []


@pytest.mark.parametrize("retrying", ["retryWrites=true"])
async def test_claimed_runs_are_not_lost_for_the_length_of_a_lease(losing: Losing) -> None:
    for n in range(3):
        await losing.seen.create(new_run(f"run-{n}"))
    claims = (await losing.lose().claim(2, 60, ["flow"])).claims
    assert [claim.run.id for claim in claims] == ["run-0", "run-1"]
    assert [claim.run.attempts for claim in claims] == [1, 1]
