"""What stands in the table of signals once they are consumed: the same in every SQL database, on every path that writes it."""

from __future__ import annotations

from perdure.testing.contract.world import EXPIRED, NOW, TTL, at, entry, new_run
from tests.backends.opening import store_at
from tests.backends.raw_data import ask
from tests.backends.registry import LIBSQL, MYSQL, POSTGRES, SQLITE, Backend, on


@on(SQLITE, POSTGRES, MYSQL, LIBSQL)
async def test_a_consumed_row_has_the_token_of_the_lease_that_consumed_it_first(backend: Backend, dsn: str) -> None:
    async with store_at(dsn) as store:
        first = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
        assert first is not None
        for _ in range(6):
            await store.signal("run", "go", b"1", now=NOW)
        await store.record(first.lease, [entry(1)], consume=[1], now=NOW)
        await store.record(first.lease, [entry(1)], consume=[1, 2], now=NOW)  # a part of it is recorded already
        assert len(await store.suspend(first.lease, wake_at=None, waiting_for=[], consume=[3], now=NOW)) == 0
        second = await store.acquire("run", TTL, due_only=False, now=EXPIRED)
        assert second is not None
        await store.record(second.lease, [entry(2)], consume=[1, 4], now=EXPIRED)
        await store.finish(second.lease, "completed", b"1", entries=[entry(2)], consume=[5], now=at(99))
        rows = await ask(dsn, "SELECT consumed_by FROM perdure_signals ORDER BY seq")
    consumed_by = [text.decode() if isinstance(text, bytes) else text for (text,) in rows]
    assert consumed_by == [*[first.lease.token] * 3, *[second.lease.token] * 2, None]
