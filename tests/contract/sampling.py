"""The contract suite where it would take long: every fifth case by `make test`, all of them by `make contracts` and CI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import pytest

from perdure.testing.contract import Case, StoreFactory, all_cases
from tests.campaign import IS_FULL

# Of which cases: all, or every fifth from the third on.
SAMPLE: Final = slice(None) if IS_FULL else slice(2, None, 5)


def sampled_contract_tests(factory: type[StoreFactory]) -> Callable[[Case], None]:
    """Return a test like that of `contract_tests`, for a store that has a server or repeats another one's code."""
    cases = [case for case in all_cases() if case.concerns(factory.capabilities)][SAMPLE]

    @pytest.mark.sampled
    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_contract(case: Case) -> None:
        asyncio.run(case.run(factory()))

    return test_contract
