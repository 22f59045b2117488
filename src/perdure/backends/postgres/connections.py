"""The pool of a PostgreSQL store, and what its sessions begin with.

Behind PgBouncer in transaction mode two statements in a row may reach two server processes, so a prepared statement may not be
there when it is needed. The process id that the pooler gave a connection is not the one that the server itself gives, which shows
that there is a pooler: then no statement is kept, and every verb is a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base import retries
from perdure.backends.base.retries import NotSentError, WriteFailure
from perdure.backends.postgres.address import PostgresAddress
from perdure.backends.postgres.channel import DIALECT, PatientConnection, PostgresChannel, begin
from perdure.backends.postgres.errors import UNIQUE_VIOLATION, classify_failure, driver, is_stale, map_error
from perdure.backends.postgres.notifications import channel_name
from perdure.backends.sql.dialect import Tables
from perdure.backends.sql.rows import EXACT
from perdure.backends.sql.schema import set_up
from perdure.backends.sql.session import CallersConnection, Channel, Session, SqlConnections
from perdure.backends.sql.transaction import refuse_autocommit, refuse_database, refuse_kind
from perdure.errors import PersistenceError
from perdure.store import Durability

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 10.0
_CLOSE_TIMEOUT: Final = 1.0
_MOST_AT_HAND: Final = 3

# What a session begins with. Every statement finds its rows by an index. A plan is made once for a connection, maybe while the
# tables were empty, when reading them as a whole looks as cheap; it would still be used when they have a million rows, until the
# next ANALYZE. The values that are bound change nothing in the plan, so none is made for them: PostgreSQL would do that for the
# first five times, and for some statements for ever, and take longer for it than for the statement. And a statement is never
# compiled first, which takes a hundred times as long.
SERVER_SETTINGS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_KEEP_PLANS_FOR: Final = 20  # seconds; and in any case a plan does not outlive that

_SETTINGS: Final = """
    SELECT pg_backend_pid(), current_setting('fsync'), current_setting('synchronous_commit'),
        current_setting('synchronous_standby_names'), current_setting('server_encoding')
"""
_DATABASE: Final = "SELECT current_database(), pg_postmaster_start_time()"
# Only a session of the same user that has done nothing for some time: the number may be that of another session by now, or on
# another server behind the same address.
_END_SESSION: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid = $1 AND usename = current_user AND state_change < clock_timestamp() - make_interval(secs => $2::float8)
"""


async def _keep_session(_: Any) -> None:
    """Instead of asyncpg's reset after every use, which costs a round trip: no verb changes a session's state."""


