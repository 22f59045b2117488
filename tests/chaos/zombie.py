"""A holder that is stopped for longer than its lease: tries every verb that takes a lease when it goes on.

    python zombie.py DATABASE

Prints `stopping` and stops itself; after SIGCONT it prints, for each verb, the name of the error it got.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from perdure import stores
from perdure.errors import PerdureError
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease, NewRun
from perdure.store import FullStore

ENTRY = Entry(seq=1, key="late", payload=b'"late"')


async def in_a_transaction(store: FullStore, lease: Lease) -> None:
    async with store.transaction(lease) as transaction:
        await transaction.record([ENTRY])


async def main() -> None:
    store = stores.sqlite(sys.argv[1])
    run = NewRun(id="run", workflow="flow", input=b"[[],{}]", input_hash=b"h", seed=b"s")
    created = await store.create(run, ttl=0.05)
    assert created.claim is not None
    lease = created.claim.lease
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    attempts = {
        "record": store.record(lease, [ENTRY], items=[Item(stream="s", n=0, payload=b"1")]),
        "suspend": store.suspend(lease, wake_at=None, entries=[ENTRY]),
        "finish": store.finish(lease, "failed", b"null", entries=[ENTRY]),
        "report": store.report(lease, b"1"),
        "release": store.release(lease),
        "transaction": in_a_transaction(store, lease),
    }
    results = {}
    for verb, attempt in attempts.items():
        try:
            results[verb] = repr(await attempt)
        except PerdureError as error:
            results[verb] = type(error).__name__
    results["renew"] = repr(await store.renew([lease], 30))
    print(json.dumps(results), flush=True)
    await store.close()


asyncio.run(main())
