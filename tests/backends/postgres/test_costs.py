import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, cast

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.postgres import PostgresStore, recording
from perdure.backends.postgres.channel import DIALECT, Connection, PostgresChannel
from perdure.backends.sql import BYTES, Session, Tables
from perdure.backends.sql.recording import Write
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import entry, new_run
from tests.wire import Wire

TTL = 60.0


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    wire = Wire(dsn)
    yield wire
    wire.close()


async def leased(store: PostgresStore, run_id: str) -> Lease:
    created = await store.create(new_run(run_id), ttl=TTL)
    assert created.claim is not None
    return created.claim.lease


@pytest.mark.parametrize("is_near", [False, True])
async def test_a_record_is_one_round_trip_on_either_kind_of_connection(wire: Wire, is_near: bool) -> None:
    store = PostgresStore(wire.url)
    lease = await leased(store, "run")
    if is_near:
        await store._loop_connections.open_here()
    await store.record(lease, [entry(1)])  # prepares the statement
    before = wire.round_trips
    for seq in range(2, 22):
        await store.record(lease, [entry(seq)])
    assert wire.round_trips - before == 20
    await store.close()


async def test_a_stale_end_and_that_of_a_child_are_told_from_the_others(wire: Wire) -> None:
    store = PostgresStore(wire.url)
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    await store.release(leases[3])
    child = (await store.create(new_run("child", parent_id="run-3", parent_key="key"), ttl=TTL)).claim
    assert child is not None
    ends = [
        store.finish(lease, "completed", b"1", entries=[entry(seq) for seq in range(1, n)])
        for n, lease in enumerate([*leases, child.lease])
    ]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, LeaseLost)] == [3]
    assert await store.count(RunFilter(status=("completed",))) == 10
    assert [len(await store.journal(f"run-{n}")) for n in range(10)] == [0, 0, 1, 0, 3, 4, 5, 6, 7, 8]
    assert [row.kind for row in await store.inbox("run-3")] == ["child"]
    await store.close()


async def test_ends_that_stand_are_not_lost_leases_when_those_beside_them_are_tried_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(wire.url)
    leases = [await leased(store, f"run-{n}") for n in range(3)]
    child = (await store.create(new_run("child", parent_id="run-0", parent_key="key"), ttl=TTL)).claim
    assert child is not None
    really, failures = recording.close_all, [asyncpg.DeadlockDetectedError("deadlock detected")]

    async def close_all(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await really(*args)

    monkeypatch.setattr(recording, "close_all", close_all)
    await asyncio.gather(*(store.finish(lease, "completed", b"1") for lease in (*leases[1:], child.lease)))
    assert not failures
    assert await store.count(RunFilter(status=("completed",))) == 3
    await store.close()


async def test_a_reply_lost_on_a_connection_of_the_callers_loop_is_not_a_lost_record(wire: Wire) -> None:
    store = PostgresStore(wire.url)
    lease = await leased(store, "run")
    await store._loop_connections.open_here()
    await store.record(lease, [entry(1)])
    wire.lose = 1
    await store.record(lease, [entry(2)])
    wire.lose = 1
    assert await store.signal("run", "go", b"1") == 1
    wire.lose = 1
    assert await store.signal("run", "go", b"2") == 2
    assert [row.payload for row in await store.inbox("run")] == [b"1", b"2"]
    wire.lose = 1
    await store.finish(lease, "completed", b"1", entries=[entry(3)])
    assert [line.seq for line in await store.journal("run")] == [1, 2, 3]
    assert wire.lost == 4
    assert await store.count(RunFilter(status=("completed",))) == 1
    await store.close()


async def test_what_postgres_cannot_hold_fails_alone(wire: Wire) -> None:
    store = PostgresStore(wire.url)
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    calls = [store.record(lease, [entry(1, name="nul \0" if n == 3 else "fine")]) for n, lease in enumerate(leases)]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [3]
    assert isinstance(answers[3], PersistenceError)
    await store.close()


async def test_a_number_that_postgres_cannot_hold_fails_alone(wire: Wire) -> None:
    store = PostgresStore(wire.url)
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    calls = [store.record(lease, [entry(1, attempt=2**70 if n == 4 else 1)]) for n, lease in enumerate(leases)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers.pop(4), PersistenceError)
    assert not any(isinstance(answer, BaseException) for answer in answers)
    assert await store.journal("run-4") == []
    assert await store.journal("run-5") == [entry(1)]
    await store.close()


async def test_an_entry_that_is_there_already_keeps_back_none_beside_it(wire: Wire) -> None:
    store = PostgresStore(wire.url)
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    await store.record(leases[4], [entry(1, key="another")])
    answers = await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases), return_exceptions=True)
    assert isinstance(answers.pop(4), PersistenceError)
    assert not any(isinstance(answer, BaseException) for answer in answers)
    assert await store.journal("run-4") == [entry(1, key="another")]
    assert await store.journal("run-5") == [entry(1)]
    await store.close()


