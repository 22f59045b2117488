"""The pool of a PostgreSQL store, and what its sessions begin with.

Behind PgBouncer in transaction mode two statements in a row may reach two server processes, so a prepared statement may not be
there when it is needed. The process id that a connection was told there is not the one that the server itself tells, and by that
it is noticed: then no statement is kept, and every verb is a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.retries import NotSentError, WriteFailure
from perdure.backends.postgres.address import PostgresAddress
from perdure.backends.postgres.errors import classify_failure, driver, is_stale, map_error
from perdure.backends.postgres.schema import Session, Tables, set_up
from perdure.store import Durability

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 10.0
COMMAND_TIMEOUT: Final = 60.0
_MOST_AT_HAND: Final = 3

# With what a session begins. Every statement finds its rows by an index. A plan is made once for a connection, maybe while the
# tables were empty, when reading them as a whole looks as cheap; it would still be used when they have a million rows, until the
# next ANALYZE. The values that are bound change nothing in it, so none is made for them: PostgreSQL would do that for the first
# five times, and for some statements for ever, and take longer for it than for the statement. And a statement is never compiled
# first, which takes a hundred times as long.
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
        current_setting('synchronous_standby_names')
"""


async def _keep(_: Any) -> None:
    """Instead of asyncpg's reset after every use, which costs a round trip: no verb changes a session's state."""


class PostgresConnections(ServerConnections):
    """The pool of one store, on its loop."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-postgres")

    def __init__(self, place: PostgresAddress, tables: Tables, *, dsn: str | None, pool: Any | None, pool_size: int) -> None:
        loop = None if pool is None else pool._loop  # noqa: SLF001 - there is no public way to ask
        super().__init__(place.label, is_borrowed=pool is not None, loop=loop)
        self.place = place
        self.tables = tables
        self.behind_pooler = False
        self._dsn = dsn
        self._borrowed = pool
        self._pool: Any = pool
        self._pool_size = pool_size
        # Connections that were just used, out of the pool: to take one from there and give it back takes 0.1 ms. None stays here
        # while somebody asks the pool for one.
        self._at_hand: list[Any] = []
        self._asking = 0
        # Connections of open transactions: a pool of their own, so that the verbs never wait for those.
        self._transactions = pool

    def sibling(self) -> Self:
        """A connections in the same place, with a pool of its own unless that is borrowed."""
        return type(self)(self.place, self.tables, dsn=self._dsn, pool=self._borrowed, pool_size=self._pool_size)

    async def loop_pool(self) -> Self:
        """A connections in the same place on the loop that runs now, ready for use."""
        connections = self.sibling()
        connections.behind_pooler = self.behind_pooler
        await connections.open_pool()
        return connections

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.place.label, self.place.password)

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        # Also when somebody wrote the same at this moment.
        return super().is_caused_by_one_request(error) or getattr(error.__cause__ or error, "sqlstate", None) == "23505"

    async def connect(self) -> Any:
        """A connection of its own that keeps no statements."""
        return await driver().connect(self._dsn, timeout=CONNECT_TIMEOUT, statement_cache_size=0, command_timeout=COMMAND_TIMEOUT)

    async def open(self, *, allowed: bool) -> None:
        """Leave schema and pool there, and know how the server is reached and what it survives."""
        async with self._alone() as connection:
            async with connection.transaction():
                pid, fsync, commit, standbys = (await connection.fetch(_SETTINGS))[0]
            self.behind_pooler = pid != connection.get_server_pid()
            self.durability = _durability(fsync, commit, standbys)
            await set_up(connection, self.tables, self.place.label, allowed=allowed)
        if self._pool is None:
            self._pool = await self._new_pool(reset=_keep)

    async def open_pool(self) -> None:
        """Have a pool, and a connection at hand."""
        self._pool = await self._new_pool(reset=_keep)
        try:
            self._at_hand.append(await self._pool.acquire())
        except BaseException:
            await self.close()
            raise

    async def _new_pool(self, **options: Any) -> Any:
        return await driver().create_pool(
            self._dsn,
            min_size=0,
            max_size=self._pool_size,
            timeout=CONNECT_TIMEOUT,
            command_timeout=COMMAND_TIMEOUT,
            statement_cache_size=0 if self.behind_pooler else 200,
            max_cached_statement_lifetime=_KEEP_PLANS_FOR,
            server_settings=None if self.behind_pooler else SERVER_SETTINGS,  # a pooler refuses what it does not know
            **options,
        )

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[Any]:
        if self._borrowed is not None:
            async with self._borrowed.acquire() as connection:
                yield connection
            return
        connection = await self.connect()
        try:
            yield connection
        finally:
            await connection.close()

    def perform(self, namespace: str, work: Callable[[Session, bool], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """What the work gives, tried again after errors that pass. It is told when it may have been done before."""

        def attempt(repeated: bool) -> Awaitable[T]:  # noqa: FBT001 - as all work
            return self.connected(lambda connection: work(self._session(connection, namespace), repeated))

        return self.retry_transient(attempt)

    def _session(self, connection: Any, namespace: str) -> Session:
        behind_pooler = self.behind_pooler
        jit_is_off = not self.is_borrowed and not behind_pooler
        return Session(connection, self.tables, namespace, in_transaction=behind_pooler, jit_is_off=jit_is_off)

    async def connected(self, use: Callable[[Any], Awaitable[T]]) -> T:
        """What this gives on a connection that is at hand or from the pool; behind a pooler, in a transaction."""
        connection = self._at_hand.pop() if self._at_hand else None
        if connection is None or connection.is_closed():
            connection = await self._from_pool(connection)
        try:
            if self.behind_pooler:
                async with connection.transaction(isolation="read_committed"):
                    answer = await use(connection)
            else:
                answer = await use(connection)
        except BaseException as error:
            if is_stale(error):
                connection.terminate()
            await self._pool.release(connection)  # the pool sees to what an error or a cancellation left behind
            raise
        if self.is_borrowed or self._asking or len(self._at_hand) == _MOST_AT_HAND:
            await self._pool.release(connection)
        else:
            self._at_hand.append(connection)
        return answer

    async def _from_pool(self, closed: Any | None) -> Any:
        """A connection of the pool, which gets this one back. What goes wrong here was never sent."""
        if closed is not None:
            await self._pool.release(closed)
        self._asking += 1
        try:
            return await self._pool.acquire()
        except (OSError, TimeoutError) as error:
            raise NotSentError from error
        finally:
            self._asking -= 1

    async def borrow_for_transaction(self) -> Any:
        """A connection for a transaction of the caller's; its session is reset when it comes back."""
        async with self._changing:
            if self._transactions is None:
                self._transactions = await self._new_pool()
        return await self._transactions.acquire()

    async def give_back(self, connection: Any) -> None:
        """The end of `borrow_for_transaction`."""
        pool = self._transactions
        if pool is not None:
            await pool.release(connection)

    async def close(self) -> None:
        """Let go of the pools, if they are ours."""
        pools = (self._pool, self._transactions)
        while self._at_hand:
            await self._pool.release(self._at_hand.pop())
        self._pool = self._transactions = None
        for pool in pools if self._borrowed is None else ():
            if pool is not None:
                await _close(pool)


async def _close(pool: Any) -> None:
    try:
        await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT)
    except Exception:  # noqa: BLE001 - the server may be gone; nothing is lost with it
        pool.terminate()


def _durability(fsync: str, commit: str, standbys: str) -> Durability:
    if fsync == "off" or commit == "off":
        return "process"
    return "replicated" if standbys and commit != "local" else "disk"
