"""Runs of every sort to be moved, and everything that can be read of a store."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from perdure.model.journal import Entry, drop_entry
from perdure.model.records import Awaited, QueueLimits, RunRow, Schedule, Signal
from perdure.snapshots.consistent_view import View, load_view
from perdure.store import FullStore

# The backends that are left and moved into, by their names in `tests.backends.registry`.
PLACES = ("sqlite", "postgres", "redis", "mysql", "libsql")

# Some time ago, so that nothing here is due only later.
THEN = 1_700_000_000_000_000

IDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
PAYLOADS = st.binary(max_size=30)
INSTANTS = st.integers(THEN, THEN + 10**9)
NAMES = st.sampled_from(["go", "stop", "pay"])


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    made = [
        Entry(
            seq=seq,
            key=draw(IDS),
            phase=draw(st.sampled_from(["open", "close"])),
            kind=draw(st.sampled_from(["step", "sleep", "signal", "timeout", "race", "child", "foreign"])),
            name=draw(NAMES),
            ok=draw(st.booleans()),
            payload=draw(PAYLOADS),
            attempt=draw(st.integers(1, 5)),
            args_hash=draw(st.none() | st.just(b"hash")),
            started_at=draw(INSTANTS),
            ended_at=draw(INSTANTS),
            epoch=draw(INSTANTS),
        )
        for seq in range(1, draw(st.integers(0, 5)) + 1)
    ]
    if draw(st.booleans()):
        made.append(drop_entry(len(made) + 1, [entry.key for entry in made[:1]], draw(INSTANTS), draw(INSTANTS)))
    return made


@st.composite
def inboxes(draw: st.DrawFn) -> list[Signal]:
    return [
        Signal(seq=seq, kind="child", name=draw(NAMES), payload=draw(PAYLOADS))
        if draw(st.booleans())
        else Signal(seq=seq, name=draw(NAMES), payload=draw(PAYLOADS), dedupe=draw(st.none() | st.just(f"d{seq}")))
        for seq in sorted(draw(st.sets(st.integers(1, 20), max_size=4)))
    ]


@st.composite
def rows(draw: st.DrawFn, run_id: str) -> RunRow:
    status: Any = draw(st.sampled_from(["pending", "running", "suspended", "completed", "failed", "cancelled", "dead"]))
    has_ended = status in ("completed", "failed", "cancelled", "dead")
    waiting = tuple(
        Awaited(draw(st.sampled_from(["signal", "child"])), name) for name in sorted(draw(st.sets(NAMES, max_size=2)))
    )
    problem = draw(st.none() | IDS) if status in ("pending", "running") else None
    return RunRow(
        id=run_id,
        workflow=draw(NAMES),
        version=draw(st.integers(1, 3)),
        input=draw(PAYLOADS),
        input_hash=draw(st.sampled_from([b"hash", b"other", b""])),
        seed=draw(st.binary(min_size=16, max_size=16)),
        definition_hash=draw(st.none() | st.just("definition")),
        metadata=draw(st.sampled_from([b"{}", b'{"tenant":"acme"}'])),
        queue=draw(NAMES),
        priority=draw(st.integers(-5, 5)),
        limit_key=draw(st.none() | NAMES),
        start_at=draw(st.none() | INSTANTS),
        deadline=draw(st.none() | INSTANTS),
        parent_id=draw(st.none() | IDS),
        parent_key=draw(st.none() | NAMES),
        status=status,
        wake_at=draw(st.none() | INSTANTS),
        waiting_for=waiting if status == "suspended" else (),
        problem=problem,
        problem_at=None if problem is None else draw(INSTANTS),
        problem_count=0 if problem is None else draw(st.integers(1, 9)),
        held=draw(st.booleans()),
        progress=draw(st.none() | PAYLOADS),
        cancel_requested=draw(st.booleans()) and not has_ended,
        outcome=draw(PAYLOADS) if has_ended else None,
        parent_notified=draw(st.booleans()),
        created_at=draw(INSTANTS),
        updated_at=THEN,
    )


@st.composite
def runs(draw: st.DrawFn, min_size: int = 0) -> list[tuple[RunRow, list[Entry], list[Signal], int]]:
    """Some runs, and when each was put into its store."""
    ids = sorted(draw(st.sets(IDS, min_size=min_size, max_size=6)))
    return [(draw(rows(run_id)), draw(entries()), draw(inboxes()), draw(INSTANTS)) for run_id in ids]


async def fill(store: FullStore, some: list[tuple[RunRow, list[Entry], list[Signal], int]]) -> None:
    for row, journal, inbox, at in some:
        await store.restore(row, journal, inbox, now=at)


async def everything(store: FullStore, *, but: tuple[str, ...] = ("epoch", "attempts")) -> dict[str, Any]:
    """All that can be read of all runs, schedules and limits."""
    views: list[View | None] = [await load_view(store, info.id) for info in await store.list(limit=100_000)]
    shown = {view.row.id: _shown(view, but) for view in views if view is not None}
    return {"runs": shown, "schedules": list(await store.schedules()), "limits": await store.queue_limits()}


def _shown(view: View, but: tuple[str, ...]) -> Any:
    columns = msgspec.structs.asdict(view.row)
    columns["waiting_for"] = sorted(columns["waiting_for"], key=lambda one: (one.kind, one.name))
    return {name: value for name, value in columns.items() if name not in but}, list(view.journal), list(view.inbox)


SCHEDULES = [
    Schedule(id="nightly", workflow="go", spec="0 3 * * *", input=b"[1]", next_at=THEN, metadata=b'{"a":1}'),
    Schedule(id="once", workflow="stop", spec="", input=b"[]", next_at=None),
]
LIMITS = {"go": QueueLimits(concurrency=3), "pay": QueueLimits(per_key=1)}


async def add_schedules_and_limits(store: FullStore) -> None:
    for schedule in SCHEDULES:
        await store.put_schedule(schedule)
    for queue, limits in LIMITS.items():
        await store.limit_queue(queue, limits)
