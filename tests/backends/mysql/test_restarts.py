from contextlib import suppress

from asyncmy.errors import OperationalError

from perdure.backends.mysql import MysqlStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.mysql.conftest import ask

TTL = 600.0


async def test_a_write_outlasts_its_connection(dsn: str, store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    database = dsn.rpartition("/")[2]
    for seq in range(1, 6):
        others = await ask(
            dsn, f"SELECT id FROM information_schema.processlist WHERE db = '{database}' AND id <> CONNECTION_ID()"
        )
        for (number,) in others:
            with suppress(OperationalError):  # it has ended by itself
                await ask(dsn, f"KILL {number}")
        await store.record(claim.lease, [entry(seq)])
    assert [line.seq for line in await store.journal("run")] == [1, 2, 3, 4, 5]
