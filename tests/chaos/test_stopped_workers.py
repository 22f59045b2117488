"""A worker that is stopped past its lease and goes on later can change nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Workflow, stores
from perdure.errors import LeaseHeld
from perdure.model.journal import Entry
from perdure.model.records import Claim, NewRun
from perdure.store import FullStore

HERE = Path(__file__).parent


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    """The script, run until it has stopped itself."""
    process = subprocess.Popen(
        [sys.executable, HERE / script, "work.db"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()
    return process


def go_on(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return out


async def take_over(store: FullStore) -> Claim:
    """The run, as soon as its lease has expired: the holder is alive, so nothing less will do."""
    while True:
        try:
            claim = await store.acquire("run", 30)
        except LeaseHeld:
            await asyncio.sleep(0.01)
        else:
            assert claim is not None
            return claim


async def everything(store: FullStore) -> tuple[Any, ...]:
    return await store.get("run"), await store.journal("run"), await store.inbox("run"), await store.items("run", "s")


async def test_every_write_of_a_stopped_holder_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    zombie = await asyncio.to_thread(start, "zombie.py", tmp_path)
    store = stores.sqlite(tmp_path / "work.db")
    claim = await take_over(store)
    await store.record(claim.lease, [Entry(seq=1, key="step", payload=b'"mine"')])
    await store.finish(claim.lease, "completed", b'"mine"')
    before = await everything(store)
    printed = await asyncio.to_thread(go_on, zombie)
    results = json.loads(printed.splitlines()[-1])
    assert results.pop("renew") == "[None]"
    assert results == dict.fromkeys(["record", "suspend", "finish", "report", "release", "transaction"], "LeaseLost")
    assert await everything(store) == before
    await store.close()


async def test_a_worker_stopped_in_a_step_stops_for_good_when_its_lease_is_gone(tmp_path: Path) -> None:
    async def first() -> str:
        return "from the new worker"

    async def second(value: str) -> str:
        return value

    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(second, await ctx.step(first))

    stopped = await asyncio.to_thread(start, "stopped_worker.py", tmp_path)
    store = stores.sqlite(tmp_path / "work.db")
    runtime = Runtime(store, concurrency=0)
    assert await runtime.run(Workflow("flow", flow), id="run") == Ok("from the new worker")
    before = await everything(store)
    printed = await asyncio.to_thread(go_on, stopped)
    assert printed.splitlines() == ["stopping", "LeaseLost"]
    assert await everything(store) == before
    await store.close()
    await runtime.close()


@pytest.mark.parametrize("commits", [True, False])
async def test_a_write_held_open_across_a_takeover_is_visible_or_gone(tmp_path: Path, commits: bool) -> None:
    holder, other = stores.sqlite(tmp_path / "work.db"), stores.sqlite(tmp_path / "work.db")
    created = await holder.create(NewRun(id="run", workflow="flow", input=b"[[],{}]", input_hash=b"h", seed=b"s"), ttl=0.001)
    assert created.claim is not None
    taking = None
    try:
        async with holder.transaction(created.claim.lease) as transaction:
            await transaction.record([Entry(seq=1, key="held-open", payload=b"1")])
            taking = asyncio.create_task(take_over(other))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done, "nobody takes the run over while a fenced write is open"
            if not commits:
                raise KeyError
    except KeyError:
        pass
    assert taking is not None
    claim = await taking
    assert [entry.key for entry in claim.journal] == (["held-open"] if commits else [])
    await holder.close()
    await other.close()
