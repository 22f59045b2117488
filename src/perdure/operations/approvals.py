"""Deciding approvals, and finding those that are pending.

Everything is read from the store, also of a run that is driven here: only what is recorded may be decided. A decision is checked
against that, sent, and then looked up, because another one may have been first; `model/approvals.py` says how the store decides
which one was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from perdure.codec import Codec, readable, tree_of
from perdure.codec.hints import BUILTINS, type_name
from perdure.errors import (
    ApprovalAmbiguous,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalNotFound,
    InvalidInput,
    NotAssigned,
    PerdureError,
    PersistenceError,
    RunFinished,
    RunNotFound,
    SnapshotCorrupt,
    ValueNotStorable,
)
from perdure.model.approvals import (
    DEDUPE,
    MAX_PAYLOAD_BYTES,
    Decision,
    OpenApproval,
    check_reason,
    expiry,
    new_nonce,
)
from perdure.model.durations import instant, moment
from perdure.model.ids import check_id
from perdure.model.journal import Entry
from perdure.model.records import UNFINISHED, RunInfo, RunRow
from perdure.model.run_filter import RunFilter
from perdure.snapshots.consistent_view import View, load_view
from perdure.worker.host import Host

_PAGE: Final = 100
# How many runs are read at once.
_READ_AT_ONCE: Final = 16


class Unchanged:
    """The default of `payload=`: what was asked for is approved as it is."""

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED: Final = Unchanged()


class PendingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks and nobody has decided. `payload` is plain JSON. Without `assignees` everyone may decide."""

    run_id: str
    workflow: str
    name: str
    key: str
    payload: Any
    assignees: tuple[str, ...]
    requested_at: datetime
    expires_at: datetime | None


class Verdict(NamedTuple):
    """What a person wants: to approve, perhaps with another payload, or to reject, perhaps with a reason."""

    decision: Literal["approved", "rejected"]
    by: str
    payload: Any = UNCHANGED
    reason: str | None = None


