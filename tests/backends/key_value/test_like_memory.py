"""Whatever is asked, in whatever order, the answers are those of the memory store."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from obstore.store import MemoryStore as ObjectMemory

from perdure.backends.key_value import KeyValueRunStore
from perdure.backends.memory.store import MemoryDatabase, MemoryStore
from perdure.errors import PerdureError
from perdure.model.records import Awaited, Claim, Claims, Created, Item, Lease, RunRow, Signal
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import TTL, at, entry, new_run, run_row, signals
from tests.backends.key_value.faulty import MortalDict
from tests.campaign import times

IDS = ("a", "b", "c")
STALE = Lease(run_id="a", epoch=1, token="stale", until=0)


class Player:
    """Makes the same moves on two handles of one database, and says what came of each."""

    def __init__(self, *stores: FullStore) -> None:
        self.stores = stores
        self.leases: dict[str, Lease] = {}
        self.next_wake_at: int | None = None

    async def play(self, move: Callable[[FullStore, Player], Awaitable[Any]], handle: int) -> Any:
        try:
            answer = await move(self.stores[handle], self)
        except PerdureError as refusal:
            return type(refusal).__name__
        return self._noted(answer)

    def lease(self, run_id: str) -> Lease:
        return self.leases.get(run_id, msgspec.structs.replace(STALE, run_id=run_id))

    def _noted(self, answer: Any) -> Any:
        if isinstance(answer, Created):
            return (answer.is_new, self._noted(answer.claim), shown(answer.run))
        if isinstance(answer, Claim):
            self.leases[answer.run.id] = answer.lease
            counted = (answer.inbox, answer.inbox_seq, answer.item_counts)
            return (shown(answer.run), answer.lease.epoch, answer.journal, *counted)
        if isinstance(answer, Claims):
            self.next_wake_at = answer.next_wake_at
            return [self._noted(claim) for claim in answer.claims]
        return answer

    def is_in_time_for(self, other: Player) -> bool:
        """Whether it told a worker to come again at the latest when the other did."""
        return other.next_wake_at is None or (self.next_wake_at is not None and self.next_wake_at <= other.next_wake_at)


def shown(row: RunRow | None) -> RunRow | None:
    return None if row is None else msgspec.structs.replace(row, lease_owner=None)


async def everything(store: FullStore, now: int) -> list[Any]:
    seen: list[Any] = [list(await store.due(now=now)), [line.id for line in await store.list()], await store.count()]
    for run_id in IDS:
        rows = [await store.journal(run_id), await store.inbox(run_id), await store.items(run_id, "log")]
        seen += [shown(await store.get(run_id)), rows, await store.count(RunFilter(prefix=run_id, status=("pending",)))]
    return seen


def move(chance: random.Random, now: int) -> Callable[[FullStore, Player], Awaitable[Any]]:
    """Something that can be asked, good or bad."""
    one, other = chance.choice(IDS), chance.choice(IDS)
    size = chance.choice((1, 1, 1, 5000))
    seqs = [chance.randrange(1, 200) for _ in range(chance.choice((1, 2, 80)))]
    entries = [entry(seq, payload=b"%d" % seq * (size if seq % 40 == 0 else 1)) for seq in seqs]
    consume = chance.sample(range(1, 5), chance.randrange(3))
    items = [Item(stream="log", n=chance.randrange(4), payload=b"i")]
    awaited = chance.choice(([], signals("go"), [*signals("stop"), Awaited("child", "pay")]))
    wake_at = chance.choice((None, now - 5, now + 30_000_000))
    dedupe = chance.choice((None, "d", "e"))
    parent = chance.choice(({}, {"parent_id": other, "parent_key": "pay"}))
    inbox = [Signal(seq=3, name="go", payload=b"r" * size, dedupe="d")]
    restored = run_row(one, status=chance.choice(("pending", "suspended", "failed")), wake_at=wake_at, waiting_for=tuple(awaited))
    moves: tuple[Callable[[FullStore, Player], Awaitable[Any]], ...] = (
        lambda store, _: store.create(new_run(one, input=b"i" * size, **parent), ttl=chance_ttl, now=now),
        lambda store, _: store.create(new_run(one, start_at=wake_at, **parent), now=now),
        lambda store, _: store.claim(2, TTL, [("flow", 1)], now=now),
        lambda store, _: store.acquire(one, TTL, due_only=size > 1, now=now),
        lambda store, player: store.renew([player.lease(one), player.lease(other)], TTL, now=now),
        lambda store, player: store.release(player.lease(one), now=now),
        lambda store, player: store.record(player.lease(one), entries, consume=consume, items=items, now=now),
        lambda store, player: store.record(player.lease(one), entries[:1], now=now),
        lambda store, player: store.suspend(player.lease(one), wake_at=wake_at, waiting_for=awaited, consume=consume, now=now),
        lambda store, player: store.finish(player.lease(one), "failed", b"o" * size, now=now),
        lambda store, player: store.finish(player.lease(one), "completed", b"o" * size, entries=entries[:1], now=now),
        lambda store, _: store.reopen(one, ["step-1"], now=now),
        lambda store, _: store.signal(one, "go", b"s" * size, dedupe=dedupe, now=now),
        lambda store, _: store.signal(one, "stop", b"s" * size, now=now),
        lambda store, _: store.cancel(one, now=now),
        lambda store, _: store.hold(one),
        lambda store, _: store.unhold(one),
        lambda store, player: store.report(player.lease(one), b"p" * size),
        lambda store, _: store.restore(restored, entries[:1], inbox, now=now),
        lambda store, _: store.delete(one),
        lambda store, _: store.purge(60, now=now),
    )
    chance_ttl = chance.choice((None, TTL))
    return chance.choice(moves)


def over_objects() -> tuple[FullStore, FullStore]:
    memory = ObjectMemory()
    return KeyValueRunStore(memory), KeyValueRunStore(memory)


def over_text() -> tuple[FullStore, FullStore]:
    kv = MortalDict()
    return KeyValueRunStore(kv), KeyValueRunStore(kv)


@pytest.mark.parametrize("make", [over_objects, over_text])
@pytest.mark.parametrize("seed", range(times(100)))
async def test_it_answers_like_the_memory_store(make: Callable[[], tuple[FullStore, FullStore]], seed: int) -> None:
    chance = random.Random(seed)
    database = MemoryDatabase()
    model, real = Player(MemoryStore(database), MemoryStore(database)), Player(*make())
    now = at(0)
    for number in range(120):
        now += chance.choice((0, 1, 1_000_000, 9_000_000))
        made, handle = move(chance, now), chance.randrange(2)
        expected, answer = await model.play(made, handle), await real.play(made, handle)
        assert answer == expected, f"move {number}"
        assert real.is_in_time_for(model), f"move {number}"
        if number % 10 == 0:
            assert await everything(real.stores[handle], now) == await everything(model.stores[handle], now), f"after {number}"
    for store in real.stores:
        await store.close()
