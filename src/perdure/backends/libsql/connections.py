"""Where a store's requests to a libSQL server are made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Final, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.failures import WriteFailure
from perdure.backends.libsql import errors, hrana, server_info
from perdure.backends.libsql.address import Address
from perdure.backends.libsql.channels import Alone, OpenTransaction, results_of
from perdure.backends.libsql.hrana import Client, ServerError
from perdure.backends.libsql.pieces import Pieces
from perdure.backends.libsql.turn import Turn, turn_at
from perdure.backends.sql import schema
from perdure.backends.sql.connections import SqlConnections
from perdure.backends.sql.session import Channel, Result, Statement
from perdure.backends.sql.tables import Tables
from perdure.errors import PersistenceError

POOL_SIZE: Final = 8
_MAX_STREAMS: Final = 100


class LibsqlConnections(SqlConnections):
    """The way to one database, on the loop of a thread that all libSQL stores of the process share."""

    PATIENCE: ClassVar[float] = 3 * hrana.REQUEST_TIMEOUT  # so that one silence, or two, are not the end
    THREAD: ClassVar[LoopThread] = LoopThread("perdure-libsql")

    def __init__(self, address: Address, tables: Tables) -> None:
        super().__init__(address.place.label, tables, is_borrowed=False)
        self.address = address
        self.pieces = Pieces(tables)
        # Nobody has said more yet.
        self.durability = "process"
        self._client: Client | None = None
        self._turn: Turn | None = None

    @property
    def client(self) -> Client:
        """The way there, made by the first who asks, on the connections loop."""
        if self._client is None:
            self._client = Client(self.address.place, self.address.token, size=POOL_SIZE, streams=_MAX_STREAMS)
        return self._client

    @property
    def turn(self) -> Turn:
        """What everything that writes waits for, asked for on the connections loop."""
        if self._turn is None:
            self._turn = turn_at(self.address.place)
        return self._turn

    def sibling(self) -> Self:
        """A connections with connections of its own."""
        return type(self)(self.address, self.tables)

    async def open(self, *, allowed: bool) -> None:
        """Leave the tables there, and find out which protocol the server speaks and what it survives."""
        await self.client.choose_version()
        try:
            await self._look_for_tables()
        except PersistenceError:
            if not allowed:
                raise
            await self._create_tables()
        self.durability = await server_info.durability_of(self.client)
        await server_info.warn_of_halts(self.client, self.label)

    async def _look_for_tables(self) -> None:
        """Raises `PersistenceError` unless they are there, and of this version."""
        async with self.reading() as channel:
            await schema.set_up(channel, self.tables, self.label, allowed=False)

    async def _create_tables(self) -> None:
        try:
            await self.commit([*await schema.creation(self.tables), *self.pieces.schema()])
        except ServerError as error:
            if "already exists" not in error.message:
                raise
            await self._look_for_tables()  # somebody else was faster, or they are not ours

    async def close(self) -> None:
        """Hang up."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Channel]:
        """A transaction of several requests. While it is open nobody else writes."""
        under_way = OpenTransaction(self.client, self.pieces)
        async with self.turn.taken():
            try:
                yield under_way
                await under_way.commit()
            except BaseException:
                await under_way.roll_back()
                raise

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Channel]:
        """For statements that only read."""
        yield Alone(self.client, self.pieces)

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        """What these statements gave, committed: a whole transaction in one request."""
        puts, asked = self.pieces.taken_apart(statements)
        steps = hrana.in_transaction([hrana.Statement(*statement) for statement in (*puts, *asked)])
        async with self.turn.taken():
            ends = await self.client.batch(steps)
        results = results_of(hrana.committed(ends))[len(puts) :]
        return await Alone(self.client, self.pieces).put_together(results)

    @property
    def known_change(self) -> int | None:
        """The last change that a reply told of, by the server's count; None when there was none, or it does not count."""
        return None if self._client is None else self._client.last_change

    async def look(self) -> int | None:
        """As `known_change`, of now: a very small request."""
        await self.client.batch([hrana.Step(hrana.Statement("SELECT 1"))])
        return self.known_change

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What to make of an error that a request met."""
        return errors.classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        """What the caller gets."""
        return errors.map_error(error, self.label, self.address.token)
