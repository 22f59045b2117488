"""Several processes decide one approval at the same moment, on every store: one was first, and all are told which."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Ok, Runtime
from tests.backends.approval_jobs import SECRET, ask, decide_together
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.processes import CONTEXT
from tests.backends.registry import Backend

PEOPLE = ("ada", "bob", "token", "xenia", "yves", "zoe")


@pytest.mark.same_everywhere
def test_of_processes_that_decide_at_once_one_is_first(backend: Backend, dsn: str, start: Start) -> None:
    run_ids = [f"run-{n}" for n in range(backend.times(50))]
    tokens = asyncio.run(_start(dsn, run_ids))
    barrier = CONTEXT.Barrier(len(PEOPLE))
    children = [start(decide_together, dsn, barrier, me, tokens) for me in PEOPLE]
    first: dict[str, str] = {}
    for run_id in run_ids:
        told = [child.receive() for child in children]
        assert sum(is_first for is_first, _ in told) == 1, "one was first"
        assert len({decision for _, decision in told}) == 1, "and all know which"
        first[run_id] = told[0][1]
    for child in children:
        child.wait_for_exit()
    asyncio.run(_check(dsn, first))


async def _start(dsn: str, run_ids: list[str]) -> dict[str, str]:
    """Let these runs ask, and make a token for each."""
    async with store_at(dsn) as store:
        runtime = Runtime(store, [ask], concurrency=0, unload_grace=0, secret=SECRET)
        for run_id in run_ids:
            await runtime.run(ask, id=run_id)
        assert len(await runtime.approvals()) == len(run_ids)
        tokens = {run_id: await runtime.approval_token(run_id, "it", by="token") for run_id in run_ids}
        await runtime.close()
        return tokens


async def _check(dsn: str, first: dict[str, str]) -> None:
    async with store_at(dsn) as store:
        runtime = Runtime(store, [ask], concurrency=0, unload_grace=0)
        assert await runtime.approvals() == []
        outcomes = await runtime.sweep()
        assert outcomes == {run_id: Ok(decision) for run_id, decision in first.items()}
        await runtime.close()
