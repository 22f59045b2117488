"""The program of the processes of `test_processes`: `python -m tests.backends.mongo.child JOB DSN`. It reports by printing."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from perdure.backends.mongo import MongoStore
from perdure.errors import LeaseLost
from perdure.model.records import Lease
from perdure.testing.contract.world import entry, new_run


def say(*words: object) -> None:
    print(*words, flush=True)


async def zombie(dsn: str) -> None:
    """Lease a run for a second, and write to it until a write is refused."""
    store = MongoStore(dsn)
    claim = (await store.create(new_run(), ttl=1.0)).claim
    assert claim is not None
    seq = 0
    try:
        while True:
            seq += 1
            await store.record(claim.lease, [entry(seq)])
            say("wrote", seq)
    except LeaseLost:
        say("refused", seq)
    await store.close()


async def create(dsn: str) -> None:
    """Create the one run, on a database that may have no collections yet."""
    store = MongoStore(dsn)
    say("ready")
    sys.stdin.readline()
    say("new" if (await store.create(new_run())).is_new else "found")
    await store.close()


async def work(dsn: str) -> None:
    """Claim runs and write to them until killed."""
    store = MongoStore(dsn)
    while True:
        for claim in (await store.claim(5, 1.0, [("flow", 1)])).claims:
            seq = max((line.seq for line in claim.journal), default=0)
            for _ in range(3):
                seq += 1
                try:
                    await store.record(claim.lease, [entry(seq, payload=claim.lease.token.encode())])
                except LeaseLost:
                    break  # a slow server, and another worker
                say(claim.run.id, seq, claim.lease.token)
            else:
                await release(store, claim.lease)


async def release(store: MongoStore, lease: Lease) -> None:
    with suppress(LeaseLost):
        await store.suspend(lease, wake_at=1)


if __name__ == "__main__":
    asyncio.run({"zombie": zombie, "create": create, "work": work}[sys.argv[1]](sys.argv[2]))
