"""Retention: ended runs are deleted by the workers when their time is over."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any, cast

import pytest

from perdure import Context, Runtime, Workflow, stores, workflow
from perdure.backends.memory.database import MemoryDatabase
from perdure.backends.memory.store import MemoryStore
from perdure.errors import PersistenceError, StoreCapabilityError
from perdure.model.retention import RetentionRules, check_retention
from perdure.store import Store
from perdure.testing import ManualClock
from perdure.worker import retention
from perdure.worker.retention import RetentionWork
from tests.contract.partial_store import PartialStore
from tests.worker.flows import Flaky, client, nap, soon

DAY = 86_400.0


@workflow(name="kept", retention={"completed": None})
async def kept(ctx: Context) -> str:
    return "for ever"


@workflow(name="short", retention="1d")
async def short(ctx: Context) -> str:
    return "for a day"


@workflow(name="plain")
async def plain(ctx: Context) -> str:
    return "as the runtime says"


async def ids(runtime: Runtime) -> set[str]:
    """The runs that there are."""
    return {info.id for info in await runtime.list()}


def work_of(runtime: Runtime, rules: Any) -> RetentionWork:
    """What a worker of this runtime would do."""
    return RetentionWork(runtime._host, check_retention(rules))


def test_a_length_is_for_every_end_and_a_mapping_is_by_status() -> None:
    assert check_retention(None) == {}
    assert check_retention("30d") == dict.fromkeys(("completed", "failed", "cancelled", "dead"), 30 * DAY)
    assert check_retention(timedelta(days=1)) == check_retention(DAY)
    assert check_retention({"completed": "30d", "failed": None}) == {"completed": 30 * DAY, "failed": None}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (True, TypeError, "retention= takes a length of time like '30d', or one by status: {'completed': '30d'}, not True"),
        (["30d"], TypeError, "retention= takes a length"),
        ({"done": "30d"}, ValueError, "retention= has 'done', and takes completed, failed, cancelled, dead"),
        ({"running": "30d"}, ValueError, "retention= has 'running'"),
        ("banana", ValueError, "'banana' is not a length of time"),
        ({"dead": "banana"}, ValueError, "retention of dead runs 'banana' is not a length of time"),
        (0, ValueError, "retention must be longer than zero"),
    ],
)
def test_a_retention_that_cannot_be_is_refused(wrong: Any, error: type[Exception], message: str) -> None:
    for give in (lambda: Runtime(stores.memory(), retention=wrong), lambda: Workflow("w", plain.fn, retention=wrong)):
        with pytest.raises(error) as caught:
            give()
        assert message in str(caught.value)


async def test_the_nearest_rule_of_each_status_holds(store: Store) -> None:
    clock, flaky = ManualClock(), Flaky()
    flows = (kept, short, plain, flaky.flow, nap)
    async with client(store, *flows, clock=clock, unload_grace=0) as runtime:
        for flow in flows:
            await runtime.run(flow, id=flow.name)
        work = work_of(runtime, {"completed": "10d", "failed": "20d"})
        assert await work.delete_due() == 0
        clock.advance("1d")
        assert (await work.delete_due(), await ids(runtime)) == (1, {"kept", "plain", "flaky", "nap"})
        clock.advance("9d")
        assert (await work.delete_due(), await ids(runtime)) == (1, {"kept", "flaky", "nap"})
        clock.advance("10d")
        assert (await work.delete_due(), await ids(runtime)) == (1, {"kept", "nap"})
        clock.advance("1000d")
        assert await work.delete_due() == 0


async def test_runs_of_workflows_that_are_not_registered_here_are_left_alone(store: Store) -> None:
    clock = ManualClock()
    async with client(store, plain, clock=clock) as other:
        await other.run(plain, id="others")
    async with client(store, Workflow("plain2", plain.fn, aliases=["plain1"]), clock=clock) as runtime:
        for name in ("plain1", "plain2"):
            await runtime.run(name, id=name)
        clock.advance("2d")
        assert await work_of(runtime, "1d").delete_due() == 2
        assert await ids(runtime) == {"others"}


async def test_of_several_versions_the_newest_rule_holds(store: Store) -> None:
    clock = ManualClock()
    first, second = Workflow("w", plain.fn, retention="1d"), Workflow("w", plain.fn, version=2, retention="3d")
    async with client(store, second, first, clock=clock) as runtime:
        await runtime.run(first, id="1")
        clock.advance("2d")
        assert await work_of(runtime, None).delete_due() == 0
        clock.advance("1d")
        assert await work_of(runtime, None).delete_due() == 1


async def test_much_is_deleted_in_batches_and_two_workers_share_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    monkeypatch.setattr(retention, "REST", 0.0)
    clock = ManualClock()
    async with client(store, plain, clock=clock) as one, client(store, plain, clock=clock) as other:
        for n in range(10):
            await one.run(plain, id=f"{n}")
        clock.advance("2d")
        deleted = await asyncio.gather(*(work_of(runtime, "1d").delete_due() for runtime in (one, other)))
        assert sum(deleted) + await work_of(one, "1d").delete_due() == 10
        assert await ids(one) == set()


async def test_a_run_that_was_reopened_is_not_deleted(store: Store) -> None:
    clock, flaky = ManualClock(), Flaky()
    async with client(store, flaky.flow, clock=clock) as runtime:
        await runtime.run(flaky.flow, id="f")
        clock.advance("2d")
        await runtime.retry("f")
        assert await work_of(runtime, "1d").delete_due() == 0
        await runtime.sweep()
        clock.advance("23h")
        assert await work_of(runtime, "1d").delete_due() == 0


async def test_a_worker_deletes_by_itself(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    clock = ManualClock()
    async with Runtime(store, [plain], retention={"completed": "1h"}, clock=clock) as runtime:
        await (await runtime.start(plain, id="old"))

        async def is_logged() -> bool:
            clock.advance("20m")
            return "deleted 1 runs of workflow 'plain' that had been completed for long enough" in caplog.text

        await soon(is_logged)
        assert await ids(runtime) == set()


class CountingStore(MemoryStore):
    """Counts purges, and fails at them if it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryDatabase())
        self.purges = 0
        self.fails = False

    async def purge(self, older_than: float, **options: Any) -> int:
        self.purges += 1
        if self.fails:
            raise PersistenceError("purge", "the disk is full")
        return await super().purge(older_than, **options)


