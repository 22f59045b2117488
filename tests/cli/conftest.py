"""A directory with a program and its store, and the command line called in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from perdure.cli import main
from perdure.runtime import Runtime

APP: Final = """
from perdure import Context, Retry, Runtime, workflow


async def charge(cents: int) -> str:
    return f"paid {cents}"


async def decline() -> None:
    raise RuntimeError("declined \\x1b[31m")


@workflow
async def checkout(ctx: Context, order: str, cents: int = 1) -> str:
    paid = await ctx.step(charge, cents)
    answer = await ctx.wait_for_signal("approve", timeout="3d")
    return f"{order} {paid} {answer}"


@workflow
async def broken(ctx: Context) -> None:
    await ctx.step(charge, 1)
    await ctx.step(decline)


@workflow
async def retried(ctx: Context) -> None:
    await ctx.step(decline, retry=Retry(attempts=5, wait_initial="1h", wait_max="1h"))


@workflow
async def refund(ctx: Context, order: str) -> str:
    return repr(await ctx.approve("refund", {"order": order}, expires_in="3d", assignees=["ada", "b\\x1b[31mob"]))


runtime = Runtime(workflows=[checkout, broken, retried, refund])
"""


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its one document of JSON."""
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        """Its lines of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


Command: TypeAlias = Callable[..., Done]
Sweep: TypeAlias = Callable[[], None]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with app.py; the environment names a store that is not there yet."""
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///app.db")
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def perdure(directory: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls the command line, as often as needed: the program is imported anew each time, as in a new process."""

    def call(*arguments: str) -> Done:
        sys.modules.pop("app", None)
        capsys.readouterr()
        code = main(arguments)
        sys.modules.pop("app", None)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def sweep(directory: Path) -> Sweep:
    """Does once what a worker does."""

    def once() -> None:
        import asyncio

        from perdure.cli.options import load_runtime

        async def call(runtime: Runtime) -> None:
            try:
                await runtime.sweep()
            finally:
                await runtime.close()

        sys.modules.pop("app", None)
        asyncio.run(call(load_runtime("app:runtime")))
        sys.modules.pop("app", None)

    return once
