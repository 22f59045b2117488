"""`perdure worker` as a process: its options, and what Ctrl-C does."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.options import load_runtime
from tests.cli.conftest import Command, Sweep
from tests.cli.terminal import PERDURE

PATIENCE = 60
APP = """
import asyncio
import time

from perdure import Context, Runtime, workflow


async def hold() -> None:
    print("begun", flush=True)
    await asyncio.Event().wait()


async def block() -> None:
    print("begun", flush=True)
    while True:
        time.sleep(0.01)


@workflow
async def holding(ctx: Context) -> None:
    await ctx.step(hold)


@workflow
async def blocking(ctx: Context) -> None:
    await ctx.step(block)


@workflow
async def quick(ctx: Context) -> str:
    return "done"


runtime = Runtime(workflows=[holding, blocking, quick], concurrency=0, only_queues=["none"], drain_after=3600)
"""


@pytest.fixture(autouse=True)
def _app(directory: Path) -> None:
    (directory / "app.py").write_text(APP)


@contextmanager
def working(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process, which is killed in the end."""
    command = [*PERDURE, "worker", "app:runtime", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def until_line(stream: Any, part: str) -> str:
    """Return the line with this text, once it is written."""
    for line in stream:
        if part in line:
            return str(line)
    raise AssertionError(f"no line has {part!r}")


def test_a_worker_takes_store_queues_and_concurrency_also_for_a_client(perdure: Command) -> None:
    for run_id, queue in (("a", "mail"), ("b", "post"), ("c", "default")):
        put(run_id, queue, "sqlite:///other.db")
    options = ("--store", "sqlite:///other.db", "--queue", "mail", "--queue", "post", "--concurrency", "3")
    with working(*options) as worker:
        starts = until_line(worker.stderr, "starts: ")
        assert "up to 3 runs at a time" in starts
        assert "in the queues mail, post" in starts
        assert "other.db" in starts
        for _ in range(2):
            until_line(worker.stderr, "is completed")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    found = {line["id"]: line["status"] for line in perdure("runs", "--json", "--store", "sqlite:///other.db").documents}
    assert found == {"a": "completed", "b": "completed", "c": "pending"}


def put(run_id: str, queue: str, dsn: str) -> None:
    """Start a run in this queue, which the command cannot."""

    async def start() -> None:
        await runtime.start("quick", id=run_id, queue=queue)
        await runtime.close()

    sys.modules.pop("app", None)
    runtime = load_runtime("app:runtime")
    runtime.configure(store=dsn)
    asyncio.run(start())
    sys.modules.pop("app", None)


@pytest.mark.parametrize(("level", "is_told"), [("debug", True), ("info", True), ("warning", False)])
def test_a_log_level_leaves_out_what_is_less_severe(perdure: Command, level: str, *, is_told: bool) -> None:
    perdure("start", "app:runtime", "quick", "--id", "q")
    with working("--concurrency", "1", "--queue", "default", "--log-level", level) as worker:
        while perdure("show", "q", "--json").document["status"] != "completed":
            assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=PATIENCE)
    assert worker.returncode == 0
    assert ("run 'q' is completed" in log) is is_told
    assert is_told or not log


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--concurrency", "-1"], "concurrency must be a whole number from 0"),
        (["--concurrency", "0"], "with concurrency=0 is a client"),
        (["--concurrency", str(2**64)], "concurrency must be a whole number from 0"),
        (["--queue", ""], "a queue's name"),
        (["--store", ""], "--store is empty"),
        (["--store", "memory:"], "it would find no runs"),
        (["--log-level", "loud"], 'Invalid value "loud" for --log-level'),
    ],
)
def test_options_of_a_worker_that_make_no_sense_are_refused(perdure: Command, options: list[str], text: str) -> None:
    done = perdure("worker", "app:runtime", *options)
    assert done.code in (1, 2)
    assert text in done.err


def test_the_first_ctrl_c_says_what_is_waited_for_and_the_second_ends_at_once(perdure: Command) -> None:
    perdure("start", "app:runtime", "holding", "--id", "h")
    with working("--concurrency", "1", "--queue", "default") as worker:
        until_line(worker.stdout, "begun")
        worker.send_signal(signal.SIGINT)
        said = until_line(worker.stderr, "Ctrl-C")
        assert "'hold' of run 'h'" in said
        assert "after 3600 s at the latest" in said
        worker.send_signal(signal.SIGINT)
        assert worker.wait(PATIENCE) == 130
        assert worker.stderr is not None
        assert worker.stderr.read().splitlines()[-1].startswith("perdure: ended at once")


def test_the_second_ctrl_c_ends_a_worker_whose_event_loop_is_blocked(perdure: Command) -> None:
    perdure("start", "app:runtime", "blocking", "--id", "b")
    with working("--concurrency", "1", "--queue", "default") as worker:
        until_line(worker.stdout, "begun")
        worker.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.5)  # the first one waits for the step; signals that are sent together are one
        worker.send_signal(signal.SIGINT)
        assert worker.wait(PATIENCE) == 130


def test_a_worker_whose_process_has_ended_is_gone(perdure: Command, sweep: Sweep) -> None:
    perdure("start", "app:runtime", "holding", "--id", "h")
    with working("--concurrency", "1", "--queue", "default") as worker:
        until_line(worker.stdout, "begun")
        while not (found := perdure("workers", "--json").documents):  # it registers itself after a second
            assert worker.poll() is None
        assert (found[0]["is_gone"], perdure("workers").out.splitlines()[1].split()[1]) == (False, "alive")
        worker.kill()
        worker.wait(PATIENCE)
    (line,) = perdure("workers", "--json").documents
    assert (line["pid"], line["is_gone"], line["is_silent"]) == (worker.pid, True, False)
    assert perdure("workers").out.splitlines()[1].split()[1] == "gone"
    assert json.loads(perdure("runs", "--json").out)["status"] == "running"
