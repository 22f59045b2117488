"""`ctx.transaction`: what a step's function writes in the store's own database and the record of the step are one."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, StepTransaction, current_step, stores, workflow
from perdure.errors import (
    PersistenceError,
    StepTimeout,
    StoreCapabilityError,
    TransactionFailed,
)
from perdure.model.journal import Entry
from perdure.model.records import Lease
from perdure.store import FullStore
from perdure.testing import ManualClock
from tests.backends.bank import execute
from tests.backends.opening import store_at
from tests.backends.registry import BACKENDS, LIBSQL, MYSQL, POSTGRES, SQLITE, Backend, on
from tests.patience import turns

SQL_CLIENTS: Final = tuple(BACKENDS[f"sql_client-{dialect}"] for dialect in ("sqlite", "postgres", "mysql"))
ALL: Final = (SQLITE, POSTGRES, MYSQL, LIBSQL, *SQL_CLIENTS)
INSERT: Final = "INSERT INTO effects (n) VALUES ({})"
PATIENCE: Final = 60.0


@pytest.fixture
async def store(backend: Backend, dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(dsn) as store:
        for table in ("effects", "names"):  # which another test has left, where they share a database
            await execute(store, f"DROP TABLE IF EXISTS {table}")
        await execute(store, "CREATE TABLE effects (n INTEGER)")
        yield store


async def effects(store: FullStore) -> list[int]:
    return [int(n) for (n,) in await execute(store, "SELECT n FROM effects ORDER BY n")]


async def steps_of(store: FullStore, run_id: str) -> list[Entry]:
    entries = await store.journal(run_id)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    return entries


async def insert(transaction: StepTransaction, number: int) -> str:
    await transaction.execute(INSERT.format(number))
    return current_step().idempotency_key


@on(*ALL)
async def test_work_and_record_are_there_together_and_a_replay_runs_nothing_again(store: FullStore) -> None:
    @workflow
    async def flow(ctx: Context) -> list[str]:
        first = await ctx.transaction(insert, 1)
        second = await ctx.transaction("again", insert, 2)
        await ctx.sleep("nap", "5ms")
        return [first, second]

    async with Runtime(store, [flow], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        assert await (await runtime.start(flow, id="run")) == ["run/insert", "run/again"]
    assert await effects(store) == [1, 2]
    assert [(entry.key, entry.kind) for entry in await steps_of(store, "run")][:2] == [("insert", "step"), ("again", "step")]


@on(*ALL)
async def test_what_the_function_raises_is_rolled_back_and_recorded_as_its_failure(store: FullStore) -> None:
    calls = []

    async def fail(transaction: StepTransaction) -> None:
        calls.append(current_step().attempt)
        await transaction.execute(INSERT.format(1))
        raise ValueError("no")

    @workflow
    async def flow(ctx: Context) -> str:
        try:
            await ctx.transaction(fail, retry=Retry(attempts=2, wait_initial="1ms", wait_jitter=0))
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok("no")
    assert (await effects(store), calls) == ([], [1, 2])
    assert [(entry.phase, entry.ok) for entry in await steps_of(store, "run")] == [("open", True), ("close", False)]


@on(SQLITE, POSTGRES)
async def test_a_returned_err_is_rolled_back_too(store: FullStore) -> None:
    async def refuse(transaction: StepTransaction) -> Ok[int] | Err[str]:
        await transaction.execute(INSERT.format(1))
        return Err("not enough")

    @workflow
    async def flow(ctx: Context) -> int:
        return await ctx.transaction(refuse)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow, id="run"), Err)
    assert await effects(store) == []


@on(*ALL)
async def test_other_branches_record_meanwhile_and_the_journal_has_no_gap(store: FullStore) -> None:
    async def quick(number: int) -> int:
        await asyncio.sleep(0.001 * number)
        return number

    async def slow_insert(transaction: StepTransaction, number: int) -> int:
        await transaction.execute(INSERT.format(number))
        await asyncio.sleep(0.01)
        return number

    @workflow
    async def flow(ctx: Context) -> list[int]:
        steps = (ctx.step(quick, number, key=f"step-{number}") for number in range(20))
        transactions = (ctx.transaction(slow_insert, number, key=f"transaction-{number}") for number in range(3))
        return await asyncio.gather(*steps, *transactions)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok([*range(20), *range(3)])
    assert len(await steps_of(store, "run")) == 23
    assert await effects(store) == [0, 1, 2]


@on(SQLITE, POSTGRES)
async def test_nothing_else_of_the_run_is_written_while_its_transaction_is_open(store: FullStore) -> None:
    """Such a write may wait for a lock that the transaction holds."""
    is_open, has_begun, written_meanwhile, record = False, asyncio.Event(), list[Entry](), store.record

    def watched(lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Any:
        written_meanwhile.extend(entries if is_open else ())
        return record(lease, entries, **options)

    store.record = watched  # type: ignore[method-assign]

    async def linger(transaction: StepTransaction) -> None:
        nonlocal is_open
        is_open = True
        await transaction.execute(INSERT.format(1))
        has_begun.set()
        await turns()
        is_open = False

    async def quick() -> None: ...

    @workflow
    async def flow(ctx: Context) -> None:
        async def branch() -> None:
            await has_begun.wait()
            await ctx.step(quick, at_most_once=True)  # which has to be recorded before it starts

        await asyncio.gather(ctx.transaction(linger), branch())

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok(None)
    assert written_meanwhile == []
    entries = [(entry.key, entry.phase) for entry in await steps_of(store, "run")]
    assert entries == [("quick", "open"), ("linger", "close"), ("quick", "close")]
    assert await effects(store) == [1]


@on(POSTGRES)
async def test_no_step_starts_before_it_is_recorded_that_a_transaction_runs_again(store: FullStore) -> None:
    await execute(store, "CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    await execute(store, "CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
    is_recording, may_record, moves, began = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[str]()
    record = store.record

    async def slow_record(*args: Any, **kwargs: Any) -> Any:
        is_recording.set()
        await may_record.wait()
        return await record(*args, **kwargs)

    store.record = slow_record  # type: ignore[method-assign]

    async def refused_at_first(transaction: StepTransaction) -> None:
        await transaction.execute(f"INSERT INTO parents (id) VALUES ({current_step().attempt})")
        await transaction.execute("INSERT INTO children (parent) VALUES (2)")

    async def beside() -> None:
        began.append("after the record" if may_record.is_set() else "before it")

    @workflow
    async def flow(ctx: Context) -> None:
        async def branch() -> None:
            await moves.wait()
            await ctx.step(beside)

        retry = Retry(attempts=2, wait_initial="1ms", wait_jitter=0)
        await asyncio.gather(ctx.transaction(refused_at_first, retry=retry), branch())

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        running = asyncio.ensure_future(runtime.run(flow, id="run"))
        await is_recording.wait()  # that the commit was refused, and when the next attempt is
        moves.set()
        await turns()
        may_record.set()
        assert await running == Ok(None)
    assert began == ["after the record"]


@on(SQLITE, POSTGRES)
async def test_a_store_that_goes_away_in_the_function_is_no_failure_of_the_step(store: FullStore) -> None:
    clock, calls = ManualClock(), list[int]()

    async def pay(transaction: StepTransaction) -> int:
        calls.append(current_step().attempt)
        await transaction.execute(INSERT.format(1))
        if len(calls) == 1:
            raise PersistenceError("the store", "it is away")
        return 1

    @workflow
    async def flow(ctx: Context) -> int:
        return await ctx.transaction(pay)

    async with Runtime(store, [flow], clock=clock, concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        with pytest.raises(PersistenceError, match="it is away"):
            await runtime.run(flow, id="run")
        assert await steps_of(store, "run") == []
        clock.advance("10s")
        assert await runtime.sweep() == {"run": Ok(1)}
    assert calls == [1, 1]
    assert await effects(store) == [1]


@on(SQLITE, POSTGRES)
async def test_a_transaction_takes_nothing_more_when_its_function_has_ended(store: FullStore) -> None:
    """It is committed with the record a moment later, and what came in between would be no part of the step."""
    kept: list[StepTransaction] = []

    async def keep(transaction: StepTransaction) -> None:
        kept.append(transaction)
        await transaction.execute(INSERT.format(1))
        late.append(asyncio.create_task(transaction.execute(INSERT.format(2))))

    late: list[asyncio.Task[Any]] = []

    @workflow
    async def flow(ctx: Context) -> None:
        await ctx.transaction(keep)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok(None)
        with pytest.raises(RuntimeError, match="has ended with its function"):
            await late[0]
        with pytest.raises(RuntimeError, match="has ended with its function"):
            await kept[0].execute(INSERT.format(3))
        with pytest.raises(RuntimeError, match="has ended with its function"):
            _ = kept[0].connection
    assert await effects(store) == [1]


@on(POSTGRES, MYSQL)
async def test_a_deadlock_runs_the_function_again(store: FullStore) -> None:
    await execute(store, "CREATE TABLE pair (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)")
    await execute(store, "INSERT INTO pair (id, n) VALUES (1, 0), (2, 0)")
    barrier, calls = asyncio.Barrier(2), []

    async def update(transaction: StepTransaction, first: int, second: int) -> None:
        calls.append(first)
        await transaction.execute(f"UPDATE pair SET n = n + 1 WHERE id = {first}")
        if len(calls) <= 2:
            await barrier.wait()
        await transaction.execute(f"UPDATE pair SET n = n + 1 WHERE id = {second}")

    @workflow
    async def flow(ctx: Context, first: int, second: int) -> None:
        await ctx.transaction(update, first, second, timeout=20)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(runtime.run(flow, 1, 2), runtime.run(flow, 2, 1))
    assert list(outcomes) == [Ok(None), Ok(None)]
    assert len(calls) == 3
    assert [tuple(map(int, row)) for row in await execute(store, "SELECT id, n FROM pair ORDER BY id")] == [(1, 2), (2, 2)]


@on(POSTGRES)
async def test_a_conflict_at_the_commit_runs_the_function_again_and_leaves_no_gap(store: FullStore) -> None:
    """A trigger that runs at the commit refuses the first two of them, as a serialization failure would."""
    await execute(store, "CREATE SEQUENCE commits")
    await execute(
        store,
        """
        CREATE FUNCTION refuse_twice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('commits') <= 2 THEN RAISE EXCEPTION 'in conflict' USING ERRCODE = '40001'; END IF;
            RETURN NULL;
        END $$
        """,
    )
    await execute(
        store,
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse_twice()",
    )
    calls = []

    async def counted(transaction: StepTransaction) -> int:
        calls.append(current_step().attempt)
        await insert(transaction, 1)
        return len(calls)

    async def quick(number: int) -> int:
        return number

    @workflow
    async def flow(ctx: Context) -> list[int]:
        steps = (ctx.step(quick, number, key=f"quick-{number}") for number in range(5))
        return await asyncio.gather(ctx.transaction(counted), *steps)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok([3, *range(5)])
    assert (await effects(store), calls) == ([1], [1, 1, 1])
    entries = [(entry.phase, entry.ok) for entry in await steps_of(store, "run") if entry.key == "counted"]
    assert entries == [("open", True), ("open", True), ("close", True)]


async def insert_child(transaction: StepTransaction) -> None:
    await transaction.execute("INSERT INTO child (parent) VALUES (7)")


@on(POSTGRES)
async def test_what_the_commit_itself_refuses_is_the_steps_failure(store: FullStore) -> None:
    await execute(store, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    await execute(store, "CREATE TABLE child (parent INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)")
    calls = []

    async def counted(transaction: StepTransaction) -> None:
        calls.append(1)
        await insert_child(transaction)

    @workflow
    async def flow(ctx: Context) -> str:
        try:
            await ctx.transaction(counted)
        except TransactionFailed as error:
            return str(error)
        return "committed"

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        outcome = await runtime.run(flow, id="run")
    assert isinstance(outcome, Ok)
    assert "foreign key" in outcome.value
    assert len(calls) == 1
    assert [(entry.phase, entry.ok) for entry in await steps_of(store, "run")] == [("close", False)]


@on(*ALL)
async def test_a_statement_that_failed_and_was_ignored_fails_the_step(backend: Backend, store: FullStore) -> None:
    """On SQLite only the statement is undone, and the function may go on."""

    async def ignore(transaction: StepTransaction) -> str:
        await transaction.execute(INSERT.format(1))
        with pytest.raises(Exception, match="no_such_table"):
            await transaction.execute("SELECT * FROM no_such_table")
        return "done"

    @workflow
    async def flow(ctx: Context) -> str:
        try:
            return await ctx.transaction(ignore)
        except TransactionFailed:
            return "failed"

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        outcome = await runtime.run(flow)
    assert (outcome, await effects(store)) == ((Ok("done"), [1]) if backend is SQLITE else (Ok("failed"), []))


@on(*ALL)
async def test_a_duplicate_key_in_the_callers_own_table_is_no_conflict(backend: Backend, store: FullStore) -> None:
    await execute(store, "CREATE TABLE names (n INTEGER PRIMARY KEY)")
    calls = []

    async def repeat(transaction: StepTransaction) -> None:
        calls.append(1)
        for _ in range(2):
            await transaction.execute("INSERT INTO names (n) VALUES (1)")

    @workflow
    async def flow(ctx: Context) -> str:
        try:
            await ctx.transaction(repeat)
        except Exception as error:
            return type(error).__name__
        return "none"

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        outcome = await runtime.run(flow)
    assert isinstance(outcome, Ok)
    assert outcome.value != "none"
    assert len(calls) == 1


async def use_asyncpg(transaction: StepTransaction, number: int) -> int:
    async with transaction.connection.transaction():  # a savepoint
        await transaction.connection.execute("INSERT INTO effects (n) VALUES ($1)", number)
    return int(await transaction.connection.fetchval("SELECT n FROM effects"))


async def use_asyncmy(transaction: StepTransaction, number: int) -> int:
    async with transaction.connection.cursor() as cursor:
        await cursor.execute("INSERT INTO effects (n) VALUES (%s)", (number,))
        await cursor.execute("SELECT n FROM effects")
        ((found,),) = await cursor.fetchall()
    return int(found)


def use_sqlite(transaction: StepTransaction, number: int) -> int:
    assert current_step().key in ("use", "fail")
    transaction.connection.execute("INSERT INTO effects (n) VALUES (?)", (number,))
    (found,) = transaction.connection.execute("SELECT n FROM effects").fetchone()
    return int(found)


async def use_client(transaction: StepTransaction, number: int) -> int:
    await transaction.connection.query(INSERT.format(number), [])
    rows, _ = await transaction.connection.query("SELECT n FROM effects", [])
    return int(rows[0][0])


USES: Final[dict[str, Callable[..., Any]]] = {"sqlite": use_sqlite, "postgres": use_asyncpg, "mysql": use_asyncmy}


@on(SQLITE, POSTGRES, MYSQL, *SQL_CLIENTS)
async def test_the_function_may_use_the_drivers_own_connection(backend: Backend, store: FullStore) -> None:
    use = USES.get(backend.name, use_client)

    async def fail(transaction: StepTransaction) -> None:
        await use(transaction, 1)
        raise ValueError("undone")

    def fail_plainly(transaction: StepTransaction) -> None:
        use(transaction, 1)
        raise ValueError("undone")

    @workflow
    async def flow(ctx: Context) -> int:
        with pytest.raises(ValueError, match="undone"):
            await ctx.transaction("fail", fail_plainly if backend is SQLITE else fail)
        found: int = await ctx.transaction("use", use, 2)
        return found

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow) == Ok(2)
    assert await effects(store) == [2]


@on(POSTGRES, MYSQL)
async def test_a_function_that_ends_the_transaction_itself_fails_its_step(backend: Backend, store: FullStore) -> None:
    async def commit(transaction: StepTransaction) -> None:
        connection = transaction.connection
        await (connection.execute("COMMIT") if backend is POSTGRES else connection.commit())

    @workflow
    async def flow(ctx: Context) -> None:
        with pytest.raises(TransactionFailed, match="its function has ended it"):
            await ctx.transaction(commit)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow, id="run") == Ok(None)
    assert [entry.ok for entry in await steps_of(store, "run")] == [False]


@on(SQLITE)
async def test_a_plain_function_that_ends_the_transaction_itself_fails_its_step(store: FullStore) -> None:
    def roll_back(transaction: StepTransaction) -> None:
        transaction.connection.execute(INSERT.format(1))
        transaction.connection.rollback()

    @workflow
    async def flow(ctx: Context) -> None:
        with pytest.raises(TransactionFailed, match="its function has ended it"):
            await ctx.transaction(roll_back)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow) == Ok(None)
    assert await effects(store) == []


@on(SQLITE)
async def test_an_async_function_on_sqlite_is_told_where_the_connection_is(store: FullStore) -> None:
    async def look(transaction: StepTransaction) -> None:
        with pytest.raises(RuntimeError, match="plain `def`"):
            _ = transaction.connection

    @workflow
    async def flow(ctx: Context) -> None:
        await ctx.transaction(look)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert await runtime.run(flow) == Ok(None)


@on(POSTGRES, MYSQL)
async def test_a_plain_function_needs_a_synchronous_driver(store: FullStore) -> None:
    def plain(transaction: StepTransaction) -> int:
        del transaction
        return 1

    @workflow
    async def flow(ctx: Context) -> str:
        with pytest.raises(TypeError, match="must be `async def`"):
            await ctx.transaction(plain)
        return await ctx.transaction("insert", lambda transaction: insert(transaction, 1))

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow), Ok)
    assert await effects(store) == [1]


@on(SQLITE, POSTGRES, MYSQL)
async def test_a_function_that_hangs_is_ended_by_its_timeout_and_undone(store: FullStore) -> None:
    async def hang(transaction: StepTransaction) -> None:
        await insert(transaction, 1)
        await asyncio.Event().wait()

    @workflow
    async def flow(ctx: Context) -> str:
        with pytest.raises(StepTimeout):
            await ctx.transaction(hang, timeout="100ms")
        return await ctx.transaction(insert, 2)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow), Ok)
    assert await effects(store) == [2]


@on(*ALL)
async def test_a_transaction_that_the_function_leaves_behind_is_rolled_back_before_the_run_undoes(store: FullStore) -> None:
    entered = asyncio.Event()

    async def finish_all_the_same(transaction: StepTransaction) -> None:
        await insert(transaction, 1)
        entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    @workflow
    async def flow(ctx: Context) -> None:
        await ctx.step("pay", lambda: 1, compensate=lambda _: execute(store, INSERT.format(2)))
        left_behind = asyncio.create_task(ctx.transaction(finish_all_the_same))
        await entered.wait()
        raise ValueError(left_behind.done())

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        outcome = await runtime.run(flow, id="run")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, ValueError)
    assert await effects(store) == [2]


@on(SQLITE)
async def test_a_plain_function_that_hangs_gives_up_the_write_lock_at_its_timeout(store: FullStore) -> None:
    """And what it does after that writes nothing, although its thread cannot be stopped."""
    goes_on, late = threading.Event(), list[object]()

    def hang(transaction: StepTransaction) -> None:
        connection = transaction.connection
        connection.execute(INSERT.format(1))
        goes_on.wait()
        for statement in (INSERT.format(3), "COMMIT", "CREATE TABLE late (n)"):
            with pytest.raises(sqlite3.DatabaseError) as refusal:
                connection.execute(statement)
            late.append(refusal.value)

    @workflow
    async def flow(ctx: Context) -> str:
        with pytest.raises(StepTimeout):
            await ctx.transaction(hang, timeout="100ms")
        return await ctx.transaction(insert, 2)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow), Ok)
        assert await effects(store) == [2]
        goes_on.set()
        while len(late) < 3:  # noqa: ASYNC110 - what another thread does
            await asyncio.sleep(0.01)
    assert await effects(store) == [2]


@on(SQLITE)
async def test_a_long_statement_of_a_plain_function_is_interrupted(store: FullStore) -> None:
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"

    def count(transaction: StepTransaction) -> None:
        transaction.connection.execute(endless)

    @workflow
    async def flow(ctx: Context) -> str:
        with pytest.raises(StepTimeout):
            await ctx.transaction(count, timeout="100ms")
        return await ctx.transaction(insert, 2)

    async with Runtime(store) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow), Ok)
    assert await effects(store) == [2]


@on(POSTGRES, MYSQL)
async def test_a_transaction_that_takes_longer_than_its_lease_is_not_taken_over(store: FullStore) -> None:
    async def work(transaction: StepTransaction) -> int:
        await insert(transaction, 1)
        await asyncio.sleep(2)  # the time of the lease is the server's own
        return 1

    @workflow
    async def flow(ctx: Context) -> int:
        return await ctx.transaction(work)

    async with Runtime(store, [flow], lease_ttl=1.5) as runtime, asyncio.timeout(PATIENCE):
        assert await (await runtime.start(flow)) == 1
    assert await effects(store) == [1]


@on(SQLITE, POSTGRES, MYSQL)
async def test_a_function_that_hangs_does_not_cost_other_runs_their_leases(store: FullStore) -> None:
    """On SQLite no lease is renewed while it hangs, so its time-out is a fraction of the lease's length."""
    calls = []

    async def hang(transaction: StepTransaction) -> None:
        await insert(transaction, 1)
        await asyncio.Event().wait()

    async def linger() -> int:
        calls.append(1)
        await asyncio.sleep(4)  # longer than a lease
        return 1

    @workflow
    async def hanging(ctx: Context) -> None:
        for attempt in range(3):
            with pytest.raises(StepTimeout):
                await ctx.transaction("hang", hang, timeout=1, key=f"hang-{attempt}")

    @workflow
    async def patient(ctx: Context) -> int:
        return await ctx.step(linger)

    async with Runtime(store, [hanging, patient], lease_ttl=3) as runtime, asyncio.timeout(PATIENCE):
        runs = await runtime.start(hanging), await runtime.start(patient)
        assert list(await asyncio.gather(*runs)) == [None, 1]
    assert len(calls) == 1
    assert await effects(store) == []


async def test_a_store_without_transactions_says_which_have_them() -> None:
    @workflow
    async def flow(ctx: Context) -> None:
        await ctx.transaction(insert, 1)

    with pytest.raises(StoreCapabilityError, match="SQLite, PostgreSQL, MySQL"):
        await flow()
    outcome = await flow.run(id="run", store=stores.memory())
    assert isinstance(outcome, Err)
    assert "SQLite, PostgreSQL, MySQL" in str(outcome.error)
