"""Listing: which runs there are, in a stable order, by literal prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from perdure.model.durations import moment
from perdure.model.records import RunInfo, RunRow
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import NOW, World, at, equal, holds, new_run, refused

_TOP: Final = "\U0010ffff"
# Ids, and prefixes to look for them by: what some database takes for a pattern, and the end of a range of code points.
WILDCARDS: Final = (
    ("order_1", "orderX1", "order%1", "Order_1", "order\\1", "order*1", "order?1", "order[1]", "order.1", "ordér_1"),
    (*(f"order{char}" for char in "_%\\*?[.X"), "order_1x", "%", "", "order_1"),
)
HIGHEST: Final = (
    ("a", f"a{_TOP}", f"a{_TOP}{_TOP}", f"a{_TOP}b", "a\uffff", "a😀", "b", f"{_TOP}{_TOP}x"),
    ("a", f"a{_TOP}", _TOP, _TOP + _TOP, "a\uffff", "a\ud7ff", "a😀"),
)


async def while_runs_change(world: World, look: Callable[[list[str]], Awaitable[None]]) -> None:
    """Call `look` with the ids of eight runs, again and again, while all of them are driven."""
    ids = [f"run-{n}" for n in range(8)]
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)

    async def drive(run_id: str) -> None:
        for second in range(12):
            lease = (await world.take(run_id, due_only=False, now=at(second))).lease
            await asyncio.sleep(0)  # a store in memory may never yield to another task
            await world.b.suspend(lease, wake_at=at(second) if second % 2 else None, now=at(second))
            await asyncio.sleep(0)

    driving = asyncio.gather(*map(drive, ids))
    try:
        while not driving.done():
            await asyncio.sleep(0)
            await look(ids)
    finally:
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    await driving


async def create_different_runs(world: World) -> list[tuple[dict[str, Any], list[str]]]:
    """Runs of two workflows in five states; and selections, each with the ids that it is promised to find."""
    await world.a.create(new_run("a-1"), now=NOW)
    await world.a.create(new_run("a-2", workflow="other"), now=NOW)
    await world.lease("a-3")
    await world.suspended("b-1")
    await world.ended("b-2", "failed", workflow="other")
    return [
        ({"status": "pending"}, ["a-1", "a-2"]),
        ({"status": "running"}, ["a-3"]),
        ({"status": "suspended"}, ["b-1"]),
        ({"status": "failed"}, ["b-2"]),
        ({"status": "dead"}, []),
        ({"workflow": "other"}, ["a-2", "b-2"]),
        ({"workflow": "other", "status": "pending", "prefix": "a"}, ["a-2"]),
        ({"prefix": "a-"}, ["a-1", "a-2", "a-3"]),
    ]


@promise
async def get_gives_the_row_or_none(world: World) -> None:
    """`get` gives the run's row as it is now, and None for an unknown run."""
    claim = await world.start()
    equal((await world.b.get("run"), await world.b.get("unknown")), (claim.run, None), "what get() gave")
    holds(isinstance(await world.b.get("run"), RunRow), "a row is a RunRow")


@promise
async def lists_begin_with_what_changed_last(world: World) -> None:
    """`list` gives the last changed run first, equal ones by id, with an aware `updated_at`; the limit applies after sorting."""
    for seconds, run_id in ((1, "old"), (3, "tie-b"), (3, "tie-a"), (2, "middle"), (9, "new")):
        await world.a.create(new_run(run_id), now=at(seconds))
    lines = await world.b.list()
    equal([line.id for line in lines], ["new", "tie-a", "tie-b", "middle", "old"], "the order")
    equal(lines[0], RunInfo(id="new", workflow="flow", status="pending", updated_at=moment(at(9))), "the first line")
    equal([line.id for line in await world.b.list(limit=2)], ["new", "tie-a"], "the first two")
    await world.take("old", now=at(10))
    equal([line.id for line in await world.b.list(limit=1)], ["old"], "the first line after a change")


@promise
async def a_list_goes_on_after_the_last_line_seen(world: World) -> None:
    """With `before`, the `updated_at` and id of the last line seen, `list` goes on there, without gap or overlap."""
    for n in range(11):
        await world.a.create(new_run(f"run-{n:02}"), now=at(n // 3))
    whole = [line.id for line in await world.b.list()]
    pages: list[str] = []
    before: tuple[int, str] | None = None
    while page := await world.b.list(before=before, limit=2):
        pages += [line.id for line in page]
        before = ((await world.row(page[-1].id)).updated_at, page[-1].id)
    equal(pages, whole, "all pages together")


@promise
async def lists_have_a_limit_by_default(world: World) -> None:
    """`list` gives a hundred lines unless another limit is given."""
    for n in range(103):
        await world.a.create(new_run(f"run-{n}"), now=NOW)
    equal((len(await world.b.list()), len(await world.b.list(limit=200))), (100, 103), "lengths")


@promise
async def lists_refuse_a_limit_that_is_no_positive_number(world: World) -> None:
    """`list` takes a whole number of at least 1 as its limit, and refuses anything else with `ValueError`."""
    await world.a.create(new_run(), now=NOW)
    limits: list[Any] = [0, -1, True, False, "3", 2.5, 1.0, None]
    for limit in limits:
        with refused(ValueError, f"list(limit={limit!r})"):
            await world.b.list(limit=limit)


@promise
async def a_run_is_listed_while_it_changes(world: World) -> None:
    """A run that is there all the time is in every list, once, also when it changes meanwhile."""

    async def look(ids: list[str]) -> None:
        equal(sorted(line.id for line in await world.a.list()), ids, "the runs that change")

    await while_runs_change(world, look)


@promise
async def lists_can_be_narrowed(world: World) -> None:
    """`list` takes prefix, status and workflow, each alone or together."""
    for selection, ids in await create_different_runs(world):
        lines = await world.b.list(**selection)
        equal(sorted(line.id for line in lines), ids, f"runs with {selection}")


async def _list_prefixes(world: World, ids: Sequence[str], prefixes: Sequence[str]) -> None:
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)
    for prefix in prefixes:
        listed = sorted(line.id for line in await world.b.list(prefix=prefix))
        equal(listed, sorted(run_id for run_id in ids if run_id.startswith(prefix)), f"runs with prefix {prefix!r}")


@promise
async def a_prefix_is_literal(world: World) -> None:
    """Wildcards, backslashes and case in a prefix mean themselves."""
    await _list_prefixes(world, *WILDCARDS)


@promise
async def a_prefix_may_end_in_the_highest_character(world: World) -> None:
    """A prefix matches whatever follows it, up to the last code point, and may itself end in that one."""
    await _list_prefixes(world, *HIGHEST)
