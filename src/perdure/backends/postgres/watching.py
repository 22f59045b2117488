"""Being told that something may be due: LISTEN on a connection of its own, and looking now and then where that is impossible.

Whatever makes a run due or ends it sends a NOTIFY in the same transaction. Behind a pooler nobody hears those, and a borrowed
pool lends no connection for ever; there a watch just ends after POLL_EVERY, and its caller looks for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.postgres.connections import PostgresConnections

POLL_EVERY: Final = 1.0


class Listener:
    """The connection on which a store listens. Everything but `is_live` happens on the connections loop.

    `is_live` says that a notification sent from now on wakes the watchers. When the connection is lost they are woken once, since
    something may have been missed, and the next watch opens another.
    """

    def __init__(self, connections: PostgresConnections, lifecycle: Lifecycle) -> None:
        self._connections = connections
        self._lifecycle = lifecycle
        self._connection: Any | None = None
        self._starting: asyncio.Task[None] | None = None
        self.is_live = False

    @property
    def is_possible(self) -> bool:
        """Whether notifications can be heard here at all."""
        return not self._connections.is_borrowed and not self._connections.behind_pooler

    async def start(self) -> None:
        """Listen, if that is possible. Many may ask at once."""
        if self.is_live or not self.is_possible:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
        with contextlib.suppress(Exception):  # the watcher looks for itself, and meets the error at its next verb
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        connection = await self._connections.connect()
        try:
            connection.add_termination_listener(self._lost)
            await connection.add_listener(self._connections.tables.channel, self._heard)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self.is_live = not connection.is_closed()

    def _heard(self, *_: object) -> None:
        self._lifecycle.wake()

    def _lost(self, *_: object) -> None:
        self._connection = None
        self.is_live = False
        self._lifecycle.wake()

    async def close(self) -> None:
        """Stop listening."""
        if self._starting is not None and not self._starting.done():
            with contextlib.suppress(Exception):
                await asyncio.shield(self._starting)
        connection, self._connection = self._connection, None
        self.is_live = False
        if connection is not None:
            connection.remove_termination_listener(self._lost)
            try:
                await connection.close(timeout=1.0)
            except Exception:  # noqa: BLE001 - the server may be gone; nothing is lost with it
                connection.terminate()
