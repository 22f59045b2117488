"""A worker whose store fails, or whose runs do: it waits between its attempts, says so once, and goes on."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Runtime, stores, workflow
from perdure.errors import PersistenceError
from perdure.store import Store
from perdure.testing import ManualClock
from tests.patience import PATIENCE, until
from tests.worker.flows import Gate, client, greet, nap, reaches


async def test_a_database_that_is_moved_away_for_a_while_costs_a_few_lines_and_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    await asyncio.to_thread(home.mkdir)
    store = await asyncio.to_thread(stores.sqlite, home / "runs.db")
    with caplog.at_level(logging.INFO, "perdure"):
        async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):
            assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
            await asyncio.to_thread(home.rename, away)
            began = time.process_time()
            await asyncio.sleep(1.0)
            spent = time.process_time() - began
            await asyncio.to_thread(away.rename, home)
            async with client(store, greet) as other:
                run = await other.start(greet, "Bob", id="bob")
            assert await run == "hello Bob!"
    await store.close()
    assert 1 <= sum("the store" in record.message for record in caplog.records) < 12
    assert spent < 0.5


async def test_a_run_is_not_missing_while_its_database_is_moved_away(tmp_path: Path) -> None:
    """Neither a caller nor the holder of its lease may take it for deleted: it goes on when the file is back."""
    home, away = tmp_path / "home", tmp_path / "away"
    await asyncio.to_thread(home.mkdir)
    store = await asyncio.to_thread(stores.sqlite, home / "runs.db")
    async with client(store, nap) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(nap, id="run")
        claim = await store.acquire("run", PATIENCE)
        assert claim is not None
        waiting = asyncio.ensure_future(run)
        await asyncio.to_thread(home.rename, away)
        for verb, args in (
            (store.get, ("run",)),
            (store.inbox, ("run",)),
            (store.signal, ("run", "go", b"1")),
            (store.cancel, ("run",)),
            (store.delete, ("run",)),
            (store.renew, ([claim.lease], PATIENCE)),
            (store.record, (claim.lease, [])),
            (store.finish, (claim.lease, "completed", b"1")),
            (store.schedules, ()),
            (store.list, ()),
        ):
            with pytest.raises(PersistenceError):
                await verb(*args)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await asyncio.to_thread(away.rename, home)
        await store.finish(claim.lease, "completed", b'"awake"')
        assert await waiting == "awake"
    await store.close()


@pytest.mark.parametrize("verb", ["record", "finish"])
async def test_a_run_that_cannot_be_recorded_is_not_tried_again_at_once(store: Store, verb: str) -> None:
    bodies = 0

    @workflow
    async def flow(ctx: Context) -> None:
        nonlocal bodies
        bodies += 1
        await ctx.step(asyncio.sleep, 0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PersistenceError("the disk", "is full")

    setattr(store, verb, refuse)
    clock = ManualClock()
    async with Runtime(store, [flow, greet], clock=clock) as runtime, asyncio.timeout(PATIENCE):
        await runtime.start(flow, id="run")
        await reaches(store, "run", "pending")
        await asyncio.sleep(0.1)
        assert bodies == 1
        row = await store.get("run")
        assert row is not None
        assert (row.attempts, row.problem) == (1, "the disk: is full")
        clock.advance(5)
        await until(lambda: bodies == 2)


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "async"])
async def test_a_step_that_exits_leaves_its_worker_and_the_other_runs_alone(store: Store, is_plain: bool) -> None:
    gate = Gate()

    async def leave() -> None:
        sys.exit(3)

    @workflow
    async def leaving(ctx: Context) -> None:
        await ctx.step("leave", (lambda: sys.exit(3)) if is_plain else leave)

    async with Runtime(store, [leaving, gate.flow, greet], max_attempts=1) as runtime, asyncio.timeout(PATIENCE):
        beside = await runtime.start(gate.flow, id="beside")
        await gate.reached.wait()
        await runtime.start(leaving, id="run")
        await reaches(store, "run", "dead")
        gate.opened.set()
        assert await beside == "through"
        assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
        (dead,) = await runtime.list(status="dead")
        assert dead.id == "run"
        row = await store.get("run")
        assert row is not None
        assert b"step 'leave' called sys.exit(3)" in (row.outcome or b"")
    assert gate.calls == 1


async def test_a_run_in_memory_survives_an_inbox_that_could_not_be_read(store: Store) -> None:
    """The signal is in the store: it is read when the store answers again, and the step beside the wait is not repeated."""
    gate, inbox, failures, have_failed = Gate(), store.inbox, 0, asyncio.Event()

    @workflow
    async def flow(ctx: Context) -> list[Any]:
        return list(await asyncio.gather(ctx.step("wait", gate._wait), ctx.wait_for_signal("go")))

    async def failing(*args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures < 2:
            failures += 1
            have_failed.set()
            raise PersistenceError("the store", "is down")
        return await inbox(*args, **options)

    async with Runtime(store, [flow], lease_ttl=3) as runtime, client(store) as other, asyncio.timeout(PATIENCE):
        run = await runtime.start(flow, id="run")
        await gate.reached.wait()
        store.inbox = failing  # type: ignore[method-assign]
        await other.signal("run", "go", 7)
        await have_failed.wait()
        gate.opened.set()
        assert await run == ["through", 7]
    assert gate.calls == 1


async def test_a_run_that_waits_for_a_signal_in_memory_rarely_reads_a_store_that_is_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a store whose watch takes the outage for a change, and returns at once."""
    monkeypatch.setattr("perdure.engine.timers_and_signals._READ_AGAIN_SECONDS", 0.1)
    gate, inbox, reads, is_down = Gate(), store.inbox, 0, False
    watch = store.watch

    @workflow
    async def flow(ctx: Context) -> list[Any]:
        return list(await asyncio.gather(ctx.step("wait", gate._wait), ctx.wait_for_signal("go")))

    async def read(*args: Any, **options: Any) -> Any:
        nonlocal reads
        if is_down:
            reads += 1
            raise PersistenceError("the store", "is down")
        return await inbox(*args, **options)

    async def look(timeout: float) -> None:
        await (asyncio.sleep(0) if is_down else watch(timeout))

    store.inbox, store.watch = read, look  # type: ignore[method-assign]
    async with Runtime(store, [flow]) as runtime, client(store) as other, asyncio.timeout(PATIENCE):
        run = await runtime.start(flow, id="run")
        await gate.reached.wait()
        await asyncio.sleep(0.2)
        is_down, began = True, time.monotonic()
        await other.signal("run", "go", 7)
        await until(lambda: reads >= 4)
        assert reads <= 5 + (time.monotonic() - began) / 0.1
        is_down = False
        gate.opened.set()
        assert await run == ["through", 7]


