"""The ready queue of one body, by itself: a small owner says what happens when the body rests. No journal is involved."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from perdure.aio.own_tasks import current, start_own_task
from perdure.body import body_queue
from perdure.body.body_queue import TURNS, BodyQueue, BodyTask
from perdure.model.durations import MICROSECOND

_LOG = "perdure"
_METHODS = ("call_soon", "call_soon_threadsafe", "create_task", "call_later", "call_at", "time")
BEGAN = 1_700_000_000 * MICROSECOND


class Owner:
    """Drives a body: notes its rests, and does at a rest what a test has asked for, one thing at each."""

    def __init__(self, number: int = 1) -> None:
        loop = asyncio.get_running_loop()
        self.body = BodyQueue(loop, self, f"run{number}", number.to_bytes(4, "big"), BEGAN, BEGAN)
        self.rests: list[bool] = []
        self.todo: list[Callable[[], object]] = []
        self.ended: asyncio.Future[None] = loop.create_future()
        self.main: BodyTask | None = None

    def rest(self, *, is_spinning: bool) -> bool:
        self.rests.append(is_spinning)
        assert asyncio.current_task() is None
        if self.todo:
            self.todo.pop(0)()
            return True
        if self.main is not None and self.main.done() and not self.ended.done():
            self.body.on_host(self.ended.set_result, None)
        if self.body.interrupt is not None and not self.ended.done():
            self.body.on_host(self.ended.set_result, None)
        return False

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what the body comes to; it is over then."""
        self.main = main = self.body.start(work, "main")
        try:
            async with asyncio.timeout(10):
                await self.ended
        finally:
            self.body.end()
        return main.result()


# The methods of the loop.


async def test_the_loop_is_as_it_was_when_the_last_body_is_over() -> None:
    loop = asyncio.get_running_loop()
    first, second = Owner(1), Owner(2)
    assert all(name in vars(loop) for name in _METHODS)
    first.body.end()
    assert all(name in vars(loop) for name in _METHODS)
    second.body.end()
    assert not any(name in vars(loop) for name in _METHODS)


async def test_a_method_that_somebody_else_has_replaced_meanwhile_is_left_as_it_is() -> None:
    loop = asyncio.get_running_loop()
    owner = Owner()
    inner = loop.time

    def theirs() -> float:
        return inner()

    vars(loop)["time"] = theirs
    owner.body.end()
    try:
        assert vars(loop)["time"] is theirs
        assert "call_soon" not in vars(loop)
    finally:
        del vars(loop)["time"]


async def test_a_body_that_is_over_twice_leaves_once() -> None:
    loop = asyncio.get_running_loop()
    first, second = Owner(1), Owner(2)
    first.body.end()
    first.body.end()
    assert "call_soon" in vars(loop)
    second.body.end()


async def test_code_outside_bodies_gets_what_the_loop_does() -> None:
    loop = asyncio.get_running_loop()
    owner = Owner()
    ran: list[str] = []
    loop.call_soon(ran.append, "soon")
    task = loop.create_task(asyncio.sleep(0, "task"))
    assert not isinstance(task, BodyTask)
    assert await task == "task"
    assert ran == ["soon"]
    assert owner.body.ready == type(owner.body.ready)()
    owner.body.end()


def test_a_loop_that_can_run_inside_itself_is_refused() -> None:
    loop = asyncio.new_event_loop()
    loop._nest_patched = True  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="nest_asyncio"):
            body_queue._methods_of(loop)
    finally:
        loop.close()


def test_a_loop_that_takes_no_attributes_is_refused() -> None:
    class Slotted:
        __slots__ = ()

    with pytest.raises((RuntimeError, TypeError)):
        body_queue._check(Slotted())  # type: ignore[arg-type]


