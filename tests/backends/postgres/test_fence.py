import asyncio
from collections.abc import Awaitable, Callable

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.base.claim_filter import ClaimFilter, ClaimRequest
from perdure.backends.postgres import PostgresStore, claiming, recording
from perdure.backends.postgres.channel import DIALECT, PostgresChannel
from perdure.backends.sql import BYTES, Session, Tables, claims, runs
from perdure.backends.sql.recording import Write
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Awaited
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row

TABLES = Tables("perdure", DIALECT, BYTES)


async def test_a_record_held_open_is_seen_by_whoever_takes_over(dsn: str, store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    zombie = await asyncpg.connect(dsn)
    transaction = zombie.transaction()
    await transaction.start()
    await recording.record_all(Session(PostgresChannel(zombie), TABLES, ""), [Write.record(claim.lease, [entry(1)], [])])
    assert (await store.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims == []  # passed over while it is locked
    taking = asyncio.create_task(store.acquire("run", TTL, now=EXPIRED))
    await asyncio.wait([taking], timeout=0.1)
    assert not taking.done()
    await transaction.commit()
    taken = await taking
    assert taken is not None
    assert taken.journal == [entry(1)]
    with pytest.raises(LeaseLost):
        await store.record(claim.lease, [entry(2)], now=EXPIRED)
    await zombie.close()


async def test_a_record_that_waits_for_a_takeover_is_refused(dsn: str, store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    other = (await store.create(new_run("other"), ttl=TTL, now=NOW)).claim
    assert other is not None
    taker = await asyncpg.connect(dsn)
    transaction = taker.transaction()
    await transaction.start()
    await taker.execute("SELECT FROM perdure_runs WHERE id = 'run' FOR UPDATE")
    await taker.execute("UPDATE perdure_runs SET epoch = epoch + 1, lease_token = 'taken' WHERE id = 'run'")
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)], now=EXPIRED))
    await asyncio.wait([writing], timeout=0.1)
    assert not writing.done()
    async with asyncio.timeout(60):  # a run that nobody has locked does not wait for the one that somebody has
        await store.record(other.lease, [entry(1)], now=EXPIRED)
    assert not writing.done()
    await transaction.commit()
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []
    await taker.close()


async def _claims(db: Session) -> object:
    request = ClaimRequest(ClaimFilter.of([("flow", 1)], None), 1, 10**7, "taker", EXPIRED)
    return await claiming._claim(db, request, limits_are_locked=False)


async def _acquires(db: Session) -> object:
    return await claims.acquire(db, "run", 10**7, "taker", "token", EXPIRED, due_only=True)


async def _restores(db: Session) -> object:
    return await runs.restore(db, run_row(), [], [], EXPIRED)


@pytest.mark.parametrize("take", [_claims, _acquires, _restores])
async def test_a_takeover_that_is_not_committed_yet_keeps_records_waiting(
    dsn: str, store: PostgresStore, take: Callable[[Session], Awaitable[object]]
) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    taker = await asyncpg.connect(dsn)
    transaction = taker.transaction()
    await transaction.start()
    await take(Session(PostgresChannel(taker), TABLES, ""))
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)], now=EXPIRED))
    await asyncio.wait([writing], timeout=0.1)
    assert not writing.done()
    await transaction.commit()
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []
    await taker.close()


async def test_an_open_transaction_holds_up_neither_signals_nor_records_nor_renewals(store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with asyncio.timeout(60), store.transaction(claim.lease) as transaction:
        await store.signal("run", "go", b"1", now=NOW)
        await store.record(claim.lease, [entry(1)], now=NOW)
        await store.renew([claim.lease], TTL, now=NOW)
        await store.cancel("run", now=NOW)
        pulse = await transaction.record([entry(2)])
        assert (pulse.inbox_seq, pulse.cancel_requested) == (1, True)
    assert [line.seq for line in await store.journal("run")] == [1, 2]


async def test_a_transaction_in_which_a_statement_failed_is_not_taken_for_committed(store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.record([entry(1)])
            with pytest.raises(asyncpg.UndefinedTableError):
                await transaction.execute("SELECT * FROM no_such_table")

    with pytest.raises(PersistenceError, match="an earlier statement failed"):
        await work()
    assert await store.journal("run") == []


@pytest.mark.parametrize("statement", ["COMMIT", " /* now */ rollback", "-- x\nSET search_path = public", "LISTEN x"])
async def test_a_transaction_cannot_be_ended_from_inside(store: PostgresStore, statement: str) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        with pytest.raises(ValueError, match="cannot be used inside a transaction"):
            await transaction.execute(statement)
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]


async def test_a_cancelled_transaction_leaves_nothing(store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    began = asyncio.Event()

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.record([entry(1)])
            began.set()
            await transaction.execute("SELECT pg_sleep(300)")

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    assert task.cancelled()
    assert await store.journal("run") == []
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]


@pytest.mark.parametrize("key", ["plain", 'a"b', "a\\b", "\n\t\x01\x1f\x7f\u2028/", "\u00e9\U0001f600", '["child","other"]'])
async def test_a_parent_is_woken_by_the_child_it_waits_for(store: PostgresStore, key: str) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL, now=NOW)).claim
    children = [
        (await store.create(new_run(f"child-{n}", parent_id="parent", parent_key=of), ttl=TTL, now=NOW)).claim
        for n, of in enumerate(["other", key])
    ]
    assert parent is not None
    await store.suspend(parent.lease, wake_at=None, waiting_for=[Awaited("child", key), Awaited("signal", "other")], now=NOW)
    woken = []
    for child in children:
        assert child is not None
        await store.finish(child.lease, "completed", b"1", now=NOW)
        run = await store.get("parent")
        woken.append(run is not None and run.wake_at is not None)
    assert woken == [False, True]
