"""What the engine reads of asyncio that is not documented is there, and says what the engine takes it to say."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

import anyio
import pytest

from perdure.body.asyncio_internals import (
    GatheringFuture,
    TaskStep,
    callbacks_of,
    do_not_log_destruction,
    gatherings_around,
    is_about_to_be_cancelled,
    is_time_limit,
    owner_of,
    waited_for,
)


async def test_gather_gives_a_gathering_future() -> None:
    gathering = asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
    assert isinstance(gathering, GatheringFuture)
    await gathering


async def test_the_gatherings_around_a_task_are_found() -> None:
    task = asyncio.ensure_future(asyncio.sleep(0))
    other = asyncio.ensure_future(asyncio.sleep(0))
    assert gatherings_around(task) == []
    inner = asyncio.gather(task, other)
    outer = asyncio.gather(asyncio.shield(inner))
    waiting = asyncio.ensure_future(_await(outer))
    await asyncio.sleep(0)
    for each in (task, other, waiting):
        assert set(gatherings_around(each)) == {inner, outer}
    await waiting


async def test_a_running_task_that_was_cancelled_is_about_to_be() -> None:
    task = asyncio.current_task()
    assert task is not None
    assert not is_about_to_be_cancelled(task)
    task.cancel()
    assert is_about_to_be_cancelled(task)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert not is_about_to_be_cancelled(task)
    task.uncancel()


async def test_a_waiting_task_tells_what_it_waits_for() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(_await(future))
    assert waited_for(task) is None
    await asyncio.sleep(0)
    assert waited_for(task) is future
    future.set_result(None)
    await task
    assert waited_for(task) is None


async def _await(future: asyncio.Future[Any]) -> Any:
    return await future


async def test_the_callbacks_of_a_future_are_listed_with_their_contexts() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert callbacks_of(future) == []
    context = contextvars.copy_context()
    called: list[object] = []
    future.add_done_callback(called.append, context=context)
    ((callback, found),) = callbacks_of(future)
    assert (callback, found) == (called.append, context)
    assert future.remove_done_callback(callback) == 1


async def test_the_wake_up_of_a_task_that_waits_belongs_to_that_task() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(_await(future))
    await asyncio.sleep(0)
    ((callback, context),) = callbacks_of(future)
    assert owner_of(callback) is task
    assert future.remove_done_callback(callback) == 1
    dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    dead.cancel()
    asyncio.get_running_loop().call_soon(callback, dead, context=context)  # as `wake_without` does
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not future.done()


def test_a_task_takes_its_turns_by_a_callback_of_one_type_that_belongs_to_it() -> None:
    loop = asyncio.new_event_loop()
    seen: list[Callable[..., Any]] = []
    call_soon = loop.call_soon

    def note(callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        seen.append(callback)
        return call_soon(callback, *args, context=context)

    vars(loop)["call_soon"] = note
    try:
        task = loop.create_task(asyncio.sleep(0))
        assert type(seen[0]) is TaskStep
        assert owner_of(seen[0]) is task
        loop.run_until_complete(task)
    finally:
        loop.close()


def test_a_function_is_owned_by_nobody() -> None:
    assert owner_of(_await) is None
    assert owner_of(None) is None


def test_a_pending_task_can_be_freed_without_a_word() -> None:
    loop = asyncio.new_event_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    try:
        coroutines = [asyncio.sleep(0), asyncio.sleep(0)]
        quiet, loud = (asyncio.Task(each, loop=loop) for each in coroutines)
        do_not_log_destruction(quiet)
        loop._ready.clear()  # type: ignore[attr-defined]
        del quiet
        assert told == []
        del loud
        assert len(told) == 1
    finally:
        for each in coroutines:
            each.close()
        loop.close()


# Timers: what each sleep and time limit of asyncio gives to the loop is told from what anything else gives.


class _Timers:
    """The callbacks that timers were given while this was open."""

    def __init__(self) -> None:
        self.seen: list[Callable[..., Any]] = []
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> list[Callable[..., Any]]:
        for name in ("call_later", "call_at"):
            original = getattr(self._loop, name)
            vars(self._loop)[name] = self._noting(original)
        return self.seen

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
            if not any(callback is known for known in self.seen):
                self.seen.append(callback)
            return original(when, callback, *args, context=context)

        return call

    def __exit__(self, *_: object) -> None:
        for name in ("call_later", "call_at"):
            del vars(self._loop)[name]


async def _sleep() -> None:
    await asyncio.sleep(0.001)


async def _limit() -> None:
    async with asyncio.timeout(0.05):  # one that has passed by the time it is set needs no timer
        await asyncio.get_running_loop().create_future()


async def _wait() -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.001)


async def _wait_for() -> None:
    await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.001)


async def _as_completed() -> None:
    for each in asyncio.as_completed([asyncio.get_running_loop().create_future()], timeout=0.001):
        await each


async def _scope_of_anyio() -> None:
    with anyio.fail_after(0.05):
        await anyio.sleep_forever()


@pytest.mark.parametrize(
    "work", [_sleep, _limit, _wait, _wait_for, _as_completed, _scope_of_anyio], ids=lambda work: work.__name__.strip("_")
)
async def test_the_timer_of_a_sleep_or_a_time_limit_is_told_by_its_callback(
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    with _Timers() as callbacks, contextlib.suppress(TimeoutError):
        await work()
    assert callbacks
    assert [is_time_limit(callback) for callback in callbacks] == [True] * len(callbacks)


async def test_the_time_limit_of_async_timeout_is_told_by_its_class() -> None:
    """It is not installed for the tests, so its class is imitated by name."""
    kind = type("Timeout", (), {"__module__": "async_timeout", "expire": lambda _: None})
    assert is_time_limit(kind().expire)


async def test_any_other_timer_is_not_one() -> None:
    class Timeout:
        def expire(self) -> None:
            pass

    kind = type("CancelScope", (), {"__module__": "mypool", "expire": lambda _: None})
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not any(is_time_limit(each) for each in (print, lambda: None, Timeout().expire, kind().expire, future.set_result))
