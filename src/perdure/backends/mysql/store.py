"""MysqlStore: the contract on a MySQL or MariaDB database, through asyncmy.

The verbs are those of `SqlStore`, each a transaction. The frequent ones (record, finish, suspend, create) are first tried as one
packet, which is one round trip and one commit for all requests that arrived while the one before it was in flight.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from functools import partial
from typing import Any

from perdure.backends.base.batching import Reply
from perdure.backends.mysql import packets
from perdure.backends.mysql.address import FORM, parse_address
from perdure.backends.mysql.connections import MysqlConnections
from perdure.backends.mysql.errors import driver
from perdure.backends.mysql.transaction import MysqlTransaction
from perdure.backends.sql import closing, recording, runs
from perdure.backends.sql.dialect import MYSQL, Tables
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import BYTES
from perdure.backends.sql.store import SqlStore
from perdure.model.records import Created, Lease, Pulse, Signal


class MysqlStore(SqlStore[MysqlConnections]):
    """A store in a MySQL or MariaDB database, for any number of processes and machines.

    It opens up to `pool_size` connections by the DSN, or uses the asyncmy `pool` that is passed in and leaves it open. `table`
    begins the names of the tables, `prefix` keeps runs of several users of the same tables apart.
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
            raise ValueError(f"pass the URL of the MySQL database, {FORM}, or a pool of yours as pool=, one of them")
        driver()
        address = None if url is None else parse_address(url)
        connections = MysqlConnections(Tables(table, MYSQL, BYTES), address=address, pool=pool, pool_size=pool_size)
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def __repr__(self) -> str:
        address = self._connections.address
        return "MysqlStore(pool=...)" if address is None else f"MysqlStore('{address.server}/{address.database}')"

    @property
    def key(self) -> tuple[str, ...]:
        """Host and port and database, or the identity of a borrowed pool; table stem and prefix."""
        return ("mysql", *self._connections.location, self._connections.tables.stem, self._namespace)

    def _new_transaction(self, connections: MysqlConnections, lease: Lease) -> MysqlTransaction:
        return MysqlTransaction(connections, self._namespace, lease)

    async def _record_all(self, writes: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        return await self._connections.send_packet_or_perform(
            self._namespace,
            partial(packets.record, writes),
            packets.pulses_from,
            lambda db, _: recording.record_all(db, writes),
        )

    async def _close_all(self, writes: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        return await self._connections.send_packet_or_perform(
            self._namespace,
            partial(packets.close, writes),
            lambda _: [[] for _ in writes],
            lambda db, is_repeated: closing.close_once(db, writes, is_repeated=is_repeated),
        )

    async def _create_all(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created | None]]:
        return await self._connections.send_packet_or_perform(
            self._namespace,
            partial(packets.create, creations),
            partial(packets.created_from, creations),
            lambda db, _: runs.create_all(db, creations),
        )
