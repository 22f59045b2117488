"""Waiting for a run survives failures of the store: it goes on when the store answers again, on each store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Runtime, workflow
from perdure.errors import PersistenceError, RunNotFound, StoreClosed
from tests.backends.opening import store_at
from tests.backends.registry import BACKENDS, Backend, by_default, on

MEMORY = Backend("memory", "test_memory.py::test_contract", lambda: contextlib.nullcontext("memory://"))
EACH = on(MEMORY, *by_default(BACKENDS.values(), ["same_everywhere"]))
PATIENCE = 60.0
# Not `release`: a run that cannot be given back is driven again only when its lease has expired, and no test waits for that.
FAILING = frozenset({"get", "watch", "record", "suspend", "finish", "acquire", "claim"})


class FailingStore:
    """A store whose verbs fail while it `is_down`; `failures` counts how often."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_down = False
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        return self._failing(verb) if name in FAILING else verb

    def _failing(self, verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_down:
                self.failures += 1
                raise PersistenceError("the store", "it is down")
            return await verb(*args, **kwargs)

        return call

    async def fail_a_few_times(self) -> None:
        """Return when a few verbs more have failed."""
        self.is_down, failures = True, self.failures
        async with asyncio.timeout(PATIENCE):
            while self.failures < failures + 4:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.01)


@workflow
async def ask(ctx: Context) -> Any:
    return await ctx.wait_for_signal("answer")


def warnings_of(caplog: pytest.LogCaptureFixture, run_id: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"waiting for run {run_id!r}" in record.getMessage()]


@EACH
async def test_await_run_goes_on_after_the_store_has_failed(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    async with store_at(dsn) as store, Runtime(store, [ask]) as worker:
        failing: Any = FailingStore(store)
        client = Runtime(failing, [ask], concurrency=0)
        run = await client.start(ask, id="a1")
        waiting = asyncio.ensure_future(run)
        await failing.fail_a_few_times()
        await worker.signal("a1", "answer", 7)
        assert not waiting.done()
        failing.is_down = False
        async with asyncio.timeout(PATIENCE):
            assert await waiting == 7
    assert len(warnings_of(caplog, "a1")) == 1


async def test_many_calls_that_wait_log_one_outage_of_their_store_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    async with store_at("memory://") as store, Runtime(store, [ask]) as worker:
        failing: Any = FailingStore(store)
        client = Runtime(failing, [ask], concurrency=0)
        runs = [await client.start(ask, id=f"a{n}") for n in range(20)]
        waiting = [asyncio.ensure_future(run) for run in runs]
        for _ in range(2):
            await failing.fail_a_few_times()
            await asyncio.sleep(0.3)
            failing.is_down = False
            await asyncio.sleep(0.3)
        for run in runs:
            await worker.signal(run.id, "answer", 7)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*waiting) == [7] * len(runs)
    assert len([record for record in caplog.records if "waiting for run" in record.getMessage()]) == 1


@EACH
async def test_a_run_that_was_started_here_is_driven_on_after_the_store_has_failed(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    async with store_at(dsn) as store:
        failing: Any = FailingStore(store)

        async def step() -> int:
            calls.append(1)
            failing.is_down = len(calls) == 1
            return len(calls)

        @workflow
        async def flow(ctx: Context) -> int:
            return await ctx.step(step)

        calls: list[int] = []
        run = await flow.start(id="f1", store=failing)
        waiting = asyncio.ensure_future(run)
        await failing.fail_a_few_times()
        assert not waiting.done()
        failing.is_down = False
        async with asyncio.timeout(PATIENCE):
            assert await waiting == 2
    assert not [record for record in caplog.records if "no longer driven" in record.getMessage()]


@EACH
async def test_a_failure_that_stays_is_raised(dsn: str) -> None:
    async with store_at(dsn) as store:
        client = Runtime(store, [ask], concurrency=0)
        run, deleted = await client.start(ask, id="a1"), await client.start(ask, id="a2")
        await client.delete("a2")
        with pytest.raises(RunNotFound):
            await deleted
        waiting = asyncio.ensure_future(run)
        await asyncio.sleep(0.05)
        await store.close()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreClosed):
                await waiting


async def test_a_wait_that_outlasts_failures_can_be_cancelled() -> None:
    async with store_at("memory://") as store:
        failing: Any = FailingStore(store)
        run = await Runtime(failing, [ask], concurrency=0).start(ask, id="a1")
        waiting = asyncio.ensure_future(run)
        await failing.fail_a_few_times()
        waiting.cancel()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(asyncio.CancelledError):
                await waiting
