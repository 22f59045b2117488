"""LISTEN on a connection of its own, which wakes watchers.

Whatever makes a run due or ends it sends a NOTIFY in the same transaction, and so do new items of streams. Behind a pooler no
notification arrives, and a borrowed pool lends no connection for ever: there the watchers poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from perdure.backends.base import change_listener
from perdure.backends.base.change_listener import ChangeListener
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.sql.dialect import Tables


def channel_name(tables: Tables) -> str:
    """The channel on which the users of these tables notify each other that a run may be due or has ended."""
    return f"{tables.stem}_due"


# The payload of a notification that says of new items only.
NEW_ITEMS: Final = "items"


class NotificationListener(ChangeListener):
    """The connection on which one store listens to a channel."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], channel: str, lifecycle: Lifecycle) -> None:
        """`connect` opens a connection, or raises where no notification would arrive on it."""
        super().__init__(lifecycle)
        self._connect = connect
        self._channel = channel
        self._connection: Any = None
        self._is_lost = asyncio.Event()

    async def _open(self) -> None:
        connection, is_lost = await self._connect(), asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: is_lost.set())
            await connection.add_listener(self._channel, self._on_notification)
        except BaseException:
            connection.terminate()
            raise
        self._connection, self._is_lost = connection, is_lost

    def _on_notification(self, _connection: object, _pid: int, _channel: str, payload: str) -> None:
        self._lifecycle.wake(only_items=payload == NEW_ITEMS)

    async def _listen(self) -> None:
        connection = self._connection
        try:
            while not self._is_lost.is_set() and not self._is_closed:
                await asyncio.wait([lost := asyncio.ensure_future(self._is_lost.wait())], timeout=change_listener.CHECK_EVERY)
                if not lost.cancel():
                    return
                await connection.execute("SELECT 1")  # in one round trip; raises when no reply comes
        finally:
            try:
                await connection.close(timeout=1.0)
            except Exception:  # noqa: BLE001 - the server may be down; there is nothing to save
                connection.terminate()
