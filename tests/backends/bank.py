"""Transfers between accounts in the store's own database, each a run whose only step is a transaction.

`moves` has a line for each transfer that was committed, and no key that would refuse a second one.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from perdure import Context, Runtime, StepTransaction, workflow
from perdure.store import FullStore
from perdure.testing.contract.world import TTL, new_run
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

ACCOUNTS: Final = 50
BALANCE: Final = 1_000


async def move(transaction: StepTransaction, number: int, source: int, target: int, cents: int) -> int:
    """Not in the order of the accounts, so that two of them may deadlock."""
    await transaction.execute(f"UPDATE accounts SET cents = cents - {cents} WHERE id = {source}")
    await transaction.execute(f"UPDATE accounts SET cents = cents + {cents} WHERE id = {target}")
    await transaction.execute(f"INSERT INTO moves (n) VALUES ({number})")
    return cents


@workflow
async def transfer(ctx: Context, number: int, source: int, target: int, cents: int) -> int:
    return await ctx.transaction(move, number, source, target, cents)


def plan_transfers(count: int, seed: object) -> list[tuple[int, int, int, int]]:
    """What is to be transferred: number, source, target, cents."""
    rng = random.Random(f"{seed}")
    pairs = (rng.sample(range(ACCOUNTS), 2) for _ in range(count))
    return [(number, source, target, rng.randrange(1, 100)) for number, (source, target) in enumerate(pairs)]


def balances_after(transfers: list[tuple[int, int, int, int]]) -> dict[int, int]:
    """What each account has when each of these has happened once."""
    balances = Counter(dict.fromkeys(range(ACCOUNTS), BALANCE))
    for _, source, target, cents in transfers:
        balances[source] -= cents
        balances[target] += cents
    return dict(balances)


async def open_accounts(store: FullStore) -> None:
    """The tables, with the same balance in each account."""
    rows = ", ".join(f"({number}, {BALANCE})" for number in range(ACCOUNTS))
    await execute(store, "CREATE TABLE accounts (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)")
    await execute(store, "CREATE TABLE moves (n INTEGER NOT NULL)")
    await execute(store, f"INSERT INTO accounts (id, cents) VALUES {rows}")


async def execute(store: FullStore, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a statement in a transaction of its own."""
    claim = (await store.create(new_run(f"sql {random.random()}", workflow="sql"), ttl=TTL)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        rows = await transaction.execute(sql)
    await store.finish(claim.lease, "completed", b"1")
    return rows


async def drive_transfers(parent: ParentPipe, dsn: str, lease_ttl: float) -> None:
    """Drive the runs that are due until a message of the test, or until killed."""
    async with store_at(dsn) as store, Runtime(store, [transfer], concurrency=8, max_attempts=1000, lease_ttl=lease_ttl):
        parent.send("ready")
        await parent.receive()
    parent.send("done")
