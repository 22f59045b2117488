"""A lease is kept while its run is driven, also when the loop is blocked; and a run that was lost is let go of in time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, workflow
from perdure.errors import LeaseHeld, LeaseLost, PersistenceError
from perdure.model.records import Claim, Lease, Pulse
from perdure.store import Store
from perdure.testing import ManualClock
from tests.patience import PATIENCE
from tests.worker.flows import Gate, client, reaches, soon

TTL = 0.06
# So long that the heartbeat has hardly begun when a test is over.
LONG_TTL = 30.0


class StandingClock:
    """What holders measure their own deadlines with. It stands still, so that a busy machine loses nobody a lease."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def elapsed(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    clock = StandingClock()
    monkeypatch.setattr("perdure.engine.heartbeat.elapsed", clock)
    monkeypatch.setattr("perdure.worker.host.elapsed", clock)
    return clock


def renewals_on(store: Store) -> list[int]:
    """The instants of the renewals that the heartbeat makes on this store from now on."""
    instants: list[int] = []
    make = store.sibling

    def sibling() -> Store:
        handle = make()
        renew = handle.renew

        async def noted(
            leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
        ) -> list[Pulse | None]:
            pulses = await renew(leases, ttl, running_steps=running_steps, now=now)
            instants.append(now or 0)
            return pulses

        handle.renew = noted  # type: ignore[method-assign]
        return handle

    store.sibling = sibling  # type: ignore[method-assign]
    return instants


async def test_a_step_that_blocks_the_loop_keeps_its_lease(store: Store) -> None:
    clock, renewals, rounds = ManualClock(), renewals_on(store), 3
    attempts: list[str] = []
    is_over = threading.Event()

    async def block() -> str:
        until = time.monotonic() + PATIENCE
        for number in range(rounds):
            clock.advance(0.9 * TTL)
            while len(attempts) == number and time.monotonic() < until:
                pass  # not a blocking call that anybody could notice, but the loop stands still
        return "done"

    @workflow
    async def blocking(ctx: Context) -> str:
        return await ctx.step(block)

    async def take() -> str:
        try:
            return repr(await store.acquire("b1", 30, now=clock.now()))
        except LeaseHeld:
            return "held"

    def thief() -> None:
        tried_at = clock.now()
        while len(attempts) < rounds and not is_over.wait(0.001):
            if tried_at < clock.now() and renewals and renewals[-1] == clock.now():
                tried_at = clock.now()
                attempts.append(asyncio.run(take()))

    async with client(store, blocking, clock=clock, lease_ttl=TTL) as runtime:
        thread = threading.Thread(target=thief)
        thread.start()
        try:
            assert await runtime.run(blocking, id="b1") == Ok("done")
        finally:
            is_over.set()
            await asyncio.to_thread(thread.join)
    assert attempts == ["held"] * rounds


async def test_a_lease_is_renewed_as_long_as_a_step_takes(store: Store) -> None:
    clock, renewals, gate = ManualClock(), renewals_on(store), Gate()
    async with client(store, gate.flow, clock=clock, lease_ttl=TTL) as runtime:
        driving = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        for _ in range(5):
            clock.advance(0.9 * TTL)
            await soon(lambda: asyncio.sleep(0, bool(renewals) and renewals[-1] == clock.now()))
            with pytest.raises(LeaseHeld):
                await store.acquire("r1", 30, now=clock.now())
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


async def test_no_step_starts_on_a_lease_whose_time_is_over(store: Store, elapsed: StandingClock) -> None:
    """The loop was blocked, so the heartbeat's notice that the lease is lost has not reached it."""
    calls: list[str] = []
    store.sibling = Unreachable  # type: ignore[assignment, method-assign]

    async def work(label: str) -> None:
        calls.append(label)

    @workflow
    async def two(ctx: Context) -> None:
        await ctx.step("first", work, "first")
        elapsed.seconds += LONG_TTL
        await ctx.step("second", work, "second")

    async with client(store, two, clock=ManualClock(), lease_ttl=LONG_TTL) as runtime:
        with pytest.raises(LeaseLost):
            await runtime.run(two, id="r1")
    assert calls == ["first"]


async def test_no_step_starts_on_a_lease_whose_time_ended_while_the_step_waited_for_a_record(
    store: Store, elapsed: StandingClock
) -> None:
    calls: list[str] = []
    is_recording, may_record, record = asyncio.Event(), asyncio.Event(), store.record
    store.sibling = Unreachable  # type: ignore[assignment, method-assign]

    async def slow_record(*args: Any, **kwargs: Any) -> Pulse:
        is_recording.set()
        await may_record.wait()
        return await record(*args, **kwargs)

    store.record = slow_record  # type: ignore[method-assign]

    async def work() -> None:
        calls.append("work")

    @workflow
    async def limited(ctx: Context) -> None:
        async with ctx.timeout("limit", "1h"):  # its deadline is recorded before the step starts
            await ctx.step(work)

    async with client(store, limited, clock=ManualClock(), lease_ttl=LONG_TTL) as runtime, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(runtime.run(limited, id="r1"))
        await is_recording.wait()
        elapsed.seconds += LONG_TTL
        may_record.set()
        with pytest.raises(LeaseLost):
            await driving
    assert calls == []


async def _stolen(store: Store, run_id: str, clock: ManualClock) -> Claim:
    """The run in the hands of a worker for which its lease has expired."""
    claim = await store.acquire(run_id, 30, now=clock.now() + 3600 * 1_000_000)
    assert claim is not None
    return claim


async def test_the_heartbeat_notices_that_a_lease_is_lost_while_a_step_runs(store: Store) -> None:
    clock, gate = ManualClock(), Gate()
    async with client(store, gate.flow, clock=clock, lease_ttl=TTL) as runtime, asyncio.timeout(PATIENCE):
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

    def __init__(self) -> None:
        self.asked = 0

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> list[Pulse | None]:
        self.asked += 1
        raise PersistenceError("the network", "is down")

    async def close(self) -> None: ...


async def test_a_lease_that_cannot_be_renewed_is_given_up_before_it_expires(store: Store, elapsed: StandingClock) -> None:
    gate, unreachable = Gate(), Unreachable()
    store.sibling = lambda: unreachable  # type: ignore[assignment, method-assign, return-value]
    async with client(store, gate.flow, clock=ManualClock(), lease_ttl=TTL) as runtime, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        elapsed.seconds += 0.8 * TTL
        asked = unreachable.asked
        await soon(lambda: asyncio.sleep(0, unreachable.asked > asked + 2))
        assert not driving.done()
        elapsed.seconds += 0.15 * TTL
        with pytest.raises(LeaseLost):
            await driving
        assert gate.cancelled == 1


async def test_a_worker_says_that_a_lease_was_lost_and_works_on(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    clock, lost, other = ManualClock(), Gate("lost"), Gate("other")
    other.opened.set()
    with caplog.at_level(logging.WARNING, "perdure"):
        async with Runtime(store, [lost.flow, other.flow], clock=clock, lease_ttl=TTL) as runtime, asyncio.timeout(PATIENCE):
            await runtime.start(lost.flow, id="r1")
            await lost.reached.wait()
            await _stolen(store, "r1", clock)
            await soon(lambda: asyncio.sleep(0, bool(caplog.records)))
            await runtime.start(other.flow, id="r2")
            await reaches(store, "r2", "completed")
    assert "the lease on run 'r1'" in caplog.records[0].message
