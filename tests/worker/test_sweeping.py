"""`sweep` resumes what is due, once, and one run's trouble is no other's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure import Context, Err, Ok, Suspended, WaitingFor, workflow
from perdure.errors import PersistenceError
from perdure.model.durations import moment
from perdure.model.journal import Entry
from perdure.model.records import Lease
from perdure.store import Store
from perdure.testing import ManualClock
from tests.worker.flows import Gate, ask, client, greet, nap, taken


async def test_sweep_with_nothing_due_gives_nothing(store: Store) -> None:
    async with client(store, nap, unload_grace=0) as runtime:
        assert await runtime.sweep() == {}
        await runtime.run(nap, id="n1")
        assert await runtime.sweep() == {}


async def test_sweep_gives_the_outcome_of_each_run(store: Store) -> None:
    @workflow
    async def fails(ctx: Context) -> None:
        raise ValueError("no")

    async with client(store, greet, ask, fails, unload_grace=0) as runtime:
        await runtime.start(greet, "Ada", id="g1")
        await runtime.start(ask, id="a1")
        await runtime.start(fails, id="f1")
        outcomes = await runtime.sweep()
        assert outcomes.keys() == {"g1", "a1", "f1"}
        assert outcomes["g1"] == Ok("hello Ada!")
        assert outcomes["a1"] == Suspended("a1", None, (WaitingFor("signal", "answer"),))
        assert isinstance(outcomes["f1"], Err)
        assert str(outcomes["f1"].error) == "no"
        assert await runtime.sweep() == {}


async def test_a_run_that_cannot_be_driven_is_an_err_and_holds_up_no_other(store: Store) -> None:
    async with client(store, greet) as runtime:
        for number in range(3):
            await runtime.start(greet, "Ada", id=f"g{number}")
        finish = store.finish

        async def broken(lease: Lease, *args: Any, entries: Sequence[Entry] = (), **kwargs: Any) -> None:
            if lease.run_id == "g1":
                raise PersistenceError("the disk", "is full")
            await finish(lease, *args, entries=entries, **kwargs)

        store.finish = broken  # type: ignore[method-assign]
        outcomes = await runtime.sweep()
        assert outcomes["g0"] == outcomes["g2"] == Ok("hello Ada!")
        assert isinstance(outcomes["g1"], Err)
        assert isinstance(outcomes["g1"].error, PersistenceError)


async def test_sweep_resumes_at_most_limit_runs(store: Store) -> None:
    async with client(store, greet) as runtime:
        for number in range(5):
            await runtime.start(greet, "Ada", id=f"g{number}")
        assert len(await runtime.sweep(limit=2)) == 2
        assert len(await runtime.sweep(limit=100)) == 3


async def test_sweep_can_be_told_what_time_it_is(store: Store) -> None:
    async with client(store, nap, unload_grace=0) as runtime:
        outcome = await runtime.run(nap, id="n1")
        assert isinstance(outcome, Suspended)
        assert outcome.wake_at is not None
        assert await runtime.sweep(now=moment(int(outcome.wake_at.timestamp() * 1_000_000) - 1_000_000)) == {}
        assert await runtime.sweep(now=outcome.wake_at) == {"n1": Ok("awake")}


async def test_sweep_refuses_a_time_without_a_zone(store: Store) -> None:
    async with client(store) as runtime:
        with pytest.raises(ValueError, match=r"now .* has no time zone"):
            await runtime.sweep(now=datetime(2026, 1, 1))  # noqa: DTZ001 - the very thing that is refused
        with pytest.raises(TypeError, match="now must be a datetime"):
            await runtime.sweep(now="now")  # type: ignore[arg-type]
        assert await runtime.sweep(now=datetime(2026, 1, 1, tzinfo=UTC)) == {}


async def test_sweep_skips_what_another_worker_drives_and_what_is_not_registered(store: Store) -> None:
    gate = Gate()
    async with client(store, greet, gate.flow) as runtime:
        await taken(store, runtime, gate.flow, run_id="r1")
        await runtime.start(greet, "Ada", id="g1")
        async with client(store, gate.flow) as other:
            assert await other.sweep() == {}
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}


async def test_sweep_takes_over_a_run_whose_lease_has_expired(store: Store) -> None:
    clock = ManualClock()
    async with client(store, greet, clock=clock) as runtime:
        await runtime.start(greet, "Ada", id="g1")
        assert await store.acquire("g1", 30, now=clock.now()) is not None
        assert await runtime.sweep() == {}
        clock.advance("31s")
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}


async def test_the_runs_of_one_sweep_go_side_by_side(store: Store) -> None:
    together = asyncio.Barrier(3)

    @workflow
    async def meet(ctx: Context) -> int:
        async def arrive() -> int:
            return await together.wait()

        return await ctx.step("arrive", arrive)

    async with client(store, meet) as runtime:
        for number in range(3):
            await runtime.start(meet, id=f"m{number}")
        assert len(await runtime.sweep()) == 3


async def test_a_cancelled_sweep_gives_its_runs_back(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow) as runtime:
        await runtime.start(gate.flow, id="r1")
        sweeping = asyncio.ensure_future(runtime.sweep())
        await gate.reached.wait()
        sweeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sweeping
        assert gate.cancelled == 1
        gate.opened.set()
        assert await runtime.sweep() == {"r1": Ok("through")}


async def test_plain_steps_of_a_client_do_not_wait_for_each_other(store: Store) -> None:
    together = threading.Barrier(3)

    @workflow
    async def meet(ctx: Context) -> int:
        return await ctx.step("arrive", together.wait, 5)

    async with client(store, meet) as runtime:
        for number in range(3):
            await runtime.start(meet, id=f"m{number}")
        outcomes = await runtime.sweep()
        assert sorted(outcome.unwrap() for outcome in outcomes.values()) == [0, 1, 2]
