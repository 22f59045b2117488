"""Renewing leases from a thread, so that a step which blocks the event loop does not lose its run.

The process has one such thread, with its own event loop. Every third of the ttl it renews all leases on one store in one call,
and sooner when the store has changed: the reply says whether a run was cancelled. A renewal carries the keys of the steps under
way, so that an operator can see what a run does now.
A renewal that has no reply after a quarter of the ttl is not given up, since the server may only be slow; but another is sent
through a handle with connections of its own, since the connection may be silent. So a lease outlasts one silent connection,
whatever time-outs the store's own statements have.
A loop that is blocked for longer than `max_blocked` keeps its leases no more (`loop_watch`): they end, and others take over.
The holder has its own deadline, on a clock that also counts while the machine sleeps: if no renewal has succeeded by then, it
stops by itself, before another process can claim the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from perdure.aio.loop_thread import LoopThread
from perdure.aio.loop_watch import LOOK_EVERY, WatchedLoop
from perdure.body.body_queue import BodyQueue
from perdure.errors import PersistenceError
from perdure.model.clock import Clock, elapsed
from perdure.model.records import Claim, Pulse
from perdure.model.running_steps import encode_running_steps
from perdure.options import EngineSettings
from perdure.store import Store

# The fraction of the ttl that is left when the holder stops starting steps: a margin for clocks that run at different speeds.
MARGIN: Final = 0.1

# The least time between two renewals that changes of the store lead to, when there were none for a second, and at most. It is
# doubled with each: a cancel arrives soon in a store where little happens, and a busy one costs a worker two renewals a second.
NOTICE_SECONDS: Final = (0.02, 0.5)
_QUIET_SECONDS: Final = 1.0
# For how long the first lease of a heartbeat is not asked about: most runs end sooner.
_FIRST_NOTICE_SECONDS: Final = 0.1
# How long the store is watched in one call.
_WATCH_SECONDS: Final = 60.0

# How long after its thread could not be started a heartbeat tries again, at most; a tenth of a short ttl.
_RETRY_SECONDS: Final = 1.0

log: Final = logging.getLogger("perdure")
_thread: Final = LoopThread("perdure-heartbeat")


class LeasedDrive(Protocol):
    """The drive, as the heartbeat sees it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def settings(self) -> EngineSettings: ...
    @property
    def body(self) -> BodyQueue: ...
    @property
    def executing(self) -> dict[str, int]: ...
    def pulsed(self, pulse: Pulse) -> None: ...
    def lost(self) -> None: ...


class HeldLease:
    """A lease that is being renewed by its holder's clock, and the time until which it is certainly valid."""

    def __init__(
        self,
        drive: LeasedDrive,
        claim: Claim,
        ttl: float,
        asked_at: float,
    ) -> None:
        self.run = claim.run
        self.lease = claim.lease
        self.clock = drive.clock
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._max_blocked = drive.settings.max_blocked
        self._drive = drive
        self._ttl = ttl
        self._asked_at = asked_at
        self._valid_until = asked_at + ttl * (1 - MARGIN)

    def is_valid(self) -> bool:
        """Return whether no other process can have claimed the run yet, so that a step may be started."""
        return elapsed() < self._valid_until

    def running_steps(self) -> bytes | None:
        """The steps that the holder executes now, for the store. `copy` is atomic while the holder's thread changes the dict."""
        return encode_running_steps(self._drive.executing.copy())

    def is_executing(self) -> bool:
        """Return whether the holder's loop executes the code of this run just now."""
        return self._drive.body.is_pumping

    def is_blocked(self) -> bool:
        """Return whether the holder's loop has been blocked for so long that other workers are to take the run over."""
        watched = _loop_watch.loops.get(self.loop)
        return self._max_blocked is not None and watched is not None and watched.blocked_for >= self._max_blocked

    def was_asked_before(self, time: float) -> bool:
        """Return whether the last reply about this lease belongs to a request that was sent before this time."""
        return self._asked_at <= time

    def extend(self, asked_at: float, pulse: Pulse) -> bool:
        """Count the ttl from `asked_at`, when the renewal was sent: the store's own count starts no earlier.

        Returns False when the holder's event loop is closed.
        """
        self._asked_at = max(self._asked_at, asked_at)
        if self._valid_until:  # not lost meanwhile
            self._valid_until = max(self._valid_until, asked_at + self._ttl * (1 - MARGIN))
        return self._call_holder(self._drive.pulsed, pulse)

    def mark_lost(self) -> None:
        """Make the lease invalid and notify the holder: the store refused to renew it, or its deadline has passed."""
        self._valid_until = 0.0
        self._call_holder(self._drive.lost)

    def _call_holder(self, callback: Callable[..., None], *args: object) -> bool:
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the holder's loop is closed
            return False
        return True


