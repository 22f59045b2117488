"""An event loop that is blocked is noticed: a warning says where, and after `max_blocked` other workers take its runs over."""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from perdure import Context, Ok, Runtime, Workflow, stores
from perdure.aio.loop_watch import WatchedLoop
from perdure.engine import heartbeat
from perdure.store import Store
from tests.failing_starts import cancel_all_tasks
from tests.patience import PATIENCE
from tests.worker.flows import Gate, client, soon

LINE: Final = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == "pass")
PLACE: Final = rf"at {re.escape(__file__)}:({LINE - 1}|{LINE}) in Blocker\.block"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that come soon, and count as a second each all the same."""
    monkeypatch.setattr(heartbeat, "LOOK_EVERY", 0.01)


class Said(logging.Handler):
    """What was logged, in any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        # What is set when a message has this text.
        self.sets: dict[str, threading.Event] = {}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        for text, event in self.sets.items():
            if text in record.getMessage():
                event.set()
        self._news.put(None)

    def wait_for(self, text: str) -> logging.LogRecord:
        """The first record with this text, once it is there. Blocks."""
        while (found := self.find(text)) is None:
            self._news.get(timeout=PATIENCE)
        return found

    def find(self, text: str) -> logging.LogRecord | None:
        return next((record for record in self.records if text in record.getMessage()), None)


@pytest.fixture
def said() -> Iterator[Said]:
    handler, log = Said(), logging.getLogger("perdure")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


class Blocker:
    """A workflow whose step, or whose own function, blocks its event loop until something was logged, or it is told to go on."""

    def __init__(self, said: Said, where: str, until: str = "has blocked the event loop") -> None:
        self.calls = 0
        self.go_on = said.sets[until] = threading.Event()

        async def step() -> str:
            return self.block()

        async def body(ctx: Context) -> str:
            return await ctx.step("block", step) if where == "step" else self.block()

        self.flow: Workflow[[], str] = Workflow("blocker", body)

    def block(self) -> str:
        self.calls += 1
        while not self.go_on.is_set():
            pass
        return "went on"


@pytest.mark.parametrize("where", ["step", "body"])
async def test_a_blocked_loop_is_logged_with_the_run_and_the_line(store: Store, said: Said, where: str) -> None:
    blocker, gate = Blocker(said, where), Gate()
    async with client(store, blocker.flow, gate.flow) as runtime:
        waiting = asyncio.ensure_future(runtime.run(gate.flow, id="g1"))
        await gate.reached.wait()
        assert await runtime.run(blocker.flow, id="b1") == Ok("went on")
        record = await asyncio.to_thread(said.wait_for, "the event loop goes on, after it was blocked for")
        gate.opened.set()
        await waiting
    record = said.wait_for("has blocked the event loop")
    assert (record.levelname, record.run_id, record.workflow) == ("WARNING", "b1", "blocker")  # type: ignore[attr-defined]
    said_of = rf"run 'b1' has blocked the event loop for \d+ s, {PLACE}; 1 other runs stand still"
    assert re.fullmatch(said_of, record.getMessage())
    assert len([each for each in said.records if "has blocked" in each.getMessage()]) == 1


async def test_after_its_loop_was_cleared_the_heartbeat_beats_and_looks_again(said: Said) -> None:
    gate, blocker = Gate(), Blocker(said, "step")
    async with client(stores.memory(), blocker.flow, gate.flow) as runtime, asyncio.timeout(PATIENCE):
        waiting = asyncio.ensure_future(runtime.run(gate.flow, id="g1"))
        await gate.reached.wait()
        await asyncio.wrap_future(heartbeat._thread.submit(cancel_all_tasks()))
        assert not heartbeat._beating
        assert await runtime.run(blocker.flow, id="b1") == Ok("went on")
        assert {held.run.id for beat in list(heartbeat._beating) for held in beat.held()} >= {"g1"}
        gate.opened.set()
        await waiting


