"""pytest's plugin: installed with perdure, it adds two fixtures. Nothing else is imported until a test uses one of them.

    async def test_signup(perdure_runtime):
        async with perdure_runtime(signup) as rt:
            assert await rt.run(signup, "ada") == Ok("welcome")

    def test_signup_without_async(perdure_runtime_sync):
        rt = perdure_runtime_sync(signup)
        assert rt.run(signup, "ada") == Ok("welcome")

The fixtures are plain, so any plugin that runs coroutines will do for the first: pytest-asyncio, or anyio's with its asyncio
backend. The second needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from perdure.testing.sync_runtime import SyncVirtualRuntime
    from perdure.testing.virtual_runtime import VirtualRuntime


@pytest.fixture
def perdure_runtime() -> Callable[..., VirtualRuntime]:
    """`perdure.testing.runtime`: makes a runtime in virtual time, to be entered with `async with`."""
    from perdure import testing

    return testing.runtime


@pytest.fixture
def perdure_runtime_sync() -> Iterator[Callable[..., SyncVirtualRuntime]]:
    """Makes a blocking runtime in virtual time, which works until the end of the test."""
    from perdure import testing

    with ExitStack() as open_runtimes:

        def make(*workflows: Any, **options: Any) -> SyncVirtualRuntime:
            return open_runtimes.enter_context(testing.runtime_sync(*workflows, **options))

        yield make
