"""perdure without an event loop: `wf.run_sync(...)` and `runtime.sync`, from any thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores, workflow
from perdure.aio import loop_thread, threads
from perdure.aio.loop_thread import block_on
from perdure.errors import InvalidInput, RunCancelled, RunNotFound
from perdure.store import Store
from tests.patience import PATIENCE, until
from tests.worker.flows import ask, greet


@pytest.fixture(params=["memory", "sqlite"], name="store")
def a_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened: Store = stores.memory() if request.param == "memory" else stores.sqlite(tmp_path / "app.db")
    yield opened
    block_on(opened.close())


def test_run_sync_gives_the_outcome(store: Store) -> None:
    @workflow
    async def fails(ctx: Context) -> None:
        raise ValueError("no")

    assert greet.run_sync("Ada") == Ok("hello Ada!")
    assert greet.options(id="g1", store=store).run_sync(name="Ada", mark="?") == Ok("hello Ada?")
    assert isinstance(ask.run_sync(id="a1", store=store), Suspended)
    outcome = fails.run_sync()
    assert isinstance(outcome, Err)
    assert str(outcome.error) == "no"
    with pytest.raises(InvalidInput):
        greet.run_sync(1)  # type: ignore[call-overload]


def test_the_sync_runtime_has_the_methods_of_the_runtime(store: Store) -> None:
    with Runtime(store, [greet, ask], unload_grace=0).sync as runtime:
        run = runtime.start(greet, "Ada", id="g1")
        assert run.result() == "hello Ada!"
        assert run.status() == "completed"
        assert run.outcome() == Ok("hello Ada!")
        assert repr(run) == "<SyncRun g1>"
        assert runtime.run(greet, "Eve", id="g2") == Ok("hello Eve!")
        waiting = runtime.start(ask, id="a1")
        assert isinstance(waiting.outcome(), Suspended)
        runtime.signal("a1", "answer", 7)
        assert waiting.result() == 7
        stopped = runtime.start(ask, id="a2")
        stopped.cancel()
        with pytest.raises(RunCancelled):
            stopped.result()
        found = runtime.get("a2")
        assert found is not None
        assert found.status() == "cancelled"
        again = runtime.retry("a2")
        again.signal("answer", 8)
        assert again.result() == 8
        assert runtime.get("x1") is None
        assert {info.id for info in runtime.list(workflow=greet)} == {"g1", "g2"}
        assert runtime.count(workflow=greet, status=("completed", "failed")) == 2
        assert runtime.stuck_runs(prefix="g") == []
        runtime.delete("g2")
        assert runtime.purge(0) == 3


def test_a_sync_client_sweeps_holds_and_resumes(store: Store) -> None:
    runtime = Runtime(store, concurrency=0).sync
    runtime.register(greet)
    runtime.start(greet, "Ada", id="g1")
    runtime.hold("g1")
    assert runtime.sweep() == {}
    assert [found.verdict for found in runtime.check(workflow=greet, prefix="g", limit=5, patience="1s").results] == ["fits"]
    runtime.unhold("g1")
    assert runtime.sweep() == {"g1": Ok("hello Ada!")}
    assert runtime.resume("g1") == Ok("hello Ada!")
    with pytest.raises(RunNotFound):
        runtime.cancel("x1")
    runtime.close()


def test_the_sync_runtime_works_in_the_background(store: Store) -> None:
    with Runtime(store, [ask], unload_grace=0).sync as runtime:
        run = runtime.start(ask, id="a1")
        timer = threading.Timer(0.01, run.signal, ["answer", 7])
        timer.start()
        assert run.result() == 7
        timer.join()


def test_many_threads_run_side_by_side(store: Store) -> None:
    together = threading.Barrier(8)

    @workflow
    async def meet(ctx: Context, number: int) -> int:
        await ctx.step("arrive", together.wait, PATIENCE)
        return number

    with ThreadPoolExecutor(8) as threads:
        outcomes = threads.map(lambda number: meet.run_sync(number, id=f"m{number}", store=store), range(8))
        assert list(outcomes) == [Ok(number) for number in range(8)]


def test_many_threads_that_run_one_id_run_it_once(store: Store) -> None:
    calls: list[int] = []

    def call() -> int:
        calls.append(1)
        return len(calls)

    @workflow
    async def once(ctx: Context) -> int:
        return await ctx.step(call)

    with ThreadPoolExecutor(8) as threads:
        outcomes = threads.map(lambda _: once.run_sync(id="o1", store=store), range(32))
        assert list(outcomes) == [Ok(1)] * 32
    assert calls == [1]


def test_a_plain_step_may_run_another_workflow_and_wait_for_it(store: Store) -> None:
    def inner() -> str:
        return greet.options(id="inner", store=store).run_sync("Ada").unwrap()

    @workflow
    async def outer(ctx: Context) -> str:
        return await ctx.step(inner)

    assert outer.run_sync(id="outer", store=store) == Ok("hello Ada!")


class Families:
    """Parents whose plain steps block until a child has ended. Each waits until so many of them are about to do that."""

    def __init__(self, store: Store, parents: int, concurrency: int, before_all_block: Callable[[], None] = lambda: None) -> None:
        together = threading.Barrier(parents, before_all_block)

        async def child(ctx: Context, n: int) -> int:
            return await ctx.step("child's step", lambda: n + 1)

        def start(n: int) -> int:
            run = self.runtime.sync.start(self.child, n, id=f"child {n}")
            together.wait(PATIENCE)
            return run.result()

        def run(n: int) -> int:
            together.wait(PATIENCE)
            return self.runtime.sync.run(self.child, n, id=f"child {n}").unwrap()

        async def parent(ctx: Context, n: int, how: str) -> int:
            return await ctx.step("ask", {"start": start, "run": run}[how], n)

        self.child, self.parent = Workflow("child", child), Workflow("parent", parent)
        self.runtime = Runtime(store, [self.child, self.parent], concurrency=concurrency)


class Looks:
    """How often a blocked thread looks whether all are, and how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._patch = monkeypatch
        monkeypatch.setattr(loop_thread, "WARN_OF_BLOCKED_SECONDS", PATIENCE)
        look = threads._PoolThreads.warn_if_all_blocked

        def counted(pool: threads._PoolThreads) -> None:
            look(pool)
            self.count += 1

        monkeypatch.setattr(threads._PoolThreads, "warn_if_all_blocked", counted)

    def begin(self) -> None:
        """Let those that block from now on look at once, and again and again."""
        self._patch.setattr(loop_thread, "WARN_OF_BLOCKED_SECONDS", 0.01)


