"""DBOS as a queue on SQLite or PostgreSQL: a `DBOSClient` enqueues, and processes that launched DBOS listen to the queue."""

from __future__ import annotations

import asyncio
from typing import Final

from dbos import DBOS, DBOSClient

from benchmarks.peers.dbos_peer import system_database_url
from benchmarks.program import result
from benchmarks.queues import QueueProgram, stopwatch
from benchmarks.work import RESULT_BYTES, Work

_QUEUE: Final = "benchmark"


@DBOS.step()
async def format_result() -> str:
    """The step."""
    stopwatch.begin_step()
    return result(1, RESULT_BYTES)


@DBOS.workflow(name="one_step")
async def one_step() -> str:
    """A workflow of one step."""
    done: str = await format_result()
    stopwatch.end_run()
    return done


class DbosQueue(QueueProgram):
    """A queue without limits, asked once a second, as by default."""

    _client: DBOSClient | None = None

    async def open(self, place: str) -> None:
        """Remember the place: a client needs tables."""
        self._place = place

    async def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            await asyncio.to_thread(self._client.destroy)
            self._client = None

    async def prepare(self, work: Work) -> None:
        """Make the tables and the queue in a new database, or fill the queue."""
        if work.shape == "prepare":
            await self.open_worker(self._place)
            await asyncio.to_thread(_launch)
            await asyncio.to_thread(DBOS.destroy)
        else:
            self._client = await asyncio.to_thread(DBOSClient, system_database_url=system_database_url(self._place))
        await super().prepare(work)

    async def enqueue(self, runs: int) -> None:
        """Enqueue workflows, ten at a time."""
        if self._client is None:
            raise RuntimeError("the client was not opened")
        client, room = self._client, asyncio.Semaphore(10)

        async def enqueue_one() -> None:
            async with room:
                await client.enqueue_async({"queue_name": _QUEUE, "workflow_name": "one_step"})

        await asyncio.gather(*(enqueue_one() for _ in range(runs)))

    async def open_worker(self, place: str) -> None:
        """Configure DBOS. Launching it would begin the work."""
        DBOS(config={"name": "benchmark", "system_database_url": system_database_url(place), "log_level": "ERROR"})

    async def work(self) -> None:
        """In DBOS's own threads."""
        await asyncio.to_thread(_launch)
        await asyncio.Event().wait()


def _launch() -> None:
    DBOS.launch()
    DBOS.register_queue(_QUEUE)


PROGRAM = DbosQueue()
