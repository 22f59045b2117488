"""Handles: what a store says about itself, opening, closing, clocks and namespaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from perdure.errors import PersistenceError
from perdure.model.durations import MICROSECOND
from perdure.model.records import Lease, QueueLimits, Schedule
from perdure.store import Store
from perdure.testing.contract.cases import promise
from perdure.testing.contract.checks import equal, holds, refused
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    TTL,
    World,
    at,
    claimed_ids,
    entry,
    in_another_loop,
    new_run,
    outcomes,
    run_row,
)

Verb: TypeAlias = Callable[[Store, Lease], Awaitable[Any]]

SNAPSHOT: Final = {"formatVersion": 1, "steps": {}, "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00Z"}}
SCHEDULE: Final = Schedule(id="daily", workflow="flow", spec="0 9 * * *", input=b"[]", next_at=NOW)

# Every verb but `close`, which may be repeated; `tests/contract` checks that none is missing.
VERBS: Final[dict[str, Verb]] = {
    "setup": lambda store, _: store.setup(),
    "create": lambda store, _: store.create(new_run("other"), now=NOW),
    "restore": lambda store, _: store.restore(run_row("other"), [entry(1)], now=NOW),
    "save": lambda store, _: store.save("other", SNAPSHOT),
    "load": lambda store, _: store.load("run"),
    "claim": lambda store, _: store.claim(1, TTL, ["flow"], now=NOW),
    "acquire": lambda store, _: store.acquire("run", TTL, now=EXPIRED),
    "renew": lambda store, lease: store.renew([lease], TTL, now=NOW),
    "release": lambda store, lease: store.release(lease, now=NOW),
    "record": lambda store, lease: store.record(lease, [entry(1)], now=NOW),
    "suspend": lambda store, lease: store.suspend(lease, wake_at=None, now=NOW),
    "finish": lambda store, lease: store.finish(lease, "completed", b"1", now=NOW),
    "reopen": lambda store, _: store.reopen("run", [], now=NOW),
    "signal": lambda store, _: store.signal("run", "go", b"1", now=NOW),
    "cancel": lambda store, _: store.cancel("run", now=NOW),
    "hold": lambda store, _: store.hold("run"),
    "unhold": lambda store, _: store.unhold("run"),
    "report": lambda store, lease: store.report(lease, b"1"),
    "get": lambda store, _: store.get("run"),
    "journal": lambda store, _: store.journal("run"),
    "inbox": lambda store, _: store.inbox("run"),
    "items": lambda store, _: store.items("run", "log"),
    "list": lambda store, _: store.list(),
    "count": lambda store, _: store.count(),
    "due": lambda store, _: store.due(now=NOW),
    "delete": lambda store, _: store.delete("run"),
    "purge": lambda store, _: store.purge(0, now=NOW),
    "watch": lambda store, _: store.watch(0.01),
    "put_schedule": lambda store, _: store.put_schedule(SCHEDULE),
    "schedules": lambda store, _: store.schedules(),
    "drop_schedule": lambda store, _: store.drop_schedule("daily"),
    "fire": lambda store, _: store.fire("daily", expected_at=NOW, next_at=None, run=new_run("fired"), now=NOW),
    "limit_queue": lambda store, _: store.limit_queue("default", QueueLimits()),
    "queue_limits": lambda store, _: store.queue_limits(),
}


@promise
async def a_store_declares_what_its_factory_declares(world: World) -> None:
    """A store's `capabilities` are the ones it is tested for."""
    equal(world.a.capabilities, world.factory.capabilities, "store.capabilities")


@promise
async def equal_keys_mean_the_same_runs(world: World) -> None:
    """Handles on one database and namespace have equal keys; another database or namespace has another key."""
    equal(world.a.key, world.b.key, "the keys of two handles on one database")
    holds(all(isinstance(part, str) for part in world.a.key), "a key consists of str")
    others = [await world.open_other_database(), await world.open_namespace("other")]
    holds(world.a.key not in {other.key for other in others}, "another database or namespace has another key")


@promise
async def setting_up_again_keeps_what_is_there(world: World) -> None:
    """`setup` is optional, can be repeated, and may be called by many handles at once."""
    await world.a.create(new_run(), now=NOW)
    answers = await outcomes(store.setup() for store in (world.a, world.b) * 4)
    equal(answers, [None] * 8, "what eight setup() calls at once gave")
    equal((await world.row()).id, "run", "the run that was there before")


