import asyncio
import time

import pytest

from perdure.backends.base.dsn import split_options
from perdure.backends.postgres import PostgresStore
from perdure.testing.contract.world import new_run


def test_options_of_ours_are_told_from_those_of_postgres() -> None:
    dsn, options = split_options("postgresql://u:p%40@h:1/d?sslmode=disable&table=shop&prefix=a%2Fb", {"table", "prefix"})
    assert (dsn, options) == ("postgresql://u:p%40@h:1/d?sslmode=disable", {"table": "shop", "prefix": "a/b"})


async def test_a_watcher_is_told_and_does_not_look_for_itself(
    dsn: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PostgresStore(dsn)
    await other.setup()
    await store.watch(5)  # opens the connection
    with monkeypatch.context() as patched:
        patched.setattr("perdure.backends.postgres.store.POLL_EVERY", 3600.0)
        for n in range(5):
            watching = asyncio.create_task(store.watch(3600))
            await asyncio.sleep(0)
            await other.create(new_run(f"run-{n}"))
            await asyncio.wait_for(watching, 60)
    began = time.monotonic()
    await store.watch(1.5)  # nothing happens, and polling would have ended it sooner
    assert time.monotonic() - began >= 1.4
    await other.close()
