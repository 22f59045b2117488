"""One run is driven once at a time: calls in one process join, others wait, or are told."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from perdure import Ok, Runtime
from perdure.errors import LeaseHeld, RunConflict
from perdure.store import Store
from perdure.worker.active_runs import active_runs
from tests.patience import PATIENCE, until
from tests.worker.flows import Gate, client, greet, nap, soon, taken


async def test_two_calls_for_one_run_join_one_drive(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow) as runtime:
        calls = [asyncio.ensure_future(runtime.run(gate.flow, id="r1")) for _ in range(5)]
        calls.append(asyncio.ensure_future(gate.flow.run(id="r1", store=store)))
        await gate.reached.wait()
        calls.append(asyncio.ensure_future(runtime.resume("r1")))
        await asyncio.sleep(0.01)
        gate.opened.set()
        assert await asyncio.gather(*calls) == [Ok("through")] * 7
        assert gate.calls == 1


async def test_joining_with_another_input_is_a_conflict(store: Store) -> None:
    async with client(store, greet) as runtime:
        outcomes = await asyncio.gather(
            runtime.run(greet, "Ada", id="g1"), runtime.run(greet, "Eve", id="g1"), return_exceptions=True
        )
        assert sum(isinstance(outcome, RunConflict) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, Ok) for outcome in outcomes) == 1


async def test_a_drive_goes_on_while_one_of_its_callers_is_left(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow) as runtime:
        first = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        second = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))

        async def both_wait() -> bool:
            active = active_runs.find(store, "r1")
            return active is not None and len(active._waiters) == 2

        await soon(both_wait)
        first.cancel()
        await asyncio.wait([first])
        assert gate.cancelled == 0
        gate.opened.set()
        assert await second == Ok("through")
        assert gate.calls == 1


async def test_a_run_whose_last_caller_was_cancelled_is_given_back_at_once(store: Store) -> None:
    gate = Gate()
    async with client(store, gate.flow) as runtime:
        only = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        only.cancel()
        await asyncio.wait([only])
        assert gate.cancelled == 1
        gate.opened.set()
        assert await runtime.run(gate.flow, id="r1") == Ok("through")


async def test_run_waits_for_a_worker_elsewhere_and_gives_its_outcome(store: Store) -> None:
    async with client(store, greet) as runtime:
        claim = await taken(store, runtime, greet, "Ada", run_id="g1")
        waiting = [asyncio.ensure_future(runtime.run(greet, "Ada", id="g1")), asyncio.ensure_future(runtime.resume("g1"))]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in waiting)
        await store.finish(claim.lease, "completed", b'"by another"')
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*waiting) == [Ok("by another")] * 2


async def test_run_goes_on_itself_when_the_worker_elsewhere_gives_the_run_back(store: Store) -> None:
    async with client(store, greet) as runtime:
        claim = await taken(store, runtime, greet, "Ada", run_id="g1")
        waiting = asyncio.ensure_future(runtime.run(greet, "Ada", id="g1"))
        await asyncio.sleep(0.01)
        await store.release(claim.lease)
        async with asyncio.timeout(PATIENCE):
            assert await waiting == Ok("hello Ada!")


async def test_run_with_wait_false_says_that_another_worker_has_it(store: Store) -> None:
    async with client(store, greet) as runtime:
        claim = await taken(store, runtime, greet, "Ada", run_id="g1")
        with pytest.raises(LeaseHeld, match="run 'g1' is held by"):
            await greet.options(id="g1", store=store, wait=False).run("Ada")
        await store.release(claim.lease)
        assert await greet.options(id="g1", store=store, wait=False).run("Ada") == Ok("hello Ada!")


async def test_runtimes_on_two_stores_do_not_join(store: Store) -> None:
    async with client(store, nap, unload_grace=0) as runtime, Runtime("memory:", [nap], concurrency=0, unload_grace=0) as other:
        await runtime.run(nap, id="n1")
        assert await other.get("n1") is None


@pytest.mark.parametrize("call", ["run", "resume", "await"])
async def test_waiting_for_a_run_whose_holder_is_silent_is_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("perdure.aio.store_watch.POLL_SECONDS", 0.02)
    caplog.set_level(logging.INFO, "perdure")
    async with client(store, greet, lease_ttl=0.1) as runtime:
        claim = await taken(store, runtime, greet, "Ada", run_id="g1")
        run = await runtime.get("g1")
        assert run is not None
        calls = {"run": lambda: runtime.run(greet, "Ada", id="g1"), "resume": lambda: runtime.resume("g1"), "await": run.outcome}
        waiting = asyncio.ensure_future(calls[call]())
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        await store.finish(claim.lease, "completed", b'"by another"')
        async with asyncio.timeout(PATIENCE):
            assert await waiting == Ok("by another")
    (record,) = caplog.records
    assert re.fullmatch(r"run 'g1' is leased by \S+ until 20\d\d-\d\d-\d\dT\S+; waiting", record.message)
    assert (record.run_id, record.workflow) == ("g1", "greet")  # type: ignore[attr-defined]
