"""What every test runs under: a guard against blocking the event loop, and one set of hypothesis settings."""

from __future__ import annotations

import asyncio
import gc
import inspect
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import blockbuster.blockbuster as guard
import pytest
from hypothesis import settings

from tests.campaign import times

# The shipped contract suite asserts like a test, so it gets pytest's explanations like one.
pytest.register_assert_rewrite("perdure.testing")

# No deadline: examples touch real disks. The count is hypothesis' own default here, and ten times that under `make chaos`.
settings.register_profile("perdure", deadline=None, max_examples=times(1000), print_blob=True)
settings.load_profile("perdure")

# A shell that starts the tests in the background has SIGINT ignored, and the processes that they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Another event loop for the tests: uvloop, asyncio's in debug mode, or uvloop's in debug mode. Only tests that are coroutines run
# then: the others, among them the fuzzers and those that kill processes, have no loop or make their own. Those marked `one_loop`
# are left out too.
LOOP: Final = os.environ.get("PERDURE_LOOP", "")

ROOT: Final = Path(__file__).parent.parent

# Where a blocking call is harmless, beyond what blockbuster allows by itself (imports, tracebacks, asyncio's own subprocesses).
HARMLESS: Final = (
    # A program without a loop waits for its own synchronous driver: the loop there has nothing else to do.
    ("perdure/sync.py", {"_run_here"}),
    # hypothesis reads its tables of characters and time zones, once each, when a test first draws one inside the loop.
    ("hypothesis/internal/conjecture/data.py", {"draw"}),
    # A failing assert is explained by pytest, which may look at the disk for it. The test has failed anyway.
    ("_pytest/assertion/__init__.py", {"callbinrepr"}),
    # pytest has a log handler of its own that writes to the null device.
    ("logging/__init__.py", {"emit"}),
    # A time zone is a small file that zoneinfo reads once and keeps: no worse than an import.
    ("zoneinfo/_tzpath.py", {"find_tzfile"}),
    ("zoneinfo/_common.py", {"load_data", "load_tzdata"}),
    # A workflow reads its own source when it is defined, like an import; defined later the file might be another already.
    ("perdure/definition.py", {"definition_hash"}),
    # The scripts of Redis are read once, when their module is imported.
    ("backends/redis/scripts.py", {"_read"}),
    # A store looks where its path leads when it is made, once; everything else it does in its threads.
    ("backends/sqlite/store.py", {"_check_path"}),
    ("kv/sqlite.py", {"_check_path"}),
    ("kv/files.py", {"_check_path"}),
    # A fork blocks its thread, and the connections of the process have to be closed before it (uvloop forks for a subprocess).
    ("backends/sqlite/database.py", {"before_fork"}),
    # The scripts for Redis are read when their module is imported.
    ("backends/redis/scripts.py", {"_read"}),
    # A worker looks up once what its process is called, mostly in /proc, which is not on a disk.
    ("perdure/model/process_owner.py", {"current"}),
    # asyncmy reads its own version when it is imported.
    ("asyncmy/version.py", {"<module>"}),
    # A client of MongoDB looks once whether it is in a container.
    ("pymongo/pool_options.py", {"get_container_env_info"}),
)


# What the fork server imports before it forks the processes of tests, so that one starts in milliseconds. A driver that is not
# installed is skipped here; its absence shows where it is needed.
PRELOADED: Final = [
    "pytest", "perdure.testing.contract", "perdure.testing.keyvalue", "tests.backends.jobs",
    "asyncpg", "asyncmy", "pymongo", "redis.asyncio", "obstore",
]  # fmt: skip


class OnUvloop:
    """A pytest plugin that runs every test on uvloop."""

    def pytest_asyncio_loop_factories(self) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
        import uvloop

        return {"uvloop": uvloop.new_event_loop}


def pytest_configure(config: pytest.Config) -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    from tests.backends.exercised import Exercised
    from tests.backends.registry import BACKENDS  # not before the line above that has asserts rewritten

    contracts = {backend.name: backend.contract for backend in BACKENDS.values()}
    left_to_chaos = [backend.name for backend in BACKENDS.values() if backend.leaves_contract_to_chaos]
    sampled = [backend.name for backend in BACKENDS.values() if backend.samples_contract]
    config.pluginmanager.register(Exercised(contracts, left_to_chaos, sampled), "perdure-backends")
    if LOOP not in {"", "uvloop", "debug", "uvloop+debug"}:
        raise pytest.UsageError(f"PERDURE_LOOP is uvloop, debug or uvloop+debug, not {LOOP!r}")
    if "uvloop" in LOOP:
        config.pluginmanager.register(OnUvloop(), "perdure-uvloop")
    if "debug" in LOOP:
        config.option.asyncio_debug = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LOOP:
        items[:] = [item for item in items if isinstance(item, pytest.Function) and _is_repeated(item)]
    if hasattr(config, "workerinput"):  # one of several processes
        from tests.sharing import longest_first

        longest_first(items)


def pytest_collection_finish() -> None:
    """Take what is there by now, thousands of tests, out of every garbage collection to come: it stays to the end."""
    gc.collect()
    gc.freeze()


def _is_repeated(item: pytest.Function) -> bool:
    """Whether this test is run again on other loops."""
    return inspect.iscoroutinefunction(item.obj) and item.get_closest_marker("one_loop") is None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.sharing import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test whose server is not installed. `exercised` reports the backends left out, and CI requires all of them.

    The report shows source code, for which pytest parses it. Up to Python 3.11.7 that fails, and pytest ends, if a garbage
    collection in the middle runs code that parses too (gh-106905). What a failed test leaves behind may do so.
    """
    from tests.servers.process import ServerMissing

    is_postponed = call.excinfo is not None and gc.isenabled()
    if is_postponed:
        gc.disable()
    try:
        report = yield
    finally:
        if is_postponed:
            gc.enable()
    if call.excinfo is not None and call.excinfo.errisinstance(ServerMissing):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {call.excinfo.value}")
    return report


@pytest.fixture(autouse=True)
def blocking_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The blocking calls made so far on a thread with a running loop. Each raises `BlockingError`, and the test fails at its end.

    The second half matters because an engine that records what a step raises would keep the first half to itself.
    """
    calls: list[str] = []

    class Recorded(guard.BlockingError):
        def __init__(self, call: str) -> None:
            super().__init__(call)
            calls.append(f"{call} at {_our_line()}")

    monkeypatch.setattr(guard, "BlockingError", Recorded)
    with guard.blockbuster_ctx() as active:
        for function in active.functions.values():
            for file, names in HARMLESS:
                function.can_block_in(file, names)
        yield calls
    if calls:
        pytest.fail(f"the event loop was blocked by {', '.join(dict.fromkeys(calls))}; use asyncio.to_thread", pytrace=False)


def _our_line() -> str:
    """The nearest line of the repository that led here."""
    for frame, line in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and ".venv" not in file.parts and file != Path(__file__):
            return f"{file.relative_to(ROOT)}:{line}"
    return "an unknown line"