class _Changes:
    """Tell when the leases on a store have to be asked about: at the time of their renewal, or after a change of the store.

    A renewal says whether the run was cancelled or has got a signal. So a process learns of that when its store can report a
    change, or is polled, and not only after a third of the ttl.
    """

    def __init__(self, store: Callable[[], Store | None]) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.Task[None] | None = None
        self._not_before = self._loop.time() + _FIRST_NOTICE_SECONDS
        # How old the last reply about a lease has to be for another request: the least time between two renewals.
        self.pause = NOTICE_SECONDS[0]
        # Whether there was a change that has not been asked about for all leases.
        self.is_pending = False

    async def wait(self, until: float) -> None:
        """Return at this time of the loop, or sooner after a change. The next watch has started: what comes now is not missed."""
        began = self._loop.time()
        if not self.is_pending:
            await asyncio.wait([self._watch(until)], timeout=max(0.0, until - self._loop.time()))
        is_quiet = self._loop.time() - began >= _QUIET_SECONDS
        await asyncio.sleep(max(0.0, min(until, self._not_before) - self._loop.time()))
        self.pause = NOTICE_SECONDS[0] if is_quiet else min(2 * self.pause, NOTICE_SECONDS[1])
        self._not_before = self._loop.time() + self.pause
        self._watch(until)
        await asyncio.sleep(0)

    def stop(self) -> None:
        """Watch no more."""
        watching, self._watching = self._watching, None  # the cancelled task keeps its frames, which refer to this object
        if watching is not None:
            watching.cancel()

    def _watch(self, until: float) -> asyncio.Task[None]:
        if self._watching is None or self._watching.done():
            self._watching = self._loop.create_task(self._until_changed(until), name="perdure-lease-watch")
        return self._watching

    async def _until_changed(self, until: float) -> None:
        store = self._store()
        with contextlib.suppress(Exception):  # it is closed, or a user's own store failed: then the renewal is what asks
            if store is not None:
                await store.watch(_WATCH_SECONDS)
                return
        await asyncio.sleep(max(NOTICE_SECONDS[1], until - self._loop.time()))


