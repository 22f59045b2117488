"""Transactions: a step's own writes and its record commit together."""

from __future__ import annotations

import asyncio
from typing import Final

from perdure.errors import LeaseLost, StoreCapabilityError
from perdure.model.records import Pulse
from perdure.testing.contract.cases import promise_with, promise_without
from perdure.testing.contract.world import EXPIRED, NOW, TTL, FullWorld, at, entry, equal, holds, refused

INSERT: Final = "INSERT INTO contract_effects (n) VALUES (1)"
SELECT: Final = "SELECT n FROM contract_effects"


class _Failed(Exception):
    pass


def _fail() -> None:
    raise _Failed


async def _prepare(world: FullWorld) -> None:
    lease = await world.lease("prepare", workflow="other")
    # Another case may have left one, where they share a database. Each in its own transaction, which MySQL would commit anyway.
    for statement in ("DROP TABLE IF EXISTS contract_effects", "CREATE TABLE contract_effects (n INTEGER)"):
        async with world.a.transaction(lease) as transaction:
            await transaction.execute(statement)
    await world.a.finish(lease, "completed", b"1", now=NOW)


async def _effects(world: FullWorld) -> list[int]:
    lease = await world.lease("look", workflow="other")
    async with world.b.transaction(lease) as transaction:
        rows = await transaction.execute(SELECT)
    await world.a.finish(lease, "completed", b"1", now=NOW)
    return [row[0] for row in rows]


@promise_without("transaction")
async def a_store_without_transactions_refuses_them(world: FullWorld) -> None:
    """A store that cannot commit a step's writes with its record has no `transaction`, or raises `StoreCapabilityError`."""
    lease = await world.lease()
    if hasattr(world.a, "transaction"):
        with refused(StoreCapabilityError, "transaction()"):
            async with world.a.transaction(lease):
                pass
    await world.a.record(lease, [entry(1)], now=NOW)
    equal(await world.b.journal("run"), [entry(1)], "the journal, as the lease is still good")


@promise_with("transaction")
async def a_transaction_commits_writes_and_record_together(world: FullWorld) -> None:
    """On exit the step's writes, its entries and consumed inbox rows are committed; `record` answers as it does outside."""
    await _prepare(world)
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    async with world.a.transaction(lease) as transaction:
        equal(await transaction.execute(INSERT), [], "what an INSERT gives")
        equal([tuple(row) for row in await transaction.execute(SELECT)], [(1,)], "what a SELECT gives")
        equal(await transaction.record([entry(1)], consume=[1]), Pulse(1, False), "what record() gives")
    equal((await world.b.journal("run"), await world.b.inbox("run")), ([entry(1)], []), "journal and inbox")
    equal(await _effects(world), [1], "the step's own writes")


@promise_with("transaction")
async def a_failed_transaction_leaves_nothing(world: FullWorld) -> None:
    """When the block raises, the error comes through, neither the step's writes nor its record are there, and the lease stays."""
    await _prepare(world)
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    before = await world.dump("run")
    with refused(_Failed, "a transaction whose block raises"):
        async with world.a.transaction(lease) as transaction:
            await transaction.execute(INSERT)
            await transaction.record([entry(1)], consume=[1])
            _fail()
    equal((await world.dump("run"), await _effects(world)), (before, []), "the run, and the step's own writes")
    await world.a.record(lease, [entry(1)], consume=[1], now=NOW)
    equal(await world.b.journal("run"), [entry(1)], "the journal")


@promise_with("transaction")
async def a_transaction_of_a_stale_lease_leaves_nothing(world: FullWorld) -> None:
    """A transaction under a stale lease raises `LeaseLost` and rolls the step's own writes back, with or without a record."""
    await _prepare(world)
    lease = await world.lease()
    await world.take()
    with refused(LeaseLost, "a transaction with a stale lease"):
        async with world.a.transaction(lease) as transaction:
            await transaction.execute(INSERT)
    equal((await _effects(world), await world.b.journal("run")), ([], []), "the step's own writes, and the journal")


@promise_with("transaction")
async def a_transaction_keeps_others_out_until_it_ends(world: FullWorld) -> None:
    """While a transaction is open, no worker takes its run over without seeing what it commits, or the transaction is refused."""
    await _prepare(world)
    lease = await world.lease()
    takers: list[asyncio.Task[object]] = []
    committed = True
    try:
        async with world.a.transaction(lease) as transaction:
            await transaction.execute(INSERT)
            takers.append(asyncio.create_task(_take(world)))
            await asyncio.wait(takers, timeout=0.05)
            await transaction.record([entry(1)])
    except LeaseLost:
        committed = False
    seen = await takers[0]
    holds(seen in (None, [entry(1)] if committed else []), f"the other worker got nothing, or what was committed, not {seen!r}")
    equal(await world.b.journal("run"), [entry(1)] if committed else [], "the journal")
    equal(await _effects(world), [1] if committed else [], "the step's own writes")
    holds((await world.take(now=at(99))).lease.epoch > lease.epoch, "the run can be taken over afterwards")


async def _take(world: FullWorld) -> object:
    claims = (await world.b.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims
    return claims[0].journal if claims else None
