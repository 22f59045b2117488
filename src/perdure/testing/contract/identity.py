"""Identity: names are text, compared byte for byte wherever they stand; anything else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from perdure.model.ids import check_id
from perdure.model.records import ALL_STATUSES, QueueLimits, Signal
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore, Store
from perdure.testing.contract.cases import promise, promise_with
from perdure.testing.contract.world import (
    ITEM,
    NOW,
    SCHEDULE,
    TTL,
    FullWorld,
    World,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    refused,
    run_row,
    signals,
)

# Written with escapes where an editor could change them: the first é is one code point, the second is two.
NAMES: Final = (
    "Order-1",
    "order-1",
    "order-1 ",
    " order-1",
    "\u00f3rder-1",
    "o\u0301rder-1",
    "a%b_c*d?[e]",
    "aXb_c*d?[e]",
    "../x",
    "/etc/passwd",
    "..",
    "line\nbreak",
    "line\r\nbreak",
    "tab\t",
    "__proto__",
    "$ne",
    '{"$ne": null}',
    "a.b",
    "a/b",
    "a:b",
    "back\\",
    "back\\\\",
    "it's",
    '"quoted"',
    "; drop table runs; --",
    "CON",
    "\U0001f600",
    "\U0001f601",
    "\U0010ffff",
    "\ufeffbom",
    "ß",
    "ss",
    "İ",
    "i",
    "1",
    "01",
    "1.0",
    "null",
    "x" * 500,
    "x" * 499 + "y",
    "x" * 1024,
    "é" * 512,
)

# What parsed JSON or a careless caller may pass for an id. The dicts are operators to MongoDB, which match every run.
NOT_TEXT: Final[tuple[Any, ...]] = ({"$gt": ""}, {"$ne": "x"}, ["run"], ("run",), b"run", 7, 1.5, True)
# Text that some database cannot hold, or cuts off.
NO_ID: Final = ("", "x" * 1025, "é" * 513, "ru\0n", "\ud800")

# By verb, what its errors call the text, and how the verb is called with it.
Calls: TypeAlias = Mapping[str, tuple[str, Callable[[Any], Awaitable[object]]]]


class Name(str):
    """Text that says something else when it is asked."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another"

    def __repr__(self) -> str:
        return "Name.another"


async def _refuse_all(calls: Calls, values: Iterable[Any]) -> None:
    for what, (name, call) in calls.items():
        for value in values:
            with refused(_error_for(value, name), f"{what} for {value!r}"):
                await call(value)


def _error_for(value: Any, name: str) -> Exception:
    """Return the error that every verb raises for this id, which is none."""
    if name == "before":
        return TypeError(f"before must be the (updated_at, id) of a line, not {(NOW, value)!r}")
    try:
        check_id(value, name)
    except (TypeError, ValueError) as error:
        return error
    raise AssertionError(f"{value!r} is an id")


def _run_verbs(store: Store) -> Calls:
    """The verbs of the core by an id that each of them takes."""
    return {
        "acquire": ("a run's id", lambda run_id: store.acquire(run_id, TTL, due_only=False, now=NOW)),
        "reopen": ("a run's id", lambda run_id: store.reopen(run_id, ["step"], now=NOW)),
        "signal": ("a run's id", lambda run_id: store.signal(run_id, "go", b"1", now=NOW)),
        "signal by name": ("a signal's name", lambda name: store.signal("run", name, b"1", now=NOW)),
        "cancel": ("a run's id", lambda run_id: store.cancel(run_id, now=NOW)),
        "get": ("a run's id", store.get),
        "get by keyword": ("a run's id", lambda run_id: store.get(run_id=run_id)),
        "journal": ("a run's id", store.journal),
        "inbox": ("a run's id", store.inbox),
        "create": ("a run's id", lambda run_id: _create(store, id=run_id)),
        "create in a queue": ("a queue's name", lambda queue: _create(store, queue=queue)),
    }


def _other_names(store: Store) -> Calls:
    """The verbs of the core by names that may be left out."""
    return {
        "signal by dedupe": ("a signal's dedupe", lambda dedupe: store.signal("run", "go", b"1", dedupe=dedupe, now=NOW)),
        "reopen dropping a key": ("a key", lambda key: store.reopen("ended", [key], now=NOW)),
        "list by prefix": ("a prefix of ids", lambda prefix: store.list(RunFilter(prefix=prefix))),
        "list by status": ("a status", lambda status: store.list(RunFilter(status=(status,)))),
        "list by workflow": ("a workflow's name", lambda workflow: store.list(RunFilter(workflow=workflow))),
        "list before a line": ("before", lambda run_id: store.list(before=(NOW, run_id))),
        "claim of a workflow": ("a workflow's name", lambda name: store.claim(1, TTL, [(name, 1)], now=NOW)),
        "claim from a queue": ("a queue's name", lambda queue: store.claim(1, TTL, [("flow", 1)], [queue], now=NOW)),
        "create of a workflow": ("a workflow's name", lambda name: _create(store, workflow=name)),
        "create with a limit key": ("limit_key", lambda name: _create(store, limit_key=name)),
        "create with a parent": ("parent_id", lambda name: _create(store, parent_id=name, parent_key="child")),
        "create with an entry": ("a key", lambda key: _create(store, entries=[entry(1, key)])),
        "create with a signal": ("a signal's name", lambda name: _create(store, inbox=[Signal(seq=1, name=name, payload=b"1")])),
    }