class Heartbeat:
    """Renews the leases on one store that are registered with it.

    It refers to the store weakly: a strong reference would keep the store, which is the weak key under which the heartbeat is
    registered, alive for ever. The holder of a lease has a strong reference to the store.
    """

    def __init__(self, store: Store, ttl: float) -> None:
        self._store = _reference(store)
        self._ttl = ttl
        self.start_over()
        _all.add(self)

    def start_over(self) -> None:
        """Hold no lease. In a forked child: the leases, and the thread that renews them, are the parent's."""
        # Guards everything below; never held during I/O.
        self._lock = threading.Lock()
        self._held: dict[str, HeldLease] = {}
        _beating.discard(self)
        # Whether the last attempt to start the thread failed, which is logged once.
        self._is_failing = False

    def hold(self, held: HeldLease) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._held[held.lease.token] = held
            must_start = self not in _beating
            _beating.add(self)
        if must_start:
            self._start()

    def _start(self) -> None:
        """Begin to beat; if the thread cannot be started, try again from the caller's event loop after a pause."""
        try:
            _loop_watch.start()
            _thread.submit(self._beat())
        except PersistenceError as failure:
            with self._lock:
                _beating.discard(self)
                is_new, self._is_failing = not self._is_failing, True
            if is_new:
                log.warning("leases are not renewed for now: %s", failure)
            asyncio.get_running_loop().call_later(min(_RETRY_SECONDS, self._ttl / 10), self._start_again)
        else:
            self._is_failing = False

    def _start_again(self) -> None:
        with self._lock:
            must_start = bool(self._held) and self not in _beating
            if must_start:
                _beating.add(self)
        if must_start:
            self._start()

    def drop(self, held: HeldLease) -> None:
        """Renew this lease no more."""
        with self._lock:
            self._held.pop(held.lease.token, None)

    def held(self) -> list[HeldLease]:
        """The leases that are renewed now."""
        with self._lock:
            return list(self._held.values())

    async def _beat(self) -> None:
        # The handle is opened at the first renewal: most runs end before their lease has to be renewed.
        store: Store | None = None
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + self._ttl / 3
        changes, blocked = _Changes(self._store), 0
        try:
            while True:
                await changes.wait(renew_at)
                with self._lock:
                    held = list(self._held.values())
                    if not held:
                        _beating.discard(self)
                        return
                blocked = _log_blocked([one for one in held if one.is_blocked()], blocked)
                held = [one for one in held if not one.is_blocked()]
                is_due = loop.time() >= renew_at
                asked = held if is_due else [one for one in held if one.was_asked_before(elapsed() - changes.pause)]
                # The change may concern a lease that is too young to be asked about: look again soon.
                changes.is_pending = len(asked) < len(held)
                renewed = [store := await self._renew(store, leases, now) for now, leases in _group_by_instant(asked).items()]
                if is_due or None in renewed:
                    renew_at = loop.time() + self._ttl / (30 if None in renewed else 3)
        except BaseException:  # the next lease lets it beat again
            with self._lock:
                _beating.discard(self)
            raise
        finally:
            changes.stop()
            await self._close(store)

    async def _renew(self, store: Store | None, held: list[HeldLease], now: int | None) -> Store | None:
        """Renew these leases, and return the handle for the next renewal; None after a failure, or without a reply in time."""
        asked_at = elapsed()
        try:
            store = store or self._open_sibling()
            leases, steps = [one.lease for one in held], [one.running_steps() for one in held]
            renewal = asyncio.ensure_future(store.renew(leases, self._ttl, running_steps=steps, now=now))
        except Exception:  # noqa: BLE001 - any failure is retried soon, until the holders' own deadlines have passed
            self._drop_expired(held)
            return None
        await asyncio.wait([renewal], timeout=self._ttl / 4)
        if renewal.done() and not renewal.cancelled() and renewal.exception() is None:
            self._take_pulses(held, renewal.result(), asked_at)
            return store
        late = asyncio.ensure_future(self._wait_for_late(store, renewal, held, asked_at))
        _late.add(late)
        late.add_done_callback(_late.discard)
        self._drop_expired(held)
        return None

    async def _wait_for_late(
        self, store: Store, renewal: asyncio.Future[list[Pulse | None]], held: list[HeldLease], asked_at: float
    ) -> None:
        """Take the reply of a renewal if it still comes, and close its handle."""
        with contextlib.suppress(Exception):
            self._take_pulses(held, await renewal, asked_at)
        await self._close(store)

    def _take_pulses(self, held: list[HeldLease], pulses: list[Pulse | None], asked_at: float) -> None:
        for one, pulse in zip(held, pulses, strict=True):
            if pulse is None:
                one.mark_lost()
            if pulse is None or not one.extend(asked_at, pulse):
                self.drop(one)

    def _drop_expired(self, held: list[HeldLease]) -> None:
        for one in held:
            if not one.is_valid():
                one.mark_lost()
                self.drop(one)

    async def _close(self, store: Store | None) -> None:
        if store is not None and store is not self._store():
            with contextlib.suppress(Exception):  # a connection that is broken anyway
                await store.close()

    def _open_sibling(self) -> Store:
        store = self._store()
        if store is None:
            raise LookupError("the store of this heartbeat was garbage-collected")
        return store.sibling()


