"""Creating: one run per id, however often it is created."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.errors import RunConflict, RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import Claim, Created, NewRun, Signal
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    STAGGER,
    TTL,
    World,
    after,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    no_input,
    outcomes,
    refused,
    refused_write,
)

FULL = NewRun(
    id="full",
    workflow="flow",
    version=6,
    input=b"\x00\xff[1]",
    input_hash=b"\x00\x01",
    seed=b"\xfe\x00",
    definition_hash="d1",
    metadata=b'{"who": "ada"}',
    queue="mail",
    priority=-3,
    limit_key="tenant-1",
    start_at=at(60),
    deadline=at(3600),
    parent_id="parent",
    parent_key="child-1",
    generation=5,
    first_input_hash=b"\x00\x02",
    continued_at=at(-7),
)
# An entry as another store may have had it, with an epoch of that one's.
FIRST = Entry(
    seq=7,
    key="charge/é",
    phase="open",
    kind="signal",
    name="charge",
    ok=False,
    payload=b"\x00\xff\xfe{",
    attempt=3,
    args_hash=b"\x00\xff",
    started_at=at(-9),
    ended_at=at(-8),
    epoch=12345,
)


@promise
async def a_run_is_there_as_it_was_created(world: World) -> None:
    """Every field given to `create` is in the row, which is pending and unleased."""
    await world.a.create(FULL, now=NOW)
    row = await world.row("full")
    columns = {name: getattr(row, name) for name in msgspec.structs.asdict(FULL)}
    equal(columns, msgspec.structs.asdict(FULL), "the row's columns")
    equal((row.status, row.epoch, row.attempts, row.held), ("pending", 0, 0, False), "status, epoch, attempts and held")
    equal((row.lease_until, row.outcome, row.progress), (None, None, None), "lease, outcome and progress")
    equal((row.created_at, row.updated_at), (NOW, NOW), "created_at and updated_at")


@promise
async def a_run_is_due_at_once_or_at_its_start(world: World) -> None:
    """A new run is due when it was created, or at its `start_at`."""
    await world.a.create(new_run("soon"), now=NOW)
    await world.a.create(new_run("later", start_at=at(60)), now=NOW)
    equal(((await world.row("soon")).wake_at, (await world.row("later")).wake_at), (NOW, at(60)), "wake_at")
    equal(await claimed_ids(world.b, now=at(59)), ["soon"], "claimed before start_at")
    holds("later" in await claimed_ids(world.b, now=at(60)), "it can be claimed at start_at")


@promise
async def a_run_created_with_ttl_is_leased_at_once(world: World) -> None:
    """With `ttl` the creator holds the lease, whatever `start_at` says, and it counts as the first attempt."""
    created = await world.a.create(new_run(start_at=at(60)), ttl=TTL, now=NOW)
    claim = created.claim
    if claim is None:
        raise AssertionError("create(ttl=) gives a claim")
    equal((created.run.status, created.run.attempts, created.run.lease_until), ("running", 1, at(TTL)), "status, attempts, lease")
    equal((claim.lease.run_id, claim.lease.epoch, claim.lease.until), ("run", created.run.epoch, at(TTL)), "the lease")
    equal((claim.journal, claim.inbox, claim.inbox_seq, claim.item_counts), ([], [], 0, {}), "what was recorded so far")
    equal((claim.run, await world.row()), (created.run, created.run), "the row in the claim and in the database")
    equal(await claimed_ids(world.b, now=at(1)), [], "what others can claim")


@promise
async def the_same_start_again_gives_the_run_that_is_there(world: World) -> None:
    """The same id, workflow and input hash give the existing run, unchanged and unclaimed, also with `ttl` and after its end."""
    first = await world.a.create(new_run(), now=NOW)
    again = await world.b.create(new_run(priority=5, seed=b"other"), ttl=TTL, now=at(1))
    equal((again.is_new, again.claim, again.run), (False, None, first.run), "what the second create() gave")
    equal(await world.row(), first.run, "the row")
    await world.ended("over")
    over = await world.b.create(new_run("over"), ttl=TTL, now=at(1))
    equal((over.is_new, over.claim, over.run.status), (False, None, "completed"), "create() for a run that has ended")


@promise
async def another_input_under_the_same_id_is_a_conflict(world: World) -> None:
    """Another input hash or another workflow under a known id raises `RunConflict` and changes nothing."""
    await world.a.create(new_run(), now=NOW)
    before = await world.dump("run")
    for other, difference in (
        (new_run(input_hash=b"else"), "another input"),
        (new_run(workflow="other"), "another workflow ('flow')"),
        (new_run(workflow=""), "another workflow ('flow')"),
    ):
        with refused(RunConflict("run", difference), "another start under the same id"):
            await world.b.create(other, ttl=TTL, now=at(1))
    equal(await world.dump("run"), before, "the run")


@promise
async def a_run_is_created_with_an_input(world: World) -> None:
    """An empty input hash, which says that the input is not known, raises `ValueError`, and there is no run."""
    with refused(no_input("run"), "create of a run with an empty input hash"):
        await world.a.create(new_run(input_hash=b""), ttl=TTL, now=NOW)
    equal(await world.b.get("run"), None, "the run")


@promise
async def a_run_may_begin_with_a_journal(world: World) -> None:
    """A new run has exactly the entries it was created with, as given, whether it is leased at once or claimed later."""
    big = entry(2, payload=b"\x00\xff" * 500_000)
    created = await world.a.create(new_run("leased"), ttl=TTL, entries=[FIRST, big, entry(1)], now=NOW)
    await world.a.create(new_run("pending"), entries=[FIRST, big, entry(1)], now=NOW)
    expected = [entry(1), big, FIRST]
    equal(created.claim and created.claim.journal, expected, "the journal in the creator's claim")
    equal([await world.b.journal(run_id) for run_id in ("leased", "pending")], [expected, expected], "the journals")
    equal((await world.take("pending", now=NOW)).journal, expected, "the journal in the first claim")
    holds(created.claim is not None, "a new run created with ttl= is leased at once")
    lease = (await world.take("leased")).lease
    with refused(refused_write("leased", "something else is recorded under seq 2 already"), "another entry under a first seq"):
        await world.b.record(lease, [entry(2)], now=EXPIRED)
    await world.b.record(lease, [entry(8)], now=EXPIRED)
    equal(await world.a.journal("leased"), [*expected, entry(8)], "the journal once it went on")


@promise
async def a_run_may_begin_with_an_inbox(world: World) -> None:
    """A new run has exactly the inbox rows it was created with, unconsumed, whether it is leased at once or claimed later."""
    rows = [Signal(seq=2, name="go", payload=b"\x00b"), Signal(seq=5, name="go", payload=b"c", dedupe="once")]
    created = await world.a.create(new_run("leased"), ttl=TTL, inbox=rows[::-1], now=NOW)
    await world.a.create(new_run("pending"), inbox=rows, now=NOW)
    equal(created.claim and (created.claim.inbox, created.claim.inbox_seq), (rows, 5), "the inbox in the creator's claim")
    equal([await world.b.inbox(run_id) for run_id in ("leased", "pending")], [rows, rows], "the inboxes")
    equal((await world.take("pending", now=NOW)).inbox, rows, "the inbox in the first claim")
    equal(await world.b.signal("pending", "go", b"d", dedupe="once", now=NOW), 5, "the seq of a signal that is there")
    equal(await world.b.signal("pending", "go", b"d", now=NOW), 6, "the seq of the next signal")
    with refused(ValueError("seq 2 is twice in the inbox"), "create with two inbox rows under one seq"):
        await world.a.create(new_run(), inbox=[rows[0], rows[0]], now=NOW)
    equal(await world.b.get("run"), None, "the run that was refused")


@promise
async def what_a_run_begins_with_is_no_progress(world: World) -> None:
    """Attempts are counted as for any run: the entries it was created with are not what its worker recorded."""
    created = await world.a.create(new_run(), ttl=TTL, entries=[entry(1), entry(7)], now=NOW)
    equal(created.run.attempts, 1, "attempts at create(ttl=)")
    equal((await world.take()).run.attempts, 2, "attempts at the next acquire")
    await world.a.create(new_run("pending"), entries=[entry(1), entry(7)], now=NOW)
    equal([(await world.take("pending", now=at(20 * n))).run.attempts for n in range(1, 4)], [1, 2, 3], "attempts of claims")


@promise
async def a_run_that_was_begun_elsewhere_keeps_its_beginning(world: World) -> None:
    """`created_at` is in the row as given, leased or not; `wake_at` and `updated_at` go by the store's clock all the same."""
    for ttl in (None, TTL):
        run_id = f"ttl {ttl}"
        await world.a.create(new_run(run_id), ttl=ttl, created_at=at(-900), now=NOW)
        row = await world.row(run_id)
        equal((row.created_at, row.updated_at), (at(-900), NOW), "created_at and updated_at")
        equal(row.wake_at, NOW if ttl is None else at(TTL), "wake_at")
    equal((await world.take("ttl None", now=at(1))).run.created_at, at(-900), "created_at in a claim")


