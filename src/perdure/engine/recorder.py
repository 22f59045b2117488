"""Writing what a run records to the store, for one drive.

Entries are numbered when they are appended and sent in that order, one write at a time; what is appended while a write is in
flight goes with the next. A result is sent at once, or, where other branches may have one too, in the next turn of the loop, so
that results which are ready together share a commit. Open entries go with the next write, with `suspend` or `finish`, or at the
latest when the body rests; waits that were given up only before something else. Items of streams go with every write, or alone:
none comes after an entry that was appended later (`Streams`). The drive is told what the store has acknowledged.
A write that fails is never retried here and never skipped: it ends the drive. There is one exception: when the store says that it
can never hold a value, the longest result of the write becomes its step's recorded failure. The same write would fail for ever.

The entry of a transactional step (`commit`) is written by that step's own database transaction, in its turn:
- From before the transaction begins until its reply, no other write of the run is in flight. Such a write could wait for a lock
  that the transaction holds, while the transaction waits for the write. Entries that are appended meanwhile wait.
- The entry is numbered when the step's function has returned. Everything that was appended before it goes into the same
  transaction, everything after it is sent after the reply. So the journal has neither a gap nor another order.
- If the transaction is rolled back, its number is used all the same: an entry that says what became of the step takes its place
  (`RolledBack`), and an ordinary write sends it with the others. If its reply is lost, the drive ends, as after every write.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import msgspec

from perdure.aio.own_tasks import start_own_task
from perdure.aio.pending_write import PendingWrite, await_reply, in_flight, is_committed, is_unknown, wait_for_reply
from perdure.codec.outcomes import note_step, store_exception
from perdure.engine.timers_and_signals import nothing
from perdure.errors import LeaseLost, PerdureError, PersistenceError, StoreCapabilityError, ValueNotStorable, name_step
from perdure.model.clock import Clock
from perdure.model.journal import Entry, Kind, Phase
from perdure.model.records import Awaited, EndStatus, Item, Lease, NewInput, Pulse, Signal
from perdure.store import Store, Transaction, require

T = TypeVar("T")

# A result of no more bytes is refused for another reason than its length, as the failure in its place would be.
_SHORT: Final = 4000


class RolledBack(Exception):
    """A transaction was rolled back after its entry was numbered; `instead` is the entry in its place."""

    def __init__(self, instead: Entry) -> None:
        super().__init__(instead)
        self.instead = instead


# Writes these entries and items and consumes these inbox rows, in a transaction. Raises `RolledBack` if nothing was written.
Commit: TypeAlias = Callable[[Entry, Sequence[Entry], Sequence[int], Sequence[Item]], Coroutine[Any, Any, Pulse]]


class RecordingDrive(Protocol):
    """The drive, as its recorder sees it."""

    @property
    def clock(self) -> Clock: ...
    def pulsed(self, pulse: Pulse) -> None: ...
    def fail(self, failure: BaseException) -> None: ...
    def acknowledged(self, seq: int) -> None: ...
    def replaced(self, entry: Entry) -> None: ...


class Recorder:
    """Numbers entries, and writes them under a lease. Without a store it only numbers them: nothing is promised."""

    def __init__(self, drive: RecordingDrive, store: Store | None, lease: Lease, journal: list[Entry]) -> None:
        self._drive: RecordingDrive | None = drive
        self._optional_store = store
        self.has_store = store is not None
        self._lease = lease
        self._clock = drive.clock
        self._loop = asyncio.get_running_loop()
        # Only appended to, so a view of it is a length.
        self.journal = journal
        # Whether the run was finished, suspended or released, also when the task that asked for it was cancelled meanwhile.
        self.has_let_go = False
        # The last open entry that the store has not acknowledged, or 0. No step starts before it is acknowledged.
        self.unacknowledged_open = 0
        # Inbox rows whose consumption is not acknowledged.
        self.consuming: set[int] = set()
        # Items of streams that go with the next write, and what is told of those that the store has acknowledged.
        self.items: list[Item] = []
        self.on_items_written: Callable[[list[Item]], None] = nothing
        # Not the body's context: a task that is created there is a task of the body.
        self._context = contextvars.Context()
        self._next_seq = journal[-1].seq + 1 if journal else 1
        self._acknowledged_seq = self._reported_seq = self._last_to_send = self._next_seq - 1
        self._entries: list[Entry] = []
        self._consume: list[int] = []
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        # The write in flight, and what it writes.
        self._writing: PendingWrite[Pulse] | asyncio.Future[Pulse] | None = None
        self._written: tuple[list[Entry], list[int], list[Item]]
        self._is_write_due = False
        # Whether the items that are there are to be sent as soon as the write in flight has its reply.
        self._are_items_due = False
        # Whether `finish`, `suspend` or `release` takes what is left, so nothing more is sent by `flush`.
        self._is_closing = False
        self._failure: PerdureError | None = None
        # Whether a transactional step keeps the other writes back, and those that wait to do so.
        self._is_held = False
        self._holders: deque[asyncio.Future[None]] = deque()
        # Of the entry that is appended now, and of the write in flight, if that is a transaction.
        self._commit: Commit | None = None

    @property
    def _store(self) -> Store:
        if self._optional_store is None:
            raise RuntimeError(f"run {self._lease.run_id!r} has no store")
        return self._optional_store

    def append(
        self,
        key: str,
        name: str,
        *,
        kind: Kind = "step",
        phase: Phase = "close",
        ok: bool = True,
        payload: bytes = b"null",
        attempt: int = 1,
        args_hash: bytes | None = None,
        started_at: int,
        ended_at: int,
        consume: int | None = None,
    ) -> Entry:
        """Add the next entry to the journal. It goes to the store with the next write, with the inbox row that it consumes."""
        entry = Entry(
            seq=self._next_seq,
            key=key,
            phase=phase,
            kind=kind,
            name=name,
            ok=ok,
            payload=payload,
            attempt=attempt,
            args_hash=args_hash,
            started_at=started_at,
            ended_at=ended_at,
            epoch=self._lease.epoch,
        )
        self._next_seq += 1
        self.journal.append(entry)
        if self.has_store:
            self._entries.append(entry)
            if consume is not None:
                self.consume(consume)
            self._note_appended(entry)
        return entry

    def _note_appended(self, entry: Entry) -> None:
        if entry.phase == "cancel" and entry.kind not in ("step", "child"):
            return  # that a wait was given up goes before something else
        self._last_to_send = entry.seq
        if self._commit is not None:
            self._write_in_transaction(entry, self._commit)
        elif entry.phase == "open":
            self.unacknowledged_open = entry.seq

    def flush_soon(self, *, is_alone: bool) -> None:
        """Send what was appended: now, or if other steps run that may end too, in the next turn of the loop."""
        if not self.has_store:
            return
        if is_alone:
            self.flush()
        elif self._writing is None and not self._is_write_due and not self._is_held:
            self._is_write_due = True
            next_turn_of(self._loop).call(self._loop, self.flush)

    @property
    def acknowledged_length(self) -> int:
        """Return how many entries of the journal may be shown as recorded."""
        if not self.has_store:
            return len(self.journal)
        return len(self.journal) - (self._next_seq - 1 - self._acknowledged_seq)

    def consume(self, seq: int) -> None:
        """Consume an inbox row together with the next entry."""
        self._consume.append(seq)
        self.consuming.add(seq)

    async def acknowledged(self) -> None:
        """Return when all that was appended, but waits that were given up, is in the store. Cancelled when the drive ends."""
        if self._acknowledged_seq < self._last_to_send:
            self.flush()
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((self._last_to_send, waiter))
            await waiter

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Begin a transaction of the store under the lease. Raises `StoreCapabilityError`."""
        if not self.has_store:
            what = "transactions: give the run a store that has them (SQLite, PostgreSQL, MySQL)"
            raise StoreCapabilityError("missing", what)
        return require(self._store, "transaction").transaction(self._lease)

    async def hold(self) -> None:
        """Return when no write is in flight. None starts then until `let_go_on`, or the reply to `commit`."""
        if self._writing is None and not self._is_held:
            self._is_held = True
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._holders.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.let_go_on()
            raise

    def let_go_on(self) -> None:
        """Write again, after a transaction that was not committed."""
        self._is_held = False
        self._start_next()

    def _start_next(self) -> None:
        """Let the next transaction begin, if one waits, and otherwise write what was appended meanwhile."""
        if self._writing is not None:
            return  # the body went on when it was told of the last write, and has had another one sent
        while self._holders and self._holders[0].cancelled():  # its transaction was cancelled before it had its turn
            self._holders.popleft()
        if self._holders and not self._is_held:
            self._is_held = True
            self._holders.popleft().set_result(None)
        elif self._entries or self._are_items_due:
            self.flush()

    def commit(self, commit: Commit, key: str, name: str, **fields: Any) -> Entry:
        """As `append`, for an entry that this function writes in its transaction, together with all that was appended before."""
        self._commit = commit
        try:
            return self.append(key, name, **fields)
        finally:
            self._commit = None

    def _write_in_transaction(self, entry: Entry, commit: Commit) -> None:
        entries, consume = self._take()
        items, self.items, self._are_items_due = self.items, [], False
        self._written = entries, consume, items
        # A task of our own: cancelling the step that waits for it takes effect only after the reply.
        self._writing = writing = self._context.run(start_own_task, commit(entry, tuple(entries), tuple(consume), tuple(items)))
        writing.add_done_callback(self._take_reply, context=contextvars.Context())

    async def finish(self, status: EndStatus, outcome: bytes) -> None:
        """Record what is left and end the run."""
        if not self.has_store:
            self.has_let_go = True
            return
        entries, consume = await self._what_is_left()
        now = self._clock.store_now()
        while True:
            ending = self._store.finish(self._lease, status, outcome, entries=entries, consume=consume, now=now)
            try:
                await self._await_reply(ending, lambda _: self._let_go(entries))
            except ValueNotStorable as refusal:
                if not self._replace_longest(entries, refusal, longer_than=len(outcome)):
                    self._entries, self._consume = entries, consume  # for an end with another outcome
                    raise
            else:
                return

    async def continue_as(self, new: NewInput) -> None:
        """Let the run start over with this input. Drop entries that are not recorded yet: the new start has no use for them."""
        if not self.has_store:
            self._leave_behind()
            return
        await self._what_is_left()
        continuing = self._store.continue_as(self._lease, new, now=self._clock.store_now())
        await self._await_reply(continuing, lambda _: self._leave_behind())

    def _leave_behind(self) -> None:
        self.has_let_go = True
        self.journal, self._next_seq = [], 1  # another list: views of the old journal refer to that one
        self._acknowledged_seq = self._reported_seq = self._last_to_send = 0

    async def suspend(self, wake_at: int | None, waiting_for: Collection[Awaited]) -> list[Signal]:
        """Record what is left and give up the lease, after `pause`. Return the awaited signals if there are some instead."""
        entries, consume = self._take()
        now = self._clock.store_now()
        suspending = self._store.suspend(
            self._lease, wake_at=wake_at, waiting_for=waiting_for, entries=entries, consume=consume, now=now
        )
        return await self._await_reply(suspending, lambda signals: self._let_go(entries, signals))

    async def record_rest(self) -> None:
        """Record what is left. The run is not given back: its lease ends by itself."""
        entries, consume = await self._what_is_left()
        if entries:
            await self._record_rest(entries, consume)
            self.report_written()

    async def release(self, wake_at: int | None = None) -> None:
        """Record what is left and give the run back, due at this instant or at once."""
        if not self.has_store:
            return
        await self.record_rest()
        released = self._store.release(self._lease, wake_at=wake_at, now=self._clock.store_now())
        await self._await_reply(released, lambda _: self._let_go([]))

    async def _record_rest(self, entries: list[Entry], consume: list[int]) -> None:
        now = self._clock.store_now()
        while True:
            recording = self._store.record(self._lease, entries, consume=consume, now=now)
            try:
                await self._await_reply(recording, lambda _: self._wrote(entries))
            except ValueNotStorable as refusal:
                if not self._replace_longest(entries, refusal):
                    raise
            else:
                return

    def report_written(self) -> None:
        """Tell the drive what went with `finish` or `suspend`, now that it knows how the run stands."""
        if self._reported_seq < self._acknowledged_seq:
            self._reported_seq = self._acknowledged_seq
            if self._drive is not None:
                self._drive.acknowledged(self._reported_seq)

    async def abandon(self) -> None:
        """Write nothing more; return when the write in flight has its reply."""
        self._is_closing = True
        writing = self._writing
        if writing is not None:
            await wait_for_reply(writing)
            self._take_reply(writing)

    def forget_owner(self) -> None:
        """Drop the references to the drive, so that it is freed without the garbage collector."""
        self._drive = None
        self.on_items_written = nothing

    async def _what_is_left(self) -> tuple[list[Entry], list[int]]:
        """The entries and inbox rows that go with the last write of the drive, once `pause` has returned."""
        await self.pause()
        return self._take()

    async def pause(self) -> None:
        """Return when the write in flight has its reply, and items are in the store. Nothing is written then until `resume`."""
        self._is_closing = True
        if self._writing is not None:
            await self.abandon()
        if self._failure is not None:
            raise self._failure
        if self.items:
            await self._record_items()

    def resume(self) -> None:
        """Write again, since the run stays in memory."""
        self._is_closing = False
        self.flush()

    async def _record_items(self) -> None:
        items, self.items = self.items, []
        now = self._clock.store_now()
        recording = require(self._store, "streams").record(self._lease, items=items, now=now)
        await self._await_reply(recording, lambda _: self.on_items_written(items))

    def _take(self) -> tuple[list[Entry], list[int]]:
        taken = self._entries, self._consume
        self._entries, self._consume = [], []
        return taken

    def flush(self) -> None:
        """Write what there is, unless a write is in flight: then what there is goes with the next.

        Waits that were given up last stay: they go before something else.
        """
        self._is_write_due = False
        count = self._last_to_send - self._entries[0].seq + 1 if self._entries else 0
        is_free = self._writing is None and not self._is_held
        if (count > 0 or self._are_items_due) and is_free and not self._is_closing and self._failure is None:
            rest = self._entries[count:] if count > 0 else self._entries[:]
            entries, consume = self._take()
            if rest:
                del entries[max(count, 0) :]
                self._entries = rest
            items, self.items, self._are_items_due = self.items, [], False
            self._written = entries, consume, items
            record, now = self._store.record, self._clock.store_now()
            if items:
                record = partial(require(self._store, "streams").record, items=items)
            try:
                write = self._context.run(record, self._lease, entries, consume=consume, now=now)
            except Exception as error:  # noqa: BLE001 - it ends the drive as a failed reply does, not the code that has appended
                write = self._loop.create_future()
                write.set_exception(error)
            if isinstance(write, PendingWrite) and not write.done():
                self._writing = write
                write.on_resolved = self._take_reply
            else:
                self._writing = writing = self._context.run(asyncio.ensure_future, write)
                writing.add_done_callback(self._take_reply, context=contextvars.Context())

    def _take_reply(self, writing: PendingWrite[Pulse] | asyncio.Future[Pulse]) -> None:
        """Take the reply. Called by the write itself, and before that perhaps by `abandon`, which has waited for it."""
        if writing is not self._writing:
            return
        self._writing = None
        entries, consume, items = self._written
        if self._is_held:
            self._take_reply_of_transaction(writing)
        elif is_unknown(writing):
            # The loop is being shut down. Whether it was committed is unknown, but sent twice it is recorded once.
            self._put_back(entries, consume, items)
        elif isinstance(error := writing.exception(), ValueNotStorable) and self._replace_longest(entries, error):
            self._put_back(entries, consume, items)
            self.flush()
        elif error is not None:
            self._fail(error)
        else:
            self._take_acknowledgement(writing.result(), entries, items)

    def _take_reply_of_transaction(self, writing: PendingWrite[Pulse] | asyncio.Future[Pulse]) -> None:
        """Take the reply, and let others write. The same is not sent again: the step's own writes would be missing."""
        self._is_held = False
        entries, consume, items = self._written
        error = PersistenceError("a transaction", "it was cut off") if is_unknown(writing) else writing.exception()
        if isinstance(error, RolledBack):
            self._put_in_place(entries, entries[-1], error.instead)
            self._put_back(entries, consume, items)
            self._start_next()
        elif error is not None:
            self._fail(error)
        else:
            self._take_acknowledgement(writing.result(), entries, items)

    def _fail(self, error: BaseException) -> None:
        self._failure = failure = self._as_failure(error)
        if self._drive is not None:
            self._drive.fail(failure)

    def _take_acknowledgement(self, pulse: Pulse, entries: list[Entry], items: list[Item]) -> None:
        """The store has these entries and items: report them, and write what was appended meanwhile."""
        if self._drive is not None:
            self._drive.pulsed(pulse)
        self._wrote(entries)
        if items:
            self.on_items_written(items)
        # The body resumes now; its entries are sent when it rests.
        is_more_to_write = self._entries or self._holders or self._are_items_due
        self.report_written()
        if is_more_to_write:
            self._start_next()

    def _put_back(self, entries: list[Entry], consume: list[int], items: list[Item]) -> None:
        """Let this go with the next write, before what has come since."""
        self._entries, self._consume, self.items = entries + self._entries, consume + self._consume, items + self.items

    def flush_items(self) -> None:
        """Send items, and what was appended and not sent; soon after the write in flight, if there is one."""
        self._are_items_due = bool(self.items)
        self.flush()

    def _replace_longest(self, entries: list[Entry], refusal: ValueNotStorable, *, longer_than: int = 0) -> bool:
        """Put a recorded failure in the place of the longest result of these, and of its step.

        False, and nothing changes, when there is none that is longer than this, or it is such a failure already.
        """
        results = [entry for entry in entries if entry.kind in ("step", "child") and entry.phase == "close"]
        longest = max(results, key=lambda entry: len(entry.payload), default=None)
        if longest is None or len(longest.payload) <= max(longer_than, _SHORT):
            return False
        error = ValueNotStorable("value", f"it has {len(longest.payload):,} bytes ({refusal.reason})")
        error.add_note(f"{name_step(longest.key)} ran, but what it returned cannot be recorded")
        note_step(error, longest.key, self._lease.run_id)
        failed = msgspec.structs.replace(longest, ok=False, payload=store_exception(error))
        self._put_in_place(entries, longest, failed)
        return True

    def _put_in_place(self, entries: list[Entry], entry: Entry, instead: Entry) -> None:
        entries[entries.index(entry)] = self.journal[self.journal.index(entry)] = instead
        if instead.phase == "open":
            self.unacknowledged_open = max(self.unacknowledged_open, instead.seq)
        if self._drive is not None:
            self._drive.replaced(instead)

    def _as_failure(self, error: BaseException) -> PerdureError:
        if isinstance(error, LeaseLost | PersistenceError | ValueNotStorable):
            return error
        failure = PersistenceError(f"run {self._lease.run_id!r} could not be recorded", repr(error))
        failure.__cause__ = error
        return failure

    def _let_go(self, entries: list[Entry], signals: list[Signal] | None = None) -> None:
        """The reply has arrived, also if its waiter was cancelled: the run is released, unless signals were waiting."""
        self.has_let_go = not signals
        self._wrote(entries)

    def _wrote(self, entries: list[Entry]) -> None:
        if not entries:
            return
        self._acknowledged_seq = seq = entries[-1].seq
        if self.unacknowledged_open <= seq:
            self.unacknowledged_open = 0
        self.consuming.intersection_update(self._consume)  # one write at a time: all but those that wait for the next
        if self._waiters:
            self._wake(seq)

    def _wake(self, seq: int) -> None:
        """Wake the waiters for entries up to `seq`. They are sorted by seq."""
        woken = [waiter for awaited, waiter in self._waiters if awaited <= seq]
        del self._waiters[: len(woken)]
        for waiter in woken:
            if not waiter.done():
                waiter.set_result(None)

    async def _await_reply(self, verb: Awaitable[T], then: Callable[[T], None]) -> T:
        """The reply to the verb, after `then` was called with it, also when the waiter was cancelled meanwhile."""
        write = in_flight(verb)
        try:
            return await await_reply(write)
        except Exception as error:
            failure = self._as_failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            if is_committed(write):
                then(write.result())


class NextTurn:
    """The callbacks that one loop calls at its next turn, in the order in which they came. None of them may raise.

    It does not refer to its loop, which is its key in a weak dictionary: a value that refers to its key is never freed.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        # Not the context of the first caller: the others belong to other runs.
        self._context = contextvars.Context()

    def call(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call this at the next turn of the loop."""
        if not self._callbacks:
            loop.call_soon(self._call_all, context=self._context)
        self._callbacks.append(callback)

    def _call_all(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


_next_turns: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, NextTurn]] = weakref.WeakKeyDictionary()


def next_turn_of(loop: asyncio.AbstractEventLoop) -> NextTurn:
    """The one of this loop."""
    turn = _next_turns.get(loop)
    if turn is None:
        turn = _next_turns[loop] = NextTurn()
    return turn
