"""A client without transactions: its runs are kept whole, by one statement each, and driven as those of a user's own store."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, workflow
from perdure.backends.sql_client import sql_client
from perdure.backends.sql_client.unfenced import SqlWorkflowStore
from perdure.errors import PerdureWarning, PersistenceError, StoreCapabilityError
from perdure.model.durations import moment
from perdure.simple_stores import StoredRun
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import NOW
from tests.backends.sql_client.places import Place

SNAPSHOT = {"formatVersion": 1, "steps": {}, "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00Z"}}


class QueryOnly:
    """A client that has no `transaction`, and counts what it is asked."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked = 0

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.asked += 1
        return await self._client.query(sql, params)


def unfenced(here: Place, **options: Any) -> tuple[SqlWorkflowStore, QueryOnly]:
    client = QueryOnly(here.client())
    with pytest.warns(PerdureWarning, match="unfenced"):
        store = sql_client(client, here.dialect, **options)
    assert isinstance(store, SqlWorkflowStore)
    return store, client


def stored(run_id: str = "run", wake_at: int | None = NOW, **columns: Any) -> StoredRun:
    given = {"workflow": "flow", "snapshot": SNAPSHOT, "status": "suspended", "event_name": None, "updated_at": moment(NOW)}
    return StoredRun(**{"run_id": run_id, "wake_at": None if wake_at is None else moment(wake_at), **given, **columns})


async def test_what_was_saved_is_loaded_and_each_method_is_one_statement(here: Place) -> None:
    store, client = unfenced(here)
    assert "unfenced" in repr(store)
    assert await store.load("run") is None
    client.asked = 0
    await store.save(stored(event_name="go"))
    await store.save(stored(status="running", wake_at=None))
    loaded = await store.load("run")
    assert await store.due(moment(NOW), 10) == []
    await store.delete("run")
    assert client.asked == 5
    assert loaded is not None
    assert (loaded.status, loaded.wake_at, loaded.event_name, loaded.updated_at) == ("running", None, None, moment(NOW))
    assert await store.load("run") is None


async def test_what_is_due_comes_earliest_first_and_names_are_bytes(here: Place) -> None:
    store, _ = unfenced(here, prefix="a")
    other, _ = unfenced(here, prefix="ab")
    for n, name in enumerate(NAMES):
        await store.save(stored(name, NOW + n))
    await other.save(stored("b", NOW))
    assert await store.due(moment(NOW + 5), 100) == list(NAMES[:6])
    assert await store.due(moment(NOW + 5), 2) == list(NAMES[:2])
    assert await other.due(moment(NOW), 9) == ["b"]
    await store.delete("order-1")
    assert await store.due(moment(NOW + 5), 100) == [name for name in NAMES[:6] if name != "order-1"]


async def test_without_leave_nothing_is_created(here: Place) -> None:
    store, _ = unfenced(here, auto_migrate=False)
    with pytest.raises(PersistenceError, match="there is no perdure_snapshots table; check the database"):
        await store.load("run")
    await store.setup()
    assert await store.load("run") is None


CHILD = """
import asyncio, sys, warnings
from perdure import Context, workflow
from perdure.backends.sql_client import sql_client
from tests.backends.sql_client.places import CLIENTS
from tests.backends.sql_client.test_unfenced import QueryOnly

@workflow
async def flow(ctx: Context) -> int:
    return 1

async def main(dialect, where):
    warnings.simplefilter("ignore")
    client = CLIENTS[dialect](where)
    try:
        print(await flow.run(id="run", store=sql_client(QueryOnly(client), dialect)), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""


def start_child(here: Place) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, here.dialect, here.where]
    return subprocess.Popen(command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


async def test_a_second_process_is_refused_until_the_first_has_ended(here: Place) -> None:
    first = await asyncio.to_thread(start_child, here)
    try:
        assert await asyncio.to_thread(first_line, first) == "Ok(value=1)"
        told = rf"the sql_client store has no way to serve two processes without transaction\(\), and process {first.pid} on host"
        store, _ = unfenced(here)
        for _ in range(2):
            with pytest.raises(StoreCapabilityError, match=told):
                await store.load("run")
        with pytest.raises(StoreCapabilityError, match=told):
            await store.setup()
        second = await asyncio.to_thread(start_child, here)
        refused, _ = await asyncio.to_thread(second.communicate)
        assert re.match(f"StoreCapabilityError {told}", refused)
    finally:
        first.kill()
        await asyncio.to_thread(first.communicate)
    kept = await store.load("run")
    assert kept is not None
    assert kept.status == "completed"
    assert await store.due(moment(NOW + 10**9), 10) == []


async def test_another_prefix_is_another_place(here: Place) -> None:
    first = await asyncio.to_thread(start_child, here)
    try:
        assert await asyncio.to_thread(first_line, first) == "Ok(value=1)"
        store, _ = unfenced(here, prefix="other")
        assert await store.load("run") is None
    finally:
        first.kill()
        await asyncio.to_thread(first.communicate)


async def test_a_workflow_goes_on_from_it(here: Place) -> None:
    ran: list[str] = []

    @workflow
    async def order(ctx: Context, n: int) -> int:
        async def charge() -> int:
            ran.append("charge")
            return n * 2

        charged = await ctx.step("charge", charge)
        await ctx.wait_for_signal("go")
        return charged

    store, _ = unfenced(here)
    assert isinstance(await order.run(21, id="order-1", store=store), Suspended)
    kept = await store.load("order-1")
    assert kept is not None
    assert (kept.status, kept.event_name, kept.workflow) == ("suspended", "go", "order")
    again, _ = unfenced(here)
    runtime = Runtime(store=again, workflows=[order])
    await runtime.signal("order-1", "go", None)
    assert list((await runtime.sweep(now=moment(NOW) + timedelta(days=9000))).values()) == [Ok(42)]
    assert ran == ["charge"]
