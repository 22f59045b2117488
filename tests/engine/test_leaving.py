"""How the tasks of a body end when it leaves memory. The body has no journal here, and its owner only lets it leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from perdure.body import leaving
from perdure.body.body_queue import BodyQueue
from perdure.body.leaving import Leaving
from perdure.model.durations import MICROSECOND

BEGAN = 1_700_000_000 * MICROSECOND


class Leaver:
    """The owner of a body that leaves memory as soon as it rests."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.body = BodyQueue(asyncio.get_running_loop(), self, "run", b"\0\0\0\1", BEGAN, BEGAN)
        self.resting = asyncio.Event()
        self.refused: set[asyncio.Task[Any]] = set()
        self._seconds = seconds
        self._leaving: Leaving | None = None

    def rest(self, *, is_spinning: bool) -> bool:
        if self._leaving is not None:
            return self._leaving.rest()
        self.body.on_host(self.resting.set)
        return False

    async def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Return when the body has left memory."""
        main = self.body.start(work, "main")
        await self.resting.wait()
        self._leaving = Leaving(self.body, main, {}, self.refused, self._seconds)
        try:
            async with asyncio.timeout(20):
                await self._leaving.done
        finally:
            self.body.end()


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def test_every_task_ends_and_each_is_cancelled_once() -> None:
    requests: list[int] = []

    async def child() -> None:
        try:
            await hang()
        finally:
            task = asyncio.current_task()
            assert task is not None
            requests.append(task.cancelling())

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    leaver = Leaver()
    await leaver.run(work())
    assert requests == [1, 1]
    assert leaver.body.pending_tasks() == []


async def test_a_task_that_takes_turns_of_the_host_to_unwind_is_cancelled_once() -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await hang()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, int)
            ended.append("child")

    async def work() -> None:
        waiting = asyncio.create_task(child())
        try:
            await waiting
        finally:
            ended.append("main")

    await Leaver().run(work())
    assert ended == ["child", "main"]


async def test_a_group_is_told_first_since_it_ignores_a_child_that_is_cancelled_on_its_own() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(hang())
            seen.append("the group has ended by itself")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    await Leaver().run(work())
    assert seen == ["cancelled"]


async def test_a_task_whose_call_was_refused_is_not_cancelled_again() -> None:
    leaver = Leaver()
    requests: list[int] = []

    async def refused() -> None:
        task = asyncio.current_task()
        assert task is not None
        leaver.refused.add(task)
        cleaning = asyncio.get_running_loop().create_future()
        leaver.body.call_later(0.01, cleaning.set_result, None)
        await cleaning
        requests.append(task.cancelling())

    async def work() -> None:
        unwinding = asyncio.create_task(refused())
        await hang()
        await unwinding

    await leaver.run(work())
    assert requests == [0]


async def test_a_task_that_the_body_has_cancelled_before_and_that_went_on_is_cancelled_at_once() -> None:
    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await hang()
        await hang()

    async def work() -> None:
        going_on = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        going_on.cancel()
        await hang()

    async with asyncio.timeout(5):
        await Leaver(seconds=60).run(work())


async def test_a_task_that_an_unwinding_task_makes_to_clean_up_is_left_to_do_so() -> None:
    cleaned: list[str] = []

    async def clean_up() -> None:
        await asyncio.get_running_loop().run_in_executor(None, int)
        cleaned.append("up")

    async def work() -> None:
        try:
            await hang()
        finally:
            await asyncio.wait_for(asyncio.create_task(clean_up()), 60)

    await Leaver().run(work())
    assert cleaned == ["up"]


async def test_a_task_of_the_host_goes_on_when_the_body_that_awaits_it_leaves() -> None:
    release = asyncio.Event()
    theirs = asyncio.create_task(release.wait())
    seen: list[str] = []

    async def work() -> None:
        try:
            await theirs
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    await Leaver().run(work())
    assert seen == ["cancelled"]
    release.set()
    assert await theirs


async def test_a_future_of_the_host_is_cancelled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await future

    await Leaver().run(work())
    assert future.cancelled()


async def test_a_sleep_in_a_finally_ends_by_the_hosts_clock() -> None:
    ended: list[str] = []

    async def work() -> None:
        sleeping = asyncio.create_task(asyncio.sleep(0.01))
        sleeping.add_done_callback(lambda task: ended.append("cancelled" if task.cancelled() else "slept"))
        try:
            await hang()
        finally:
            await asyncio.sleep(0.01)
            ended.append("main")

    async with asyncio.timeout(5):
        await Leaver().run(work())
    assert "main" in ended


async def test_a_sleep_that_shields_itself_goes_on_by_the_hosts_clock() -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        sleeping = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, asyncio.futures._set_result_unless_cancelled, sleeping, None)  # type: ignore[attr-defined]
        while not sleeping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([sleeping])
        ended.append("slept")

    async with asyncio.timeout(1):
        await Leaver(seconds=30).run(stubborn())
    assert ended == ["slept"]


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again() -> None:
    swallowed: list[str] = []

    async def work() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            swallowed.append("once")
        await hang()

    await Leaver(seconds=0.1).run(work())
    assert swallowed == ["once"]
    assert not leaving._kept


async def test_a_task_that_does_not_end_is_left_alone_in_bounded_time_and_kept_for_good() -> None:
    is_over = False

    async def work() -> None:
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await hang()

    leaver = Leaver(seconds=0.02)
    with pytest.warns(UserWarning, match="a task of it does not end when it is cancelled"):
        await leaver.run(work())
    del leaver
    gc.collect()
    (kept,) = leaving._kept
    is_over = True
    kept.cancel()
    await asyncio.wait([kept])
    await asyncio.sleep(0)
    assert not leaving._kept


async def test_what_tasks_raise_that_nobody_waits_for_any_more_is_not_reported() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def child() -> None:
        try:
            await hang()
        finally:
            raise ValueError("while it unwinds")

    async def work() -> None:
        left = asyncio.create_task(child())
        await asyncio.gather(child(), asyncio.shield(asyncio.gather(asyncio.shield(asyncio.gather(child())))))
        await left

    await Leaver().run(work())
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
