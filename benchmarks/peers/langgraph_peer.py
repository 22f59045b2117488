"""LangGraph's functional interface on SQLite: an entrypoint with tasks, in its durable mode.

Its saver sets WAL mode itself, and writes through to the disk at every commit, as SQLite does unless told otherwise.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from typing import Any

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task

from benchmarks.program import OwnTime, Program, result
from benchmarks.work import RESULT_BYTES


@task
async def work(n: int, size: int) -> str:
    return result(n, size)


class LanggraphPeer(Program):
    """One saver, and a thread of LangGraph's for each run."""

    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        self._graph: Any = None

    async def open(self, place: str) -> None:
        """Compile the entrypoint over a saver at this path."""
        saver = await self._opened.enter_async_context(AsyncSqliteSaver.from_conn_string(place))

        @entrypoint(checkpointer=saver)
        async def graph(asked: dict[str, Any]) -> int:
            if asked["at_once"]:
                await asyncio.gather(*(work(n, asked["size"]) for n in range(asked["count"])))
            else:
                for n in range(asked["count"]):
                    await work(n, asked["size"])
            if asked["fails"]:
                raise EndReached
            return int(asked["count"])

        self._graph = graph

    async def close(self) -> None:
        """Close the saver."""
        await self._opened.aclose()

    async def run(self, steps: int, size: int) -> None:
        """One thread."""
        await self._invoke(uuid.uuid4().hex, _asked(steps, size))

    async def fan_out(self, steps: int) -> None:
        """Gathered tasks."""
        await self._invoke(uuid.uuid4().hex, _asked(steps, RESULT_BYTES, at_once=True))

    async def record(self, steps: int) -> None:
        """A thread that fails behind its last task."""
        await self._fail(_asked(steps, RESULT_BYTES, fails=True))

    async def replay(self, steps: int) -> OwnTime | None:
        """Invoke it without input, which goes on where it failed."""
        await self._fail(None)
        return None

    async def _invoke(self, thread: str, asked: dict[str, Any] | None) -> None:
        await self._graph.ainvoke(asked, {"configurable": {"thread_id": thread}}, durability="sync")

    async def _fail(self, asked: dict[str, Any] | None) -> None:
        try:
            await self._invoke("replayed", asked)
        except EndReached:
            return
        raise RuntimeError("the thread should have failed at its end")


class EndReached(Exception):
    """Every task has run."""


def _asked(count: int, size: int, *, at_once: bool = False, fails: bool = False) -> dict[str, Any]:
    return {"count": count, "size": size, "at_once": at_once, "fails": fails}


PROGRAM = LanggraphPeer()
