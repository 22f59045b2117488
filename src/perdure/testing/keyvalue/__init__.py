"""What a `KeyValueStore` promises, case by case, as a test suite for any store's author to run with pytest.

    from perdure.testing.keyvalue import KeyValueFactory, key_value_tests

    class MyFactory(KeyValueFactory):
        def __init__(self) -> None:
            self.path = tempfile.mkdtemp()

        async def open(self) -> KeyValueStore:
            return MyKeyValueStore(self.path)

        async def count(self) -> int:
            return len(os.listdir(self.path))

    test_key_values = key_value_tests(MyFactory)

Every case is a test of its own, on a fresh store, and its id is the promise. Methods may be plain or async. Time is the store's
own: a case that needs something to expire gives it a second, and looks until it has. No case can be left out; only a factory with
`is_shared = False` is not asked the cases for several handles and processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from perdure.testing.keyvalue.cases import CASES
from perdure.testing.keyvalue.world import KeyValueCase, KeyValueFactory

__all__ = ["CASES", "KeyValueCase", "KeyValueFactory", "key_value_tests"]


def key_value_tests(factory: type[KeyValueFactory]) -> Callable[[KeyValueCase], None]:
    """A pytest test function that runs every case on a fresh store; assign it to a name that begins with `test_`."""
    import pytest

    cases = [case for case in CASES if factory.is_shared or not case.needs_sharing]

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_key_values(case: KeyValueCase) -> None:
        try:
            asyncio.run(case.run(factory()))
        except (pytest.skip.Exception, pytest.xfail.Exception) as left_out:
            pytest.fail(f"{case.name} cannot be left out, but the factory tried: {left_out}")

    return test_key_values
