"""Writes that are longer than the server's max_allowed_packet: sent in several packets of one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from perdure import Context, Ok, workflow
from perdure.backends.mysql import MysqlStore
from perdure.errors import ValueNotStorable
from perdure.model.records import Claim, Item, Signal
from perdure.testing.contract.world import entry, new_run, run_row
from tests.backends.operators import MysqlOperator

LIMIT = 1 << 20


@pytest.fixture
def small_packets(dsn: str) -> Iterator[str]:
    """The DSN, while the server takes packets of 1 MiB from new connections."""
    operator = MysqlOperator()
    ((before,),) = operator.ask(dsn, "SELECT @@global.max_allowed_packet")
    operator.ask(dsn, f"SET GLOBAL max_allowed_packet = {LIMIT}")
    yield dsn
    operator.ask(dsn, f"SET GLOBAL max_allowed_packet = {before}")


@pytest.fixture
async def store(small_packets: str) -> AsyncIterator[MysqlStore]:
    store = await asyncio.to_thread(MysqlStore, small_packets)
    yield store
    await store.close()


async def start(store: MysqlStore, run_id: str = "run") -> Claim:
    claim = (await store.create(new_run(run_id), ttl=60)).claim
    assert claim is not None
    return claim


async def test_parallel_results_are_recorded_together(store: MysqlStore) -> None:
    @workflow
    async def gather(ctx: Context) -> int:
        async def part(n: int) -> str:
            return chr(65 + n) * (LIMIT * 3 // 16)

        texts = await asyncio.gather(*(ctx.step(part, n, key=f"part-{n}") for n in range(8)))
        return sum(map(len, texts))

    assert await gather.run(id="run", store=store) == Ok(8 * (LIMIT * 3 // 16))


@pytest.mark.parametrize("byte", [b"x", b"\\", b"'", b"\0"])
async def test_a_record_may_be_longer_than_a_packet(store: MysqlStore, byte: bytes) -> None:
    claim = await start(store)
    await store.signal("run", "go", byte * (LIMIT // 2))
    entries = [entry(seq, payload=byte * (LIMIT * 3 // 16)) for seq in range(1, 9)]
    items = [Item(stream="log", n=n, payload=byte * (LIMIT // 4)) for n in range(5)]
    for _ in range(2):  # the second time it is compared with what is recorded
        await store.record(claim.lease, entries, consume=[1], items=items)
    assert await store.journal("run") == entries
    assert await store.items("run", "log") == items
    await store.finish(claim.lease, "completed", byte * (LIMIT // 2), entries=[entry(9, payload=byte * (LIMIT // 2))])
    row = await store.get("run")
    assert row is not None
    assert row.outcome == byte * (LIMIT // 2)


@pytest.mark.parametrize(("number", "size"), [(30, LIMIT // 20), (5_000, 250)], ids=["large entries", "small entries"])
async def test_a_saved_run_may_be_longer_than_a_packet(store: MysqlStore, number: int, size: int) -> None:
    entries = [entry(seq, payload=b"\\" * size) for seq in range(1, number + 1)]
    inbox = [Signal(seq=seq, name="go", payload=b"'" * (LIMIT // 4)) for seq in range(1, 6)]
    await store.create(new_run("created"), entries=entries, inbox=inbox)
    await store.restore(run_row("restored"), entries, inbox)
    for run_id in ("created", "restored"):
        assert await store.journal(run_id) == entries
        assert [row.payload for row in await store.inbox(run_id)] == [row.payload for row in inbox]


async def test_a_value_longer_than_a_packet_is_refused_and_the_others_are_recorded(store: MysqlStore) -> None:
    claims = [await start(store, f"run-{n}") for n in range(3)]
    sizes = (10, LIMIT, LIMIT - 5000)
    answers = await asyncio.gather(
        *(store.record(claim.lease, [entry(1, payload=b"\\" * size)]) for claim, size in zip(claims, sizes, strict=True)),
        return_exceptions=True,
    )
    assert isinstance(answers[1], ValueNotStorable)
    assert f"a value of {LIMIT:,} bytes" in str(answers[1])
    assert f"max_allowed_packet={LIMIT:,}" in str(answers[1])
    assert [len(await store.journal(f"run-{n}")) for n in range(3)] == [1, 0, 1]


async def test_no_variable_stays_behind(store: MysqlStore) -> None:
    claim = await start(store)
    await store.record(claim.lease, [entry(1, payload=b"\\" * (LIMIT // 2))])
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(2, payload=b"\\" * (LIMIT // 2))])
        assert await transaction.execute("SELECT @perdure_0") == [(None,)]
    assert len(await store.journal("run")) == 2
