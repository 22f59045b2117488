"""A worker process that is asked to stop lets its step end, records it, gives its run back, and ends well."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Context, Ok, Runtime, Workflow
from tests.worker.flows import PATIENCE

WORKER = Path(__file__).parent / "sigterm_worker.py"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work_stops_on_a_signal_and_its_run_goes_on_elsewhere(tmp_path: Path, number: signal.Signals) -> None:
    database = tmp_path / "app.db"

    async def body(ctx: Context) -> str:
        heard = await ctx.step("listen", lambda: "not heard again")
        return heard + await ctx.step("never", lambda: " and went on")

    listener = Workflow("listener", body)
    with Runtime(f"sqlite:///{database}", [listener], concurrency=0).sync as runtime:
        runtime.start(listener, id="l1")
        command = [sys.executable, str(WORKER), str(database)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            assert worker.stdin is not None
            assert worker.stdout.readline() == "running\n"
            worker.send_signal(number)
            said, _ = worker.communicate("the last word\n", timeout=PATIENCE)
        assert (worker.returncode, said) == (0, "stopped\n")
        assert runtime.resume("l1") == Ok("the last word and went on")