def warnings_of_blocked(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "threads block" in record.getMessage()]


@pytest.mark.parametrize("how", ["start", "run"])
async def test_steps_that_block_all_threads_until_other_runs_have_ended_are_reported(
    store: Store, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = Looks(monkeypatch)
    families = Families(store, parents=2, concurrency=2, before_all_block=looks.begin)
    async with families.runtime as runtime:
        parents = [await runtime.start(families.parent, n, how, id=f"parent {n}") for n in range(2)]
        async with asyncio.timeout(PATIENCE):
            await until(lambda: warnings_of_blocked(caplog))
            (warning,) = warnings_of_blocked(caplog)
            assert "step 'ask' of run 'parent 0', step 'ask' of run 'parent 1'" in warning
            assert "raise concurrency=" in warning
            # Once, also when it looks again; and what is stuck can be helped by another worker, or a client.
            before = looks.count
            await until(lambda: looks.count > before + 10)
            assert warnings_of_blocked(caplog) == [warning]
            if how == "start":
                async with Runtime(store, [families.child]):
                    assert [await run for run in parents] == [1, 2]
            else:
                await runtime.cancel("child 0")
                with pytest.raises(RunCancelled):
                    await parents[0]
                assert await parents[1] == 2  # its child has the thread that has become free


async def test_steps_that_block_while_threads_are_free_are_not_reported(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Looks(monkeypatch).begin()
    families = Families(store, parents=2, concurrency=3)
    async with families.runtime as runtime:
        parents = [await runtime.start(families.parent, n, "start") for n in range(2)]
        async with asyncio.timeout(PATIENCE):
            assert [await run for run in parents] == [1, 2]
    assert warnings_of_blocked(caplog) == []


def test_a_blocking_call_on_the_loop_that_would_serve_it_is_refused() -> None:
    async def inner() -> Any:
        return greet.run_sync("Ada")

    @workflow
    async def outer(ctx: Context) -> Any:
        return await ctx.step(inner)

    outcome = outer.run_sync()
    assert isinstance(outcome, Err)
    assert str(outcome.error) == "a blocking call was made from the loop that would have to serve it; use the async methods there"


def _program(source: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, because here a guard refuses what blocks a loop."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)


def test_run_sync_works_inside_a_running_loop() -> None:
    done = _program("""
        import asyncio
        from perdure import Context, workflow

        @workflow
        async def greet(ctx: Context, name: str) -> str:
            return await ctx.step("greet", lambda: f"hello {name}")

        async def main() -> None:
            print(greet.run_sync("Ada").unwrap())

        asyncio.run(main())
        """)
    assert (done.stdout, done.stderr) == ("hello Ada\n", "")


def test_a_program_that_used_it_ends_at_once(tmp_path: Path) -> None:
    before = time.monotonic()
    done = _program(
        """
        import sys
        from perdure import Context, Runtime, workflow

        @workflow
        async def greet(ctx: Context, name: str) -> str:
            return await ctx.step("greet", lambda: f"hello {name}")

        print(greet.run_sync("Ada", id="g1", store=sys.argv[1]).unwrap())
        with Runtime(sys.argv[1], [greet]).sync as runtime:
            print(runtime.start(greet, "Eve").result())
        Runtime(sys.argv[1], [greet], concurrency=0).sync.start(greet, "Bob")
        """,
        f"sqlite:///{tmp_path / 'app.db'}",
    )
    assert (done.stdout, done.stderr) == ("hello Ada\nhello Eve\n", "")
    assert time.monotonic() - before < 25  # and not when a lease has expired


def test_a_program_that_ends_in_the_middle_of_a_run_waits_for_no_thread_and_fails_no_step(tmp_path: Path) -> None:
    dsn = f"sqlite:///{tmp_path / 'app.db'}"
    program = """
        import sys, threading, time
        from perdure import Context, Runtime, workflow

        begun = threading.Semaphore(0)

        def quick() -> str:
            return "quick"

        def slow() -> None:
            begun.release()
            time.sleep(600)

        @workflow
        async def two(ctx: Context) -> None:
            await ctx.step(quick)
            await ctx.step(slow)

        runtime = Runtime(sys.argv[1], [two]).sync
        runtime.__enter__()
        runtime.start(two, id="t1")
        begun.acquire()
        """
    assert _program(program, dsn).stderr == ""
    with Runtime(dsn, concurrency=0).sync as runtime:
        assert {info.status for info in runtime.list()} == {"running"}
        row = block_on(cast("Runtime", runtime._runtime).store.journal("t1"))
        assert [(entry.key, entry.ok) for entry in row] == [("quick", True)]
