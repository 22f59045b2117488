import asyncio

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.backends.postgres import PostgresStore
from perdure.testing.contract.world import entry, new_run
from tests.servers.postgres import PostgresServer

TTL = 600.0


async def test_a_watch_goes_on_after_the_server_restarted(restartable: PostgresServer) -> None:
    store = PostgresStore(restartable.dsn)
    await store.setup()
    await store.watch(5)
    assert _is_live(store)
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(60):
        await watching  # woken, as something may have been missed
    await asyncio.to_thread(restartable.start)
    async with asyncio.timeout(60):
        while not _is_live(store):
            await store.watch(0.1)
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await store.create(new_run())
    async with asyncio.timeout(60):
        await watching
    await store.close()


def _is_live(store: PostgresStore) -> bool:
    return store._listener.is_live


async def test_a_write_outlasts_a_failover(restartable: PostgresServer) -> None:
    store = PostgresStore(restartable.dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    operator = await asyncpg.connect(restartable.dsn)
    await operator.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")  # as a standby would be
    await operator.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datid <> 0")
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)]))
    await asyncio.wait([writing], timeout=0.5)
    assert not writing.done()
    await operator.execute("SET default_transaction_read_only = off")
    await operator.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
    async with asyncio.timeout(60):
        await writing
    assert await store.journal("run") == [entry(1)]
    await operator.close()
    await store.close()