@promise
async def a_closed_store_refuses_every_verb(world: World) -> None:
    """After `close` every verb raises `PersistenceError`; closing again does nothing."""
    lease = await world.lease()
    await world.a.close()
    await world.a.close()
    for name, verb in VERBS.items():
        with refused(PersistenceError, f"{name} on a closed store"):
            await verb(world.a, lease)


@promise
async def closing_one_handle_leaves_the_others_open(world: World) -> None:
    """What one process closes stays open for the others."""
    await world.a.create(new_run(), now=NOW)
    await world.a.close()
    equal((await world.row()).id, "run", "the run as the other handle sees it")


@promise
async def closing_answers_what_was_submitted(world: World) -> None:
    """`close` waits for the verbs under way, and what they answered is in the database."""
    tasks = [asyncio.ensure_future(world.a.create(new_run(f"run-{n}"), now=NOW)) for n in range(20)]
    await asyncio.sleep(0)
    await world.a.close()
    created = await asyncio.gather(*tasks)
    equal([answer.is_new for answer in created], [True] * 20, "what create() answered while the store was closed")
    equal(await world.b.count(), 20, "the number of runs in the database")


@promise
async def a_sibling_is_another_handle_on_the_same_runs(world: World) -> None:
    """A sibling has the same key, sees the same runs, and can be closed by itself."""
    sibling = world.a.sibling()
    equal(sibling.key, world.a.key, "the sibling's key")
    lease = await world.lease()
    equal(len(await sibling.renew([lease], TTL, now=at(1))), 1, "pulses from the sibling")
    await sibling.close()
    equal((await world.row()).lease_until, at(1 + TTL), "the end of the lease that the sibling renewed")
    holds(await world.a.get("run") is not None, "the store is open after its sibling was closed")


@promise
async def a_sibling_renews_in_a_thread_of_its_own(world: World) -> None:
    """A sibling's `renew` works in another thread's event loop while the caller's loop is blocked."""
    lease = await world.lease()
    sibling = world.a.sibling()

    async def renew() -> None:
        pulses = await sibling.renew([lease], TTL, now=at(5))
        await sibling.close()
        holds(pulses[0] is not None, "the lease is current")

    await in_another_loop(renew)
    equal((await world.row()).lease_until, at(5 + TTL), "the end of the renewed lease")


@promise
async def verbs_may_be_called_from_any_event_loop(world: World) -> None:
    """One handle serves several threads at once, each with its own event loop."""

    async def work(name: str) -> None:
        for n in range(10):
            created = await world.a.create(new_run(f"{name}-{n}"), ttl=TTL, now=NOW)
            if created.claim is not None:
                await world.a.finish(created.claim.lease, "completed", b"1", entries=[entry(1)], now=NOW)

    await asyncio.gather(*(in_another_loop(lambda name=name: work(name)) for name in ("one", "two", "three")))  # type: ignore[misc]
    equal(await world.a.count(status="completed"), 30, "runs completed by three threads")


@promise
async def without_now_a_store_goes_by_its_own_clock(world: World) -> None:
    """Instants are microseconds UTC by the store's clock when no `now=` is given."""
    before = time.time_ns() // 1000 - 60 * MICROSECOND
    created = await world.a.create(new_run(), ttl=TTL)
    row = created.run
    later = before + 120 * MICROSECOND
    holds(before <= row.created_at <= later, f"created_at {row.created_at} is about now, in microseconds")
    equal(row.lease_until, row.created_at + round(TTL * MICROSECOND), "the end of the lease")
    equal(await world.b.due(), [], "what is due while the lease is alive")


@promise
async def namespaces_do_not_see_each_other(world: World) -> None:
    """The same id, schedule or queue in another namespace is another one, also when prefix and id join to the same text."""
    left, right = await world.open_namespace("a"), await world.open_namespace("ab")
    await left.create(new_run("bc"), now=NOW)
    await left.put_schedule(SCHEDULE)
    await left.limit_queue("default", QueueLimits(concurrency=0))
    for other in (right, world.a):
        for run_id in ("bc", "c", "abc"):
            equal(await other.get(run_id), None, f"run {run_id!r} of another namespace")
        equal(list(await other.schedules()), [], "schedules of another namespace")
        equal(await other.queue_limits(), {}, "queue limits of another namespace")
        equal((await other.list(), await other.count(), list(await other.due(now=NOW))), ([], 0, []), "runs of another namespace")
    holds((await right.create(new_run("c", input_hash=b"x"), now=NOW)).is_new, "another namespace's id is free here")
    await left.delete("bc")
    equal(await claimed_ids(right), ["c"], "runs of this namespace after one was deleted in another")
