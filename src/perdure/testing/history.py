"""What a run has recorded, as lines that a person reads and a test compares.

reserve                                 a step that returned
charge, attempt 3                       one that returned when it was tried for the third time
charge failed: CardDeclined             one that failed
charge fails, attempt 2 next            one that waits for its next attempt
sleep settle 1h                         a sleep that is over; `sleeps settle 1h` is one that is not
signal review                           a signal that came; `waits for signal review` is one that did not yet
signal review timed out
timeout review                          a `ctx.timeout` that cut off its block
patch patched:new                       other records: their kind and key
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from perdure.codec import tree_of
from perdure.model.approvals import Decision
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry, NextTry, OpenWait, entries_in_force
from perdure.snapshots.step_results import read_result

_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


class HistoryItem(msgspec.Struct, frozen=True):
    """One record of a run. `text` is its line; `value` is what it gave, as plain JSON."""

    text: str
    kind: str
    key: str
    is_over: bool
    ok: bool
    value: Any = None

    def __str__(self) -> str:
        return self.text


def history_of(entries: Iterable[Entry]) -> list[HistoryItem]:
    """An item for each key: in the order in which results reached the body, then what is not over yet."""
    opened: dict[str, Entry] = {}
    closed: list[HistoryItem] = []
    for entry in entries_in_force(entries):
        if entry.phase == "open":
            opened[entry.key] = entry
        elif entry.phase == "cancel":
            opened.pop(entry.key, None)
        elif entry.phase == "close":
            closed.append(_closed(entry, opened.pop(entry.key, None)))
    return [*closed, *map(_open, opened.values())]


def assert_same_history(run_id: str, found: Sequence[HistoryItem], expected: Sequence[str]) -> None:
    """Raise AssertionError, with the difference line by line, unless the run has this history."""
    lines = [item.text for item in found]
    if lines == list(expected):
        return
    difference = difflib.unified_diff(list(expected), lines, "expected", "recorded", n=1000, lineterm="")
    raise AssertionError(f"run {run_id!r} has another history:\n" + "\n".join(difference))


def _closed(entry: Entry, opened: Entry | None) -> HistoryItem:
    text = _closed_text(entry, opened)
    value = tree_of(entry.payload)[0] if entry.ok and entry.kind in ("step", "signal", "child") else None
    return HistoryItem(text, entry.kind, entry.key, is_over=True, ok=entry.ok, value=value)


def _closed_text(entry: Entry, opened: Entry | None) -> str:
    if entry.kind == "step":
        tried = f", attempt {entry.attempt}" if entry.attempt > 1 else ""
        if entry.ok:
            return f"{entry.key}{tried}"
        return f"{entry.key} failed: {_error_name(entry)}{tried}"
    if entry.kind == "sleep":
        return f"sleep {entry.key}{_length(opened)}"
    if entry.kind == "approval":
        return f"approval {_asked(entry)} {msgspec.json.decode(entry.payload, type=Decision).decision}"
    return f"{entry.kind} {entry.key}{'' if entry.ok else ' timed out' if entry.kind == 'signal' else ' failed'}"


def _asked(entry: Entry) -> str:
    """The key of an approval without the prefix that one without a `key=` of its own has."""
    return entry.key.removeprefix("approve:")


def _error_name(entry: Entry) -> str:
    """The class of an exception, or what was returned as `Err`."""
    result = read_result(entry).result
    cause = result.cause or {}
    return str(cause["name"]) if cause.get("type") == "error" else f"Err({result.error!r})"


def _open(entry: Entry) -> HistoryItem:
    if entry.kind == "step":
        text = f"{entry.key} fails, attempt {entry.attempt} next" if _is_retry(entry) else f"{entry.key} was started"
    elif entry.kind == "sleep":
        text = f"sleeps {entry.key}{_length(entry)}"
    else:
        text = f"waits for {entry.kind} {_asked(entry) if entry.kind == 'approval' else entry.key}"
    return HistoryItem(text, entry.kind, entry.key, is_over=False, ok=False)


def _is_retry(entry: Entry) -> bool:
    try:
        msgspec.json.decode(entry.payload, type=NextTry)
    except msgspec.MsgspecError:
        return False
    return True


def _length(opened: Entry | None) -> str:
    """How long a sleep was to be, as ` 1h30m`; nothing if that is not recorded."""
    deadline = None if opened is None else msgspec.json.decode(opened.payload, type=OpenWait).deadline
    if opened is None or deadline is None:
        return ""
    rest, fraction = divmod(deadline - opened.started_at, MICROSECOND)
    parts = ""
    for unit, length in _UNITS:
        count, rest = divmod(rest, length)
        parts += f"{count}{unit}" if count else ""
    if fraction:
        parts += f"{fraction // 1000}ms" if fraction % 1000 == 0 else f"{fraction}us"
    return f" {parts or '0s'}"
