"""Keeping leases alive from a thread, so that a step which blocks the event loop does not lose its run.

One thread for the process, with an event loop of its own. Every third of their ttl it renews all leases on one store in one
call. The holder goes by its own deadline, on a clock that also counts while the machine sleeps: when no renewal succeeded in
time it stops by itself, before anybody else may start.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from perdure.aio.loop_thread import LoopThread
from perdure.model.clock import Clock, elapsed
from perdure.model.records import Lease, Pulse
from perdure.store import Store

# What is left of a lease when its holder stops starting steps: the margin for clocks that run at different speeds.
MARGIN: Final = 0.1

_thread: Final = LoopThread("perdure-heartbeat")


class HeldLease:
    """A lease that is being renewed, and how long it is ours for certain."""

    def __init__(
        self, lease: Lease, ttl: float, asked_at: float, on_pulse: Callable[[Pulse], None], on_lost: Callable[[], None]
    ) -> None:
        self.lease = lease
        self._ttl = ttl
        self._loop = asyncio.get_running_loop()
        self._on_pulse = on_pulse
        self._on_lost = on_lost
        self._ours_until = asked_at + ttl * (1 - MARGIN)

    def is_ours(self) -> bool:
        """Whether nobody else can have taken the run, so that a step may be started."""
        return elapsed() < self._ours_until

    def renewed(self, asked_at: float, pulse: Pulse) -> bool:
        """The store prolonged it, counted from when it was asked at the latest. False when nobody is left who holds it."""
        self._ours_until = asked_at + self._ttl * (1 - MARGIN)
        return self._tell(self._on_pulse, pulse)

    def lost(self) -> None:
        """The store says it is somebody else's, or time is up."""
        self._ours_until = 0.0
        self._tell(self._on_lost)

    def _tell(self, callback: Callable[..., None], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the holder's loop is closed
            return False
        return True


class Heartbeat:
    """Renews the leases on one store that are registered with it.

    It refers to the store weakly, so that all there are can be known: whoever holds a lease has the store.
    """

    def __init__(self, store: Store, ttl: float, clock: Clock) -> None:
        self._store = _reference(store)
        self._ttl = ttl
        self._clock = clock
        # Guards the two below; never held during I/O.
        self._lock = threading.Lock()
        self._held: dict[str, HeldLease] = {}
        self._is_beating = False

    def hold(self, held: HeldLease) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._held[held.lease.token] = held
            must_start, self._is_beating = not self._is_beating, True
        if must_start:
            _thread.submit(self._beat())

    def drop(self, held: HeldLease) -> None:
        """Let this lease be."""
        with self._lock:
            self._held.pop(held.lease.token, None)

    async def _beat(self) -> None:
        # Opened when first needed: most runs end before their lease has to be renewed.
        store: Store | None = None
        try:
            while True:
                await asyncio.sleep(self._ttl / 3)
                with self._lock:
                    held = list(self._held.values())
                    self._is_beating = bool(held)
                if not held:
                    return
                store = await self._renew(store, held)
        finally:
            if store is not None and store is not self._store():
                await store.close()

    async def _renew(self, store: Store | None, held: list[HeldLease]) -> Store | None:
        """Renew these leases, and give the handle that it took."""
        asked_at = elapsed()
        leases = [one.lease for one in held]
        try:
            store = store or self._sibling()
            pulses = await asyncio.wait_for(store.renew(leases, self._ttl, now=self._clock.store_now()), self._ttl / 3)
        except Exception:  # noqa: BLE001 - whatever it was, it is tried again until the holders' own deadlines have passed
            pulses = None
        for index, one in enumerate(held):
            pulse = pulses[index] if pulses is not None else None
            if pulse is not None:
                if not one.renewed(asked_at, pulse):
                    self.drop(one)
            elif pulses is not None or not one.is_ours():
                one.lost()
                self.drop(one)
        return store

    def _sibling(self) -> Store:
        store = self._store()
        if store is None:
            raise LookupError("nobody has the store any more")
        return store.sibling()


def _reference(store: Store) -> Callable[[], Store | None]:
    try:
        return weakref.ref(store)
    except TypeError:  # a class of somebody's that takes none
        return lambda: store


class _Heartbeats:
    """Those of this process, by store. A forked child has none: the thread that beats is its parent's."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        # Held while one is looked up or made.
        self._lock = threading.Lock()
        self._by_store: weakref.WeakKeyDictionary[Store, dict[tuple[float, Clock], Heartbeat]] = weakref.WeakKeyDictionary()

    def of(self, store: Store, ttl: float, clock: Clock) -> Heartbeat:
        """The one of this store: a thousand runs that are driven at once are renewed together, and wake the thread once."""
        with self._lock:
            try:
                known = self._by_store.get(store)
                if known is None:
                    known = self._by_store[store] = {}
            except TypeError:  # a class of somebody's that cannot be a key
                return Heartbeat(store, ttl, clock)
            beat = known.get((ttl, clock))
            if beat is None:
                beat = known[ttl, clock] = Heartbeat(store, ttl, clock)
            return beat


_heartbeats: Final = _Heartbeats()
heartbeat_of: Final = _heartbeats.of

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_heartbeats.start_over)
