"""A memory store with transactions, for the cases that only such stores are asked; and wrong ones.

A step's own writes go to a list that stands for a table; those to the run are kept back until the block has ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from perdure.backends.memory.store import MemoryDatabase, MemoryStore
from perdure.errors import LeaseLost, RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import Created, Item, Lease, NewRun, Pulse
from perdure.store import STANDARD_PARTS, Capability, Transaction
from tests.contract.broken.table import breaks

T = TypeVar("T")

_TABLES: Final[WeakKeyDictionary[MemoryDatabase, list[int]]] = WeakKeyDictionary()


class MemoryTransaction:
    def __init__(self, store: MemoryStore, lease: Lease, table: list[int]) -> None:
        self.store = store
        self.lease = lease
        self.table = table
        self.entries: list[Entry] = []
        self.consume: list[int] = []
        self.has_ended = False
        # What an outbox has written: how to undo it.
        self.undo: list[Callable[[], Awaitable[object]]] = []

    @property
    def connection(self) -> MemoryTransaction:
        if self.has_ended:
            raise RuntimeError("this transaction has ended")
        return self

    async def call_plain(self, fn: Callable[[], T]) -> T:
        return fn()

    def is_transient(self, error: BaseException) -> bool:
        return False

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if sql.startswith("INSERT"):
            self.table.append(1)
        return [(n,) for n in self.table] if sql.startswith("SELECT") else []

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()) -> Pulse:
        self.entries += entries
        self.consume += consume
        return await self.store.record(self.lease)


class MemoryOutbox:
    """Writes at once, and undoes it if the transaction is rolled back. Nothing else looks meanwhile."""

    def __init__(self, store: MemoryStore, transaction: MemoryTransaction) -> None:
        self.store = store
        self.transaction = transaction

    async def create(self, run: NewRun, *, now: int | None = None) -> Created:
        created = await self.store.create(run, now=now)
        if created.is_new:
            self.transaction.undo.append(lambda: self.store.delete(run.id))
        return created

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        seq = await self.store.signal(run_id, name, payload, dedupe=dedupe, now=now)
        self.transaction.undo.append(lambda: self._drop(run_id))
        return seq

    async def _drop(self, run_id: str) -> None:
        row = await self.store.get(run_id)
        assert row is not None
        await self.store.delete(run_id)
        await self.store.restore(row, [])


class Transactional(MemoryStore):
    @property
    def capabilities(self) -> frozenset[Capability]:
        return STANDARD_PARTS | {"transaction", "outbox"}

    async def outbox(self, connection: MemoryTransaction) -> MemoryOutbox:
        return MemoryOutbox(self, connection)

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction(lease)

    def _begin(self, lease: Lease) -> MemoryTransaction:
        return MemoryTransaction(self, lease, _TABLES.setdefault(self._database, []))

    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        before = list(transaction.table)
        try:
            await self.record(lease)
            yield transaction
            await self.record(lease, transaction.entries, consume=transaction.consume)
        except BaseException:
            transaction.table[:] = before
            for undo in reversed(transaction.undo):
                await undo()
            raise
        finally:
            transaction.has_ended = True


@breaks("a_store_without_an_outbox_refuses_it", "transaction")
class OffersAnOutboxThatItDoesNotAnnounce(Transactional):
    pass


@breaks("a_transaction_gives_the_connection_of_its_driver", "transaction", "outbox")
class LendsItsConnectionForEver(Transactional):
    def _begin(self, lease: Lease) -> MemoryTransaction:
        transaction = super()._begin(lease)
        transaction.__class__ = _Endless
        return transaction


class _Endless(MemoryTransaction):
    @property
    def connection(self) -> MemoryTransaction:
        return self


@breaks("an_error_of_the_functions_own_is_not_transient", "transaction", "outbox")
class TakesEveryErrorForAConflict(Transactional):
    def _begin(self, lease: Lease) -> MemoryTransaction:
        transaction = super()._begin(lease)
        transaction.is_transient = lambda _: True  # type: ignore[method-assign, assignment]
        return transaction


@breaks("what_an_outbox_wrote_is_gone_when_the_caller_rolls_back", "transaction", "outbox")
class KeepsWhatAnOutboxWrote(Transactional):
    async def outbox(self, connection: MemoryTransaction) -> MemoryOutbox:
        return MemoryOutbox(self, MemoryTransaction(self, connection.lease, []))


@breaks("what_an_outbox_wrote_is_there_when_the_caller_commits", "transaction", "outbox")
class LeasesWhatAnOutboxCreates(Transactional):
    async def outbox(self, connection: MemoryTransaction) -> MemoryOutbox:
        return _LeasingOutbox(self, connection)


class _LeasingOutbox(MemoryOutbox):
    async def create(self, run: NewRun, *, now: int | None = None) -> Created:
        return await self.store.create(run, ttl=30, now=now)


@breaks("no_signal_of_a_callers_transaction_is_lost_by_a_suspend", "transaction", "outbox")
class SendsWithTheCommitAndWakesNobody(Transactional):
    """Looks at who waits when the signal is written, and not when it is committed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Callable[[], Awaitable[object]]] = []

    async def outbox(self, connection: MemoryTransaction) -> MemoryOutbox:
        return _LateOutbox(self, connection)

    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        async with super()._transaction(lease) as transaction:
            yield transaction
        for send in self.sent:
            await send()


class _LateOutbox(MemoryOutbox):
    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        async def send() -> None:
            before = await self.store.get(run_id)
            assert before is not None
            await self.store.signal(run_id, name, payload, dedupe=dedupe, now=now)
            with self.store._lock() as namespace:
                namespace.runs[run_id].change(wake_at=before.wake_at)

        assert isinstance(self.store, SendsWithTheCommitAndWakesNobody)
        self.store.sent.append(send)
        return len(await self.store.inbox(run_id)) + 1


@breaks("an_outbox_refuses_what_its_store_refuses", "transaction", "outbox")
class IgnoresSignalsToNoRun(Transactional):
    async def outbox(self, connection: MemoryTransaction) -> MemoryOutbox:
        return _SilentOutbox(self, connection)


class _SilentOutbox(MemoryOutbox):
    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        try:
            return await super().signal(run_id, name, payload, dedupe=dedupe, now=now)
        except RunNotFound:
            return 0


@breaks("a_failed_transaction_leaves_nothing", "transaction", "outbox")
class KeepsTheWritesOfAFailedStep(Transactional):
    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        await self.record(lease)
        yield transaction
        await self.record(lease, transaction.entries, consume=transaction.consume)


@breaks("a_transaction_of_a_stale_lease_leaves_nothing", "transaction", "outbox")
@breaks("a_transaction_keeps_others_out_until_it_ends", "transaction", "outbox")
@breaks("a_lease_superseded_by_claim_cannot_write", "transaction", "outbox")
class TransactionsAreNotFenced(Transactional):
    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        transaction.record = _accept_anything(transaction)  # type: ignore[method-assign]
        yield transaction
        with self._lock() as namespace:
            if lease.run_id not in namespace.runs:
                raise LeaseLost(lease.run_id, lease.epoch)
            namespace.runs[lease.run_id].write(lease, transaction.entries, transaction.consume)


def _accept_anything(transaction: MemoryTransaction) -> Any:
    async def record(entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        transaction.entries += entries
        transaction.consume += consume
        return Pulse(0, False)

    return record


@breaks("a_transaction_commits_writes_and_record_together", "transaction", "outbox")
class ForgetsTheRecord(Transactional):
    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        await self.record(lease)
        yield transaction
