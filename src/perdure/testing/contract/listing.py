"""Listing: which runs there are, in a stable order, by literal prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from perdure.model.durations import instant, moment
from perdure.model.records import Awaited, RunInfo, RunRow, encode_metadata
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import NOW, TTL, World, at, equal, holds, new_run, refused, signals

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


async def create_different_runs(world: World) -> list[tuple[RunFilter, list[str]]]:
    """Runs of two workflows and two queues in five states; and filters, each with the ids that it is promised to find."""
    ada, bob = b'{"who":"ada","n":1}', b'{"who":"bob","n":null}'
    await world.a.create(new_run("a-1", metadata=ada), now=NOW)
    await world.a.create(new_run("a-2", workflow="other", queue="mail"), now=at(1))
    await world.lease("a-3", queue="mail", metadata=bob, now=at(2))
    await world.suspended("b-1", metadata=bob, now=at(3))
    await world.ended("b-2", "failed", workflow="other", metadata=ada, now=at(4))
    return [
        (RunFilter(status=("pending",)), ["a-1", "a-2"]),
        (RunFilter(status=("running",)), ["a-3"]),
        (RunFilter(status=("suspended",)), ["b-1"]),
        (RunFilter(status=("failed",)), ["b-2"]),
        (RunFilter(status=("dead",)), []),
        (RunFilter(status=("suspended", "dead", "failed")), ["b-1", "b-2"]),
        (RunFilter(workflow="other"), ["a-2", "b-2"]),
        (RunFilter(workflow="none"), []),
        (RunFilter(workflow="other", status=("pending",), prefix="a"), ["a-2"]),
        (RunFilter(prefix="a-"), ["a-1", "a-2", "a-3"]),
        (RunFilter(queue="mail"), ["a-2", "a-3"]),
        (RunFilter(queue="none"), []),
        (RunFilter(queue="mail", workflow="flow"), ["a-3"]),
        (RunFilter(queue="default", status=("failed", "pending")), ["a-1", "b-2"]),
        (RunFilter(queue="mail", prefix="a-3"), ["a-3"]),
        (RunFilter(queue="default", prefix="a-3"), []),
        (RunFilter(updated_after=at(2)), ["a-3", "b-1", "b-2"]),
        (RunFilter(updated_before=at(2)), ["a-1", "a-2"]),
        (RunFilter(updated_after=at(1), updated_before=at(4)), ["a-2", "a-3", "b-1"]),
        (RunFilter(updated_after=at(3), updated_before=at(3)), []),
        (RunFilter(updated_after=at(1), workflow="other", queue="default"), ["b-2"]),
        (RunFilter(updated_before=at(3), prefix="a", status=("running", "pending")), ["a-1", "a-2", "a-3"]),
        (RunFilter(updated_after=at(1), prefix="a", status=("pending",)), ["a-2"]),
        (RunFilter(metadata=("who", "ada")), ["a-1", "b-2"]),
        (RunFilter(metadata=("who", "ada"), status=("failed",)), ["b-2"]),
        (RunFilter(metadata=("who", "bob"), queue="mail"), ["a-3"]),
        (RunFilter(metadata=("who", "bob"), prefix="b", updated_after=at(3)), ["b-1"]),
        (RunFilter(metadata=("n", None)), ["a-3", "b-1"]),
        (RunFilter(metadata=("who", None)), []),
    ]


async def pages_of(world: World, wanted: RunFilter, size: int) -> list[str]:
    """The ids of all lines, listed page by page."""
    found: list[str] = []
    before: tuple[int, str] | None = None
    while page := await world.b.list(wanted, before=before, limit=size):
        found += [line.id for line in page]
        before = (instant(page[-1].updated_at), page[-1].id)
    return found


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
    changed_at = moment(at(9))
    line = RunInfo(id="new", workflow="flow", status="pending", created_at=changed_at, updated_at=changed_at, wake_at=changed_at)
    equal(lines[0], line, "the first line")
    equal([line.id for line in await world.b.list(limit=2)], ["new", "tie-a"], "the first two")
    await world.take("old", now=at(10))
    equal([line.id for line in await world.b.list(limit=1)], ["old"], "the first line after a change")


@promise
async def a_list_goes_on_after_the_last_line_seen(world: World) -> None:
    """With `before`, the `updated_at` and id of the last line seen, `list` goes on there, without gap or overlap."""
    for n in range(11):
        await world.a.create(new_run(f"run-{n:02}"), now=at(n // 3))
    equal(await pages_of(world, RunFilter(), 2), [line.id for line in await world.b.list()], "all pages together")


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
        with refused(ValueError(f"limit must be a whole number of at least 1, not {limit!r}"), f"list(limit={limit!r})"):
            await world.b.list(limit=limit)


@promise
async def a_run_is_listed_while_it_changes(world: World) -> None:
    """A run that is there all the time is in every list, once, also when it changes meanwhile."""

    async def look(ids: list[str]) -> None:
        equal(sorted(line.id for line in await world.a.list()), ids, "the runs that change")

    await while_runs_change(world, look)


@promise
async def lists_can_be_narrowed(world: World) -> None:
    """`list` takes prefix, statuses, workflow, queue, times and a key of the metadata, each alone or together."""
    for wanted, ids in await create_different_runs(world):
        lines = await world.b.list(wanted)
        equal(sorted(line.id for line in lines), ids, f"runs with {wanted}")
        equal(await pages_of(world, wanted, 1), [line.id for line in lines], f"pages of runs with {wanted}")


@promise
async def metadata_are_compared_as_json(world: World) -> None:
    """A filter on metadata finds the runs that have this key with this very value at the top: 1, 1.0, "1" and true are four."""
    stored: dict[str, dict[str, Any]] = {
        "int": {"key": 1},
        "float": {"key": 1.0},
        "text": {"key": "1"},
        "bool": {"key": True},
        "null": {"key": None},
        "longer": {"key": 10, "other": "x"},
        "after": {"a": 0, "key": 10},
        "inside": {"a": {"key": 1}, "b": '"key":1'},
        "quoted": {"key": 'a"b\\c é \U0001f600 \n%_', '"k': 1},
        "missing": {},
    }
    for seconds, (run_id, metadata) in enumerate(stored.items()):
        await world.a.create(new_run(run_id, metadata=encode_metadata(metadata)), now=at(seconds))
    expected: list[tuple[tuple[str, Any], list[str]]] = [
        (("key", 1), ["int"]),
        (("key", 1.0), ["float"]),
        (("key", "1"), ["text"]),
        (("key", True), ["bool"]),
        (("key", None), ["null"]),
        (("key", 10), ["after", "longer"]),
        (("key", stored["quoted"]["key"]), ["quoted"]),
        (('"k', 1), ["quoted"]),
        (("other", "x"), ["longer"]),
        (("none", None), []),
    ]
    for item, ids in expected:
        wanted = RunFilter(metadata=item)
        equal([line.id for line in await world.b.list(wanted)], ids, f"runs with {item} in their metadata")
        equal([line.id for line in await world.b.list(wanted, limit=1)], ids[:1], f"the first run with {item} in its metadata")


@promise
async def a_line_tells_how_a_run_stands(world: World) -> None:
    """A line has times, queue, priority, what the run waits for and until when, attempts, error and metadata of the run."""
    metadata = {"customer": "c-7", "tags": ["a", 1]}
    columns: dict[str, Any] = {"queue": "mail", "priority": -3, "version": 2, "metadata": encode_metadata(metadata)}
    waiting_for = [*signals("paid", "a b"), Awaited("child", "shipped")]
    await world.suspended("asleep", wake_at=at(60), waiting_for=waiting_for, now=at(1), **columns)
    await world.lease("driven", now=at(2))
    lease = await world.lease("broken", now=at(3))
    await world.b.finish(lease, "failed", _failure("ValueError", "no\n  such " + "x" * 1000), now=at(4))
    await world.ended("strange", "failed", now=at(5))
    strange, broken, driven, asleep = await world.b.list()
    times: dict[str, Any] = {"created_at": moment(at(1)), "updated_at": moment(at(1)), "wake_at": moment(at(60))}
    equal(
        msgspec.structs.replace(asleep, waiting_for=tuple(sorted(asleep.waiting_for))),
        RunInfo(
            id="asleep", workflow="flow", version=2, status="suspended", queue="mail", priority=-3,
            waiting_for=("a b", "paid", "shipped"), metadata=metadata, **times,
        ),
        "the line of a suspended run",
    )  # fmt: skip
    equal((driven.attempts, driven.created_at, driven.wake_at), (1, moment(at(2)), moment(at(2) + int(TTL * 1e6))), "one driven")
    equal((broken.created_at, broken.updated_at, broken.wake_at), (moment(at(3)), moment(at(4)), None), "the times of one ended")
    error = broken.error or ""
    holds(error.startswith("ValueError: no such xxx") and len(error) <= 200, f"an error is one short line, not {error!r}")
    equal((strange.status, strange.error), ("failed", None), "a failed run whose outcome is something else")


def _failure(name: str, message: str) -> bytes:
    """An outcome as the engine writes it, with a long traceback."""
    error = {"module": "builtins", "qualname": name, "message": message, "args": [message], "traceback": "in a file\n" * 1000}
    return msgspec.json.encode({"origin": "throw", "error": error, "keys": ["charge"]})


async def _list_prefixes(world: World, ids: Sequence[str], prefixes: Sequence[str]) -> None:
    for run_id in ids:
        await world.a.create(new_run(run_id), now=NOW)
    for prefix in prefixes:
        lines = await world.b.list(RunFilter(prefix=prefix))
        expected = sorted(run_id for run_id in ids if run_id.startswith(prefix))
        equal(sorted(line.id for line in lines), expected, f"runs with prefix {prefix!r}")
        equal(await world.b.list(prefix=prefix), lines, f"the same list by prefix={prefix!r}")


@promise
async def a_prefix_is_literal(world: World) -> None:
    """Wildcards, backslashes and case in a prefix mean themselves."""
    await _list_prefixes(world, *WILDCARDS)


@promise
async def a_prefix_may_end_in_the_highest_character(world: World) -> None:
    """A prefix matches whatever follows it, up to the last code point, and may itself end in that one."""
    await _list_prefixes(world, *HIGHEST)
