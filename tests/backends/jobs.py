"""What the processes of this suite do. Each job is given its voice, the DSN, and what else it needs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from perdure import Context, Runtime, workflow
from perdure.errors import LeaseHeld, LeaseLost, PerdureError, PersistenceError, RunConflict
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease
from perdure.store import FullStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.ledger import Ledger, lines_of, order_of
from tests.backends.opening import opened
from tests.backends.processes import Voice

T = TypeVar("T")


async def leased(store: FullStore, run_id: str, ttl: float) -> Lease:
    claim = (await store.create(new_run(run_id), ttl=ttl)).claim
    assert claim is not None
    return claim.lease


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def stopped_holder(voice: Voice, dsn: str, ttl: float) -> None:
    """Stop with a lease in hand; afterwards try every verb that takes one, and say what each came to."""
    async with opened(dsn) as store:
        lease = await leased(store, "run", ttl)
        voice.say("stopping")
        stop_this_process()
        voice.say({verb: await _came_to(attempt) for verb, attempt in _writes(store, lease).items()})


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


async def _came_to(attempt: Awaitable[object]) -> str:
    try:
        return repr(await attempt)
    except PerdureError as error:
        return type(error).__name__


class Held(NamedTuple):
    """What a holder was told of its writes until one failed, and how that failed."""

    acknowledged: list[int]
    ended_by: str


async def busy_holder(voice: Voice, dsn: str, ttl: float) -> None:
    """Lease the runs it is told, write to all of them as fast as it can until each is lost, and say what came of it."""
    async with opened(dsn) as store:
        while run_ids := await voice.heard():
            leases = [await leased(store, run_id, ttl) for run_id in run_ids]
            voice.say("busy")
            voice.say(await asyncio.gather(*(_write_until_lost(store, lease) for lease in leases)))


async def _write_until_lost(store: FullStore, lease: Lease) -> Held:
    acknowledged: list[int] = []
    pace, give_up_at = random.Random(lease.token), time.monotonic() + 45
    while time.monotonic() < give_up_at:
        seq = len(acknowledged) + 1
        try:
            await store.record(lease, [entry(seq, payload=lease.token.encode())])
        except PerdureError as error:
            return Held(acknowledged, type(error).__name__)
        acknowledged.append(seq)
        await asyncio.sleep(pace.choice([0, 0, 0, 0.002]))
    return Held(acknowledged, "nothing")


class Start(NamedTuple):
    """What a process that started a run was given: whether it is new, who holds it, and the seed that is in the store."""

    is_new: bool
    is_leased: bool
    seed: bytes
    input: bytes


async def start_together(voice: Voice, dsn: str, barrier: Barrier, me: int, ids: Sequence[str]) -> None:
    """Start each run at the same moment as all the others, and say what each came to. An id that ends in `!` has two inputs."""
    async with opened(dsn) as store:
        await store.setup()
        for run_id in ids:
            given = b"%d" % (me % 2) if run_id.endswith("!") else b"0"
            run = new_run(run_id, input=given, input_hash=given, seed=b"seed of %d" % me)
            await asyncio.to_thread(barrier.wait)
            voice.say(await _started(store, run))


async def _started(store: FullStore, run: Any) -> Start | None:
    try:
        created = await store.create(run, ttl=600)
    except RunConflict:
        return None
    return Start(created.is_new, created.claim is not None, created.run.seed, created.run.input)


async def set_up_together(voice: Voice, dsn: str, barrier: Barrier, me: int, killed_after: float | None) -> None:
    """Set up the place at the same moment as all the others and use it, or be killed so many seconds after that moment."""
    async with opened(dsn) as store:
        await asyncio.to_thread(barrier.wait)
        if killed_after is not None:
            asyncio.get_running_loop().call_later(killed_after, os.kill, os.getpid(), signal.SIGKILL)
        await store.setup()
        lease = await leased(store, f"run-{me}", 600)
        for seq in range(1, 4):
            await store.record(lease, [entry(seq)])
        await store.finish(lease, "completed", b"1")
        voice.say("done")


async def first() -> str:
    stop_this_process()
    return "from the stopped worker"


async def second(value: str) -> str:
    return f"{value}, again"


@workflow(name="two steps")
async def two_steps(ctx: Context[Any]) -> str:
    return await ctx.step(second, await ctx.step(first))


async def stopped_worker(voice: Voice, dsn: str, ttl: float) -> None:
    """Drive a run whose first step stops the whole process, and say what became of the drive."""
    async with opened(dsn) as store:
        await store.setup()
        runtime = Runtime(store, lease_ttl=ttl, concurrency=0)
        voice.say("stopping")
        try:
            voice.say(repr(await runtime.run(two_steps, id="run")))
        except LeaseLost:
            voice.say("LeaseLost")
        await runtime.close()


async def worker(voice: Voice, dsn: str, path: Path, generation: int, ttl: float, begins: int) -> None:
    """Begin some runs and drive all there are until killed; when told to, until they have ended, saying each that has."""
    async with opened(dsn) as store:
        order = order_of(Ledger(path, generation), lambda: runtime)
        async with Runtime(store, [order], lease_ttl=ttl, unload_grace="10ms", max_attempts=1000) as runtime:
            voice.say("ready")
            for n in range(begins):
                await runtime.start(order, n, [], id=f"{generation}-{n}")
            await voice.heard()
            for line in await runtime.list(limit=10_000):
                run = await runtime.get(line.id)
                assert run is not None
                await run
                voice.say(run.id)
        voice.say("done")


async def _insist(call: Callable[[], Awaitable[T]]) -> T:
    """What the call gives, asked for until the store answers, and whoever was killed before holds nothing any more."""
    while True:
        try:
            return await call()
        except (PersistenceError, LeaseHeld):
            await asyncio.sleep(0.02)


async def serve(voice: Voice, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Drive whatever is due until told to stop."""
    async with opened(dsn) as store:
        order = order_of(Ledger(path, generation), lambda: runtime)
        runtime = Runtime(store, [order], lease_ttl=ttl, unload_grace="10ms", max_attempts=1000)
        await _insist(store.setup)
        working = asyncio.create_task(runtime.work())
        voice.say("ready")
        await asyncio.wait([working, asyncio.create_task(voice.heard())], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled(), f"the worker ended by itself: {working.exception()!r}"
        await runtime.close()


async def order_more(voice: Voice, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Start runs and signal them, one after the other, noting each call that returned, until told to stop.

    Only some are under way at a time, fewer on a slow store, so that runs are at all stages and soon over in the end.
    """
    at_once = max(2, int(16 / ttl))
    done = [line.run for line in lines_of(path) if line.step == "signalled"]
    ledger = Ledger(path, generation)
    async with opened(dsn) as store:
        runtime = Runtime(store, concurrency=0)
        order = order_of(ledger, lambda: runtime)
        voice.say("ready")
        stop = asyncio.create_task(voice.heard())
        for number in range(len(done), 1_000_000):
            run_id = f"order-{number}"
            await _insist(lambda: runtime.start(order, number, ["hurry"], id=run_id))  # noqa: B023 - called before they change
            ledger.note("-", run_id, "started")
            await _insist(lambda: runtime.signal(run_id, "hurry", f"hurry {number}", dedupe="once"))  # noqa: B023
            ledger.note("-", run_id, "signalled")
            while not stop.done() and await _insist(lambda: _is_under_way(store, f"order-{number - at_once}")):  # noqa: B023
                await asyncio.wait([stop], timeout=ttl / 16)
            if stop.done():
                break
        await runtime.close()


async def _is_under_way(store: FullStore, run_id: str) -> bool:
    row = await store.get(run_id)
    return row is not None and not row.ended


async def record_more(voice: Voice, dsn: str, path: Path, generation: int, ttl: float) -> None:
    """Record in one run without end, noting each record that returned, until told to stop."""
    ledger = Ledger(path, generation)
    async with opened(dsn) as store:
        await _insist(lambda: store.create(new_run("records", workflow="nobody's")))
        claim = await _insist(lambda: store.acquire("records", ttl))  # nobody else takes it, so it is good for longer
        assert claim is not None
        voice.say("ready")
        stop = asyncio.create_task(voice.heard())
        for seq in range(len(claim.journal) + 1, 1_000_000):
            await _insist(lambda: store.record(claim.lease, [entry(seq)]))  # noqa: B023
            ledger.note("-", "records", str(seq))
            if stop.done():
                break
        await store.release(claim.lease)
