from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.testing.contract.world import entry, new_run
from tests.wire import Wire


@pytest.fixture
def wire(url: str) -> Iterator[Wire]:
    wire = Wire(url)
    yield wire
    wire.close()


async def test_whichever_reply_of_a_transaction_is_lost_it_is_done_once(wire: Wire, url: str, table: str) -> None:
    """A transaction of several requests that is cut off in the middle blocks other writers until the server ends it, after some
    seconds; then the store repeats all of it."""
    through, seen = LibsqlStore(wire.url, table=table), LibsqlStore(url, table=table)
    await through.setup()

    async def acquire(run_id: str) -> int:
        await seen.create(new_run(run_id))
        before = wire.round_trips
        claim = await through.acquire(run_id, 60)
        assert claim is not None
        assert claim.run.attempts == 1
        await seen.record(claim.lease, [entry(1)])
        return wire.round_trips - before

    requests = await acquire("unharmed")
    for later in (requests - 3, 1):  # the reply to the commit, after which two are read, and one before it
        wire.later, wire.lose, wire.lost = later, 1, 0
        await acquire(f"lost-{later}")
        assert wire.lost == 1
    await through.close()
    await seen.close()
