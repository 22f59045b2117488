"""A server that is stopped or killed and comes back, and one that stays away, as one process with many callers sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Literal
from urllib.parse import urlsplit

import pytest

from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import entry, new_run, outcomes
from tests.backends.opening import connections_of, store_at
from tests.backends.places import new_name, with_options
from tests.backends.registry import SERVER_BACKENDS, Server, ServerBackend, on

TTL: Final = 600.0
PATIENCE: Final = 30.0


@pytest.fixture(scope="session")
def server(server_backend: ServerBackend) -> Iterator[Server]:
    """A server that only these tests use. A test leaves it running, as a start takes long on some."""
    assert server_backend.own_server is not None
    server = server_backend.own_server()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def own_dsn(server: Server) -> str:
    return with_options(server.dsn, f"prefix={new_name()}")


async def leased(store: FullStore, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


class Load:
    """Runs that record and signal one after the other. What was acknowledged must be there in the end."""

    def __init__(self, store: FullStore, runs: int) -> None:
        self._store = store
        self._is_over = asyncio.Event()
        self.acknowledged: dict[str, int] = {}
        self.signalled: dict[str, int] = {}
        self._tasks = [asyncio.create_task(self._drive(f"run-{n}")) for n in range(runs)]

    async def _drive(self, run_id: str) -> None:
        lease = await leased(self._store, run_id)
        while not self._is_over.is_set():
            seq = self.acknowledged.get(run_id, 0) + 1
            await self._store.record(lease, [entry(seq)])
            self.acknowledged[run_id] = seq
            if seq % 5 == 0:
                self.signalled[run_id] = await self._store.signal(run_id, "go", b"%d" % seq)
        await self._store.finish(lease, "completed", b"1")

    async def progress(self, records: int) -> None:
        """Return when so many more records are acknowledged."""
        wanted = sum(self.acknowledged.values()) + records
        while sum(self.acknowledged.values()) < wanted:
            done, _ = await asyncio.wait(self._tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # before the end of the test, only an error ends one

    async def end(self) -> None:
        self._is_over.set()
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_acknowledged_is_lost_when_the_server_restarts_under_load(
    server_backend: ServerBackend, server: Server, own_dsn: str, how: Literal["stop", "kill"], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow = server_backend.pace > 1
    runs, restarts, records = (10, 1, 50) if is_slow else (20, 2, 100)
    async with store_at(own_dsn) as store:
        if is_slow:
            monkeypatch.setattr(type(connections_of(store)), "PATIENCE", 200.0)
        load = Load(store, runs)
        for _ in range(restarts):
            await load.progress(records)
            await asyncio.to_thread(getattr(server, how))
            await asyncio.to_thread(server.start)
            await load.progress(records)
        await load.end()
        for run_id, seq in load.acknowledged.items():
            assert [line.seq for line in await store.journal(run_id)] == list(range(1, seq + 1))
            assert [row.seq for row in await store.inbox(run_id)] == list(range(1, load.signalled.get(run_id, 0) + 1))
        assert await store.count(RunFilter(status=("completed",))) == runs


async def test_a_server_that_stays_away_is_an_error_in_bounded_time(
    server_backend: ServerBackend, server: Server, own_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(with_options(own_dsn, server_backend.away_options)) as store:
        monkeypatch.setattr(type(connections_of(store)), "PATIENCE", 0.5)
        lease = await leased(store)
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(PersistenceError) as refusal:
                await store.record(lease, [entry(1)])
        assert (urlsplit(own_dsn).password or "no password") not in str(refusal.value)
        await asyncio.to_thread(server.start)
        await store.record(lease, [entry(1)])
        assert await store.journal("run") == [entry(1)]
        await store.release(lease)
        with pytest.raises(LeaseLost):
            await store.record(lease, [entry(2)])


@on(*(backend for backend in SERVER_BACKENDS if backend.failover is not None))
async def test_a_write_outlasts_a_failover(server_backend: ServerBackend, server: Server, own_dsn: str) -> None:
    assert server_backend.failover is not None
    async with store_at(own_dsn) as store:
        lease = await leased(store)
        async with server_backend.failover(server.dsn):
            writing = asyncio.ensure_future(store.record(lease, [entry(1)]))
            await asyncio.wait([writing], timeout=0.5)
            assert not writing.done()
        async with asyncio.timeout(PATIENCE):
            await writing
        assert await store.journal("run") == [entry(1)]


async def test_a_watcher_is_woken_when_the_server_goes_away(
    server_backend: ServerBackend, server: Server, own_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(with_options(own_dsn, server_backend.away_options)) as store:
        monkeypatch.setattr(type(connections_of(store)), "PATIENCE", 0.5)
        await store.setup()
        await store.watch(1)
        watching = asyncio.create_task(store.watch(3600))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(PATIENCE):
            await watching  # woken, as a change may have been missed
        await asyncio.to_thread(server.start)


async def test_many_callers_learn_at_once_that_the_server_stays_away(
    server_backend: ServerBackend, server: Server, own_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(with_options(own_dsn, server_backend.away_options)) as store:
        monkeypatch.setattr(type(connections_of(store)), "PATIENCE", 1.0)
        leases = [await leased(store, f"run-{n}") for n in range(50)]
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(PATIENCE):  # one after the other would take 50 seconds
            answers = await outcomes(store.record(lease, [entry(1)]) for lease in leases)
        assert all(isinstance(answer, PersistenceError) for answer in answers)
        assert len({id(answer) for answer in answers}) == 50
        await asyncio.to_thread(server.start)