async def test_a_loop_whose_futures_do_not_use_its_call_soon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __init__(self, **_: object) -> None:
            pass

        def add_done_callback(self, callback: object) -> None:
            pass

        def set_result(self, result: object) -> None:
            pass

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(asyncio, "Future", Silent)
    with pytest.raises(RuntimeError, match="do not use its call_soon"):
        body_queue._check(loop)
    monkeypatch.undo()
    assert "call_soon" not in vars(loop)


# Rests.


async def test_the_body_rests_when_nothing_in_it_is_ready_and_not_before() -> None:
    owner = Owner()
    seen: list[str] = []

    async def deep(depth: int) -> None:
        for _ in range(depth):
            await asyncio.sleep(0)
        seen.append(f"{depth}")

    async def work() -> None:
        await asyncio.gather(*(asyncio.gather(asyncio.shield(asyncio.gather(deep(n)))) for n in (5, 1, 20)))
        await waiting

    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    owner.todo = [lambda: seen.append("rest"), lambda: waiting.set_result(None)]
    await owner.run(work())
    assert seen == ["1", "5", "20", "rest"]
    assert not any(owner.rests)


async def test_what_is_done_at_a_rest_is_dealt_with_before_the_next_one() -> None:
    owner = Owner()
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    second: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def wait(future: asyncio.Future[None], name: str) -> None:
        await future
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append(name)

    async def work() -> None:
        await asyncio.gather(wait(second, "second"), wait(first, "first"))

    def deliver(future: asyncio.Future[None], name: str) -> None:
        seen.append(f"deliver {name}")
        future.set_result(None)

    owner.todo = [lambda: deliver(first, "first"), lambda: deliver(second, "second")]
    await owner.run(work())
    assert seen == ["deliver first", "first", "deliver second", "second"]


async def test_a_body_that_never_rests_counts_as_resting_after_so_many_turns() -> None:
    owner = Owner()
    turns, stop = 0, False

    def end() -> None:
        nonlocal stop
        stop = True

    async def work() -> int:
        nonlocal turns
        while not stop:
            turns += 1
            await asyncio.sleep(0)
        return turns

    owner.todo = [end]
    assert await owner.run(work()) == pytest.approx(TURNS, abs=2)
    assert owner.rests[0]


async def test_a_body_that_never_rests_leaves_half_of_the_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As anyio does while a scope is being cancelled: the threads of a store would have to fight for each turn."""
    monkeypatch.setattr(body_queue, "SHORTEST_PAUSE", 3600.0)
    owner = Owner()
    stop = False

    async def work() -> None:
        while not stop:  # noqa: ASYNC110 - it never rests
            await asyncio.sleep(0)

    running = asyncio.ensure_future(owner.run(work()))
    for _ in range(20):
        await asyncio.sleep(0)
    rests, stop = list(owner.rests), True
    owner.body.schedule()  # something has happened
    await running
    assert (rests, owner.rests) == ([True], [True, False])


async def test_turns_are_counted_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow body does not get to so many turns in one slice."""
    monkeypatch.setattr(body_queue, "SLICE", -1.0)
    owner = Owner()
    turns, stop = 0, False

    def end() -> None:
        nonlocal stop
        stop = True

    async def work() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            await asyncio.sleep(0)

    owner.todo = [end]
    await owner.run(work())
    assert owner.rests[0]


