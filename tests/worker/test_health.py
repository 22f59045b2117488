"""`runtime.health()` says in bounded time whether this process can do its work, and never raises."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, PersistenceError, Runtime, stores, workflow
from perdure.operations import health
from perdure.store import Store
from tests.patience import PATIENCE, turns
from tests.worker.flows import soon

EXAMPLE: Final = Path(__file__).parent.parent.parent / "examples" / "health_probe.py"


@workflow
async def flow(ctx: Context) -> None: ...


async def test_a_client_and_a_worker_are_well(store: Store) -> None:
    client = await Runtime(store, concurrency=0).health()
    assert (client.ok, client.reasons, client.is_working, client.last_claim_at) == (True, (), False, None)
    async with Runtime(store, [flow], concurrency=5) as runtime:

        async def has_claimed() -> bool:
            return (await runtime.health()).last_claim_at is not None

        await soon(has_claimed)
        found = await runtime.health()
        assert (found.ok, found.reasons, found.is_working, found.driven, found.concurrency) == (True, (), True, 0, 5)
        assert found.store_reachable
        assert found.reply_seconds is not None
        assert abs(found.clock_ahead_seconds or 0.0) < PATIENCE
        assert (await asyncio.to_thread(runtime.sync.health)).ok
    closed = await runtime.health()
    assert (closed.ok, closed.store_reachable) == (False, False)
    assert closed.reasons == ("this Runtime was closed", "the worker has stopped")


async def test_a_store_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.memory()
    runtime = Runtime(store)

    async def fail(*_given: Any, **_options: Any) -> None:
        raise PersistenceError("the network", "is down")

    monkeypatch.setattr(store, "claim", fail)
    found = await runtime.health()
    assert (found.ok, found.store_reachable, found.reply_seconds) == (False, False, None)
    assert len(found.reasons) == 1
    assert "is down" in found.reasons[0]


async def test_a_store_that_hangs_is_asked_once_and_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = stores.memory(), 0

    async def hang(*_given: Any, **_options: Any) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "claim", hang)
    runtime = Runtime(store)
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            assert (await runtime.health("20ms")).reasons == ("the store did not reply within 0.02 s",)
    assert asked == 1
    await runtime.close()


async def test_a_worker_that_drains_is_not_ready(store: Store) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await go_on.wait()

    @workflow
    async def busy(ctx: Context) -> None:
        await ctx.step(work)

    runtime = Runtime(store, [busy])
    async with asyncio.timeout(PATIENCE):
        working = asyncio.create_task(runtime.work())
        await runtime.start(busy)
        await started.wait()
        assert (await runtime.health()).driven == 1
        working.cancel()
        await turns()
        assert (await runtime.health()).reasons == ("the worker drains",)
        go_on.set()
        await asyncio.wait([working])
        assert (await runtime.health()).reasons == ("the worker has stopped",)
    await runtime.close()


async def test_a_worker_that_cannot_claim_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    store, claim = stores.memory(), stores.memory().claim

    async def fail(limit: int, *given: Any, **options: Any) -> Any:
        if limit:
            raise PersistenceError("the network", "is down")
        return await claim(limit, *given, **options)

    async with Runtime(store, [flow]) as runtime:
        assert (await runtime.health()).ok
        monkeypatch.setattr(store, "claim", fail)
        monkeypatch.setattr(health, "CLAIMS_WITHIN", 0.05)

        async def is_stuck() -> bool:
            found = await runtime.health()
            return not found.ok and found.store_reachable and "has not claimed" in found.reasons[0]

        async with asyncio.timeout(PATIENCE):
            await soon(is_stuck)


async def test_the_example_answers_probes() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", str(EXAMPLE), stdout=subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        printed, _ = await process.communicate()
    assert printed.decode().splitlines() == [
        '200 {"ok": true, "reasons": []}',
        '503 {"ok": false, "reasons": ["this Runtime was closed", "the worker has stopped"]}',
    ]
