"""What a run has done that would have to be undone: the steps and children with a compensation, as the journal has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from perdure.errors import OUTCOME_UNKNOWN, StepFailed, StepTimeout
from perdure.model.journal import CancelRequest, Entry, Intent, OpenChild, StepOpening
from perdure.model.own_names import CANCEL_WITHOUT_UNDO, compensation_key, numbered_key
from perdure.model.records import RunRow, Signal


class Effect(NamedTuple):
    """What a step or a child has done, or may have done.

    `intent` is what a step recorded before it was called. `result` is the entry that has what it returned; it is None if that is
    not known. `is_set_aside` says that a retry has dropped the record, and the step was not called again. What undoes it is
    recorded under the key `compensation`.
    """

    opened: Entry
    compensation: str
    intent: Intent | None
    result: Entry | None
    is_undone: bool
    is_set_aside: bool

    @property
    def key(self) -> str:
        """The key of the step or the child."""
        return self.opened.key

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name


class _Called(msgspec.Struct):
    """A step or a child with a compensation, as far as the journal was read."""

    opened: Entry
    compensation: str
    intent: Intent | None
    close: Entry | None = None
    is_undone: bool = False
    is_set_aside: bool = False

    def may_have_done_something(self) -> bool:
        """Return whether there may be something to undo: a child that did not complete undoes what it has done itself."""
        if self.close is None or self.close.ok:
            return True
        return self.opened.kind == "step" and _is_in_doubt(self.close)


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
    raised says that it did nothing, unless it timed out or its outcome is unknown. What another run has done does not count. What
    a retry has set aside counts until it is undone.
    """
    # By key: one step, or each child that was started under it.
    called: dict[str, list[_Called]] = {}
    by_compensation: dict[str, _Called] = {}
    for entry in sorted(journal, key=attrgetter("seq")):
        if entry.phase == "open":
            call = _read_call(entry, called.get(entry.key, []), also)
            if call is not None:
                known = called.setdefault(entry.key, [])
                known[:] = [*(each for each in known if each.compensation != call.compensation), call]
                by_compensation[call.compensation] = call
        elif entry.phase == "close" and entry.key in called:
            called[entry.key][-1].close = entry
        elif entry.phase == "close" and entry.ok and entry.key in by_compensation:
            by_compensation[entry.key].is_undone = True
        elif entry.phase == "drop":
            for key in called.keys() & msgspec.json.decode(entry.payload, type=set[str]):
                _set_aside(called, key)
    done = [each for calls in called.values() for each in calls if each.may_have_done_something()]
    effects = [
        Effect(each.opened, each.compensation, each.intent, _result_of(each), each.is_undone, each.is_set_aside) for each in done
    ]
    return sorted(effects, key=lambda effect: effect.opened.seq)


def _result_of(call: _Called) -> Entry | None:
    return call.close if call.close is not None and call.close.ok else None


def _set_aside(called: dict[str, list[_Called]], key: str) -> None:
    """A retry sets aside what is recorded under this key. What was done and is not undone stays.

    So does a child that was given up, as it may have completed. The last one is started again if it has not.
    """
    last = called[key][-1]
    is_open_child = last.opened.kind == "child" and last.close is None
    left = [call for call in called.pop(key) if not call.is_undone and call.may_have_done_something()]
    left = [call for call in left if call is not last or not is_open_child]
    for call in left:
        call.is_set_aside = True
    if left:
        called[key] = left


def not_undone(row: RunRow, journal: Iterable[Entry]) -> list[str]:
    """Return the keys of what has been done and is not undone, if the run has ended badly or cannot be resumed as it is.

    A child whose end is not recorded is among them: only its row tells whether it has completed, or undoes what it has done
    itself. Raises ValueError if an entry cannot be read.
    """
    if row.status == "completed" or not (row.ended or row.problem is not None or row.cancel_requested):
        return []
    return [effect.key for effect in effects_in(journal) if not effect.is_undone]


def find_cancel_request(inbox: Iterable[Signal], journal: Iterable[Entry]) -> int | None:
    """Return the seq of the inbox row that asks to cancel the run and to undo nothing. One from before a retry is void.

    Raises ValueError if it cannot be read.
    """
    rows = [row for row in inbox if row.name == CANCEL_WITHOUT_UNDO]
    if not rows:
        return None
    reopened = max((entry.epoch for entry in journal if entry.phase == "drop"), default=0)
    valid = (row for row in rows if msgspec.json.decode(row.payload, type=CancelRequest).epoch >= reopened)
    return next((row.seq for row in valid), None)


def _read_call(opened: Entry, known: Sequence[_Called], also: Collection[str]) -> _Called | None:
    """Return the call of this run that the entry opens, if it has a compensation. `known` are those under the same key."""
    if opened.kind == "child":
        child = msgspec.json.decode(opened.payload, type=OpenChild)
        if not child.is_compensated or child.belongs_to is not None:
            return None
        again = (each for each in known if msgspec.json.decode(each.opened.payload, type=OpenChild).id == child.id)
        same = next(again, None)
        number = len(known) + 1
        return _Called(opened, compensation_key(numbered_key(opened.key, number)) if same is None else same.compensation, None)
    opening = None if opened.kind != "step" else msgspec.json.decode(opened.payload, type=StepOpening)
    if not isinstance(opening, Intent) or opening.belongs_to is not None:
        return None
    return _Called(opened, compensation_key(opened.key), opening) if opening.is_compensated or opened.key in also else None


def _is_in_doubt(failed: Entry) -> bool:
    """Return whether the effect of a failed step may be there all the same."""
    try:
        error = msgspec.json.decode(failed.payload, type=_Failure).error
    except msgspec.MsgspecError:
        return failed.kind == "foreign"  # otherwise the step has returned an Err
    if (error.module, error.qualname) not in _NAMES_IN_DOUBT:
        return False
    return error.qualname == StepTimeout.__qualname__ or OUTCOME_UNKNOWN in (error.args or ())
