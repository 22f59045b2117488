"""A store that is down for a while, of every kind: few calls, few lines in the log, and afterwards every run ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Final

import pytest

from perdure import Context, Ok, Runtime, workflow
from perdure.errors import PersistenceError
from tests.backends.opening import store_at
from tests.backends.registry import Backend

RUNS: Final = 6
SECONDS: Final = 2.0
_VERBS: Final = frozenset(
    {"create", "claim", "acquire", "renew", "release", "record", "suspend", "finish", "signal", "cancel", "get", "journal"}
    | {"inbox", "list", "watch"}
)


class Outage:
    """Whether the store is down, and which verbs were called meanwhile."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()


class InterruptedStore:
    """A store whose every verb fails at once while there is an outage, on each of its handles.

    `watch` returns at once: some stores take the failure for a change, as the loss of a connection is one for others.
    """

    def __init__(self, store: Any, outage: Outage) -> None:
        self._store = store
        self._outage = outage

    def __getattr__(self, name: str) -> Any:
        return self._verb(name) if name in _VERBS else getattr(self._store, name)

    def sibling(self) -> InterruptedStore:
        return InterruptedStore(self._store.sibling(), self._outage)

    def _verb(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            if self._outage.is_on:
                self._outage.calls[name] += 1
                if name == "watch":
                    return None
                raise PersistenceError("the store", "is down")
            return await getattr(self._store, name)(*args, **options)

        return call


@pytest.mark.same_everywhere
async def test_an_outage_costs_few_calls_and_few_lines_and_afterwards_every_run_ends(
    backend: Backend, shared_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage()
    working, are_working, may_end = 0, asyncio.Event(), asyncio.Event()

    async def work() -> str:
        nonlocal working
        working += 1
        if working == RUNS // 2:
            are_working.set()
        await may_end.wait()
        return "done"

    @workflow
    async def flow(ctx: Context) -> str:
        return await ctx.step(work)

    async with store_at(shared_dsn) as sound:
        store: Any = InterruptedStore(sound, outage)
        async with Runtime(store, [flow], lease_ttl=backend.lease_ttl, concurrency=RUNS // 2) as runtime:
            runs = [await runtime.start(flow, id=f"run-{n}") for n in range(RUNS)]
            await are_working.wait()
            with caplog.at_level(logging.INFO, "perdure"):
                outage.is_on = True
                may_end.set()
                await asyncio.sleep(SECONDS)
                outage.is_on = False
                async with asyncio.timeout(60):
                    for run in runs:
                        assert await run.outcome() == Ok("done")
    # About five claims and as many watches, and for each run that was driven a record, its release, and renewals meanwhile.
    assert sum(outage.calls.values()) < 40, outage.calls
    assert outage.calls["claim"] < 10
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    asked = [level for level, line in lines if "the store did not answer" in line]
    assert asked[0] == "ERROR"
    assert set(asked[1:]) == {"WARNING"}
    assert len(asked) == outage.calls["claim"]
    assert len([line for level, line in lines if level == "INFO" and "the store answers again" in line]) == 1
    assert len(lines) < 30
