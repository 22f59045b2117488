"""The jobs of the processes of this suite. The arguments of each begin with the pipe to the test and the DSN of a store."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from perdure import Context, Runtime, workflow
from perdure.errors import LeaseHeld, LeaseLost, PerdureError, PersistenceError, RunConflict
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease
from perdure.store import FullStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.ledger import Ledger, lines_of, order_of
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

T = TypeVar("T")


async def create_leased(store: FullStore, run_id: str, ttl: float) -> Lease:
    claim = (await store.create(new_run(run_id), ttl=ttl)).claim
    assert claim is not None
    return claim.lease


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def stopped_holder(parent: ParentPipe, dsn: str, ttl: float) -> None:
    """Stop while it holds a lease; when resumed, call every verb that takes a lease and report the result of each."""
    async with store_at(dsn) as store:
        lease = await create_leased(store, "run", ttl)
        parent.send("stopping")
        stop_this_process()
        parent.send({verb: await _result_of(attempt) for verb, attempt in _writes(store, lease).items()})


def _writes(store: FullStore, lease: Lease) -> dict[str, Awaitable[object]]:
    late = entry(1, "late")
    attempts: dict[str, Awaitable[object]] = {
        "record": store.record(lease, [late]),
        "record items=": store.record(lease, items=[Item(stream="log", n=0, payload=b"late")]),
        "record consume=": store.record(lease, consume=[1]),
        "suspend": store.suspend(lease, wake_at=None, entries=[late]),
        "finish": store.finish(lease, "failed", b"null", entries=[late]),
        "report": store.report(lease, b"late"),
        "release": store.release(lease),
        "renew": store.renew([lease], 30),
    }
    if "transaction" in store.capabilities:
        attempts["transaction"] = _in_a_transaction(store, lease, late)
    return attempts


async def _in_a_transaction(store: FullStore, lease: Lease, late: Entry) -> None:
    async with store.transaction(lease) as transaction:
        await transaction.record([late])


async def _result_of(attempt: Awaitable[object]) -> str:
    try:
        return repr(await attempt)
    except PerdureError as error:
        return type(error).__name__


class HolderReport(NamedTuple):
    """The writes of a holder that were acknowledged, and the error that ended them."""

    acknowledged: list[int]
    ended_by: str


async def busy_holder(parent: ParentPipe, dsn: str, ttl: float) -> None:
    """Lease the runs that the test names, write to all of them until each lease is lost, and report the writes."""
    async with store_at(dsn) as store:
        while run_ids := await parent.receive():
            leases = [await create_leased(store, run_id, ttl) for run_id in run_ids]
            parent.send("busy")
            parent.send(await asyncio.gather(*(_write_until_lost(store, lease) for lease in leases)))


async def _write_until_lost(store: FullStore, lease: Lease) -> HolderReport:
    acknowledged: list[int] = []
    pace, give_up_at = random.Random(lease.token), time.monotonic() + 45
    while time.monotonic() < give_up_at:
        seq = len(acknowledged) + 1
        try:
            await store.record(lease, [entry(seq, payload=lease.token.encode())])
        except PerdureError as error:
            return HolderReport(acknowledged, type(error).__name__)
        acknowledged.append(seq)
        await asyncio.sleep(pace.choice([0, 0, 0, 0.002]))
    return HolderReport(acknowledged, "nothing")


class StartReport(NamedTuple):
    """What `create` returned: whether the run is new, whether it was leased here, and the seed and input in the store."""

    is_new: bool
    is_leased: bool
    seed: bytes
    input: bytes


async def start_together(parent: ParentPipe, dsn: str, barrier: Barrier, me: int, ids: Sequence[str]) -> None:
    """Create each run at the same moment as other processes, and report the results. An id with `!` at its end has two inputs."""
    async with store_at(dsn) as store:
        await store.setup()
        for run_id in ids:
            run_input = b"%d" % (me % 2) if run_id.endswith("!") else b"0"
            run = new_run(run_id, input=run_input, input_hash=run_input, seed=b"seed of %d" % me)
            await asyncio.to_thread(barrier.wait)
            parent.send(await _create(store, run))


async def _create(store: FullStore, run: Any) -> StartReport | None:
    try:
        created = await store.create(run, ttl=600)
    except RunConflict:
        return None
    return StartReport(created.is_new, created.claim is not None, created.run.seed, created.run.input)


async def set_up_together(parent: ParentPipe, dsn: str, barrier: Barrier, me: int, killed_after: float | None) -> None:
    """Set up and use the store at the same moment as the other processes, or be killed `killed_after` seconds later."""
    async with store_at(dsn) as store:
        await asyncio.to_thread(barrier.wait)
        if killed_after is not None:
            asyncio.get_running_loop().call_later(killed_after, os.kill, os.getpid(), signal.SIGKILL)
        await store.setup()
        lease = await create_leased(store, f"run-{me}", 600)
        for seq in range(1, 4):
            await store.record(lease, [entry(seq)])
        await store.finish(lease, "completed", b"1")
        parent.send("done")


async def first() -> str:
    stop_this_process()
    return "from the stopped worker"


async def second(value: str) -> str:
    return f"{value}, again"


@workflow(name="two steps")
async def two_steps(ctx: Context[Any]) -> str:
    return await ctx.step(second, await ctx.step(first))


async def stopped_worker(parent: ParentPipe, dsn: str, ttl: float) -> None:
    """Drive a run whose first step stops the whole process, and report how the drive ended."""
    async with store_at(dsn) as store:
        await store.setup()
        runtime = Runtime(store, lease_ttl=ttl, concurrency=0)
        parent.send("stopping")
        try:
            parent.send(repr(await runtime.run(two_steps, id="run")))
        except LeaseLost:
            parent.send("LeaseLost")
        await runtime.close()


async def worker(parent: ParentPipe, dsn: str, path: Path, generation: int, ttl: float, begins: int) -> None:
    """Start some runs and drive all runs until killed; after a message, wait for the end of each and report its id."""
    async with store_at(dsn) as store:
        order = order_of(Ledger(path, generation), lambda: runtime)
        async with Runtime(store, [order], lease_ttl=ttl, unload_grace="10ms", max_attempts=1000) as runtime:
            parent.send("ready")
            for n in range(begins):
                await runtime.start(order, n, [], id=f"{generation}-{n}")
            await parent.receive()
            for line in await runtime.list(limit=10_000):
                run = await runtime.get(line.id)
                assert run is not None
                await run
                parent.send(run.id)
        parent.send("done")


async def _repeat(call: Callable[[], Awaitable[T]]) -> T:
    """The result of the call, repeated while the store is unreachable or a killed process still holds the lease."""
    while True:
        try:
            return await call()
        except (PersistenceError, LeaseHeld):
            await asyncio.sleep(0.02)


async def serve(parent: ParentPipe, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Drive the runs that are due, until a message of the test."""
    async with store_at(dsn) as store:
        order = order_of(Ledger(path, generation), lambda: runtime)
        runtime = Runtime(store, [order], lease_ttl=ttl, unload_grace="10ms", max_attempts=1000)
        await _repeat(store.setup)
        working = asyncio.create_task(runtime.work())
        parent.send("ready")
        await asyncio.wait([working, asyncio.create_task(parent.receive())], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled(), f"the worker ended by itself: {working.exception()!r}"
        await runtime.close()


async def order_more(parent: ParentPipe, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Start runs and signal them one after the other, until a message of the test. Each call that returned is in the ledger.

    Only a few runs are in progress at a time, fewer on a slow store: they are at all stages, and soon end after the last start.
    """
    at_once = max(2, int(16 / ttl))
    done = [line.run for line in lines_of(path) if line.step == "signalled"]
    ledger = Ledger(path, generation)
    async with store_at(dsn) as store:
        runtime = Runtime(store, concurrency=0)
        order = order_of(ledger, lambda: runtime)
        parent.send("ready")
        stop = asyncio.create_task(parent.receive())
        for number in range(len(done), 1_000_000):
            run_id = f"order-{number}"
            await _repeat(lambda: runtime.start(order, number, ["hurry"], id=run_id))  # noqa: B023 - called before they change
            ledger.note("-", run_id, "started")
            await _repeat(lambda: runtime.signal(run_id, "hurry", f"hurry {number}", dedupe="once"))  # noqa: B023
            ledger.note("-", run_id, "signalled")
            while not stop.done() and await _repeat(lambda: _is_in_progress(store, f"order-{number - at_once}")):  # noqa: B023
                await asyncio.wait([stop], timeout=ttl / 16)
            if stop.done():
                break
        await runtime.close()


async def _is_in_progress(store: FullStore, run_id: str) -> bool:
    row = await store.get(run_id)
    return row is not None and not row.ended


async def record_more(parent: ParentPipe, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Record in one run until a message of the test. Each record that returned is in the ledger."""
    ledger = Ledger(path, generation)
    async with store_at(dsn) as store:
        await _repeat(lambda: store.create(new_run("records", workflow="not registered")))
        claim = await _repeat(lambda: store.acquire("records", ttl))  # no worker claims it, so the lease may expire
        assert claim is not None
        parent.send("ready")
        stop = asyncio.create_task(parent.receive())
        for seq in range(len(claim.journal) + 1, 1_000_000):
            await _repeat(lambda: store.record(claim.lease, [entry(seq)]))  # noqa: B023
            ledger.note("-", "records", str(seq))
            if stop.done():
                break
        await store.release(claim.lease)


async def _end_the_process() -> None:
    os._exit(1)


@workflow
async def endangered(ctx: Context, is_culprit: bool) -> str:
    if is_culprit:
        await ctx.step(_end_the_process)
    await ctx.step(asyncio.sleep, 0.05)
    return "done"


async def endangered_worker(parent: ParentPipe, dsn: str, lease_ttl: float, max_attempts: int) -> None:
    """Drive many runs at a time until all have ended; one of them ends this process."""
    async with (
        store_at(dsn) as store,
        Runtime(store, workflows=[endangered], concurrency=100, lease_ttl=lease_ttl, max_attempts=max_attempts),
    ):
        parent.send("working")
        while not {line.status for line in await store.list()} <= {"completed", "dead"}:
            await store.watch(0.1)
    parent.send("done")


async def send_signals(parent: ParentPipe, dsn: str, name: str, *run_ids: str) -> None:
    """Send this signal to these runs when the test says so, and say when the store has accepted it."""
    async with store_at(dsn) as store:
        await store.setup()
        parent.send("ready")
        await parent.receive()
        for run_id in run_ids:
            await store.signal(run_id, name, b'"sent"')
        parent.send("accepted")


HANGING_DEADLINE: Final = 0.8
# How often the step of `hangs` was called in this process.
hang_calls: list[str] = []


@workflow
async def hangs(ctx: Context) -> None:
    async def hang() -> None:
        hang_calls.append(ctx.run_id)
        ctx.set_progress("hanging")
        await asyncio.sleep(3600)

    await ctx.step(hang)


async def hanging_worker(parent: ParentPipe, dsn: str, lease_ttl: float) -> None:
    """Drive a run with a short deadline; report when its step runs for ever and its progress is stored."""
    async with store_at(dsn) as store, Runtime(store, [hangs], lease_ttl=lease_ttl) as runtime:
        run = await runtime.start(hangs, id="run", deadline=HANGING_DEADLINE)
        while await run.progress() is None:  # noqa: ASYNC110 - another task writes it
            await asyncio.sleep(0.01)
        parent.send("the step is running")
        await asyncio.sleep(3600)
