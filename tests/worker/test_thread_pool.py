"""Threads for plain steps: each call is executed once or, if its caller has left, never; also when no thread can be started."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from perdure.aio import threads
from perdure.aio.threads import ThreadPool, ThreadsClosed, run_in_thread
from perdure.errors import PersistenceError
from tests.failing_starts import FailingStarts
from tests.patience import PATIENCE, until

T = TypeVar("T")
PROGRAM = Path(__file__).parent / "few_threads.py"


async def result_of(future: Future[T]) -> T:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.wrap_future(future)


async def test_calls_one_after_the_other_share_one_daemon_thread_with_a_name() -> None:
    pool = ThreadPool("perdure-step", 5)
    used = {await result_of(pool.submit(threading.current_thread)) for _ in range(20)}
    assert len(used) == 1
    (thread,) = used
    assert thread.daemon
    assert thread.name == "perdure-step-1"
    pool.close()


async def test_no_more_threads_than_the_limit_and_the_other_calls_wait() -> None:
    pool, opened = ThreadPool("limited", 2), threading.Event()
    busy = [pool.submit(opened.wait) for _ in range(5)]
    await until(lambda: sum(future.running() for future in busy) == 2)
    await asyncio.sleep(0.02)
    assert [future.running() for future in busy] == [True, True, False, False, False]
    opened.set()
    assert [await result_of(future) for future in busy] == [True] * 5
    pool.close()


async def test_a_call_that_found_no_thread_is_not_executed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, called = ThreadPool("perdure-none", 5), list[str]()
    starts = FailingStarts(monkeypatch)
    starts.fail_all()
    with pytest.raises(PersistenceError, match=r"'perdure-none-1'.*can't start new thread.*ulimit -u"):
        pool.submit(lambda: called.append("refused"))
    starts.fail_none()
    await result_of(pool.submit(lambda: called.append("accepted")))
    assert called == ["accepted"]
    pool.close()


async def test_a_patient_call_waits_until_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, called = ThreadPool("perdure-none", 5), list[int]()
    starts = FailingStarts(monkeypatch)
    starts.fail_all()
    waiting = [pool.submit_patiently(lambda number=number: called.append(number)) for number in range(5)]  # type: ignore[misc]
    left = pool.submit_patiently(lambda: called.append(-1))
    await until(lambda: starts.failed >= 20)
    assert called == []
    assert left.cancel()
    starts.fail_none()
    for future in waiting:
        await result_of(future)
    assert sorted(called) == list(range(5))
    assert [(record.levelno, record.name) for record in caplog.records] == [(logging.WARNING, "perdure")]
    assert "calls wait for one of 0 perdure-none threads" in caplog.text
    pool.close()


async def test_trying_to_start_a_thread_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RETRY_SECONDS", (0.01, 0.08))
    pool = ThreadPool("perdure-none", 5)
    starts = FailingStarts(monkeypatch)
    starts.fail_all()
    began = time.monotonic()
    waiting = pool.submit_patiently(list[int])
    await until(lambda: starts.failed >= 12)
    # The sum of the pauses, each with the least that jitter leaves of it.
    assert time.monotonic() - began >= (0.01 + 0.02 + 0.04 + 8 * 0.08) / 2
    starts.fail_none()
    assert await result_of(waiting) == []
    pool.close()


async def test_a_call_waits_for_a_thread_that_runs_and_for_one_that_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, opened = ThreadPool("perdure-few", 5), threading.Event()
    busy = pool.submit(opened.wait)
    starts = FailingStarts(monkeypatch)
    starts.fail_all()
    first, second = pool.submit(lambda: "first"), pool.submit(lambda: opened.is_set() or "second")
    opened.set()
    assert await result_of(first) == "first"  # by the one thread there is
    assert await result_of(second) is True
    assert await result_of(busy) is True
    opened.clear()
    busy = pool.submit(opened.wait)
    third = pool.submit(lambda: "third")
    starts.fail_none()
    assert await result_of(third) == "third"  # by another, although the first is never free
    opened.set()
    await result_of(busy)
    pool.close()


async def test_a_closed_pool_executes_nothing_more() -> None:
    pool, opened, called = ThreadPool("closed", 1), threading.Event(), list[str]()
    busy = pool.submit(opened.wait)
    await until(busy.running)
    waiting = pool.submit(lambda: called.append("late"))
    ended = pool.close()
    assert pool.close() is ended
    with pytest.raises(ThreadsClosed):
        await result_of(waiting)
    with pytest.raises(ThreadsClosed):
        pool.submit(lambda: called.append("later"))
    assert not ended.done()
    opened.set()
    assert await result_of(busy) is True
    await result_of(ended)
    assert called == []
    assert ThreadPool("unused", 1).close().done()


async def test_a_pool_that_is_dropped_ends_its_threads() -> None:
    pool = ThreadPool("dropped", 3)
    thread = await result_of(pool.submit(threading.current_thread))
    del pool
    gc.collect()
    await until(lambda: not thread.is_alive())


async def test_the_end_of_the_interpreter_closes_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = FailingStarts(monkeypatch)
    starts.fail_all("can't create new thread at interpreter shutdown")
    with pytest.raises(ThreadsClosed, match="interpreter shutdown"):
        ThreadPool("perdure-ending", 1).submit_patiently(list[int])
    starts.fail_all()
    pool = ThreadPool("perdure-ending", 1)
    waiting = pool.submit_patiently(list[int])
    starts.fail_all("can't create new thread at interpreter shutdown")
    with pytest.raises(ThreadsClosed):
        await result_of(waiting)


async def test_what_a_call_raises_reaches_its_caller_and_the_thread_lives_on() -> None:
    pool = ThreadPool("raising", 1)
    with pytest.raises(SystemExit):
        await result_of(pool.submit(sys.exit))
    assert await result_of(pool.submit(lambda: 7)) == 7
    pool.close()


async def test_a_call_in_a_thread_has_the_context_of_its_caller_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, opened, called = ThreadPool("io", 1), threading.Event(), list[str]()
    monkeypatch.setattr(threads, "_file_threads", pool)
    busy = asyncio.ensure_future(run_in_thread(opened.wait))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(run_in_thread(called.append, "late"))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.wait([late])
    opened.set()
    assert await busy
    assert await run_in_thread(int, "7") == 7
    assert late.cancelled()
    assert called == []
    pool.close()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_process_without_threads_calls_each_step_once_and_says_so_once(kind: str) -> None:
    """Before, 30 runs of one step had 199 calls in 10 s, none of them ended, and nothing was logged."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)  # the process runs as another user, if this one is root
        command = [sys.executable, str(PROGRAM), directory, kind]
        began = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ended"], told["calls"]) == (30, 30), (told, time.monotonic() - began)
    assert len(told["logged"]) == 1
    assert "perdure-step" in told["logged"][0]
