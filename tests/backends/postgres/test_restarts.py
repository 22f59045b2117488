import asyncio

from perdure.backends.postgres import PostgresStore
from perdure.testing.contract.world import new_run
from tests.servers.postgres import PostgresServer


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
