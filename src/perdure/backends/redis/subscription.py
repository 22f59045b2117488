"""The subscription by which a store hears that something may be due.

Every script after which a run may be due or has ended publishes to the namespace's channel.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from perdure.backends.base.change_listener import ChangeListener
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.redis.connections import RedisConnections
from perdure.errors import PersistenceError

# How long one wait for a message lasts. It is also the time in which a server has to confirm the subscription.
_LISTEN: Final = 5.0


class RedisSubscription(ChangeListener):
    """The subscription of one store to the channel of its namespace."""

    def __init__(self, connections: RedisConnections, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._connections = connections
        self._pubsub: Any = None

    async def _open(self) -> None:
        pubsub = self._connections.client.pubsub()  # not every cluster's client has it
        try:
            await pubsub.subscribe(self._connections.keys.channel)
            # The server hears of it now; only its confirmation, which is a message, says that it publishes to us.
            if await pubsub.get_message(timeout=_LISTEN) is None:
                raise PersistenceError(self._connections.label, "it did not confirm a subscription")
        except BaseException:
            await _close(pubsub)
            raise
        self._pubsub = pubsub

    async def _listen(self) -> None:
        pubsub = self._pubsub
        try:
            while not self._is_closed:
                if await pubsub.get_message(timeout=_LISTEN) is not None:
                    self._lifecycle.wake()
        finally:
            await _close(pubsub)


async def _close(pubsub: Any) -> None:
    with suppress(Exception):  # the connection is lost
        await pubsub.aclose()
