"""The runs that this process drives: who drives each, and who waits for it.

This is the one registry of drives. A call for a run that is driven already joins that drive, which is found by event loop,
database and run id. A worker counts its drives here, and a host finds here what it has to give back when it is closed.

A drive belongs to the event loop on which it was started. A `Runtime` may be used on several (its own and that of
`runtime.sync`), so what concerns a drive of another loop is called there, through `call_threadsafe` and `wait_until_over`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, Protocol

from perdure.aio.own_tasks import own_context
from perdure.aio.store_watch import expect_change, expect_items
from perdure.engine.drive import Drive
from perdure.engine.subscriptions import DriveKey
from perdure.model.records import SUSPECT_ATTEMPTS
from perdure.result import Err, Outcome
from perdure.store import Store, require

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
        self.loop = asyncio.get_running_loop()
        self._recorded_before = drive.recorder.acknowledged_length
        self._waiters: list[asyncio.Future[Outcome[Any]]] = []
        self._is_delivered = False
        context = own_context()  # the body of another run may have caused it
        self.task = self.loop.create_task(drive.drive(), name=f"perdure-drive:{drive.run.id}", context=context)
        self.task.add_done_callback(self._end, context=context)

    @property
    def is_suspect(self) -> bool:
        """Whether the run was lost with its last workers, and has recorded nothing with this one yet."""
        drive = self.drive
        has_progressed = drive.recorder.acknowledged_length > self._recorded_before
        return drive.run.attempts > SUSPECT_ATTEMPTS and not has_progressed

    async def join(self) -> Outcome[Any]:
        """What the drive comes to. Cancelling the last call that waits for it stops the drive, and waits until it has stopped."""
        if self.task.done():
            return self._delivered(self.task.result())
        waiter: asyncio.Future[Outcome[Any]] = self.loop.create_future()
        self._waiters.append(waiter)
        try:
            return self._delivered(await waiter)
        except asyncio.CancelledError:
            if len(self._waiters) == 1 and not self.is_background and not self.task.done():
                self.task.cancel()
                await asyncio.wait([self.task])
            raise
        finally:
            self._waiters.remove(waiter)

    def _delivered(self, outcome: Outcome[Any]) -> Outcome[Any]:
        """The outcome for one more caller: each gets an error of its own."""
        if type(outcome) is not Err:
            return outcome
        is_again, self._is_delivered = self._is_delivered, True
        return self.drive.outcome_again(outcome) if is_again else outcome

    def call_threadsafe(self, callback: Callable[[], None]) -> None:
        """Call back on the loop of the drive: at once when that is the running one."""
        if self.loop is asyncio.get_running_loop():
            callback()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the drive with it
                self.loop.call_soon_threadsafe(callback)

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
        # The event loops of these drives, by their ids. Closed ones are removed when another is added.
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}
        # Weak, so that no set is ever removed by hand: another thread's event loop may be adding to it.
        self._by_owner: weakref.WeakKeyDictionary[RunOwner, set[ActiveRun]] = weakref.WeakKeyDictionary()
        # Futures of calls that wait for something to happen to a run.
        self._expecting: dict[DriveKey, set[asyncio.Future[None]]] = {}
        # Tasks that drive a run whenever it is due. The event loop itself refers to a task only weakly.
        self._keepers: set[asyncio.Task[None]] = set()

    def start(self, drive: Drive, key: DriveKey, owner: RunOwner, *, is_background: bool) -> ActiveRun:
        """Start this drive for `owner`."""
        run = self._by_key[key] = ActiveRun(drive, key, owner, is_background=is_background)
        if key[0] not in self._loops:
            self._add_loop(run.loop)
        self._by_owner.setdefault(owner, set()).add(run)
        return run

    def adopt(self, run: ActiveRun, owner: RunOwner) -> None:
        """Count this run among those of one more owner."""
        run.owners.append(owner)
        self._by_owner.setdefault(owner, set()).add(run)

    def find(self, store: Store, run_id: str) -> ActiveRun | None:
        """The drive of this run, if one is under way on this event loop."""
        return self._by_key.get(drive_key(store, run_id))

    def _add_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        for number, known in list(self._loops.items()):
            if known.is_closed():
                self._loops.pop(number, None)
        self._loops[id(loop)] = loop

    def find_all(self, store: Store, run_id: str) -> list[ActiveRun]:
        """The drives of this run on all event loops. Of those on another than the running one use only `call_threadsafe`."""
        found = (self._by_key.get((number, store.key, run_id)) for number in list(self._loops))
        return [run for run in found if run is not None]

    def of(self, owner: RunOwner) -> set[ActiveRun]:
        """What this owner drives now, on all event loops: a copy, since another loop's thread may change the original."""
        driven = self._by_owner.get(owner)
        return set() if driven is None else driven.copy()

    def count(self, owner: RunOwner) -> int:
        """How many runs this owner drives now."""
        return len(self._by_owner.get(owner, ()))

    def has_suspect(self) -> bool:
        """Whether this process drives a run that may be what ends it."""
        return any(run.is_suspect for run in list(self._by_key.values()))  # a copy: other threads have event loops too

    def remove(self, run: ActiveRun) -> None:
        """Forget a drive that is over."""
        if self._by_key.get(run.key) is run:
            del self._by_key[run.key]
        for owner in run.owners:
            self._by_owner[owner].discard(run)
        if self._expecting:
            self._resolve(run.key)

    @contextmanager
    def expect_change(self, store: Store, run_id: str, *, items: bool = False) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the store may have changed, or at once when something happened to this run here.

        With `items` also when a run may have new items.
        """
        key, change = drive_key(store, run_id), expect_items(require(store, "streams")) if items else expect_change(store)
        expecting = self._expecting.setdefault(key, set())
        expecting.add(change)
        try:
            yield change
        finally:
            change.cancel()
            expecting.discard(change)
            if not expecting and self._expecting.get(key) is expecting:
                del self._expecting[key]

    def note_change(self, store: Store, run_id: str) -> None:
        """Let the calls that wait for this run look at it."""
        self._resolve(drive_key(store, run_id))

    def _resolve(self, key: DriveKey) -> None:
        for change in self._expecting.get(key, ()):
            if not change.done():
                change.set_result(None)

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


async def wait_until_over(runs: Iterable[ActiveRun], patience: float) -> None:
    """Return when these drives are over, each waited for on its own event loop.

    A loop of another thread may be blocked, or stand still: its drives are waited for no longer than `patience` seconds.
    """
    here, elsewhere = asyncio.get_running_loop(), defaultdict[asyncio.AbstractEventLoop, list[asyncio.Task[Any]]](list)
    for run in runs:
        elsewhere[run.loop].append(run.task)
    tasks = elsewhere.pop(here, [])
    others = [future for loop, theirs in elsewhere.items() if (future := _start_to_wait(loop, theirs)) is not None]
    if tasks:
        await asyncio.wait(tasks)
    if others and (await asyncio.wait(map(asyncio.wrap_future, others), timeout=patience))[1]:
        log.warning("runs that another event loop drives were not given back in %.0f s: that loop is blocked", patience)


def _start_to_wait(loop: asyncio.AbstractEventLoop, tasks: list[asyncio.Task[Any]]) -> Future[None] | None:
    """A wait for tasks of another loop, on that loop; None when it does not run, so that nothing can end there."""

    async def wait() -> None:
        await asyncio.wait(tasks)

    waiting = wait()
    try:
        if loop.is_running():
            return asyncio.run_coroutine_threadsafe(waiting, loop)
    except RuntimeError:  # it was closed just now
        pass
    waiting.close()
    return None


def drive_key(store: Store, run_id: str) -> DriveKey:
    """How a drive is known: by event loop, database and run id."""
    return id(asyncio.get_running_loop()), store.key, run_id
