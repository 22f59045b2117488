"""What was deleted is nowhere any more: not in a row, a document, a key, an object or a file of the store."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from perdure.model.journal import Entry
from perdure.model.records import Item, NewRun
from perdure.store import FullStore
from tests.backends.opening import store_at
from tests.backends.raw_data import is_in, read_raw, sqlite_path
from tests.backends.registry import FILES, SQLITE, Backend, on

NOW: Final = 1_800_000_000_000_000
SECRET: Final = "the-secret-of-ada"
OTHER: Final = "what-eve-keeps"
# Longer than any store keeps in one row or document.
LONG: Final = (SECRET * 100_000).encode()


async def write_secrets(store: FullStore, run_id: str) -> None:
    """A run that has ended, with the secret in everything that can hold one: large and small, consumed and not."""
    small = f'"{SECRET}"'.encode()
    metadata = b'{"customer":' + small + b"}"
    new = NewRun(id=run_id, workflow="flow", input=b"[%b]" % small, input_hash=b"h", seed=b"s", metadata=metadata)
    await store.create(new, now=NOW)
    first = await store.acquire(run_id, 30, now=NOW)
    assert first is not None
    await store.release(first.lease, problem=f"{SECRET} does not fit", now=NOW)
    for n in range(3):
        await store.signal(run_id, "note", small if n else LONG[:300_000], dedupe=f"{SECRET}-{n}", now=NOW)
    claim = await store.acquire(run_id, 30, now=NOW)
    assert claim is not None
    await store.report(claim.lease, small)
    entries = [
        Entry(seq=n, key=f"{SECRET}-{n}", payload=LONG if n == 5 else small, epoch=claim.lease.epoch) for n in range(1, 80)
    ]
    items = [Item(stream="log", n=n, payload=LONG[:300_000] if n == 1 else small) for n in range(3)]
    await store.record(claim.lease, entries[:40], consume=[1], items=items, now=NOW)
    await store.record(claim.lease, entries[40:], now=NOW)
    await store.finish(claim.lease, "failed", b'{"error":%b}' % small, now=NOW)


@pytest.mark.parametrize("verb", ["delete", "purge"])
async def test_nothing_is_left_of_a_run(backend: Backend, dsn: str, verb: str) -> None:
    async with store_at(dsn) as store:
        await write_secrets(store, "run")
        kept = NewRun(id="other", workflow="flow", input=f'["{OTHER}"]'.encode(), input_hash=b"h", seed=b"s")
        await store.create(kept, now=NOW)
        assert is_in(SECRET, await read_raw(dsn))
        if verb == "delete":
            await store.delete("run")
        else:
            assert await store.purge(0, now=NOW) == 1
        left = await read_raw(dsn)
        assert is_in(OTHER, left)
        assert not is_in(SECRET, left)
        assert [info.id for info in await store.list()] == ["other"]


@on(FILES)
async def test_the_index_of_files_forgets_a_run_and_knows_the_next_one_of_its_id(dsn: str) -> None:
    async with store_at(dsn) as store:
        await write_secrets(store, "run")
        await store.delete("run")
        await store.create(NewRun(id="run", workflow="flow", input=b"[]", input_hash=b"h", seed=b"s"), now=NOW)
        await store.delete("other")
        assert not is_in(SECRET, await read_raw(dsn))
        assert [(info.id, info.status) for info in await store.list()] == [("run", "pending")]
    async with store_at(dsn) as again:
        assert [(info.id, info.status) for info in await again.list()] == [("run", "pending")]


@on(SQLITE)
async def test_the_file_of_sqlite_has_no_trace_after_a_vacuum(dsn: str) -> None:
    async with store_at(dsn) as store:
        await write_secrets(store, "run")
        await store.delete("run")

    def trace() -> bool:
        with closing(sqlite3.connect(sqlite_path(dsn))) as database:
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return is_in(SECRET, Path(sqlite_path(dsn)).read_bytes())

    assert not await asyncio.to_thread(trace)
