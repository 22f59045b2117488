import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncmy
import pytest

from perdure.backends.base.claim_filter import ClaimFilter, ClaimRequest
from perdure.backends.mysql import MysqlStore
from perdure.backends.sql import claims, closing, recording, runs
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row
from tests.backends.mysql.conftest import connect


class Open:
    """A transaction of a store that is held open until the test lets go of it."""

    def __init__(self, store: MysqlStore) -> None:
        self._store = store
        self._go = asyncio.Event()
        self._begun = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def hold(self, work: Callable[[Session], Awaitable[object]]) -> None:
        await self._store.setup()
        self._task = asyncio.create_task(self._hold(work))
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait([begun, self._task], return_when=asyncio.FIRST_COMPLETED)
        assert begun.done()

    async def _hold(self, work: Callable[[Session], Awaitable[object]]) -> None:
        connections, ours = self._store._connections, asyncio.get_running_loop()
        released: asyncio.Event = self._go

        async def there() -> None:
            go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            loop = asyncio.get_running_loop()

            async def wait() -> None:
                await released.wait()
                loop.call_soon_threadsafe(go.set_result, None)

            async with connections.transaction() as wire:
                await work(Session(wire, connections.tables, ""))
                ours.call_soon_threadsafe(self._begun.set)
                asyncio.run_coroutine_threadsafe(wait(), ours)
                await go

        await connections.run(there())

    async def commit(self) -> None:
        self._go.set()
        assert self._task is not None
        await self._task


@pytest.fixture
async def other(dsn: str) -> Open:
    return Open(MysqlStore(dsn))


async def _is_held_up(task: asyncio.Task[object]) -> bool:
    await asyncio.wait([task], timeout=0.2)
    return not task.done()


async def test_a_record_held_open_is_seen_by_whoever_takes_over(store: MysqlStore, other: Open) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await other.hold(lambda db: recording.record_all(db, [Write.record(claim.lease, [entry(1)], [])]))
    assert (await store.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims == []  # passed over while it is locked
    taking = asyncio.create_task(store.acquire("run", TTL, now=EXPIRED))
    assert await _is_held_up(taking)
    await other.commit()
    taken = await taking
    assert taken is not None
    assert taken.journal == [entry(1)]
    with pytest.raises(LeaseLost):
        await store.record(claim.lease, [entry(2)], now=EXPIRED)


async def test_a_record_that_waits_for_a_takeover_is_refused(dsn: str, store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    others = (await store.create(new_run("other"), ttl=TTL, now=NOW)).claim
    assert claim is not None
    assert others is not None
    taker = await connect(dsn)
    await taker.begin()
    await taker.query("UPDATE perdure_runs SET epoch = epoch + 1, lease_token = 'taken' WHERE namespace = '' AND id = 'run'")
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)], now=EXPIRED))
    await asyncio.wait([writing], timeout=0.2)
    assert not writing.done()
    async with asyncio.timeout(5):  # a run that nobody has locked does not wait for the one that somebody has
        await store.record(others.lease, [entry(1)], now=EXPIRED)
        await store.signal("other", "go", b"1")
        await store.renew([others.lease], TTL)
    assert not writing.done()
    await taker.commit()
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []
    taker.close()


async def test_runs_that_nobody_has_locked_do_not_wait_for_one_that_somebody_has(dsn: str, store: MysqlStore) -> None:
    """By the long way too, and in a table so small that the server could as well read all of it."""
    leases = [claim.lease for n in "abc" if (claim := (await store.create(new_run(n), ttl=TTL)).claim) is not None]
    taker = await connect(dsn)
    await taker.begin()
    await taker.query("UPDATE perdure_runs SET held = 1 WHERE namespace = '' AND id = 'b'")

    async def look() -> None:
        records = [Write.record(lease, [entry(1)], []) for lease in leases[::2]]
        ends = [write._replace(status="failed") for write in records]
        await store._connections.perform("", lambda db, _: recording.record_all(db, records))
        await store._connections.perform("", lambda db, _: closing.close_all(db, ends))

    async with asyncio.timeout(5):
        await store._connections.run(look())
    await taker.rollback()
    taker.close()


async def _claims(db: Session) -> object:
    return await claims.claim(db, ClaimRequest(ClaimFilter.of([("flow", 1)], None), 1, 10**7, "taker", EXPIRED))


async def _acquires(db: Session) -> object:
    return await claims.acquire(db, "run", 10**7, "taker", "token", EXPIRED, due_only=True)


async def _restores(db: Session) -> object:
    return await runs.restore(db, run_row(), [], [], EXPIRED)


async def _records(store: MysqlStore, lease: Lease) -> object:
    return await store.record(lease, [entry(1)], now=EXPIRED)


async def _ends(store: MysqlStore, lease: Lease) -> object:
    await store.finish(lease, "completed", b"1", entries=[entry(1)], now=EXPIRED)
    return None


