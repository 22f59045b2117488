"""The program of these tests' processes: `python -m tests.backends.key_value.child JOB DIRECTORY`. It reports by printing."""

from __future__ import annotations

import asyncio
import sys

from obstore.store import LocalStore

from perdure.backends.key_value import KeyValueRunStore
from perdure.errors import StoreCapabilityError
from perdure.testing.contract.world import entry, new_run


def say(*words: object) -> None:
    print(*words, flush=True)


def open_at(place: str) -> KeyValueRunStore:
    """The store in this directory."""
    return KeyValueRunStore(LocalStore(place, mkdir=True))


async def work(store: KeyValueRunStore) -> None:
    """Create runs and leave them in several states, printing each write that returned, until killed."""
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
    """Keep the store open until a line on stdin."""
    try:
        await store.setup()
    except StoreCapabilityError as refusal:
        say("refused", refusal)
        return
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)


async def main() -> None:
    store = open_at(sys.argv[2])
    try:
        await {"work": work, "have": have}[sys.argv[1]](store)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