async def test_a_turn_that_a_slice_cuts_off_is_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that never rest are in the same order whenever the body counts as resting, however often the host had its turn."""
    monkeypatch.setattr(body_queue, "SLICE", -1.0)
    owner = Owner()
    order: list[int] = []
    stop = False

    async def work(number: int) -> None:
        while not stop:
            order.append(number)
            await asyncio.sleep(0)

    async def works() -> None:
        await asyncio.gather(*map(work, range(7)))

    def look() -> None:
        seen.append(order[-7:])

    def end() -> None:
        nonlocal stop
        stop = True

    seen: list[list[int]] = []
    owner.todo = [look, look, look, end]
    await owner.run(works())
    assert seen == [list(range(7))] * 3


async def test_the_host_has_its_turn_while_a_body_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_queue, "SLICE", -1.0)
    owner = Owner()
    loop = asyncio.get_running_loop()
    host_turns, is_over = 0, False

    def take_turn() -> None:
        nonlocal host_turns
        host_turns += 1
        if not is_over:
            loop.call_soon(take_turn)

    async def work() -> None:
        nonlocal is_over
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(1_000)))
        is_over = True

    take_turn()
    await owner.run(work())
    assert host_turns > 10


async def test_a_body_that_keeps_the_loop_busy_for_long_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(body_queue, "_LONG", 0.0)

    async def work() -> None:
        pass

    with caplog.at_level(logging.WARNING, _LOG):
        await Owner().run(work())
    assert "has kept the event loop busy" in caplog.text
    assert "'run1'" in caplog.text


async def test_a_callback_that_raises_is_reported_and_the_body_goes_on() -> None:
    owner = Owner()
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    def fail() -> None:
        raise ValueError("on its own")

    async def work() -> str:
        loop.call_soon(fail)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    loop.set_exception_handler(lambda _, context: told.append(context))
    assert await owner.run(work()) == "done"
    assert [str(context["exception"]) for context in told] == ["on its own"]


async def test_sys_exit_in_a_body_is_kept_for_its_owner_and_leaves_the_loop_alone() -> None:
    owner = Owner()

    async def work() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(asyncio.InvalidStateError):
        await owner.run(work())
    assert isinstance(owner.body.interrupt, SystemExit)
    assert owner.main is not None
    owner.main.cancel()
    await asyncio.wait([owner.main])


async def test_the_hooks_for_async_generators_are_those_of_the_host_outside_the_pump() -> None:
    before = sys.get_asyncgen_hooks()
    inside: list[object] = []

    async def work() -> None:
        inside.append(sys.get_asyncgen_hooks().finalizer)

    await Owner().run(work())
    assert sys.get_asyncgen_hooks() == before
    assert inside != [before.finalizer]


# Whether the running task is alone.


async def is_alone_in(work: Callable[[BodyQueue], Coroutine[Any, Any, bool]]) -> bool:
    owner = Owner()
    found: bool = await owner.run(work(owner.body))
    return found


async def test_a_task_is_alone_if_the_body_would_rest_should_it_wait() -> None:
    async def work(body: BodyQueue) -> bool:
        return body.is_alone()

    assert await is_alone_in(work)


async def test_a_task_is_not_alone_while_another_is_ready() -> None:
    async def work(body: BodyQueue) -> bool:
        other = asyncio.create_task(asyncio.sleep(0))
        found = body.is_alone()
        await other
        return found

    assert not await is_alone_in(work)


async def test_a_task_that_is_about_to_be_cancelled_is_not_alone() -> None:
    async def work(body: BodyQueue) -> bool:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        found = body.is_alone()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        task.uncancel()
        return found

    assert not await is_alone_in(work)


async def test_a_callback_that_is_no_task_is_not_alone() -> None:
    async def work(body: BodyQueue) -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: found.set_result(body.is_alone()))
        return await found

    assert not await is_alone_in(work)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks start eagerly from Python 3.12 on")
async def test_a_task_that_was_started_eagerly_is_not_alone() -> None:
    async def work(body: BodyQueue) -> bool:
        async def look() -> bool:
            return body.is_alone()

        options: dict[str, Any] = {"loop": asyncio.get_running_loop(), "eager_start": True}
        return await asyncio.Task(look(), **options)

    assert not await is_alone_in(work)


async def test_a_task_whose_turn_another_callback_takes_is_not_alone() -> None:
    async def work(body: BodyQueue) -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def look() -> bool:
            return body.is_alone()

        def start() -> None:
            context = contextvars.copy_context()
            context.run(current.set, None)
            found.set_result(body.run_first_turn(look(), context).result())

        asyncio.get_running_loop().call_soon(start)
        return await found

    assert not await is_alone_in(work)


async def test_outside_the_pump_no_task_of_the_body_is_alone() -> None:
    owner = Owner()
    assert not owner.body.is_alone()
    owner.body.end()


# Tasks.


async def test_tasks_hash_by_the_run_and_the_number_of_their_creation() -> None:
    async def work() -> list[int]:
        tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(20)]
        await asyncio.gather(*tasks)
        return [hash(task) for task in tasks]

    first, again, other = await Owner(1).run(work()), await Owner(1).run(work()), await Owner(2).run(work())
    assert first == again == sorted(first)
    assert not set(first) & set(other)


async def test_a_task_is_kept_until_it_has_ended() -> None:
    owner = Owner()

    async def wait() -> str:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owner.todo.append(lambda: here.set_result(None))
        await here
        return "kept"

    seen: list[str] = []

    async def work() -> None:
        asyncio.create_task(wait()).add_done_callback(lambda task: seen.append(task.result()))
        await asyncio.sleep(0)
        gc.collect()
        other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owner.todo.append(lambda: other.set_result(None))
        await other

    await owner.run(work())
    assert seen == ["kept"]
    assert owner.body.tasks == set()


async def test_a_task_that_was_made_without_the_loop_runs_in_the_body_and_is_known() -> None:
    owner = Owner()
    pending: list[list[asyncio.Task[Any]]] = []

    async def work() -> bool:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        made: asyncio.Task[None] = asyncio.Task(_await(waiting), loop=loop)
        owner.todo = [lambda: pending.append(owner.body.pending_tasks()), lambda: waiting.set_result(None)]
        await made
        return made in pending[0]

    assert await owner.run(work())


async def _await(awaitable: Awaitable[Any]) -> None:
    await awaitable


async def test_a_context_without_a_body_makes_a_task_of_the_host() -> None:
    async def work() -> bool:
        context = contextvars.copy_context()
        context.run(current.set, None)
        task = asyncio.get_running_loop().create_task(asyncio.sleep(0), context=context)
        own = start_own_task(asyncio.sleep(0))
        await asyncio.gather(task, own)
        return isinstance(task, BodyTask) or isinstance(own, BodyTask)

    assert not await Owner().run(work())


async def test_cancelling_a_task_from_outside_only_asks_the_body_to_leave() -> None:
    owner = Owner()
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    resting = asyncio.Event()

    async def work() -> str:
        return await waiting

    owner.todo = [resting.set]
    running = asyncio.ensure_future(owner.run(work()))
    await resting.wait()
    assert owner.main is not None
    assert owner.main.cancel()
    assert owner.body.is_interrupted
    assert owner.main.cancelling() == 0
    owner.todo = [lambda: waiting.set_result("went on")]
    assert await running == "went on"


async def test_cancelling_a_task_inside_the_body_cancels_it() -> None:
    async def work() -> str:
        task = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "not"

    owner = Owner()
    assert await owner.run(work()) == "cancelled"
    assert not owner.body.is_interrupted


async def test_a_task_that_an_unwinding_task_makes_cleans_up_for_it() -> None:
    owner = Owner()
    made: list[BodyTask] = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            made.append(asyncio.create_task(asyncio.sleep(0)))  # type: ignore[arg-type]
            await made[0]

    async def work() -> None:
        unwinding = asyncio.create_task(wait())
        other = asyncio.create_task(asyncio.sleep(0))
        made.append(other)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        made.clear()
        owner.body.is_closing = True
        unwinding.cancel()
        await asyncio.wait([unwinding])
        fresh = asyncio.create_task(asyncio.sleep(0))
        made.append(fresh)  # type: ignore[arg-type]
        await fresh

    await owner.run(work())
    assert [task.cleans_up_for is not None for task in made] == [True, False]


# What a resting task waits for.


async def has_own_waits_while(waiting_in: Callable[[Owner, asyncio.Future[None]], Awaitable[Any]], *, is_known: bool) -> bool:
    owner = Owner()
    found: list[bool] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look() -> None:
        found.append(owner.body.has_own_waits({id(future)} if is_known else ()))
        future.set_result(None)
        for timer in list(owner.body.timers.values()):
            owner.body.fire(timer)

    owner.todo = [look]
    await owner.run(_await(waiting_in(owner, future)))
    return found[0]


async def _future(_: Owner, future: asyncio.Future[None]) -> None:
    await future


async def _task(_: Owner, future: asyncio.Future[None]) -> None:
    await asyncio.create_task(_await(future))


async def _gathered(_: Owner, future: asyncio.Future[None]) -> None:
    await asyncio.gather(_await(future), asyncio.gather(_await(future)))


async def _asleep(_: Owner, future: asyncio.Future[None]) -> None:
    await asyncio.sleep(3600)
    await future


async def _foreign(_: Owner, future: asyncio.Future[None]) -> None:
    await asyncio.Task(_await(future), loop=asyncio.get_running_loop())


@pytest.mark.parametrize("waiting_in", [_future, _task, _gathered, _asleep, _foreign], ids=lambda each: each.__name__.strip("_"))
async def test_who_waits_for_calls_tasks_and_timers_has_no_wait_of_its_own(waiting_in: Any) -> None:
    assert not await has_own_waits_while(waiting_in, is_known=True)


@pytest.mark.parametrize("waiting_in", [_future, _task, _gathered, _foreign], ids=lambda each: each.__name__.strip("_"))
async def test_who_waits_for_anything_else_has_one(waiting_in: Any) -> None:
    assert await has_own_waits_while(waiting_in, is_known=False)


async def test_a_task_of_the_host_is_a_wait_of_its_own() -> None:
    async def waiting(_: Owner, future: asyncio.Future[None]) -> None:
        await start_own_task(_await(future))

    assert await has_own_waits_while(waiting, is_known=True)


async def test_a_task_is_woken_without_the_hosts_task_that_it_waits_for() -> None:
    owner = Owner()
    release: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_host() -> str:
        return await release

    theirs = asyncio.create_task(on_host())
    woken: list[bool] = []

    async def work() -> str:
        try:
            await theirs
        except asyncio.CancelledError:
            return "woken"
        return "not"

    def wake() -> None:
        assert owner.main is not None
        woken.append(owner.body.wake_without(owner.main))

    owner.todo = [wake]
    assert await owner.run(work()) == "woken"
    assert woken == [True]
    release.set_result("goes on")
    assert await theirs == "goes on"


@pytest.mark.parametrize("waiting_in", [_future, _task, _foreign], ids=lambda each: each.__name__.strip("_"))
async def test_who_waits_for_no_task_of_the_host_is_to_be_cancelled_itself(waiting_in: Any) -> None:
    owner = Owner()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    woken: list[bool] = []

    def wake() -> None:
        assert owner.main is not None
        woken.append(owner.body.wake_without(owner.main))
        future.set_result(None)

    owner.todo = [wake]
    await owner.run(waiting_in(owner, future))
    assert woken == [False]


# Steps.


async def test_the_first_turn_of_a_step_is_taken_at_the_rest_that_starts_it() -> None:
    owner = Owner()
    seen: list[object] = []
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def function() -> str:
        seen.append(current.get())
        return "result"

    def start() -> None:
        context = contextvars.copy_context()
        context.run(current.set, None)
        task = owner.body.run_first_turn(function(), context)
        seen.extend([task.done(), isinstance(task, BodyTask)])
        waiting.set_result(None)

    owner.todo = [start]
    await owner.run(_await(waiting))
    assert seen == [None, True, False]


async def test_the_first_turn_of_a_step_leaves_what_it_calls_soon_to_the_host() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    pumping: list[bool] = []
    waiting: asyncio.Future[None] = loop.create_future()

    called = asyncio.Event()

    def look() -> None:
        pumping.append(owner.body.is_pumping)
        called.set()

    async def function() -> None:
        loop.call_soon(look)

    def start() -> None:
        context = contextvars.copy_context()
        context.run(current.set, None)
        owner.body.run_first_turn(function(), context)

    async def work() -> None:
        await waiting

    owner.todo = [start]
    running = asyncio.ensure_future(owner.run(work()))
    await called.wait()
    owner.body.on_host(waiting.set_result, None)
    await running
    assert pumping == [False]


async def test_with_a_task_factory_on_the_host_the_factory_makes_the_task_of_a_step() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    made: list[asyncio.Task[Any]] = []
    waiting: asyncio.Future[None] = loop.create_future()

    def factory(the_loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        made.append(asyncio.Task(coro, loop=the_loop, **options))
        return made[-1]

    def start() -> None:
        context = contextvars.copy_context()
        context.run(current.set, None)
        task = owner.body.run_first_turn(asyncio.sleep(0), context)
        assert task is made[-1]
        waiting.set_result(None)

    owner.todo = [start]
    loop.set_task_factory(factory)
    try:
        await owner.run(_await(waiting))
    finally:
        loop.set_task_factory(None)
    assert len(made) == 1


# Time, and timers.


async def test_the_time_of_a_body_stands_still_between_entries() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    times: list[float] = []
    waiting: asyncio.Future[None] = loop.create_future()

    def deliver() -> None:
        owner.body.now += 5 * MICROSECOND
        waiting.set_result(None)

    async def work() -> None:
        times.extend([loop.time(), loop.time()])
        await waiting
        times.append(loop.time())

    owner.todo = [deliver]
    await owner.run(work())
    assert times[0] == times[1]
    assert times[2] - times[0] == pytest.approx(5)


async def test_a_sleep_is_named_by_its_instant_and_by_a_count_where_instants_are_equal() -> None:
    owner = Owner()
    names: list[list[str]] = []

    def fire() -> None:
        names.append(list(owner.body.timers))
        for timer in list(owner.body.timers.values()):
            owner.body.fire(timer)

    async def work() -> None:
        await asyncio.gather(asyncio.sleep(2), asyncio.sleep(1), asyncio.sleep(1))
        await asyncio.sleep(1)

    owner.todo = [fire, fire]
    await owner.run(work())
    second = BEGAN + MICROSECOND
    assert names == [[f"{BEGAN + 2 * MICROSECOND}", f"{second}", f"{second}:2"], [f"{second}:3"]]


async def test_a_sleep_that_is_cancelled_leaves_no_timer_and_was_set() -> None:
    owner = Owner()
    name = str(BEGAN + 10 * MICROSECOND)
    found: list[tuple[bool, bool]] = []
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look() -> None:
        found.append((name in owner.body.timers, owner.body.was_set(name)))

    def go_on() -> None:
        look()
        waiting.set_result(None)

    async def work() -> None:
        sleeping = asyncio.create_task(asyncio.sleep(10))
        await waiting
        sleeping.cancel()
        await asyncio.wait([sleeping])
        look()

    owner.todo = [go_on]
    await owner.run(work())
    assert found == [(True, False), (False, True)]
    assert not owner.body.was_set(f"{BEGAN + 10 * MICROSECOND}:2")
    assert not owner.body.was_set("no instant")


async def test_a_timer_of_a_library_is_the_hosts() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    fired: list[bool] = []

    async def work() -> None:
        over: asyncio.Future[None] = loop.create_future()

        def fire() -> None:
            fired.append(owner.body.is_pumping)
            over.set_result(None)

        loop.call_later(0.001, fire)
        assert owner.body.timers == {}
        await over

    await owner.run(work())
    assert fired == [True]


async def test_a_sleep_of_a_body_that_leaves_is_the_hosts() -> None:
    owner = Owner()

    async def work() -> None:
        owner.body.is_closing = True
        sleeping = asyncio.create_task(asyncio.sleep(0.001))
        await asyncio.sleep(0)
        assert owner.body.timers == {}
        await sleeping

    await owner.run(work())


async def test_a_time_limit_that_no_task_of_the_body_has_set_is_the_hosts() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    set_by_callback: list[dict[str, Any]] = []

    async def work() -> None:
        over: asyncio.Future[None] = loop.create_future()

        def set_timer() -> None:
            loop.call_later(0.001, asyncio.futures._set_result_unless_cancelled, over, None)  # type: ignore[attr-defined]
            set_by_callback.append(dict(owner.body.timers))

        loop.call_soon(set_timer)
        await over

    await owner.run(work())
    assert set_by_callback == [{}]


async def test_a_time_limit_that_sets_itself_again_when_it_fires_is_durable_again() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    names: list[list[str]] = []

    async def work() -> None:
        over: asyncio.Future[None] = loop.create_future()

        class Again:
            def __init__(self) -> None:
                self.left = 1

            def fire(self) -> None:
                self.left -= 1
                if self.left < 0:
                    over.set_result(None)
                else:
                    loop.call_later(1, self.fire)

        Again.__name__, Again.__module__ = "CancelScope", "anyio._backends._asyncio"
        loop.call_later(1, Again().fire)
        await over

    def fire() -> None:
        names.append(list(owner.body.timers))
        for timer in list(owner.body.timers.values()):
            owner.body.now = timer.at
            owner.body.fire(timer)

    owner.todo = [fire, fire]
    await owner.run(work())
    assert names == [[str(BEGAN + MICROSECOND)], [str(BEGAN + 2 * MICROSECOND)]]


# The end.


async def test_what_a_body_that_is_over_left_in_its_queue_goes_to_the_host() -> None:
    owner = Owner()
    ran: list[bool] = []
    context = contextvars.copy_context()
    context.run(current.set, owner.body)
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: ran.append(owner.body.is_over), context=context)
    assert len(owner.body.ready) == 1
    owner.body.end()
    await asyncio.sleep(0)
    assert ran == [True]


async def test_what_the_context_of_a_body_that_is_over_calls_later_is_the_hosts() -> None:
    other, owner = Owner(2), Owner(1)
    context = contextvars.copy_context()
    context.run(current.set, owner.body)
    loop = asyncio.get_running_loop()
    owner.body.end()
    task = context.run(loop.create_task, asyncio.sleep(0, "host"))
    assert not isinstance(task, BodyTask)
    assert await task == "host"
    assert context.run(loop.time) == pytest.approx(loop.time(), abs=1)
    other.body.end()


async def test_a_callback_from_another_thread_reaches_the_body_in_its_queue() -> None:
    owner = Owner()
    loop = asyncio.get_running_loop()
    in_pump: list[bool] = []

    async def work() -> None:
        arrived: asyncio.Future[None] = loop.create_future()
        context = contextvars.copy_context()

        def arrive() -> None:
            in_pump.append(owner.body.is_pumping)
            arrived.set_result(None)

        await asyncio.gather(arrived, asyncio.to_thread(lambda: loop.call_soon_threadsafe(arrive, context=context)))

    await owner.run(work())
    assert in_pump == [True]


async def test_a_generator_that_the_body_drops_is_closed_by_a_task_of_the_body() -> None:
    owner = Owner()
    closed_in: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed_in.append(isinstance(asyncio.current_task(), BodyTask))

    async def work() -> None:
        async for _ in numbers():
            break
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)

    await owner.run(work())
    assert closed_in == [True]


async def test_in_debug_mode_a_callback_says_where_it_was_made() -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        owner = Owner()
    finally:
        loop.set_debug(False)
    context = contextvars.copy_context()
    context.run(current.set, owner.body)
    handle = loop.call_soon(print, context=context)
    assert "test_body_queue.py" in repr(handle)
    handle.cancel()
    assert handle.cancelled()
    owner.body.end()
