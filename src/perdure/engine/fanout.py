"""Many branches at once: `ctx.map` over items and `ctx.race` between coroutines.

Both know their branches, so a run whose branches all wait can leave memory at once. Their order of events is that of the
journal, because everything a branch waits for is handed over in that order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

import msgspec

from perdure.engine.body_tasks import cancel_by_ctx
from perdure.engine.drive import Drive
from perdure.engine.keyed_calls import CtxCall
from perdure.errors import StepChanged
from perdure.result import Err, Ok

OnError = Literal["raise", "collect"]


async def run_map(
    drive: Drive, items: Sequence[Any], each: Callable[[int, Any], Awaitable[Any]], concurrency: int, on_error: OnError
) -> list[Any]:
    """`each(index, item)` for all items, at most `concurrency` at a time, results in the order of the items."""
    results: list[Any] = [None] * len(items)
    left = iter(enumerate(items))
    one = each if on_error == "raise" else _collecting(each)

    async def work() -> None:
        for index, item in left:
            results[index] = await one(index, item)

    workers: list[asyncio.Future[Any]] = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(items)))]
    try:
        await _join(drive, workers, asyncio.FIRST_EXCEPTION)
        failed = next((worker for worker in workers if _has_failed(worker)), None)
    finally:
        await _cancel(workers)
    if failed is not None:
        failed.result()  # raises
    return results


def _collecting(each: Callable[[int, Any], Awaitable[Any]]) -> Callable[[int, Any], Awaitable[Ok[Any] | Err[Any]]]:
    async def collected(index: int, item: Any) -> Ok[Any] | Err[Any]:
        try:
            return Ok(await each(index, item))
        except Exception as error:  # noqa: BLE001 - on_error="collect" gives errors as values
            return Err(error)

    return collected


async def run_race(drive: Drive, key: str, name: str, racers: Sequence[Coroutine[Any, Any, Any]]) -> Any:
    """What the first of the coroutines to end gives or raises; the others are cancelled. Which one it was is recorded."""
    try:
        await drive.calls.admitted()
        call = drive.calls.begin(key, "race")
        winner = None if call.was_cancelled else _recorded_winner(drive, key, len(racers))
    except BaseException:
        for racer in racers:
            racer.close()
        raise
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(racer) for racer in racers]
    try:
        await _join(drive, tasks if winner is None else [tasks[winner]], asyncio.FIRST_COMPLETED)
        if winner is None and (winner := _recorded_winner(drive, key, len(racers))) is not None:
            await _join(drive, [tasks[winner]], asyncio.FIRST_COMPLETED)  # cancelled in an earlier attempt, but not in this one
    except asyncio.CancelledError:
        call.free() if winner is not None else drive.calls.cancelled(call)
        await _cancel(tasks)
        raise
    try:
        with call:
            if winner is not None:
                await drive.calls.turn(call)
            else:
                winner = next(index for index, task in enumerate(tasks) if task.done())
                if not drive.calls.may_go_ahead(call):
                    await drive.calls.turn(call)  # code that has diverged must not decide it
                await _record_winner(drive, call, name, winner)
    finally:
        await _cancel(tasks)
    return tasks[winner].result()


async def _record_winner(drive: Drive, call: CtxCall, name: str, winner: int) -> None:
    now = drive.clock.now()
    payload = msgspec.json.encode(winner)
    entry = drive.recorder.append(call.key, name, kind="race", payload=payload, started_at=now, ended_at=now)
    if not drive.results.reaches_body_at_once(entry):
        await drive.calls.wait_for_delivery(call, entry)


def _recorded_winner(drive: Drive, key: str, racers: int) -> int | None:
    entry = drive.calls.winners.get(key)
    if entry is None:
        return None
    try:
        winner = msgspec.json.decode(entry.payload, type=int)
    except msgspec.MsgspecError as reason:
        drive.corrupt(f"the winner of race {key!r}", reason)
    if not 0 <= winner < racers:
        drive.misfit(StepChanged(drive.run.id, key, f"won by number {winner + 1}", f"a race between {racers}"))
    return winner


async def _join(drive: Drive, tasks: list[asyncio.Future[Any]], until: str) -> None:
    """Wait for branches of our own until enough of them have ended."""
    branches = drive.tasks
    is_branch = branches.running is not None
    branches.joining += is_branch
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=until)
    finally:
        branches.joining -= is_branch


def _has_failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _cancel(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel what has not ended, and wait until it has."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        cancel_by_ctx(task)
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report the error of a loser
