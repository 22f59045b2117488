"""A process that is killed at any system call that writes: what it said is there, and nothing is half there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest

from perdure.model.clock import SystemClock
from perdure.model.records import RunRow
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from tests.backends.disk_child import entry
from tests.backends.disk_processes import STRACE, StartChild
from tests.backends.opening import store_at
from tests.campaign import times

# Everything that changes a file, and how often the job does so in each place.
CALLS: Final = "pwrite64,fdatasync,fsync,rename,mkdir,unlink"
PLACES: Final = {"sqlite:///{}/runs.db": 187, "key_value+files:{}/runs": 160}
POINTS: Final = [(place, when) for place, calls in PLACES.items() for when in range(1, calls + 1, max(1, calls // times(calls)))]
# By then the leases of the dead have expired, where nobody notices that their process has ended.
LATER: Final = 10**10


@pytest.mark.parametrize(("place", "when"), POINTS)
def test_what_a_process_killed_at_this_call_said_is_there(place: str, when: int, tmp_path: Path, start_child: StartChild) -> None:
    dsn = place.format(tmp_path)
    inject = (*STRACE, f"trace={CALLS}", "-e", f"inject={CALLS}:signal=KILL:when={when}")
    process = start_child("write_everything", dsn, ready=False, under=inject)
    said = process.communicate("\n", timeout=50)[0].splitlines()
    assert process.returncode != 0, "the job ended before it came to this call"
    asyncio.run(asyncio.wait_for(check(dsn, said), 40))


async def check(dsn: str, said: list[str]) -> None:
    async with store_at(dsn) as store:
        rows = {run_id: await store.get(run_id) for run_id in ("parent", "child", "fired", "restored")}
        await check_what_was_said(store, rows, said)
        await check_lists(store, rows)
        await check_going_on(store, rows)


async def check_what_was_said(store: FullStore, rows: dict[str, RunRow | None], said: list[str]) -> None:
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


async def check_lists(store: FullStore, rows: dict[str, RunRow | None]) -> None:
    there = {run_id: row.status for run_id, row in rows.items() if row is not None}
    due = await store.due()  # also does what was left undone
    schedules = await store.schedules()
    if schedules and schedules[0].next_at == 2:
        fired = await store.get("fired")
        assert fired is not None
        there["fired"] = fired.status
    assert {line.id: line.status for line in await store.list()} == there
    assert set(due) <= set(there)


async def check_going_on(store: FullStore, rows: dict[str, RunRow | None]) -> None:
    """Everything can be driven to its end, and the parent hears of its child once."""
    later = SystemClock().now() + LATER
    async with asyncio.timeout(20):
        while claims := (await store.claim(10, 600, [("flow", 1)], now=later)).claims:
            for claim in sorted(claims, key=lambda claim: claim.run.id):  # the child before its parent
                if claim.run.id == "child":
                    await store.record(claim.lease, [entry(len(claim.journal) + 1)], now=later)
                if claim.run.id == "parent" and claim.inbox:
                    assert [row.payload for row in claim.inbox] == [b"2"]
                await store.finish(claim.lease, "completed", b"2", now=later)
    if rows["parent"] is not None and rows["parent"].status == "suspended" and rows["child"] is not None:
        assert [(row.kind, row.payload) for row in await store.inbox("parent")] == [("child", b"2")]
    left = await store.list(RunFilter(status=("suspended",)))
    assert not left or rows["child"] is None
