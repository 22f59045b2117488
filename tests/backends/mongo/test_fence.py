"""The fence with something held open: a transaction stands for a worker that was stopped in the middle of a write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.mongo import MongoStore, claims, recording, runs, writes
from perdure.backends.mongo.schema import Collections
from perdure.errors import LeaseLost
from perdure.model.records import Claim, Pulse, QueueLimits
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row


async def leased(store: MongoStore, run_id: str = "run", **columns: Any) -> Claim:
    claim = (await store.create(new_run(run_id, **columns), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim


async def test_a_record_held_open_across_a_takeover_is_seen_by_who_takes_over(store: MongoStore) -> None:
    claim = await leased(store)
    db = store._connections.collections("")
    written, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def zombie() -> None:
        write = writes.record(claim.lease, [entry(1)], [])
        async with db.client.start_session() as session, await session.start_transaction():
            assert await writes.write_one(db, write, session=session) is not None
            loop.call_soon_threadsafe(written.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))

    holding = asyncio.create_task(store._connections.run(zombie()))
    await written.wait()
    taking = asyncio.create_task(store.acquire("run", TTL, now=EXPIRED))
    await asyncio.wait([taking], timeout=0.3)
    assert not taking.done()
    go_on.set()
    await holding
    taken = await taking
    assert taken is not None
    assert taken.journal == [entry(1)]
    with pytest.raises(LeaseLost):
        await store.record(claim.lease, [entry(2)], now=EXPIRED)


async def _acquires(db: Collections) -> object:
    return await claims.acquire(db, "run", 10**7, "taker", "secret", EXPIRED, due_only=True)


async def _claims(db: Collections) -> object:
    return await claims.claim(db, ClaimRequest(ClaimFilter.of([("flow", 1)], None), 5, 10**7, "taker", EXPIRED))


async def _restores(db: Collections) -> object:
    await runs.restore(db, run_row(), [], [], EXPIRED)
    return None


@pytest.mark.parametrize("take", [_acquires, _claims, _restores])
async def test_whoever_takes_over_between_two_parts_of_a_recording_write_refuses_it(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, take: Callable[[Collections], Awaitable[object]]
) -> None:
    await leased(store, "parent")
    claim = await leased(store, parent_id="parent", parent_key="key")
    really = recording._apply

    async def late(db: Collections, *args: Any) -> Any:
        await take(db)
        return await really(db, *args)

    monkeypatch.setattr(recording, "_apply", late)
    with pytest.raises(LeaseLost):
        await store.finish(claim.lease, "completed", b"1", entries=[entry(1)], now=EXPIRED)
    monkeypatch.setattr(recording, "_apply", really)
    assert (await store.journal("run"), await store.inbox("parent")) == ([], [])


async def test_a_write_that_waits_for_an_open_takeover_is_refused_and_holds_up_nobody(store: MongoStore) -> None:
    claim, other = await leased(store), await leased(store, "other")
    db = store._connections.collections("")
    taken, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def taker() -> None:
        async with db.client.start_session() as session, await session.start_transaction():
            await db.runs.update_one({"_id": "run"}, {"$inc": {"epoch": 1}, "$set": {"token": "taken"}}, session=session)
            loop.call_soon_threadsafe(taken.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))

    holding = asyncio.create_task(store._connections.run(taker()))
    await taken.wait()
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)], now=EXPIRED))
    await asyncio.wait([writing], timeout=0.3)
    assert not writing.done()
    async with asyncio.timeout(20):
        await store.record(other.lease, [entry(1)], now=EXPIRED)
    assert not writing.done()
    go_on.set()
    await holding
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []


class TakenBeforeTheReply:
    """The runs, of which one is taken over after every bulk of updates, before anybody hears what became of that."""

    def __init__(self, runs: Any, take_over: Callable[[], Awaitable[object]]) -> None:
        self._runs = runs
        self._take_over = take_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)

    async def bulk_write(self, *args: Any, **kwargs: Any) -> Any:
        done = await self._runs.bulk_write(*args, **kwargs)
        await self._take_over()
        return done


@pytest.mark.parametrize("with_a_stale_one", [False, True])
@pytest.mark.parametrize("next_writes", [False, True])
async def test_a_record_that_was_written_is_not_refused_when_the_run_is_taken_before_the_reply(
    dsn: str, store: MongoStore, *, with_a_stale_one: bool, next_writes: bool
) -> None:
    claims_of = {run_id: await leased(store, run_id) for run_id in ("run", "other", "stale")}
    await store.delete("stale")
    taker = MongoStore(dsn)

    async def take_over() -> None:
        taken = await taker.acquire("run", TTL, now=EXPIRED)
        assert taken is not None
        assert taken.journal == [entry(1)]
        if next_writes:
            await taker.record(taken.lease, [entry(2)], now=EXPIRED)

    db = store._connections.collections("")
    db.runs = TakenBeforeTheReply(db.runs, take_over)  # type: ignore[assignment]
    sent = ["run", "other", "stale"] if with_a_stale_one else ["run", "other"]
    answers = await asyncio.gather(
        *(store.record(claims_of[run_id].lease, [entry(1)], now=NOW) for run_id in sent), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Pulse, Pulse, LeaseLost][: len(sent)]
    await taker.close()


async def test_workers_for_different_workflows_keep_to_one_limit(dsn: str, store: MongoStore) -> None:
    other = MongoStore(dsn)
    await other.setup()
    for n in range(8):
        queue = f"queue-{n}"
        await store.limit_queue(queue, QueueLimits(concurrency=1))
        for workflow in ("left", "right"):
            await store.create(new_run(f"{workflow}-{n}", workflow=workflow, queue=queue), now=NOW)
        left, right = await asyncio.gather(
            store.claim(1, TTL, [("left", 1)], [queue], now=NOW), other.claim(1, TTL, [("right", 1)], [queue], now=NOW)
        )
        assert len(left.claims) + len(right.claims) == 1
    await other.close()
