"""A thread that cannot be started: the caller hears of it or it is tried again, every run ends, and nothing hangs.

Each test fails the n-th start of a thread, for all n, in a worker with ten runs of plain and async steps.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from perdure import Context, Ok, Runtime, open_store, stores, workflow
from perdure.aio.loop_thread import LoopThread
from perdure.engine.heartbeat import heartbeat_of
from perdure.errors import PersistenceError, RunCancelled
from perdure.kv.files import FilesKeyValueStore
from perdure.kv.sqlite import SQLiteKeyValueStore
from perdure.model.clock import SystemClock, elapsed
from perdure.model.records import Pulse
from perdure.store import Store
from perdure.testing.contract.world import new_run
from tests.backends.opening import connections_of
from tests.backends.places import with_options
from tests.backends.registry import ServerBackend
from tests.failing_starts import FailingStarts, unstarted_threads
from tests.leases import held_lease

T = TypeVar("T")

RUNS: Final = 10
# Far longer than anything takes, but for a lease that has to expire.
PATIENCE: Final = 20.0
LEASE_TTL: Final = 1.0

OPENERS: Final[dict[str, Callable[[Path], Store]]] = {
    "memory": lambda _: stores.memory(),
    "sqlite": lambda path: stores.sqlite(path / "app.db"),
    "key_value-files": lambda path: stores.key_value(FilesKeyValueStore(path / "values")),
    "key_value-sqlite": lambda path: stores.key_value(SQLiteKeyValueStore(path / "values.db")),
}

calls: Counter[str] = Counter()


def plain(key: str) -> str:
    calls[key] += 1
    threading.Event().wait(0.005)
    return key


async def on_loop(key: str) -> str:
    calls[key] += 1
    return key


@workflow
async def three_steps(ctx: Context, number: int) -> str:
    first = await ctx.step("first", plain, f"{number}-first")
    second = await ctx.step("second", on_loop, f"{number}-second")
    return await ctx.step("third", plain, f"{number}-third") + first + second


@workflow
async def wait(ctx: Context) -> None:
    await ctx.step("before", plain, "wait-before")
    await ctx.wait_for_signal("never")


async def insist(act: Callable[[], Awaitable[T]]) -> T:
    """What a caller gets who tries again after errors of the store, and meets no others."""
    while True:
        try:
            return await act()
        except PersistenceError:
            await asyncio.sleep(0.01)


async def prepare(store: Store) -> None:
    """Half of the runs, for a worker to find."""
    async with Runtime(store, concurrency=0) as client:
        for number in range(0, RUNS, 2):
            await client.start(three_steps, number, id=f"r{number}")


async def use(store: Store) -> None:
    """Ten runs and a cancelled one, to their ends."""
    runtime = Runtime(store, [three_steps, wait], lease_ttl=LEASE_TTL, drain_after=1)
    await insist(runtime.__aenter__)
    try:
        async with asyncio.timeout(PATIENCE):
            for parity in (0, 1):
                numbers = range(parity, RUNS, 2)
                runs = await asyncio.gather(*(insist(partial(_start, runtime, number)) for number in numbers))
                results = await asyncio.gather(*(insist(partial(_wait, run)) for run in runs))
                assert results == [f"{number}-third{number}-first{number}-second" for number in numbers]
            cancelled = await insist(lambda: runtime.start(wait, id="cancelled"))
            await insist(cancelled.cancel)
            with pytest.raises(RunCancelled):
                await insist(partial(_wait, cancelled))
    finally:
        async with asyncio.timeout(PATIENCE):
            await runtime.__aexit__(None, None, None)


async def _start(runtime: Runtime, number: int) -> Any:
    """A run that starts here, or one that was there before, which only the worker drives."""
    return await (runtime.start(three_steps, number, id=f"r{number}") if number % 2 else runtime.get(f"r{number}"))


async def _wait(run: Any) -> Any:
    return await run


@pytest.fixture(params=OPENERS)
def opener(request: pytest.FixtureRequest) -> Callable[[Path], Store]:
    return OPENERS[request.param]


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / str(number) for number in itertools.count())


@pytest.mark.parametrize("in_a_row", [1, 5])
def test_every_run_ends_whichever_thread_cannot_be_started(
    opener: Callable[[Path], Store],
    directories: Iterator[Path],
    in_a_row: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in itertools.count(1, in_a_row):
        calls.clear()
        directory = next(directories)
        directory.mkdir()
        with monkeypatch.context() as patch, unstarted_threads(patch):
            store = opener(directory)
            asyncio.run(prepare(store))
            if store.durability == "disk":
                asyncio.run(store.close())
                store = opener(directory)
        with monkeypatch.context() as patch, unstarted_threads(patch):
            starts = FailingStarts(patch)
            starts.fails = lambda tried, first=number: first <= tried < first + in_a_row  # type: ignore[misc]
            asyncio.run(use(store))
            asyncio.run(close(store))
        if not starts.failed:
            return
        assert {key for key in calls if key != "wait-before"} == {
            f"{n}-{k}" for n in range(RUNS) for k in ("first", "second", "third")
        }
        assert calls.total() <= 3 * RUNS + 1 + starts.failed, calls


async def close(store: Store) -> None:
    async with asyncio.timeout(PATIENCE):
        await insist(store.close)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStarts]:
    with unstarted_threads(monkeypatch):
        yield FailingStarts(monkeypatch)


@pytest.mark.parametrize("opener", [name for name in OPENERS if name != "memory"], indirect=True)
async def test_a_verb_without_a_thread_fails_and_the_next_one_works(
    opener: Callable[[Path], Store], tmp_path: Path, starts: FailingStarts
) -> None:
    store = await asyncio.to_thread(opener, tmp_path)
    starts.fail_all()
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            with pytest.raises(PersistenceError, match="can't start new thread"):
                await store.create(new_run("r1"))
            with pytest.raises(PersistenceError, match="can't start new thread"):
                await three_steps.run(1, id="r2", store=store)
        starts.fail_none()
        await store.create(new_run("r1"))
        assert await three_steps.run(1, id="r2", store=store) == Ok("1-third1-first1-second")
        await store.close()


async def test_leases_are_renewed_once_the_thread_for_it_can_be_started(
    starts: FailingStarts, caplog: pytest.LogCaptureFixture
) -> None:
    store, ttl = stores.memory(), 0.6
    starts.fail_all()
    claim = (await store.create(new_run("r1"), ttl=ttl)).claim
    assert claim is not None
    pulses: list[Pulse] = []
    held = held_lease(claim, ttl, elapsed(), SystemClock(), pulses.append)
    beat = heartbeat_of(store, ttl)
    beat.hold(held)
    await asyncio.sleep(ttl / 4)
    assert starts.failed > 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    starts.fail_none()
    async with asyncio.timeout(PATIENCE):
        while len(pulses) < 2:  # noqa: ASYNC110 - the heartbeat has a thread of its own
            await asyncio.sleep(0.01)
    beat.drop(held)


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_server_store_survives_a_thread_that_cannot_be_started(
    server_backend: ServerBackend, shared_dsn: str, number: int, starts: FailingStarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is the thread of its connections; among the others are those in which asyncio looks up the server's name."""
    by_name = shared_dsn.replace("127.0.0.1", "localhost")
    store = await asyncio.to_thread(open_store, with_options(by_name, server_backend.away_options))
    monkeypatch.setattr(type(connections_of(store)), "THREAD", LoopThread("perdure-test-server"))
    starts.tried = 0
    starts.fails = lambda tried: tried == number
    async with asyncio.timeout(3 * PATIENCE):
        await insist(lambda: store.create(new_run("r1")))
        assert await insist(lambda: three_steps.run(1, id="r2", store=store)) == Ok("1-third1-first1-second")
        await store.close()
    assert starts.failed == 1
