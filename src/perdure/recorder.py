"""The way from the engine to the store, for one drive.

Entries are numbered when they are appended and sent in that order, one write at a time; what is appended while a write is under
way goes with the next, and what the last turn of the loop appended goes with `finish` or `suspend`. Nothing is reported as
done that the store did not acknowledge: whoever is about to do something that cannot be taken back awaits `acknowledged()`.
A write that fails is never retried here and never skipped: it ends the drive.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypedDict, Unpack

from perdure.answers import answered
from perdure.clock import Clock
from perdure.errors import LeaseLost, PerdureError, PersistenceError
from perdure.journal import Entry, Kind, Phase
from perdure.records import Awaited, EndStatus, Lease, Pulse, Signal
from perdure.store import Store


class EntryFields(TypedDict, total=False):
    """What the engine says about an entry; the recorder adds `seq` and `epoch`."""

    key: str
    phase: Phase
    kind: Kind
    name: str
    ok: bool
    payload: bytes
    attempt: int
    args_hash: bytes | None
    started_at: int
    ended_at: int


class Unrecorded:
    """Numbers entries and nothing else: for a run without a store, where nothing is promised."""

    def __init__(self, journal: list[Entry], epoch: int = 0) -> None:
        # Only ever appended to, so that a view of it needs no more than a length.
        self.journal = journal
        # Whether the run was finished, suspended or released, also when whoever asked for that was cancelled meanwhile.
        self.has_let_go = False
        # Inbox rows whose consumption is not acknowledged.
        self.consuming: set[int] = set()
        self._seq = journal[-1].seq if journal else 0
        self._epoch = epoch

    @property
    def acknowledged_length(self) -> int:
        """How much of the journal is recorded as far as anybody may be told."""
        return len(self.journal)

    def append(self, *, consume: int | None = None, **fields: Unpack[EntryFields]) -> Entry:
        """The next entry of the journal, on its way to the store together with the inbox row it consumes."""
        del consume
        self._seq += 1
        entry = Entry(seq=self._seq, epoch=self._epoch, **fields)
        self.journal.append(entry)
        return entry

    async def acknowledged(self) -> None:
        """Return when everything appended so far is in the store. Cancelled, not failed, when the drive ends before."""

    def take_over(self) -> None:
        """Let what is not sent yet go with the `finish`, `suspend` or `release` that follows."""

    async def finish(self, status: EndStatus, outcome: bytes) -> None:
        """Record what is left and end the run."""
        del status, outcome
        self.has_let_go = True

    async def suspend(self, wake_at: int | None, waiting_for: Collection[Awaited]) -> list[Signal]:
        """Record what is left and give up the lease; the awaited signals if there are some, and then the run goes on."""
        raise NotImplementedError("a run without a store stays in memory")

    async def release(self) -> None:
        """Record what is left and give the run back, due at once."""

    async def abandon(self) -> None:
        """Write nothing more; return when the write under way is answered."""


class Recorder(Unrecorded):
    """Numbers entries and writes them under a lease."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: Clock,
        journal: list[Entry],
        *,
        on_pulse: Callable[[Pulse], None],
        on_failure: Callable[[PerdureError], None],
        on_written: Callable[[int], None],
    ) -> None:
        super().__init__(journal, lease.epoch)
        self._store = store
        self._lease = lease
        self._clock = clock
        self._on_pulse = on_pulse
        self._on_failure = on_failure
        self._on_written = on_written
        self._loop = asyncio.get_running_loop()
        self._acknowledged_seq = self._seq
        self._entries: list[Entry] = []
        self._consume: list[int] = []
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._work: asyncio.Future[None] | None = None
        # Set when finish, suspend or stop take over what is left; the pump then writes nothing more.
        self._is_taken_over = False
        self._failure: PerdureError | None = None
        # Stays set when a write was cut off, so that nobody knows whether it took place.
        self._is_writing = False
        # Started in the turn after the first entry: what a run of one step records goes with its end, and needs none.
        self._pump: asyncio.Task[None] | None = None
        self._is_pump_due = False

    @property
    def acknowledged_length(self) -> int:
        return len(self.journal) - (self._seq - self._acknowledged_seq)

    def append(self, *, consume: int | None = None, **fields: Unpack[EntryFields]) -> Entry:
        entry = super().append(**fields)
        self._entries.append(entry)
        if consume is not None:
            self._consume.append(consume)
            self.consuming.add(consume)
        self._see_to_it()
        return entry

    def _see_to_it(self) -> None:
        """Have what is to be written written in the next turn."""
        if self._work is not None and not self._work.done():
            self._work.set_result(None)
        elif self._pump is None and not self._is_pump_due:
            self._is_pump_due = True
            # Not in the context of the body: a task started there is a branch of it.
            self._loop.call_soon(self._start_pump, context=contextvars.Context())

    def _start_pump(self) -> None:
        self._is_pump_due = False
        if self._entries and not self._is_taken_over:
            self._pump = self._loop.create_task(self._write_until_taken_over())

    async def acknowledged(self) -> None:
        if self._acknowledged_seq < self._seq or self._failure is not None:
            waiter = self._loop.create_future()
            self._waiters.append((self._seq, waiter))
            await waiter

    def take_over(self) -> None:
        self._is_taken_over = True
        if self._work is not None and not self._work.done():
            self._work.set_result(None)

    async def finish(self, status: EndStatus, outcome: bytes) -> None:
        await self._hand_over()
        entries, consume = self._take()
        await answered(
            self._attempt(
                self._store.finish(self._lease, status, outcome, entries=entries, consume=consume, now=self._clock.store_now())
            ),
            partial(self._let_go, entries),
        )
        await self._let_go(entries)

    async def suspend(self, wake_at: int | None, waiting_for: Collection[Awaited]) -> list[Signal]:
        await self._hand_over()
        entries, consume = self._take()
        signals: list[Signal] = await answered(
            self._attempt(
                self._store.suspend(
                    self._lease,
                    wake_at=wake_at,
                    waiting_for=waiting_for,
                    entries=entries,
                    consume=consume,
                    now=self._clock.store_now(),
                )
            ),
            partial(self._let_go, entries),
        )
        await self._let_go(entries, signals)
        if signals:
            self._is_taken_over = False
            self._pump = None
            self._see_to_it()
        return signals

    async def release(self) -> None:
        await self._hand_over()
        entries, consume = self._take()
        now = self._clock.store_now()
        if entries:
            await answered(self._attempt(self._store.record(self._lease, entries, consume=consume, now=now)))
            self._wrote(entries)
        await answered(self._attempt(self._store.release(self._lease, now=now)), partial(self._let_go, []))
        await self._let_go([])

    async def abandon(self) -> None:
        self.take_over()
        if self._pump is not None:
            await asyncio.wait([self._pump])

    async def _hand_over(self) -> None:
        await self.abandon()
        if self._failure is not None:
            raise self._failure
        if self._is_writing and self._pump is not None and self._pump.cancelled():
            raise PersistenceError(f"run {self._lease.run_id!r} could not be recorded", "the loop was shut down during a write")

    def _take(self) -> tuple[list[Entry], list[int]]:
        taken = self._entries, self._consume
        self._entries, self._consume = [], []
        return taken

    async def _write_until_taken_over(self) -> None:
        while not self._is_taken_over and self._failure is None:
            if not self._entries:
                self._work = self._loop.create_future()
                await self._work
                continue
            await self._write()

    async def _write(self) -> None:
        entries, consume = self._take()
        self._is_writing = True
        try:
            pulse = await self._attempt(self._store.record(self._lease, entries, consume=consume, now=self._clock.store_now()))
        except PerdureError as failure:
            self._failure = failure
            self._on_failure(failure)
            return
        self._is_writing = False
        self._on_pulse(pulse)
        self._wrote(entries)

    async def _let_go(self, entries: list[Entry], signals: list[Signal] | None = None) -> None:
        """The store has answered, whether anybody still waits for that or not: the run is free, unless signals were there."""
        self.has_let_go = not signals
        self._wrote(entries)

    def _wrote(self, entries: list[Entry]) -> None:
        if not entries:
            return
        self._acknowledged_seq = seq = entries[-1].seq
        self.consuming.intersection_update(self._consume)  # one write at a time: all but those that wait for the next
        while self._waiters and self._waiters[0][0] <= seq:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._on_written(seq)

    async def _attempt(self, write: Any) -> Any:
        try:
            return await write
        except (LeaseLost, PersistenceError):
            raise
        except Exception as error:
            raise PersistenceError(f"run {self._lease.run_id!r} could not be recorded", repr(error)) from error
