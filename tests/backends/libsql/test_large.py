"""Payloads and journals larger than what a server takes in a row and gives in a reply."""

from collections.abc import AsyncIterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.backends.libsql.hrana import BatchStep, HranaClient
from perdure.backends.libsql.large_values import MARK, MAX_INLINE, reference_to
from perdure.backends.sql.dialect import Statement
from perdure.errors import PersistenceError
from perdure.model.records import Awaited, Item
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run

LARGE = bytes(range(256)) * (7 << 12)  # 7 MiB, more than a row takes


@pytest.fixture
async def store(url: str, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(url, table=table)
    yield store
    await store.close()


async def pieces(client: HranaClient, table: str) -> int:
    (result,) = (await client.batch([BatchStep(Statement(f'SELECT count(*) FROM "{table}_pieces"'))])).results_or_raise()
    return int(str(result.rows[0][0]))


@pytest.mark.parametrize("payload", [LARGE, b"x" * (MAX_INLINE + 1), MARK, reference_to(b"") + b"more", MARK + b"x" * 5])
async def test_any_payload_is_the_same_everywhere_it_can_be(store: LibsqlStore, payload: bytes) -> None:
    claim = (await store.create(new_run(input=payload, metadata=payload), ttl=TTL, entries=[entry(1, payload=payload)])).claim
    assert claim is not None
    await store.signal("run", "go", payload)
    await store.record(claim.lease, [entry(2, payload=payload)], items=[Item(stream="s", n=0, payload=payload)])
    await store.report(claim.lease, payload)
    assert [line.payload for line in await store.journal("run")] == [payload] * 2
    assert [row.payload for row in await store.inbox("run")] == [payload]
    assert [item.payload for item in await store.items("run", "s")] == [payload]
    taken = await store.acquire("run", TTL, now=EXPIRED * 2)
    assert taken is not None
    assert [line.payload for line in taken.journal] == [payload] * 2
    await store.finish(taken.lease, "completed", payload, now=EXPIRED * 2)
    row = await store.get("run")
    assert row is not None
    assert (row.input, row.metadata, row.progress, row.outcome) == (payload,) * 4


async def test_a_large_entry_recorded_again_is_a_lost_reply_and_another_one_is_refused(store: LibsqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    for _ in range(2):
        await store.record(claim.lease, [entry(1, payload=LARGE)])
    with pytest.raises(PersistenceError, match="seq 1 already"):
        await store.record(claim.lease, [entry(1, payload=LARGE + b"!")])
    assert [line.payload for line in await store.journal("run")] == [LARGE]


async def test_pieces_go_when_nothing_refers_to_them_any_more(store: LibsqlStore, client: HranaClient, table: str) -> None:
    for run_id in ("a", "b"):
        claim = (await store.create(new_run(run_id, input=LARGE), ttl=TTL)).claim
        assert claim is not None
        await store.record(claim.lease, [entry(1, payload=LARGE * (1 if run_id == "a" else 2))])
    assert await pieces(client, table) == 7 + 14
    await store.delete("a")
    assert await pieces(client, table) == 7 + 14
    assert [line.payload for line in await store.journal("b")] == [LARGE * 2]
    await store.delete("b")
    assert await pieces(client, table) == 0


async def test_purged_and_replaced_runs_leave_no_pieces(store: LibsqlStore, client: HranaClient, table: str) -> None:
    claim = (await store.create(new_run("old", input=LARGE), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await store.finish(claim.lease, "completed", b"1", now=NOW)
    assert await store.purge(1, now=EXPIRED) == 1
    assert await pieces(client, table) == 0
    await store.create(new_run("replaced"), entries=[entry(1, payload=LARGE)], now=NOW)
    row = await store.get("replaced")
    assert row is not None
    await store.restore(row, [entry(1)], now=NOW)
    assert await pieces(client, table) == 0


async def test_a_child_may_end_with_a_large_outcome_and_be_deleted(store: LibsqlStore) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL)).claim
    child = (await store.create(new_run("child", parent_id="parent", parent_key="pay"), ttl=TTL)).claim
    assert parent is not None
    assert child is not None
    await store.finish(child.lease, "completed", LARGE)
    await store.delete("child")
    assert [row.payload for row in await store.inbox("parent")] == [LARGE]


async def test_a_journal_of_many_megabytes_is_read_whole(store: LibsqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    for first in range(1, 601, 100):
        await store.record(claim.lease, [entry(seq, payload=bytes([seq % 256]) * 40_000) for seq in range(first, first + 100)])
    expected = [(seq, bytes([seq % 256]) * 40_000) for seq in range(1, 601)]
    assert [(line.seq, line.payload) for line in await store.journal("run")] == expected
    taken = await store.acquire("run", TTL, now=EXPIRED)
    assert taken is not None
    assert [(line.seq, line.payload) for line in taken.journal] == expected


async def test_values_in_somebodys_own_table_are_left_as_they_are(store: LibsqlStore, client: HranaClient, table: str) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    values = [b"x" * (MAX_INLINE + 1), MARK, reference_to(b"nowhere")]
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute(f"CREATE TABLE {table}_own (value BLOB)")
        for value in values:
            await transaction.execute(f"INSERT INTO {table}_own VALUES (?)", (value,))
        assert [row[0] for row in await transaction.execute(f"SELECT value FROM {table}_own")] == values
    (result,) = (await client.batch([BatchStep(Statement(f"SELECT value FROM {table}_own"))])).results_or_raise()
    assert [row[0] for row in result.rows] == values
    assert await pieces(client, table) == 0
    await client.batch([BatchStep(Statement(f"DROP TABLE {table}_own"))])


async def test_more_may_have_arrived_for_a_run_than_a_reply_holds(store: LibsqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    payloads = [bytes([n]) * MAX_INLINE for n in range(12)]
    for payload in payloads:
        await store.signal("run", "go", payload)
    arrived = await store.suspend(claim.lease, wake_at=None, waiting_for=[Awaited("signal", "go")], entries=[entry(1)])
    assert [row.payload for row in arrived] == payloads
    assert await store.journal("run") == [entry(1)]
    await store.finish(claim.lease, "completed", b"1", entries=[entry(2)])
