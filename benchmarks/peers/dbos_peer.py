"""DBOS on SQLite or PostgreSQL.

Its SQLite file is put into WAL mode before it is opened, so that everybody's is: DBOS leaves that setting alone, and by itself
would have a rollback journal, which is slower. It writes through to the disk at every commit, as SQLite does by default.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from urllib.parse import urlsplit, urlunsplit

from dbos import DBOS, SetWorkflowID

from benchmarks.program import OwnTime, Program, result
from benchmarks.work import RESULT_BYTES

# When the body of the last run began and ended.
_body: list[float] = []


@DBOS.step()
async def work(n: int, size: int) -> str:
    return result(n, size)


@DBOS.workflow()
async def steps_in_turn(count: int, size: int) -> int:
    began = time.perf_counter()
    for n in range(count):
        await work(n, size)
    _body[:] = [began, time.perf_counter()]
    return count


@DBOS.workflow()
async def steps_at_once(count: int, size: int) -> int:
    await asyncio.gather(*(work(n, size) for n in range(count)))
    return count


class DbosPeer(Program):
    """Workflows that are called directly, which is DBOS's fastest way."""

    async def open(self, place: str) -> None:
        """Launch DBOS on this database."""
        DBOS(config={"name": "benchmark", "system_database_url": system_database_url(place), "log_level": "ERROR"})
        await asyncio.to_thread(DBOS.launch)

    async def close(self) -> None:
        """Shut it down."""
        await asyncio.to_thread(DBOS.destroy)

    async def run(self, steps: int, size: int) -> None:
        """One workflow."""
        await steps_in_turn(steps, size)

    async def fan_out(self, steps: int) -> None:
        """Gathered steps."""
        await steps_at_once(steps, RESULT_BYTES)

    async def record(self, steps: int) -> None:
        """A workflow that has ended."""
        with SetWorkflowID("replayed"):
            await steps_in_turn(steps, RESULT_BYTES)

    async def replay(self, steps: int) -> OwnTime | None:
        """A fork of it behind its last step. Timed by the body, so that the second in which DBOS finds the fork is left out."""
        _body.clear()
        forked = await DBOS.fork_workflow_async("replayed", steps + 1)
        await forked.get_result()
        began, ended = _body
        return OwnTime(ended - began)


def system_database_url(place: str) -> str:
    """The URL of this place."""
    if place.startswith("postgresql:"):
        return urlunsplit(urlsplit(place)._replace(scheme="postgresql+psycopg"))
    connection = sqlite3.connect(place)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return f"sqlite:///{place}"


PROGRAM = DbosPeer()
