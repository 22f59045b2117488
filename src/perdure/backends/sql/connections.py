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

    async def perform(self, namespace: str, work: Callable[[Session, bool], Awaitable[T]]) -> T:
        """What the work gives, in one transaction, tried again after errors that pass. It is told when it may be done already."""

        async def attempt(is_repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` calls it
            async with self.transaction() as channel:
                return await work(Session(channel, self.tables, namespace), is_repeated)

        return await self.retry_transient(attempt)

    async def read(self, namespace: str, work: Callable[[Session], Awaitable[T]]) -> T:
        """What the work reads, tried again after errors that pass."""

        async def attempt(_: bool) -> T:  # noqa: FBT001 - as above
            async with self.reading() as channel:
                return await work(Session(channel, self.tables, namespace))

        return await self.retry_transient(attempt)
