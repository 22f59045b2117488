"""A server that says nothing: a request or a reply that is lost while its connection stays, and writers that it would forget."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from perdure.backends.libsql import LibsqlStore, hrana
from perdure.backends.libsql.connections import LibsqlConnections
from perdure.backends.libsql.write_lock import WriteLock
from perdure.errors import PerdureWarning, PersistenceError
from perdure.model.records import Claim
from perdure.testing.contract.world import entry, new_run
from tests.backends.libsql.proxy import Proxy
from tests.servers.libsql import LibsqlServer

SOON = 0.3


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence is noticed sooner than in earnest; how often it is borne stays as it is."""
    monkeypatch.setattr(LibsqlConnections, "PATIENCE", LibsqlConnections.PATIENCE * SOON / hrana.REQUEST_TIMEOUT)
    monkeypatch.setattr(hrana, "REQUEST_TIMEOUT", SOON)


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    proxy = Proxy(url)
    yield proxy
    proxy.close()


@pytest.fixture
async def store(proxy: Proxy, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(proxy.url, table=table)
    await store.setup()
    yield store
    await store.close()


async def started(store: LibsqlStore, run_id: str = "run") -> Claim:
    claim = (await store.create(new_run(run_id), ttl=60)).claim
    assert claim is not None
    return claim


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("swallowed", ["requests", "replies"])
async def test_what_gets_no_answer_is_asked_again_on_another_connection(store: LibsqlStore, proxy: Proxy, swallowed: str) -> None:
    claim = await started(store)
    setattr(proxy, swallowed, 1)
    await store.record(claim.lease, [entry(1)])
    assert await store.journal("run") == [entry(1)]
    assert (proxy.requests, proxy.replies) == (0, 0)


@pytest.mark.usefixtures("_impatient")
async def test_a_transaction_that_gets_no_answer_is_done_again(store: LibsqlStore, proxy: Proxy) -> None:
    await store.create(new_run())
    proxy.requests = 1
    claim = await store.acquire("run", 60)
    assert claim is not None
    assert claim.run.attempts == 1


@pytest.mark.usefixtures("_impatient")
async def test_a_server_that_stays_silent_is_an_error_that_says_what_to_do(store: LibsqlStore, proxy: Proxy) -> None:
    claim = await started(store)
    proxy.requests = 1000
    with pytest.raises(PersistenceError, match=r"no reply within 0\.3 s.*--checkpoint-interval-s"):
        await store.record(claim.lease, [entry(1)])
    proxy.requests = 0
    await store.record(claim.lease, [entry(1)])


def test_a_silence_ends_while_a_lease_can_still_be_renewed() -> None:
    usual_lease, renewed_after = 30.0, 10.0
    assert renewed_after + hrana.REQUEST_TIMEOUT < usual_lease
    assert LibsqlConnections.PATIENCE > 2 * hrana.REQUEST_TIMEOUT


async def test_whatever_stores_of_a_process_write_one_thing_is_written_at_a_time(
    store: LibsqlStore, proxy: Proxy, table: str
) -> None:
    other = LibsqlStore(proxy.url, table=table)
    claims = [await started(store, f"run-{n}") for n in range(10)]
    proxy.most_writing = 0

    async def work(handle: LibsqlStore, claim: Claim) -> None:
        await handle.record(claim.lease, [entry(1)])
        await handle.signal(claim.run.id, "go", b"1")
        await handle.renew([claim.lease], 60)
        await handle.report(claim.lease, b"half")
        await handle.create(new_run(f"after-{claim.run.id}"))
        await handle.finish(claim.lease, "completed", b"1")

    await asyncio.gather(*(work((store, other)[n % 2], claim) for n, claim in enumerate(claims)))
    assert proxy.most_writing == 1
    await other.close()


async def test_a_write_lock_that_is_held_too_long_is_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.libsql.write_lock.MAX_HOLD", 0.05)
    write_lock, order = WriteLock(), list[str]()

    async def take(name: str) -> None:
        async with write_lock.hold():
            order.append(name)

    async with write_lock.hold():
        await asyncio.wait_for(take("second"), 3)
        order.append("first")
    await take("third")
    assert order == ["second", "first", "third"]
    assert not write_lock._lock.locked()


async def test_a_forked_child_has_write_locks_of_its_own(store: LibsqlStore, url: str, table: str) -> None:
    """What the parent was about to write when it forked is never finished in the child."""
    claim = await started(store)
    seen = LibsqlStore(url, table=table)

    async def record() -> None:
        async with asyncio.timeout(4):
            await store.record(claim.lease, [entry(1)])

    async with store._connections.write_lock.hold():
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                asyncio.run(record())
                os._exit(0)
            os._exit(1)
    assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
    assert await seen.journal("run") == [entry(1)]
    await seen.close()


@pytest.fixture
def checkpointing() -> Iterator[LibsqlServer]:
    """A server as it is without options: it moves its log into the database after commits."""
    server = LibsqlServer(own=True, checkpoints=())
    server.start()
    yield server
    server.kill()
    server.remove()


async def test_a_server_that_checkpoints_after_commits_is_not_brought_to_a_halt_by_one_process(
    checkpointing: LibsqlServer,
) -> None:
    """Four writers at once would be enough for that; see `turn`. With payloads like these its log is soon long."""
    stores = [LibsqlStore(checkpointing.url) for _ in range(3)]
    with pytest.warns(PerdureWarning, match=r"sqld 0\.24\.\d+ may stop writing for good .* --checkpoint-interval-s"):
        await asyncio.gather(*(store.setup() for store in stores))
    claims = [await started(stores[0], f"run-{n}") for n in range(24)]

    async def work(handle: LibsqlStore, claim: Claim) -> None:
        for seq in range(1, 9):
            await handle.record(claim.lease, [entry(seq, payload=os.urandom(60_000))])
            await handle.signal(claim.run.id, "go", os.urandom(30_000))
            await handle.renew([claim.lease], 60)
        await handle.finish(claim.lease, "completed", b"1")

    await asyncio.gather(*(work(stores[n % 3], claim) for n, claim in enumerate(claims)))
    for store in stores:
        await store.close()
