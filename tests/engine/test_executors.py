"""Steps that an executor calls: in threads of the user's, and in other processes."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest

from perdure import (
    Context,
    Err,
    ExecutorNotFound,
    Ok,
    RestartingExecutor,
    Retry,
    RunCancelled,
    RunInterrupted,
    Runtime,
    StepFailed,
    StepInfo,
    StepNotPicklable,
    StepTimeout,
    Workflow,
    current_step,
    step,
    stores,
    workflow,
)
from perdure.testing import ManualClock
from perdure.testing.processes import kill_this_process, process_pool
from tests.engine.replays import raised, twice
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns, until

# Forking a process that has threads is what the test with this name is about; Python 3.12 and later warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

E = TypeVar("E", bound=Executor)

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "cpu_steps.py"
AT_ONCE = Retry(2, wait_initial=0, wait_jitter=0)
# Where a time-out is short: on a busy machine more attempts than one may come too late.
AT_ONCE_AND_AGAIN = Retry(50, wait_initial=0, wait_jitter=0)


def spawned() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def forked() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))


@pytest.fixture(scope="module", params=[spawned, forked, ThreadPoolExecutor], ids=["spawn", "fork", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param() as made:
        yield made


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """A process."""
    with process_pool(1) as made:
        yield made


# What the executors call. Another process imports these by their names.


def where() -> list[Any]:
    here = current_step()
    return [os.getpid(), threading.get_ident(), time.monotonic_ns(), here.key, here.attempt, here.idempotency_key]


def double(number: int) -> int:
    return 2 * number


def fail_at_first() -> int:
    if current_step().attempt == 1:
        raise KeyError("not yet")
    return current_step().attempt


class Demanding(Exception):
    """It cannot be unpickled: its `args` are not what its constructor takes."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


def demand() -> None:
    raise Demanding("no", "reasons")


def leave() -> None:
    sys.exit(3)


def return_lock() -> Any:
    return threading.Lock()


def fail_to_pickle() -> None:
    pickle.dumps(threading.Lock())


def die_at_first() -> str:
    if current_step().attempt == 1:
        kill_this_process()
    return "alive"


def write_times(path: str, go: str) -> int:
    """Append when it began and when it ended. The first attempt ends when the file `go` is there."""
    with Path(path).open("a") as file:
        file.write(f"{time.time()} ")
        file.flush()
        if current_step().attempt == 1:
            wait_for_file(go)
        file.write(f"{time.time()}\n")
    return current_step().attempt


def wait_for_file(path: str) -> None:
    until = time.monotonic() + PATIENCE
    while not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.005)


def rest(seconds: float) -> None:
    time.sleep(seconds)


def start_processes(executor: Executor, number: int) -> None:
    """Return when the executor has that many processes, which takes its time. It starts one where none is idle."""
    with TemporaryDirectory() as directory:
        go = Path(directory) / "go"
        calls = [executor.submit(wait_for_file, str(go)) for _ in range(number)]
        go.touch()
        for call in calls:
            call.result()


@asynccontextmanager
async def in_use(make: Callable[..., E], *args: Any) -> AsyncIterator[E]:
    """The executor that this makes: made, and shut down in the end, without blocking the loop."""
    executor = await asyncio.to_thread(make, *args)
    try:
        yield executor
    finally:
        await asyncio.to_thread(executor.shutdown)


async def test_the_function_runs_there_knows_its_step_and_is_not_called_by_a_replay(executor: Executor) -> None:
    async def body(ctx: Context[Any]) -> Any:
        return [await ctx.step(where, key="by name", executor="cpu"), await ctx.step(where, key="object", executor=executor)]

    first, second = await twice(body, executors={"cpu": executor})
    assert first == second, "the replay gives what was recorded"
    for place, key in zip(first, ("by name", "object"), strict=True):
        assert (place[0], place[1]) != (os.getpid(), threading.get_ident())
        assert place[3:] == [key, 1, f"run/{key}"]
    assert (first[0][0] == os.getpid()) == isinstance(executor, ThreadPoolExecutor)


async def test_an_error_there_is_an_attempt_and_is_recorded_with_the_traceback_of_the_other_process(pool: Executor) -> None:
    async def flow(ctx: Context[Any]) -> Any:
        assert await ctx.step("again", fail_at_first, executor=pool, retry=AT_ONCE) == 2
        return await ctx.step(fail_at_first, executor=pool)

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        outcome = await here.runtime.run(definition, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, KeyError)
        assert outcome.step == "fail_at_first"
        journal = await here.runtime.store.journal("run")
    assert [(entry.key, entry.phase, entry.attempt) for entry in journal] == [
        ("again", "open", 2),
        ("again", "close", 2),
        ("fail_at_first", "close", 1),
    ]
    for entry in (journal[0], journal[2]):
        assert b'raise KeyError(\\"not yet\\")' in entry.payload
        assert b"in fail_at_first" in entry.payload


