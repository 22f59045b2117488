"""The subscription by which a store hears that something may be due.

Every script after which a run may be due or has ended publishes to the namespace's channel, and so
does a record with items.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

from perdure.backends.base import change_listener
from perdure.backends.base.change_listener import ChangeListener
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.redis.connections import RedisConnections
from perdure.errors import PersistenceError

# The time in which a server has to confirm the subscription.
_CONFIRMS_WITHIN: Final = 5.0
# What `record.lua` publishes, as a client gives it: as text or as bytes.
_NEW_ITEMS: Final = ("items", b"items")


class RedisSubscription(ChangeListener):
    """The subscription of one store to the channel of its namespace."""

    def __init__(self, connections: RedisConnections, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._connections = connections
        self._pubsub: Any = None
        self._asked_at: float | None = None

    async def _open(self) -> None:
        pubsub = self._connections.client.pubsub()  # not every cluster's client has it
        try:
            await pubsub.subscribe(self._connections.keys.channel)
            # The server hears of it now; only its confirmation, which is a message, says that it publishes to us.
            if await pubsub.get_message(timeout=_CONFIRMS_WITHIN) is None:
                raise PersistenceError(self._connections.label, "it did not confirm a subscription")
        except BaseException:
            await _close(pubsub)
            raise
        self._pubsub, self._asked_at = pubsub, None

    async def _listen(self) -> None:
        pubsub = self._pubsub
        try:
            while not self._is_closed:
                message = await pubsub.get_message(timeout=change_listener.CHECK_EVERY)
                if message is not None and message["type"] != "pong":
                    self._lifecycle.wake(only_items=message["data"] in _NEW_ITEMS)
                elif message is None:  # also for redis-py's own check, whose reply it hides
                    await self._check(pubsub)
                self._asked_at = self._asked_at if message is None else None
        finally:
            await _close(pubsub)

    async def _check(self, pubsub: Any) -> None:
        """Ask the server whether it is still there. Raises `PersistenceError` when it has not replied to the last time."""
        now = time.monotonic()
        if self._asked_at is None:
            await pubsub.ping()
            self._asked_at = now
        elif now - self._asked_at >= change_listener.CHECK_EVERY / 2:
            raise PersistenceError(self._connections.label, "its subscription has fallen silent")


async def _close(pubsub: Any) -> None:
    with suppress(Exception):  # the connection is lost
        await pubsub.aclose()