@promise
async def a_run_that_exists_keeps_its_own_journal(world: World) -> None:
    """`entries` and `created_at` are for a new run: one that is there is found and left exactly as it is."""
    lease = await world.lease()
    await world.a.record(lease, [entry(1)], now=NOW)
    before = await world.dump("run")
    again = await world.b.create(new_run(), ttl=TTL, entries=[entry(1, payload=b"x"), entry(2)], created_at=at(-9), now=at(1))
    equal((again.is_new, again.claim), (False, None), "what create() gave")
    equal(await world.dump("run"), before, "everything of the run")
    with refused(RunConflict("run", "another input"), "create with another input and entries"):
        await world.b.create(new_run(input_hash=b"else"), entries=[entry(2)], now=at(1))
    equal(await world.dump("run"), before, "everything of the run after a conflict")


@promise
async def a_journal_to_begin_with_has_each_seq_once(world: World) -> None:
    """Entries whose seqs are not above zero and unique raise `ValueError`, and there is no run."""
    for entries, wrong in (
        ([entry(0)], "seq 0 is in the journal, but they count from 1"),
        ([entry(-1), entry(1)], "seq -1 is in the journal, but they count from 1"),
        ([entry(1), entry(1)], "seq 1 is twice in the journal"),
        ([entry(2), entry(1), entry(2, payload=b"x")], "seq 2 is twice in the journal"),
    ):
        with refused(ValueError(wrong), f"create with the seqs {[line.seq for line in entries]}"):
            await world.a.create(new_run(), ttl=TTL, entries=entries, now=NOW)
    equal((await world.b.get("run"), await world.b.journal("run")), (None, []), "what is there")
    holds((await world.a.create(new_run(), entries=[entry(3), entry(1)], now=NOW)).is_new, "other seqs are accepted")


