"""procrastinate on PostgreSQL: a queue of jobs. A job is one function, without recorded steps and without a stored result."""

from __future__ import annotations

from typing import Final

from procrastinate import App, PsycopgConnector

from benchmarks.program import result
from benchmarks.queues import QueueProgram, stopwatch
from benchmarks.work import RESULT_BYTES, Work

_AT_ONCE: Final = 100


class ProcrastinateQueue(QueueProgram):
    """Its asynchronous connector, with the pool that it has by default."""

    _app: App

    async def open(self, place: str) -> None:
        """Connect."""
        self._place = place
        self._app = App(connector=PsycopgConnector(conninfo=place))
        self._app.task(name="one_step")(_one_step)
        await self._app.open_async()

    async def close(self) -> None:
        """Disconnect."""
        await self._app.close_async()

    async def prepare(self, work: Work) -> None:
        """Make the tables in a new database, or fill the queue."""
        if work.shape == "prepare":
            await self._app.schema_manager.apply_schema_async()
        await super().prepare(work)

    async def enqueue(self, runs: int) -> None:
        """Defer jobs, all in one statement."""
        await self._app.configure_task("one_step").batch_defer_async(*({} for _ in range(runs)))

    async def open_worker(self, place: str) -> None:
        """Connect."""
        await self.open(place)

    async def work(self) -> None:
        """Woken by notifications, as by default."""
        await self._app.run_worker_async(concurrency=_AT_ONCE, install_signal_handlers=False)


async def _one_step() -> str:
    stopwatch.begin_step()
    done = result(1, RESULT_BYTES)
    stopwatch.end_run()
    return done


PROGRAM = ProcrastinateQueue()
