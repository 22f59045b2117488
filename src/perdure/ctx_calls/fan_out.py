"""Many branches at once: `ctx.map` over items and `ctx.race` between coroutines.

Both are ordinary asyncio code over calls, and record nothing: what a branch waits for is delivered in the order of the journal,
so a replay takes the same way. They wait for their branches in a way that the engine knows, so the run can leave memory at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Literal

import msgspec

from perdure.body.body_queue import JoinFuture
from perdure.model.records import check_positive
from perdure.result import Err, Ok

OnError = Literal["raise", "collect"]


class MapPolicy(msgspec.Struct, frozen=True):
    """The rule by which a map ends before all its items have: after so many errors, or so many successes. None: not by that.

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
    items: Sequence[Any], each: Callable[[int, Any], Awaitable[Any]], concurrency: int, policy: MapPolicy
) -> list[Any]:
    """Return what `each(index, item)` gives for all items, at most `concurrency` at a time, in the order of the items."""
    running = _MapRun(items, each, policy)
    workers = [asyncio.ensure_future(running.work()) for _ in range(min(concurrency, len(items)))]
    try:
        await join(workers, has_failed)
        failed = next((worker for worker in workers if has_failed(worker)), None)
    finally:
        await cancel_all(workers)
    if running.decision is None and failed is not None:
        failed.result()  # raises: it was cancelled, or has exited
    if running.decision is not None and not isinstance(running.decision, _Enough):
        raise running.decision
    return running.results


async def run_race(racers: Sequence[Coroutine[Any, Any, Any]], wins: int) -> list[Any]:
    """Return what the first `wins` coroutines to end gave, in that order, or raise what one of them raised; cancel the others.

    Nothing is recorded: a replay delivers the same entries in the same order, so the same coroutines end first.
    """
    tasks = [asyncio.ensure_future(racer) for racer in racers]
    ended: list[asyncio.Future[Any]] = []

    def decides(task: asyncio.Future[Any]) -> bool:
        ended.append(task)
        return len(ended) == wins or has_failed(task)

    try:
        await join(tasks, decides)
    finally:
        await cancel_all(tasks)
    return [winner.result() for winner in _up_to_a_failure(ended[:wins])]


def _up_to_a_failure(ended: Sequence[asyncio.Future[Any]]) -> Iterator[asyncio.Future[Any]]:
    for task in ended:
        yield task
        if has_failed(task):
            return


async def join(tasks: Sequence[asyncio.Future[Any]], decides: Callable[[asyncio.Future[Any]], bool] = lambda _: False) -> None:
    """Return when all of these tasks have ended, or one that decides. Nothing but the body can move a task that waits here."""
    left = len(tasks)
    over = JoinFuture(loop=asyncio.get_running_loop())

    def note_end(task: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not over.done() and (decides(task) or not left):
            over.set_result(None)

    for task in tasks:
        task.add_done_callback(note_end)
    try:
        if tasks:
            await over
    finally:
        for task in tasks:
            task.remove_done_callback(note_end)


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Return whether the task has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what has not ended, and wait until it has."""
    pending = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
        task.add_done_callback(_retrieve)
    await join(pending)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take the error of a loser, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
