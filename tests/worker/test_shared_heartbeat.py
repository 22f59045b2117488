"""One heartbeat for all runs on a store, whoever drives them; a new one where its thread is not."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Runtime, Workflow, stores
from perdure.engine.heartbeat import Heartbeat, HeldLease, _heartbeats, _thread, heartbeat_of
from perdure.model.clock import Clock, SystemClock
from perdure.model.records import Lease
from perdure.store import Store
from perdure.testing import ManualClock
from perdure.testing.contract.world import new_run
from tests.leases import held_lease
from tests.patience import PATIENCE, until

CLOCK = SystemClock()


def test_a_store_has_one_for_each_length() -> None:
    store, other = stores.memory(), stores.memory()
    beat = heartbeat_of(store, 30)
    assert heartbeat_of(store, 30) is beat
    assert len({beat, heartbeat_of(store, 60), heartbeat_of(other, 30)}) == 3


async def nap(ctx: Context[Any]) -> None:
    await ctx.sleep("nap", "1h")


def heartbeats_of(store: Store) -> int:
    return len(_heartbeats._by_store.get(store, ()))


async def heartbeat_tasks() -> int:
    """How many heartbeats beat in their thread."""

    async def count() -> int:
        return sum("Heartbeat._beat" in repr(task.get_coro()) for task in asyncio.all_tasks())

    return await asyncio.wrap_future(_thread.submit(count()))


async def test_sweeps_at_many_instants_share_one() -> None:
    store, flow = stores.memory(), Workflow("nap", nap)
    before, threads = await heartbeat_tasks(), {*threading.enumerate()}
    async with Runtime(store, [flow], concurrency=0, unload_grace=0) as runtime:
        for n in range(100):
            await runtime.run(flow, id=f"run-{n}")
        for n in range(100):
            assert len(await runtime.sweep(now=datetime.now(UTC) + timedelta(hours=2, seconds=n), limit=1)) == 1
        assert heartbeats_of(store) == 1
        assert await heartbeat_tasks() - before <= 1
        assert {*threading.enumerate()} <= threads  # those of earlier tests may end meanwhile


@pytest.mark.one_loop  # asyncio's debug mode keeps the last drive alive, and with it the heartbeat
async def test_many_runtimes_on_one_store_share_one_and_leave_none_behind() -> None:
    store, flow = stores.memory(), Workflow("nap", nap)
    before = await heartbeat_tasks()
    clocks: list[weakref.ref[SystemClock]] = []
    for n in range(100):
        clock = SystemClock()
        clocks.append(weakref.ref(clock))
        async with Runtime(store, [flow], concurrency=0, unload_grace=0, clock=clock, lease_ttl=0.3) as runtime:
            await runtime.run(flow, id=f"run-{n}")
            assert heartbeats_of(store) == 1
    assert await heartbeat_tasks() - before <= 1
    del runtime, clock
    async with asyncio.timeout(PATIENCE):
        while heartbeats_of(store):  # until its task in the other thread has ended
            await asyncio.sleep(0.05)
            gc.collect()
    assert [clock for clock in clocks if clock() is not None] == []


async def test_each_lease_is_renewed_by_the_clock_of_its_holder() -> None:
    store = stores.memory()
    renewals: list[tuple[int | None, list[str]]] = []
    renew = store.renew

    async def noted(
        leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> Any:
        renewals.append((now, [lease.run_id for lease in leases]))
        return await renew(leases, ttl, running_steps=running_steps, now=now)

    store.sibling = lambda: store  # type: ignore[method-assign]
    store.renew = noted  # type: ignore[method-assign]
    manual = ManualClock()
    beat = heartbeat_of(store, 0.3)
    held = [await hold(store, run_id, 0.3, beat, clock) for run_id, clock in (("a", CLOCK), ("b", manual), ("c", SystemClock()))]
    expected = [(None, ["a", "c"]), (manual.store_now(), ["b"])]
    await until(lambda: renewals[-2:] == expected)  # on a busy machine it has renewed the first before it got the last
    for one in held:
        beat.drop(one)
    assert {now for now, ids in renewals if ids == ["b"]} == {manual.store_now()}
    assert not [ids for now, ids in renewals if now is None and "b" in ids]


def test_it_keeps_no_store_alive() -> None:
    store = stores.memory()
    beat = heartbeat_of(store, 30)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert beat is not None


@dataclass  # whose instances cannot be keys
class Unhashable:
    name: str


class Slotted:  # whose instances take no weak references
    __slots__ = ()


def test_a_store_that_cannot_be_remembered_gets_one_each_time() -> None:
    strange: Any
    for strange in (Unhashable("a"), Slotted()):
        assert heartbeat_of(strange, 30) is not heartbeat_of(strange, 30)


async def hold(store: Store, run_id: str, ttl: float, beat: Heartbeat, clock: Clock = CLOCK) -> HeldLease:
    claim = (await store.create(new_run(run_id), ttl=ttl)).claim
    assert claim is not None
    held = held_lease(claim, ttl, 0.0, clock, lambda _: None)
    beat.hold(held)
    return held


def renewed_in_a_child(store: Store, ttl: float, beat: Heartbeat | None) -> None:
    async def look() -> None:
        await hold(store, "child", ttl, beat or heartbeat_of(store, ttl))
        leases: set[int | None] = set()
        async with asyncio.timeout(PATIENCE):
            while len(leases) < 4:
                row = await store.get("child")
                assert row is not None
                leases.add(row.lease_until)
                await asyncio.sleep(0.05)

    asyncio.run(look())


@pytest.mark.parametrize("is_known", [False, True], ids=["asked for again", "of a host made before"])
def test_a_forked_child_renews_its_own_leases(tmp_path: Path, is_known: bool) -> None:
    store, ttl = stores.sqlite(tmp_path / "runs.db"), 2.0
    beat = heartbeat_of(store, ttl)
    asyncio.run(hold(store, "parent", ttl, beat))
    child = multiprocessing.get_context("fork").Process(target=renewed_in_a_child, args=(store, ttl, beat if is_known else None))
    child.start()
    child.join()
    assert child.exitcode == 0
    asyncio.run(store.close())
