"""LISTEN on a connection of its own, which wakes watchers, and polling where that is impossible.

Whatever makes a run due or ends it sends a NOTIFY in the same transaction. Behind a pooler no notification arrives, and a
borrowed pool lends no connection for ever; there a watch just ends after POLL_EVERY, and its caller looks for due runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.sql.dialect import Tables

POLL_EVERY: Final = 1.0


def channel_name(tables: Tables) -> str:
    """The channel on which the users of these tables notify each other that a run may be due or has ended."""
    return f"{tables.stem}_due"


class NotificationListener:
    """The connection on which a store listens. Everything but `is_live` happens on the connections' loop.

    `is_live` says that a notification sent from now on wakes the watchers. When the connection is lost they are woken once, since
    a notification may have been missed, and the next watch opens another.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]], channel: str, lifecycle: Lifecycle) -> None:
        """`connect` opens a connection."""
        self._connect = connect
        self._channel = channel
        self._lifecycle = lifecycle
        self._connection: Any | None = None
        self._starting: asyncio.Task[None] | None = None
        self.is_live = False

    async def start(self) -> None:
        """Listen. Many may start it at once."""
        if self.is_live:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
        with contextlib.suppress(Exception):  # the watcher polls, and meets the error at its next verb
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        connection = await self._connect()
        try:
            connection.add_termination_listener(self._on_lost)
            await connection.add_listener(self._channel, self._on_notification)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self.is_live = not connection.is_closed()

    def _on_notification(self, *_: object) -> None:
        self._lifecycle.wake()

    def _on_lost(self, *_: object) -> None:
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
            connection.remove_termination_listener(self._on_lost)
            try:
                await connection.close(timeout=1.0)
            except Exception:  # noqa: BLE001 - the server may be down; there is nothing to save
                connection.terminate()
