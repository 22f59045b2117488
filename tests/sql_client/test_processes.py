"""Real processes on one new database."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.managers import SyncManager
from threading import Barrier
from typing import Final

from perdure.records import Lease
from perdure.testing.contract.world import TTL, entry, new_run
from tests.campaign import times
from tests.sql_client.places import Place

STARTING: Final = max(4, times(16))
IDS: Final = max(5, times(50))


def start(dialect: str, where: str, together: Barrier) -> tuple[list[bool], list[Lease]]:
    """Set up, create every run, and record under each lease that was given."""

    async def work() -> tuple[list[bool], list[Lease]]:
        here = Place(dialect, where)
        store = here.store()
        await asyncio.to_thread(together.wait)
        await store.setup()
        made = [await store.create(new_run(f"run-{n}"), ttl=TTL) for n in range(IDS)]
        leases = [one.claim.lease for one in made if one.claim is not None]
        await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases))
        await here.close()
        return [one.is_new for one in made], leases

    return asyncio.run(work())


def start_all(here: Place, manager: SyncManager) -> list[tuple[list[bool], list[Lease]]]:
    together = manager.Barrier(STARTING)
    with ProcessPoolExecutor(STARTING, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(start, here.dialect, here.where, together) for _ in range(STARTING)]
        return [one.result() for one in started]


async def test_processes_that_start_at_once_make_one_schema_and_each_run_once(here: Place) -> None:
    with await asyncio.to_thread(multiprocessing.get_context("spawn").Manager) as manager:
        answers = await asyncio.to_thread(start_all, here, manager)
        await asyncio.to_thread(manager.shutdown)
    assert [sum(column) for column in zip(*(made for made, _ in answers), strict=True)] == [1] * IDS
    store = here.store()
    assert [await store.journal(f"run-{n}") for n in range(IDS)] == [[entry(1)]] * IDS
