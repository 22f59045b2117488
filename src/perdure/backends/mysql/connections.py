"""Where a store's connections live: the pool on its event loop, with what their sessions are set to.

A session of ours commits each statement by itself, sees what was committed before each statement, refuses what it would have to
cut short, counts rows that an update found (also those it left as they were), and waits for a lock for a bounded time. A borrowed
session may be set to anything and is left so: there every verb is a transaction, and what cannot be had that way is asked for at
set-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.failures import NotSentError, WriteFailure
from perdure.backends.mysql import errors
from perdure.backends.mysql.address import MysqlAddress
from perdure.backends.mysql.literals import escaped, in_hexadecimal
from perdure.backends.mysql.packets import Packet, is_otherwise
from perdure.backends.mysql.wire import Wire
from perdure.backends.sql.connections import SqlConnections
from perdure.backends.sql.schema import set_up
from perdure.backends.sql.session import Result, Session
from perdure.backends.sql.tables import TABLES, Tables
from perdure.errors import PersistenceError
from perdure.store import Durability

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 10.0
WAIT_FOR_CONNECTION: Final = 60.0
STATEMENT_TIMEOUT: Final = 60.0
_FOUND_ROWS: Final = 2  # the protocol's CLIENT_FOUND_ROWS
_SESSION: Final = """
    SET SESSION sql_mode = 'STRICT_ALL_TABLES', time_zone = '+00:00', innodb_lock_wait_timeout = 10, lock_wait_timeout = 10;
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED
"""
_OPEN_IT: Final = "open it by asyncmy.create_pool(...,"
_STRICTLY: Final = """init_command="SET sql_mode = 'STRICT_ALL_TABLES'")"""
_SETTINGS: Final = (
    b"SELECT VERSION(), @@max_allowed_packet, @@sql_mode, @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog"
)
_UPDATE: Final = "UPDATE $meta SET value = value WHERE name = 'schema_version'"
_ENGINES: Final = f"""
    SELECT table_name, engine FROM information_schema.tables
    WHERE table_schema = DATABASE() AND table_name IN ({", ".join(f"?{number + 1}" for number in range(len(TABLES)))})
