"""Money conserved: transfers by `ctx.transaction`, in worker processes that are killed at random."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import pytest

from perdure import Runtime
from perdure.store import FullStore
from tests.backends.bank import (
    ACCOUNTS,
    BALANCE,
    balances_after,
    drive_transfers,
    execute,
    open_accounts,
    plan_transfers,
    transfer,
)
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import MYSQL, POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL, times

TRANSFERS: Final = times(10_000)
WORKERS: Final = 2
PATIENCE: Final = 540.0 if IS_FULL else 120.0
KILLS: Final = 1_000 if IS_FULL else 4


async def watch_the_sum(store: FullStore, ended: asyncio.Event) -> int:
    """Look at the sum again and again, and return how often."""
    looks = 0
    while not ended.is_set():
        ((total,),) = await execute(store, "SELECT SUM(cents) FROM accounts")
        assert int(total) == ACCOUNTS * BALANCE
        looks += 1
        await asyncio.sleep(0.5)
    return looks


@on(POSTGRES, MYSQL, SQLITE)
async def test_no_cent_is_lost_or_made_however_often_workers_are_killed(
    backend: Backend, dsn: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    transfers, rng = plan_transfers(TRANSFERS, backend), random.Random(f"{backend}")
    lease_ttl, kills, ended = 4 * backend.lease_ttl, 0, asyncio.Event()
    async with store_at(dsn) as store, Runtime(store, concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        await store.setup()
        await open_accounts(store)
        runs = await runtime.start_many(transfer, transfers, ids=lambda number, *_: f"transfer-{number}")

        async def new_worker() -> Child:
            return await asyncio.to_thread(start, drive_transfers, dsn, lease_ttl)

        began_at = time.monotonic()
        workers = [await new_worker() for _ in range(WORKERS)]
        looking = asyncio.create_task(watch_the_sum(store, ended))
        while await runtime.count(workflow="transfer", status=["pending", "running"]):
            await asyncio.sleep(rng.uniform(0.3, 2.0))
            if kills < KILLS:
                place, kills = rng.randrange(WORKERS), kills + 1
                await asyncio.to_thread(workers[place].kill)
                workers[place] = await new_worker()
        seconds = time.monotonic() - began_at
        ended.set()
        looks = await looking
        for worker in workers:
            await asyncio.to_thread(worker.kill)
        assert [await run for run in runs] == [cents for *_, cents in transfers]
        moves = await execute(store, "SELECT n FROM moves ORDER BY n")
        assert [int(n) for (n,) in moves] == list(range(TRANSFERS))
        accounts = await execute(store, "SELECT id, cents FROM accounts")
    assert {int(account): int(cents) for account, cents in accounts} == balances_after(transfers)
    assert kills
    with capsys.disabled():
        print(f"\n{backend}: {TRANSFERS:,} transfers in {seconds:.0f} s, {kills} kills, the sum looked at {looks} times")
