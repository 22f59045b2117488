"""The client of a Redis store: the loop on which it lives, and the scripts that are sent through it.

Scripts go to the server in pipelines, many in one round trip. A pipeline is no transaction: each script in it is atomic, and is
answered and fails by itself. When the connection breaks it is unknown which scripts have run, and the whole pipeline is sent
again. That is safe: each script leaves a mark (a lease's token, or the token of the call) by which it recognises its repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.retries import WriteFailure
from perdure.backends.redis.address import RedisAddress, secrets_in
from perdure.backends.redis.driver import classify_failure, is_silence, map_error, open_client
from perdure.backends.redis.keys import Keys
from perdure.backends.redis.scripts import SCRIPTS, ScriptCall, send_calls
from perdure.backends.redis.server_info import FORMAT, ServerInfo, check_server, fsync_policy, server_info_from
from perdure.errors import PersistenceError


class RedisConnections(ServerConnections):
    """A client of redis-py on its loop, and what is known of the server."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-redis")

    def __init__(self, address: RedisAddress, keys: Keys, *, url: str | None, client: Any, cluster: bool) -> None:
        super().__init__(str(address), is_borrowed=client is not None)
        self.address = address
        self.keys = keys
        self.client = client
        self.durability = "process"  # until the server has said that it syncs every write
        self.server_info: ServerInfo | None = None
        self._url = url
        self._secrets = () if url is None else secrets_in(url)
        self._cluster = cluster

    def sibling(self) -> Self:
        """Connections to the same server, with a client of their own unless that is borrowed."""
        client = self.client if self.is_borrowed else None
        sibling = type(self)(self.address, self.keys, url=self._url, client=client, cluster=self._cluster)
        sibling._pinned_loop = self._pinned_loop  # noqa: SLF001 - its own kind
        sibling.server_info, sibling.durability = self.server_info, self.durability
        return sibling

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.label, self._secrets)

    def is_silence(self, error: BaseException) -> bool:
        return is_silence(error)

    async def drop_idle(self) -> None:
        """Close the connections that nothing uses now. A cluster's client keeps its own, by node."""
        pool = getattr(self.client, "connection_pool", None)
        if pool is not None:
            await pool.disconnect(inuse_connections=False)

    async def open(self, *, allowed: bool) -> None:
        """Make a client, and find out what the server does with what it is given.

        `allowed` is an explicit `setup`, which asks again. Raises `PersistenceError` for a server that would lose runs.
        """
        self.connect()
        if allowed or self.server_info is None:
            server_info = await self._ask_server()
            check_server(server_info, self.label)
            self.server_info, self.durability = server_info, server_info.durability

    def connect(self) -> None:
        """Make a client, unless there is one. It connects when it is used."""
        if self.client is None and self._url is not None:
            self.client = open_client(self._url, cluster=self._cluster)

    async def close(self) -> None:
        """Close the client, if it is ours."""
        if self.client is not None and not self.is_borrowed:
            client, self.client = self.client, None
            await client.aclose()

    async def _ask_server(self) -> ServerInfo:
        (reply,) = await self.execute([ScriptCall(SCRIPTS["setup"], [self.keys.root], [FORMAT])])
        if isinstance(reply, BaseException):
            raise reply
        format_, info = reply
        return server_info_from(format_, info, await fsync_policy(self.client))

    async def execute(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """The result of each call or, in its place, the error that it met; errors that pass are met by sending it again."""
        replies: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))

        async def attempt(_: bool) -> None:  # noqa: FBT001 - as `retry_transient` has it; scripts recognise a repetition by their mark
            nonlocal left
            for index, reply in zip(
                left, await send_calls(self.client, [calls[index] for index in left], self.label), strict=True
            ):
                replies[index] = reply
            left = [index for index in left if self._may_pass(replies[index])]
            if left:
                raise replies[left[0]]

        with suppress(PersistenceError):  # each of the calls that are left has its own error
            await self.retry_transient(attempt)
        return [self._result_of(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def _may_pass(self, reply: object) -> bool:
        return isinstance(reply, Exception) and classify_failure(reply) is not WriteFailure.PERMANENT

    def _result_of(self, call: ScriptCall, reply: Any) -> Any:
        if isinstance(reply, Exception):
            return self.map_error(reply)
        try:
            return call.read(reply)
        except Exception as refusal:  # noqa: BLE001 - it is raised to the caller of this script alone
            return refusal
