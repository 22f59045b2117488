"""The runs that this process drives: who drives each, and who waits for it.

This is the one registry of drives. A call for a run that is driven already joins that drive, which is found by event loop,
database and run id. A worker counts its drives here, and a host finds here what it has to give back when it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, Final, Protocol

from perdure.aio.own_tasks import own_context
from perdure.engine.drive import Drive
from perdure.engine.subscriptions import DriveKey
from perdure.result import Outcome
from perdure.store import Store

log: Final = logging.getLogger("perdure")


class RunOwner(Protocol):
    """Who drives a run: the host that leased it, and the worker whose limit it counts against."""

    def on_drive_over(self, run: ActiveRun, /) -> None:
        """Called when the drive is over, before those who wait for it go on."""
        ...


class ActiveRun:
    """A run that is being driven, and the calls that wait for it. `is_background`: it goes on when no call waits."""

    def __init__(self, drive: Drive, key: DriveKey, owner: RunOwner, *, is_background: bool) -> None:
        self.drive = drive
        self.key = key
        self.owners = [owner]
        self.is_background = is_background
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[Outcome[Any]]] = []
        context = own_context()  # the body of another run may have caused it
        self.task = self._loop.create_task(drive.drive(), name=f"perdure-drive:{drive.run.id}", context=context)
        self.task.add_done_callback(self._end, context=context)

    async def join(self) -> Outcome[Any]:
        """What the drive comes to. Cancelling the last call that waits for it stops the drive, and waits until it has stopped."""
        if self.task.done():
            return self.task.result()
        waiter: asyncio.Future[Outcome[Any]] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if len(self._waiters) == 1 and not self.is_background and not self.task.done():
                self.task.cancel()
                await asyncio.wait([self.task])
            raise
        finally:
            self._waiters.remove(waiter)

    def _end(self, task: asyncio.Task[Outcome[Any]]) -> None:
        """One callback, in this order: a waiter may look for another drive of this run at once."""
        active_runs.remove(self)
        try:
            # The host comes last: it may warn, and a warning may be an error here.
            for owner in reversed(self.owners):
                owner.on_drive_over(self)
        finally:
            for waiter in self._waiters:
                if waiter.done():  # cancelled
                    continue
                if task.cancelled():
                    waiter.cancel()
                elif (error := task.exception()) is not None:
                    waiter.set_exception(error)
                else:
                    waiter.set_result(task.result())


class ActiveRuns:
    """The drives of this process, on all its event loops."""

    def __init__(self) -> None:
        # The newest drive of each run: one that has lost its lease may still be ending.
        self._by_key: dict[DriveKey, ActiveRun] = {}
        # Weak, so that no set is ever removed by hand: another thread's event loop may be adding to it.
        self._by_owner: weakref.WeakKeyDictionary[RunOwner, set[ActiveRun]] = weakref.WeakKeyDictionary()
        # Tasks that drive a run whenever it is due. The event loop itself refers to a task only weakly.
        self._keepers: set[asyncio.Task[None]] = set()

    def start(self, drive: Drive, key: DriveKey, owner: RunOwner, *, is_background: bool) -> ActiveRun:
        """Start this drive for `owner`."""
        run = self._by_key[key] = ActiveRun(drive, key, owner, is_background=is_background)
        self._by_owner.setdefault(owner, set()).add(run)
        return run

    def adopt(self, run: ActiveRun, owner: RunOwner) -> None:
        """Count this run among those of one more owner."""
        run.owners.append(owner)
        self._by_owner.setdefault(owner, set()).add(run)

    def find(self, store: Store, run_id: str) -> ActiveRun | None:
        """The drive of this run, if one is under way on this event loop."""
        return self._by_key.get(drive_key(store, run_id))

    def of(self, owner: RunOwner) -> AbstractSet[ActiveRun]:
        """What this owner drives now."""
        return self._by_owner.get(owner, frozenset())

    def remove(self, run: ActiveRun) -> None:
        """Forget a drive that is over."""
        if self._by_key.get(run.key) is run:
            del self._by_key[run.key]
        for owner in run.owners:
            self._by_owner[owner].discard(run)

    def keep_driving(self, run_id: str, drive_whenever_due: Coroutine[Any, Any, None]) -> None:
        """Keep this coroutine running in the background until it returns: nothing else refers to its task."""
        task = asyncio.get_running_loop().create_task(drive_whenever_due, name=f"perdure-run:{run_id}", context=own_context())
        self._keepers.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._keepers.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("run %r is no longer driven here: %s", run_id, error)

        task.add_done_callback(end)


active_runs: Final = ActiveRuns()


def drive_key(store: Store, run_id: str) -> DriveKey:
    """How a drive is known: by event loop, database and run id."""
    return id(asyncio.get_running_loop()), store.key, run_id