class PostgresConnections(SqlConnections):
    """The pool of one store, on its loop."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-postgres")

    def __init__(self, place: PostgresAddress, table: str, *, dsn: str | None, pool: Any | None, pool_size: int) -> None:
        """By the DSN, or with a borrowed `pool`. `table` begins the names of the tables."""
        loop = None if pool is None else pool._loop  # noqa: SLF001 - there is no public way to ask
        super().__init__(place.label, Tables(table, DIALECT, EXACT), is_borrowed=pool is not None, loop=loop)
        self.place = place
        self.behind_pooler = False
        self._dsn = dsn
        self._borrowed = pool
        self._pool: Any = pool
        self._pool_size = pool_size
        # Connections that were just used, out of the pool: to take one from there and give it back takes 0.1 ms. None stays here
        # while another user waits for the pool.
        self._at_hand: list[Any] = []
        self._waiting = 0
        # Connections of open transactions: a pool of their own, so that the verbs never wait for those.
        self._transactions = pool
        self._ending_sessions: set[asyncio.Task[None]] = set()
        # What `_DATABASE` gave, which tells one database from another until its server is started anew.
        self._database: tuple[Any, ...] = ()

    has_loop_copies: ClassVar[bool] = True

    async def copy_for_loop(self) -> Self:
        """Pools of the same database on the loop that runs now."""
        copy = self.sibling()
        copy.behind_pooler = self.behind_pooler
        copy._pool = await copy._new_pool(reset=_keep_session)  # noqa: SLF001 - its own kind
        return copy

    def driver_connection(self, channel: Channel) -> Any:
        """Asyncpg's own, as its pool gave it."""
        connection = channel.connection if isinstance(channel, PostgresChannel) else None
        return connection.connection if isinstance(connection, PatientConnection) else connection

    async def callers_channel(self, caller: CallersConnection) -> PostgresChannel:
        """The channel on an asyncpg connection of a caller."""
        asyncpg, connection = driver(), caller.driver_connection
        if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
            raise refuse_kind(connection, "PostgreSQL", "a connection of asyncpg")
        if not connection.is_in_transaction():
            raise refuse_autocommit("async with connection.transaction():")
        found = tuple((await connection.fetch(_DATABASE))[0])
        if found != self._database:
            self._database = await self.run(self._read_database())
        if found != self._database:
            raise refuse_database(f"database {found[0]!r}", f"{self.label}")
        return PostgresChannel(connection)

    async def _read_database(self) -> tuple[Any, ...]:
        async with self._connection() as connection:
            return tuple((await connection.fetch(_DATABASE))[0])

    def is_duplicate(self, error: BaseException) -> bool:
        return getattr(error, "sqlstate", None) == UNIQUE_VIOLATION

    def is_lost(self, channel: Channel) -> bool:
        return bool(self.driver_connection(channel).is_closed())

    def is_in_transaction(self, channel: Channel) -> bool:
        return bool(self.driver_connection(channel).is_in_transaction())

    def sibling(self) -> Self:
        """Connections to the same database, with a pool of their own unless that is borrowed."""
        return type(self)(self.place, self.tables.stem, dsn=self._dsn, pool=self._borrowed, pool_size=self._pool_size)

    async def loop_pool(self) -> Self:
        """Connections to the same database on the loop that runs now, ready for use."""
        connections = self.sibling()
        connections.behind_pooler = self.behind_pooler
        await connections.open_pool()
        return connections

    @property
    def has_own_sessions(self) -> bool:
        """Whether each connection is a session of ours on the server, with our settings."""
        return not self.is_borrowed and not self.behind_pooler

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.place.label, self.place.secrets)

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        # Also when another transaction wrote the same at this moment.
        return super().is_caused_by_one_request(error) or getattr(error.__cause__ or error, "sqlstate", None) == "23505"

    async def connect_listener(self) -> Any:
        """A connection on which to listen. Raises `PersistenceError` where no notification arrives."""
        if self.is_borrowed or self.behind_pooler:
            raise PersistenceError(self.label, "notifications arrive only on a connection of its own, without a pooler")
        return await self._connect()

    async def _connect(self) -> Any:
        """A connection of its own that keeps no statements."""
        return await driver().connect(
            self._dsn, timeout=CONNECT_TIMEOUT, statement_cache_size=0, command_timeout=retries.REPLY_WITHIN
        )

    async def open(self, *, allowed: bool) -> None:
        """Leave schema and pool there, and know how the server is reached and what it survives."""
        async with self._dedicated_connection() as connection:
            async with begin(connection):
                pid, fsync, commit, standbys, encoding = (await connection.fetch(_SETTINGS))[0]
            self.behind_pooler = pid != connection.get_server_pid()
            self.durability = _durability(fsync, commit, standbys)
            if encoding != "UTF8":
                reason = f"the database's encoding is {encoding}, which cannot hold every id; use a UTF8 one"
                raise PersistenceError(self.label, reason)
            async with begin(connection) as channel:
                await self._create_tables(channel, allowed=allowed)
        if self._pool is None:
            self._pool = await self._new_pool(reset=_keep_session)

    async def _create_tables(self, channel: PostgresChannel, *, allowed: bool) -> None:
        """Have the tables. Many processes may do this at once; a killed one leaves nothing half done."""
        await set_up(channel, self.tables, self.label, allowed=allowed)

    async def open_pool(self) -> None:
        """Have a pool, and a connection at hand."""
        self._pool = await self._new_pool(reset=_keep_session)
        try:
            self._at_hand.append(await self._pool.acquire())
        except BaseException:
            await self.close()
            raise

    async def _new_pool(self, **options: Any) -> Any:
        defaults = {
            "command_timeout": retries.REPLY_WITHIN,
            "server_settings": None if self.behind_pooler else SERVER_SETTINGS,  # a pooler refuses what it does not know
        }
        return await driver().create_pool(
            self._dsn,
            min_size=0,
            max_size=self._pool_size,
            timeout=CONNECT_TIMEOUT,
            statement_cache_size=0 if self.behind_pooler else 200,
            max_cached_statement_lifetime=_KEEP_PLANS_FOR,
            **{**defaults, **options},
        )

    @contextlib.asynccontextmanager
    async def _dedicated_connection(self) -> AsyncIterator[Any]:
        if self._borrowed is not None:
            async with self._borrowed.acquire() as connection:
                yield connection
            return
        connection = await self._connect()
        try:
            yield self._limit(connection)
        except BaseException:
            connection.terminate()
            raise
        await connection.close()

    def autocommit(self, namespace: str, work: Callable[[Session, bool], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """As `perform`, on a connection that commits each statement by itself; behind a pooler, in one transaction."""

        def attempt(is_repeated: bool) -> Awaitable[T]:  # noqa: FBT001 - as `retry_transient` calls it
            return self.use_connection(
                lambda connection: work(Session(PostgresChannel(connection), self.tables, namespace), is_repeated)
            )

        return self.retry_transient(attempt)

    async def use_connection(self, use: Callable[[Any], Awaitable[T]]) -> T:
        """The result of `use` with a connection that is at hand or from the pool; behind a pooler, in a transaction."""
        connection = await self._acquire()
        try:
            if self.behind_pooler:
                async with begin(self._limit(connection)):
                    answer = await use(self._limit(connection))
            else:
                answer = await use(self._limit(connection))
        except BaseException as error:
            await self._discard(connection, error)
            raise
        await self._release(connection)
        return answer

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        connection = await self._acquire()
        try:
            yield self._limit(connection)
        except BaseException as error:
            await self._discard(connection, error)
            raise
        await self._release(connection)

    @contextlib.asynccontextmanager
    async def transaction(self, commit: str = "COMMIT") -> AsyncIterator[Channel]:
        """A transaction in which each statement sees what was committed before it."""
        async with self._connection() as connection, begin(connection, commit) as channel:
            yield channel

    def notifying_transaction(self) -> AbstractAsyncContextManager[Channel]:
        """A transaction that notifies those who listen, in the round trip of its COMMIT."""
        return self.transaction(f'NOTIFY "{channel_name(self.tables)}"; COMMIT')

    def reading(self) -> AbstractAsyncContextManager[Channel]:
        """For single statements that only read."""
        return self.transaction() if self.behind_pooler else self._without_transaction()

    @contextlib.asynccontextmanager
    async def _without_transaction(self) -> AsyncIterator[Channel]:
        async with self._connection() as connection:
            yield PostgresChannel(connection)

    @contextlib.asynccontextmanager
    async def callers_transaction(self) -> AsyncIterator[Channel]:
        """A transaction with statements of the caller's: its session is reset when the connection goes back to the pool."""
        async with self._changing:
            if self._transactions is None:
                self._transactions = await self._new_pool(command_timeout=retries.REPEATED_REPLY_WITHIN, server_settings=None)
        pool = self._transactions
        connection = await pool.acquire()
        try:
            async with _begin_callers(connection):
                yield PostgresChannel(PatientConnection(connection, retries.reply_limit()))
        except BaseException as error:
            self._terminate_if_stale(connection, error)
            raise
        finally:
            await pool.release(connection)

    def _limit(self, connection: Any) -> Any:
        """The connection with the time limit of this attempt, which a pool of ours has already in a first one."""
        limit = retries.reply_limit()
        return connection if limit == retries.REPLY_WITHIN and not self.is_borrowed else PatientConnection(connection, limit)

    async def _acquire(self) -> Any:
        """A connection that is at hand or from the pool. What goes wrong here was never sent."""
        connection = self._at_hand.pop() if self._at_hand else None
        if connection is not None and not connection.is_closed():
            return connection
        if connection is not None:
            await self._pool.release(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire()
        except (OSError, TimeoutError) as error:
            raise NotSentError from error
        finally:
            self._waiting -= 1

    async def _release(self, connection: Any) -> None:
        if self.is_borrowed or self._waiting or len(self._at_hand) == _MOST_AT_HAND:
            await self._pool.release(connection)
        else:
            self._at_hand.append(connection)

    async def _discard(self, connection: Any, error: BaseException) -> None:
        self._terminate_if_stale(connection, error)
        await self._pool.release(connection)  # the pool sees to what an error or a cancellation left behind

    def _terminate_if_stale(self, connection: Any, error: BaseException) -> None:
        if not is_stale(error):
            return
        if isinstance(error, TimeoutError) and self.has_own_sessions and not connection.is_closed():
            ending = asyncio.ensure_future(self._end_session(connection.get_server_pid()))
            self._ending_sessions.add(ending)
            ending.add_done_callback(self._ending_sessions.discard)
        connection.terminate()

    async def _end_session(self, pid: int) -> None:
        """End a session that gave no reply, on the server. It may be in the middle of a transaction, and would keep its locks."""
        with contextlib.suppress(Exception):  # the server may be away, or not allow it
            connection = await self._connect()
            try:
                await connection.fetch(_END_SESSION, pid, retries.REPLY_WITHIN / 2)
            finally:
                await connection.close(timeout=_CLOSE_TIMEOUT)

    async def drop_idle(self) -> None:
        """Close the connections that nothing uses now."""
        while self._at_hand:
            connection = self._at_hand.pop()
            connection.terminate()
            await self._pool.release(connection)
        for pool in filter(None, {self._pool, self._transactions}):
            for holder in pool._holders:  # noqa: SLF001 - `expire_connections` waits for a reply of each, and logs that none came
                if holder._in_use is None:  # noqa: SLF001
                    holder.terminate()

    async def close(self) -> None:
        """Close the pools, if they are ours."""
        pools = (self._pool, self._transactions)
        for ending in self._ending_sessions:
            ending.cancel()
        while self._at_hand:
            await self._pool.release(self._at_hand.pop())
        self._pool = self._transactions = None
        for pool in pools if self._borrowed is None else ():
            if pool is not None:
                await _close(pool)


@contextlib.asynccontextmanager
async def _begin_callers(connection: Any) -> AsyncIterator[None]:
    """As `begin`, but asyncpg's own transaction: it refuses to nest one (a savepoint) in a transaction that it did not begin."""
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
    except BaseException as error:
        if not connection.is_closed() and not is_stale(error):  # a stale one is closed, with its transaction
            try:
                await transaction.rollback()
            except Exception:  # noqa: BLE001 - the server rolls back a transaction that has lost its connection
                connection.terminate()
        raise
    async with asyncio.timeout(retries.reply_limit()):
        await transaction.commit()


async def _close(pool: Any) -> None:
    try:
        await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT)
    except Exception:  # noqa: BLE001 - the server may be down; there is nothing to save
        pool.terminate()


def _durability(fsync: str, commit: str, standbys: str) -> Durability:
    if fsync == "off" or commit == "off":
        return "process"
    return "replicated" if standbys and commit != "local" else "disk"
