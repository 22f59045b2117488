import asyncio

import pytest

from perdure.backends.base.dsn import split_options
from perdure.backends.postgres import PostgresStore
from tests.backends.places import with_options
from tests.servers.postgres import PostgresServer


def test_options_of_ours_are_told_from_those_of_postgres() -> None:
    dsn, options = split_options("postgresql://u:p%40@h:1/d?sslmode=disable&table=shop&prefix=a%2Fb", {"table", "prefix"})
    assert (dsn, options) == ("postgresql://u:p%40@h:1/d?sslmode=disable", {"table": "shop", "prefix": "a/b"})


async def durability_at(dsn: str) -> str:
    store = PostgresStore(dsn)
    await store.setup()
    await store.close()
    return store.durability


@pytest.mark.parametrize(
    ("commit", "durability"), [("on", "disk"), ("local", "disk"), ("remote_apply", "disk"), ("off", "process")]
)
async def test_durability_is_what_a_commit_waits_for(dsn: str, commit: str, durability: str) -> None:
    assert await durability_at(with_options(dsn, f"synchronous_commit={commit}")) == durability


async def test_a_server_that_does_not_sync_is_no_disk() -> None:
    server = PostgresServer("fsync=off", own=True)
    await asyncio.to_thread(server.start)
    assert await durability_at(server.dsn) == "process"
    await asyncio.to_thread(server.remove)
