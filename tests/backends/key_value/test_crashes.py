"""A crash at every write of every verb leaves a run as it was before or as it is after, and awake when it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from obstore.store import MemoryStore as ObjectMemory

from perdure.backends.key_value import KeyValueRunStore
from perdure.backends.memory.store import MemoryStore
from perdure.errors import PersistenceError
from perdure.model.records import Awaited, Item, Lease, QueueLimits, Schedule
from perdure.store import FullStore
from perdure.testing.contract.world import NOW, TTL, at, entry, new_run, run_row, signals
from tests.backends.key_value.faulty import Died, MortalBucket, MortalDict

LARGE = b"x" * 10_000
IDS = ("run", "parent", "child", "fired", "restored", "other", "short", "../x")
LATER = at(10**6)


@dataclass
class Hand:
    """A store, and the leases that were got from it."""

    store: FullStore
    leases: dict[str, Lease] = field(default_factory=dict)

    async def start(self, run_id: str, **columns: Any) -> None:
        claim = (await self.store.create(new_run(run_id, **columns), ttl=TTL, now=NOW)).claim
        assert claim is not None
        self.leases[run_id] = claim.lease

    async def claim(self, now: int) -> None:
        for claim in (await self.store.claim(1, TTL, [("flow", 1)], now=now)).claims:
            self.leases[claim.run.id] = claim.lease

    async def acquire(self, run_id: str, now: int) -> None:
        claim = await self.store.acquire(run_id, TTL, now=now)
        assert claim is not None
        self.leases[run_id] = claim.lease


Step = Callable[[Hand], Awaitable[object]]


def batch(first: int, count: int) -> list[Any]:
    return [entry(seq) for seq in range(first, first + count)]


SCHEDULE = Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=NOW)
STORY: tuple[Step, ...] = (
    lambda hand: hand.start("run", input=LARGE),
    lambda hand: hand.store.record(hand.leases["run"], [entry(1), entry(2, payload=LARGE)], now=NOW),
    lambda hand: hand.store.record(hand.leases["run"], batch(3, 70), items=[Item(stream="log", n=0, payload=b"0")], now=NOW),
    lambda hand: hand.store.record(hand.leases["run"], batch(73, 3), now=NOW),
    lambda hand: hand.store.signal("run", "go", LARGE, dedupe="d", now=NOW),
    lambda hand: hand.store.report(hand.leases["run"], LARGE),
    lambda hand: hand.store.suspend(hand.leases["run"], wake_at=at(50), waiting_for=signals("stop"), now=NOW),
    lambda hand: hand.store.signal("run", "stop", b"1", now=at(1)),
    lambda hand: hand.claim(at(1)),
    lambda hand: hand.store.renew([hand.leases["run"]], TTL, now=at(2)),
    lambda hand: hand.store.record(hand.leases["run"], batch(76, 1), consume=[1, 2], now=at(2)),
    lambda hand: hand.store.release(hand.leases["run"], now=at(3)),
    lambda hand: hand.acquire("run", at(3)),
    lambda hand: hand.store.finish(hand.leases["run"], "failed", LARGE, entries=batch(77, 1), now=at(4)),
    lambda hand: hand.store.reopen("run", ["step-1"], now=at(5)),
    lambda hand: hand.store.hold("run"),
    lambda hand: hand.store.cancel("run", now=at(6)),
    lambda hand: hand.store.unhold("run"),
    lambda hand: hand.start("parent"),
    lambda hand: hand.store.suspend(hand.leases["parent"], wake_at=None, waiting_for=[Awaited("child", "pay")], now=NOW),
    lambda hand: hand.start("child", parent_id="parent", parent_key="pay"),
    lambda hand: hand.store.finish(hand.leases["child"], "completed", LARGE, now=at(7)),
    lambda hand: hand.store.put_schedule(SCHEDULE),
    lambda hand: hand.store.fire("daily", expected_at=NOW, next_at=at(60), run=new_run("fired"), now=at(8)),
    lambda hand: hand.store.limit_queue("default", QueueLimits(concurrency=5)),
    lambda hand: hand.store.restore(run_row("restored"), batch(1, 3), now=at(9)),
    lambda hand: hand.store.restore(run_row("restored", status="suspended", wake_at=at(20)), batch(1, 70), now=at(9)),
    lambda hand: hand.claim(at(10)),
    lambda hand: hand.claim(at(10)),
    lambda hand: hand.store.create(new_run("short", start_at=at(30)), now=at(11)),
    lambda hand: hand.store.create(new_run("../x"), entries=batch(1, 2), now=at(11)),
    lambda hand: hand.store.delete("run"),
    lambda hand: hand.store.create(new_run("run"), now=at(12)),
    lambda hand: hand.store.purge(0, now=at(13)),
    lambda hand: hand.store.drop_schedule("daily"),
)


async def picture(store: FullStore) -> bytes:
    """Everything that can be seen of the story's runs, and what is due, once what a crash left undone was looked at."""
    due = [list(await store.due(now=now)) for now in (at(12), LATER)]
    seen: list[Any] = [due, list(await store.schedules()), await store.queue_limits()]
    for run_id in IDS:
        row = await store.get(run_id)
        shown = None if row is None else msgspec.structs.replace(row, lease_owner=None)
        seen += [shown, await store.journal(run_id), await store.inbox(run_id), await store.items(run_id, "log")]
    lines = [line.id for line in await store.list()]
    return msgspec.json.encode([*seen, lines, await store.count()])


async def pictures() -> list[bytes]:
    """How the story looks after each of its steps, as the memory store tells it."""
    hand = Hand(MemoryStore())
    seen = [await picture(hand.store)]
    for step in STORY:
        await step(hand)
        seen.append(await picture(hand.store))
    return seen


async def told_until_death(store: FullStore) -> int:
    """How many steps were acknowledged before the store died."""
    hand = Hand(store)
    for number, step in enumerate(STORY):
        try:
            await step(hand)
        except PersistenceError as error:
            if not isinstance(error.__cause__, Died):
                raise
            return number
    return len(STORY)


async def check_crashes(make: Callable[[int | None], tuple[Any, Callable[[], Any]]]) -> None:
    """`make` gives a key-value store that dies after so many writes, and how to open what it left."""
    expected = await pictures()
    whole, _ = make(None)
    store = KeyValueRunStore(whole)
    assert await told_until_death(store) == len(STORY)
    assert await picture(store) == expected[-1]
    await store.close()
    for writes in range(whole.writes):
        mortal, reopened = make(writes)
        store = KeyValueRunStore(mortal)
        try:
            acknowledged = await told_until_death(store)
        finally:
            await store.close()
        after = KeyValueRunStore(reopened())
        seen = await picture(after)
        possible = expected[acknowledged : acknowledged + 2]
        assert seen in possible, f"after {writes} writes, when {acknowledged} steps had been acknowledged"
        await after.close()


def mortal_dict(writes: int | None) -> tuple[MortalDict, Callable[[], MortalDict]]:
    mortal = MortalDict(writes=writes)
    return mortal, lambda: MortalDict(mortal.values)


def mortal_bucket(writes: int | None) -> tuple[MortalBucket, Callable[[], ObjectMemory]]:
    memory = ObjectMemory()
    return MortalBucket(memory, writes=writes), lambda: memory


@pytest.mark.parametrize("make", [mortal_dict, mortal_bucket])
def test_a_crash_at_any_write_leaves_before_or_after(make: Callable[[int | None], tuple[Any, Callable[[], Any]]]) -> None:
    asyncio.run(check_crashes(make))