"""
_OLDEST: Final = {"MariaDB": (10, 6), "MySQL": (8, 0)}  # the first with SKIP LOCKED


class MysqlConnections(SqlConnections):
    """The loop and the pool of one MySQL store."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-mysql")

    def __init__(self, tables: Tables, *, address: MysqlAddress | None, pool: Any | None, pool_size: int) -> None:
        label = "MySQL store on a borrowed pool" if address is None else address.label
        loop = None if pool is None else pool._loop  # noqa: SLF001 - there is no public way to ask
        super().__init__(label, tables, is_borrowed=pool is not None, loop=loop)
        self.address = address
        self._pool = pool
        self._pool_size = pool_size
        self._max_packet = 1 << 20

    def sibling(self) -> Self:
        """A connections on the same server."""
        pool = self._pool if self.is_borrowed else None
        return type(self)(self.tables, address=self.address, pool=pool, pool_size=self._pool_size)

    @property
    def where(self) -> tuple[str, str]:
        """What tells this database from others in the process."""
        return (f"pool {id(self._pool)}", "") if self.address is None else (self.address.server, self.address.database)

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What to make of an error that a statement met."""
        return errors.classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        """What the caller gets."""
        return errors.map_error(error, self.label, "" if self.address is None else self.address.password)

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        """Whether a packet for many failed because of one of them: of what it says, or of who holds its row."""
        cause = error.__cause__ or error
        return self.classify_failure(cause) is WriteFailure.PERMANENT or errors.code_of(cause) in {
            errors.DUPLICATE,
            errors.LOCKED,
        }

    async def open(self, *, allowed: bool) -> None:
        """Leave a pool and the schema there, and know what the server takes and survives."""
        if self._pool is None:
            self._pool = await self._new_pool()
        async with self.transaction() as wire:
            await self._look(wire)
            await set_up(wire, self.tables, self.label, allowed=allowed)
            await self._look_closer(wire)

    async def _look(self, wire: Wire) -> None:
        (settings,) = await wire.send_texts([_SETTINGS])
        version, packet, modes, flush, log, sync = settings.rows[0]
        _check_version(self.label, version)
        if "STRICT_" not in modes:
            raise PersistenceError(self.label, f"its pool cuts short what does not fit; {_OPEN_IT} {_STRICTLY}")
        self._max_packet = int(packet)
        self.durability = _durability(int(flush), int(log), int(sync))

    async def _look_closer(self, wire: Wire) -> None:
        """Raise `PersistenceError` when the tables cannot roll back, or updates count only what they changed."""
        names = [f"{self.tables.stem}_{part}" for part in TABLES]
        updated, engines = await wire.send([self.tables.statement(_UPDATE), self.tables.statement(_ENGINES, *names)])
        if updated.count != 1:
            raise PersistenceError(self.label, f"its pool counts only changed rows; {_OPEN_IT} client_flag=CLIENT.FOUND_ROWS)")
        others = [f"{name} ({engine})" for name, engine in engines.rows if engine.lower() != "innodb"]
        if others:
            raise PersistenceError(self.label, f"{', '.join(others)} cannot roll back: ALTER TABLE ... ENGINE=InnoDB")

    async def _new_pool(self) -> Any:
        if self.address is None:
            raise PersistenceError(self.label, "it was closed; open a new one")
        return await errors.driver().create_pool(
            minsize=0,
            maxsize=self._pool_size,
            client_flag=_FOUND_ROWS,
            autocommit=True,
            charset="utf8mb4",
            init_command=_SESSION,
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=STATEMENT_TIMEOUT,
            **self.address.arguments(),
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Wire]:
        """A transaction in which each statement sees what was committed before it."""
        async with self._lent() as wire:
            wire.begin()
            yield wire
            await wire.commit()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Wire]:
        """For single statements that only read. A borrowed session may begin a transaction by itself, and see what is old."""
        async with self.transaction() if self.is_borrowed else self._lent() as wire:
            yield wire

    async def quickly(
        self,
        namespace: str,
        put_together: Callable[[Packet], None],
        answers_from: Callable[[Sequence[Result]], T],
        the_long_way: Callable[[Session, bool], Awaitable[T]],
    ) -> T:
        """What one packet gives, or, where things are otherwise than it expects, a transaction that looks at them."""

        async def attempt(is_repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` calls it
            results = await self._sent(namespace, put_together)
            if results is not None:
                return answers_from(results)
            async with self.transaction() as wire:
                return await the_long_way(Session(wire, self.tables, namespace), is_repeated)

        return await self.retry_transient(attempt)

    async def _sent(self, namespace: str, put_together: Callable[[Packet], None]) -> Sequence[Result] | None:
        async with self._lent() as wire:
            packet = Packet(self.tables, namespace, wire.quote)
            put_together(packet)
            try:
                return await wire.transact(packet.statements)
            except Exception as error:
                if not is_otherwise(error):
                    raise
                await wire.roll_back(error)
                return None

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[Wire]:
        """A connection; what is open on it when an error comes is rolled back."""
        wire = await self._taken()
        try:
            yield wire
        except BaseException as error:
            await wire.roll_back(error)
            raise
        finally:
            await self._given_back(wire)

    async def _taken(self) -> Wire:
        """A connection of the pool. What goes wrong before there is one was never sent."""
        pool: Any = self._pool
        try:
            async with asyncio.timeout(WAIT_FOR_CONNECTION):
                connection = await pool.acquire()
        except RuntimeError as error:
            raise PersistenceError(self.label, f"its pool lends nothing any more ({error}); open another") from error
        except Exception as error:
            if self.classify_failure(error) is WriteFailure.PERMANENT:
                raise
            raise NotSentError from error
        quote = in_hexadecimal if self.is_borrowed else escaped
        return Wire(connection, quote, self._max_packet, self.label, is_borrowed=self.is_borrowed)

    async def _given_back(self, wire: Wire) -> None:
        pool: Any = self._pool
        await pool.release(wire.connection)

    async def interrupt(self, wire: Wire) -> None:
        """End the statement that is under way on this connection, if a second one can be had for saying so."""
        with contextlib.suppress(Exception):  # then it ends by itself, or by its time limit
            async with asyncio.timeout(CONNECT_TIMEOUT), self._lent() as another:
                await another.send_texts([b"KILL QUERY %d" % wire.connection.thread_id()])

    async def close(self) -> None:
        """Let go of the pool, if it is ours."""
        pool, self._pool = self._pool, None
        if pool is not None and not self.is_borrowed:
            await _close(pool)


async def _close(pool: Any) -> None:
    pool.close()
    try:
        await asyncio.wait_for(pool.wait_closed(), CONNECT_TIMEOUT)
    except Exception:  # noqa: BLE001 - the server may be gone; nothing is lost with it
        pool.terminate()


def _check_version(label: str, version: str) -> None:
    kind = "MariaDB" if "MariaDB" in version else "MySQL"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST[kind]:
        oldest = ".".join(map(str, _OLDEST[kind]))
        raise PersistenceError(label, f"the server is {version}, without SKIP LOCKED; the oldest that has it is {kind} {oldest}")


def _durability(flush: int, log: int, sync: int) -> Durability:
    """Whether a commit waits for the disk. With a binary log that is not synced, recovery rolls back what is not in it."""
    return "disk" if flush == 1 and (not log or sync == 1) else "process"