async def _create(store: Store, *, entries: Any = (), inbox: Any = (), **columns: Any) -> None:
    await store.create(new_run(**{"run_id": "new", **columns}), entries=entries, inbox=inbox, now=NOW)


def _operator_verbs(store: FullStore) -> Calls:
    return {
        "hold": ("a run's id", store.hold),
        "unhold": ("a run's id", lambda run_id: store.unhold(run_id, now=NOW)),
        "delete": ("a run's id", store.delete),
        "restore": ("a run's id", lambda run_id: store.restore(run_row(id=run_id), [], now=NOW)),
        "load": ("a run's id", store.load),
        "save": ("a run's id", lambda run_id: store.save(run_id, {})),
    }


def _schedule_verbs(store: FullStore) -> Calls:
    def fire(schedule_id: Any, **columns: Any) -> Awaitable[bool]:
        return store.fire(schedule_id, expected_at=NOW, next_at=None, run=new_run(**{"run_id": "new", **columns}), now=NOW)

    return {
        "put_schedule": (
            "a schedule's id",
            lambda schedule_id: store.put_schedule(msgspec.structs.replace(SCHEDULE, id=schedule_id)),
        ),
        "drop_schedule": ("a schedule's id", store.drop_schedule),
        "fire": ("a schedule's id", fire),
        "fire of a run": ("a run's id", lambda run_id: fire(SCHEDULE.id, id=run_id)),
        "limit_queue": ("a queue's name", lambda queue: store.limit_queue(queue, QueueLimits(concurrency=1))),
    }


@promise
async def run_ids_that_differ_are_different_runs(world: World) -> None:
    """Ids that differ in case, accents, spaces, normal form or anything else are different runs, and come back as given."""
    for name in NAMES:
        created = await world.a.create(new_run(name, input=name.encode(), input_hash=name.encode()), now=NOW)
        holds(created.is_new, f"run {name!r} is a new one")
    for name in NAMES:
        row = await world.row(name)
        equal((row.id, row.input), (name, name.encode()), f"run {name!r}")
    equal({line.id for line in await world.b.list(limit=1000)}, set(NAMES), "the ids in a list")
    equal(await claimed_ids(world.b, 1000), sorted(NAMES), "the ids that are claimed, in the order of their bytes")


@promise
async def signal_names_that_differ_are_different_signals(world: World) -> None:
    """Signal names, dedupe keys and what a run waits for are compared byte for byte."""
    await world.a.create(new_run("inbox"), now=NOW)
    seqs = [await world.a.signal("inbox", name, b"1", dedupe="d", now=NOW) for name in NAMES]
    seqs += [await world.a.signal("inbox", "go", b"1", dedupe=name, now=NOW) for name in NAMES]
    equal(seqs, list(range(1, 2 * len(NAMES) + 1)), "the seqs of signals that differ only in their names")
    rows = await world.b.inbox("inbox")
    equal([row.name for row in rows[: len(NAMES)]], list(NAMES), "the names in the inbox")
    equal([row.dedupe for row in rows[len(NAMES) :]], list(NAMES), "the dedupe keys in the inbox")


@promise
async def a_run_wakes_for_exactly_what_it_waits_for(world: World) -> None:
    """A signal wakes only the run that waits for just that name, not for one that looks like it."""

    async def sent_what_it_does_not_wait_for(run_id: str, name: str) -> None:
        await world.suspended(run_id, waiting_for=signals(*(other for other in NAMES if other != name)))
        await world.a.signal(run_id, name, b"1", now=NOW)
        equal((await world.row(run_id)).wake_at, None, f"wake_at after signal {name!r} of a run that waits for every other")

    await asyncio.gather(*(sent_what_it_does_not_wait_for(f"run-{index}", name) for index, name in enumerate(NAMES)))
    await world.suspended("last", waiting_for=signals(NAMES[0]))
    for run_id, name in (("last", NAMES[0]), ("run-0", NAMES[-1])):
        await world.a.signal(run_id, name, b"1", now=NOW)
        equal((await world.row(run_id)).wake_at, NOW, f"wake_at of run {run_id!r} once a signal came that it waits for")


@promise
async def keys_that_differ_stay_apart(world: World) -> None:
    """Step keys and names come back as given."""
    lease = await world.lease()
    entries = [entry(seq, name, name=name) for seq, name in enumerate(NAMES, 1)]
    await world.a.record(lease, entries, now=NOW)
    equal(await world.b.journal("run"), entries, "the journal")


