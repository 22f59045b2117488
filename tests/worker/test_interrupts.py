"""Ctrl-C while a program waits for a run: it ends at once, and what a person sees is short and begins with their own line."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

PROGRAM: Final = """
import asyncio
from perdure import Context, workflow

async def slow():
    print("in the step", flush=True)
    await asyncio.Event().wait()

@workflow
async def flow(ctx: Context):
    await ctx.step(slow)

async def main():
    await flow.run(id="run", store="sqlite:///app.db")

WAIT
"""
# What the program waits in, and how many frames are shown at most besides asyncio's own: those of the program, the method of
# perdure that was called, and what it waits in.
WAITS: Final = {"flow.run_sync()": 3, "asyncio.run(main())": 4, "asyncio.run(flow())": 2}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.one_loop  # the loop that counts is the one of the process that it starts
async def test_ctrl_c_shows_the_users_line_and_little_of_ours(wait: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("WAIT", wait)
    await asyncio.to_thread((tmp_path / "program.py").write_text, program)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "program.py", cwd=tmp_path, stdout=pipe, stderr=pipe)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"in the step\n"
    child.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        _, shown = await child.communicate()
    lines = shown.decode().splitlines()
    assert (lines[-1], child.returncode) == ("KeyboardInterrupt", -signal.SIGINT)
    assert f"    {wait}" in lines
    frames = [line for line in lines if line.startswith("  File") and "/asyncio/" not in line]
    assert len(frames) <= WAITS[wait], shown.decode()