@promise
async def a_run_and_its_first_journal_appear_together(world: World) -> None:
    """Row and first entries appear together: a reader or worker that finds a run while it is created finds all of them."""
    entries = [entry(seq) for seq in range(1, 4)]

    async def race(n: int) -> None:
        run_id = f"run-{n:02}"
        create = after(n % STAGGER, lambda: world.a.create(new_run(run_id), entries=entries, now=NOW))
        created, claim, journal = await outcomes(
            [create, after(n // STAGGER, lambda: world.b.acquire(run_id, TTL, now=NOW)), _journal_once_there(world, run_id)]
        )
        holds(isinstance(created, Created) and created.is_new, f"the run was made: {created!r}")
        holds(isinstance(claim, Claim | RunNotFound), f"acquire() gave a claim or found no run: {claim!r}")
        if isinstance(claim, Claim):
            equal(claim.journal, entries, "the journal in the claim")
        equal(journal, entries, "the journal as soon as there is a row")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))


async def _journal_once_there(world: World, run_id: str) -> list[Entry]:
    while await world.b.get(run_id) is None:  # noqa: ASYNC110 - the race stands for one with another process
        await asyncio.sleep(0)
    return await world.b.journal(run_id)


@promise
async def one_of_many_creators_gives_the_journal(world: World) -> None:
    """When many create one run at once, each with a journal of its own, the run has the whole of one of them."""
    journals = [[entry(seq, payload=b"%d" % n) for seq in range(1, 2 + n)] for n in range(16)]
    calls = [
        store.create(new_run(), ttl=TTL, entries=journal, created_at=at(-len(journal)), now=NOW)
        for journal, store in zip(journals, (world.a, world.b) * 8, strict=True)
    ]
    created: list[Created] = await asyncio.gather(*calls)
    (winner,) = [n for n, answer in enumerate(created) if answer.is_new]
    claim = created[winner].claim
    equal(claim and claim.journal, journals[winner], "the journal in the creator's claim")
    equal(await world.b.journal("run"), journals[winner], "the journal")
    equal((await world.row()).created_at, at(-len(journals[winner])), "created_at")


@promise
async def many_creators_make_one_run(world: World) -> None:
    """When many create the same run at once, one of them made it and the others found it."""
    calls = [store.create(new_run(), ttl=TTL, now=NOW) for store in (world.a, world.b) * 10]
    created: list[Created] = await asyncio.gather(*calls)
    equal(sorted(answer.is_new for answer in created), [False] * 19 + [True], "who made the run")
    equal([answer.claim is not None for answer in created], [answer.is_new for answer in created], "who got the lease")
    equal([line.id for line in await world.a.list()], ["run"], "the runs")


@promise
async def many_creators_with_different_inputs_make_one_run(world: World) -> None:
    """When many create one id with different inputs at once, one wins and the others get `RunConflict`."""
    calls = [store.create(new_run(input_hash=b"%d" % n), now=NOW) for n in range(10) for store in (world.a, world.b)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    accepted = [answer for answer in answers if isinstance(answer, Created)]
    equal(sum(answer.is_new for answer in accepted), 1, "how many made the run")
    equal({answer.run.input_hash for answer in accepted}, {(await world.row()).input_hash}, "the input that was accepted")
    equal(len(answers) - len(accepted), sum(isinstance(answer, RunConflict) for answer in answers), "conflicts")