async def test_an_error_that_cannot_be_sent_back_is_recorded_as_text_and_leaves_the_pool_alone(pool: Executor) -> None:
    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(demand, executor=pool))
        assert isinstance(error, StepFailed)
        assert await ctx.step(double, 4, executor=pool) == 8
        return str(error)

    first, second = await twice(body)
    assert first == second
    assert "Demanding: no because of reasons (as text" in first


async def test_sys_exit_there_stops_the_attempt_of_the_run_only(pool: Executor) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(leave, executor=pool)

    async with world(flow) as here:
        with pytest.raises(RunInterrupted, match=r"sys.exit\(3\)"):
            await here.runtime.run(flow, id="run")
        assert await here.runtime.store.journal("run") == []


@pytest.mark.parametrize("options", [{}, {"retry": AT_ONCE}, {"at_most_once": True}], ids=str)
async def test_what_cannot_be_pickled_fails_the_step_with_what_to_do_and_is_not_tried_again(
    options: dict[str, Any], pool: Executor
) -> None:
    def local() -> None: ...

    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (lambda: 1, (), "cannot be imported there: define it at the top of a module"),
        (local, (), "cannot be imported there: define it at the top of a module"),
        (double, (threading.Lock(),), "its arguments cannot be pickled"),
        (return_lock, (), "what it returned cannot be pickled: it ran"),
    ]

    async def flow(ctx: Context[Any]) -> None:
        for fn, args, expected in cases:
            error = await raised(ctx.step(expected, fn, *args, executor=pool, key=f"{fn!r}", **options))
            assert isinstance(error, StepNotPicklable)
            assert isinstance(error, TypeError)
            assert expected in str(error)
        await ctx.step(double, 1, executor=pool)

    definition = Workflow("flow", flow, on_changed_arguments="ignore")
    async with world(definition) as here:
        assert await here.runtime.run(definition, id="run") == Ok(None)
        assert {entry.attempt for entry in await here.runtime.store.journal("run")} == {1}


async def test_an_error_of_the_function_about_pickling_is_its_own(executor: Executor) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(fail_to_pickle, executor=executor, retry=AT_ONCE)

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert type(outcome.error) is TypeError
        assert [entry.attempt for entry in await here.runtime.store.journal("run")] == [2, 2]


async def test_an_unknown_name_stops_the_run_before_anything_is_recorded_and_it_goes_on_where_the_name_is_known() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            return await ctx.step(double, 2, executor="gpu", at_most_once=True)
        except Exception:
            return "the body must not see it"

    store, clock = stores.memory(), ManualClock()
    async with in_use(ThreadPoolExecutor, 1) as threads:
        async with world(flow, store=store, executors={"io": threads, "cpu": threads}) as here:
            with pytest.raises(ExecutorNotFound, match=r"'double' has executor='gpu'.*there are 'cpu', 'io'"):
                await here.runtime.run(flow, id="run")
            assert await store.journal("run") == []
            run = await here.runtime.get("run")
            assert run is not None
            assert "executor='gpu'" in str(await run.problem())
        runtime = Runtime(store, [flow], clock=clock, concurrency=0, executors={"gpu": threads})
        assert await runtime.run(flow, id="run") == Ok(4)
        await runtime.close()
    with pytest.raises(ExecutorNotFound, match="there are none"):
        await flow()


async def test_a_replay_does_not_need_the_executor() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        doubled = await ctx.step(double, 2, executor="cpu")
        await ctx.sleep("an hour", "1h")
        return doubled

    store = stores.memory()
    async with in_use(ThreadPoolExecutor, 1) as threads, world(flow, store=store, executors={"cpu": threads}) as here:
        await here.runtime.run(flow, id="run")
    async with world(flow, store=store) as here:
        assert await here.later("1h") == {"run": Ok(4)}