async def test_records_that_share_a_statement_are_one_transaction(dsn: str, store: PostgresStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    statements = store._batchers.records.statements
    await asyncio.gather(*(store.record(lease, [entry(1), entry(2)]) for lease in leases))
    connection = await asyncpg.connect(dsn)
    transactions = await connection.fetchval("SELECT count(DISTINCT xmin::text) FROM perdure_steps")
    await connection.close()
    assert transactions == store._batchers.records.statements - statements <= 2


async def test_records_lock_runs_in_the_order_of_their_ids() -> None:
    ids = ["b", "a", "Z", "\uffff", "\U0001f600", "\u00e4", "aa"]
    seen: list[str] = []

    class NotedConnection:
        async def fetchmany(self, query: str, args: Sequence[Sequence[Any]]) -> list[Any]:
            seen.extend(values[1] for values in args)
            return [(*values[1:4], 0, 0) for values in args]

    leases = [Lease(run_id=run_id, epoch=1, token="token", until=0) for run_id in ids]
    db = Session(PostgresChannel(cast("Connection", NotedConnection())), Tables("perdure", DIALECT, BYTES), "")
    await recording.append_all(db, [Write.record(lease, [entry(1)], []) for lease in leases])
    assert seen == sorted(ids, key=str.encode)


@pytest.mark.parametrize("is_planned_while_empty", [True, False])
async def test_a_claim_reads_few_rows_where_tables_have_no_statistics(dsn: str, is_planned_while_empty: bool) -> None:
    many = 20_000
    connection = await asyncpg.connect(dsn)
    store = PostgresStore(dsn)
    await store.create(new_run("sleeper"), now=1 << 51)
    if is_planned_while_empty:
        assert not (await store.claim(10, TTL, [("flow", 1)])).claims
    names = await connection.fetch(
        "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = 'perdure_runs'::regclass AND attnum > 0 ORDER BY attnum"
    )
    columns = ", ".join("id || n" if name == "id" else name for (name,) in names)
    await connection.execute("ALTER TABLE perdure_runs SET (autovacuum_enabled = false)")
    await connection.execute(f"INSERT INTO perdure_runs SELECT {columns} FROM perdure_runs, generate_series(1, {many}) AS n")
    due = [await store.create(new_run(f"due-{n}")) for n in range(10)]
    before = await _rows_read(connection)
    assert len((await store.claim(100, TTL, [("flow", 1)])).claims) == len(due)
    await store.close()
    assert await _rows_read(connection) - before < many / 10
    await connection.close()


async def _rows_read(connection: Any) -> int:
    """How many rows of runs were read, by all sessions that have ended."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    read: int = await connection.fetchval(
        """
        SELECT seq_tup_read + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relid = 'perdure_runs'::regclass)
        FROM pg_stat_user_tables WHERE relid = 'perdure_runs'::regclass
        """
    )
    return read
