"""Fencing: a stale worker can never change a run.

One table has every verb that takes a lease, another every way in which a lease becomes stale; each pair is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import msgspec

from perdure.errors import LeaseLost
from perdure.model.records import Claim, Item, Lease, Pulse
from perdure.store import Capability, FullStore, Store
from perdure.testing.contract.cases import Check, add, promise
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    STAGGER,
    TTL,
    FullWorld,
    World,
    after,
    at,
    entry,
    equal,
    holds,
    new_input,
    new_run,
    refused,
    signals,
)

LATER: Final = EXPIRED + 1_000_000
PARENT: Final = "parent"

Spoil: TypeAlias = Callable[[FullWorld, Lease], Awaitable[Lease]]


async def _transaction(store: FullStore, lease: Lease) -> None:
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(7)], consume=[1])


# Every verb that takes a lease, once for each thing it can change; `tests/contract` checks that no verb is missing.
WRITES: Final[dict[str, Callable[[Store, Lease], Awaitable[object]]]] = {
    "record": lambda store, lease: store.record(lease, [entry(7)], now=LATER),
    "record consume=": lambda store, lease: store.record(lease, consume=[1], now=LATER),
    "record nothing": lambda store, lease: store.record(lease, now=LATER),
    "suspend": lambda store, lease: store.suspend(lease, wake_at=LATER, entries=[entry(7)], consume=[1], now=LATER),
    "suspend waiting_for=": lambda store, lease: store.suspend(lease, wake_at=None, waiting_for=signals("go"), now=LATER),
    "finish": lambda store, lease: store.finish(lease, "failed", b"0", entries=[entry(7)], consume=[1], now=LATER),
    "continue_as": lambda store, lease: store.continue_as(lease, new_input(), now=LATER),
    "release": lambda store, lease: store.release(lease, now=LATER),
    "renew": lambda store, lease: store.renew([lease], 99, now=LATER),
}
PART_WRITES: Final[dict[Capability, dict[str, Callable[[FullStore, Lease], Awaitable[object]]]]] = {
    "streams": {
        "record items=": lambda store, lease: store.record(lease, items=[Item(stream="log", n=9, payload=b"9")], now=LATER),
        "report": lambda store, lease: store.report(lease, b"stale"),
    },
    "transaction": {"transaction": _transaction},
}


async def _superseded_by_claim(world: World, lease: Lease) -> Lease:
    await world.b.claim(10, TTL, [("flow", 1)], now=EXPIRED)
    return lease


async def _superseded_by_acquire(world: World, lease: Lease) -> Lease:
    await world.take()
    return lease


async def _released(world: World, lease: Lease) -> Lease:
    await world.a.release(lease, now=NOW)
    return lease


async def _released_and_taken(world: World, lease: Lease) -> Lease:
    await world.a.release(lease, now=NOW)
    await world.take(now=NOW)
    return lease


async def _suspended(world: World, lease: Lease) -> Lease:
    await world.a.suspend(lease, wake_at=at(500), waiting_for=signals("never"), now=NOW)
    return lease


async def _finished(world: World, lease: Lease) -> Lease:
    await world.a.finish(lease, "completed", b"1", now=NOW)
    return lease


async def _reopened(world: World, lease: Lease) -> Lease:
    await world.a.finish(lease, "failed", b"1", now=NOW)
    await world.b.reopen("run", ["step-1"], now=at(1))
    return lease


async def _continued(world: World, lease: Lease) -> Lease:
    await world.a.continue_as(lease, new_input(2), now=at(1))
    return lease


async def _continued_and_taken(world: World, lease: Lease) -> Lease:
    await world.a.continue_as(lease, new_input(2), now=at(1))
    await world.take(now=at(1))
    return lease


async def _deleted(world: FullWorld, lease: Lease) -> Lease:
    await world.b.delete("run")
    return lease


async def _deleted_and_recreated(world: FullWorld, lease: Lease) -> Lease:
    await world.b.delete("run")
    claim = await world.start(now=at(1), parent_id=PARENT, parent_key="key")
    await _fill(world, claim.lease)
    return lease


async def _recreated_in_the_same_instant(world: FullWorld, lease: Lease) -> Lease:
    await world.b.delete("run")
    claim = await world.start(now=NOW, parent_id=PARENT, parent_key="key")
    await _fill(world, claim.lease)
    return lease


async def _restored(world: FullWorld, lease: Lease) -> Lease:
    claimed = await world.row()
    journal = await world.a.journal("run")
    await world.b.restore(claimed, [*journal, entry(9)], await world.a.inbox("run"), now=EXPIRED)
    return lease


async def _restored_in_the_same_instant(world: FullWorld, lease: Lease) -> Lease:
    claimed = await world.row()
    await world.b.delete("run")
    await world.b.restore(claimed, [entry(1)], now=NOW)
    return lease


async def _restored_and_taken(world: FullWorld, lease: Lease) -> Lease:
    await _restored(world, lease)
    await world.take(now=EXPIRED)
    return lease


async def _of_the_wrong_token(world: World, lease: Lease) -> Lease:
    holds(await world.b.get("run") is not None, "the run is there")
    return msgspec.structs.replace(lease, token="0" * len(lease.token))


async def _of_the_next_epoch(world: World, lease: Lease) -> Lease:
    holds(await world.b.get("run") is not None, "the run is there")
    return msgspec.structs.replace(lease, epoch=lease.epoch + 1)


async def _of_the_epoch_before(world: World, lease: Lease) -> Lease:
    holds(await world.b.get("run") is not None, "the run is there")
    return msgspec.structs.replace(lease, epoch=lease.epoch - 1)


SPOILT: Final[dict[str, tuple[Spoil, str]]] = {
    "superseded_by_claim": (_superseded_by_claim, "that expired and was followed by another worker's `claim`"),
    "superseded_by_acquire": (_superseded_by_acquire, "that expired and was followed by another worker's `acquire`"),
    "that_was_released": (_released, "that was given back"),
    "that_was_released_and_taken": (_released_and_taken, "that was given back and is another worker's now"),
    "of_a_suspended_run": (_suspended, "whose run was suspended"),
    "of_a_finished_run": (_finished, "whose run has ended"),
    "of_a_reopened_run": (_reopened, "whose run ended and was reopened"),
    "of_a_run_that_started_over": (_continued, "whose run has started over"),
    "of_a_run_that_started_over_and_was_taken": (_continued_and_taken, "whose run has started over and is another worker's now"),
    "with_another_token": (_of_the_wrong_token, "with the right epoch and another token"),
    "with_a_higher_epoch": (_of_the_next_epoch, "with the right token and a higher epoch"),
    "with_a_lower_epoch": (_of_the_epoch_before, "with the right token and a lower epoch"),
}
SPOILT_BY_OPERATORS: Final[dict[str, tuple[Spoil, str]]] = {
    "of_a_deleted_run": (_deleted, "whose run was deleted"),
    "of_a_recreated_run": (_deleted_and_recreated, "whose run was deleted and created again"),
    "of_a_run_recreated_in_the_same_instant": (
        _recreated_in_the_same_instant,
        "whose run was deleted and created again in the same microsecond",
    ),
    "of_a_restored_run": (_restored, "that expired and whose run was restored as it stood"),
    "of_a_run_restored_and_taken": (_restored_and_taken, "that expired and whose run was restored and is another worker's now"),
    "of_a_run_restored_in_the_same_instant": (
        _restored_in_the_same_instant,
        "whose run was deleted and restored in the same microsecond",
    ),
}


async def _fill(world: FullWorld, lease: Lease) -> None:
    await world.record_item(lease, entry(1))
    await world.a.signal("run", "go", b"1", now=NOW)
    if "streams" in world.a.capabilities:
        await world.a.report(lease, b"half")


def _writes(world: FullWorld) -> dict[str, Callable[[FullStore, Lease], Awaitable[object]]]:
    declared = [writes for capability, writes in PART_WRITES.items() if capability in world.a.capabilities]
    return {**WRITES, **{name: write for writes in declared for name, write in writes.items()}}


def _stale_lease_case(spoil: Spoil) -> Check:
    async def check(world: FullWorld) -> None:
        await world.suspended(PARENT, workflow="parent")
        lease = await world.lease(parent_id=PARENT, parent_key="key")
        await _fill(world, lease)
        stale = await spoil(world, lease)
        before = await world.dump("run", PARENT)
        for name, write in _writes(world).items():
            if name == "renew":
                equal(await write(world.a, stale), [None], "what renewing a stale lease gives")
            else:
                with refused(LeaseLost(stale.run_id, stale.epoch), f"{name} with a stale lease"):
                    await write(world.a, stale)
            equal(
                await world.dump("run", PARENT), before, f"everything of the run and its parent after {name} with a stale lease"
            )

    return check


for _kind, (_spoil, _which) in (SPOILT | SPOILT_BY_OPERATORS).items():
    add(
        _stale_lease_case(_spoil),
        f"a_lease_{_kind}_cannot_write",
        f"No verb accepts a lease {_which}: each is refused, and nothing of the run or its parent changes.",
        needs=["operators"] if _kind in SPOILT_BY_OPERATORS else [],
    )


# What ends, or hands on, a run that has neither parent nor inbox. A store may have a quicker way for these.
PLAIN_ENDS: Final[dict[str, Callable[[Store, Lease], Awaitable[object]]]] = {
    "finish": lambda store, lease: store.finish(lease, "failed", b"0", now=LATER),
    "finish entries=": lambda store, lease: store.finish(lease, "completed", b"0", entries=[entry(1)], now=LATER),
    "suspend": lambda store, lease: store.suspend(lease, wake_at=LATER, now=LATER),
    "continue_as": lambda store, lease: store.continue_as(lease, new_input(), now=LATER),
    "release": lambda store, lease: store.release(lease, now=LATER),
}


@promise
async def a_stale_lease_cannot_end_a_plain_run(world: World) -> None:
    """A run with neither parent nor inbox is ended by its holder alone: epoch and token are checked there as everywhere."""

    async def check(stale: Lease, which: str) -> None:
        before = await world.dump(stale.run_id)
        for name, end in PLAIN_ENDS.items():
            with refused(LeaseLost(stale.run_id, stale.epoch), f"{name} with a lease {which}"):
                await end(world.a, stale)
        equal(await world.dump(stale.run_id), before, f"everything of the run after ends with a lease {which}")

    held = await world.lease("held")
    await check(msgspec.structs.replace(held, token="0" * len(held.token)), "with another token")
    await check(msgspec.structs.replace(held, epoch=held.epoch + 1), "with a higher epoch")
    await check(msgspec.structs.replace(held, epoch=held.epoch - 1), "with a lower epoch")
    taken, released = await world.lease("taken"), await world.lease("released")
    await world.take("taken")
    await world.a.release(released, now=NOW)
    await check(taken, "that expired and was followed by another worker's")
    await check(released, "that was given back")
    await check(await world.ended("ended"), "whose run has ended")
    await world.a.finish(held, "completed", b"1", now=NOW)
    equal((await world.row("held")).status, "completed", "the status of the run whose holder ended it")


@promise
async def a_current_lease_can_write(world: World) -> None:
    """What a stale lease is refused, the current one may do: no fence refuses its own holder."""
    for name, write in WRITES.items():
        run_id = f"run for {name}"
        lease = await world.lease(run_id)
        await world.a.signal(run_id, "go", b"1", now=NOW)
        before = await world.dump(run_id)
        await write(world.b, lease)
        holds(name == "record nothing" or name.startswith("suspend w") or await world.dump(run_id) != before, f"{name} writes")


@promise
async def what_a_new_holder_loaded_is_all_there_is(world: World) -> None:
    """When a stale worker records while another takes over, its entry is in the new holder's claim, or was refused."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        lease = await world.lease(run_id)
        write = after(n % STAGGER, lambda: world.a.record(lease, [entry(1)], now=EXPIRED))
        take = after(n // STAGGER, lambda: world.b.acquire(run_id, TTL, now=EXPIRED))
        written, claim = await asyncio.gather(write, take, return_exceptions=True)
        if not isinstance(claim, Claim):
            raise AssertionError(f"the other worker got no claim but {claim!r}")
        equal([entry(1)] if isinstance(written, Pulse) else [], claim.journal, "the journal in the new holder's claim")
        equal(await world.a.journal(run_id), claim.journal, "the journal in the database")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))