class Counting(Executor):
    """Calls at once, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: weakref.ref[Future[Any]] | None = None

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        self.last = weakref.ref(future)
        return future


async def test_the_nearest_option_wins() -> None:
    decorated = step(executor="cpu")(lambda: 1)
    of_workflow, of_runtime, of_run, own = (Counting() for _ in range(4))

    @workflow(executors={"cpu": of_workflow})
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("decorated", decorated)
        await ctx.step("own", decorated, executor=own)
        await ctx.step("thread", decorated, executor=None)

    async with Runtime(stores.memory(), [flow]) as runtime:
        await runtime.run(flow)
    assert [each.calls for each in (of_workflow, of_runtime, of_run, own)] == [1, 0, 0, 1]
    async with Runtime(stores.memory(), [flow], executors={"cpu": of_runtime}) as runtime:
        await runtime.run(flow)
    assert [each.calls for each in (of_workflow, of_runtime, of_run, own)] == [1, 1, 0, 2]
    await flow.run(executors={"cpu": of_run})
    assert [each.calls for each in (of_workflow, of_runtime, of_run, own)] == [1, 1, 1, 3]


async def test_options_that_cannot_be_are_refused() -> None:
    async def fetch(_: Any) -> None: ...

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        with pytest.raises(TypeError, match=r"'fetch' is async.*plain function"):
            await ctx.step(fetch, 1, executor="cpu")
        with pytest.raises(TypeError, match=r"executor= is a name in executors= or .*concurrent.futures.Executor, not 3"):
            await ctx.step(double, 3, executor=3)  # type: ignore[call-overload]

    await flow()
    with pytest.raises(TypeError, match="not <class"):
        step(executor=ThreadPoolExecutor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes executors by name"):
        Runtime(stores.memory(), executors=["cpu"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="executors= has 'cpu': 4"):
        Workflow("flow", fetch, executors={"cpu": 4})  # type: ignore[dict-item]


async def test_a_map_over_an_executor(pool: Executor) -> None:
    async def body(ctx: Context[Any]) -> Any:
        return await ctx.map(double, [1, 2, 3], executor="cpu")

    assert await twice(body, executors={"cpu": pool}) == ([2, 4, 6], [2, 4, 6])


async def test_a_killed_process_is_a_failed_attempt_and_a_restarting_executor_serves_the_next() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(die_at_first, executor="cpu", retry=AT_ONCE)

    async with in_use(process_pool, 1) as broken, world(flow, executors={"cpu": broken}) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, BrokenProcessPool)
        journal = await here.runtime.store.journal("run")
        assert [(entry.phase, entry.attempt) for entry in journal] == [("open", 2), ("close", 2)]
    restarting = RestartingExecutor(lambda: process_pool(1))
    async with in_use(lambda: restarting), world(flow, executors={"cpu": restarting}) as here:
        assert await here.runtime.run(flow, id="run") == Ok("alive")
    with pytest.raises(RuntimeError, match="after shutdown"):
        restarting.submit(double, 1)


async def test_a_step_that_must_not_run_twice_does_not_when_its_process_is_killed() -> None:
    async with in_use(RestartingExecutor, lambda: process_pool(1)) as restarting:

        @workflow
        async def flow(ctx: Context[Any]) -> Any:
            return await ctx.step(die_at_first, executor=restarting, at_most_once=True)

        async with world(flow) as here:
            outcome = await here.runtime.run(flow, id="run")
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, BrokenExecutor)
            journal = await here.runtime.store.journal("run")
            assert [(entry.phase, entry.attempt) for entry in journal] == [("open", 1), ("close", 1)]


async def test_an_executor_that_was_shut_down_gives_an_error_that_says_so() -> None:
    threads, is_busy, release = ThreadPoolExecutor(1), threading.Event(), threading.Event()

    def hold_thread() -> None:
        is_busy.set()
        release.wait(PATIENCE)

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.step(hold_thread, executor=threads))
            await until(is_busy.is_set)
            waiting = group.create_task(raised(ctx.step(double, 1, executor=threads)))
            await until(threads._work_queue.qsize)
            threads.shutdown(wait=False, cancel_futures=True)
            release.set()
        assert isinstance(waiting.result(), RuntimeError)
        assert "was shut down, or dropped the call, before it made it" in str(waiting.result())
        late = await raised(ctx.step(double, 1, executor=threads, key="late"))
        assert isinstance(late, RuntimeError)
        assert "takes no call: cannot schedule new futures after shutdown; shut it down only after" in str(late)

    await flow()


@pytest.mark.parametrize("abandon", [False, True])
async def test_the_next_attempt_waits_for_a_process_that_is_still_at_the_last(abandon: bool, tmp_path: Path) -> None:
    times, go = tmp_path / "times", tmp_path / "go"
    async with in_use(process_pool, 2) as two:

        @workflow
        async def flow(ctx: Context[Any]) -> Any:
            options: Any = {"executor": two, "timeout": 0.2, "retry": AT_ONCE_AND_AGAIN, "abandon": abandon}
            return await ctx.step(write_times, str(times), str(go), **options)

        await asyncio.to_thread(start_processes, two, 2)
        async with Runtime(stores.memory(), [flow]) as runtime:
            run = await runtime.start(flow, id="run")
            while not (journal := await runtime.store.journal("run")):
                await runtime.store.watch(0.01)
            assert (journal[0].key, journal[0].phase, journal[0].attempt) == ("write_times", "open", 2)
            if not abandon:
                await asyncio.to_thread(go.touch)
            assert await run >= 2
            written = (await asyncio.to_thread(times.read_text)).split()
            await asyncio.to_thread(go.touch)
    if abandon:
        assert len(written) % 2, "the first call has not ended"
    else:
        assert written == sorted(written)


async def test_the_time_of_an_attempt_counts_from_the_call_in_a_thread_pool_and_from_submit_elsewhere() -> None:
    @workflow
    async def flow(ctx: Context[Any], which: str) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.step("busy", rest, 0.6, executor=which))
            waiting = group.create_task(ctx.step(double, 1, executor=which, timeout=0.3))
        return waiting.result()

    async with in_use(ThreadPoolExecutor, 1) as threads, in_use(process_pool, 1) as processes:
        await asyncio.to_thread(start_processes, processes, 1)
        executors = {"threads": threads, "processes": processes}
        assert await flow.run("threads", executors=executors) == Ok(2)
        outcome = await flow.run("processes", executors=executors)
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, ExceptionGroup)
    assert isinstance(outcome.error.exceptions[0], StepTimeout)


async def test_a_call_that_still_waits_in_the_executor_is_never_made_when_its_run_is_cancelled() -> None:
    called, release = threading.Event(), threading.Event()
    async with in_use(ThreadPoolExecutor, 1) as threads:
        threads.submit(release.wait, PATIENCE)

        @workflow
        async def flow(ctx: Context[Any]) -> None:
            await ctx.step("call", called.set, executor=threads)

        async with Runtime(stores.memory(), [flow]) as runtime:
            run = await runtime.start(flow, id="run")
            await until(threads._work_queue.qsize)
            await runtime.cancel("run")
            await asyncio.wait_for(run.outcome(), PATIENCE)
            release.set()
    assert not called.is_set()


async def test_a_cancelled_run_does_not_wait_for_its_process_and_a_drain_does_within_its_time(tmp_path: Path) -> None:
    @workflow
    async def flow(ctx: Context[Any], path: str) -> str:
        await ctx.step("wait", wait_for_file, path, executor="cpu")
        await ctx.sleep("an hour", "1h")
        return "not reached"

    store, last = stores.memory(), tmp_path / "last"
    async with in_use(process_pool, 3) as three:
        await asyncio.to_thread(start_processes, three, 3)
        async with Runtime(store, [flow], executors={"cpu": three}, drain_after=1) as runtime:
            cancelled = await runtime.start(flow, str(last), id="cancelled")
            in_time = tmp_path / "in time"
            for path in (last, in_time):
                await runtime.start(flow, str(path), id=path.name)
            await until(lambda: len(three._pending_work_items) == 3)
            await cancelled.cancel()
            assert isinstance((await cancelled.outcome()).error, RunCancelled)  # type: ignore[union-attr]
            closing = asyncio.create_task(runtime.close())
            await turns()
            assert await store.journal("in time") == []
            await asyncio.to_thread(in_time.touch)
            await closing
        assert three._pending_work_items, "the processes are still at it"
        assert await store.journal("last") == []
        assert [entry.key for entry in await store.journal("in time")][:1] == ["wait"]
        await asyncio.to_thread(last.touch)


async def test_a_future_of_the_executor_is_freed_when_it_is_done() -> None:
    counting = Counting()

    def is_freed() -> bool:
        assert counting.last is not None
        return counting.last() is None

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(double, 1, executor=counting)
        # Dask computes a lost result again while its future is referred to. The thread that submitted it may be about to return.
        await until(is_freed)

    gc.disable()
    try:
        await flow()
    finally:
        gc.enable()


async def test_context_variables_of_the_body_reach_a_thread_pool() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    async with in_use(ThreadPoolExecutor, 1) as threads:

        @workflow
        async def flow(ctx: Context[Any]) -> str:
            variable.set("the body's")
            return await ctx.step("get", variable.get, executor=threads)

        assert await flow() == "the body's"
        assert await asyncio.wrap_future(threads.submit(variable.get)) == "none"


class Polling:
    """A plain function that works until it is cancelled, or is asked to stop."""

    def __init__(self) -> None:
        self.info: StepInfo | None = None
        self.stop = threading.Event()
        self.saw_cancel = threading.Event()

    def __call__(self) -> str:
        self.info = current_step()
        while not self.stop.wait(0.002):
            if current_step().is_cancelled:
                self.saw_cancel.set()
                return "cancelled"
        return "stopped"


@pytest.fixture(params=["own threads", "thread pool"])
def threads(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if request.param == "own threads":
        yield None
        return
    with ThreadPoolExecutor(4) as made:
        yield made


async def test_a_function_in_a_thread_sees_that_it_timed_out(threads: Executor | None) -> None:
    polling = Polling()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("poll", polling, timeout=0.05, executor=threads)

    with pytest.raises(StepTimeout):
        await flow()
    assert await asyncio.to_thread(polling.saw_cancel.wait, PATIENCE)


async def test_the_next_attempt_begins_when_the_last_has_seen_that_it_timed_out() -> None:
    polling = Polling()

    def poll() -> str:
        if current_step().attempt > 1:
            assert not current_step().is_cancelled
            polling.stop.set()
        return polling()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(poll, timeout=0.05, retry=AT_ONCE_AND_AGAIN)

    assert await asyncio.wait_for(flow(), PATIENCE) == "stopped"


async def test_a_function_in_a_thread_sees_that_its_run_was_cancelled_or_that_it_lost_a_race(threads: Executor | None) -> None:
    polling, loser = Polling(), Polling()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.race(ctx.step("quick", double, 1), ctx.step("loser", loser, executor=threads))
        return await ctx.step("poll", polling, executor=threads)

    async with Runtime(stores.memory(), [flow]) as runtime:
        await runtime.start(flow, id="run")
        await until(lambda: polling.info)
        assert loser.info is None or await asyncio.to_thread(loser.saw_cancel.wait, PATIENCE)
        assert not current_info(polling).is_cancelled
        await runtime.cancel("run")
        assert await asyncio.to_thread(polling.saw_cancel.wait, PATIENCE)


def current_info(polling: Polling) -> StepInfo:
    assert polling.info is not None
    return polling.info


async def test_a_function_in_a_thread_sees_the_end_of_a_drain_and_not_its_beginning(threads: Executor | None) -> None:
    polling = Polling()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("poll", polling, executor=threads)

    store = stores.memory()
    async with Runtime(store, [flow], drain_after=0.5) as runtime:
        await runtime.start(flow, id="run")
        await until(lambda: polling.info)
        closing = asyncio.create_task(runtime.close())
        await turns()
        assert not current_info(polling).is_cancelled, "what it returns within the grace period is still recorded"
        await closing
    assert await asyncio.to_thread(polling.saw_cancel.wait, PATIENCE)
    assert await store.journal("run") == []


async def test_a_function_in_a_thread_sees_that_the_lease_was_lost(threads: Executor | None) -> None:
    polling = Polling()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("poll", polling, executor=threads)

    store = stores.memory()
    async with Runtime(store, [flow], lease_ttl=0.1) as runtime:
        await runtime.start(flow, id="run")
        await until(lambda: polling.info)
        await store.delete("run")
        assert await asyncio.to_thread(polling.saw_cancel.wait, PATIENCE)


def test_the_example_survives_the_loss_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-W", "error", EXAMPLE], capture_output=True, text=True, check=False, timeout=60)
    assert all(", and is tried again in " in line for line in done.stderr.splitlines()), done.stderr
    rows = done.stdout.splitlines()
    assert len(rows) == 12
    assert rows == rows[::-1], "the picture is symmetric"
    assert {*done.stdout} == {"#", ".", "\n"}


def test_step_info_can_be_pickled() -> None:
    info = StepInfo("run", "key", 2, "run/old")
    copy = pickle.loads(pickle.dumps(info))  # noqa: S301 - its own bytes
    assert copy == info
    assert copy.idempotency_key == "run/old"


def emit_there() -> str:
    try:
        current_step().emit("out", 1)
    except RuntimeError as error:
        return str(error)
    return "emitted"


async def test_a_step_in_another_process_cannot_emit_and_says_so(pool: Executor) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(emit_there, executor=pool)

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
    assert isinstance(outcome, Ok)
    assert "step 'emit_there' of run 'run' cannot emit here: its run is driven in another process" in outcome.value
