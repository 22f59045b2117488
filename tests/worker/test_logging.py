"""What a worker logs: its start and stop, and how each of its runs begins, waits and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import traceback
from typing import Any

import msgspec
import pytest

from perdure import Context, Err, Ok, PerdureWarning, Retry, Runtime, WaitingFor, Workflow, step, workflow
from perdure.errors import RunCancelled
from perdure.model.durations import MAX_INSTANT
from perdure.store import Store, require
from perdure.testing.contract.world import new_run
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
    assert lines(caplog, "f1")[2:] == [
        "WARNING step 'refuse' of run 'f1' failed after 2 attempts: ValueError('not today')",
        "WARNING run 'f1' failed: ValueError('not today')",
    ]
    _, step_record, run_record = (record for record in caplog.records if record.levelno == logging.WARNING)
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
    assert line.startswith(
        "WARNING the code of workflow 'changing' has changed, and its runs go on, such as 'c1': run 'c1' recorded"
    )


async def test_changed_code_is_said_once_for_all_runs_of_a_workflow_and_for_each_reason(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def changing(*arguments: int) -> Workflow[[], None]:
        async def body(ctx: Context) -> None:
            for key, argument in zip(("first", "second"), arguments, strict=False):
                await ctx.step(key, lambda number: number, argument, key=f"{key} of {ctx.run_id}")
            await ctx.wait_for_signal("go")

        return Workflow("changing", body)

    ids = [f"c{n}" for n in range(5)]
    async with client(store, changing(1, 1)) as runtime:
        for run_id in ids:
            await runtime.run("changing", id=run_id)
            await runtime.signal(run_id, "go")
    async with client(store, changing(2, 2)) as runtime:
        with pytest.warns(PerdureWarning) as warned:
            assert list((await runtime.sweep()).values()) == [Ok(None)] * 5
    first, second = (record for record in caplog.records if "has changed" in record.message)
    assert {record.run_id for record in (first, second)} == {"c0"}  # type: ignore[attr-defined]
    assert ("'first of c0'" in first.message, "'second of c0'" in second.message) == (True, True)
    assert len(warned) == 2


async def test_a_failed_attempt_is_logged_with_its_pause_and_its_traceback_for_those_who_ask(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "perdure")
    async with asyncio.timeout(PATIENCE), Runtime(store, [refused]) as runtime:
        await (await runtime.start(refused, id="f1")).outcome()
    line = refuse.__code__.co_firstlineno + 2
    shown, told, *_ = (record for record in caplog.records if record.levelno in (logging.WARNING, logging.DEBUG))
    assert shown.getMessage() == (
        "step 'refuse' of run 'f1' of workflow 'refused' failed in attempt 1, and is tried again in 0.0 s: "
        f"ValueError: not today (test_logging.py:{line})"
    )
    assert (told.levelname, told.getMessage()) == ("DEBUG", "attempt 1 of step 'refuse' of run 'f1':")
    for record in (shown, told):
        assert (record.run_id, record.workflow, record.key, record.attempt) == ("f1", "refused", "refuse", 1)  # type: ignore[attr-defined]
    assert shown.exc_info is None
    assert told.exc_info is not None
    assert [frame.filename for frame in traceback.extract_tb(told.exc_info[2])] == [__file__]


async def test_tracebacks_begin_in_the_users_code(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    @workflow
    async def failing(ctx: Context, where: str) -> None:
        if where == "body":
            await fail()
        await ctx.step(fail if where == "async step" else lambda: int("x"))

    async def fail() -> None:
        int("x")

    async with asyncio.timeout(PATIENCE), Runtime(store, [failing]) as runtime:
        for where in ("body", "async step", "plain step"):
            outcome = await runtime.run(failing, where, id=where)
            assert isinstance(outcome, Err)
            await (await runtime.start(failing, where, id=f"{where} by a worker")).outcome()
            row = await store.get(where)
            assert row is not None
            assert row.outcome is not None
            text = msgspec.json.decode(row.outcome)["error"]["traceback"]
            assert text.splitlines()[1].startswith(f'  File "{__file__}", line ')
    records = [record for record in caplog.records if record.exc_info is not None]
    assert [record.run_id for record in records] == [f"{each} by a worker" for each in ("body", "async step", "plain step")]  # type: ignore[attr-defined]
    for record in records:
        shown = logging.Formatter().format(record).splitlines()
        assert shown[1:3] == ["perdure.errors.StepTraceback: ", "Traceback (most recent call last):"]
        assert shown[3].startswith(f'  File "{__file__}", line ')


async def test_a_run_that_was_deleted_while_it_was_driven_was_not_lost_to_another_worker(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with asyncio.timeout(PATIENCE), Runtime(store, [gate.flow]) as runtime:
        for run_id in ("gone", "taken"):
            gate.reached.clear()
            await runtime.start(gate.flow, id=run_id)
            await gate.reached.wait()
        await runtime.delete("gone")
        await require(store, "operators").delete("taken")
        await store.create(new_run("taken", workflow="gated", start_at=MAX_INSTANT))  # as if it had been taken over
        gate.opened.set()
        await soon(lambda: asyncio.sleep(0, caplog.text.count("WARNING") == 2))
    assert lines(caplog, "gone")[1:] == ["WARNING run 'gone' was deleted while it was driven here"]
    assert [line.partition(":")[0] for line in lines(caplog, "taken")[1:]] == ["WARNING run 'taken' was lost to another worker"]


async def test_a_compensation_is_named_by_the_step_that_it_undoes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[str] = []

    @step(retry=Retry(attempts=3, wait_initial=0, wait_jitter=0))
    async def refund(_: str | None) -> None:
        attempts.append("refund")
        raise ConnectionError("no route")

    @workflow
    async def order(ctx: Context) -> None:
        await ctx.step("charge", lambda: "paid", compensate=refund)
        raise ValueError("sold out")

    async with asyncio.timeout(PATIENCE), Runtime(store, [order]) as runtime:
        outcome = await (await runtime.start(order, id="o1")).outcome()
    assert isinstance(outcome, Err)
    assert len(attempts) == 3
    assert [line.partition(" failed")[0] for line in lines(caplog, "o1")[1:]] == [
        *["WARNING the compensation of 'charge' of run 'o1' of workflow 'order'"] * 2,
        "WARNING the compensation of 'charge' of run 'o1'",
        "WARNING run 'o1'",
    ]
    assert "%compensate" not in caplog.text
