"""The worker: claims due runs, drives them, and lets go of them in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Final

from perdure.errors import LeaseLost
from perdure.result import Err
from perdure.worker.active_runs import Driving
from perdure.worker.host import POLL_SECONDS, Host

log: Final = logging.getLogger("perdure")

# How long to wait after the store failed: doubled each time, up to the second figure.
BACKOFF_SECONDS: Final = (0.1, 5.0)


class Worker:
    """Works until it is told to stop; then gives back what it has."""

    def __init__(self, host: Host, concurrency: int, queues: Collection[str] | None) -> None:
        self._host = host
        self._concurrency = concurrency
        self._queues = queues
        # Something may be due, a place is free, or it is time to stop.
        self._poke = asyncio.Event()
        self._is_stopping = False
        self._backoff = BACKOFF_SECONDS[0]
        self._drives: set[Driving] = set()

    def has_room(self) -> bool:
        """Whether one more run can be driven."""
        return not self._is_stopping and len(self._drives) < self._concurrency

    def adopt(self, driving: Driving) -> None:
        """Give this drive one of the worker's places."""
        self._drives.add(driving)
        driving.task.add_done_callback(lambda task: self._done(driving, task))

    async def work(self) -> None:
        """Claim and drive until `stop`, then drain."""
        try:
            while not self._is_stopping:
                self._poke.clear()
                watch = asyncio.ensure_future(self._watch())
                try:
                    await asyncio.sleep(0)  # the watch begins before the claim, so that nothing happens in between
                    await self._rest(await self._claim())
                finally:
                    watch.cancel()
        finally:
            await self._host.drain()

    def stop(self) -> None:
        """Claim nothing more, let running steps end, give the runs back."""
        self._is_stopping = True
        self._poke.set()

    async def _claim(self) -> int | None:
        host = self._host
        room = self._concurrency - len(self._drives)
        if room <= 0:
            return None
        try:
            claims = await host.claim(room, self._queues)
        except Exception as failure:  # noqa: BLE001 - a store of somebody else's may raise anything; the worker goes on
            if "interpreter shutdown" in str(failure):  # what Python says from 3.12 on to whoever starts a thread then
                self.stop()
            else:
                await self._store_failed(failure)
            return None
        self._backoff = BACKOFF_SECONDS[0]
        for claim in claims.claims:
            self.adopt(host.drive(host.workflows[claim.run.workflow], claim, {}, is_background=True))
        if len(claims.claims) == room:
            self._poke.set()
        return claims.next_wake_at

    async def _store_failed(self, failure: Exception) -> None:
        log.error("the store did not answer, trying again in %.1f s: %s", self._backoff, failure)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._backoff):  # not wait_for, which may lose a cancellation before Python 3.12
                await self._poke.wait()
        self._backoff = min(self._backoff * 2, BACKOFF_SECONDS[1])
        if not self._is_stopping:
            self._poke.set()

    async def _rest(self, next_wake_at: int | None) -> None:
        """Wait for a poke: by the watch, by a place that became free, or at the next wake-up."""
        timer = None if next_wake_at is None else self._host.clock.call_at(next_wake_at, self._poke.set)
        try:
            await self._poke.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _watch(self) -> None:
        try:
            await self._host.store.watch(POLL_SECONDS)
        except Exception:  # noqa: BLE001 - as above; the claim that follows reports it
            await asyncio.sleep(POLL_SECONDS)
        for driving in self._drives:
            driving.drive.look_at_inbox()
        self._poke.set()

    def _done(self, driving: Driving, task: asyncio.Task[object]) -> None:
        self._drives.discard(driving)
        self._poke.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is None and isinstance(outcome := task.result(), Err):
            log.warning("run %r failed: %r", driving.drive.run.id, outcome.error, exc_info=_exc_info(outcome.error))
        elif isinstance(error, LeaseLost):
            log.warning("%s", error)
        elif error is not None:
            log.error("run %r stopped and will be tried again: %s", driving.drive.run.id, error)


def _exc_info(error: object) -> BaseException | None:
    return error if isinstance(error, BaseException) else None
