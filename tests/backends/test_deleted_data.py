"""What was deleted is nowhere any more: not in a row, a document, a key, an object or a file of the store."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from perdure.model.journal import Entry
from perdure.model.records import Item, NewInput, NewRun
from perdure.store import FullStore
from tests.backends.opening import store_at
from tests.backends.raw_data import is_in, read_raw, sqlite_path
from tests.backends.registry import SQLITE, Backend, on
from tests.campaign import IS_FULL

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


@pytest.mark.slow_stores_too
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


async def write_generation(store: FullStore, run_id: str, number: int) -> None:
    """A generation of a run, with the secret in all that does not outlast it, and OTHER in what does. Then it starts over."""
    claim = await store.acquire(run_id, 30, now=NOW)
    assert claim is not None
    lease, small, kept = claim.lease, f'"{SECRET}"'.encode(), f'"{OTHER}"'.encode()
    for payload in (LONG[:300_000], small):
        await store.signal(run_id, "note", payload, now=NOW)
    entries = [Entry(seq=n, key=f"{SECRET}-{n}", payload=LONG if n == 5 else small, epoch=lease.epoch) for n in range(1, 150)]
    items = [Item(stream="log", n=2 * number + n, payload=kept * (20_000 if n else 1)) for n in range(2)]
    for first in range(0, len(entries), 40):
        await store.record(lease, entries[first : first + 40], items=items if first == 40 else [], now=NOW)
    consumed = [row.seq for row in await store.inbox(run_id)]
    await store.record(lease, consume=consumed, now=NOW)
    await store.signal(run_id, "note", kept, dedupe=f"{OTHER}-{number}", now=NOW)
    unconsumed = [row.seq for row in await store.inbox(run_id)]
    assert unconsumed == [max(consumed) + 1]
    await store.record(lease, consume=unconsumed, now=NOW)
    await store.signal(run_id, "note", kept, dedupe=f"{OTHER}-still-{number}", now=NOW)
    waiting = [row.seq for row in await store.inbox(run_id)]
    word = OTHER if number == 2 else SECRET
    new = NewInput(input=f'["{word}"]'.encode() * 30_000, input_hash=b"h%d" % number, seed=b"s%d" % number)
    await store.continue_as(lease, new, now=NOW)
    assert [row.seq for row in await store.inbox(run_id)] == waiting


async def test_nothing_is_left_of_a_journal_that_a_run_has_left_behind(backend: Backend, dsn: str) -> None:
    async with store_at(dsn) as store:
        large = LONG[:300_000]
        await store.create(NewRun(id="run", workflow="flow", input=large, input_hash=b"h", seed=b"s"), now=NOW)
        for number in range(3):
            await write_generation(store, "run", number)
            if number < 2:
                claim = await store.acquire("run", 30, now=NOW)
                assert claim is not None
                await store.record(claim.lease, consume=[row.seq for row in claim.inbox], now=NOW)
                await store.release(claim.lease, now=NOW)
        left = await read_raw(dsn)
        assert is_in(OTHER, left)
        assert not is_in(SECRET, left)
        assert [item.n for item in await store.items("run", "log")] == list(range(6))
        await store.delete("run")
        assert not is_in(OTHER, await read_raw(dsn))


async def test_a_run_that_starts_over_again_and_again_keeps_its_size(backend: Backend, dsn: str) -> None:
    sizes, payload = list[int](), b'"%b"' % (b"x" * 5_000)
    async with store_at(dsn) as store:
        await store.create(NewRun(id="run", workflow="flow", input=b"[]", input_hash=b"h", seed=b"s"), now=NOW)
        for number in range(100, 400 if IS_FULL else 160):
            claim = await store.acquire("run", 30, now=NOW)
            assert claim is not None
            await store.signal("run", "tick", payload, now=NOW)
            entries = [Entry(seq=n, key=f"step-{n}", payload=payload, epoch=claim.lease.epoch) for n in (1, 2, 3)]
            await store.record(claim.lease, entries, consume=[claim.inbox_seq + 1], now=NOW)
            new = NewInput(input=b"[%d]" % number, input_hash=b"h%d" % number, seed=b"s%d" % number)
            await store.continue_as(claim.lease, new, now=NOW)
            if number in (120, 159, 399):
                sizes.append(len(await read_raw(dsn)))
    # Redis remembers calls for a minute.
    assert max(sizes) - min(sizes) < len(sizes) * 50_000, sizes