def _log_blocked(blocked: list[HeldLease], known: int) -> int:
    """Log that these leases are not renewed, unless that is known, and return how many they are."""
    if blocked and not known:
        seconds = _loop_watch.loops[blocked[0].loop].blocked_for
        log.error("the leases of %d runs are not renewed: their event loop has been blocked for %.0f s", len(blocked), seconds)
    return len(blocked)


def _group_by_instant(held: list[HeldLease]) -> dict[int | None, list[HeldLease]]:
    """The leases by the instant that their clocks pass to the store: one group, unless a clock was moved (`sweep(now=)`)."""
    groups: dict[int | None, list[HeldLease]] = {}
    for one in held:
        groups.setdefault(one.clock.store_now(), []).append(one)
    return groups


def _reference(store: Store) -> Callable[[], Store | None]:
    try:
        return weakref.ref(store)
    except TypeError:  # a user's own class that does not support weak references
        return lambda: store


class _Heartbeats:
    """The heartbeats of this process, by store."""

    def __init__(self) -> None:
        # Held while a heartbeat is looked up or made.
        self._lock = threading.Lock()
        # By store and ttl. A heartbeat that no host has and that holds no lease is dropped.
        self._by_store: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[float, Heartbeat]]
        self._by_store = weakref.WeakKeyDictionary()

    def start_over(self) -> None:
        """In a forked child, where hosts made before the fork keep their heartbeats."""
        self._lock = threading.Lock()
        _loop_watch.start_over()
        for beat in list(_all):
            beat.start_over()

    def of(self, store: Store, ttl: float) -> Heartbeat:
        """The heartbeat of this store. It is shared: the leases of a thousand runs are renewed in one call, with one wake-up."""
        with self._lock:
            try:
                known = self._by_store.get(store)
                if known is None:
                    known = self._by_store[store] = weakref.WeakValueDictionary()
            except TypeError:  # a user's own class that is not hashable or does not support weak references
                return Heartbeat(store, ttl)
            beat = known.get(ttl)
            if beat is None:
                beat = known[ttl] = Heartbeat(store, ttl)
            return beat


class _LoopWatch:
    """Looks at the event loops that hold leases, as long as there are any."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: the loops, and the thread that looks at them, are the parent's."""
        # Guards `_is_watching`.
        self._lock = threading.Lock()
        self._is_watching = False
        self.loops: dict[asyncio.AbstractEventLoop, WatchedLoop] = {}

    def start(self) -> None:
        """Look from now on. Raises `PersistenceError` if the thread cannot be started."""
        with self._lock:
            if not self._is_watching:
                _thread.submit(self._watch())
                self._is_watching = True

    async def _watch(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY)
                with self._lock:
                    self._is_watching = bool(_beating)
                self._look()
                if not self._is_watching:
                    return
        except BaseException:  # the next lease lets it look again
            with self._lock:
                self._is_watching = False
            raise

    def _look(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[HeldLease]] = {}
        for beat in list(_beating):
            for one in beat.held():
                by_loop.setdefault(one.loop, []).append(one)
        self.loops = {loop: self.loops.get(loop) or WatchedLoop(loop) for loop in by_loop}
        for loop, held in by_loop.items():
            self.loops[loop].look(held)


def describe_blockage(loop: asyncio.AbstractEventLoop) -> str | None:
    """For how long this event loop has been blocked, and where, in words; None when it is not, or holds no lease."""
    watched = _loop_watch.loops.get(loop)
    return None if watched is None else watched.describe()


# Tasks that wait for late replies: an event loop refers to its tasks weakly.
_late: Final[set[asyncio.Future[None]]] = set()
# Those that renew leases now.
_beating: Final[set[Heartbeat]] = set()
_loop_watch: Final = _LoopWatch()
# All heartbeats, also those of stores that cannot be remembered.
_all: Final[weakref.WeakSet[Heartbeat]] = weakref.WeakSet()
_heartbeats: Final = _Heartbeats()
heartbeat_of: Final = _heartbeats.of

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_heartbeats.start_over)
