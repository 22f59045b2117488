"""Constructs with I/O of the body's own, outside any step: nothing of it is recorded, and every replay does it again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.fuzz.body import Body
from tests.fuzz.programs import Node, construct


def _in_a_thread(text: str) -> str:
    time.sleep(0.001)
    return text


@construct("to_thread", "own")
async def to_thread(body: Body, node: Node) -> Any:
    return await asyncio.to_thread(_in_a_thread, node.at)


@construct("socket", "own")
async def socket(body: Body, node: Node) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", body.hosting.port)
    try:
        writer.write(node.at.encode() + b"\n")
        return (await reader.readline()).decode()
    finally:
        writer.close()


@construct("database", "own", "aiosqlite")
async def database(body: Body, node: Node) -> Any:
    async with body.hosting.database.execute("SELECT ?", (node.at,)) as cursor:
        return list(await cursor.fetchone())


async def _of_the_host(text: str) -> str:
    await asyncio.sleep(0.002)
    return text


@construct("host_task", "own")
async def host_task(body: Body, node: Node) -> Any:
    return await asyncio.create_task(_of_the_host(node.at), context=body.hosting.context.copy())


@construct("host_lock", "own")
async def host_lock(body: Body, node: Node) -> Any:
    async with body.hosting.lock:
        return await body.step(body.steps.slow, node.at)


@construct("host_queue", "own")
async def host_queue(body: Body, node: Node) -> Any:
    return await body.hosting.through_queue(node.at)


@construct("finally_io", "own")
async def finally_io(body: Body, node: Node) -> Any:
    """Await the host while the block is left, also when the run leaves memory."""
    try:
        return await body.step(body.steps.slow, node.at)
    finally:
        await asyncio.to_thread(_in_a_thread, node.at)
