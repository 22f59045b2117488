"""A worker process that is asked to stop lets its step end, records it, gives its run back, and ends well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from perdure import Context, Ok, PerdureWarning, Runtime, Workflow
from perdure.store import Store
from tests.patience import PATIENCE

WORKER: Final = Path(__file__).parent / "sigterm_worker.py"
ROOT: Final = WORKER.parents[2]


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


HOLDING = """
import asyncio
import sys

from perdure import Context, Runtime, workflow


async def hold() -> None:
    print("running", flush=True)
    await asyncio.Event().wait()


@workflow
async def holding(ctx: Context) -> None:
    await ctx.step(hold)


async def main() -> None:
    runtime = Runtime(sys.argv[1], [holding], drain_after=3600)
    await runtime.start(holding, id="h")
    await runtime.work()


asyncio.run(main())
"""


def test_a_second_ctrl_c_does_not_wait_for_a_step(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, f"sqlite:///{tmp_path / 'app.db'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        assert worker.stdout.readline() == "running\n"
        worker.send_signal(signal.SIGINT)
        assert "'hold' of run 'h'" in worker.stderr.readline()  # said without any logging set up
        worker.send_signal(signal.SIGINT)
        _, complained = worker.communicate(timeout=PATIENCE)
    assert worker.returncode != 0
    assert "KeyboardInterrupt" in complained


def test_a_forked_child_of_a_worker_ends_on_sigterm(tmp_path: Path) -> None:
    forks = HOLDING.replace(
        'print("running", flush=True)',
        """reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"!")  # a signal that comes before the fork is over is forgotten by Python
        time.sleep(600)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)""",
    ).replace("import sys", "import os, signal, sys, time")
    command = [sys.executable, "-c", forks, f"sqlite:///{tmp_path / 'app.db'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        worker.kill()


def test_a_process_does_not_stay_for_a_step_that_takes_longer_than_the_drain(tmp_path: Path) -> None:
    database = tmp_path / "app.db"

    async def body(ctx: Context) -> str:
        return await ctx.step("block", lambda: "done elsewhere")

    stuck = Workflow("stuck", body)
    with Runtime(f"sqlite:///{database}", [stuck], concurrency=0).sync as runtime:
        runtime.start(stuck, id="s1")
        command = [sys.executable, str(WORKER), str(database), "stuck"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "running\n"
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout.readline() == "stopped\n"
            said, complained = worker.communicate(timeout=PATIENCE)  # the step takes longer
        assert (worker.returncode, said) == (0, "")
        assert "Traceback" not in complained
        assert "Fatal" not in complained
        assert runtime.resume("s1") == Ok("done elsewhere")  # released, and not when a lease has expired


STAYS_AT: Final = next(n for n, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith("# here it stays"))
APP: Final = """
from perdure import Runtime
from tests.worker.sigterm_worker import stubborn

runtime = Runtime("sqlite:///app.db", [stubborn], drain_after=0.5)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["-m", "perdure", "worker", "app:runtime"], 3, "perdure: the worker has stopped, but step 'hold' of run 's1'"),
        ([str(WORKER), "app.db", "work"], 1, "StepNotStopped: the worker has stopped, but step 'hold' of run 's1'"),
        ([str(WORKER), "app.db", "inside"], 0, ""),
    ],
    ids=["command", "work", "inside"],
)
def test_a_process_does_not_stay_for_a_step_that_ignores_its_cancellation(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    async def body(ctx: Context) -> str:
        return await ctx.step("hold", lambda: "done elsewhere")

    stubborn = Workflow("stubborn", body)
    (tmp_path / "app.py").write_text(APP)
    with Runtime(f"sqlite:///{tmp_path / 'app.db'}", [stubborn], concurrency=0).sync as runtime:
        runtime.start(stubborn, id="s1")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        with subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "running\n"
            worker.send_signal(signal.SIGTERM)
            try:
                _, complained = worker.communicate(timeout=PATIENCE)
            finally:
                worker.kill()
        assert worker.returncode == code, complained
        place = f"; it is at {WORKER}:{STAYS_AT} in hold"
        assert f"run 's1' left memory, but step 'hold' does not end when it is cancelled{place}" in complained
        assert "run 's1' is not given back while a step of it runs" in complained
        assert re.search(rf"worker \S+ ends, after \S+ s, although this still runs: step 'hold' of run 's1'{place}", complained)
        assert says in complained
        assert "has stopped, after" not in complained
        assert "run 's1' is given back" not in complained
        assert runtime.resume("s1") == Ok("done elsewhere")  # with the process its lease has ended


async def test_a_run_whose_step_ignores_its_cancellation_is_not_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.body.leaving.CLOSING_SECONDS", 0.05)
    started, is_over = asyncio.Event(), asyncio.Event()

    async def hold() -> str:
        started.set()
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await is_over.wait()
        return "late"

    async def body(ctx: Context) -> str:
        return await ctx.step("first", lambda: "recorded") + await ctx.step(hold)

    flow = Workflow("flow", body)
    runtime = Runtime(store, [flow], drain_after=0.05)
    await runtime.__aenter__()
    await runtime.start(flow, id="f1")
    await started.wait()
    with pytest.warns(PerdureWarning, match="step 'hold' does not end when it is cancelled"):
        await runtime.__aexit__(None, None, None)
    row = await store.get("f1")
    assert row is not None
    assert row.status == "running"
    assert [entry.key for entry in await store.journal("f1")] == ["first"]
    is_over.set()


async def test_the_late_result_of_a_step_that_was_left_at_the_drain_is_discarded(store: Store) -> None:
    is_called, let_go, has_returned = threading.Event(), threading.Event(), threading.Event()

    def block() -> str:
        if is_called.is_set():
            return "in time"
        is_called.set()
        let_go.wait(PATIENCE)
        has_returned.set()
        return "late"

    async def body(ctx: Context) -> str:
        return await ctx.step(block)

    flow = Workflow("flow", body)
    async with Runtime(store, [flow], drain_after=0.05) as runtime:
        await runtime.start(flow, id="f1")
        assert await asyncio.to_thread(is_called.wait, PATIENCE)
    row = await store.get("f1")
    assert row is not None
    assert row.status == "pending"
    async with Runtime(store, [flow]) as runtime:
        assert await runtime.run(flow, id="f1") == Ok("in time")
        let_go.set()
        assert await asyncio.to_thread(has_returned.wait, PATIENCE)
        await asyncio.sleep(0.05)
    assert [(entry.key, entry.phase, entry.payload) for entry in await store.journal("f1")] == [("block", "close", b'"in time"')]
