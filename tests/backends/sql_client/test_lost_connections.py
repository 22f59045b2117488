"""Connections that break at every moment of a verb, while the client has others or can get them: nobody hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from perdure.backends.sql_client.store import SqlClientStore
from perdure.model.records import Lease
from perdure.testing.contract.world import entry, new_run
from tests.backends.sql_client.places import Place
from tests.wire import Wire

BOTH = pytest.mark.parametrize("here", ["postgres", "mysql"], indirect=True)


@pytest.fixture
async def wire(here: Place) -> AsyncIterator[Wire]:
    wire = Wire(here.where)
    yield wire
    await asyncio.to_thread(wire.close)


@pytest.fixture
async def cut(here: Place, wire: Wire) -> AsyncIterator[SqlClientStore]:
    """A store whose connections go through the wire."""
    through = Place(here.dialect, wire.url)
    store = through.store()
    await store.setup()
    yield store
    await through.close()


async def leased(store: SqlClientStore) -> Lease:
    claim = (await store.create(new_run(), ttl=600)).claim
    assert claim is not None
    return claim.lease


@BOTH
async def test_what_broke_off_with_its_connection_is_done_and_only_once(
    store: SqlClientStore, cut: SqlClientStore, wire: Wire
) -> None:
    lease, seq = await leased(store), 0
    while wire.lost == seq:  # until a verb was over before the reply that was to be lost
        wire.later, wire.lose, seq = seq, 1, seq + 1
        await cut.record(lease, [entry(seq)])
    sent, number = wire.lost, 0
    while wire.lost == sent + number:
        wire.later, wire.lose, number = number, 1, number + 1
        await cut.signal("run", "go", b"%d" % number)
    assert min(seq, number) > 4
    assert await store.journal("run") == [entry(n) for n in range(1, seq + 1)]
    assert [signal.payload for signal in await store.inbox("run")] == [b"%d" % n for n in range(1, number + 1)]


@BOTH
async def test_what_is_read_while_connections_break_is_read(store: SqlClientStore, cut: SqlClientStore, wire: Wire) -> None:
    await leased(store)
    for later in range(3):
        wire.later, wire.lose = later, 1
        assert await cut.get("run") == await store.get("run")
