"""What faults cost: `python -m benchmarks.endurance [name ...]` prints one figure or two for each fault that a worker meets.

Every figure is taken in a child process, since a fault may end it, block it or leave it without threads. They are counts and
seconds of CPU, so a busy machine changes them little. Not part of `make bench`: nothing is compared with a peer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from perdure import Context, Retry, Runtime, stores, workflow
from perdure.store import Store
from tests.servers.mysql import MysqlServer
from tests.servers.postgres import PostgresServer
from tests.wire import Wire

NOBODY: Final = 65534
STEPS_WITHOUT_THREADS: Final = 30
OUTAGE_SECONDS: Final = 10
SKEWED_SLEEP_SECONDS: Final = 8
SLEEPS: Final = 300
NEIGHBOURS: Final = 20
RESTARTS: Final = 15

called: Counter[str] = Counter()


class LineCounter(logging.Handler):
    """Counts what is logged."""

    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


def count(name: str) -> int:
    """A step that takes a while."""
    called[name] += 1
    time.sleep(0.2)
    return called[name]


@workflow
async def one_plain_step(ctx: Context, number: int) -> None:
    """Its step needs a thread."""
    await ctx.step("count", count, f"step-{number}")


@workflow
async def short_sleep(ctx: Context, number: int) -> None:
    """A sleep that stays in memory, and one step that is tried again after a short pause."""
    await ctx.sleep("nap", 0.02 + number / 10_000)
    await ctx.step("again", fail_first, retry=Retry(attempts=2, wait_initial=0.02, wait_jitter=0))


async def fail_first() -> None:
    """A step whose first attempt fails."""
    from perdure import current_step

    if current_step().attempt == 1:
        raise ConnectionError("not yet")


@workflow
async def one_sleep(ctx: Context) -> None:
    """How often its body begins is counted."""
    called["body"] += 1
    await ctx.sleep("nap", SKEWED_SLEEP_SECONDS)


@workflow
async def neighbour(ctx: Context, number: int) -> int:
    """Run 0 ends its process; the others take a while."""
    return await ctx.step("work", end_process if number == 0 else take_a_while)


async def end_process() -> int:
    """A step that its worker does not survive."""
    await asyncio.sleep(0.3)
    os._exit(1)


async def take_a_while() -> int:
    """A step that is under way when its neighbour ends the process."""
    await asyncio.sleep(0.5)
    return 1


async def without_threads(directory: Path) -> dict[str, Any]:
    """Plain steps in a process that may start two more threads, for 20 s."""
    os.chown(directory, NOBODY, NOBODY)
    lines = LineCounter()
    logging.getLogger("perdure").addHandler(lines)
    async with Runtime(f"sqlite:///{directory}/runs.db", [one_plain_step], drain_after=1) as runtime:
        await runtime.list()  # the store's own threads have been started
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (_threads_of(NOBODY) + 2,) * 2)
        runs = [await runtime.start(one_plain_step, number) for number in range(STEPS_WITHOUT_THREADS)]
        done, _ = await asyncio.wait([asyncio.ensure_future(_ended(run)) for run in runs], timeout=20)
        return {"runs": len(runs), "completed": len(done), "calls": called.total(), "log lines": lines.lines}


async def _ended(run: Any) -> None:
    await run


def _threads_of(user: int) -> int:
    owned = (path for path in Path("/proc").glob("[0-9]*/task/[0-9]*") if path.exists() and path.stat().st_uid == user)
    return sum(1 for _ in owned)


async def outage(directory: Path) -> dict[str, Any]:
    """A worker on SQLite whose directory is moved away for a while, and comes back."""
    lines = LineCounter()
    logging.getLogger("perdure").addHandler(lines)
    place = directory / "data"
    place.mkdir()
    async with Runtime(f"sqlite:///{place}/runs.db", [short_sleep], drain_after=1) as runtime:
        await (await runtime.start(short_sleep, 1))
        place.rename(directory / "away")
        cpu, before = time.process_time(), lines.lines
        await asyncio.sleep(OUTAGE_SECONDS)
        spent, logged = time.process_time() - cpu, lines.lines - before
        (directory / "away").rename(place)
        async with asyncio.timeout(30):
            await (await _insist(lambda: runtime.start(short_sleep, 2)))
    return {"seconds": OUTAGE_SECONDS, "log lines": logged, "seconds of CPU": round(spent, 2)}


async def _insist(call: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            return await call()
        except Exception:  # noqa: BLE001 - whatever the store says while it is not there
            await asyncio.sleep(0.2)


class SkewedStore:
    """A store whose clock differs from the machine's."""

    TIMED: Final = frozenset(
        {"create", "claim", "acquire", "renew", "release", "record", "suspend", "finish", "signal", "cancel"}
    )

    def __init__(self, store: Store, seconds: int) -> None:
        self._store = store
        self._skew = seconds * 1_000_000
        self.claims = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name not in self.TIMED:
            return verb

        def call(*args: Any, **options: Any) -> Any:
            self.claims += name == "claim"
            if options.get("now") is None:
                options["now"] = time.time_ns() // 1000 + self._skew
            return verb(*args, **options)

        return call


