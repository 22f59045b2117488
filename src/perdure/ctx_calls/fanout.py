"""Many branches at once: `ctx.map` over items and `ctx.race` between coroutines.

Both know their branches, so a run whose branches all wait can leave memory at once. Their order of events is that of the
journal, because everything a branch waits for is handed over in that order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from perdure.engine.body_tasks import cancel_by_ctx
from perdure.engine.drive import Drive
from perdure.engine.keyed_calls import CtxCall
from perdure.errors import StepChanged
from perdure.model.records import check_positive
from perdure.result import Err, Ok

OnError = Literal["raise", "collect"]


class MapPolicy(msgspec.Struct, frozen=True):
    """When a map ends before all its items have: after so many errors, or so many successes. None: not by that.

    It decides as soon as an item's result reaches the body. That happens in the order of the journal, so a replay decides alike.
    """

    collects: bool
    most_failures: int | None
    enough: int | None = None

    @classmethod
    def of(cls, items: int, on_error: OnError, max_failures: int | None, enough: int | None) -> MapPolicy:
        """The policy that these options of `ctx.map` ask for."""
        if on_error not in ("raise", "collect"):
            raise ValueError(f'on_error is "raise" or "collect", not {on_error!r}')
        given = [name for name, value in (("max_failures", max_failures), ("enough", enough)) if value is not None]
        if len(given) > 1 or (given and on_error == "collect"):
            raise TypeError(
                f"{given[0]}= says which errors are tolerated; pass it without {given[-1] if len(given) > 1 else 'on_error'}="
            )
        if enough is not None:
            if check_positive(enough, "enough") > items:
                raise ValueError(f"enough={enough} of {items} items cannot succeed")
            return cls(True, items - enough, enough)
        if max_failures is not None:
            if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
                raise ValueError(f"max_failures is a whole number of at least 0, not {max_failures!r}")
            return cls(True, max_failures)
        return cls(on_error == "collect", None if on_error == "collect" else 0)


class _Enough(Exception):
    """So many items have succeeded that the rest need not."""


class _MapRun:
    """One `ctx.map` at work."""

    def __init__(self, items: Sequence[Any], each: Callable[[int, Any], Awaitable[Any]], policy: MapPolicy) -> None:
        self._left = iter(enumerate(items))
        self._each = each
        self._policy = policy
        self.results: list[Any] = [None] * len(items)
        self._failures = self._successes = 0
        # What ended the map before all its items had ended: the error to raise, or `_Enough`. Later results do not count.
        self.decision: Exception | None = None

    async def work(self) -> None:
        """Take items and run them, until none is left; raises what decides the map."""
        for index, item in self._left:
            try:
                result: Ok[Any] | Err[Any] = Ok(await self._each(index, item))
            except Exception as error:  # noqa: BLE001 - counted, and raised by the map
                result = Err(error)
            if self.decision is None:
                self.decision = self._take(index, result)
            if self.decision is not None:
                raise self.decision

    def _take(self, index: int, result: Ok[Any] | Err[Any]) -> Exception | None:
        """Keep the result of an item; what decides the map, if this does."""
        policy = self._policy
        if isinstance(result, Ok):
            self._successes += 1
            self.results[index] = result if policy.collects else result.value
            return _Enough() if self._successes == policy.enough else None
        self._failures += 1
        self.results[index] = result
        is_tolerated = policy.most_failures is None or self._failures <= policy.most_failures
        error: Exception = result.error
        return None if is_tolerated else error


async def run_map(
    drive: Drive, items: Sequence[Any], each: Callable[[int, Any], Awaitable[Any]], concurrency: int, policy: MapPolicy
) -> list[Any]:
    """`each(index, item)` for all items, at most `concurrency` at a time, results in the order of the items."""
    running = _MapRun(items, each, policy)
    workers: list[asyncio.Future[Any]] = [asyncio.ensure_future(running.work()) for _ in range(min(concurrency, len(items)))]
    try:
        await join(drive, workers, asyncio.FIRST_EXCEPTION)
        failed = next((worker for worker in workers if _has_failed(worker)), None)
    finally:
        await _cancel(workers)
    if running.decision is None and failed is not None:
        failed.result()  # raises: it was cancelled, or has exited
    if running.decision is not None and not isinstance(running.decision, _Enough):
        raise running.decision
    return running.results


async def run_race(drive: Drive, key: str, name: str, racers: Sequence[Coroutine[Any, Any, Any]], wins: int) -> list[Any]:
    """What the first `wins` coroutines to end gave, in that order, or what one of them raised; the others are cancelled.

    Which ones they were is recorded.
    """
    try:
        await drive.calls.admitted()
        call = drive.calls.begin(key, "race")
        winners = None if call.was_cancelled else _recorded_winners(drive, key, len(racers))
    except BaseException:
        for racer in racers:
            racer.close()
        raise
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(racer) for racer in racers]
    finish = _Finish(tasks, wins)
    try:
        await _join_winners(drive, tasks, finish, winners)
        if winners is None and (winners := _recorded_winners(drive, key, len(racers))) is not None:
            await _join_winners(drive, tasks, finish, winners)  # cancelled in an earlier attempt, but not in this one
    except asyncio.CancelledError:
        call.free() if winners is not None else drive.calls.cancelled(call)
        await _cancel(tasks)
        raise
    try:
        with call:
            if winners is not None:
                await drive.calls.turn(call)
            else:
                winners = finish.winners()
                if not drive.calls.may_go_ahead(call):
                    await drive.calls.turn(call)  # code that has diverged must not decide it
                await _record_winners(drive, call, name, winners)
    finally:
        await _cancel(tasks)
    return [tasks[winner].result() for winner in winners]


class _Finish:
    """The order in which the coroutines of a race end. An error ends the race, however many may win."""

    def __init__(self, tasks: list[asyncio.Future[Any]], wins: int) -> None:
        self._tasks = tasks
        self._wins = wins
        self._ended: list[int] = []
        for index, task in enumerate(tasks):
            task.add_done_callback(partial(self._note_end, index))

    def _note_end(self, index: int, _: object) -> None:
        self._ended.append(index)

    def is_decided(self) -> bool:
        """Whether enough of them have ended, or one of them has failed."""
        return sum(task.done() for task in self._tasks) >= self._wins or any(map(_has_failed, self._tasks))

    def winners(self) -> list[int]:
        """The first ones, up to and with an error. Of those that ended in one turn of the loop the first counts first."""
        unseen = [index for index, task in enumerate(self._tasks) if task.done() and index not in self._ended]
        winners: list[int] = []
        for index in (*self._ended, *unseen):
            winners.append(index)
            if len(winners) == self._wins or _has_failed(self._tasks[index]):
                break
        return winners


async def _join_winners(drive: Drive, tasks: list[asyncio.Future[Any]], finish: _Finish, winners: list[int] | None) -> None:
    """Return when the recorded winners have ended; without a record, when the race is decided."""
    if winners is not None:
        await join(drive, [tasks[winner] for winner in winners], asyncio.ALL_COMPLETED)
        return
    while not finish.is_decided():
        await join(drive, [task for task in tasks if not task.done()], asyncio.FIRST_COMPLETED)


async def _record_winners(drive: Drive, call: CtxCall, name: str, winners: list[int]) -> None:
    now = drive.clock.now()
    payload = msgspec.json.encode(winners[0] if len(winners) == 1 else winners)
    entry = drive.recorder.append(call.key, name, kind="race", payload=payload, started_at=now, ended_at=now)
    if not drive.results.reaches_body_at_once(entry):
        await drive.calls.wait_for_delivery(call, entry)


def _recorded_winners(drive: Drive, key: str, racers: int) -> list[int] | None:
    entry = drive.calls.winners.get(key)
    if entry is None:
        return None
    try:
        recorded = msgspec.json.decode(entry.payload, type=int | list[int])
    except msgspec.MsgspecError as reason:
        drive.corrupt(f"the winner of race {key!r}", reason)
    winners = [recorded] if isinstance(recorded, int) else recorded
    if not winners or any(not 0 <= winner < racers for winner in winners):
        drive.misfit(StepChanged(drive.run.id, key, f"won by number {max(winners, default=0) + 1}", f"a race between {racers}"))
    return winners


async def join(drive: Drive, tasks: Sequence[asyncio.Future[Any]], until: str) -> None:
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
