"""Versions of a workflow side by side: a run goes on in the one in which it began."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, workflow
from perdure.backends.user_defined.workflow_adapter import workflow_store
from perdure.store import Store, require
from tests.backends.user_defined.own_stores import DictStore
from tests.patience import PATIENCE
from tests.worker.flows import Flaky, client, greet, reaches, soon, taken


@workflow(name="pay")
async def pay_1(ctx: Context, cents: int) -> str:
    await ctx.wait_for_signal("go")
    return f"first {cents}"


@workflow(name="pay", version=2)
async def pay_2(ctx: Context, cents: int) -> str:
    await ctx.step("check", lambda: True)
    await ctx.wait_for_signal("go")
    return f"second {cents}"


async def is_said(caplog: pytest.LogCaptureFixture) -> bool:
    return "in version 1" in caplog.text


async def version_of(store: Store, run_id: str) -> int:
    row = await store.get(run_id)
    assert row is not None
    return row.version


@pytest.mark.parametrize("bad", [0, -1, 2**31])
def test_a_version_below_one_or_too_high_is_refused_at_decoration(bad: int) -> None:
    with pytest.raises(ValueError, match=f"version must be from 1 to 2147483647, not {bad}"):
        workflow(name="pay", version=bad)(pay_1.fn)


@pytest.mark.parametrize("bad", ["2", 1.0, True, None])
def test_a_version_that_is_no_whole_number_is_refused_at_decoration(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"version must be a whole number, not {bad!r}"):
        Workflow("pay", pay_1.fn, version=bad)


def test_the_first_version_is_one() -> None:
    assert (pay_1.version, pay_2.version, repr(pay_1), repr(pay_2)) == (1, 2, "<Workflow pay>", "<Workflow pay version 2>")


async def test_two_workflows_with_one_name_and_version_are_refused(store: Store) -> None:
    @workflow(name="pay", version=2)
    async def other(ctx: Context, cents: int) -> str:
        return str(cents)

    with pytest.raises(ValueError, match="two workflows are called 'pay' and have version 2"):
        Runtime(store, [pay_1, pay_2, other])


async def test_a_run_goes_on_in_the_version_in_which_it_began(store: Store) -> None:
    async with client(store, pay_1) as before:
        assert isinstance(await before.run(pay_1, 5, id="old"), Suspended)
    async with client(store, pay_2, pay_1) as both:
        assert isinstance(await both.run("pay", 5, id="new"), Suspended)
        assert isinstance(await both.run(pay_2, 5, id="also-new"), Suspended)
        assert isinstance(await both.run(pay_1, 5, id="explicitly-old"), Suspended)
        for run_id in ("old", "new", "also-new", "explicitly-old"):
            await both.signal(run_id, "go")
        assert {info.id: info.version for info in await both.list()} == {"old": 1, "new": 2, "also-new": 2, "explicitly-old": 1}
        assert await both.run(pay_2, 5, id="old") == Ok("first 5")
        assert await both.resume("new") == Ok("second 5")
        assert await both.sweep() == {"also-new": Ok("second 5"), "explicitly-old": Ok("first 5")}
        assert await both.run("pay", 5, id="old") == Ok("first 5")


async def test_start_takes_the_newest_by_name_and_the_version_of_an_object(store: Store) -> None:
    async with client(store, pay_1, pay_2) as runtime:
        await runtime.start("pay", 5, id="p0")
        await runtime.start(pay_1, 5, id="p1")
        await runtime.start(pay_2, 5, id="p2")
    assert [await version_of(store, f"p{n}") for n in range(3)] == [2, 1, 2]


async def test_a_worker_leaves_other_versions_alone_and_says_so_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with client(store, pay_1) as before:
        for run_id in ("old-1", "old-2"):
            await before.start(pay_1, 5, id=run_id)
    with caplog.at_level(logging.WARNING, "perdure"):
        async with Runtime(store, [pay_2]) as runtime, asyncio.timeout(PATIENCE):
            run = await runtime.start(pay_2, 5, id="new")
            await run.signal("go")
            assert await run == "second 5"
            await soon(lambda: is_said(caplog))
            await runtime.start(pay_2, 6, id="later")
            await reaches(store, "later", "suspended")
    said = [record.message for record in caplog.records if record.name == "perdure" and "version" in record.message]
    assert len(said) == 1
    assert said[0].startswith("runs of workflow 'pay' in version 1, such as 'old-")
    assert said[0].endswith("wait for another worker: registered here is version 2")
    for run_id in ("old-1", "old-2"):
        row = await store.get(run_id)
        assert row is not None
        assert (row.status, row.attempts, row.problem) == ("pending", 0, None)


async def test_runs_of_a_renamed_workflow_are_left_alone_with_one_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with client(store) as before:
        for run_id in ("old-1", "old-2"):
            await before.start(greet, "Ada", id=run_id)
        await before.start(greet, "Ada", id="elsewhere", queue="other")
    with caplog.at_level(logging.WARNING, "perdure"):
        async with Runtime(store, [pay_2], only_queues=["default"]):
            await soon(lambda: is_said(caplog))
    (record,) = (record for record in caplog.records if record.name == "perdure")
    assert record.message == (
        "runs of workflow 'greet' in version 1, such as 'old-1', wait for another worker: "
        "registered here is no workflow of this name, but pay"
    )
    assert (record.run_id, record.workflow) == ("old-1", "greet")  # type: ignore[attr-defined]


async def test_a_worker_that_starts_says_which_runs_wait_for_the_lease_of_a_silent_holder(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(store, greet) as other:
        await taken(store, other, greet, "Ada", run_id="g1")
    await asyncio.sleep(0.06)
    with caplog.at_level(logging.INFO, "perdure"):
        async with Runtime(store, [greet], lease_ttl=0.1), asyncio.timeout(PATIENCE):
            while "run 'g1' is leased by" not in caplog.text:  # noqa: ASYNC110 - a line in a log is no event
                await asyncio.sleep(0.005)


async def test_a_worker_with_both_versions_drives_both(store: Store) -> None:
    async with client(store, pay_1, pay_2) as before:
        runs = [await before.start(pay_1, 5, id="old"), await before.start("pay", 5, id="new")]
    async with Runtime(store, [pay_2, pay_1]), asyncio.timeout(PATIENCE):
        for run in runs:
            await run.signal("go")
        assert [await run for run in runs] == ["first 5", "second 5"]


async def test_a_run_of_a_version_that_is_missing_here_is_a_clear_error(store: Store) -> None:
    async with client(store, pay_1) as before:
        await before.run(pay_1, 5, id="old")
        await before.signal("old", "go")
    row = await store.get("old")
    said = (
        r"run 'old' goes on in version 1 of workflow 'pay', and registered here is version 2; "
        r"pass version 1 in workflows= too"
    )
    async with client(store, pay_2) as after:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: after.resume("old"),
            lambda: after.run(pay_2, 5, id="old"),
            lambda: after.run("pay", 5, id="old"),
            lambda: pay_2.run(5, id="old", store=store),
            lambda: pay_2.start(5, id="old", store=store),
        ]
        for call in calls:
            with pytest.raises(LookupError, match=said):
                await call()
        assert await after.sweep() == {}
    assert await store.get("old") == row
    assert await pay_1.run(5, id="old", store=store) == Ok("first 5")
    assert await pay_2.run(5, id="old", store=store) == Ok("first 5")  # it has ended: nothing has to be driven


async def test_a_failed_run_of_a_version_that_is_missing_here_is_not_reopened(store: Store) -> None:
    flaky = Flaky()
    async with client(store, flaky.flow) as before:
        assert isinstance(await before.run(flaky.flow, id="f1"), Err)
    newer = Workflow(flaky.flow.name, flaky.flow.fn, version=2)
    row = await store.get("f1")
    with pytest.raises(LookupError, match="version 1 of workflow"):
        await newer.run(id="f1", store=store, retry_failed=True)
    assert await store.get("f1") == row
    async with client(store, flaky.flow, newer) as both:
        await both.retry("f1")
    assert await version_of(store, "f1") == 1


async def test_a_saved_run_keeps_its_version(store: Store) -> None:
    operators = require(store, "operators")
    assert isinstance(await pay_2.run(5, id="p", store=store), Suspended)
    snapshot = await operators.load("p")
    assert snapshot is not None
    await operators.delete("p")
    await operators.save("copy", snapshot)
    assert await version_of(store, "copy") == 2
    async with client(store, pay_1, pay_2) as runtime:
        await runtime.signal("copy", "go")
        assert await runtime.resume("copy") == Ok("second 5")


async def test_a_snapshot_from_elsewhere_takes_the_version_of_the_workflow_that_goes_on(store: Store) -> None:
    foreign = {
        "formatVersion": 1,
        "workflowName": "pay",
        "steps": {"check": {"ok": True, "value": True}},
        "execution": {"status": "running", "lastUpdated": "2026-01-31T12:00:00Z"},
    }
    await require(store, "operators").save("p", foreign)
    assert await version_of(store, "p") == 0
    assert isinstance(await pay_2.run(5, id="p", store=store), Suspended)
    assert await version_of(store, "p") == 2


async def test_a_store_of_your_own_keeps_versions() -> None:
    rows: dict[str, Any] = {}
    async with client(workflow_store(DictStore(rows)), pay_1, pay_2) as runtime:
        await runtime.run(pay_1, 5, id="old")
        await runtime.run(pay_2, 5, id="new")
        for run_id in ("old", "new"):
            await runtime.signal(run_id, "go")
    async with client(workflow_store(DictStore(rows)), pay_2) as after:
        assert await after.sweep() == {"new": Ok("second 5")}
    async with client(workflow_store(DictStore(rows)), pay_1, pay_2) as both:
        assert await both.sweep() == {"old": Ok("first 5")}
