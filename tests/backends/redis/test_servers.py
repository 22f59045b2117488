"""What a store finds out about its server, and what it makes of servers that fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import redis.asyncio

from perdure.backends.redis import RedisStore
from perdure.errors import PerdureWarning, PersistenceError
from perdure.model.records import Lease, Pulse
from perdure.model.run_filter import RunFilter
from perdure.store import STANDARD_PARTS
from perdure.testing.contract.world import entry, new_run
from tests.servers.redis import RedisServer

Start = Callable[..., RedisServer]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[RedisServer] = []

    def one(*options: str) -> RedisServer:
        started.append(RedisServer(*options))
        started[-1].start()
        return started[-1]

    yield one
    for server in started:
        server.remove()


async def test_a_server_that_syncs_every_write_is_a_disk(store: RedisStore) -> None:
    assert store.durability == "disk"
    assert store.capabilities == STANDARD_PARTS | {"shared", "durable"}


async def test_before_it_has_asked_a_store_promises_nothing(server: RedisServer) -> None:
    store = RedisStore(server.url)
    assert store.durability == "process"
    assert store.capabilities == STANDARD_PARTS | {"shared"}
    await store.close()


@pytest.mark.parametrize("setting", [("--appendfsync", "everysec"), ("--no-appendfsync-on-rewrite", "yes")])
async def test_a_server_that_does_not_always_sync_is_no_disk(start: Start, setting: tuple[str, str]) -> None:
    store = RedisStore((await asyncio.to_thread(start, *setting)).url)
    await store.setup()
    assert store.durability == "process"
    assert store.capabilities == STANDARD_PARTS | {"shared", "durable"}
    await store.close()


async def test_a_server_that_keeps_nothing_is_warned_about(start: Start) -> None:
    store = RedisStore((await asyncio.to_thread(start, "--appendonly", "no")).url)
    with pytest.warns(PerdureWarning, match="appendonly yes"):
        await store.create(new_run())
    await store.create(new_run("other"))  # once is enough
    assert store.durability == "process"
    assert store.capabilities == STANDARD_PARTS | {"shared"}
    await store.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_server_that_evicts_runs_is_refused(start: Start, policy: str) -> None:
    server = await asyncio.to_thread(start, "--maxmemory", "100mb", "--maxmemory-policy", policy)
    store = RedisStore(server.url)
    for verb in (store.setup, store.count):
        with pytest.raises(PersistenceError, match=f"{policy}.*noeviction"):
            await verb()
    await store.close()


async def test_a_server_that_evicts_only_what_expires_is_accepted(start: Start) -> None:
    server = await asyncio.to_thread(start, "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
    store = RedisStore(server.url)
    await store.setup()
    await store.close()


async def test_a_full_server_refuses_and_keeps_what_it_has(start: Start) -> None:
    server = await asyncio.to_thread(start, "--maxmemory", "4mb")
    store = RedisStore(server.url)
    await store.create(new_run("first"))
    creating = (store.create(new_run(f"run-{n}", input=b"x" * 100_000)) for n in range(100))
    with pytest.raises(PersistenceError, match="maxmemory"):
        await asyncio.gather(*creating)
    assert [line.id for line in await store.list(RunFilter(prefix="first"))] == ["first"]
    assert await store.count() == len(await store.list(limit=1000))
    await store.close()


async def test_many_large_payloads_go_through_at_once(store: RedisStore) -> None:
    payloads = [bytes([n]) * 5_000_000 for n in range(8)]
    await asyncio.gather(*(store.create(new_run(f"run-{n}", input=payload)) for n, payload in enumerate(payloads)))
    rows = await asyncio.gather(*(store.get(f"run-{n}") for n in range(8)))
    assert [row and row.input for row in rows] == payloads


async def test_a_server_that_lets_nobody_publish_is_polled(start: Start) -> None:
    server = await asyncio.to_thread(start)
    await asyncio.to_thread(server.ask, "ACL SETUSER mute on >pass ~* +@all -publish -subscribe -config resetchannels")
    store = RedisStore(server.url.replace("//", "//mute:pass@"))
    await store.create(new_run())
    assert store.durability == "process"
    await asyncio.wait_for(store.watch(3600), 60)
    assert (await store.claim(1, 60, [("flow", 1)])).claims
    await store.close()


async def test_a_layout_of_another_version_is_refused(server: RedisServer, table: str) -> None:
    async with redis.asyncio.Redis.from_url(server.url, driver_info=None) as client:
        await client.set(f"{{{table}:}}:format", "99")
    store = RedisStore(server.url, table=table)
    with pytest.raises(PersistenceError, match="layout 99"):
        await store.setup()
    await store.close()


async def test_a_closed_store_leaves_no_connection_and_nothing_under_way(start: Start) -> None:
    server = await asyncio.to_thread(start)
    store, other = RedisStore(server.url), RedisStore(server.url)
    await store.watch(0.01)
    await other.setup()
    calls = [asyncio.create_task(store.create(new_run(f"run-{n}"))) for n in range(200)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await store.close()
    made = await other.count()
    await asyncio.wait(calls)
    assert await other.count() == made
    await other.close()
    assert (await asyncio.to_thread(server.ask, "CLIENT LIST")).count(" laddr=") == 1  # who asks


async def test_a_server_that_forgot_the_scripts_is_told_again(server: RedisServer, store: RedisStore) -> None:
    await store.create(new_run())
    await asyncio.to_thread(server.ask, "SCRIPT FLUSH")
    answers = await asyncio.gather(*(store.create(new_run(f"run-{n}")) for n in range(20)))
    assert all(answer.is_new for answer in answers)


async def test_a_server_that_is_not_there_is_an_error_of_ours(start: Start) -> None:
    server = await asyncio.to_thread(start)
    store = RedisStore(server.url)
    await store.setup()
    await asyncio.to_thread(server.stop)
    with pytest.raises(PersistenceError, match=r"Redis store 127\.0\.0\.1"):
        await store.count()
    await store.close()


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(start: Start) -> None:
    server = await asyncio.to_thread(start)
    store = RedisStore(server.url)
    acknowledged: dict[str, int] = {}
    stop, busy = asyncio.Event(), asyncio.Event()

    async def drive(run_id: str) -> None:
        claim = (await store.create(new_run(run_id), ttl=600)).claim
        assert claim is not None
        for seq in range(1, 100_000):
            if stop.is_set():
                return
            await _record(store, claim.lease, seq)
            acknowledged[run_id] = seq
            if sum(acknowledged.values()) % 500 == 0:
                busy.set()

    drivers = [asyncio.create_task(drive(f"run-{n}")) for n in range(20)]
    for _ in range(3):
        busy.clear()
        await busy.wait()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    stop.set()
    await asyncio.gather(*drivers)
    for run_id, last in acknowledged.items():
        assert [line.seq for line in await store.journal(run_id)] == list(range(1, last + 1))
    await store.close()


async def _record(store: RedisStore, lease: Lease, seq: int) -> Pulse:
    """A record, asked for until it is acknowledged."""
    while True:
        try:
            return await store.record(lease, [entry(seq)])
        except PersistenceError:
            await asyncio.sleep(0.01)


async def test_a_watch_outlives_the_server(start: Start) -> None:
    server = await asyncio.to_thread(start)
    store = RedisStore(server.url)
    await store.watch(5)
    await asyncio.to_thread(server.kill)
    await asyncio.wait_for(store.watch(3600), 60)
    await asyncio.to_thread(server.start)
    other = RedisStore(server.url)
    for n in range(20):
        watching = asyncio.create_task(store.watch(3600))
        await asyncio.sleep(0)
        await other.create(new_run(f"run-{n}"))
        await asyncio.wait_for(watching, 60)
    await store.close()
    await other.close()


async def test_no_password_is_shown(start: Start) -> None:
    server = await asyncio.to_thread(start)
    await asyncio.to_thread(server.ask, "CONFIG SET requirepass right")
    store = RedisStore(server.url.replace("//", "//:s3cret-pass@"))
    with pytest.raises(PersistenceError) as refused:
        await store.setup()
    shown = [repr(store), str(store.key), str(refused.value), repr(refused.value), str(refused.value.__cause__)]
    assert not [text for text in shown if "s3cret" in text]
    await store.close()
    for url in ("redis://:s3cret@host:po:rt", "redis://:s3cret@[::1", "http://:s3cret@host", "s3cret", "redis://:a/s3cret@h"):
        with pytest.raises(ValueError, match="URL") as error:
            RedisStore(url)
        assert "s3cret" not in f"{error.value!r} {error.value.__cause__!r}"
    ours = RedisStore(server.url.replace("//", "//:right@"))
    await ours.setup()
    await ours.close()
    await asyncio.to_thread(server.ask, "AUTH right")


def test_a_forked_child_has_connections_of_its_own(server: RedisServer, table: str) -> None:
    store = RedisStore(server.url, table=table)
    asyncio.run(store.watch(1))
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_use(store, "child"))
            gc.collect()
            asyncio.run(store.watch(0.01))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(_use(store, "parent"))
    os.waitpid(child, 0)
    asyncio.run(asyncio.wait_for(_woken(store), 60))
    assert asyncio.run(store.count()) == 200
    asyncio.run(store.close())


async def _woken(store: RedisStore) -> None:
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await store.cancel("child-0")
    await watching


async def _use(store: RedisStore, name: str) -> None:
    await asyncio.gather(*(store.create(new_run(f"{name}-{n}")) for n in range(100)))
