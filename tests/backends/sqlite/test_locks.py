"""An error in the middle of a read: the connection is closed, and with it the locks that other processes wait for."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.errors import PersistenceError
from perdure.testing.contract.world import NOW, new_run, outcomes

VERBS: Final[dict[str, Callable[[SQLiteStore], Awaitable[Any]]]] = {
    "cancel": lambda store: store.cancel("run-1"),
    "reopen": lambda store: store.reopen("run-1", []),
    "get": lambda store: store.get("run-1"),
}


def damage(path: Path) -> None:
    """Put a byte that is not UTF-8 into a text column of one run of several."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE perdure_runs SET definition_hash = CAST(X'80' AS TEXT) WHERE id = 'run-1'")
        connection.commit()


def write_at_once(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE perdure_runs SET updated_at = updated_at")
        other.rollback()
        (is_busy, *_), *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert not is_busy, "a statement that was not finished still reads from the log"


@pytest.mark.parametrize("verb", VERBS)
async def test_others_can_write_at_once_after_a_read_that_failed_half_way(
    path: Path, store: SQLiteStore, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Text that is not UTF-8 is read as bytes; here its error stands for any other in the middle of a read.
    monkeypatch.setattr("perdure.backends.sqlite.writer_connection._NOT_TEXT", "an error that never comes")
    for n in range(3):
        await store.create(new_run(f"run-{n}"), now=NOW)
    await asyncio.to_thread(damage, path)
    # The answer keeps the error alive, and the error the frames of its traceback.
    (answer,) = await outcomes([VERBS[verb](store)])
    assert isinstance(answer, PersistenceError)
    assert "could not decode" in str(answer).lower()
    await asyncio.to_thread(write_at_once, path)
