"""A client that stays the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from perdure import Context, stores, workflow
from perdure.backends.redis import RedisStore
from perdure.errors import PersistenceError
from perdure.kv import RedisKeyValueStore
from perdure.state import ResumeState, StatePersistence, StepResult
from perdure.testing.contract.world import entry, in_another_loop, new_run
from tests.servers.redis import RedisServer


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    made = redis.asyncio.Redis.from_url(server.url, driver_info=None)
    yield made
    await made.aclose()


async def test_a_borrowed_client_is_used_and_not_closed(client: Any, table: str, store: RedisStore) -> None:
    borrowed = RedisStore(client=client, table=table)
    assert borrowed.key == store.key
    await borrowed.create(new_run())
    await borrowed.watch(0.01)
    await borrowed.close()
    assert await client.ping()
    assert await store.count() == 1


async def test_a_borrowed_client_serves_other_loops_on_its_own(client: Any, table: str) -> None:
    borrowed = RedisStore(client=client, table=table)
    claim = (await borrowed.create(new_run(), ttl=60)).claim
    assert claim is not None
    sibling = borrowed.sibling()

    async def renew() -> int:
        pulses = await sibling.renew([claim.lease], 60)
        await sibling.close()
        return len([pulse for pulse in pulses if pulse is not None])

    assert await in_another_loop(renew) == 1
    await in_another_loop(lambda: borrowed.record(claim.lease, [entry(1)]))
    assert await borrowed.journal("run") == [entry(1)]
    await borrowed.close()


async def test_a_client_that_decodes_is_refused(server: RedisServer) -> None:
    client = redis.asyncio.Redis.from_url(server.url, decode_responses=True, driver_info=None)
    with pytest.raises(ValueError, match="decode_responses"):
        RedisStore(client=client)
    await client.aclose()


def test_a_cluster_client_that_decodes_is_refused() -> None:
    client = redis.asyncio.RedisCluster(host="nowhere", decode_responses=True)
    with pytest.raises(ValueError, match="decode_responses"):
        RedisStore(client=client)


MAKERS: list[Callable[..., Any]] = [stores.redis, RedisStore, RedisKeyValueStore]


@pytest.mark.parametrize("make", MAKERS)
def test_a_synchronous_client_is_refused_with_what_to_pass(make: Callable[..., Any]) -> None:
    advice = r"redis\.Redis is synchronous; pass redis\.asyncio\.Redis\.from_url\(url\), or the URL itself"
    with pytest.raises(TypeError, match=advice):
        make(client=redis.Redis())


@pytest.mark.parametrize("make", MAKERS)
def test_a_client_by_position_is_refused_with_what_to_pass(make: Callable[..., Any]) -> None:
    for client in (redis.asyncio.Redis(driver_info=None), redis.Redis()):
        with pytest.raises(TypeError, match="is the URL of a Redis server, not a Redis; pass a client as client="):
            make(client)


@pytest.mark.parametrize("make", MAKERS)
def test_a_url_and_a_client_are_refused_with_what_to_pass(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="the URL of a Redis server or client=, not both"):
        make("redis://localhost", client=redis.asyncio.Redis(driver_info=None))
    with pytest.raises(ValueError, match="the URL of a Redis server or client="):
        make()


class TestAClientAsKeyValueStore:
    """`stores.key_value`, `StatePersistence` and `cache=` over a client that the program has already."""

    @pytest.fixture(params=["bytes", "text"])
    async def used(self, request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Any]:
        """A client that is in use on this loop, so its connections belong to it."""
        made = redis.asyncio.Redis.from_url(server.url, decode_responses=request.param == "text", driver_info=None)
        await made.ping()
        yield made
        await made.aclose()

    async def test_runs_are_kept_in_it(self, used: Any, table: str) -> None:
        store = stores.key_value(used, prefix=table)
        claim = (await store.create(new_run(), ttl=60)).claim
        assert claim is not None
        await store.record(claim.lease, [entry(1)])
        assert await store.journal("run") == [entry(1)]
        await in_another_loop(lambda: store.record(claim.lease, [entry(2)]))
        assert [info.id for info in await store.list()] == ["run"]
        await store.close()
        again = stores.key_value(used, prefix=table)
        assert await again.journal("run") == [entry(1), entry(2)]
        await again.close()

    async def test_states_and_cached_steps_are_kept_in_it(self, used: Any, table: str) -> None:
        persistence = StatePersistence(used, f"{table}:")
        state = ResumeState({"a": StepResult(ok=True, value=1)})
        await persistence.save("one", state)
        assert (await persistence.load("one"), await persistence.list()) == (state, ["one"])
        assert isinstance(await persistence.load_raw("one"), str)
        assert await persistence.delete("one") is True
        calls: list[int] = []

        async def count() -> int:
            calls.append(1)
            return len(calls)

        @workflow(cache=used)
        async def flow(ctx: Context) -> int:
            return await ctx.step(count, key=f"{table}:count", ttl=60)

        assert [await flow(), await flow()] == [1, 1]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_either_protocol_will_do(server: RedisServer, table: str, protocol: int) -> None:
    client = redis.asyncio.Redis.from_url(server.url, protocol=protocol, driver_info=None)
    borrowed = RedisStore(client=client, table=table)
    await borrowed.create(new_run(), entries=[entry(1)])
    (claim,) = (await borrowed.claim(1, 60, [("flow", 1)])).claims
    assert claim.journal == [entry(1)]
    assert borrowed.durability == "disk"
    watching = asyncio.create_task(borrowed.watch(3600))
    await asyncio.wait_for(watching, 60)
    watching = asyncio.create_task(borrowed.watch(3600))
    await asyncio.sleep(0)
    await borrowed.finish(claim.lease, "completed", b"1")
    await asyncio.wait_for(watching, 60)
    await borrowed.close()
    await client.aclose()


def test_a_store_whose_clients_loop_is_gone_says_so(server: RedisServer, table: str) -> None:
    async def make() -> RedisStore:
        client = redis.asyncio.Redis.from_url(server.url, driver_info=None)
        borrowed = RedisStore(client=client, table=table)
        await borrowed.setup()
        await client.aclose()
        return borrowed

    borrowed = asyncio.run(make())
    with pytest.raises(PersistenceError, match="loop"):
        asyncio.run(borrowed.count())
    asyncio.run(borrowed.close())


def test_a_url_or_a_client_is_needed() -> None:
    with pytest.raises(ValueError, match="either"):
        RedisStore()
    with pytest.raises(ValueError, match="either"):
        RedisStore("redis://localhost", client=object())
