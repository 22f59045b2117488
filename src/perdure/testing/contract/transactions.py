"""Transactions: a step's own writes and its record commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, cast

from perdure.errors import LeaseLost, PersistenceError, RunConflict, RunNotFound, StoreCapabilityError
from perdure.model.records import Pulse
from perdure.store import Outbox, OutboxStore, Transaction
from perdure.testing.contract.cases import promise_with, promise_without
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    TTL,
    FullWorld,
    at,
    entry,
    equal,
    holds,
    new_run,
    refused,
    refused_part,
    signals,
)

T = TypeVar("T")

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
        with refused_part("transaction", "transaction()"):
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
    with refused(LeaseLost("run", lease.epoch), "a transaction with a stale lease"):
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


@promise_with("transaction")
async def a_transaction_gives_the_connection_of_its_driver(world: FullWorld) -> None:
    """`connection` is the driver's own, until the transaction has ended; a store without one raises `StoreCapabilityError`."""
    lease = await world.lease()
    async with world.a.transaction(lease) as transaction:
        try:
            connection = await _with_connection(transaction, _give_back)
        except StoreCapabilityError:
            return
        holds(connection is not None, "there is a connection")
        await transaction.record([entry(1)])
    with refused((PersistenceError, RuntimeError), "the connection of a transaction that has ended"):
        _ = transaction.connection
    equal(await world.b.journal("run"), [entry(1)], "the journal")


@promise_with("transaction")
async def an_error_of_the_functions_own_is_not_transient(world: FullWorld) -> None:
    """`is_transient` is false for an error that has nothing to do with the database: the work is not repeated for it."""
    lease = await world.lease()
    async with world.a.transaction(lease) as transaction:
        holds(not transaction.is_transient(_Failed()), "an error of the function is not transient")


@promise_without("outbox")
async def a_store_without_an_outbox_refuses_it(world: FullWorld) -> None:
    """A store that cannot write in a transaction of the caller's has no `outbox`, or raises `StoreCapabilityError`."""
    if hasattr(world.a, "outbox"):
        with refused_part("outbox", "outbox()"):
            await _outbox(world, object())
    await world.lease()
    equal([info.id for info in await world.b.list()], ["run"], "the runs, as the store is still good")


@promise_with("outbox")
async def what_an_outbox_wrote_is_there_when_the_caller_commits(world: FullWorld) -> None:
    """A run and a signal written in a caller's transaction are there after its commit, the run pending and due; none is twice."""
    lease = await world.lease()
    await world.a.create(new_run("other", workflow="other"), now=NOW)

    async def write(connection: Any) -> None:
        outbox = await _outbox(world, connection)
        created = [await outbox.create(new_run("new"), now=NOW) for _ in range(2)]
        found = [(each.run.status, each.is_new, each.claim) for each in created]
        equal(found, [("pending", True, None), ("pending", False, None)], "what create() gives")
        seqs = [await outbox.signal("other", "go", b"1", dedupe="once", now=NOW) for _ in range(2)]
        equal(seqs, [1, 1], "what signal() gives")

    async with world.a.transaction(lease) as transaction:
        await _with_connection(transaction, write)
    equal([(row.name, row.payload) for row in await world.b.inbox("other")], [("go", b"1")], "the inbox")
    claims = (await world.b.claim(9, TTL, [("flow", 1)], now=at(1))).claims
    equal([claim.run.id for claim in claims], ["new"], "the runs that can be claimed")


@promise_with("outbox")
async def what_an_outbox_wrote_is_gone_when_the_caller_rolls_back(world: FullWorld) -> None:
    """A run and a signal written in a caller's transaction that is rolled back never existed, and its id is free."""
    lease = await world.lease()
    await world.a.create(new_run("other", workflow="other"), now=NOW)

    async def write(connection: Any) -> None:
        outbox = await _outbox(world, connection)
        await outbox.create(new_run("new"), now=NOW)
        await outbox.signal("other", "go", b"1", now=NOW)

    with refused(_Failed, "a transaction whose block raises"):
        async with world.a.transaction(lease) as transaction:
            await _with_connection(transaction, write)
            _fail()
    equal((await world.b.get("new"), await world.b.inbox("other")), (None, []), "the run, and the inbox")
    holds((await world.b.create(new_run("new"), now=NOW)).is_new, "the id is free")


@promise_with("outbox")
async def no_signal_of_a_callers_transaction_is_lost_by_a_suspend(world: FullWorld) -> None:
    """When a run suspends while a caller's transaction has a signal for it, `suspend` returns the signal or the run is due."""
    caller = await world.lease("caller", workflow="other")
    lease = await world.lease()

    async def send(connection: Any) -> None:
        outbox = await _outbox(world, connection)
        await outbox.signal("run", "go", b"1", now=NOW)

    async with world.a.transaction(caller) as transaction:
        await _with_connection(transaction, send)
        suspending = asyncio.ensure_future(world.b.suspend(lease, wake_at=None, waiting_for=signals("go"), now=NOW))
        await asyncio.wait([suspending], timeout=0.05)
    arrived = [(row.name, row.payload) for row in await suspending]
    row = await world.row()
    if arrived:
        equal((arrived, row.status, row.epoch), ([("go", b"1")], "running", lease.epoch), "what suspend() gave, and the row")
    else:
        equal((row.status, row.wake_at), ("suspended", NOW), "status and wake_at of a run that slept before its signal came")


@promise_with("outbox")
async def an_outbox_refuses_what_its_store_refuses(world: FullWorld) -> None:
    """In a caller's transaction another input for a known id raises `RunConflict`, and a signal to no run `RunNotFound`."""
    lease = await world.lease()

    async def write(connection: Any) -> None:
        outbox = await _outbox(world, connection)
        with refused(RunConflict("run", "another input"), "create() with another input"):
            await outbox.create(new_run("run", input_hash=b"another"), now=NOW)
        with refused(RunNotFound("nobody"), "signal() to no run"):
            await outbox.signal("nobody", "go", b"1", now=NOW)

    async with world.a.transaction(lease) as transaction:
        await _with_connection(transaction, write)
        await transaction.record([entry(1)])
    equal(await world.b.journal("run"), [entry(1)], "the journal, as the transaction is still good")


async def _outbox(world: FullWorld, connection: Any) -> Outbox:
    return await cast("OutboxStore", world.a).outbox(connection)


async def _give_back(connection: Any) -> Any:
    return connection


async def _with_connection(transaction: Transaction, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """The result of the work with the transaction's connection, done where that can be used."""
    try:
        connection = transaction.connection
    except RuntimeError:
        return await transaction.call_plain(lambda: _run_at_once(work(transaction.connection)))
    return await work(connection)


def _run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as on a synchronous driver."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise AssertionError("an outbox on a synchronous connection waited for an event loop")
