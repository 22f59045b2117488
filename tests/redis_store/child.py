"""A process of its own for the tests beside it: `python child.py JOB URL TABLE ...`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from perdure.errors import LeaseLost
from perdure.journal import Entry
from perdure.records import NewRun
from perdure.stores.redis_store import RedisStore

Job = Callable[..., Coroutine[Any, Any, None]]


def new_run(run_id: str) -> NewRun:
    return NewRun(id=run_id, workflow="flow", input=b"[]", input_hash=b"hash", seed=b"seed")


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_for_go() -> None:
    say("ready")
    sys.stdin.readline()


async def start(store: RedisStore) -> None:
    """Start the same run as all the others."""
    wait_for_go()
    await store.setup()
    created = await store.create(new_run("run"), ttl=600)
    say("new" if created.is_new else "found")


async def drive(store: RedisStore, ttl: str) -> None:
    """Claim the run and record until killed, or until it is somebody else's."""
    claims = (await store.claim(1, float(ttl), ["flow"])).claims
    while not claims:
        await asyncio.sleep(0.02)
        claims = (await store.claim(1, float(ttl), ["flow"])).claims
    lease, seq = claims[0].lease, max((entry.seq for entry in claims[0].journal), default=0)
    say("ready", seq)
    try:
        while True:
            seq += 1
            await store.record(lease, [Entry(seq=seq, key=f"step-{seq}", epoch=lease.epoch)])
            say(seq)
    except LeaseLost:
        say("lost")


JOBS: dict[str, Job] = {"start": start, "drive": drive}


async def main(name: str, url: str, table: str, *arguments: str) -> None:
    store = RedisStore(url, table=table)
    await JOBS[name](store, *arguments)
    await store.close()


if __name__ == "__main__":
    signal.alarm(120)  # nothing here outlives a test
    asyncio.run(main(*sys.argv[1:]))
