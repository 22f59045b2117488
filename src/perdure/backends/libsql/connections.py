"""The connections of a store to a libSQL server: single requests, whole transactions in one request, and open transactions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Final, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.retries import WriteFailure
from perdure.backends.libsql import errors, hrana, server_info
from perdure.backends.libsql.address import LibsqlTarget
from perdure.backends.libsql.channels import OpenTransaction, SingleRequests
from perdure.backends.libsql.hrana import BatchStep, HranaClient, ServerError
from perdure.backends.libsql.large_values import LargeValues
from perdure.backends.libsql.write_lock import WriteLock, write_lock_of
from perdure.backends.sql import schema
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.session import Channel, Result, SqlConnections
from perdure.errors import PersistenceError

POOL_SIZE: Final = 8
_MAX_STREAMS: Final = 100


class LibsqlConnections(SqlConnections):
    """The client of one database, on the loop of a thread that all libSQL stores of the process share."""

    PATIENCE: ClassVar[float] = 3 * hrana.REQUEST_TIMEOUT  # so that a verb survives one silence of the server, or two
    THREAD: ClassVar[LoopThread] = LoopThread("perdure-libsql")

    def __init__(self, target: LibsqlTarget, tables: Tables) -> None:
        super().__init__(target.address.label, tables, is_borrowed=False)
        self.target = target
        self.large_values = LargeValues(tables)
        # Until the server has said more.
        self.durability = "process"
        self._client: HranaClient | None = None
        self._write_lock: WriteLock | None = None

    @property
    def client(self) -> HranaClient:
        """The client, made at its first use, on the connections loop."""
        if self._client is None:
            self._client = HranaClient(self.target.address, self.target.token, size=POOL_SIZE, streams=_MAX_STREAMS)
        return self._client

    @property
    def write_lock(self) -> WriteLock:
        """The lock that everything that writes holds, made at its first use, on the connections loop."""
        if self._write_lock is None:
            self._write_lock = write_lock_of(self.target.address)
        return self._write_lock

    def sibling(self) -> Self:
        """Connections of its own to the same database."""
        return type(self)(self.target, self.tables)

    async def open(self, *, allowed: bool) -> None:
        """Create the tables if need be, and find out which protocol the server speaks and what its commits survive."""
        await self.client.choose_version()
        try:
            await self._check_tables()
        except PersistenceError:
            if not allowed:
                raise
            await self._create_tables()
        self.durability = await server_info.durability_of(self.client)
        await server_info.warn_of_lost_lock(self.client, self.label)

    async def _check_tables(self) -> None:
        """Raise `PersistenceError` unless the tables exist, in this version."""
        async with self.reading() as channel:
            await schema.set_up(channel, self.tables, self.label, allowed=False)

    async def _create_tables(self) -> None:
        try:
            await self.commit([*await schema.creation(self.tables), *self.large_values.schema()])
        except ServerError as error:
            if "already exists" not in error.message:
                raise
            await self._check_tables()  # another process was faster, or they are not ours

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Channel]:
        """A transaction of several requests. While it is open no other transaction writes."""
        transaction = OpenTransaction(self.client, self.large_values)
        async with self.write_lock.hold():
            try:
                yield transaction
                await transaction.commit()
            except BaseException:
                await transaction.roll_back()
                raise

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Channel]:
        """For statements that only read."""
        yield SingleRequests(self.client, self.large_values)

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        """The results of these statements, committed: a whole transaction in one request."""
        puts, small = self.large_values.replace(statements)
        async with self.write_lock.hold():
            outcome = await self.client.batch(hrana.in_transaction([*puts, *small]))
        results = hrana.committed_results(outcome)[len(puts) :]
        return await SingleRequests(self.client, self.large_values).resolve(results)

    @property
    def known_change(self) -> int | None:
        """The last change that a reply reported, by the server's count; None before the first, or where it does not count."""
        return None if self._client is None else self._client.last_change

    async def read_change(self) -> int | None:
        """As `known_change`, asked for now by a very small request."""
        await self.client.batch([BatchStep(Statement("SELECT 1"))])
        return self.known_change

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What an error of a request means for what was sent."""
        return errors.classify_failure(error)

    async def drop_idle(self) -> None:
        """Close the connections that nothing uses now."""
        if self._client is not None:
            self._client.drop_idle()

    def map_error(self, error: BaseException) -> BaseException:
        """The error that the caller gets."""
        return errors.map_error(error, self.label, self.target.secrets)
