"""PostgresStore: the contract on a PostgreSQL database, through asyncpg.

The verbs are those of `backends.sql`, each a transaction. The hot ones (record, end or sleep, create, claim) are one statement.
All of these but claim go through batchers, where one statement serves all that arrived while the one before it was in flight; a
loop that writes much has batchers of its own (`loop_connections`).
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from perdure.backends.base.batching import Batcher, Reply, Request
from perdure.backends.base.claim_rules import ClaimRequest
from perdure.backends.base.loop_connections import LoopBatchers, LoopConnections
from perdure.backends.base.retries import REPEATED_REPLY_WITHIN
from perdure.backends.postgres import claiming
from perdure.backends.postgres.address import FORM, PostgresAddress, parse_address
from perdure.backends.postgres.batching import make_batchers
from perdure.backends.postgres.channel import PostgresChannel, connection_of
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.postgres.errors import driver
from perdure.backends.postgres.notifications import NotificationListener, channel_name
from perdure.backends.postgres.recording import record_all
from perdure.backends.sql import schedules
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Channel, Session
from perdure.backends.sql.store import Batchers, SqlStore
from perdure.backends.sql.transaction import SqlTransaction
from perdure.model.records import Claims, Lease, Pulse

Q = TypeVar("Q", bound=Request)
A = TypeVar("A")


class PostgresStore(SqlStore[PostgresConnections]):
    """A store in a PostgreSQL database, for any number of processes and machines.

    It opens up to `pool_size` connections by the DSN, and as many again for an event loop that writes much, or uses the asyncpg
    `pool` that is passed in and leaves it open. `table` begins the names of the tables, `prefix` keeps runs of several users of
    the same tables apart.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: Any | None = None,
        table: str = "perdure",
        prefix: str = "",
        auto_migrate: bool = True,
        pool_size: int = 10,
    ) -> None:
        if (url is None) == (pool is None):
            raise ValueError(f"pass the URL of the PostgreSQL database, {FORM}, or a pool of yours as pool=, one of them")
        driver()
        place = PostgresAddress(f"pool {id(pool)}", "", "") if url is None else parse_address(url)
        connections = PostgresConnections(place, table, dsn=url, pool=pool, pool_size=pool_size)
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def _on_attach(self) -> None:
        connections = self._connections
        self._listener = NotificationListener(connections.connect_listener, channel_name(connections.tables), self._lifecycle)
        self._batchers = make_batchers(connections, self._namespace)
        self._loop_connections = LoopConnections(partial(_open_on_this_loop, connections, self._namespace))
        weakref.finalize(self, self._loop_connections.abandon).atexit = False

    async def close(self) -> None:
        """Wait for what was submitted, and close the connections unless they were borrowed."""
        await super().close()
        await self._loop_connections.close()

    def _reopen_in_child(self) -> None:
        self._loop_connections.leak_after_fork()
        super()._reopen_in_child()

    def _batch(self, batcher: Callable[[Batchers], Batcher[Q, A]], request: Q) -> Awaitable[A]:
        """The answer of a batcher: one on the caller's loop if that has any, otherwise one on the connections' loop."""
        is_possible = self._connections.is_ready and not self._connections.is_borrowed and self._process == os.getpid()
        near = self._loop_connections.here() if is_possible else None
        if near is None:
            return self._enqueue(lambda: batcher(self._batchers), request)
        return self._enter_or_fail() or batcher(near).put(request, self._lifecycle.leave)

    def _wake_watchers(self) -> None:
        """The notification wakes them, sent with the change."""

    def _make_closer(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return partial(_close, self._connections, self._listener)

    def __repr__(self) -> str:
        return f"PostgresStore('{self._connections.place.hosts}/{self._connections.place.database}')"

    @property
    def key(self) -> tuple[str, ...]:
        """Host and port, database, search path, table stem and prefix."""
        place = self._connections.place
        return ("postgresql", place.hosts, place.database, place.search_path, self._connections.tables.stem, self._namespace)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now. Either statement may stand alone, so BEGIN and COMMIT are not sent."""
        await self._read(lambda db: schedules.put_worker(db, worker_id, info, self._time(now)))

    async def _claim(self, request: ClaimRequest) -> Claims:
        result = await claiming.claim(self._connections, self._namespace, request)
        loaded = await self._load(result, request.now)
        return Claims(claims=loaded.claims, next_wake_at=result.next_wake_at, now=result.now)

    def _notify_on(self, channel: Channel) -> Callable[[], Awaitable[object]] | None:
        notify = f'NOTIFY "{channel_name(self._connections.tables)}"'
        return partial(channel.connection.execute, notify) if isinstance(channel, PostgresChannel) else None

    def _new_transaction(self, connections: PostgresConnections, lease: Lease) -> PostgresTransaction:
        return PostgresTransaction(connections, self._namespace, lease)

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        await self._watch(self._listener, timeout, items=items)


class PostgresTransaction(SqlTransaction):
    """What `transaction(lease)` gives, usable until the context is left. Values of a statement are `$1`, `$2` and so on."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({
        "ABORT", "BEGIN", "COMMIT", "DEALLOCATE", "DISCARD", "END", "LISTEN", "PREPARE", "RELEASE", "RESET", "ROLLBACK",
        "SAVEPOINT", "SET", "START", "UNLISTEN",
    })  # fmt: skip

    async def _run(self, db: Session, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows = await connection_of(db).fetch(sql, *values, timeout=REPEATED_REPLY_WITHIN)  # it may take its time
        return [tuple(row) for row in rows]

    async def _record_all(self, db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
        return await record_all(db, writes)

    def _interrupt(self, holding: asyncio.Task[None]) -> None:
        holding.cancel()  # asyncpg cancels the statement on the server


async def _open_on_this_loop(connections: PostgresConnections, namespace: str) -> LoopBatchers[Batchers]:
    with connections.map_errors():
        loop_pool = await connections.loop_pool()
    return LoopBatchers(make_batchers(loop_pool, namespace, records_in_flight=2), loop_pool.close)


async def _close(connections: PostgresConnections, listener: NotificationListener) -> None:
    await listener.close()
    await connections.close()
