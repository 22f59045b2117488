"""One heartbeat for all runs on a store, whoever drives them; a new one where its thread is not."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure import stores
from perdure.engine.heartbeat import Heartbeat, HeldLease, heartbeat_of
from perdure.errors import LeaseHeld
from perdure.model.clock import SystemClock
from perdure.store import Store
from perdure.testing.contract.world import new_run

CLOCK = SystemClock()


def test_a_store_has_one_for_each_length_and_clock() -> None:
    store = stores.memory()
    beat = heartbeat_of(store, 30, CLOCK)
    assert heartbeat_of(store, 30, CLOCK) is beat
    others = [heartbeat_of(store, 60, CLOCK), heartbeat_of(store, 30, SystemClock()), heartbeat_of(stores.memory(), 30, CLOCK)]
    assert len({beat, *others}) == 4


def test_it_keeps_no_store_alive() -> None:
    store = stores.memory()
    heartbeat_of(store, 30, CLOCK)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


@dataclass  # whose instances cannot be keys
class Unhashable:
    name: str


class Slotted:  # whose instances take no weak references
    __slots__ = ()


def test_a_store_that_cannot_be_remembered_gets_one_each_time() -> None:
    strange: Any
    for strange in (Unhashable("a"), Slotted()):
        assert heartbeat_of(strange, 30, CLOCK) is not heartbeat_of(strange, 30, CLOCK)


async def hold(store: Store, run_id: str, ttl: float, beat: Heartbeat) -> HeldLease:
    claim = (await store.create(new_run(run_id), ttl=ttl)).claim
    assert claim is not None
    held = HeldLease(claim.lease, ttl, 0.0, lambda _: None, lambda: None)
    beat.hold(held)
    return held


def renewed_in_a_child(store: Store, ttl: float, beat: Heartbeat | None) -> None:
    async def look() -> None:
        await hold(store, "child", ttl, beat or heartbeat_of(store, ttl, CLOCK))
        await asyncio.sleep(3 * ttl)
        try:
            await store.acquire("child", ttl)
        except LeaseHeld:
            return
        raise AssertionError("the lease has expired")

    asyncio.run(look())


@pytest.mark.parametrize("is_known", [False, True], ids=["asked for again", "of a host made before"])
def test_a_forked_child_renews_its_own_leases(tmp_path: Path, is_known: bool) -> None:
    store, ttl = stores.sqlite(tmp_path / "runs.db"), 1.5
    beat = heartbeat_of(store, ttl, CLOCK)
    asyncio.run(hold(store, "parent", ttl, beat))
    child = multiprocessing.get_context("fork").Process(target=renewed_in_a_child, args=(store, ttl, beat if is_known else None))
    child.start()
    child.join()
    assert child.exitcode == 0
    asyncio.run(store.close())
