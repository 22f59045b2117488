"""How long a page of the list takes beside 1,000,000 stored runs: `python -m benchmarks.listing`, part of `make bench`.

Each figure is the median of some calls of `runtime.list`, so it holds more than the database's time, which is to be under 100 ms.
The status of this program says whether all were.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.programs.flows import steps
from perdure import RunInfo, Runtime
from tests.servers.postgres import PostgresServer

LIMIT_SECONDS: Final = 0.1
_CALLS: Final = 5
_PAGE: Final = 100
# The stored runs are copies of one, which differ in these columns. Both databases know these expressions.
_CHANGED: Final = {
    "id": "id || '-' || n",
    "updated_at": "updated_at - n * 1000",
    "workflow": "'flow-' || (n % 20)",
    "status": "CASE n % 10 WHEN 0 THEN 'failed' WHEN 1 THEN 'suspended' ELSE 'completed' END",
}


async def main(runs: int, kinds: Sequence[str]) -> bool:
    """Print a table; whether every page was there in time."""
    print(f"A page of {_PAGE} runs of {runs:,}, in milliseconds\n\n| filter | {' | '.join(kinds)} |\n|---|{'---:|' * len(kinds)}")
    taken = {kind: await _FILLED[kind](runs) for kind in kinds}
    for name in next(iter(taken.values())):
        print(f"| {name} | {' | '.join(f'{taken[kind][name] * 1000:.1f}' for kind in kinds)} |")
    return all(seconds < LIMIT_SECONDS for each in taken.values() for seconds in each.values())


async def _on_sqlite(runs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="perdure-listing-") as directory:
        path = Path(directory) / "runs.db"
        dsn = f"sqlite:///{path}"
        await steps.run(1, 20, id="run", store=dsn)
        await asyncio.to_thread(_fill_sqlite, path, runs)
        return await _measure(dsn)


def _fill_sqlite(path: Path, runs: int) -> None:
    connection = sqlite3.connect(path)
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(perdure_runs)")]
    numbers = "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?) "
    connection.execute(f"{numbers} INSERT INTO perdure_runs SELECT {_columns(names)} FROM perdure_runs, numbers", (runs,))
    connection.commit()
    connection.close()


async def _on_postgres(runs: int) -> dict[str, float]:
    server = PostgresServer(own=True)
    server.start()
    try:
        await steps.run(1, 20, id="run", store=server.dsn)
        await _fill_postgres(server.dsn, runs)
        return await _measure(server.dsn)
    finally:
        server.remove()


async def _fill_postgres(dsn: str, runs: int) -> None:
    import asyncpg  # type: ignore[import-untyped]  # it ships no types

    connection = await asyncpg.connect(dsn)
    rows = await connection.fetch(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'perdure_runs' ORDER BY ordinal_position"
    )
    columns = _columns([row["column_name"] for row in rows])
    await connection.execute(
        f"INSERT INTO perdure_runs SELECT {columns} FROM perdure_runs, generate_series(1::bigint, {runs}) AS n"
    )
    await connection.close()


def _columns(names: Sequence[str]) -> str:
    return ", ".join(_CHANGED.get(name, f'"{name}"') for name in names)


async def _measure(dsn: str) -> dict[str, float]:
    """The seconds that each kind of page takes."""
    runtime = Runtime(dsn, concurrency=0)
    try:
        first = await runtime.list(limit=_PAGE)
        pages: dict[str, Callable[[], Awaitable[list[RunInfo]]]] = {
            "none": lambda: runtime.list(limit=_PAGE),
            "none, the next page": lambda: runtime.list(limit=_PAGE, cursor=first[-1]),
            "`status=`": lambda: runtime.list(limit=_PAGE, status="failed"),
            "`workflow=`": lambda: runtime.list(limit=_PAGE, workflow="flow-7"),
            "`workflow=`, `status=`": lambda: runtime.list(limit=_PAGE, workflow="flow-10", status="failed"),
            "`prefix=`": lambda: runtime.list(limit=_PAGE, prefix="run-99"),
            "`prefix=`, `status=`": lambda: runtime.list(limit=_PAGE, prefix="run-99", status="failed"),
        }
        return {name: await _median(call) for name, call in pages.items()}
    finally:
        await runtime.close()


async def _median(call: Callable[[], Awaitable[list[RunInfo]]]) -> float:
    taken = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        if not await call():
            raise RuntimeError("the page is empty, so its time says nothing")
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


_FILLED: Final = {"SQLite": _on_sqlite, "PostgreSQL": _on_postgres}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.listing", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="how many are stored (1,000,000)")
    parser.add_argument("--only", choices=list(_FILLED), action="append", help="one kind of store")
    asked = parser.parse_args()
    sys.exit(0 if asyncio.run(main(asked.runs, asked.only or list(_FILLED))) else 1)
