"""Requests to a bucket that are lost with their connection, before the server has done its work or after, and nobody is told."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

import pytest
from obstore.store import S3Store

from perdure.backends.key_value import KeyValueRunStore
from perdure.testing.contract.world import entry, new_run
from tests.servers import s3
from tests.wire import Wire

BUCKET: Final = "perdure-lost-replies"
AT_ONCE: Final = struct.pack("ii", 1, 0)


class ResettingWire(Wire):
    """Resets the connections it cuts, which a client does not take for an orderly end, and can keep requests from the server."""

    keep = 0
    kept = 0

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        if self.keep == 0:
            super()._serve(client)
            return
        self.keep -= 1
        self.kept += 1
        with client:
            client.recv(1 << 20)


@pytest.fixture
async def wire() -> AsyncIterator[ResettingWire]:
    server = await asyncio.to_thread(s3.shared_server)
    await asyncio.to_thread(server.make_bucket, BUCKET)
    wire = ResettingWire(server.endpoint)
    yield wire
    await asyncio.to_thread(wire.close)


@pytest.fixture
async def store(wire: Wire) -> AsyncIterator[KeyValueRunStore]:
    options = s3.options_for(wire.url)
    options["client_options"]["pool_max_idle_per_host"] = "0"  # a connection for each request, so that any may be cut
    store = KeyValueRunStore(S3Store(BUCKET, prefix=secrets.token_hex(8), **options))
    await store.setup()
    yield store
    await store.close()


@pytest.mark.parametrize("what", ["keep", "lose"])
@pytest.mark.parametrize("often", [1, 3])
async def test_what_was_lost_on_its_way_is_done_and_only_once(
    store: KeyValueRunStore, wire: ResettingWire, what: str, often: int
) -> None:
    setattr(wire, what, often)
    claim = (await store.create(new_run(), ttl=60)).claim
    assert claim is not None
    for seq in range(1, 4):
        setattr(wire, what, often)
        await store.record(claim.lease, [entry(seq)])
    setattr(wire, what, often)
    await store.signal("run", "go", b"1")
    assert wire.kept + wire.lost == 5 * often
    assert await store.journal("run") == [entry(seq) for seq in range(1, 4)]
    assert [signal.seq for signal in await store.inbox("run")] == [1]


@pytest.mark.parametrize("what", ["keep", "lose"])
async def test_a_bucket_whose_answers_are_lost_is_not_taken_for_one_that_ignores_conditions(
    store: KeyValueRunStore, wire: ResettingWire, what: str
) -> None:
    for _ in range(3):
        setattr(wire, what, 1)
        await store.setup()
    assert wire.kept + wire.lost == 3
