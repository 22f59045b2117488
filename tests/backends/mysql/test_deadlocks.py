import asyncio
import random

import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.connections import MysqlConnections
from perdure.backends.sql import Session
from perdure.errors import PersistenceError
from perdure.model.records import Lease
from perdure.testing.contract.world import TTL, entry, new_run
from tests.backends.mysql.conftest import connect

_TOUCH = "UPDATE $runs SET held = 0 WHERE namespace = ?1 AND id = ?2"


async def test_who_is_chosen_to_break_a_deadlock_is_tried_again(store: MysqlStore) -> None:
    for run_id in "ab":
        await store.create(new_run(run_id))
    attempts = 0

    async def cross(connections: MysqlConnections, first: str, second: str, met: asyncio.Barrier) -> None:
        async def work(db: Session, _: bool) -> None:
            nonlocal attempts
            attempts += 1
            await db.run(_TOUCH, first)
            if attempts <= 2:
                await met.wait()
            await db.run(_TOUCH, second)

        await connections.perform("", work)

    async def both() -> None:
        met = asyncio.Barrier(2)
        await asyncio.gather(cross(store._connections, "a", "b", met), cross(store._connections, "b", "a", met))

    async with asyncio.timeout(20):
        await store._connections.run(both())
    assert attempts == 3  # one of the two was undone


async def test_a_lock_that_is_held_too_long_is_an_error_that_says_so(
    dsn: str, store: MysqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MysqlConnections, "PATIENCE", 0.0)
    monkeypatch.setattr("perdure.backends.mysql.connections._SESSION", "SET SESSION innodb_lock_wait_timeout = 1")
    await store.create(new_run())
    holder = await connect(dsn)
    await holder.begin()
    await holder.query("SELECT * FROM perdure_runs FOR UPDATE")
    with pytest.raises(PersistenceError, match="1205"):
        await store.signal("run", "go", b"1")
    await holder.rollback()
    holder.close()
    assert await store.signal("run", "go", b"1") == 1


async def test_many_verbs_on_the_same_runs_at_once_all_end(store: MysqlStore) -> None:
    """Records, signals, renewals, ends with parents and takeovers, which lock several rows each."""
    rng = random.Random(3)
    parents = [f"parent-{n}" for n in range(5)]
    leases: list[Lease] = []
    for parent in parents:
        await store.create(new_run(parent))
        for n in range(10):
            run = new_run(f"{parent}/{n}", parent_id=parent, parent_key=f"key-{n}")
            claim = (await store.create(run, ttl=TTL)).claim
            assert claim is not None
            leases.append(claim.lease)

    async def drive(lease: Lease) -> None:
        for seq in range(1, 6):
            await store.record(lease, [entry(seq)])
            await store.signal(rng.choice(parents), "go", b"1")
            await store.renew(rng.sample(leases, 10), TTL)
        await store.finish(lease, "completed", b"1", entries=[entry(6)])

    async with asyncio.timeout(60):
        await asyncio.gather(*map(drive, leases))
    for parent in parents:
        children = [row for row in await store.inbox(parent) if row.kind == "child"]
        assert sorted(row.name for row in children) == sorted(f"key-{n}" for n in range(10))
    assert sum([len(await store.inbox(parent)) for parent in parents]) == 50 + 250