async def skew(directory: Path, seconds: int) -> dict[str, Any]:
    """A worker whose store's clock is ahead or behind, for a sleep of 8 s and 12 s more."""
    store: Any = SkewedStore(stores.sqlite(directory / "runs.db"), seconds)
    async with Runtime(store, [one_sleep], drain_after=1) as runtime:
        began = time.monotonic()
        run = await runtime.start(one_sleep)
        took = None
        try:
            async with asyncio.timeout(SKEWED_SLEEP_SECONDS + 4):
                await run
                took = round(time.monotonic() - began, 1)
        except TimeoutError:
            pass
        await asyncio.sleep(began + SKEWED_SLEEP_SECONDS + 12 - time.monotonic())
        claims = store.claims * 60 / (time.monotonic() - began)
    await store.close()
    return {"seconds ahead": seconds, "claims a minute": round(claims), "bodies begun": called["body"], "slept": took}


async def sleeps_on_uvloop(directory: Path) -> dict[str, Any]:
    """Short sleeps and retry pauses on uvloop."""
    async with Runtime(f"sqlite:///{directory}/runs.db", [short_sleep], drain_after=1, concurrency=SLEEPS) as runtime:
        runs = [await runtime.start(short_sleep, number) for number in range(SLEEPS)]
        done, stuck = await asyncio.wait([asyncio.ensure_future(_ended(run)) for run in runs], timeout=20)
        return {"runs": SLEEPS, "completed": len(done), "stuck": len(stuck)}


async def crashing_neighbour(directory: Path) -> dict[str, Any]:
    """A worker with 20 runs beside one that ends the process, started again and again."""
    async with Runtime(f"sqlite:///{directory}/runs.db", [neighbour], concurrency=0) as client:
        for number in range(NEIGHBOURS + 1):
            await client.start(neighbour, number, id=f"run-{number:02}")
        restarts = 0
        while restarts < RESTARTS and await client.list(status="running") + await client.list(status="pending"):
            restarts += 1
            await asyncio.to_thread(_run_child, "neighbours_worker", str(directory))
        ended = Counter(run.status for run in await client.list() if run.id != "run-00")
        culprit = [run.status for run in await client.list() if run.id == "run-00"]
    return {"restarts": restarts, "neighbours": dict(ended), "culprit": culprit[0]}


async def neighbours_worker(directory: Path) -> dict[str, Any]:
    """The worker that is started again and again: until nothing is left to do, or it is ended."""
    async with Runtime(f"sqlite:///{directory}/runs.db", [neighbour], drain_after=1) as runtime:
        while await runtime.list(status="pending") or await runtime.list(status="running"):  # noqa: ASYNC110 - they are in the store
            await asyncio.sleep(0.2)
    return {}


async def silence(server: PostgresServer | MysqlServer, default_port: int) -> dict[str, Any]:
    """A step during which all connections to the server fall silent: until its result is recorded on another."""
    server.start()
    wire = Wire(server.dsn, default_port=default_port)
    store = stores.open_store(wire.url)
    try:
        await store.setup()
        fallen: list[float] = []

        def fall_silent() -> None:
            fallen.append(time.monotonic())
            wire.fall_silent("requests")

        @workflow
        async def charge(ctx: Context) -> None:
            await ctx.step("charge", fall_silent)

        await charge.run(id="run", store=store)
        return {"seconds until it is recorded": round(time.monotonic() - fallen[0], 1), "calls": len(fallen)}
    finally:
        await store.close()
        wire.close()
        server.remove()


FIGURES: Final[dict[str, Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]]] = {
    "without_threads": without_threads,
    "outage": outage,
    "skew_5s": lambda directory: skew(directory, 5),
    "skew_1h": lambda directory: skew(directory, 3600),
    "skew_minus_1h": lambda directory: skew(directory, -3600),
    "sleeps_on_uvloop": sleeps_on_uvloop,
    "silent_postgres": lambda _: silence(PostgresServer(own=True), 5432),
    "silent_mysql": lambda _: silence(MysqlServer(own=True), 3306),
    "crashing_neighbour": crashing_neighbour,
}
CHILDREN: Final = {**FIGURES, "neighbours_worker": neighbours_worker}


def _run_child(name: str, place: str) -> str:
    command = [sys.executable, "-m", "benchmarks.endurance", "--child", name, place]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout  # noqa: S603 - our own program


def _child(name: str, place: str) -> None:
    logging.getLogger("perdure").propagate = False
    loop_factory = None
    if name == "sleeps_on_uvloop":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        figure = runner.run(CHILDREN[name](Path(place)))
        print(json.dumps(figure), flush=True)
        os._exit(0)  # threads that never end are what one of the figures is about


def main(names: list[str]) -> None:
    """Print the figures with these names, or all."""
    for name in names or FIGURES:
        with tempfile.TemporaryDirectory(prefix="perdure-endurance-") as directory:
            printed = _run_child(name, directory)
        print(f"{name:20}", printed.strip() or "no figure: the process did not end by itself")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:4])
    else:
        main(sys.argv[1:])
