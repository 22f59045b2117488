"""A run whose stored data is damaged is set aside with its problem, and takes no other run down with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import pytest

from perdure import Context, Runtime, workflow
from perdure.backends.sql import reading
from perdure.backends.sql.rows import Row, Values, entries_from
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.store import FullStore
from perdure.testing.contract.world import entry, new_run
from tests.backends.damage import vandal_of
from tests.backends.opening import store_at
from tests.backends.registry import LIBSQL, MYSQL, POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL

T = TypeVar("T")

HEALTHY: Final = [f"healthy-{n}" for n in range(5)]
# Columns that say which worker gets a run, and when. With another value in one of them it is not claimed, and stays as it is.
UNCLAIMED: Final = frozenset({"workflow", "version", "queue", "priority", "wake_at"})
# Columns that setting a run aside writes anew, which mends them.
REWRITTEN: Final = frozenset({"status", "problem", "problem_count", "updated_at", "wake_at", "lease_owner"})


async def greet(name: str) -> str:
    return f"hello {name}"


@workflow
async def flow(ctx: Context, name: str) -> str:
    greeting: str = await ctx.step(greet, name)
    word: str = await ctx.wait_for_signal("go")
    return f"{greeting}, {word}"


async def _make_due(store: FullStore, ids: list[str]) -> None:
    """Runs that have recorded a step, and whose awaited signal has arrived."""
    runtime = Runtime(store, workflows=[flow], concurrency=0, unload_grace=0)
    for run_id in ids:
        await runtime.start(flow, run_id, id=run_id)
    await runtime.sweep(limit=len(ids))
    for run_id in ids:
        await runtime.signal(run_id, "go", "go")


async def _read(run_id: str, verb: Callable[[str], Awaitable[T]]) -> T | SnapshotCorrupt:
    """What the verb gives for this run, or the error that names it."""
    try:
        return await verb(run_id)
    except SnapshotCorrupt as problem:
        if run_id not in str(problem):
            raise
        return problem


async def _status(store: FullStore, run_id: str) -> str:
    """The status of the run, its problem, or that it cannot be read."""
    row = await _read(run_id, store.get)
    if isinstance(row, SnapshotCorrupt):
        return "unreadable"
    assert row is not None
    return row.status if row.problem is None else "problem"


async def _work(store: FullStore, ids: list[str], *, until: float) -> dict[str, str]:
    """The statuses of these runs, when all have completed under a worker or time is up."""
    statuses: dict[str, str] = {}
    async with Runtime(store, workflows=[flow], concurrency=100, unload_grace=0):
        try:
            async with asyncio.timeout(until):
                while set(statuses.values()) != {"completed"}:
                    await asyncio.sleep(0.05)
                    statuses = {run_id: await _status(store, run_id) for run_id in ids}
        except TimeoutError:
            pass
    return statuses


async def _look_around(store: FullStore, ids: list[str]) -> None:
    """Everything that looks at all runs still shows the healthy ones."""
    listed = {line.id: line for line in await store.list(limit=1000)}
    assert set(HEALTHY) <= set(listed)
    await store.due(limit=1000)
    await store.count()
    runtime = Runtime(store, workflows=[flow], concurrency=0)
    await runtime.check()
    await runtime.sweep()
    for run_id in ids:
        await _read(run_id, store.journal)
        await _read(run_id, store.inbox)
        await _read(run_id, store.load)


def test_a_damaged_run_is_set_aside_and_the_others_are_driven(
    backend: Backend, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    vandal = vandal_of(backend, dsn)
    # On a server that is slow here, every third kind of damage.
    damages = {damage.run_id: damage for damage in vandal.damages()[:: 1 if IS_FULL or backend.pace < 4 else 3]}
    ids = [*damages, *HEALTHY]

    async def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        async with store_at(dsn) as store:
            return await call(store, *args, **kwargs)

    asyncio.run(run(_make_due, ids))
    before = {run_id: vandal.replace(run_id, *damage) for run_id, damage in damages.items()}
    with caplog.at_level(logging.ERROR, "perdure"):
        assert asyncio.run(run(_work, HEALTHY, until=10 * backend.pace)) == dict.fromkeys(HEALTHY, "completed")

    async def look() -> dict[str, str]:
        async with store_at(dsn) as store:
            await _look_around(store, list(damages))
            return {run_id: await _status(store, run_id) for run_id in damages}

    statuses = asyncio.run(look())
    assert {"dead", "failed"}.isdisjoint(statuses.values())
    for run_id, damage in damages.items():
        assert damage.column in UNCLAIMED or statuses[run_id] in ("completed", "problem", "unreadable"), (
            run_id,
            statuses[run_id],
        )
    assert not [line for line in caplog.messages if "did not answer" in line]

    for run_id, damage in damages.items():
        if statuses[run_id] != "completed" and (statuses[run_id] != "problem" or damage.column not in REWRITTEN):
            vandal.replace(run_id, damage.part, damage.column, before[run_id])

    async def go_on() -> dict[str, str]:
        async with store_at(dsn) as store:
            for run_id in damages:
                await store.unhold(run_id)
            return await _work(store, list(damages), until=10 * backend.pace)

    assert asyncio.run(go_on()) == dict.fromkeys(damages, "completed")


@on(SQLITE, POSTGRES, MYSQL, LIBSQL)
async def test_a_journal_that_is_too_large_for_the_memory_is_one_run_s_problem(
    shared_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = entries_from

    def read_small(rows: Iterable[Row], values: Values) -> list[Entry]:
        entries = read(rows, values)
        if any(entry.key == "large" for entry in entries):
            raise MemoryError
        return entries

    async with store_at(shared_dsn) as store:
        for run_id in ("a", "b", "c"):
            await store.create(new_run(run_id), entries=[entry(1, "large" if run_id == "b" else "small")])
        monkeypatch.setattr(reading, "entries_from", read_small)
        claims = await store.claim(10, 60, [("flow", 1)])
        assert [claim.run.id for claim in claims.claims] == ["a", "c"]
        row = await store.get("b")
        assert row is not None
        assert (row.status, row.attempts, row.problem_count, row.lease_until) == ("pending", 0, 1, None)
        assert "MemoryError" in (row.problem or "")
        with pytest.raises(SnapshotCorrupt, match="'b'"):
            await store.acquire("b", 60, due_only=False)
        monkeypatch.undo()
        await store.unhold("b")
        claims = await store.claim(10, 60, [("flow", 1)])
        assert [(claim.run.id, len(claim.journal)) for claim in claims.claims] == [("b", 1)]
