"""The connection pools of a store, and the settings of its sessions.

A session of ours has autocommit, reads what was committed before each statement, refuses values that it would have to cut short,
counts the rows that an update matched (also those it left as they were), and waits for a lock for a bounded time. A borrowed
session may have any settings and keeps them: there every verb is a transaction, and the settings that cannot be replaced by that
are checked at set-up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.aio.threads import run_in_thread
from perdure.backends.base import retries
from perdure.backends.base.retries import NoReplyError, NotSentError, WriteFailure
from perdure.backends.mysql import errors
from perdure.backends.mysql.address import MysqlAddress
from perdure.backends.mysql.connection import MysqlConnection
from perdure.backends.mysql.literals import quote_escaped, quote_hexadecimal
from perdure.backends.mysql.packets import Packet, is_unexpected_state
from perdure.backends.mysql.schema import check_settings, check_tables
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.schema import set_up
from perdure.backends.sql.session import CallersConnection, Channel, Result, Session, SqlConnections
from perdure.backends.sql.transaction import refuse_autocommit, refuse_database, refuse_kind
from perdure.errors import PersistenceError, StoreClosed

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 10.0
WAIT_FOR_CONNECTION: Final = 60.0
_FOUND_ROWS: Final = 2  # the protocol's CLIENT_FOUND_ROWS
_SESSION: Final = """
    SET SESSION sql_mode = 'STRICT_ALL_TABLES', time_zone = '+00:00', innodb_lock_wait_timeout = 10, lock_wait_timeout = 10;
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED
"""


# Only a session of the same user that has done nothing for some time: the number may be that of another session by now, or on
# another server behind the same address.
_FIND_SESSION: Final = """
    SELECT id FROM information_schema.processlist WHERE id = %s AND time >= %s AND user = SUBSTRING_INDEX(USER(), '@', 1)