async def test_a_worker_without_rules_asks_nothing_and_one_with_rules_seldom() -> None:
    async def asked(rules: Any) -> int:
        store, clock = CountingStore(), ManualClock()
        async with Runtime(store, [plain], retention=rules, clock=clock) as runtime:
            for _ in range(60):
                await (await runtime.start(plain))
                clock.advance("1m")
                await asyncio.sleep(0)
        return store.purges

    assert await asked(None) == 0
    assert 3 <= await asked("30d") <= 14


async def test_failures_are_logged_at_the_second_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = CountingStore(), ManualClock()
    store.fails = True
    async with Runtime(store, [plain], retention="1h", clock=clock) as runtime:
        await (await runtime.start(plain, id="old"))

        async def has_failed() -> bool:
            clock.advance("20m")
            await asyncio.sleep(0)
            return store.purges >= 3

        await soon(has_failed)
        store.fails = False

        async def is_gone() -> bool:
            clock.advance("20m")
            return not await ids(runtime)

        await soon(is_gone)
    assert caplog.text.count("old runs could not be deleted, trying again later") == 1


async def test_a_store_that_cannot_delete_refuses_a_retention() -> None:
    core = cast("Store", PartialStore(MemoryDatabase()))
    with pytest.raises(StoreCapabilityError, match="verbs for operators"):
        Runtime(core, retention="1d")
    with pytest.raises(StoreCapabilityError, match="verbs for operators"):
        Runtime(core, [short])


async def test_purge_takes_statuses_and_a_workflow(store: Store) -> None:
    clock, flaky = ManualClock(), Flaky()
    async with client(store, plain, flaky.flow, clock=clock) as runtime:
        for flow in (plain, flaky.flow):
            await runtime.run(flow, id=flow.name)
        assert await runtime.purge(0, status="failed", workflow=plain) == 0
        assert await runtime.purge(0, status=["failed", "dead"], workflow="flaky") == 1
        with pytest.raises(ValueError, match="an ended run is one of completed, failed, cancelled, dead, not 'running'"):
            await runtime.purge(0, status=cast("Any", "running"))
        assert await ids(runtime) == {"plain"}


def test_rules_by_status_have_a_type() -> None:
    rules: RetentionRules = check_retention({"dead": 60})
    assert rules == {"dead": 60.0}
