"""A value that is longer than SQLite takes: refused for good, alone, and the file is as good as before."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, stores, workflow
from perdure.backends.sqlite.connection import DatabaseFile
from perdure.errors import ValueNotStorable

LONGEST = 100_000


@pytest.fixture
def _short_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with a low limit, as a file's owner may compile SQLite: the usual one is a gigabyte."""
    connect = DatabaseFile.connect

    def limited(self: DatabaseFile, owner: object, **options: Any) -> sqlite3.Connection:
        connection = connect(self, owner, **options)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        return connection

    monkeypatch.setattr(DatabaseFile, "connect", limited)


@pytest.mark.usefixtures("_short_values")
async def test_a_result_that_is_too_long_fails_its_step_and_no_other(tmp_path: Path) -> None:
    calls: list[int] = []

    async def produce(size: int) -> str:
        calls.append(size)
        return "x" * size

    @workflow
    async def flow(ctx: Context, size: int) -> str:
        try:
            return (await ctx.step(produce, size))[:1]
        except ValueNotStorable as error:
            return str(error)

    store = await asyncio.to_thread(stores.sqlite, tmp_path / "runs.db")
    runtime = Runtime(store, [flow], concurrency=0)
    sizes = [10, 2 * LONGEST, 20, 3 * LONGEST, 30]
    outcomes = await asyncio.gather(*(runtime.run(flow, size, id=f"run-{size}") for size in sizes))
    assert all(isinstance(outcome, Ok) for outcome in outcomes)
    texts = [outcome.value for outcome in outcomes if isinstance(outcome, Ok)]
    assert [texts[0], texts[2], texts[4]] == ["x"] * 3
    assert texts[1].startswith(
        "the value at value cannot be stored: it has 200,002 bytes (a value is larger than SQLite can hold"
    )
    assert texts[3].startswith("the value at value cannot be stored: it has 300,002 bytes (")
    assert sorted(calls) == sorted(sizes)
    await runtime.close()
