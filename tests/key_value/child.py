"""What the processes of these tests do: `python -m tests.key_value.child WORD PLACE`. They report by printing.

PLACE is a directory, for obstore's local store, or JSON with the bucket, folder and options of an S3 store.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from obstore.store import LocalStore, S3Store

from perdure.errors import LeaseLost, StoreCapabilityError
from perdure.stores.key_value_store import KeyValueRunStore
from perdure.testing.contract.world import entry, new_run


def say(*words: object) -> None:
    print(*words, flush=True)


def opened(place: str) -> KeyValueRunStore:
    """The store at this place."""
    if not place.startswith("{"):
        return KeyValueRunStore(LocalStore(place, mkdir=True))
    told: dict[str, Any] = json.loads(place)
    return KeyValueRunStore(S3Store(told["bucket"], prefix=told["folder"], **told["options"]))


async def zombie(store: KeyValueRunStore) -> None:
    """Lease a run for a moment, and write to it until that is refused."""
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


async def create(store: KeyValueRunStore) -> None:
    """Create the one run."""
    await store.setup()
    say("ready")
    sys.stdin.readline()
    say("new" if (await store.create(new_run())).is_new else "found")


async def work(store: KeyValueRunStore) -> None:
    """Start runs and leave them in many ways, saying which and how far they came, until somebody ends this."""
    say("ready")
    n = 0
    while True:
        n += 1
        claim = (await store.create(new_run(f"{sys.argv[3]}-{n}"), ttl=0.05)).claim
        assert claim is not None
        say("created", claim.run.id, 0)
        for seq in range(1, 3):
            await store.record(claim.lease, [entry(seq)])
            say("recorded", claim.run.id, seq)
        if n % 3 == 0:
            await store.suspend(claim.lease, wake_at=1)
        if n % 3 == 1:
            await store.release(claim.lease)


async def have(store: KeyValueRunStore) -> None:
    """Have the place open until somebody says that it is enough."""
    try:
        await store.setup()
    except StoreCapabilityError as refusal:
        say("refused", refusal)
        return
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)


async def main() -> None:
    store = opened(sys.argv[2])
    try:
        await {"zombie": zombie, "create": create, "work": work, "have": have}[sys.argv[1]](store)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