"""


class MysqlConnections(SqlConnections):
    """The loop and the pools of one MySQL store."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-mysql")

    def __init__(self, tables: Tables, *, address: MysqlAddress | None, pool: Any | None, pool_size: int) -> None:
        label = "MySQL store on a borrowed pool" if address is None else address.label
        loop = None if pool is None else pool._loop  # noqa: SLF001 - there is no public way to ask
        super().__init__(label, tables, is_borrowed=pool is not None, loop=loop)
        self.address = address
        self._pool = pool
        self._pool_size = pool_size
        # Connections of open transactions: a pool of their own, so that the verbs never wait for those.
        self._transactions = pool
        self._max_packet = 1 << 20
        self._arguments: dict[str, Any] | None = None  # of the driver, once a pool was opened
        self._ending_sessions: set[asyncio.Task[None]] = set()

    has_loop_copies: ClassVar[bool] = True

    async def copy_for_loop(self) -> Self:
        """Pools of the same database on the loop that runs now."""
        copy = self.sibling()
        copy._max_packet, copy._arguments = self._max_packet, self._arguments  # noqa: SLF001 - its own kind
        copy._pool = await copy._open_pool()  # noqa: SLF001
        return copy

    def driver_connection(self, channel: Channel) -> Any:
        """Asyncmy's own."""
        return channel.driver_connection if isinstance(channel, MysqlConnection) else None

    async def callers_channel(self, caller: CallersConnection) -> MysqlConnection:
        """The channel on an asyncmy connection of a caller. It has settings of its own, like a borrowed one."""
        connection = caller.driver_connection
        if not isinstance(connection, errors.driver().Connection):
            raise refuse_kind(connection, "MySQL", "a connection of asyncmy")
        channel = MysqlConnection(connection, quote_hexadecimal, self._max_packet, self.label, is_borrowed=True)
        if connection.get_autocommit() and not channel.in_transaction:
            raise refuse_autocommit("await connection.begin()")
        found, own = await self._read_database(channel), await self.run(self._read_own_database())
        if found != own:
            raise refuse_database(f"database {found[0]!r}", self.label)
        return channel

    async def _read_own_database(self) -> tuple[Any, ...]:
        async with self._borrow(self._pool) as connection:
            return await self._read_database(connection)

    async def _read_database(self, connection: MysqlConnection) -> tuple[Any, ...]:
        (result,) = await connection.send([Statement("SELECT DATABASE(), @@hostname, @@port, @@server_id")])
        return tuple(result.rows[0])

    def is_duplicate(self, error: BaseException) -> bool:
        return errors.code_of(error) == errors.DUPLICATE

    def is_lost(self, channel: Channel) -> bool:
        return not self.driver_connection(channel).connected

    def is_in_transaction(self, channel: Channel) -> bool:
        return isinstance(channel, MysqlConnection) and channel.in_transaction

    def sibling(self) -> Self:
        """Connections of its own to the same server; a borrowed pool is shared."""
        pool = self._pool if self.is_borrowed else None
        return type(self)(self.tables, address=self.address, pool=pool, pool_size=self._pool_size)

    @property
    def location(self) -> tuple[str, str]:
        """Which database it is, among all in the process."""
        return (f"pool {id(self._pool)}", "") if self.address is None else (self.address.server, self.address.database)

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What an error of a statement means for what was sent."""
        return errors.classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        """The error that the caller gets."""
        return errors.map_error(error, self.label, () if self.address is None else self.address.secrets)

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        """Whether a packet failed because of one of its requests: by its values, or by a lock on its row."""
        cause = error.__cause__ or error
        return self.classify_failure(cause) is WriteFailure.PERMANENT or errors.code_of(cause) in {
            errors.DUPLICATE,
            errors.LOCK_TIMEOUT,
        }

    async def open(self, *, allowed: bool) -> None:
        """Open the pool, create the schema if need be, and find out what the server takes and what its commits survive."""
        if self._pool is None:
            self._pool = await self._open_pool()
        async with self.transaction() as connection:
            settings = await check_settings(connection, self.label)
            self._max_packet, self.durability = settings.max_packet, settings.durability
            await set_up(connection, self.tables, self.label, allowed=allowed)
            await check_tables(connection, self.tables, self.label)

    async def _open_pool(self) -> Any:
        if self._arguments is None and self.address is not None:
            try:
                self._arguments = await run_in_thread(self.address.arguments)  # reads files
            except OSError as error:
                raise PersistenceError(self.label, f"its ssl_ca cannot be read: {error}") from error
        return await errors.driver().create_pool(minsize=0, maxsize=self._pool_size, **self._settings())

    def _settings(self) -> dict[str, Any]:
        """The driver's arguments for a connection."""
        if self._arguments is None:
            raise StoreClosed(self.label)
        return dict(
            client_flag=_FOUND_ROWS,
            autocommit=True,
            charset="utf8mb4",
            init_command=_SESSION,
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=CONNECT_TIMEOUT,  # of the greeting; a statement has the limit of `MysqlConnection.send_texts`
            **self._arguments,
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[MysqlConnection]:
        """A transaction in which each statement sees what was committed before it."""
        async with self._transaction_on(self._pool) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def callers_transaction(self) -> AsyncIterator[MysqlConnection]:
        """As `transaction`, for one that a caller keeps open and sends statements of its own in."""
        async with self._changing:
            if self._transactions is None:
                self._transactions = await self._open_pool()
        async with self._transaction_on(self._transactions) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def _transaction_on(self, pool: Any) -> AsyncIterator[MysqlConnection]:
        async with self._borrow(pool) as connection:
            connection.begin()
            yield connection
            await connection.commit()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[MysqlConnection]:
        """For single statements that only read. A borrowed session may begin a transaction by itself and read old rows."""
        async with self.transaction() if self.is_borrowed else self._borrow(self._pool) as connection:
            yield connection

    async def send_packet_or_perform(
        self,
        namespace: str,
        build: Callable[[Packet], None],
        read_replies: Callable[[Sequence[Result]], T],
        work: Callable[[Session, bool], Awaitable[T]],
    ) -> T:
        """The result of one packet, or of `work` in a transaction where an expectation of the packet is not met."""

        async def attempt(is_repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` calls it
            results = await self._send_packet(namespace, build)
            if results is not None:
                return read_replies(results)
            async with self.transaction() as connection:
                return await work(Session(connection, self.tables, namespace), is_repeated)

        return await self.retry_transient(attempt)

    async def _send_packet(self, namespace: str, build: Callable[[Packet], None]) -> Sequence[Result] | None:
        async with self._borrow(self._pool) as connection:
            packet, variables = Packet(self.tables, namespace, connection.quote, connection.max_statement), None
            build(packet)
            if not connection.takes(packet.statements):
                variables = connection.new_variables()
                packet = Packet(self.tables, namespace, variables, connection.max_statement)
                build(packet)
            try:
                return await connection.transact(packet.statements, variables)
            except Exception as error:
                if not is_unexpected_state(error):
                    raise
                await connection.roll_back(error)
                return None

    @contextlib.asynccontextmanager
    async def _borrow(self, pool: Any) -> AsyncIterator[MysqlConnection]:
        """A connection of the pool; after an error its transaction is rolled back."""
        connection = await self._acquire(pool)
        try:
            yield connection
        except BaseException as error:
            if isinstance(error, NoReplyError):
                self._end_session_later(connection.driver_connection.thread_id())
            await connection.roll_back(error)
            raise
        finally:
            await pool.release(connection.driver_connection)

    def _end_session_later(self, number: int) -> None:
        if not self.is_borrowed:
            ending = asyncio.ensure_future(self._end_session(number))
            self._ending_sessions.add(ending)
            ending.add_done_callback(self._ending_sessions.discard)

    async def _end_session(self, number: int) -> None:
        """End a session that gave no reply, on the server. It may be in the middle of a transaction, and would keep its locks."""
        with contextlib.suppress(Exception):  # the server may be away
            async with asyncio.timeout(CONNECT_TIMEOUT):
                opened = await errors.driver().connect(**self._settings())
                try:
                    connection = MysqlConnection(opened, quote_escaped, self._max_packet, self.label, is_borrowed=False)
                    (found,) = await connection.send([Statement(_FIND_SESSION, (number, int(retries.REPLY_WITHIN / 2)))])
                    if found.rows:
                        await connection.send_texts([b"KILL %d" % number])
                finally:
                    opened.close()

    async def drop_idle(self) -> None:
        """Close the connections that nothing uses now."""
        for pool in filter(None, {self._pool, self._transactions}):
            while pool._free:  # noqa: SLF001 - `pool.clear` would wait until a silent connection has sent everything
                idle = pool._free.popleft()  # noqa: SLF001
                idle._transport.abort()  # noqa: SLF001
                idle.close()

    async def _acquire(self, pool: Any) -> MysqlConnection:
        """A connection of the pool. Raises `NotSentError` when there is none for now."""
        try:
            async with asyncio.timeout(WAIT_FOR_CONNECTION):
                acquired = await pool.acquire()
        except RuntimeError as error:
            raise PersistenceError(self.label, f"its pool lends nothing any more ({error}); open another") from error
        except Exception as error:
            if self.classify_failure(error) is WriteFailure.PERMANENT:
                raise
            raise NotSentError from error
        if not self.is_borrowed:
            acquired._read_timeout = None  # noqa: SLF001 - after it the driver waits until all is sent, which may be never
        quote = quote_hexadecimal if self.is_borrowed else quote_escaped
        return MysqlConnection(acquired, quote, self._max_packet, self.label, is_borrowed=self.is_borrowed)

    async def interrupt(self, connection: MysqlConnection) -> None:
        """End the statement that runs on this connection, through a second connection if there is one."""
        with contextlib.suppress(Exception):  # then it ends by itself, or by its time limit
            async with asyncio.timeout(CONNECT_TIMEOUT), self._borrow(self._pool) as second:
                await second.send_texts([b"KILL QUERY %d" % connection.driver_connection.thread_id()])

    async def close(self) -> None:
        """Close the pools, unless they are borrowed."""
        pools = (self._pool, self._transactions)
        for ending in self._ending_sessions:
            ending.cancel()
        self._pool = self._transactions = None
        for pool in pools:
            if pool is not None and not self.is_borrowed:
                await _close(pool)


async def _close(pool: Any) -> None:
    pool.close()
    try:
        await asyncio.wait_for(pool.wait_closed(), CONNECT_TIMEOUT)
    except Exception:  # noqa: BLE001 - the server may be down; nothing is lost with it
        pool.terminate()
