"""Sharing: real processes on one database, and that a store for one process cannot be carried into another."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from perdure.errors import LeaseLost, RunConflict, StoreCapabilityError
from perdure.model.records import Lease, NewRun, Signal
from perdure.store import Store, require
from perdure.testing.contract.cases import promise_with, promise_without
from perdure.testing.contract.late_inputs import lacking
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    TTL,
    FullWorld,
    StoreFactory,
    World,
    claimed_ids,
    entry,
    equal,
    new_run,
    refused,
    run_row,
)
from perdure.testing.processes import call_in_processes, kill_this_process

T = TypeVar("T")
Job = Callable[[Store], Coroutine[Any, Any, T]]


def _work(factory: StoreFactory, job: Job[T]) -> T:
    """What another process does: open the database, do the job, close."""

    async def work() -> T:
        store = await factory.open()
        try:
            return await job(store)
        finally:
            await store.close()

    return asyncio.run(work())


async def in_processes(world: World, *jobs: Job[T]) -> list[T]:
    """What each job returns, in a process of its own and all at once."""
    return await call_in_processes(*(partial(_work, world.factory, job) for job in jobs))


async def create_all(store: Store) -> list[bool]:
    await store.setup()
    return [(await store.create(new_run(f"run-{n:02}"), now=NOW)).is_new for n in range(40)]


async def claim_all(store: Store) -> list[str]:
    mine: list[str] = []
    while got := await claimed_ids(store, 1):
        mine += got
    return mine


async def signal_often(store: Store) -> list[int]:
    return [await store.signal("run", "go", b"1", now=NOW) for _ in range(40)]


async def claim_one(store: Store) -> Lease:
    return (await store.claim(1, TTL, [("flow", 1)], now=NOW)).claims[0].lease


async def record_stale(store: Store, lease: Lease) -> bool:
    try:
        await store.record(lease, [entry(1)], now=EXPIRED)
    except LeaseLost:
        return False
    return True


async def record_and_die(store: Store, lease: Lease) -> None:
    await store.record(lease, [entry(1)], now=NOW)
    kill_this_process()


async def bring_inputs(store: Store, name: str) -> list[bool]:
    return [await _brings(store, new_run(f"run-{n:02}", input=name.encode(), input_hash=name.encode())) for n in range(20)]


async def _brings(store: Store, run: NewRun) -> bool:
    try:
        await store.create(run, now=NOW)
    except RunConflict:
        return False
    return True


async def restore_often(store: Store, name: str) -> None:
    entries = [entry(seq, payload=name.encode()) for seq in range(1, 4)]
    rows = [Signal(seq=seq, name=name, payload=b"1") for seq in range(1, 4)]
    operators = require(store, "operators")
    for _ in range(20):
        await operators.restore(run_row(input=name.encode()), entries, rows, now=NOW)


@promise_without("shared")
async def a_store_for_one_process_cannot_be_carried_into_another(world: World) -> None:
    """A store that serves one process refuses to be pickled, so that no copy in another process passes for the database."""
    with refused(StoreCapabilityError, "pickling a store that serves one process"):
        pickle.dumps(world.a)


@promise_with("shared")
async def processes_may_start_on_a_new_database_at_once(world: World) -> None:
    """Several processes set up one new database at once, and each run they create is made by one of them."""
    answers = await in_processes(world, *[create_all] * 3)
    equal([sum(column) for column in zip(*answers, strict=True)], [1] * 40, "how many processes made each run")
    equal(len(await world.a.list()), 40, "the number of runs")


@promise_with("shared")
async def processes_share_the_due_runs_out(world: World) -> None:
    """Several processes that claim at once never get the same run, and together get all of them."""
    await create_all(world.a)
    shares = await in_processes(world, *[claim_all] * 3)
    equal(sorted(run_id for share in shares for run_id in share), [f"run-{n:02}" for n in range(40)], "what was given out")


@promise_with("shared")
async def processes_signal_one_run_without_loss(world: World) -> None:
    """Signals from several processes at once get different seqs, and all are there."""
    await world.a.create(new_run(), now=NOW)
    answers = await in_processes(world, *[signal_often] * 3)
    equal(sorted(seq for seqs in answers for seq in seqs), list(range(1, 121)), "the seqs")
    equal(len(await world.a.inbox("run")), 120, "the number of inbox rows")


@promise_with("shared")
async def a_stale_process_cannot_write(world: World) -> None:
    """A process whose lease another one took over is refused."""
    await world.a.create(new_run(), now=NOW)
    (lease,) = await in_processes(world, claim_one)
    await world.take()
    equal(await in_processes(world, partial(record_stale, lease=lease)), [False], "whether the stale process wrote")
    equal(await world.a.journal("run"), [], "the journal")


@promise_with("shared", "operators")
async def a_process_whose_run_was_restored_cannot_write(world: FullWorld) -> None:
    """A process whose lease had expired when its run was restored is refused."""
    await world.a.create(new_run(), now=NOW)
    (lease,) = await in_processes(world, claim_one)
    await world.a.restore(await world.row(), [entry(9)], now=EXPIRED)
    equal(await in_processes(world, partial(record_stale, lease=lease)), [False], "whether the stale process wrote")
    equal(await world.a.journal("run"), [entry(9)], "the journal")


@promise_with("shared", "operators")
async def processes_bring_each_restored_run_one_input(world: FullWorld) -> None:
    """When several processes bring restored runs different inputs at once, each run takes that of one process."""
    for n in range(20):
        await world.a.restore(lacking(f"run-{n:02}"), [entry(1)], now=NOW)
    names = ("one", "two", "three")
    answers = await in_processes(world, *(partial(bring_inputs, name=name) for name in names))
    taken = [names[column.index(True)].encode() for column in zip(*answers, strict=True)]
    equal([sum(column) for column in zip(*answers, strict=True)], [1] * 20, "how many processes brought each run its input")
    equal([(await world.row(f"run-{n:02}")).input for n in range(20)], taken, "the inputs")


@promise_with("shared", "operators")
async def processes_restore_one_run_whole(world: FullWorld) -> None:
    """When several processes restore one run at once, row, journal and inbox are those of one of them."""
    await in_processes(world, *(partial(restore_often, name=name) for name in ("one", "two", "three")))
    name = (await world.row()).input
    equal([line.payload for line in await world.b.journal("run")], [name] * 3, "the journal")
    equal([row.name.encode() for row in await world.b.inbox("run")], [name] * 3, "the inbox")


@promise_with("shared")
async def what_a_killed_process_recorded_is_there(world: World) -> None:
    """A record that was acknowledged survives the sudden death of the process that made it."""
    lease = await world.lease()
    with refused(BrokenProcessPool, "the job of a process that kills itself"):
        await in_processes(world, partial(record_and_die, lease=lease))
    equal(await world.a.journal("run"), [entry(1)], "the journal")
    equal((await world.take()).journal, [entry(1)], "the journal in the next claim")
