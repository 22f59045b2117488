"""Where the transactions of a store on an SQL database are made."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from perdure.backends.base.connections import ServerConnections
from perdure.backends.sql.session import Channel, Session
from perdure.backends.sql.tables import Tables

T = TypeVar("T")


class SqlConnections(ServerConnections):
    """The connections of one store. `open` has to call `schema.set_up` in a transaction of its own."""

    def __init__(self, label: str, tables: Tables, *, is_borrowed: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(label, is_borrowed=is_borrowed, loop=loop)
        self.tables = tables

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Channel]:
        """A transaction in which each statement sees what was committed before it: commits on exit, rolls back on an exception.

        On SQLite it is the only one that writes from its beginning on.
        """

    def reading(self) -> AbstractAsyncContextManager[Channel]:
        """For single statements that only read."""
        return self.transaction()

    def notifying_transaction(self) -> AbstractAsyncContextManager[Channel]:
        """As `transaction`, for what may make a run due or end it. A database that can notify other processes does it here."""
        return self.transaction()

    def callers_transaction(self) -> AbstractAsyncContextManager[Channel]:
        """As `transaction`, for one that a caller keeps open and sends statements of its own in."""
        return self.transaction()

    async def perform(self, namespace: str, work: Callable[[Session, bool], Awaitable[T]], *, notify: bool = False) -> T:
        """What the work gives, in one transaction, tried again after errors that pass. It is told when it may be done already.

        With `notify` the work may make a run due or end it.
        """
        transaction = self.notifying_transaction if notify else self.transaction

        async def attempt(is_repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` calls it
            async with transaction() as channel:
                return await work(Session(channel, self.tables, namespace), is_repeated)

        return await self.retry_transient(attempt)

    async def read(self, namespace: str, work: Callable[[Session], Awaitable[T]]) -> T:
        """What the work reads, tried again after errors that pass."""

        async def attempt(_: bool) -> T:  # noqa: FBT001 - as above
            async with self.reading() as channel:
                return await work(Session(channel, self.tables, namespace))

        return await self.retry_transient(attempt)
