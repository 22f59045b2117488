"""Writes that a transaction or a batch refuses, while it does the others."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.backends.sql import recording
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.backends.sql_client.store import SqlClientStore
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease, Pulse
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run


async def leased(store: SqlClientStore, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


@pytest.mark.parametrize("here", ["mysql"], indirect=True)
async def test_on_mysql_what_commits_by_itself_stands_alone(store: SqlClientStore) -> None:
    lease = await leased(store)
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="CREATE would commit what was done before it"):
            await transaction.execute("CREATE TABLE effects (n INTEGER)")
    async with store.transaction(lease) as transaction:
        await transaction.execute("CREATE TABLE effects (n INTEGER)")
        with pytest.raises(PersistenceError, match="CREATE has committed it already"):
            await transaction.record([entry(2)])


async def test_a_batch_writes_what_is_good_and_refuses_what_is_not(store: SqlClientStore) -> None:
    good, stale, contrary = [await leased(store, name) for name in ("good", "stale", "contrary")]
    await store.record(contrary, [entry(1)], now=NOW)
    await store.acquire("stale", TTL, now=EXPIRED)

    async def record(db: Session, _: bool) -> list[Any]:
        writes = [
            Write.record(stale, [entry(1)], []),
            Write.record(contrary, [entry(1, payload=b"other"), entry(2)], []),
            Write.record(good, [entry(1), entry(2)], []),
            Write.record(good, [entry(3)], [7]),
        ]
        return await recording.record_all(db, writes)

    answers = await store._connections.perform("", record)
    assert [type(answer) for answer in answers] == [LeaseLost, PersistenceError, Pulse, PersistenceError]
    assert [await store.journal(name) for name in ("stale", "contrary", "good")] == [[], [entry(1)], [entry(1), entry(2)]]
