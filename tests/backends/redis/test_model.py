"""Random histories, told to this store and to the memory store: both answer the same, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import pytest
import redis.asyncio

from perdure.backends.memory.store import MemoryStore
from perdure.backends.redis import RedisStore
from perdure.errors import PerdureError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Claims, Created, Item, Lease, NewRun, QueueLimits, RunRow, Signal
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import NOW
from tests.campaign import times
from tests.servers.redis import RedisServer

IDS: Final = ("a", "a*", "ab", "b{x}", "é")
NAMES: Final = ("go", "stop")
STATUSES: Final = ("completed", "failed", "cancelled", "dead")
LENGTH: Final = 150


class History:
    """One sequence of verbs, the same for both stores. Leases are told by the order in which they were given."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = NOW
        self.given = 0
        self.seqs = 0

    def verb(self) -> Callable[[FullStore, list[Lease]], Awaitable[Any]]:
        self.now += self.random.choice((0, 1, 1_000_000, 4_000_000))
        name = self.random.choice([name for name in dir(self) if name.startswith("do_")])
        made: Callable[[FullStore, list[Lease]], Awaitable[Any]] = getattr(self, name)()
        return made

    def lease(self) -> Callable[[list[Lease]], Lease]:
        back = self.random.choice((1, 1, 1, 2, 3, 4))
        none = Lease(run_id="none", epoch=1, token="none", until=1)
        return lambda leases: leases[-back] if len(leases) >= back else none

    def run(self) -> NewRun:
        pick = self.random.choice
        return NewRun(
            id=pick(IDS),
            workflow=pick(("flow", "flow", "other")),
            input=b"[]",
            input_hash=pick((b"1", b"1", b"1", b"2")),
            seed=b"seed",
            queue=pick(("default", "mail")),
            priority=pick((0, 0, 1, -5)),
            limit_key=pick((None, "ada", "bob")),
            start_at=pick((None, None, self.now + 3_000_000)),
            parent_id=pick((None, *IDS)),
            parent_key=pick((None, "child")),
        )

    def entries(self) -> list[Entry]:
        self.seqs += 1
        seqs = self.random.sample(range(max(1, self.seqs - 2), self.seqs + 2), self.random.choice((0, 1, 2)))
        return [Entry(seq=seq, key=f"k{seq}", payload=self.random.choice((b"1", b"1", b"2"))) for seq in seqs]

    def consume(self) -> list[int]:
        return self.random.choice(([], [], [1], [2], [1, 3]))

    def do_create(self) -> Any:
        run, ttl, entries, now = self.run(), self.random.choice((None, 5)), sorted_once(self.entries()), self.now
        return lambda store, _: store.create(run, ttl=ttl, entries=entries, now=now)

    def do_restore(self) -> Any:
        pick = self.random.choice
        row = RunRow(
            **{**msgspec.structs.asdict(self.run()), "input_hash": pick((b"1", b""))},
            status=pick(("pending", "running", "suspended", "failed")),
            wake_at=pick((None, self.now, self.now + 9_000_000)),
            waiting_for=pick(((), (Awaited("signal", "go"),))),
            cancel_requested=pick((False, False, True)),
            held=pick((False, False, True)),
            created_at=1,
            updated_at=2,
        )
        inbox, now = pick(([], [Signal(seq=2, name="go", payload=b"1", dedupe="d")])), self.now
        entries = sorted_once(self.entries())
        return lambda store, _: store.restore(row, entries, inbox, now=now)

    def do_claim(self) -> Any:
        limit, queues, now = self.random.choice((0, 1, 2, 9)), self.random.choice((None, None, ["mail"])), self.now
        return lambda store, _: store.claim(limit, 5, [("flow", 1)], queues, now=now)

    do_claim_again = do_claim

    def do_acquire(self) -> Any:
        run_id, due_only, now = self.random.choice(IDS), self.random.choice((True, False)), self.now
        return lambda store, _: store.acquire(run_id, 5, due_only=due_only, now=now)

    def do_renew(self) -> Any:
        one, other, now = self.lease(), self.lease(), self.now
        return lambda store, leases: store.renew([one(leases), other(leases)], 5, now=now)

    def do_release(self) -> Any:
        lease, now = self.lease(), self.now
        return lambda store, leases: store.release(lease(leases), now=now)

    def do_record(self) -> Any:
        lease, entries, consume = self.lease(), self.entries(), self.consume()
        items = [Item(stream=name, n=self.random.choice((0, 1)), payload=b"1") for name in NAMES]
        return lambda store, leases: store.record(lease(leases), entries, consume=consume, items=items)

    do_record_again = do_record

    def do_suspend(self) -> Any:
        lease, entries, consume, now = self.lease(), self.entries(), self.consume(), self.now
        wake_at = self.random.choice((None, now - 1, now + 6_000_000))
        waiting = self.random.choice(([], [Awaited("signal", "go")], [Awaited("child", "child"), Awaited("signal", "stop")]))
        return lambda store, leases: store.suspend(
            lease(leases), wake_at=wake_at, waiting_for=waiting, entries=entries, consume=consume, now=now
        )

    def do_finish(self) -> Any:
        lease, entries, status, now = self.lease(), self.entries(), self.random.choice(STATUSES), self.now
        return lambda store, leases: store.finish(lease(leases), status, b"end", entries=entries, now=now)

    def do_reopen(self) -> Any:
        run_id, now = self.random.choice(IDS), self.now
        return lambda store, _: store.reopen(run_id, ["k1"], now=now)

    def do_signal(self) -> Any:
        run_id, name, dedupe, now = (
            self.random.choice(IDS),
            self.random.choice(NAMES),
            self.random.choice((None, "d", "e")),
            self.now,
        )
        return lambda store, _: store.signal(run_id, name, b"1", dedupe=dedupe, now=now)

    def do_cancel(self) -> Any:
        run_id, now = self.random.choice(IDS), self.now
        return lambda store, _: store.cancel(run_id, now=now)

    def do_hold(self) -> Any:
        run_id, verb = self.random.choice(IDS), self.random.choice(("hold", "unhold", "unhold"))
        return lambda store, _: getattr(store, verb)(run_id)

    def do_delete(self) -> Any:
        run_id, rare = self.random.choice(IDS), self.random.random() < 0.3
        return lambda store, _: store.delete(run_id if rare else "none")

    def do_purge(self) -> Any:
        now = self.now
        return lambda store, _: store.purge(20, limit=1, now=now)

    def do_limit_queue(self) -> Any:
        pick = self.random.choice
        limits = QueueLimits(concurrency=pick((None, None, 2)), per_key=pick((None, None, 1)), interval=pick((None, 3_000_000)))
        queue = self.random.choice(("default", "mail"))
        return lambda store, _: store.limit_queue(queue, limits)


