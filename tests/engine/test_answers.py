"""Answers that cannot be cancelled, and what is called at the next turn of a loop."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from perdure.aio.pending_write import PendingWrite, await_reply, wait_for_reply
from perdure.engine.recorder import NextTurn, next_turn_of


def give(answer: PendingWrite[Any], outcome: Any) -> None:
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


@pytest.mark.parametrize("outcome", [7, ValueError("no")])
async def test_whoever_is_cancelled_while_he_waits_is_so_after_the_answer(outcome: Any) -> None:
    answer: PendingWrite[int] = PendingWrite()
    undone: list[int] = []

    async def undo(value: int) -> None:
        undone.append(value)

    waiting = asyncio.create_task(await_reply(answer, undo))
    await asyncio.sleep(0)
    waiting.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    give(answer, outcome)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == ([] if isinstance(outcome, Exception) else [7]), "a failure has nothing to undo"


@pytest.mark.parametrize("outcome", [7, ValueError("no")])
async def test_then_is_called_before_whoever_waits_goes_on(outcome: Any) -> None:
    order: list[str] = []
    answer: PendingWrite[Any] = PendingWrite()
    answer.on_resolved = lambda same: order.append(f"then {same is answer}")

    async def wait() -> None:
        await wait_for_reply(answer)
        order.append("waited")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    give(answer, outcome)
    assert order == ["then True"]
    await waiting
    assert order == ["then True", "waited"]
    assert answer.exception() is (outcome if isinstance(outcome, Exception) else None)


@pytest.mark.parametrize("error", [ValueError("oh"), KeyboardInterrupt("oh")])
def test_what_then_raises_keeps_nobody_else_from_his_answer(error: BaseException) -> None:
    loop = asyncio.new_event_loop()
    told: list[str] = []
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))

    def raises(_: object) -> None:
        raise error

    answers: list[PendingWrite[int]] = [PendingWrite(loop) for _ in range(2)]
    answers[0].on_resolved = raises
    try:
        for answer in answers:
            answer.set_result(1)
        if isinstance(error, Exception):
            loop.run_until_complete(asyncio.sleep(0))
            assert told == ["oh"]
        else:
            with pytest.raises(KeyboardInterrupt, match="oh"):
                loop.run_until_complete(asyncio.sleep(0.01))
        assert [answer.result() for answer in answers] == [1, 1]
    finally:
        loop.close()


async def test_one_handle_calls_everybody_at_the_next_turn() -> None:
    loop = asyncio.get_running_loop()
    turn = next_turn_of(loop)
    assert turn is next_turn_of(loop)
    handles: list[Any] = []
    here = contextvars.ContextVar("here", default=False)
    here.set(True)

    class Counting:
        def call_soon(self, *args: Any, **options: Any) -> None:
            handles.append(loop.call_soon(*args, **options))

    called: list[tuple[int, bool]] = []
    own = NextTurn()
    for n in range(3):
        own.call(Counting(), lambda n=n: called.append((n, here.get())))  # type: ignore[arg-type, misc]
    assert called == []
    await asyncio.sleep(0)
    assert called == [(0, False), (1, False), (2, False)], "in order, and not in the context of whoever asked"
    own.call(Counting(), lambda: called.append((3, here.get())))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert (len(called), len(handles)) == (4, 2)
