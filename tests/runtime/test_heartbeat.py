"""A lease is kept while its run is driven, also when the loop is blocked; and a run that was lost is let go of in time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

import pytest

from perdure import Context, Ok, Runtime, workflow
from perdure.errors import LeaseHeld, LeaseLost, PersistenceError, RunNotFound
from perdure.records import Claim, Lease, Pulse
from perdure.store import Store
from perdure.testing import ManualClock
from tests.runtime.flows import PATIENCE, Gate, client, reaches, soon


async def test_a_step_that_blocks_the_loop_keeps_its_lease(store: Store) -> None:
    ttl = 0.5
    attempts: list[str] = []
    is_over = threading.Event()

    async def block() -> str:
        until = time.monotonic() + 2 * ttl
        while time.monotonic() < until:  # not a blocking call that anybody could notice, but the loop stands still
            pass
        return "done"

    @workflow
    async def blocking(ctx: Context) -> str:
        return await ctx.step(block)

    async def take() -> str:
        try:
            return repr(await store.acquire("b1", 30))
        except LeaseHeld:
            return "held"
        except RunNotFound:
            return "not there yet"

    def thief() -> None:
        while not is_over.wait(ttl / 10):
            attempts.append(asyncio.run(take()))

    async with client(store, blocking, lease_ttl=ttl) as runtime:
        thread = threading.Thread(target=thief)
        thread.start()
        try:
            assert await runtime.run(blocking, id="b1") == Ok("done")
        finally:
            is_over.set()
            await asyncio.to_thread(thread.join)
    assert "held" in attempts
    assert set(attempts) <= {"not there yet", "held", "None"}  # None: it has ended


async def test_a_lease_is_renewed_as_long_as_a_step_takes(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow, lease_ttl="200ms") as runtime:
        driving = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        for _ in range(15):
            await asyncio.sleep(0.03)
            with pytest.raises(LeaseHeld):
                await store.acquire("r1", 30)
        gate.opened.set()
        assert await driving == Ok("through")


async def test_a_lost_lease_stops_the_drive_before_its_next_step(store: Store) -> None:
    clock, gate, calls = ManualClock(), Gate(), []

    async def after() -> None:
        calls.append("after")

    @workflow
    async def two(ctx: Context) -> None:
        await ctx.step("gate", gate._wait)
        await ctx.step(after)

    async with client(store, two, clock=clock) as runtime:
        driving = asyncio.ensure_future(runtime.run(two, id="t1"))
        await gate.reached.wait()
        thief = await _stolen(store, "t1", clock)
        gate.opened.set()
        with pytest.raises(LeaseLost, match=r"the lease on run 't1' .* is no longer the current one; nothing was written"):
            await driving
        assert calls == []
        assert await store.journal("t1") == []
        await store.finish(thief.lease, "completed", b"1")  # the thief was not disturbed


async def _stolen(store: Store, run_id: str, clock: ManualClock) -> Claim:
    """The run in the hands of a worker for which its lease has expired."""
    claim = await store.acquire(run_id, 30, now=clock.now() + 3600 * 1_000_000)
    assert claim is not None
    return claim


async def test_the_heartbeat_notices_that_a_lease_is_lost_while_a_step_runs(store: Store) -> None:
    clock, gate = ManualClock(), Gate()
    async with client(store, gate.flow, clock=clock, lease_ttl="300ms") as runtime, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        await _stolen(store, "r1", clock)
        with pytest.raises(LeaseLost):
            await driving
        assert gate.cancelled == 1


async def test_whoever_awaits_a_run_goes_on_waiting_when_another_worker_took_it_over(store: Store) -> None:
    clock, gate = ManualClock(), Gate()
    async with Runtime(store, [gate.flow], clock=clock) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(gate.flow, id="r1")
        await gate.reached.wait()
        waiting = asyncio.ensure_future(run.outcome())
        thief = await _stolen(store, "r1", clock)
        gate.opened.set()
        await asyncio.sleep(0.01)
        await store.finish(thief.lease, "completed", b'"elsewhere"')
        assert await waiting == Ok("elsewhere")


class Unreachable:
    """A store that the heartbeat cannot reach."""

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> list[Pulse | None]:
        raise PersistenceError("the network", "is down")

    async def close(self) -> None: ...


async def test_a_lease_that_cannot_be_renewed_is_given_up_before_it_expires(store: Store) -> None:
    gate = Gate()
    store.sibling = Unreachable  # type: ignore[assignment, method-assign]
    async with client(store, gate.flow, lease_ttl="60ms") as runtime, asyncio.timeout(PATIENCE):
        before = time.monotonic()
        with pytest.raises(LeaseLost):
            await runtime.run(gate.flow, id="r1")
        assert time.monotonic() - before < 1
        assert gate.cancelled == 1


async def test_a_worker_says_that_a_lease_was_lost_and_works_on(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    clock, lost, other = ManualClock(), Gate("lost"), Gate("other")
    other.opened.set()
    with caplog.at_level(logging.WARNING, "perdure"):
        async with Runtime(store, [lost.flow, other.flow], clock=clock, lease_ttl="300ms") as runtime, asyncio.timeout(PATIENCE):
            await runtime.start(lost.flow, id="r1")
            await lost.reached.wait()
            await _stolen(store, "r1", clock)
            await soon(lambda: asyncio.sleep(0, bool(caplog.records)))
            await runtime.start(other.flow, id="r2")
            await reaches(store, "r2", "completed")
    assert "the lease on run 'r1'" in caplog.records[0].message
