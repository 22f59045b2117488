"""What a run has done that would have to be undone: the steps and children with a compensation, as the journal has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from perdure.errors import OUTCOME_UNKNOWN, StepFailed, StepTimeout
from perdure.model.journal import CancelRequest, Entry, Intent, OpenChild, StepOpening, entries_in_force
from perdure.model.own_names import CANCEL_WITHOUT_UNDO, compensation_key
from perdure.model.records import RunRow, Signal


class Effect(NamedTuple):
    """What a step or a child has done, or may have done. `close` has its result; it is None if that is not known."""

    opened: Entry
    close: Entry | None
    is_undone: bool

    @property
    def key(self) -> str:
        """The key of the step or the child."""
        return self.opened.key

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name


class _Raised(msgspec.Struct):
    """What of a recorded exception says whether the step may have had an effect."""

    module: str
    qualname: str
    args: list[Any] | None = None


class _Failure(msgspec.Struct):
    error: _Raised


_NAMES_IN_DOUBT: Final = {(error.__module__, error.__qualname__) for error in (StepTimeout, StepFailed)}


def effects_in(journal: Iterable[Entry], also: Collection[str] = ()) -> list[Effect]:
    """Return the effects, undone or not, in the order in which they began. Raises ValueError if an entry cannot be read.

    A step counts if it had a compensation when it was called, or if its key is in `also` and it recorded an intent. A step that
    raised says that it did nothing, unless it timed out or its outcome is unknown. A child that did not complete undoes what it
    has done itself. What another run has done does not count.
    """
    opened: dict[str, Entry] = {}
    closed: dict[str, Entry] = {}
    for entry in entries_in_force(journal):
        if entry.phase == "close":
            closed[entry.key] = entry
        elif entry.phase == "open" and (entry.key not in opened or entry.kind == "child") and _is_compensated(entry, also):
            opened[entry.key] = entry
    effects = []
    for key, entry in opened.items():
        undone, close = closed.get(compensation_key(key)), closed.get(key)
        if close is None or close.ok or (entry.kind == "step" and _is_in_doubt(close)):
            known = close if close is not None and close.ok else None
            effects.append(Effect(entry, known, is_undone=undone is not None and undone.ok))
    return sorted(effects, key=lambda effect: effect.opened.seq)


def not_undone(row: RunRow, journal: Iterable[Entry]) -> list[str]:
    """Return the keys of what has been done and is not undone, if the run has ended badly or cannot be resumed as it is.

    An open child may still undo what it has done. Raises ValueError if an entry cannot be read.
    """
    if row.status == "completed" or not (row.ended or row.problem is not None or row.cancel_requested):
        return []
    left = (effect for effect in effects_in(journal) if not effect.is_undone)
    return [effect.key for effect in left if effect.opened.kind == "step" or effect.close is not None]


def find_cancel_request(inbox: Iterable[Signal], journal: Iterable[Entry]) -> int | None:
    """Return the seq of the inbox row that asks to cancel the run and to undo nothing. One from before a retry is void."""
    rows = [row for row in inbox if row.name == CANCEL_WITHOUT_UNDO]
    if not rows:
        return None
    reopened = max((entry.epoch for entry in journal if entry.phase == "drop"), default=0)
    valid = (row for row in rows if msgspec.json.decode(row.payload, type=CancelRequest).epoch >= reopened)
    return next((row.seq for row in valid), None)


def _is_compensated(opened: Entry, also: Collection[str]) -> bool:
    if opened.kind == "child":
        child = msgspec.json.decode(opened.payload, type=OpenChild)
        return child.is_compensated and child.belongs_to is None
    if opened.kind != "step":
        return False
    opening = msgspec.json.decode(opened.payload, type=StepOpening)
    if not isinstance(opening, Intent) or opening.belongs_to is not None:
        return False
    return opening.is_compensated or opened.key in also


def _is_in_doubt(failed: Entry) -> bool:
    """Return whether the effect of a failed step may be there all the same."""
    try:
        error = msgspec.json.decode(failed.payload, type=_Failure).error
    except msgspec.MsgspecError:
        return failed.kind == "foreign"  # otherwise the step has returned an Err
    if (error.module, error.qualname) not in _NAMES_IN_DOUBT:
        return False
    return error.qualname == StepTimeout.__qualname__ or OUTCOME_UNKNOWN in (error.args or ())