async def test_a_worker_that_stops_does_not_ask_a_store_twice_that_is_down(store: Store) -> None:
    """A server that is down is asked for seconds before a verb fails, and a deploy does not wait for that again."""
    gate, released = Gate(), 0

    async def fail(*_: Any, **__: Any) -> Any:
        nonlocal released
        released += 1
        raise PersistenceError("the store", "is down")

    async with asyncio.timeout(PATIENCE), Runtime(store, [gate.flow], drain_after=0.1) as runtime:
        await runtime.start(gate.flow, id="run")
        await gate.reached.wait()
        setattr(store, "release", fail)  # noqa: B010 - mypy holds an assignment against it
    assert released == 1


async def test_a_worker_that_stops_gives_its_runs_back_while_a_claim_waits_for_its_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is down is asked for seconds before a claim fails: time that a deploy may not have."""
    monkeypatch.setattr("perdure.worker.worker.IDLE_SECONDS", (0.05, 0.05))
    gate, claim, is_asked, may_answer = Gate(), store.claim, asyncio.Event(), asyncio.Event()

    async def answer_late(*args: Any, **options: Any) -> Any:
        is_asked.set()
        await may_answer.wait()
        return await claim(*args, **options)

    async with asyncio.timeout(PATIENCE):
        runtime = Runtime(store, [gate.flow], drain_after=0.1)
        await runtime.__aenter__()
        await runtime.start(gate.flow, id="run")
        await gate.reached.wait()
        setattr(store, "claim", answer_late)  # noqa: B010 - mypy holds an assignment against it
        await is_asked.wait()
        leaving = asyncio.ensure_future(runtime.__aexit__(None, None, None))
        await reaches(store, "run", "pending")
        assert not leaving.done()
        may_answer.set()
        await leaving
