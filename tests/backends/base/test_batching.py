"""Requests that are asked on one loop and answered by a batcher on another."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from perdure.backends.base.batching import SEND_AGAIN, Batcher, Reply
from perdure.errors import LeaseLost, PersistenceError
from tests.patience import turns


@dataclass(frozen=True)
class Number:
    n: int
    size: int = 1
    written_rows: tuple[int, ...] = ()


@dataclass
class Server:
    """Answers each number with its double; 13 is refused, and 7 has to be sent twice."""

    batches: list[list[int]] = field(default_factory=list)
    left: int = 0

    async def perform(self, requests: Sequence[Number]) -> list[Reply[int]]:
        numbers = [request.n for request in requests]
        was_sent = {n for batch in self.batches for n in batch}
        self.batches.append(numbers)
        await asyncio.sleep(0)
        return [LeaseLost("run", 1) if n == 13 else SEND_AGAIN if n == 7 and n not in was_sent else 2 * n for n in numbers]

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_what_is_asked_in_one_turn_crosses_over_together(elsewhere: asyncio.AbstractEventLoop) -> None:
    server, crossings = Server(), list[Callable[[], None]]()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False)

    answers = [batcher.put_threadsafe(Number(n), crossings.append, server.leave) for n in (1, 13, 7)]
    assert len(crossings) == 1
    elsewhere.call_soon_threadsafe(crossings[0])
    assert all(answer.loop is asyncio.get_running_loop() for answer in answers)
    assert await answers[0] == 2
    with pytest.raises(LeaseLost):
        await answers[1]
    assert await answers[2] == 14
    assert (len(crossings), server.batches, server.left) == (1, [[1, 13, 7], [7]], 3)  # what has to be sent twice never left


async def test_a_caller_that_has_left_changes_nothing_for_the_others(elsewhere: asyncio.AbstractEventLoop) -> None:
    server = Server()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False)
    first, second = (batcher.put_threadsafe(Number(n), elsewhere.call_soon_threadsafe, server.leave) for n in (1, 2))
    waiting = asyncio.ensure_future(first)
    await asyncio.sleep(0)
    waiting.cancel()
    assert await second == 4
    assert ([n for batch in server.batches for n in batch], server.left) == ([1, 2], 2)


async def test_where_nobody_can_be_asked_any_more_everybody_hears_of_it() -> None:
    server = Server()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False)

    def closed(_: Callable[[], None]) -> None:
        raise PersistenceError("the pool", "its loop is closed")

    for n in (1, 2):
        with pytest.raises(PersistenceError, match="its loop is closed"):
            await batcher.put_threadsafe(Number(n), closed, server.leave)
    assert server.left == 2


@dataclass
class Slow:
    """Answers with the number itself, when it is told to."""

    batches: list[list[int]] = field(default_factory=list)
    may_answer: list[asyncio.Event] = field(default_factory=list)

    async def perform(self, requests: Sequence[Number]) -> list[Reply[int]]:
        self.batches.append([request.n for request in requests])
        self.may_answer.append(asyncio.Event())
        await self.may_answer[-1].wait()
        return [request.n for request in requests]


async def test_many_are_sent_in_two_halves_so_that_one_can_be_worked_on_while_the_other_goes_on() -> None:
    server = Slow()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False, max_in_flight=2)
    answers = [batcher.put(Number(n)) for n in range(40)]
    await turns(5)
    assert server.batches == [list(range(20)), list(range(20, 40))]
    answers += [batcher.put(Number(n)) for n in range(40, 45)]
    await turns(5)
    assert len(server.batches) == 2, "two at a time"
    server.may_answer[1].set()
    await turns(5)
    assert server.batches[2:] == [[40, 41, 42, 43, 44]], "as soon as there is room"
    assert [answer.done() for answer in answers] == [False] * 20 + [True] * 20 + [False] * 5
    for event in server.may_answer:
        event.set()
    assert await asyncio.gather(*answers) == list(range(45))


async def test_a_few_share_a_statement_and_the_next_need_not_wait_for_it() -> None:
    server = Slow()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False, max_in_flight=2)
    answers = [batcher.put(Number(n)) for n in range(5)]
    await turns(5)
    answers.append(batcher.put(Number(5)))
    await turns(5)
    assert server.batches == [[0, 1, 2, 3, 4], [5]]
    for event in server.may_answer:
        event.set()
    assert await asyncio.gather(*answers) == list(range(6))


async def test_one_at_a_time_is_one_at_a_time() -> None:
    server = Slow()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False)
    answers = [batcher.put(Number(n)) for n in range(40)]
    await turns(5)
    answers += [batcher.put(Number(n)) for n in range(40, 45)]
    await turns(5)
    assert server.batches == [list(range(40))]
    server.may_answer[0].set()
    await turns(5)
    assert server.batches[1:] == [list(range(40, 45))]
    server.may_answer[1].set()
    assert await asyncio.gather(*answers) == list(range(45))


async def test_a_statement_is_no_part_of_the_run_that_asks_first() -> None:
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="none")
    seen: list[str] = []

    async def perform(requests: Sequence[Number]) -> list[Reply[int]]:
        seen.append(run.get())
        return [request.n for request in requests]

    batcher: Batcher[Number, int] = Batcher(perform, lambda _: False)
    run.set("the first")
    await batcher.put(Number(1))
    assert seen == ["none"]


async def test_a_time_limit_inside_a_statement_counts() -> None:
    async def perform(_: Sequence[Number]) -> list[Reply[int]]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(3600)
        return []

    batcher: Batcher[Number, int] = Batcher(perform, lambda _: False)
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await batcher.put(Number(1))


async def test_whoever_cancels_all_tasks_does_not_reach_a_statement() -> None:
    server = Slow()
    batcher: Batcher[Number, int] = Batcher(server.perform, lambda _: False)
    answer = batcher.put(Number(1))
    await turns(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    server.may_answer[0].set()
    assert await answer == 1
