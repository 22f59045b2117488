"""The suite is itself under test: it finds what is wrong, has nothing to say against what is right, and leaves out no verb."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

import pytest

from perdure.backends.memory.database import MemoryDatabase
from perdure.backends.memory.store import MemoryStore
from perdure.errors import PerdureError, ValueNotStorable
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse
from perdure.store import (
    STANDARD_PARTS,
    Capability,
    FullStore,
    OperatorStore,
    ScheduleStore,
    Store,
    StreamStore,
    TransactionStore,
)
from perdure.testing.contract import Case, StoreFactory, all_cases, capabilities, contract_tests, fencing, watching
from tests.contract.broken import (
    beginning,
    claiming,
    generations,
    late_inputs,
    problems,
    queues,
    reading,
    refusals,
    restoring,
    saving,
    streams,
    table,
    transactions,
    versions,
    waking,
)
from tests.contract.broken import fencing as broken_fencing

CASES = {case.name: case for case in all_cases()}
# Importing the modules of broken stores fills their table.
BROKEN = table.BROKEN
PARTS = (
    broken_fencing,
    claiming,
    waking,
    reading,
    transactions,
    beginning,
    restoring,
    late_inputs,
    saving,
    streams,
    problems,
    versions,
    generations,
    queues,
    refusals,
)


class Factory(StoreFactory):
    capabilities = STANDARD_PARTS
    store: ClassVar[type[MemoryStore]] = MemoryStore

    def __init__(self) -> None:
        self.database = MemoryDatabase()

    def __reduce__(self) -> tuple[type[Factory], tuple[()]]:
        return (Factory, ())  # what "shared" means to a store that is not: every process gets a database of its own

    async def open(self, prefix: str = "") -> FullStore:
        return self.store(self.database, prefix=prefix)

    async def restart(self) -> None:
        self.database = MemoryDatabase()


class Keeping(Factory):
    async def restart(self) -> None:
        pass


def factory_of(base: type[Factory], store_class: type[MemoryStore], declared: frozenset[Capability]) -> type[Factory]:
    class Made(base):  # type: ignore[misc, valid-type]
        store = store_class
        capabilities = declared

    return Made


def keeps(case: Case, factory: type[StoreFactory]) -> bool:
    """Any other error would be a mistake in the broken store, and prove nothing."""
    try:
        asyncio.run(case.run(factory()))
    except (AssertionError, PerdureError, TimeoutError):
        return False
    return True


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE", 0.2)


@pytest.mark.parametrize(
    ("store", "promise", "declared"),
    BROKEN,
    ids=[f"{store.__name__}-{promise}" for store, promise, _ in BROKEN],
)
def test_a_broken_store_is_caught(store: type[MemoryStore], promise: str, declared: frozenset[Capability]) -> None:
    case = CASES[promise]
    assert case.concerns(declared)
    assert not keeps(case, factory_of(Factory, store, declared))


@pytest.mark.parametrize("name", [case.name for case in all_cases() if "durable" in case.needs])
def test_a_store_that_keeps_its_data_is_durable(name: str) -> None:
    asyncio.run(CASES[name].run(factory_of(Keeping, reading.Durable, STANDARD_PARTS | {"durable", "shared"})()))


@pytest.mark.parametrize("name", [case.name for case in all_cases() if case.concerns(STANDARD_PARTS | {"transaction", "outbox"})])
def test_a_store_with_transactions_keeps_every_promise(name: str) -> None:
    asyncio.run(CASES[name].run(factory_of(Factory, transactions.Transactional, STANDARD_PARTS | {"transaction", "outbox"})()))


def test_every_broken_store_is_in_the_table() -> None:
    classes = {value for part in PARTS for value in vars(part).values() if inspect.isclass(value)}
    written = {value for value in classes if issubclass(value, MemoryStore) and not value.__name__.startswith("_")}
    assert written - {store for store, _, _ in BROKEN} == {MemoryStore, transactions.Transactional}


def verbs_of(protocol: type) -> dict[str, Callable[..., object]]:
    """The verbs that a protocol declares itself."""
    return {name: verb for name, verb in vars(protocol).items() if inspect.isfunction(verb) and not name.startswith("_")}


def awaited_verbs_of(protocol: type) -> set[str]:
    verbs = verbs_of(protocol)
    return {name for name, verb in verbs.items() if inspect.iscoroutinefunction(verb) or _gives_an_awaitable(verb)}


def _gives_an_awaitable(verb: Callable[..., object]) -> bool:
    return str(inspect.signature(verb).return_annotation).startswith("Awaitable[")


def test_every_verb_is_refused_by_a_closed_store() -> None:
    assert awaited_verbs_of(Store) - {"close"} == set(capabilities.CORE_VERBS)
    assert capabilities.PART_VERBS.keys() == STANDARD_PARTS
    for part, protocol in (("operators", OperatorStore), ("schedules", ScheduleStore), ("streams", StreamStore)):
        # `watch` with items is the core's verb, and a store without streams may take that too: nothing comes of it.
        assert awaited_verbs_of(protocol) - {"watch"} == set(capabilities.PART_VERBS[part])  # type: ignore[index]


def test_every_verb_that_takes_a_lease_is_fenced() -> None:
    takers = {
        name
        for protocol in (Store, OperatorStore, ScheduleStore, StreamStore, TransactionStore)
        for name, verb in verbs_of(protocol).items()
        if {"lease", "leases"} & set(inspect.signature(verb).parameters)
    }
    written = [*fencing.WRITES, *(name for writes in fencing.PART_WRITES.values() for name in writes)]
    assert takers == {name.partition(" ")[0] for name in written}


def test_every_case_is_a_documented_promise() -> None:
    for case in all_cases():
        assert re.fullmatch(r"[a-z][a-z0-9_]+", case.name), case.name
        assert re.fullmatch(r"[A-Z`][^\n]*\.", case.sentence), f"{case.name}: {case.sentence!r}"


def test_a_capability_only_swaps_cases() -> None:
    for capability in get_args(Capability):
        without = [case for case in all_cases() if case.lacks == capability]
        assert without, f"a store without {capability} has something to show for it"


def test_a_factory_cannot_skip() -> None:
    class Skipping(Factory):
        async def open(self, prefix: str = "") -> FullStore:
            pytest.skip("no database here")

    with pytest.raises(pytest.fail.Exception, match="cannot be left out"):
        contract_tests(Skipping)(CASES["get_gives_the_row_or_none"])


def test_a_store_that_hangs_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(MemoryStore):
        async def get(self, _: str) -> None:
            await asyncio.sleep(3600)

    monkeypatch.setattr("perdure.testing.contract.cases.PATIENCE", 0.05)
    assert not keeps(CASES["get_gives_the_row_or_none"], factory_of(Factory, Hanging, STANDARD_PARTS))


class KeepsPartOfWhatItRefuses(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        pulse = await super().record(lease, [entry for entry in entries if len(entry.payload) <= 1_000], **options)
        if any(len(entry.payload) > 1_000 for entry in entries):
            raise ValueNotStorable("value", "it is too long")
        return pulse


@pytest.mark.parametrize("store", [MemoryStore, KeepsPartOfWhatItRefuses])
def test_a_store_that_announces_a_limit_has_to_refuse_what_is_longer_as_a_whole(store: type[MemoryStore]) -> None:
    limited = factory_of(Factory, store, STANDARD_PARTS)
    limited.longest_value = 1_000
    with pytest.raises(AssertionError):
        asyncio.run(CASES["a_long_value_is_kept_or_refused_for_good"].run(limited()))
