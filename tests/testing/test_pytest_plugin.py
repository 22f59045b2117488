"""pytest's plugin and the blocking runtime, used as a program's tests use them: in a pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from perdure import Context, Ok, Suspended, testing, workflow

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
        assert rt.result(rt.get("r")) == "yes"
        rt.assert_history("r", ["sleep trial 14d", "signal word"])
        assert rt.run(answered, id="r") == Ok("yes")
