"""The inbox: signals are kept from the moment they are accepted until their wait is recorded."""

from __future__ import annotations

import asyncio

from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import Awaited, EndStatus, Signal
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import (
    NOW,
    STAGGER,
    World,
    after,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    outcomes,
    refused,
    signals,
)

ENDS: tuple[EndStatus, ...] = ("completed", "failed", "cancelled", "dead")


@promise
async def signals_are_kept_in_order_of_arrival(world: World) -> None:
    """Inbox rows are numbered from 1 as they arrive, over all names, and come back first in, first out."""
    await world.a.create(new_run(), now=NOW)
    names = ["go", "stop", "go", "go"]
    seqs = [
        await store.signal("run", name, name.encode(), now=NOW) for store, name in zip((world.a, world.b) * 2, names, strict=True)
    ]
    equal(seqs, [1, 2, 3, 4], "the seqs that signal() gave")
    rows = await world.b.inbox("run")
    expected = [Signal(seq=n, name=name, payload=name.encode()) for n, name in enumerate(names, 1)]
    equal(rows, expected, "the inbox")
    equal([row.seq for row in await world.b.inbox("run", after=2)], [3, 4], "the rows after 2")
    equal((await world.take(now=NOW)).inbox, expected, "the inbox in a claim")
    equal(await world.b.inbox("unknown"), [], "the inbox of an unknown run")


@promise
async def a_signal_is_accepted_in_every_state_before_the_end(world: World) -> None:
    """A signal may come before the run was claimed, while it is driven and while it waits for something else."""
    await world.a.create(new_run("pending"), now=NOW)
    await world.lease("running")
    await world.suspended("suspended", waiting_for=signals("other"))
    for run_id in ("pending", "running", "suspended"):
        row = await world.row(run_id)
        equal(await world.b.signal(run_id, "go", b"1", now=at(1)), 1, f"the seq in a {run_id} run's inbox")
        equal(await world.row(run_id), row, f"the row of a {run_id} run that does not wait for the signal")


@promise
async def a_signal_after_the_end_is_refused(world: World) -> None:
    """An ended run takes no signals: `RunFinished`; an unknown one raises `RunNotFound`."""
    for status in ENDS:
        await world.ended(status, status)
        with refused(RunFinished(status, status), f"a signal to a {status} run"):
            await world.b.signal(status, "go", b"1", now=NOW)
        equal(await world.b.inbox(status), [], "the inbox of an ended run")
    with refused(RunNotFound("unknown"), "a signal to an unknown run"):
        await world.b.signal("unknown", "go", b"1", now=NOW)


@promise
async def a_repeated_dedupe_is_the_first_signal_again(world: World) -> None:
    """A repeated `dedupe` for one name gives the first seq and changes nothing, also when consumed and when the run has ended."""
    lease = await world.lease()
    equal(await world.a.signal("run", "go", b"first", dedupe="d", now=NOW), 1, "the first seq")
    equal(await world.b.signal("run", "go", b"second", dedupe="d", now=NOW), 1, "the seq of a repetition")
    equal(await world.b.signal("run", "stop", b"other", dedupe="d", now=NOW), 2, "the seq for another name")
    equal(await world.b.signal("run", "go", b"other", dedupe="D", now=NOW), 3, "the seq for another dedupe")
    equal([await world.b.signal("run", "go", b"plain", now=NOW) for _ in range(2)], [4, 5], "the seqs without dedupe")
    equal([row.payload for row in await world.b.inbox("run")][:2], [b"first", b"other"], "the payloads")
    await world.a.record(lease, [entry(1)], consume=[1], now=NOW)
    equal(await world.b.signal("run", "go", b"third", dedupe="d", now=NOW), 1, "the seq once it was consumed")
    equal([row.seq for row in await world.b.inbox("run")], [2, 3, 4, 5], "the rows that are left")
    await world.a.finish(lease, "completed", b"1", now=NOW)
    equal(await world.b.signal("run", "go", b"fourth", dedupe="d", now=NOW), 1, "the seq once the run has ended")


