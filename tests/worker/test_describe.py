"""`runtime.describe` shows what a run has recorded, what it does now, and which worker has it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from perdure import Context, Retry, RunNotFound, Runtime, workflow
from perdure.model.records import NewRun
from perdure.model.running_steps import encode_running_steps
from perdure.store import Store
from tests.patience import PATIENCE


async def fail() -> None:
    raise ValueError("no")


@workflow
async def waiting(ctx: Context) -> None:
    await ctx.step("one", lambda: 1)
    await ctx.wait_for_signal("go", timeout="1d")


@workflow
async def retrying(ctx: Context) -> None:
    await ctx.step(fail, retry=Retry(attempts=3, wait_initial="1h", wait_jitter=0, wait_max="1h"))


@workflow
async def waiting_for_everything(ctx: Context) -> None:
    await asyncio.gather(ctx.wait_for_signal("go"), ctx.approve("refund", None), ctx.child(waiting))


async def test_lines_and_descriptions_name_the_signals_approvals_and_children_that_a_run_waits_for(store: Store) -> None:
    async with Runtime(store, [waiting_for_everything, waiting], concurrency=0, unload_grace=0) as runtime:
        await runtime.run(waiting_for_everything, id="r")
        found = await runtime.describe("r")
        (line,) = await runtime.list(workflow=waiting_for_everything)
    assert {(each.kind, each.name) for each in found.waiting_for} == {
        ("signal", "go"),
        ("approval", "refund"),
        ("child", "waiting"),
    }
    listed = [str(each) for each in line.waiting_for]
    assert len(listed) == 3
    assert all(any(name in each for each in listed) for name in ("go", "refund", "waiting"))


async def test_a_suspended_run_says_what_it_waits_for_and_until_when(store: Store) -> None:
    async with Runtime(store, [waiting], concurrency=0, unload_grace=0) as runtime:
        await runtime.run(waiting, id="r", metadata={"team": "books"}, priority=3, queue="mail")
        found = await runtime.describe("r")
    assert (found.status, found.queue, found.priority, found.metadata) == ("suspended", "mail", 3, {"team": "books"})
    assert [(each.kind, each.name) for each in found.waiting_for] == [("signal", "go")]
    assert found.wake_at is not None
    assert timedelta(hours=23) < found.wake_at - datetime.now(UTC) < timedelta(hours=25)
    assert [(step.key, step.kind, step.status, step.attempts) for step in found.steps] == [
        ("one", "step", "completed", 1),
        ("go", "signal", "waiting", 1),
    ]
    assert (found.worker, found.lease_until, found.running_steps, found.running_as_of) == (None, None, (), None)


async def test_a_step_that_is_tried_again_shows_its_error_and_its_next_try(store: Store) -> None:
    async with Runtime(store, [retrying], concurrency=0, unload_grace=0) as runtime:
        await runtime.run(retrying, id="r")
        (step,) = (await runtime.describe("r")).steps
    assert (step.key, step.status, step.attempts) == ("fail", "retrying", 1)
    assert step.error is not None
    assert (step.error.type, step.error.message) == ("ValueError", "no")
    assert step.until is not None


async def test_steps_under_way_in_this_process_are_seen_at_once(store: Store) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await go_on.wait()

    @workflow
    async def busy(ctx: Context) -> None:
        await ctx.step(work, key="first")

    async with Runtime(store, [busy]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(busy, id="r")
        await started.wait()
        found = await runtime.describe("r")
        assert (found.status, found.attempts, found.running_step_count, found.steps) == ("running", 1, 1, ())
        assert [step.key for step in found.running_steps] == ["first"]
        assert found.lease_until is not None
        go_on.set()
        await run
        ended = await runtime.describe("r")
        assert (ended.status, ended.running_steps, ended.running_as_of) == ("completed", (), None)


async def test_steps_under_way_elsewhere_are_those_of_the_last_heartbeat(store: Store) -> None:
    new = NewRun(id="r", workflow="flow", input=b"[[],{}]", input_hash=b"1", seed=b"2", parent_id="p", parent_key="k")
    claim = (await store.create(new, ttl=60)).claim
    assert claim is not None
    steps = encode_running_steps({"a": 1_000_000, "b": 2_000_000})
    await store.renew([claim.lease], 60, running_steps=[steps])
    found = await Runtime(store).describe("r")
    assert [(step.key, step.started_at.timestamp()) for step in found.running_steps] == [("a", 1), ("b", 2)]
    assert found.running_as_of == found.updated_at
    assert (found.parent_id, found.parent_key) == ("p", "k")


async def test_an_unknown_run_is_not_found(store: Store) -> None:
    with pytest.raises(RunNotFound):
        await Runtime(store).describe("none")
