"""A memory store with transactions, for the cases that only such stores are asked; and wrong ones.

A step's own writes go to a list that stands for a table; those to the run are kept back until the block has ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from perdure.backends.memory.store import MemoryDatabase, MemoryStore
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse
from perdure.store import STANDARD_PARTS, Capability, Transaction
from tests.contract.broken.table import breaks

_TABLES: Final[WeakKeyDictionary[MemoryDatabase, list[int]]] = WeakKeyDictionary()


class MemoryTransaction:
    def __init__(self, store: MemoryStore, lease: Lease, table: list[int]) -> None:
        self.store = store
        self.lease = lease
        self.table = table
        self.entries: list[Entry] = []
        self.consume: list[int] = []

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if sql.startswith("INSERT"):
            self.table.append(1)
        return [(n,) for n in self.table] if sql.startswith("SELECT") else []

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        self.entries += entries
        self.consume += consume
        return await self.store.record(self.lease)


class Transactional(MemoryStore):
    @property
    def capabilities(self) -> frozenset[Capability]:
        return STANDARD_PARTS | {"transaction"}

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
            raise


@breaks("a_failed_transaction_leaves_nothing", "transaction")
class KeepsTheWritesOfAFailedStep(Transactional):
    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        await self.record(lease)
        yield transaction
        await self.record(lease, transaction.entries, consume=transaction.consume)


@breaks("a_transaction_of_a_stale_lease_leaves_nothing", "transaction")
@breaks("a_transaction_keeps_others_out_until_it_ends", "transaction")
@breaks("a_lease_superseded_by_claim_cannot_write", "transaction")
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


@breaks("a_transaction_commits_writes_and_record_together", "transaction")
class ForgetsTheRecord(Transactional):
    @asynccontextmanager
    async def _transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        transaction = self._begin(lease)
        await self.record(lease)
        yield transaction
