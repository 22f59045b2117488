"""Saving: a whole run goes in as a snapshot and comes out as one."""

from __future__ import annotations

from typing import Any, Final

from perdure.errors import LeaseLost, SnapshotFormatError
from perdure.model.journal import Entry
from perdure.model.records import Signal
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.world import NOW, TTL, FullWorld, entry, equal, holds, new_run, refused, signals

# As another program writes it: values that look like tags, text that is hard to store, unknown fields.
FOREIGN: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "workflowName": "flow",
    "steps": {
        "a": {"ok": True, "value": {"$datetime": "soon", "n": [1.5, -0.0, None, 2**70]}, "took": 3},
        "2": {"ok": True, "value": "\ud800\0"},
        "b": {
            "ok": False,
            "error": "NOPE",
            "cause": {"type": "error", "name": "ValueError", "message": "no"},
            "meta": {"origin": "throw", "tries": 2},
        },
    },
    "execution": {"status": "failed", "lastUpdated": "2026-01-31T12:00:00Z", "completedAt": "2026-01-31T13:00:00+01:00"},
    "metadata": {"workflowId": "elsewhere", "tenant": "ada"},
    "warnings": [{"type": "lossy_value", "stepId": "2", "path": "value", "reason": "non-json"}],
    "signature": [1],
}
# One entry of each sort, as a drive records them.
JOURNAL: Final = [
    Entry(seq=1, key="a", payload=b'{"$date":"2026-01-31"}', name="f", attempt=3, args_hash=b"\x00h", started_at=5, ended_at=9),
    Entry(seq=2, key="nap", phase="open", kind="sleep", payload=b'{"deadline":77}', started_at=9, ended_at=9),
    Entry(seq=3, key="nap", kind="sleep", started_at=9, ended_at=77),
    Entry(
        seq=4,
        key="r",
        phase="open",
        payload=b'{"type":"retry","at":99,"error":{"qualname":"E"}}',
        attempt=2,
        started_at=78,
        ended_at=78,
    ),
]


@promise_with("operators")
async def what_was_saved_is_loaded_word_for_word(world: FullWorld) -> None:
    """`load` gives the snapshot that was saved, unknown fields and all, until something happens to the run; saved again too."""
    await world.a.save("run", FOREIGN)
    loaded = await world.b.load("run")
    equal(loaded and loaded.to_dict(), FOREIGN, "what was loaded")
    holds(loaded is not None, "it was loaded")
    await world.b.save("other", _given(loaded))
    equal(_given(await world.a.load("other")).to_dict(), FOREIGN, "what was saved again")
    equal(await world.a.load("nobody"), None, "what is loaded where nothing is")


@promise_with("operators")
async def a_run_goes_through_a_snapshot_unchanged(world: FullWorld) -> None:
    """What `load` gives is the whole run: saved under another id it has the same row, journal and inbox."""
    created = await world.a.create(new_run(), ttl=TTL, entries=JOURNAL, created_at=77, now=NOW)
    holds(created.claim is not None, "a new run created with ttl= is leased at once")
    if created.claim is not None:
        await world.a.suspend(created.claim.lease, wake_at=NOW + 5, waiting_for=signals("go"), now=NOW)
    await world.a.signal("run", "come", b'{"$date":"2026-02-01"}', dedupe="once", now=NOW)
    await world.b.save("copy", _given(await world.b.load("run")))
    before, after = await world.row("run"), await world.row("copy")
    kept = (
        "workflow",
        "input",
        "input_hash",
        "seed",
        "definition_hash",
        "status",
        "wake_at",
        "waiting_for",
        "outcome",
        "created_at",
    )
    equal([getattr(after, name) for name in kept], [getattr(before, name) for name in kept], f"the columns {', '.join(kept)}")
    equal(await world.a.journal("copy"), JOURNAL, "the journal")
    equal(
        await world.a.inbox("copy"), [Signal(seq=1, name="come", payload=b'{"$date":"2026-02-01"}', dedupe="once")], "the inbox"
    )


@promise_with("operators")
async def an_ended_run_is_loaded_with_its_outcome(world: FullWorld) -> None:
    """A run that completed is loaded and saved as one that completed, with its outcome."""
    lease = await world.lease()
    await world.a.finish(lease, "completed", b'{"$date":"2026-01-31"}', entries=[entry(1)], now=NOW)
    snapshot = _given(await world.b.load("run"))
    equal((snapshot.execution.status, list(snapshot.steps)), ("completed", ["step-1"]), "status and steps")
    await world.b.save("copy", snapshot)
    row = await world.row("copy")
    equal((row.status, row.outcome), ("completed", b'{"$date":"2026-01-31"}'), "status and outcome of the copy")


@promise_with("operators")
async def load_gives_a_saved_run_as_it_is_now(world: FullWorld) -> None:
    """Once a saved run was driven, `load` gives it as it is then, and the metadata that was saved is still there."""
    await world.a.save("run", FOREIGN)
    await world.b.create(new_run())
    claim = await world.b.acquire("run", TTL)
    holds(claim is not None, "it is due once it has its input")
    if claim is not None:
        await world.b.record(claim.lease, [entry(4, "more", payload=b"7")])
    tree = _given(await world.a.load("run")).to_dict()
    equal(tree["steps"], {**FOREIGN["steps"], "more": {"ok": True, "value": 7}}, "the steps")
    equal((tree["execution"]["status"], tree["metadata"]["tenant"]), ("running", "ada"), "status and metadata")
    equal(tree["warnings"], FOREIGN["warnings"], "the warnings")


@promise_with("operators")
async def save_replaces_the_whole_run(world: FullWorld) -> None:
    """What was recorded before is removed, and the holder of an expired lease is refused; a second `save` replaces the first."""
    lease = await world.lease(now=1)
    await world.a.record(lease, [entry(1), entry(2)], now=1)
    await world.b.save("run", FOREIGN)
    with refused(LeaseLost("run", lease.epoch), "a write by the holder from before"):
        await world.a.record(lease, [entry(3)])
    await world.a.save("run", ResumeState())
    equal(_given(await world.b.load("run")).steps, {}, "the steps after a second save")


@promise_with("operators")
async def save_is_refused_while_the_run_is_driven(world: FullWorld) -> None:
    """`LeaseHeld` while a worker has the run, and nothing is changed."""
    created = await world.a.create(new_run(), ttl=TTL)
    holds(created.claim is not None, "a new run created with ttl= is leased at once")
    before = await world.dump("run")
    with refused(await world.lease_held(), "save while a live lease holds the run"):
        await world.b.save("run", FOREIGN)
    equal(await world.dump("run"), before, "everything of the run")


@promise_with("operators")
async def what_is_no_snapshot_is_not_saved(world: FullWorld) -> None:
    """`SnapshotFormatError`, and what was there is there."""
    await world.a.save("run", FOREIGN)
    for document in (
        {},
        {**FOREIGN, "formatVersion": 2},
        {**FOREIGN, "steps": {"a": {"ok": 1}}},
        {**FOREIGN, "metadata": {"perdure": 1}},
    ):
        with refused(SnapshotFormatError, f"save of {document!r}"):
            await world.b.save("run", document)
    equal(_given(await world.b.load("run")).to_dict(), FOREIGN, "what is loaded")


def _given(snapshot: Snapshot | None) -> Snapshot:
    if snapshot is None:
        raise AssertionError("promised, but not so: there is something to load")
    return snapshot
