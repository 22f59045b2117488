"""Connections on a caller's event loop are closed once, whoever begins with it: the store, a garbage collection, or asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.backends.base.loop_connections import LoopBatchers, LoopConnections


@pytest.mark.parametrize("way", ["left open", "abandoned", "abandoned, then closed", "closed twice"])
def test_they_are_closed_once_and_without_a_word(way: str) -> None:
    closed, complaints = 0, list[dict[str, Any]]()

    async def open_one() -> LoopBatchers[str]:
        return LoopBatchers("batchers", close)

    async def close() -> None:
        nonlocal closed
        await asyncio.sleep(0.01)
        closed += 1

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        connections = LoopConnections(open_one)
        await connections.open_here()
        assert connections.here() == "batchers"
        if way.startswith("abandoned"):
            connections.abandon()
        if way == "abandoned, then closed":
            await asyncio.sleep(0)
            await connections.close()
        if way == "closed twice":
            await asyncio.gather(connections.close(), connections.close())

    asyncio.run(main(), debug=True)
    assert closed == 1
    assert complaints == []
