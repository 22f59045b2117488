"""pytest's plugin and the blocking runtime, used as a program's tests use them: in a pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, Ok, RunCancelled, Suspended, testing, workflow
from perdure.model.durations import moment

ROOT: Final = Path(__file__).parents[2]

WORKFLOW: Final = """
import pytest
from perdure import Context, Ok, workflow

async def welcome(name):
    return f"welcome {name}"

@workflow
async def signup(ctx: Context, name: str) -> str:
    await ctx.sleep("trial", "14d")
    return await ctx.step(welcome, name)
"""
FOR_ASYNC: Final = """
async def test_it(perdure_runtime):
    async with perdure_runtime(signup) as rt:
        assert await rt.run(signup, "ada") == Ok("welcome ada")
"""
BLOCKING: Final = """
def test_it(perdure_runtime_sync):
    rt = perdure_runtime_sync(signup)
    rt.stub("welcome", returns="hello")
    assert rt.run(signup, "ada") == Ok("hello")
"""
UNUSED: Final = """
def test_it(perdure_runtime_sync):
    perdure_runtime_sync(signup).stub("welcome", returns="hello")
"""


def run_pytest(directory: Path, text: str, *options: str) -> str:
    """What pytest says to a file with these tests, and to nothing of this repository's settings."""
    (directory / "test_program.py").write_text(WORKFLOW + text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(directory), *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "-p", "perdure.testing.pytest_plugin", "test_program.py"],
        cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (FOR_ASYNC, ("-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto")),
        ("pytestmark = pytest.mark.anyio\n" + FOR_ASYNC, ("-p", "anyio.pytest_plugin", "-k", "asyncio")),
        (BLOCKING, ()),
    ],
    ids=["pytest-asyncio", "anyio", "no plugin"],
)
def test_the_fixtures_work_with_each_way_to_run_coroutines(tmp_path: Path, text: str, options: tuple[str, ...]) -> None:
    assert "1 passed" in run_pytest(tmp_path, text, *options)


def test_a_stub_that_was_not_used_fails_the_test(tmp_path: Path) -> None:
    assert "the stub of 'welcome' was never called (steps that ran: none)" in run_pytest(tmp_path, UNUSED)


def test_the_plugin_is_announced_to_pytest_and_imports_nothing_until_it_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"perdure": "perdure.testing.pytest_plugin"}
    program = "import sys, pytest, perdure.testing.pytest_plugin; print(*(name for name in sys.modules if 'perdure' in name))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert set(shown) <= {"perdure", "perdure.testing", "perdure.testing.pytest_plugin"}


@workflow
async def answered(ctx: Context) -> str:
    await ctx.sleep("trial", "14d")
    answer: str = await ctx.wait_for_signal("word")
    return answer


def test_a_test_that_is_no_coroutine_has_a_runtime_too() -> None:
    with testing.runtime_sync(answered) as rt:
        assert isinstance(rt.run(answered, id="r"), Suspended)
        rt.signal("r", "word", "yes")
        run = rt.get("r")
        assert run is not None
        assert run.result() == "yes"
        rt.assert_history("r", ["sleep trial 14d", "signal word"])
        assert rt.run(answered, id="r") == Ok("yes")


def test_every_run_of_a_blocking_runtime_blocks() -> None:
    with testing.runtime_sync(answered) as rt:
        run = rt.start(answered, id="a")
        assert isinstance(run.outcome(), Suspended)
        run.signal("word", "yes")
        assert run.result() == "yes"
        assert run.status() == "completed"
        assert list(run.resume_state().steps) == ["trial", "word"]
        rt.assert_history(run, ["sleep trial 14d", "signal word"])
        other = rt.signal_with_start(answered, id="b", signal="word", payload="early")
        assert other.result() == "early"
        assert [made.result() for made in rt.start_many(answered, [()], ids=["a"])] == ["yes"]
        rt.fork("a", from_step="word", id="c").cancel()
        forked = rt.get("c")
        assert forked is not None
        with pytest.raises(RunCancelled):
            forked.result()
        assert rt.retry("c").result() == "yes"


def test_a_blocking_runtime_has_the_whole_kit() -> None:
    async def welcome(name: str) -> str:
        raise AssertionError(f"{name} was welcomed")

    @workflow
    async def signup(ctx: Context, name: str) -> list[Any]:
        text = await ctx.step(welcome, name)
        approvals = await ctx.approve("a", 1), await ctx.approve("b", 2)
        return [text, await ctx.wait_for_signal("word"), *(type(one).__name__ for one in approvals)]

    with testing.runtime_sync(signup, auto_skip=False) as rt:
        stub = rt.stub("welcome", returns="hello")
        rt.signal_when_waiting("word", "yes")
        rt.approve_when_waiting("a", by="ada")
        rt.reject_when_waiting("b", by="eve", reason="no")
        run = rt.start(signup, "ada")
        rt.settle()
        assert run.result() == ["hello", "yes", "Approved", "Rejected"]
        assert stub.calls == [("ada",)]
        assert [str(item) for item in rt.history(run)] == [str(item) for item in rt.history(run.id)]
        before = rt.now()
        rt.skip("3d")
        rt.skip_to(before + timedelta(days=4))
        assert rt.now() == before + timedelta(days=4) == moment(rt.clock.now())


def test_the_kit_of_both_runtimes_is_the_same() -> None:
    mine = {name for name in vars(testing.VirtualRuntime) if not name.startswith("_")} - {"run"}
    for_crashes = {"wait_for", "watch_steps", "go_on_from"}
    assert mine - for_crashes <= {name for name in dir(testing.SyncVirtualRuntime) if not name.startswith("_")}


async def test_a_blocking_runtime_is_refused_where_an_event_loop_runs() -> None:
    with pytest.raises(RuntimeError, match="running event loop"), testing.runtime_sync(answered):
        pass
