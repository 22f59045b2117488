"""absurd on PostgreSQL. Its schema is the one that its command line tool brings along.

A client has one connection. Runs that go on together get ten clients, each working on up to ten runs.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import psycopg
from absurd_sdk import AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL

from benchmarks.program import OwnTime, Program, result
from benchmarks.work import RESULT_BYTES, Work

_CLIENTS: Final = 10
_QUEUE: Final = "benchmark"


class AbsurdPeer(Program):
    """Tasks that are spawned and worked on in one process."""

    def __init__(self) -> None:
        self._clients: list[AsyncAbsurd] = []
        self._left = 0

    async def open(self, place: str) -> None:
        """Install the schema unless it is there, and connect."""
        async with await psycopg.AsyncConnection.connect(place, autocommit=True) as connection:
            with suppress(psycopg.errors.DuplicateFunction):
                await connection.execute(BUNDLED_SCHEMA_SQL)
        for _ in range(_CLIENTS):
            client = AsyncAbsurd(place, queue_name=_QUEUE)
            client.register_task("steps")(self._steps)
            await client.create_queue()
            self._clients.append(client)

    async def close(self) -> None:
        """Disconnect."""
        for client in self._clients:
            await client.close()
        self._clients.clear()

    async def run(self, steps: int, size: int) -> None:
        """One task, spawned and worked on by one client."""
        await self._work_on({"count": steps, "size": size})

    async def runs(self, work: Work) -> None:
        """At once: every client spawns its share, then all work until nothing is left."""
        if work.at_once == 1:
            await super().runs(work)
            return
        asked = {"count": work.steps, "size": work.size}
        for wave in work.waves:
            self._left = wave
            await asyncio.gather(*(self._spawn(client, asked, wave, nth) for nth, client in enumerate(self._clients)))
            await asyncio.gather(*(client.start_worker(concurrency=_CLIENTS) for client in self._clients))

    async def fan_out(self, steps: int) -> None:
        """One task with gathered steps, which take turns on its connection."""
        await self._work_on({"count": steps, "size": RESULT_BYTES, "at_once": True})

    async def record(self, steps: int) -> None:
        """A task that fails behind its last step, and has one more attempt."""
        await self._work_on({"count": steps, "size": RESULT_BYTES, "fails": True})

    async def replay(self, steps: int) -> OwnTime | None:
        """That attempt."""
        await self._clients[0].work_batch()
        return None

    async def _work_on(self, asked: dict[str, Any]) -> None:
        client = self._clients[0]
        await client.spawn("steps", asked, max_attempts=2, retry_strategy={"kind": "none"})
        await client.work_batch()

    @staticmethod
    async def _spawn(client: AsyncAbsurd, asked: dict[str, Any], runs: int, nth: int) -> None:
        for _ in range(nth, runs, _CLIENTS):
            await client.spawn("steps", asked)

    async def _steps(self, asked: dict[str, Any], ctx: Any) -> int:
        async def work(n: int) -> str:
            return result(n, asked["size"])

        async def step(n: int) -> None:
            await ctx.step(f"work{n:06}", lambda: work(n))

        if asked.get("at_once"):
            await asyncio.gather(*(step(n) for n in range(asked["count"])))
        else:
            for n in range(asked["count"]):
                await step(n)
        if asked.get("fails"):
            raise RuntimeError("at the end")
        self._left -= 1
        if not self._left:
            for client in self._clients:
                client.stop_worker()
        return int(asked["count"])


PROGRAM = AbsurdPeer()
