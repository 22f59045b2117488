"""The example of a store that wakes its runs by itself: it does, nobody asks what is due, and the docs show it whole."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, StoredRun, Suspended, workflow

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "push_store.py"


@pytest.fixture(scope="module")
def push_store() -> Any:
    """The class in the example."""
    spec = importlib.util.spec_from_file_location("push_store", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PushStore


def test_the_example_prints_what_it_promises() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("charged 5\nada is suspended\ncharged 5\npaid 10\n", "")


def test_the_docs_show_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "docs" / "writing-a-store.md").read_text()


@workflow
async def napping(ctx: Context, times: int) -> Any:
    for number in range(times):
        await ctx.sleep(f"nap:{number}", "10ms")
    return await ctx.wait_for_signal("up")


async def test_every_wait_is_ended_by_a_push(push_store: Any) -> None:
    runs: dict[str, StoredRun] = {}
    store = push_store(runs)
    async with Runtime(store, [napping], concurrency=0, unload_grace=0) as runtime:
        store.push_to(runtime)
        started = [await runtime.start(napping, 3, id=f"n{number}") for number in range(20)]
        for run in started:
            await runtime.signal(run.id, "up", run.id)
        assert [await run for run in started] == [run.id for run in started]
    assert {run.status for run in runs.values()} == {"completed"}
    assert store._timers == {}


async def test_a_push_for_a_run_that_is_driven_joins_that(push_store: Any) -> None:
    store = push_store({})
    is_in, may_go_on = asyncio.Event(), asyncio.Event()
    entered: list[int] = []

    async def slowly() -> int:
        entered.append(1)
        is_in.set()
        await may_go_on.wait()
        return 7

    @workflow
    async def slow(ctx: Context) -> int:
        return await ctx.step(slowly)

    async with Runtime(store, [slow], concurrency=0) as runtime:
        store.push_to(runtime)
        run = await runtime.start(slow, id="s")
        await is_in.wait()
        pushed = asyncio.create_task(runtime.resume("s"))
        await asyncio.sleep(0)
        may_go_on.set()
        assert await pushed == Ok(7)
        assert await run == 7
    assert entered == [1]


async def test_a_push_that_comes_too_early_changes_nothing(push_store: Any) -> None:
    runs: dict[str, StoredRun] = {}
    store = push_store(runs)
    async with Runtime(store, [napping], concurrency=0, unload_grace=0) as runtime:
        await runtime.run(napping, 0, id="n")
        before = dict(runs)
        assert isinstance(await runtime.resume("n"), Suspended)
        assert runs == before
