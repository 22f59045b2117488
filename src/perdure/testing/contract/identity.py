"""Identity: names are compared byte for byte, wherever they stand."""

from __future__ import annotations

import asyncio
from typing import Final

from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import NOW, World, claimed_ids, entry, equal, holds, new_run, signals

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
        equal([line.id for line in await world.b.list(workflow=name)], [f"run-{index:02}"], f"runs of workflow {name!r}")
        equal(await claimed_ids(world.b, workflows=[name], queues=[name]), [f"run-{index:02}"], f"claimed from queue {name!r}")