async def _sleeps(store: MysqlStore, lease: Lease) -> object:
    return await store.suspend(lease, wake_at=None, entries=[entry(1)], now=EXPIRED)


@pytest.mark.parametrize("write", [_records, _ends, _sleeps])
@pytest.mark.parametrize("take", [_claims, _acquires, _restores])
async def test_a_takeover_that_is_not_committed_yet_keeps_writes_waiting(
    store: MysqlStore,
    other: Open,
    take: Callable[[Session], Awaitable[object]],
    write: Callable[[MysqlStore, Lease], Coroutine[Any, Any, object]],
) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await other.hold(take)
    writing = asyncio.create_task(write(store, claim.lease))
    assert await _is_held_up(writing)
    await other.commit()
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []
    row = await store.get("run")
    assert row is not None
    assert row.status in {"running", "pending"}  # as who took over left it


async def test_an_open_transaction_holds_up_neither_records_nor_renewals(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    others = (await store.create(new_run("other"), ttl=TTL, now=NOW)).claim
    assert claim is not None
    assert others is not None
    async with asyncio.timeout(5), store.transaction(claim.lease) as transaction:
        await store.record(claim.lease, [entry(1)], now=NOW)
        pulses = await store.renew([claim.lease, others.lease], TTL, now=NOW + 1)
        assert None not in pulses
        await transaction.record([entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]
    row = await store.get("other")
    assert row is not None
    assert row.updated_at == NOW + 1


async def test_a_signal_waits_for_an_open_transaction_and_is_not_lost(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        signalling = asyncio.create_task(store.signal("run", "go", b"1"))
        await asyncio.wait([signalling], timeout=0.1)
        await transaction.record([entry(1)])
    assert await signalling == 1
    assert [row.seq for row in await store.inbox("run")] == [1]


async def test_open_transactions_do_not_use_up_the_connections_of_the_verbs(dsn: str) -> None:
    store = MysqlStore(dsn, pool_size=2)
    leases = [claim.lease for n in range(2) if (claim := (await store.create(new_run(f"run-{n}"), ttl=TTL)).claim) is not None]
    async with asyncio.timeout(10), store.transaction(leases[0]), store.transaction(leases[1]):
        await asyncio.gather(*(store.get(f"run-{n}") for n in range(10)))
    await store.close()


async def test_a_transaction_in_which_a_statement_failed_is_not_taken_for_committed(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.record([entry(1)])
            with pytest.raises(asyncmy.errors.ProgrammingError):
                await transaction.execute("SELECT * FROM no_such_table")

    with pytest.raises(PersistenceError, match="an earlier statement failed"):
        await work()
    assert await store.journal("run") == []


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        " /* now */ rollback",
        "-- x\nSET autocommit = 1",
        "# x\nLOCK TABLES perdure_runs READ",
        "/*! COMMIT */",
        "/*M! COMMIT */",
        "CALL anything()",
    ],
)
async def test_a_transaction_cannot_be_ended_from_inside(store: MysqlStore, statement: str) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        with pytest.raises(ValueError, match="cannot be used inside a transaction"):
            await transaction.execute(statement)
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]


async def _two_statements(context: AbstractAsyncContextManager[object]) -> None:
    async with context as transaction:
        await transaction.execute("SELECT 1; SELECT 2")  # type: ignore[attr-defined]  # it is a transaction


async def test_two_statements_at_once_are_refused_and_undone(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    with pytest.raises(ValueError, match="one statement"):
        await _two_statements(store.transaction(claim.lease))
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]


async def test_values_of_a_callers_statement_are_text_and_numbers(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("CREATE TABLE effects (name VARCHAR(50) CHARACTER SET latin1, amount DOUBLE)")
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("INSERT INTO effects VALUES (%s, %s)", ("Zoë's 100%", 1.5))
        assert await transaction.execute("SELECT name, amount FROM effects WHERE name LIKE 'zoë%'") == [("Zoë's 100%", 1.5)]


async def test_what_the_server_says_of_a_callers_statement_is_raised_as_it_is(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("CREATE TABLE effects (n INT PRIMARY KEY)")

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.execute("INSERT INTO effects VALUES (1)")
            await transaction.record([entry(1)])
            await transaction.execute("INSERT INTO effects VALUES (1)")

    with pytest.raises(asyncmy.errors.IntegrityError):
        await work()
    assert await store.journal("run") == []


async def test_a_table_is_not_created_after_something_was_written(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="CREATE would commit"):
            await transaction.execute("CREATE TABLE effects (n INT)")


async def test_a_cancelled_transaction_leaves_nothing(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    began = asyncio.Event()

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.record([entry(1)])
            began.set()
            await transaction.execute("SELECT SLEEP(30)")

    task = asyncio.create_task(work())
    await began.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()
    assert await store.journal("run") == []
    async with asyncio.timeout(5), store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]
