"""The fence, with a second transaction held open at the critical moment. SQLite has one writer, so there nothing can be open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure.backends.base.claim_filter import ClaimFilter, ClaimRequest
from perdure.backends.sql import claims, recording, runs
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.backends.sql_client.connections import ClientChannel
from perdure.backends.sql_client.store import SqlClientStore
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease, Pulse
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row
from tests.backends.sql_client.places import Place

BOTH = pytest.mark.parametrize("here", ["postgres", "mysql"], indirect=True)


async def leased(store: SqlClientStore, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


def session(store: SqlClientStore, queries: Any) -> Session:
    return Session(ClientChannel(queries, "test"), store._connections.tables, "")


@BOTH
async def test_a_record_held_open_is_seen_by_whoever_takes_over(here: Place, store: SqlClientStore) -> None:
    lease = await leased(store)
    async with here.client().transaction() as zombie:
        answers = await recording.record_all(session(store, zombie), [Write.record(lease, [entry(1)], [])])
        assert isinstance(answers[0], Pulse)
        assert (await store.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims == []  # passed over while it is locked
        taking = asyncio.create_task(store.acquire("run", TTL, now=EXPIRED))
        await asyncio.wait([taking], timeout=0.1)
        assert not taking.done()
    taken = await taking
    assert taken is not None
    assert taken.journal == [entry(1)]
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(2)], now=EXPIRED)


async def _claims(db: Session) -> object:
    return await claims.claim(db, ClaimRequest(ClaimFilter.of([("flow", 1)], None), 1, 10**7, "taker", EXPIRED))


async def _acquires(db: Session) -> object:
    return await claims.acquire(db, "run", 10**7, "taker", "token", EXPIRED, due_only=True)


async def _restores(db: Session) -> object:
    return await runs.restore(db, run_row(), [], [], EXPIRED)


@BOTH
@pytest.mark.parametrize("take", [_claims, _acquires, _restores])
async def test_a_takeover_that_is_not_committed_yet_keeps_records_waiting(
    here: Place, store: SqlClientStore, take: Callable[[Session], Awaitable[object]]
) -> None:
    lease, other = await leased(store), await leased(store, "other")
    await store.record(other, [entry(1)], now=NOW)
    async with here.client().transaction() as taker:
        await store.delete("other")  # so that a claim has one run to take
        await take(session(store, taker))
        writing = [
            asyncio.ensure_future(store.record(lease, [entry(1)], now=EXPIRED)),
            asyncio.ensure_future(store.finish(lease, "completed", b"1", entries=[entry(2)], now=EXPIRED)),
        ]
        await asyncio.wait(writing, timeout=0.1)
        assert not any(task.done() for task in writing)
    for task in writing:
        with pytest.raises(LeaseLost):
            await task
    assert await store.journal("run") == []


@BOTH
async def test_a_run_that_nobody_has_locked_does_not_wait_for_one_that_somebody_has(here: Place, store: SqlClientStore) -> None:
    lease, other = await leased(store), await leased(store, "other")
    async with here.client().transaction() as taker:
        await _acquires(session(store, taker))
        writing = asyncio.ensure_future(store.record(lease, [entry(1)], now=EXPIRED))
        await asyncio.wait([writing], timeout=0.1)
        async with asyncio.timeout(10):
            await store.record(other, [entry(1)], now=EXPIRED)
        assert not writing.done()
    with pytest.raises(LeaseLost):
        await writing


@BOTH
async def test_an_open_transaction_holds_up_neither_records_nor_renewals_of_others(store: SqlClientStore) -> None:
    lease, other = await leased(store), await leased(store, "other")
    async with asyncio.timeout(20), store.transaction(lease) as transaction:
        await store.record(lease, [entry(1)], now=NOW)
        assert await store.renew([lease, other], TTL, now=NOW + 1) == [Pulse(0, False), Pulse(0, False)]
        assert not (await store.create(new_run(), now=NOW)).is_new
        await transaction.record([entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]
    row = await store.get("other")
    assert row is not None
    assert row.updated_at == NOW + 1


@pytest.mark.parametrize("here", ["postgres"], indirect=True)
async def test_an_open_transaction_holds_up_neither_signals_nor_a_cancel(store: SqlClientStore) -> None:
    lease = await leased(store)
    async with asyncio.timeout(20), store.transaction(lease) as transaction:
        await store.signal("run", "go", b"1", now=NOW)
        await store.cancel("run", now=NOW)
        assert await transaction.record([entry(1)]) == Pulse(1, True)


async def test_a_transaction_in_which_a_statement_failed_is_not_taken_for_committed(store: SqlClientStore) -> None:
    lease = await leased(store)

    async def work() -> None:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
            with pytest.raises(Exception, match="no_such_table"):
                await transaction.execute("SELECT * FROM no_such_table")

    with pytest.raises(PersistenceError, match="an earlier statement failed"):
        await work()
    assert await store.journal("run") == []


@pytest.mark.parametrize("statement", ["COMMIT", " /* now */ rollback", "-- x\nSAVEPOINT a", "SET x = 1", "BEGIN"])
async def test_a_transaction_cannot_be_ended_from_inside(store: SqlClientStore, statement: str) -> None:
    lease = await leased(store)
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="cannot be used inside a transaction"):
            await transaction.execute(statement)
    assert await store.journal("run") == [entry(1)]


@pytest.mark.parametrize("here", ["mysql"], indirect=True)
async def test_on_mysql_what_commits_by_itself_stands_alone(store: SqlClientStore) -> None:
    lease = await leased(store)
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="CREATE would commit what was done before it"):
            await transaction.execute("CREATE TABLE effects (n INTEGER)")
    async with store.transaction(lease) as transaction:
        await transaction.execute("CREATE TABLE effects (n INTEGER)")
        with pytest.raises(PersistenceError, match="CREATE has committed it already"):
            await transaction.record([entry(2)])


async def test_a_batch_writes_what_is_good_and_refuses_what_is_not(store: SqlClientStore) -> None:
    good, stale, contrary = [await leased(store, name) for name in ("good", "stale", "contrary")]
    await store.record(contrary, [entry(1)], now=NOW)
    await store.acquire("stale", TTL, now=EXPIRED)

    async def record(db: Session, _: bool) -> list[Any]:
        asked = [
            Write.record(stale, [entry(1)], []),
            Write.record(contrary, [entry(1, payload=b"other"), entry(2)], []),
            Write.record(good, [entry(1), entry(2)], []),
            Write.record(good, [entry(3)], [7]),
        ]
        return await recording.record_all(db, asked)

    answers = await store._connections.perform("", record)
    assert [type(answer) for answer in answers] == [LeaseLost, PersistenceError, Pulse, PersistenceError]
    assert [await store.journal(name) for name in ("stale", "contrary", "good")] == [[], [entry(1)], [entry(1), entry(2)]]
