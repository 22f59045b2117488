"""What a worker logs: its start and stop, and how each of its runs begins, waits and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from typing import Any

import pytest

from perdure import Context, PerdureWarning, Retry, Runtime, WaitingFor, step, workflow
from perdure.errors import RunCancelled
from perdure.store import Store
from tests.patience import PATIENCE
from tests.worker.flows import Gate, ask, client, greet, reaches, soon

NAME = f"{socket.gethostname()}/{os.getpid()}"


@step(retry=Retry(attempts=2, wait_initial=0, wait_jitter=0))
async def refuse() -> None:
    raise ValueError("not today")


@workflow
async def refused(ctx: Context) -> None:
    await ctx.step(refuse)


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")


def lines(caplog: pytest.LogCaptureFixture, run_id: str | None = None) -> list[str]:
    """Level and message of each record, of this run or of none, with figures and names left out."""
    found = [record for record in caplog.records if record.name == "perdure" and record.run_id == run_id]  # type: ignore[attr-defined]
    figures = re.compile(r"[0-9.]+ s\b")
    return [f"{record.levelname} {figures.sub('… s', record.message).replace(NAME, 'w')}" for record in found]


async def test_the_worker_and_a_run_that_waits_and_completes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        Runtime(store, [ask], concurrency=7, only_queues=["default"], unload_grace=0) as runtime,
    ):
        run = await runtime.start(ask, id="a1")
        await reaches(store, "a1", "suspended")
        await run.signal("answer", 42)
        assert await run == 42
        await soon(lambda: asyncio.sleep(0, "completed" in caplog.text))
    assert lines(caplog, "a1") == [
        "INFO run 'a1' is claimed",
        "INFO run 'a1' is suspended until a signal, waiting for signal 'answer'",
        "INFO run 'a1' is claimed",
        "INFO run 'a1' is completed, after … s",
    ]
    assert lines(caplog) == [
        f"INFO worker w starts: up to 7 runs at a time, leased for … s, of ask in the queues default, on {store!r}",
        "INFO worker w drains: 0 runs are driven here",
        "INFO worker w has stopped, after … s",
    ]
    fields = [(record.workflow, record.key, record.attempt, record.worker) for record in caplog.records if record.run_id]  # type: ignore[attr-defined]
    assert set(fields) == {("ask", None, 1, NAME)}


async def test_a_cancelled_run_has_not_failed_and_a_failed_one_is_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with asyncio.timeout(PATIENCE), Runtime(store, [gate.flow, refused]) as runtime:
        run = await runtime.start(gate.flow, id="c1")
        await gate.reached.wait()
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run
        with pytest.raises(ValueError, match="not today"):
            await (await runtime.start(refused, id="f1"))
    assert lines(caplog, "c1")[1:] == ["INFO run 'c1' is cancelled, after … s"]
    assert lines(caplog, "f1")[1:] == [
        "WARNING step 'refuse' of run 'f1' failed after 2 attempts: ValueError('not today')",
        "WARNING run 'f1' failed: ValueError('not today')",
    ]
    step_record, run_record = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert (step_record.key, step_record.attempt, step_record.exc_info) == ("refuse", 2, None)  # type: ignore[attr-defined]
    assert run_record.exc_info is not None


async def test_a_drained_run_is_given_back_and_a_lost_one_taken_over(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    async with asyncio.timeout(PATIENCE):
        async with client(store, greet) as other:
            await other.start(greet, "Ada", id="lost")
            assert await store.acquire("lost", 0.001) is not None
        await asyncio.sleep(0.01)
        async with Runtime(store, [gate.flow, greet], drain_after=0.01) as runtime:
            await runtime.start(gate.flow, id="d1")
            await gate.reached.wait()
            await reaches(store, "lost", "completed")
    assert lines(caplog, "d1") == ["INFO run 'd1' is claimed", "INFO run 'd1' is given back"]
    assert "INFO run 'lost' is taken over from a worker that was lost" in lines(caplog, "lost")


async def test_a_slow_store_is_logged_once_a_minute(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.worker.worker.SLOW_CLAIM_SECONDS", -1.0)
    async with asyncio.timeout(PATIENCE), Runtime(store, [greet]) as runtime:
        for _ in range(3):
            await (await runtime.start(greet, "Ada"))
    assert lines(caplog).count("WARNING the store answers slowly: a claim took … s") == 1


async def test_a_store_in_memory_that_was_not_asked_for_is_logged_and_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    with pytest.warns(PerdureWarning, match="is suspended in memory"):
        async with asyncio.timeout(PATIENCE), Runtime(workflows=[ask], unload_grace=0) as runtime:
            assert (await (await runtime.start(ask)).outcome()).waiting_for == (WaitingFor("signal", "answer"),)  # type: ignore[union-attr]
    assert any(line.startswith("WARNING there is no store: run") for line in lines(caplog))


async def test_changed_code_is_logged_and_warned_of(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with client(store) as runtime:
        for argument in (1, 2):

            @workflow(name="changing")
            async def flow(ctx: Context, argument: Any = argument) -> None:
                await ctx.step("double", lambda number: number * 2, argument)
                await ctx.wait_for_signal("go")

            runtime._host.workflows.clear()
            if argument == 1:
                await runtime.run(flow, id="c1")
            else:
                await runtime.signal("c1", "go")
                runtime.register(flow)
                with pytest.warns(PerdureWarning, match="other arguments"):
                    await runtime.resume("c1")
    (line,) = lines(caplog, "c1")
    assert line.startswith("WARNING run 'c1' goes on although its code has changed: ")
