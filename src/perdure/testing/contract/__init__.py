"""The store contract as a test suite: what `perdure.store` promises, case by case, for any store's author to run with pytest.

    import shutil
    import tempfile

    from my_store import MyStore
    from perdure.store import Store
    from perdure.testing.contract import StoreFactory, contract_tests


    class MyFactory(StoreFactory):
        capabilities = frozenset({"shared", "durable"})  # a core store that several processes use

        def __init__(self) -> None:
            self.path = tempfile.mkdtemp()

        async def open(self, prefix: str = "") -> Store:
            return MyStore(self.path, prefix=prefix)

        async def close(self) -> None:
            shutil.rmtree(self.path)


    test_contract = contract_tests(MyFactory)

Every case is a test of its own, on a database of its own, and its id is the promise: `test_contract[a_current_lease_can_write]`.
Which cases there are follows from the declared capabilities alone: those of the core and of each part that is declared. No case
can be left out: what is not declared has to be refused, and a factory that skips is a failure. The suite needs pytest but none of
its plugins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from perdure.testing.contract import (
    capabilities,
    claiming,
    creating,
    durable,
    ending,
    fencing,
    generations,
    handles,
    identity,
    inbox,
    late_inputs,
    leases,
    listing,
    operating,
    problems,
    queues,
    recording,
    restoring,
    saving,
    schedules,
    shared,
    streams,
    suspending,
    transactions,
    versions,
    watching,
)
from perdure.testing.contract.cases import Case, registered
from perdure.testing.contract.world import StoreFactory

__all__ = ["PARTS", "Case", "StoreFactory", "all_cases", "contract_tests"]

# The core, in the order in which the promises build on each other; then the optional parts. This is also the order of the docs.
CORE: Final = (
    capabilities,
    handles,
    creating,
    claiming,
    versions,
    leases,
    fencing,
    recording,
    inbox,
    suspending,
    ending,
    generations,
    problems,
    listing,
    identity,
    watching,
)
OPTIONAL: Final = (operating, restoring, late_inputs, saving, schedules, queues, streams, transactions, durable, shared)
PARTS: Final = CORE + OPTIONAL


def all_cases() -> tuple[Case, ...]:
    """Every case of the suite, part by part."""
    return tuple(case for part in PARTS for case in registered() if case.part == part.__name__)


def contract_tests(factory: type[StoreFactory]) -> Callable[[Case], None]:
    """A pytest test function that runs every case on a fresh database; assign it to a name that begins with `test_`."""
    import pytest

    cases = [case for case in all_cases() if case.concerns(factory.capabilities)]

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_contract(case: Case) -> None:
        try:
            asyncio.run(case.run(factory()))
        except (pytest.skip.Exception, pytest.xfail.Exception) as left_out:
            pytest.fail(f"{case.name} cannot be left out, but the factory tried: {left_out}")

    return test_contract
