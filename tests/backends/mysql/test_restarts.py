import asyncio

from perdure.backends.mysql import MysqlStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.mysql.conftest import ask
from tests.servers.mysql import MysqlServer

TTL = 600.0


async def test_a_write_outlasts_a_failover(restartable: MysqlServer) -> None:
    dsn = restartable.dsn
    store = MysqlStore(dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    # As a replica would be. A user with the right to write all the same does not notice, so that is taken away.
    await ask(dsn, "REVOKE READ_ONLY ADMIN, SUPER ON *.* FROM perdure@'127.0.0.1'")
    await ask(dsn.replace("perdure:", "root:").replace(_password(dsn), ""), "SET GLOBAL read_only = 1")
    await store._connections.run(_drop_connections(store))
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)]))
    await asyncio.wait([writing], timeout=0.5)
    assert not writing.done()
    await ask(dsn.replace("perdure:", "root:").replace(_password(dsn), ""), "SET GLOBAL read_only = 0")
    async with asyncio.timeout(10):
        await writing
    assert await store.journal("run") == [entry(1)]
    await store.close()


def _password(dsn: str) -> str:
    return dsn.partition("perdure:")[2].partition("@")[0]


async def _drop_connections(store: MysqlStore) -> None:
    """Rights are read when a connection is opened."""
    pool = store._connections._pool
    assert pool is not None
    await pool.clear()


async def test_a_write_outlasts_its_connection(dsn: str, store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    database = dsn.rpartition("/")[2]
    for seq in range(1, 6):
        others = await ask(
            dsn, f"SELECT id FROM information_schema.processlist WHERE db = '{database}' AND id <> CONNECTION_ID()"
        )
        for (number,) in others:
            await ask(dsn, f"KILL {number}")
        await store.record(claim.lease, [entry(seq)])
    assert [line.seq for line in await store.journal("run")] == [1, 2, 3, 4, 5]