async def test_other_workers_take_over_after_max_blocked_and_the_fence_holds(tmp_path: Path, said: Said) -> None:
    """The blocked worker has a loop in a thread of its own; the worker that takes over has this one."""
    blocker, dsn = Blocker(said, "step", until="nothing"), f"sqlite:///{tmp_path / 'app.db'}"

    async def elsewhere(ctx: Context) -> str:
        return await ctx.step("block", lambda: "done elsewhere")

    runtime = Runtime(dsn, [blocker.flow], lease_ttl=0.3, max_blocked="7s", on_definition_change="ignore")
    blocked = threading.Thread(target=asyncio.run, args=(_work(runtime),))
    async with Runtime(dsn, [Workflow("blocker", elsewhere)], concurrency=0, on_definition_change="ignore") as other:
        run = await other.start("blocker", id="b1")
        blocked.start()
        try:
            error = await asyncio.to_thread(said.wait_for, "are not renewed")
            assert error.levelname == "ERROR"
            health = await asyncio.to_thread(runtime.sync.health)
            assert (health.ok, health.is_working) == (False, False)
            (reason,) = health.reasons
            assert re.fullmatch(rf"the event loop of the worker has been blocked for \d+ s, {PLACE}", reason)
            async with asyncio.timeout(PATIENCE):
                while await run.status() != "completed":
                    await other.sweep()
                    await asyncio.sleep(0.01)
            assert await run == "done elsewhere"
        finally:
            blocker.go_on.set()
            await asyncio.to_thread(blocked.join)
        assert await run == "done elsewhere"
        assert said.find("run 'b1' was lost to another worker") is not None


async def test_a_worker_that_is_alone_keeps_what_it_did_while_it_was_blocked(store: Store, said: Said) -> None:
    blocker = Blocker(said, "step", until="are not renewed")
    async with Runtime(store, [blocker.flow], lease_ttl=0.3, max_blocked=6) as runtime:
        async with asyncio.timeout(PATIENCE):
            assert await (await runtime.start(blocker.flow, id="b1")) == "went on"
    assert blocker.calls == 1
    assert [entry.key for entry in await store.journal("b1")] == ["block"]


async def test_without_max_blocked_leases_are_kept_for_ever(store: Store, said: Said) -> None:
    blocker = Blocker(said, "step", until="nothing")
    runtime = Runtime(store, [blocker.flow], lease_ttl=0.3, max_blocked=None)

    def look() -> None:
        """In another thread, while the loop is blocked."""
        said.wait_for("has blocked")
        lease = next(held for beat in list(heartbeat._beating) for held in beat.held() if held.run.id == "b1")
        for _ in range(3):
            asked = lease._asked_at
            while lease._asked_at == asked:
                time.sleep(0.001)
        blocker.go_on.set()

    async with runtime, asyncio.timeout(PATIENCE):
        looking = asyncio.ensure_future(asyncio.to_thread(look))
        assert await (await runtime.start(blocker.flow, id="b1")) == "went on"
        await looking


@pytest.mark.parametrize("wrong", [0, -1, "0s", "soon", True, float("nan")])
def test_max_blocked_is_a_length_or_none(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="max_blocked"):
        Runtime(stores.memory(), max_blocked=wrong)


class Fake:
    """A run that a loop drives in this thread."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(id="r1", workflow="flow", attempts=1)
        self.thread_id = threading.get_ident()

    def is_executing(self) -> bool:
        return True


def watched() -> tuple[WatchedLoop, list[Any]]:
    """A loop that answers when the test says so, by calling what is in the list."""
    asked: list[Any] = []

    loop: Any = SimpleNamespace(call_soon_threadsafe=asked.append, is_running=lambda: True)
    return WatchedLoop(loop), asked


def test_a_process_that_stood_still_was_not_blocked(said: Said) -> None:
    """However long it was: only looks count, and the watcher's thread stands still with the others."""
    loop, asked = watched()
    for _ in range(3):
        loop.look([Fake()])  # asks
        loop.look([Fake()])  # an hour later by the clock
        asked.pop()()
        assert loop.blocked_for == 0
        loop.look([Fake()])
        asked.pop()()
    assert said.records == []


def test_a_thread_that_is_debugged_is_not_blocked(said: Said) -> None:
    loop, _ = watched()
    namespace: dict[str, Any] = {"__name__": "pdb", "look": loop.look, "held": [Fake()]}
    exec("def interaction():\n    for _ in range(20):\n        look(held)\n", namespace)  # noqa: S102 - a frame of that module
    namespace["interaction"]()
    assert loop.describe() is None
    assert said.records == []
    for _ in range(6):
        loop.look([Fake()])
    assert str(loop.describe()).startswith("6 s, at ")


async def _work(runtime: Runtime) -> None:
    async with runtime:
        worker = runtime._worker
        assert worker is not None
        await soon(lambda: asyncio.sleep(0, worker.count_driven() > 0))
        await soon(lambda: asyncio.sleep(0, worker.count_driven() == 0))
