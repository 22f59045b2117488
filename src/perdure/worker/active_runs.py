"""Drives under way in this process, known by database and run id, so that two calls for one run join one drive."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from perdure.engine.drive import Drive
from perdure.engine.subscriptions import DriveKey
from perdure.result import Outcome
from perdure.store import Store


class Driving:
    """A drive under way and who waits for it. `is_background`: it goes on when nobody does."""

    def __init__(self, drive: Drive, key: DriveKey, on_over: Callable[[Driving], None], *, is_background: bool) -> None:
        self.drive = drive
        self.key = key
        self.is_background = is_background
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Outcome[Any]]] = []
        context = contextvars.copy_context()
        self.task = self._loop.create_task(drive.drive(), name=f"perdure-drive:{drive.run.id}", context=context)
        self.task.add_done_callback(self._over, context=context)
        _driving[key] = self

    async def joined(self) -> Outcome[Any]:
        """What the drive comes to. Cancelling the last of those who wait for it stops the drive, and waits until it has."""
        if self.task.done():
            return self.task.result()
        waiter: asyncio.Future[Outcome[Any]] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if len(self._waiting) == 1 and not self.is_background and not self.task.done():
                self.task.cancel()
                await asyncio.wait([self.task])
            raise
        finally:
            self._waiting.remove(waiter)

    def _over(self, task: asyncio.Task[Outcome[Any]]) -> None:
        """One callback for everybody, in this order: whoever waits may look for another drive of this run at once."""
        if _driving.get(self.key) is self:
            del _driving[self.key]
        try:
            self._on_over(self)
        finally:  # a warning that it gives may be an error here
            for waiter in self._waiting:
                _settle(waiter, task)


def _settle(waiter: asyncio.Future[Outcome[Any]], task: asyncio.Task[Outcome[Any]]) -> None:
    if waiter.done():
        return
    if task.cancelled():
        waiter.cancel()
    elif (error := task.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(task.result())


_driving: dict[DriveKey, Driving] = {}


def drive_key(store: Store, run_id: str) -> DriveKey:
    """How a drive is known: by event loop, database and run id."""
    return id(asyncio.get_running_loop()), store.key, run_id


def joinable(store: Store, run_id: str) -> Driving | None:
    """The drive of this run, if one is under way on this loop."""
    return _driving.get(drive_key(store, run_id))
