"""`runtime.workers()` shows the workers on a store, and which of them have fallen silent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from perdure import Context, Runtime, SnapshotCorrupt, stores, workflow
from perdure.store import FullStore, Store, require
from perdure.worker import worker_registry
from tests.patience import PATIENCE
from tests.worker.flows import soon

_WORKER = """
import asyncio, sys
from perdure import Context, Runtime, workflow

@workflow
async def flow(ctx: Context) -> None: ...

asyncio.run(Runtime(sys.argv[1], [flow], lease_ttl="300ms", concurrency=7).work())
"""


@workflow(version=3)
async def flow(ctx: Context) -> None: ...


@pytest.fixture
def _shows_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "FIRST_AFTER", 0.0)


async def test_a_worker_shows_what_it_is_and_removes_itself_when_it_has_drained(store: Store) -> None:
    async with Runtime(store, [flow], concurrency=5, only_queues=["mail", "default"]) as runtime:
        (worker,) = await runtime.workers()
        assert (worker.concurrency, worker.driven, worker.queues, worker.workflows) == (
            5,
            0,
            ("default", "mail"),
            (("flow", 3),),
        )
        assert worker.name == f"{worker.host}/{worker.pid}"
        assert worker.started_at <= worker.seen_at
        assert not worker.is_silent
        assert [each.id for each in await asyncio.to_thread(runtime.sync.workers)] == [worker.id]
        async with Runtime(store, [flow], concurrency=1):
            await soon(lambda: _count(runtime, 2))
        await soon(lambda: _count(runtime, 1))
        client = Runtime(store)
    assert await client.workers() == []


async def _count(runtime: Runtime, count: int) -> bool:
    return len(await runtime.workers()) == count


@pytest.mark.usefixtures("_shows_itself_at_once")
async def test_signs_of_life_go_on_and_count_the_runs_that_are_driven(store: Store) -> None:
    go_on = asyncio.Event()

    @workflow
    async def busy(ctx: Context) -> None:
        await ctx.step(go_on.wait)

    async with Runtime(store, [busy], lease_ttl="200ms") as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(busy)
        client = Runtime(store)

        async def drives_one() -> bool:
            return [worker.driven for worker in await client.workers()] == [1]

        await soon(drives_one)
        (first,) = await client.workers()

        async def is_seen_again() -> bool:
            (worker,) = await client.workers()
            return worker.seen_at > first.seen_at and worker.id == first.id

        await soon(is_seen_again)
        go_on.set()
        await run


async def test_a_script_that_ends_soon_does_not_write_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.memory()
    written: list[str] = []

    async def put(worker_id: str, *_given: object, **_options: object) -> None:
        written.append(worker_id)

    monkeypatch.setattr(store, "put_worker", put)
    async with Runtime(store, [flow]) as runtime:
        await (await runtime.start(flow))
    assert written == []


@pytest.mark.one_loop  # uvloop forks on the event loop, and the hooks of a fork wait for the writer's thread
async def test_a_worker_that_was_killed_is_silent(tmp_path: Path) -> None:
    dsn = f"sqlite:///{tmp_path / 'app.db'}"
    async with Runtime(dsn, concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _WORKER, dsn)
        await soon(lambda: _has_one(runtime, is_silent=False))
        (worker,) = await runtime.workers()
        assert (worker.pid, worker.concurrency) == (process.pid, 7)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await soon(lambda: _has_one(runtime, is_silent=True))


async def _has_one(runtime: Runtime, *, is_silent: bool) -> bool:
    return [worker.is_silent for worker in await runtime.workers()] == [is_silent]


@pytest.mark.usefixtures("_shows_itself_at_once")
async def test_another_worker_removes_one_that_has_been_silent_for_an_hour(store: FullStore) -> None:
    now = (await store.claim(0, 1.0, ())).now
    hour = 3_600_000_000
    await store.put_worker("long dead", b"{}", now=now - hour - 1_000_000)
    await store.put_worker("not so long", b"{}", now=now - hour + 60_000_000)
    async with Runtime(store, [flow], lease_ttl="200ms"):

        async def is_removed() -> bool:
            return "long dead" not in {row.id for row in await store.workers()}

        await soon(is_removed)
        assert "not so long" in {row.id for row in await store.workers()}


async def test_a_worker_that_cannot_be_read_is_named(store: FullStore) -> None:
    await require(store, "operators").put_worker("odd", b"no json")
    with pytest.raises(SnapshotCorrupt, match="odd"):
        await Runtime(store).workers()


async def test_a_store_that_fails_delays_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.memory()

    async def hang(*_given: object, **_options: object) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE):
        async with Runtime(store, [flow]) as runtime:
            await runtime.workers()
            monkeypatch.setattr(store, "drop_worker", hang)
            monkeypatch.setattr(worker_registry, "_REMOVAL_PATIENCE", 0.05)