def sorted_once(entries: list[Entry]) -> list[Entry]:
    return list({entry.seq: entry for entry in entries}.values())


def leases_in(answer: Any) -> list[Lease]:
    if isinstance(answer, Created):
        return [] if answer.claim is None else [answer.claim.lease]
    if isinstance(answer, Claim):
        return [answer.lease]
    return [claim.lease for claim in answer.claims] if isinstance(answer, Claims) else []


def shown(answer: Any) -> Any:
    """The answer without what differs from store to store: tokens, the names of owners, and words of errors."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    return _plain(msgspec.to_builtins(answer, builtin_types=(bytes,)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if name not in {"token", "lease_owner"}}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


async def told(store: FullStore, verb: Callable[[FullStore, list[Lease]], Awaitable[Any]], leases: list[Lease]) -> Any:
    try:
        answer = await verb(store, leases)
    except PerdureError as refusal:
        return shown(refusal)
    leases += leases_in(answer)
    return shown(answer)


async def everything(store: FullStore, now: int) -> Any:
    runs = [
        [await store.get(run_id), await store.journal(run_id), await store.inbox(run_id), await store.items(run_id, "go")]
        for run_id in IDS
    ]
    lists = [
        await store.list(),
        await store.list(RunFilter(prefix="a")),
        await store.list(RunFilter(status=("pending",), workflow="flow"), limit=2),
    ]
    counts = [
        await store.count(),
        await store.count(RunFilter(prefix="a", status=("failed",))),
        await store.count(RunFilter(workflow="flow")),
    ]
    return shown([runs, lists, counts, list(await store.due(now=now))])


@pytest.mark.parametrize("seed", range(times(300)))
async def test_a_history_reads_the_same_as_in_memory(server: RedisServer, store: RedisStore, table: str, seed: int) -> None:
    memory, history = MemoryStore(), History(seed)
    leases: tuple[list[Lease], list[Lease]] = ([], [])
    for n in range(LENGTH):
        verb = history.verb()
        expected = await told(memory, verb, leases[0])
        assert await told(store, verb, leases[1]) == expected, f"verb {n} of seed {seed}"
        if n % 10 == 0:
            assert await everything(store, history.now) == await everything(memory, history.now), f"after verb {n} of seed {seed}"
    for run_id in (*IDS, "none"):
        await store.delete(run_id)
    assert await left_behind(server, table) == []


async def left_behind(server: RedisServer, table: str) -> list[str]:
    """The keys that are there though no run is, without those that expire by themselves."""
    async with redis.asyncio.Redis.from_url(server.url, driver_info=None) as client:
        keys = [key.decode() async for key in client.scan_iter(f"{{{table}:}}:*", count=10_000)]
        root = f"{{{table}:}}"
        settings = {f"{root}:{name}" for name in ("format", "limits", "starts")}
        return [key for key in keys if key not in settings and await client.ttl(key) < 0]
