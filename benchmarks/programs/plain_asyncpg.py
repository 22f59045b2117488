"""The floor for PostgreSQL: asyncpg, one row for each commit, on one connection, or on 100 when there are many runs."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final

from benchmarks.program import Program, result
from benchmarks.work import RESULT_BYTES, Work

_TABLE: Final = "CREATE TABLE IF NOT EXISTS steps (run text, n integer, value text, PRIMARY KEY (run, n))"
_INSERT: Final = "INSERT INTO steps VALUES ($1, $2, $3)"
_MOST_CONNECTIONS: Final = 100


class PlainAsyncpg(Program):
    """A connection for each run that goes on at the same time, up to 100, opened before the time begins."""

    _pool: Any

    async def open(self, place: str) -> None:
        """Make the table."""
        import asyncpg  # type: ignore[import-untyped]  # it ships no types

        self._pool = await asyncpg.create_pool(place, min_size=1, max_size=_MOST_CONNECTIONS)
        await self._pool.execute(_TABLE)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    async def prepare(self, work: Work) -> None:
        """Warm up as many connections as the work can use."""
        width = work.steps if work.shape == "fan out" else work.at_once
        connections = [await self._pool.acquire() for _ in range(min(width, _MOST_CONNECTIONS))]
        name = uuid.uuid4().hex
        for n, connection in enumerate(connections):
            await connection.execute(_INSERT, name, n, "")
            await self._pool.release(connection)

    async def run(self, steps: int, size: int) -> None:
        """Row after row on one connection."""
        name = uuid.uuid4().hex
        async with self._pool.acquire() as connection:
            for n in range(steps):
                await connection.execute(_INSERT, name, n, result(n, size))

    async def fan_out(self, steps: int) -> None:
        """All rows at once."""
        name = uuid.uuid4().hex
        await asyncio.gather(*(self._pool.execute(_INSERT, name, n, result(n, RESULT_BYTES)) for n in range(steps)))


PROGRAM = PlainAsyncpg()