@promise
async def a_run_is_ended_or_taken_over_but_not_both(world: World) -> None:
    """When a stale worker finishes while another takes over, one of them wins and the other is refused."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        lease = await world.lease(run_id)
        end = after(n % STAGGER, lambda: world.a.finish(lease, "completed", b"1", now=EXPIRED))
        take = after(n // STAGGER, lambda: world.b.acquire(run_id, TTL, now=EXPIRED))
        ended, claim = await asyncio.gather(end, take, return_exceptions=True)
        holds(isinstance(ended, LeaseLost) == isinstance(claim, Claim), f"one of them won: {ended!r}, {claim!r}")
        equal((await world.row(run_id)).status, "completed" if claim is None else "running", "the status")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))


@promise
async def calls_from_outside_do_not_disturb_the_holder(world: World) -> None:
    """`create`, `signal` and `cancel` touch only the inbox and the request columns; the lease stays good."""
    claim = await world.start()
    await world.b.create(new_run(), ttl=TTL, now=at(1))
    await world.b.signal("run", "go", b"1", now=at(1))
    await world.b.cancel("run", now=at(1))
    equal(await world.row(), msgspec.structs.replace(claim.run, cancel_requested=True), "the row")
    await world.a.record(claim.lease, [entry(1)], now=at(1))
    await world.a.finish(claim.lease, "completed", b"1", now=at(1))
    equal((await world.row()).status, "completed", "the status")
