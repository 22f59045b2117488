"""A store may have the core alone, or any part without the others; the runtime says what is missing."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

from perdure import Context, Ok, Runtime, StoreCapabilityError, Suspended, migrate_store, stores, workflow
from perdure.backends.memory.database import MemoryDatabase
from perdure.model.records import QueueLimits
from perdure.store import STANDARD_PARTS, Capability, Store, require
from perdure.testing.contract import CORE, StoreFactory, all_cases, contract_tests
from tests.contract.partial_store import PartialStore


class CoreFactory(StoreFactory):
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self) -> None:
        self.database = MemoryDatabase()

    async def open(self, prefix: str = "") -> Store:
        return cast("Store", PartialStore(self.database, *self.capabilities, prefix=prefix))

    async def restart(self) -> None:
        self.database = MemoryDatabase()


class OperatorsFactory(CoreFactory):
    capabilities = frozenset({"operators"})


class SchedulesFactory(CoreFactory):
    capabilities = frozenset({"schedules"})


class StreamsFactory(CoreFactory):
    capabilities = frozenset({"streams"})


test_contract_of_the_core = contract_tests(CoreFactory)
test_contract_with_operators = contract_tests(OperatorsFactory)
test_contract_with_schedules = contract_tests(SchedulesFactory)
test_contract_with_streams = contract_tests(StreamsFactory)


def core_store() -> Store:
    return cast("Store", PartialStore(MemoryDatabase()))


def test_what_the_suite_asks_of_every_store_is_in_the_core() -> None:
    core = {part.__name__ for part in CORE}
    assert {case.part for case in all_cases() if not case.needs and case.lacks is None} <= core


async def work(value: int) -> int:
    return value


@workflow
async def approved(ctx: Context, value: int) -> Any:
    await ctx.step(work, value)
    await ctx.sleep("pause", "1ms")
    return await ctx.wait_for_signal("approve")


async def test_a_runtime_drives_runs_on_a_core_store() -> None:
    async with Runtime(core_store(), [approved]) as runtime:
        run = await runtime.start(approved, 5, id="run")
        await run.signal("approve", "yes")
        assert await run.outcome() == Ok("yes")
        assert [(line.id, line.status) for line in await runtime.list()] == [("run", "completed")]


async def test_wf_run_takes_a_core_store() -> None:
    store = core_store()
    assert isinstance(await approved.run(5, id="run", store=store), Suspended)


@pytest.mark.parametrize(("verb", "argument"), [("hold", "run"), ("unhold", "run"), ("delete", "run"), ("purge", "1d")], ids=str)
async def test_a_runtime_says_that_the_store_has_no_verbs_for_operators(verb: str, argument: str) -> None:
    runtime = Runtime(core_store(), [approved], concurrency=0)
    with pytest.raises(StoreCapabilityError, match=r"the PartialStore store has no verbs for operators \(hold, unhold, delete"):
        await getattr(runtime, verb)(argument)
    await runtime.close()


def test_require_gives_the_store_or_refuses() -> None:
    store = stores.memory()
    for part in STANDARD_PARTS:
        assert require(store, cast("Any", part)) is store
        with pytest.raises(StoreCapabilityError):
            require(core_store(), cast("Any", part))
    with pytest.raises(StoreCapabilityError, match="the MemoryStore store has no transactions"):
        require(store, "transaction")


async def test_runs_of_a_core_store_can_be_moved_but_not_into_one() -> None:
    source, target = core_store(), stores.memory()
    assert isinstance(await approved.run(5, id="run", store=source), Suspended)
    assert (await migrate_store(source, target)).copied == 1
    with pytest.raises(StoreCapabilityError, match="no verbs for operators"):
        await migrate_store(target, core_store())


async def test_schedules_are_not_lost_in_a_store_without_them() -> None:
    source, target = stores.memory(), cast("Store", PartialStore(MemoryDatabase(), "operators"))
    assert (await migrate_store(source, target)).is_complete
    await source.limit_queue("default", QueueLimits(concurrency=1))
    with pytest.raises(StoreCapabilityError, match="no schedules and queue limits"):
        await migrate_store(source, target)