@promise
async def workflows_and_queues_that_differ_stay_apart(world: World) -> None:
    """Workflow names and queue names are compared byte for byte."""
    for index, name in enumerate(NAMES):
        await world.a.create(new_run(f"run-{index:02}", workflow=name, queue=name), now=NOW)
    for index, name in enumerate(NAMES):
        for wanted in (RunFilter(workflow=name), RunFilter(queue=name)):
            equal([line.id for line in await world.b.list(wanted)], [f"run-{index:02}"], f"runs with {wanted}")
        equal(await claimed_ids(world.b, workflows=[name], queues=[name]), [f"run-{index:02}"], f"claimed from queue {name!r}")


@promise
async def ids_that_are_no_text_are_refused(world: World) -> None:
    """A verb raises `TypeError` for an id, a name or a filter that is no text, and reads and changes nothing."""
    await world.a.create(new_run(), now=NOW)
    await world.ended("ended", "failed")
    before = await world.dump("run", "ended")
    await _refuse_all(_run_verbs(world.a), (*NOT_TEXT, None))
    await _refuse_all(_other_names(world.a), NOT_TEXT)
    equal(await world.dump("run", "ended"), before, "the runs afterwards")
    equal([line.id for line in await world.b.list()], ["ended", "run"], "the ids afterwards")


@promise
async def text_that_is_no_id_is_refused(world: World) -> None:
    """A run id or signal name that is empty, longer than 1,024 bytes, or has NUL or lone surrogates raises `ValueError`."""
    await world.a.create(new_run(), now=NOW)
    before = await world.dump("run")
    await _refuse_all(_run_verbs(world.a), NO_ID)
    statuses: list[Any] = ["ended", ""]
    for status in statuses:
        with refused(ValueError(f"a status is one of {', '.join(ALL_STATUSES)}, not {status!r}"), f"list by status {status!r}"):
            await world.a.list(RunFilter(status=(status,)))
    equal(await world.dump("run"), before, "the run afterwards")


@promise
async def a_subclass_of_str_is_taken_for_its_text(world: World) -> None:
    """Where an id is a subclass of str, the text that it holds is the id, whatever its own methods say."""
    await world.a.create(new_run(id=Name("run"), workflow=Name("flow"), queue=Name("q")), now=NOW)
    row = await world.b.get(Name("run"))
    holds(row is not None, "the run is found")
    equal((await world.row("run")).queue, "q", "the queue")
    await world.a.signal(Name("run"), Name("go"), b"1", dedupe=Name("d"), now=NOW)
    equal([(one.name, one.dedupe) for one in await world.b.inbox("run")], [("go", "d")], "the inbox")
    equal([line.id for line in await world.b.list(RunFilter(prefix=Name("ru"), workflow=Name("flow")))], ["run"], "the list")
    equal(await claimed_ids(world.b, workflows=[Name("flow")], queues=[Name("q")]), ["run"], "the claim")


@promise_with("operators")
async def operators_ids_that_are_no_text_are_refused(world: FullWorld) -> None:
    """So do the verbs of operators: nothing is held, deleted, counted or replaced for an id that is no text."""
    await world.a.create(new_run(), now=NOW)
    before = await world.dump("run")
    await _refuse_all(_operator_verbs(world.a), (*NOT_TEXT, None))
    await _refuse_all(_operator_verbs(world.a), NO_ID)
    counts: Calls = {
        "count by prefix": ("a prefix of ids", lambda prefix: world.a.count(RunFilter(prefix=prefix))),
        "count by status": ("a status", lambda status: world.a.count(RunFilter(status=(status,)))),
        "count by workflow": ("a workflow's name", lambda workflow: world.a.count(RunFilter(workflow=workflow))),
    }
    await _refuse_all(counts, NOT_TEXT)
    equal(await world.dump("run"), before, "the run afterwards")


@promise_with("schedules")
async def schedules_ids_that_are_no_text_are_refused(world: FullWorld) -> None:
    """So do the verbs of schedules and queue limits."""
    await world.a.put_schedule(SCHEDULE)
    await _refuse_all(_schedule_verbs(world.a), (*NOT_TEXT, None))
    await _refuse_all(_schedule_verbs(world.a), NO_ID)
    equal(list(await world.b.schedules()), [SCHEDULE], "the schedules afterwards")
    equal(await world.b.queue_limits(), {}, "the limits afterwards")
    equal(await world.b.list(), [], "the runs afterwards")


@promise_with("streams")
async def streams_names_that_are_no_text_are_refused(world: FullWorld) -> None:
    """So does `items`, for the run and for the stream."""
    await world.record_item(await world.lease())
    reads: Calls = {
        "items": ("a run's id", lambda run_id: world.a.items(run_id, "log")),
        "items of": ("a stream's name", lambda stream: world.a.items("run", stream)),
    }
    await _refuse_all(reads, (*NOT_TEXT, None))
    await _refuse_all(reads, NO_ID)
    equal(await world.a.items("run", "log"), [ITEM], "the items")
