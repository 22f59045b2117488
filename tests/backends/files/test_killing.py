"""A process that is killed at every single system call that writes: what it said is there, and nothing is half there."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Final

import pytest

from perdure.backends.files import FilesStore
from perdure.model.records import RunRow
from perdure.model.run_filter import RunFilter
from tests.backends.disk_child import entry
from tests.backends.disk_processes import StartChild, go
from tests.campaign import IS_FULL, times

# Everything that changes a file or tells others of it, and how often the job does it. `write` is the index's.
CALLS: Final = {
    "pwrite64": 18,
    "fdatasync": 18,
    "fsync": 16,
    "write": 22,
    "rename": 9,
    "mkdir": 8,
    "utimensat": 9,
    "unlinkat": 2,
    "flock": 82,
}
POINTS: Final = [(call, n) for call, count in CALLS.items() for n in range(1, count + 1)]


def points() -> list[tuple[str, int]]:
    return POINTS if IS_FULL else random.Random(1).sample(POINTS, times(len(POINTS)))


@pytest.mark.parametrize(("call", "when"), points())
def test_what_a_process_killed_at_this_call_said_is_there(
    path: Path, dsn: str, start_child: StartChild, call: str, when: int
) -> None:
    inject = ("-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}")
    process = start_child("write_everything", dsn, ready=False, under=("strace", "-f", "-qq", "-o", os.devnull, *inject))
    said = process.communicate("\n", timeout=50)[0].splitlines()
    assert process.returncode != 0, "the job ended before it came to this call"
    asyncio.run(asyncio.wait_for(check(FilesStore(path), said), 40))


@pytest.mark.parametrize("seed", range(times(100)))
def test_a_kill_at_any_moment_loses_nothing(path: Path, dsn: str, start_child: StartChild, seed: int) -> None:
    process = start_child("write_everything", dsn)
    go(process)
    time.sleep(random.Random(seed).random() * 0.12)
    process.kill()
    said = process.communicate()[0]
    asyncio.run(asyncio.wait_for(check(FilesStore(path), ["ready", *said.splitlines()]), 40))


async def check(store: FilesStore, said: list[str]) -> None:
    rows = {run_id: await store.get(run_id) for run_id in ("parent", "child", "fired", "restored")}
    await check_what_was_said(store, rows, said)
    await check_index(store, rows)
    await check_going_on(store, rows)
    await store.close()


async def check_what_was_said(store: FilesStore, rows: dict[str, RunRow | None], said: list[str]) -> None:
    child, parent = rows["child"], rows["parent"]
    assert ("created parent" in said) <= (parent is not None)
    assert ("created child" in said) <= (child is not None)
    journal = await store.journal("child")
    assert journal == [entry(seq) for seq in range(1, len(journal) + 1)]
    assert len(journal) >= sum(line.startswith("recorded") for line in said)
    if "signalled" in said:
        assert child is not None
        assert child.status == "completed" or [row.name for row in await store.inbox("child")] == ["go"]
    if await store.inbox("parent"):
        assert child is not None
        assert child.status == "completed", "a parent hears only of what has ended"
    if "finished child" in said:
        assert child is not None
        assert child.status == "completed"
        assert [(row.kind, row.payload) for row in await store.inbox("parent")] == [("child", b"2")]
    if "fired" in said:
        assert rows["fired"] is not None
    if "deleted" in said:
        assert rows["restored"] is None
    elif "restored" in said and rows["restored"] is not None:
        assert [line.seq for line in await store.journal("restored")] == [7]


async def check_index(store: FilesStore, rows: dict[str, RunRow | None]) -> None:
    there = {run_id: row.status for run_id, row in rows.items() if row is not None}
    due = await store.due()  # also does what was left undone
    schedules = await store.schedules()
    if schedules and schedules[0].next_at == 2:
        assert await store.get("fired") is not None
        there["fired"] = rows["fired"].status if rows["fired"] is not None else "pending"
    assert {line.id: line.status for line in await store.list()} == there
    assert set(due) <= set(there)


async def check_going_on(store: FilesStore, rows: dict[str, RunRow | None]) -> None:
    """The leases of the dead are free at once, everything can be driven to its end, and the parent hears of its child once."""
    async with asyncio.timeout(20):
        while claims := (await store.claim(10, 600, [("flow", 1)])).claims:
            for claim in sorted(claims, key=lambda claim: claim.run.id):  # the child before its parent
                if claim.run.id == "child":
                    await store.record(claim.lease, [entry(len(claim.journal) + 1)])
                if claim.run.id == "parent" and claim.inbox:
                    assert [row.payload for row in claim.inbox] == [b"2"]
                await store.finish(claim.lease, "completed", b"2")
    if rows["parent"] is not None and rows["parent"].status == "suspended" and rows["child"] is not None:
        assert [(row.kind, row.payload) for row in await store.inbox("parent")] == [("child", b"2")]
    left = await store.list(RunFilter(status=("suspended",)))
    assert not left or rows["child"] is None
