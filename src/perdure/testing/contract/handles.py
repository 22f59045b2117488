"""Handles: keys, opening, closing, siblings, clocks and namespaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.errors import StoreClosed
from perdure.model.durations import MICROSECOND
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.capabilities import CORE_VERBS, PART_VERBS, Part
from perdure.testing.contract.cases import Check, add, promise
from perdure.testing.contract.world import (
    NOW,
    TTL,
    FullWorld,
    World,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    in_another_loop,
    new_run,
    outcomes,
    refused,
)


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
    """After `close` every verb raises `StoreClosed`; closing again does nothing."""
    lease = await world.lease()
    await world.a.close()
    await world.a.close()
    for name, verb in CORE_VERBS.items():
        with _closed(f"{name} on a closed store"):
            await verb(world.a, lease)


@contextmanager
def _closed(what: str) -> Iterator[None]:
    """Fail unless the block raises `StoreClosed` with the usual reason, whatever the store calls itself."""
    with refused(StoreClosed, what):
        try:
            yield
        except StoreClosed as raised:
            equal(str(raised), str(StoreClosed(raised.args[0])), f"the text of the error for {what}")
            raise


def _closed_part(part: Part) -> Check:
    async def check(world: FullWorld) -> None:
        lease = await world.lease()
        await world.a.close()
        for name, verb in PART_VERBS[part].items():
            with _closed(f"{name} on a closed store"):
                await verb(world.a, lease)

    return check


for _part in PART_VERBS:
    add(
        _closed_part(_part),
        f"a_closed_store_refuses_the_verbs_of_{_part}",
        f"After `close` every verb of `{_part}` raises `StoreClosed` too.",
        needs=[_part],
    )


@promise
async def closing_one_handle_leaves_the_others_open(world: World) -> None:
    """What one process closes stays open for the others."""
    await world.a.create(new_run(), now=NOW)
    await world.a.close()
    equal((await world.row()).id, "run", "the run as the other handle sees it")


@promise
async def closing_answers_what_was_submitted(world: World) -> None:
    """`close` waits for the verbs in progress, and what they answered is in the database."""
    tasks = [asyncio.ensure_future(world.a.create(new_run(f"run-{n}"), now=NOW)) for n in range(20)]
    await asyncio.sleep(0)
    await world.a.close()
    created = await asyncio.gather(*tasks)
    equal([answer.is_new for answer in created], [True] * 20, "what create() answered while the store was closed")
    equal(len(await world.b.list()), 20, "the number of runs in the database")


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
    equal(len(await world.a.list(RunFilter(status=("completed",)))), 30, "runs completed by three threads")


@promise
async def without_now_a_store_goes_by_its_own_clock(world: World) -> None:
    """Instants are microseconds UTC by the store's clock when no `now=` is given."""
    before = time.time_ns() // 1000 - 60 * MICROSECOND
    created = await world.a.create(new_run(), ttl=TTL)
    row = created.run
    later = before + 120 * MICROSECOND
    holds(before <= row.created_at <= later, f"created_at {row.created_at} is about now, in microseconds")
    equal(row.lease_until, row.created_at + round(TTL * MICROSECOND), "the end of the lease")
    equal((await world.b.claim(1, TTL, [("flow", 1)])).claims, [], "what can be claimed while the lease is alive")


@promise
async def namespaces_do_not_see_each_other(world: World) -> None:
    """The same id in another namespace is another run, also when prefix and id join to the same text."""
    left, right = await world.open_namespace("a"), await world.open_namespace("ab")
    await left.create(new_run("bc"), now=NOW)
    for other in (right, world.a):
        for run_id in ("bc", "c", "abc"):
            equal(await other.get(run_id), None, f"run {run_id!r} of another namespace")
        equal((await other.list(), await claimed_ids(other)), ([], []), "runs of another namespace")
    holds((await right.create(new_run("c", input_hash=b"x"), now=NOW)).is_new, "another namespace's id is free here")
    equal((await claimed_ids(left), await claimed_ids(right)), (["bc"], ["c"]), "runs of each namespace")
