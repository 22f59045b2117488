"""Listing: which runs there are, in a stable order, by literal prefix."""

from __future__ import annotations

import asyncio

from perdure.model.durations import moment
from perdure.model.records import RunInfo, RunRow
from perdure.testing.contract.cases import promise
from perdure.testing.contract.checks import equal, holds
from perdure.testing.contract.world import NOW, World, at, new_run


async def _ids(world: World, prefix: str) -> list[str]:
    ids = sorted(line.id for line in await world.b.list(prefix=prefix))
    equal(await world.b.count(prefix=prefix), len(ids), f"count with prefix {prefix!r}")
    return ids


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
async def lists_are_bounded_unless_told(world: World) -> None:
    """`list` gives a hundred lines unless another limit is given; `count` counts all of them."""
    for n in range(103):
        await world.a.create(new_run(f"run-{n}"), now=NOW)
    equal((len(await world.b.list()), len(await world.b.list(limit=200)), await world.b.count()), (100, 103, 103), "lengths")


@promise
async def a_run_is_listed_while_it_changes(world: World) -> None:
    """A run that is there all the time is in every list and every count, once, also when it changes meanwhile."""
    ids = [f"run-{n}" for n in range(8)]
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)

    async def drive(run_id: str) -> None:
        for second in range(12):
            lease = (await world.take(run_id, due_only=False, now=at(second))).lease
            await asyncio.sleep(0)  # a store in memory may never give way
            await world.b.suspend(lease, wake_at=at(second) if second % 2 else None, now=at(second))
            await asyncio.sleep(0)

    driving = asyncio.gather(*map(drive, ids))
    try:
        while not driving.done():
            await asyncio.sleep(0)
            equal((await world.a.count(), await world.a.count(prefix="run-")), (8, 8), "the number of runs that change")
            equal(sorted(line.id for line in await world.a.list()), ids, "the runs that change")
    finally:
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    await driving


@promise
async def lists_and_counts_can_be_narrowed(world: World) -> None:
    """`list` and `count` take prefix, status and workflow, each alone or together."""
    await world.a.create(new_run("a-1"), now=NOW)
    await world.a.create(new_run("a-2", workflow="other"), now=NOW)
    await world.lease("a-3")
    await world.suspended("b-1")
    await world.ended("b-2", "failed", workflow="other")
    wanted: dict[str, list[str]] = {
        "pending": ["a-1", "a-2"],
        "running": ["a-3"],
        "suspended": ["b-1"],
        "failed": ["b-2"],
        "dead": [],
    }
    for status, ids in wanted.items():
        lines = await world.b.list(status=status)  # type: ignore[arg-type]
        equal([line.id for line in lines], ids, f"{status} runs")
        equal(await world.b.count(status=status), len(ids), f"the number of {status} runs")  # type: ignore[arg-type]
    equal(sorted(line.id for line in await world.b.list(workflow="other")), ["a-2", "b-2"], "runs of one workflow")
    equal([line.id for line in await world.b.list(workflow="other", status="pending", prefix="a")], ["a-2"], "all three together")
    equal(await world.b.count(workflow="other", status="pending", prefix="a"), 1, "the number of all three together")
    equal(await world.b.count(prefix="a-"), 3, "the number with one prefix")


@promise
async def a_prefix_is_literal(world: World) -> None:
    """Wildcards, backslashes and case in a prefix mean themselves."""
    ids = ["order_1", "orderX1", "order%1", "Order_1", "order\\1", "order*1", "order?1", "order[1]", "order.1", "ordér_1"]
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)
    for char in "_%\\*?[.X":
        expected = [run_id for run_id in ids if run_id.startswith("order" + char)]
        equal(await _ids(world, "order" + char), expected, f"runs with prefix {'order' + char!r}")
    equal(await _ids(world, "order_1x"), [], "runs with a prefix longer than any id")
    equal(await _ids(world, "%"), [], "runs with prefix '%'")
    equal(await _ids(world, ""), sorted(ids), "runs with an empty prefix")
    equal(await _ids(world, "order_1"), ["order_1"], "runs with a whole id as prefix")


@promise
async def a_prefix_may_end_in_the_highest_character(world: World) -> None:
    """A prefix matches whatever follows it, up to the last code point, and may itself end in that one."""
    top = "\U0010ffff"
    ids = ["a", f"a{top}", f"a{top}{top}", f"a{top}b", "a\uffff", "a😀", "b", f"{top}{top}x"]
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)
    for prefix in ("a", f"a{top}", top, top + top, "a\uffff", "a\ud7ff", "a😀"):
        equal(await _ids(world, prefix), sorted(run_id for run_id in ids if run_id.startswith(prefix)), f"prefix {prefix!r}")