class Approval(NamedTuple):
    """One call of `ctx.approve` in a run. It is `withdrawn` when the body cancelled it, as a time limit does."""

    row: RunRow
    opened: Entry
    asked: OpenApproval
    decision: Decision | None = None
    withdrawn: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has no decision. Its time may be over all the same."""
        return self.decision is None and not self.withdrawn

    @property
    def address(self) -> str:
        """The name of the inbox row that decides it."""
        return self.asked.address(self.opened.name).name

    def expiry_at(self, now: int) -> Decision | None:
        """The decision that it must get at this instant, because its time is over."""
        deadline = self.asked.deadline
        return None if deadline is None or deadline > now else expiry(deadline)

    def check_undecided(self) -> None:
        """Raise if it was decided, or if its run has ended."""
        if self.decision is not None:
            raise self.refusal(self.decision)
        if self.row.ended:
            raise RunFinished(self.row.id, self.row.status)

    def check_pending(self, now: int) -> None:
        """Raise unless it can be decided at this instant."""
        self.check_undecided()
        expired = self.expiry_at(now)
        if expired is not None:
            raise self.refusal(expired)

    def check_assigned(self, by: str) -> None:
        """Raise unless this person may decide it."""
        if self.asked.assignees and by not in self.asked.assignees:
            raise NotAssigned(self.row.id, self.opened.name, by, self.asked.assignees)

    def refusal(self, decision: Decision) -> PerdureError:
        """The error that says that this decision was first."""
        if decision.decision == "expired":
            return ApprovalExpired(self.row.id, self.opened.name, iso(decision.at))
        return ApprovalDecided(self.row.id, self.opened.name, decision.decision, decision.by or "", iso(decision.at))

    def pending(self) -> PendingApproval:
        """It as people see it."""
        return PendingApproval(
            run_id=self.row.id,
            workflow=self.row.workflow,
            name=self.opened.name,
            key=self.opened.key,
            payload=readable(tree_of(bytes(self.asked.payload))[0]),
            assignees=self.asked.assignees,
            requested_at=moment(self.opened.started_at),
            expires_at=None if self.asked.deadline is None else moment(self.asked.deadline),
        )


async def find_approval(
    host: Host, run_id: str, name: str, key: str | None = None, *, approval_id: str | None = None
) -> Approval:
    """The approval of this name: the one that is pending, or else the last that was decided.

    Raises `RunNotFound`, `RunFinished`, `ApprovalNotFound` and `ApprovalAmbiguous`.
    """
    view = await _load(host, run_id)
    approvals = _approvals_of(view)
    if approval_id is not None:
        named = [each for each in approvals if each.asked.id == approval_id]
    else:
        named = [each for each in approvals if each.opened.name == name and key in (None, each.opened.key)]
    pending = [each for each in named if each.is_open]
    if len(pending) > 1:
        raise ApprovalAmbiguous(run_id, name, [each.opened.key for each in pending])
    found = pending or [each for each in named if each.decision is not None]
    if found:
        return found[-1]
    if view.row.ended:
        raise RunFinished(run_id, view.row.status)
    raise ApprovalNotFound(run_id, name if key is None else key, [each.opened.name for each in approvals if each.is_open])


async def decide(
    host: Host, run_id: str, name: str, verdict: Verdict, *, key: str | None = None, approval_id: str | None = None
) -> None:
    """Decide the approval. Returns when this decision is the one that counts; otherwise an error says why it is not."""
    check_id(verdict.by, "by")
    check_reason(verdict.reason)
    await host.ask_time(again=True)
    approval = await find_approval(host, run_id, name, key, approval_id=approval_id)
    approval.check_undecided()
    now = host.clock.now()
    # Too late: that is decided as everything is, because another decision may be under way that was sent in time.
    decision = approval.expiry_at(now)
    if decision is None:
        approval.check_assigned(verdict.by)
        decision = _decision(host.settings.codec, approval, verdict, now)
    await host.send_signal(run_id, approval.address, msgspec.json.encode(decision), DEDUPE)
    first = _decision_about(approval, await _load(host, run_id))
    if first is None:
        raise PersistenceError(
            f"approval {name!r} of run {run_id!r} was decided", "but the run has gone on since, and does not say by whom"
        )
    if first.nonce != decision.nonce or first.decision == "expired":
        raise approval.refusal(first)


async def pending_approvals(host: Host, wanted: RunFilter, assignee: str | None, limit: int) -> list[PendingApproval]:
    """What can be decided now, by this person if one is given, of the runs that are wanted, last changed first.

    A suspended run says in its row that it waits for an approval. Journals are read of those, and of runs that are in memory or
    were given back, which say nothing.
    """
    await host.ask_time(again=True)
    now, found = host.clock.now(), list[PendingApproval]()
    before: tuple[int, str] | None = None
    while True:
        page = await host.store.list(wanted, before=before, limit=_PAGE)
        run_ids = [info.id for info in page if _may_wait(info)]
        for start in range(0, len(run_ids), _READ_AT_ONCE):
            for approvals in await asyncio.gather(*(_read(host, each) for each in run_ids[start : start + _READ_AT_ONCE])):
                found += [each.pending() for each in approvals if _is_for(each, assignee, now)]
            if len(found) >= limit:
                return found[:limit]
        if len(page) < _PAGE:
            return found
        before = instant(page[-1].updated_at), page[-1].id


def unfinished(wanted: RunFilter) -> RunFilter:
    """The filter without runs that have ended. Raises `ValueError` if it asks for runs by their status."""
    if wanted.status is not None:
        raise ValueError("approvals are pending only in runs that have not ended, so they are not selected by status")
    return msgspec.structs.replace(wanted, status=UNFINISHED)


def _may_wait(info: RunInfo) -> bool:
    if info.status == "suspended":
        return any(each.kind == "approval" for each in info.waiting_for)
    return info.status == "running" or info.updated_at != info.created_at  # a pending run that was leased before


async def _read(host: Host, run_id: str) -> list[Approval]:
    """The approvals of this run; none if it was deleted, or cannot be read, which `runtime.stuck_runs` reports."""
    try:
        return _approvals_of(await _load(host, run_id))
    except (RunNotFound, SnapshotCorrupt):
        return []


def _is_for(approval: Approval, assignee: str | None, now: int) -> bool:
    if not approval.is_open or approval.expiry_at(now) is not None:
        return False
    return assignee is None or not approval.asked.assignees or assignee in approval.asked.assignees


async def _load(host: Host, run_id: str) -> View:
    view = await load_view(host.store, check_id(run_id, "a run's id"))
    if view is None:
        raise RunNotFound(run_id)
    return view


def _approvals_of(view: View) -> list[Approval]:
    """The last call of each key. Raises `SnapshotCorrupt`."""
    found: dict[str, Approval] = {}
    try:
        for entry in view.entries():
            if entry.kind != "approval":
                continue
            if entry.phase == "open":
                asked = msgspec.json.decode(entry.payload, type=OpenApproval)
                found[entry.key] = Approval(view.row, entry, asked)
            elif entry.phase == "cancel" and entry.key in found:
                found[entry.key] = found[entry.key]._replace(withdrawn=True)
        return [each._replace(decision=_decision_about(each, view)) for each in found.values()]
    except msgspec.MsgspecError as reason:
        raise SnapshotCorrupt(view.row.id, "an approval", str(reason)) from reason


def _decision_about(approval: Approval, view: View) -> Decision | None:
    """The decision that counts: from the inbox, or from the journal when the run has taken it from there."""
    for stored in _rows_about(approval, view):
        return msgspec.json.decode(stored, type=Decision)
    return None


def _rows_about(approval: Approval, view: View) -> Iterator[bytes]:
    yield from (row.payload for row in view.inbox if row.name == approval.address)
    for entry in view.entries():
        if entry.key == approval.opened.key and entry.phase == "close" and entry.seq > approval.opened.seq:
            yield entry.payload


def _decision(codec: Codec, approval: Approval, verdict: Verdict, now: int) -> Decision:
    decision = Decision(decision=verdict.decision, at=moment(now), nonce=new_nonce(), by=verdict.by)
    if verdict.decision == "rejected":
        return msgspec.structs.replace(decision, reason=check_reason(verdict.reason))
    if isinstance(verdict.payload, Unchanged):
        return msgspec.structs.replace(decision, payload=approval.asked.payload)
    try:
        payload = _edited_payload(codec, approval.asked, verdict.payload)
    except ValueError as reason:
        raise InvalidInput(approval.row.workflow, f"the payload of approval {approval.opened.name!r}: {reason}") from reason
    return msgspec.structs.replace(decision, payload=msgspec.Raw(payload), is_edited=True)


def _edited_payload(codec: Codec, asked: OpenApproval, edited: Any) -> bytes:
    """The payload as it is stored. Raises `ValueError` if it is certain that the run could not take it."""
    hint: Any = Any
    if asked.type is not None:
        if type_name(type(edited)) == asked.type:
            hint = type(edited)
        elif asked.type in BUILTINS:
            edited = codec.conform(edited, BUILTINS[asked.type])
        else:
            _check_fields(asked, edited)
    try:
        payload, _ = codec.dump(edited, hint, path="payload")
    except ValueNotStorable as reason:
        raise ValueError(str(reason)) from reason
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"it takes {len(payload):,} bytes, and an approval at most {MAX_PAYLOAD_BYTES:,}")
    return payload


def _check_fields(asked: OpenApproval, edited: Any) -> None:
    """Raise unless an object of the class that was asked about could be made of this. The class is not known here."""
    stored = msgspec.json.decode(asked.payload)
    fields = stored["$class"][1] if isinstance(stored, dict) and "$class" in stored else None
    if fields is None:
        return  # an enum, for instance
    if not isinstance(edited, dict):
        raise ValueError(f"it must be a {asked.type}, or a dict with its fields, not {edited!r}")
    if unknown := sorted(map(str, edited.keys() - fields.keys())):
        raise ValueError(f"a {asked.type} has no {', '.join(unknown)}; it has {', '.join(fields)}")


def iso(at: datetime) -> str:
    """An instant in UTC, to the second, as errors and pages show it."""
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
