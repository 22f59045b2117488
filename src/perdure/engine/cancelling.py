"""The cancellation of a run: whether it is requested, why, and whether the run undoes what it has done.

A run is cancelled on request, which its row tells (`cancel_requested`), or because its deadline has passed. That it is to undo
nothing stands in its inbox. Where the body was cancelled is an entry of the journal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.errors import CANCEL_KEY, SnapshotCorrupt
from perdure.model.journal import CancelPoint, Entry
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from perdure.model.records import Claim, Signal, deadline_in_force
from perdure.snapshots.effects import find_cancel_request


class Cancellation:
    """The cancellation of one run, as far as its drive knows of it."""

    __slots__ = ("deadline", "is_delivered", "is_late", "is_read", "is_recorded", "is_requested", "problem", "request", "undoes")

    def __init__(self, claim: Claim, recorded: CancelPoint | None, now: int, *, has_store: bool) -> None:
        # Whether the journal says where the body was cancelled, and whether this drive has cancelled it there.
        self.is_recorded = recorded is not None
        self.is_delivered = False
        self.deadline = deadline_in_force(claim.run, claim.journal) if has_store else None
        # The seq of the inbox row that asks to cancel the run and to undo nothing, until it is consumed.
        self.request: int | None = None
        # Why the request cannot be read.
        self.problem: SnapshotCorrupt | None = None
        if claim.inbox:
            self._find_request(claim.run.id, claim.inbox, claim.journal)
        is_requested = claim.run.cancel_requested or self.request is not None
        # Whether the run is cancelled because its deadline has passed, and whether it compensates what it has done.
        self.is_late = self.deadline is not None and self.deadline <= now and not is_requested
        self.undoes = self.request is None
        if recorded is not None:
            self.is_late = recorded.deadline is not None
            self.undoes = self.undoes and recorded.undo
        self.is_requested = is_requested or self.is_late or self.is_recorded
        # Whether the inbox was read since the request: how the run is to be cancelled may stand there.
        self.is_read = self.is_requested or not has_store

    @property
    def is_next(self) -> bool:
        """Return whether the run is to be cancelled and the journal does not say where."""
        return self.is_requested and not self.is_recorded

    @property
    def is_on_its_way(self) -> bool:
        """Return whether the entry that says where the body is cancelled was recorded, and has not reached it."""
        return self.is_recorded and not self.is_delivered

    @property
    def passed_deadline(self) -> int | None:
        """The deadline, if that is why the run is cancelled."""
        return self.deadline if self.is_late and self.undoes else None

    def read(self, run_id: str, inbox: Sequence[Signal], journal: Sequence[Entry]) -> None:
        """Find out whether the run is to undo nothing. Raises `SnapshotCorrupt`."""
        self._find_request(run_id, inbox, journal)
        if self.problem is not None:
            raise self.problem
        self.undoes = self.request is None
        self.is_read = True

    def void_requests(self, inbox: Sequence[Signal]) -> list[int]:
        """Return the seqs of requests that are void or repeated: they must not come back to life."""
        return [row.seq for row in inbox if row.name == CANCEL_WITHOUT_UNDO and row.seq != self.request]

    def point(self, calls: int) -> bytes:
        """Return the payload of the entry that says where the body was cancelled: after so many calls."""
        return msgspec.json.encode(CancelPoint(self.deadline if self.is_late else None, self.undoes, calls))

    def _find_request(self, run_id: str, inbox: Sequence[Signal], journal: Sequence[Entry]) -> None:
        try:
            self.request = find_cancel_request(inbox, journal)
        except ValueError as reason:
            self.problem = SnapshotCorrupt(run_id, "a request to cancel it", str(reason))


def calls_before(entry: Entry) -> int:
    """Return how many calls and timers the body had made when it was cancelled there."""
    return msgspec.json.decode(entry.payload, type=CancelPoint).calls if entry.key == CANCEL_KEY else 0