@promise
async def no_verb_gives_a_consumed_row(world: World) -> None:
    """The inbox rows that `inbox`, `suspend` and a claim return are not consumed, and their `consumed_by` is None."""
    lease = await world.lease()
    for _ in range(2):
        await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(lease, [entry(1)], consume=[1], now=NOW)
    given = {
        "inbox()": await world.b.inbox("run"),
        "suspend()": await world.a.suspend(lease, wake_at=None, waiting_for=signals("go"), now=NOW),
        "a claim": (await world.take()).inbox,
    }
    for verb, rows in given.items():
        equal([(row.seq, row.consumed_by) for row in rows], [(2, None)], f"seq and consumed_by of the rows that {verb} gives")


@promise
async def dedupe_belongs_to_one_run(world: World) -> None:
    """The same `dedupe` sent to two runs is two signals."""
    for run_id in ("one", "two"):
        await world.a.create(new_run(run_id), now=NOW)
        await world.a.signal(run_id, "go", run_id.encode(), dedupe="d", now=NOW)
    equal([row.payload for row in await world.b.inbox("two")], [b"two"], "the second run's inbox")


@promise
async def many_senders_with_one_dedupe_make_one_row(world: World) -> None:
    """A webhook delivered many times at once is one inbox row."""
    await world.a.create(new_run(), now=NOW)
    calls = [store.signal("run", "go", b"%d" % n, dedupe="d", now=NOW) for n in range(15) for store in (world.a, world.b)]
    equal(set(await asyncio.gather(*calls)), {1}, "the seqs")
    equal(len(await world.a.inbox("run")), 1, "the number of rows")


@promise
async def many_senders_lose_nothing(world: World) -> None:
    """Signals sent at once on two handles get different seqs without a gap, and all are there."""
    await world.a.create(new_run(), now=NOW)
    calls = [store.signal("run", "go", b"%d" % n, now=NOW) for n in range(15) for store in (world.a, world.b)]
    seqs = await asyncio.gather(*calls)
    equal(sorted(seqs), list(range(1, 31)), "the seqs")
    equal([row.seq for row in await world.b.inbox("run")], list(range(1, 31)), "the inbox")


@promise
async def a_signal_wakes_the_run_that_waits_for_it(world: World) -> None:
    """A suspended run comes due at once when what it waits for arrives, and not for anything else."""
    await world.suspended(waiting_for=signals("go", "stop"), wake_at=at(500))
    await world.b.signal("run", "other", b"1", now=at(1))
    equal(await claimed_ids(world.b, now=at(1)), [], "claimed after another signal")
    await world.b.signal("run", "stop", b"1", now=at(2))
    equal((await world.row()).wake_at, at(2), "wake_at")
    claim = await world.take(now=at(2))
    equal(([row.name for row in claim.inbox], claim.run.status), (["other", "stop"], "running"), "inbox and status")


@promise
async def a_signal_does_not_answer_for_a_child(world: World) -> None:
    """A signal and a child's outcome of one name are different things to wait for."""
    await world.suspended(waiting_for=[Awaited("child", "pay")])
    await world.b.signal("run", "pay", b"1", now=NOW)
    equal((await world.row()).wake_at, None, "wake_at of a run that waits for a child, after a signal of that name")


@promise
async def a_signal_does_not_put_a_due_run_back(world: World) -> None:
    """A run that is due already keeps its place in the order when a signal or a cancel arrives."""
    await world.suspended(waiting_for=signals("go"), wake_at=at(1))
    await world.b.signal("run", "go", b"1", now=at(5))
    await world.b.cancel("run", now=at(6))
    equal((await world.row()).wake_at, at(1), "wake_at of a run whose timer had passed")


@promise
async def a_signal_is_accepted_or_the_run_has_ended(world: World) -> None:
    """When a signal and the end of the run race, an accepted signal is in the inbox and a refused one is not."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        lease = await world.lease(run_id)
        end = after(n % STAGGER, lambda: world.a.finish(lease, "completed", b"1", now=NOW))
        send = after(n // STAGGER, lambda: world.b.signal(run_id, "go", b"1", now=NOW))
        _, seq = await outcomes([end, send])
        holds(seq == 1 or isinstance(seq, RunFinished), f"signal() gave {seq!r}")
        equal(len(await world.a.inbox(run_id)), 1 if seq == 1 else 0, "the number of inbox rows")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))
