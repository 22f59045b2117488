"""A reply that is lost with its connection: the server has done its work, nobody was told, and the store asks again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.errors import LeaseHeld, LeaseLost, PersistenceError
from perdure.model.records import Awaited, Claim, Item
from perdure.testing.contract.world import EXPIRED, entry, new_run
from tests.wire import Wire


class Losing:
    """A store whose replies can be lost, and another that sees what became of it."""

    def __init__(self, store: LibsqlStore, seen: LibsqlStore, wire: Wire) -> None:
        self.store = store
        self.seen = seen
        self.wire = wire

    async def start(self, run_id: str = "run", **columns: object) -> Claim:
        claim = (await self.seen.create(new_run(run_id, **columns), ttl=60)).claim
        assert claim is not None
        return claim

    def lose(self) -> LibsqlStore:
        self.wire.lose = 1
        return self.store


class LaterWire(Wire):
    """Lets `later` replies through before it loses any."""

    later = 0

    def _is_lost(self) -> bool:
        if self.lose and self.later:
            self.later -= 1
            return False
        return super()._is_lost()


@pytest.fixture
def wire(url: str) -> Iterator[Wire]:
    wire = Wire(url)
    yield wire
    wire.close()


@pytest.fixture
def later_wire(url: str) -> Iterator[LaterWire]:
    wire = LaterWire(url)
    yield wire
    wire.close()


@pytest.fixture
async def losing(wire: Wire, url: str, table: str) -> AsyncIterator[Losing]:
    through, seen = LibsqlStore(wire.url, table=table), LibsqlStore(url, table=table)
    await through.setup()
    yield Losing(through, seen, wire)
    await through.close()
    await seen.close()
    assert wire.lost == 1


async def test_a_record_is_there_once(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.signal("run", "go", b"1")
    items = [Item(stream="log", n=0, payload=b"0")]
    pulse = await losing.lose().record(claim.lease, [entry(1), entry(2)], consume=[1], items=items)
    assert pulse.inbox_seq == 1
    assert await losing.seen.journal("run") == [entry(1), entry(2)]
    assert await losing.seen.items("run", "log") == items
    assert await losing.seen.inbox("run") == []


async def test_a_record_over_somebody_elses_is_refused(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.record(claim.lease, [entry(1, payload=b"other")])
    with pytest.raises(PersistenceError, match="seq 1 already"):
        await losing.lose().record(claim.lease, [entry(1)])
    assert await losing.seen.journal("run") == [entry(1, payload=b"other")]


async def test_a_record_of_a_lease_that_is_gone_is_refused(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.acquire("run", 60, now=EXPIRED * 2)
    with pytest.raises(LeaseLost):
        await losing.lose().record(claim.lease, [entry(1)])
    assert await losing.seen.journal("run") == []


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


async def test_a_run_that_ended_has_and_told_its_parent_once(losing: Losing) -> None:
    await losing.start("parent")
    claim = await losing.start(parent_id="parent", parent_key="pay")
    await losing.lose().finish(claim.lease, "completed", b"1", entries=[entry(1)])
    assert [row.payload for row in await losing.seen.inbox("parent")] == [b"1"]
    row = await losing.seen.get("run")
    assert row is not None
    assert (row.status, row.outcome) == ("completed", b"1")


async def test_what_is_read_is_read(losing: Losing) -> None:
    claim = await losing.start()
    await losing.seen.record(claim.lease, [entry(1)])
    assert await losing.lose().journal("run") == [entry(1)]


async def test_whichever_reply_of_a_transaction_is_lost_it_is_done_once(later_wire: LaterWire, url: str, table: str) -> None:
    """A transaction of several requests that is cut off in the middle keeps the others out until its server ends it, after
    some seconds; then all of it is done again."""
    wire = later_wire
    through, seen = LibsqlStore(wire.url, table=table), LibsqlStore(url, table=table)
    await through.setup()

    async def acquire(run_id: str) -> int:
        await seen.create(new_run(run_id))
        before = wire.round_trips
        claim = await through.acquire(run_id, 60)
        assert claim is not None
        assert claim.run.attempts == 1
        await seen.record(claim.lease, [entry(1)])
        return wire.round_trips - before

    requests = await acquire("unharmed")
    for later in (requests - 3, 1):  # the reply to the commit, after which two are read, and one before it
        wire.later, wire.lose, wire.lost = later, 1, 0
        await acquire(f"lost-{later}")
        assert wire.lost == 1
    await through.close()
    await seen.close()
