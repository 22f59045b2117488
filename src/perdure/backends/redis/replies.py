"""What scripts reply, as the contract's values and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.backends.base.damaged_runs import LINE_FIELDS, UNREADABLE, damaged_line, line_from
from perdure.backends.base.duplicate_records import refusal_from
from perdure.backends.base.new_runs import row_after_restore
from perdure.backends.base.process_owner import label_of
from perdure.backends.redis.rows import Arg, as_list, column_from, run_from, signal_from
from perdure.codec.outcomes import OUTCOME_START
from perdure.errors import LeaseHeld, LeaseLost, RunFinished, RunNotFound
from perdure.model.records import Lease, Pulse, RunInfo, RunRow, Signal


def check_reply(reply: list[Any], run_id: str) -> list[Any]:
    """The reply, unless it says that the verb was refused."""
    said = reply[0]
    if said == b"missing":
        raise RunNotFound(run_id)
    if said == b"finished":
        raise RunFinished(run_id, reply[1].decode())
    if said == b"on hold":
        raise LeaseHeld.by_operator(run_id)
    if said == b"leased":
        raise LeaseHeld(run_id, label_of(reply[1].decode()))
    if said == b"driven":
        raise LeaseHeld.by_attempt(run_id, reply[1].decode())
    if said == b"refused":
        raise refusal_from(run_id, reply[1].decode())
    return reply


def check_holder(reply: list[Any], lease: Lease) -> list[Any]:
    """The reply to the holder of a lease, unless it says that the lease is lost or the verb was refused."""
    if reply[0] == b"lost":
        raise LeaseLost(lease.run_id, lease.epoch)
    return check_reply(reply, lease.run_id)


def arrived_signals_from(reply: Sequence[Any]) -> list[Signal]:
    """The awaited inbox rows that kept a run from being suspended."""
    return [signal_from(stored) for stored in reply[1]] if reply[0] == b"arrived" else []


def row_from(flat: Sequence[bytes]) -> RunRow:
    """The row of a reply that always has one."""
    row = run_from(flat)
    if row is None:
        raise ValueError("a script gave an empty run")
    return row


def pulse_from(reply: Sequence[bytes]) -> Pulse:
    """What a record or a renewal answers to the holder."""
    return Pulse(int(reply[1]), reply[2] == b"1")


class ListLine(NamedTuple):
    """A line of a list, and the stored metadata of its run."""

    info: RunInfo
    metadata: bytes


class ListPage(NamedTuple):
    """Lines, and the (updated_at, id) of the last run that was looked at, None if there are no more."""

    lines: list[ListLine]
    last: tuple[int, str] | None


# What an absent column stands for, if it is not None.
_ABSENT: Final[Mapping[str, Any]] = {"waiting_for": (), "attempts": 0}
# The columns of a line, and how much of an outcome.
LINE_ARGS: Final[list[Arg]] = [*as_list(LINE_FIELDS), OUTCOME_START]


def page_from(reply: Sequence[Any], size: int) -> ListPage:
    """A page of a list of at most `size` runs."""
    number, updated_at, run_id, rows = reply
    last = (int(updated_at), run_id.decode(errors="replace")) if int(number) == size else None
    return ListPage([_line_from(row) for row in rows], last)


def _line_from(row: Sequence[bytes | None]) -> ListLine:
    """The line of this row: `LINE_FIELDS`, in which an absent column is None, and the beginning of the outcome."""
    columns: dict[str, Any] = {}
    problem: BaseException | None = None
    *values, outcome = row
    for name, value in zip(LINE_FIELDS, values, strict=True):
        try:
            columns[name] = _ABSENT.get(name) if value is None else column_from(name, value)
        except UNREADABLE as reason:
            problem = problem or reason
    run_id = columns.get("id") or (values[0] or b"?").decode(errors="replace")
    if problem is not None:
        return ListLine(damaged_line(run_id, columns, problem), b"{}")
    return ListLine(line_from(run_id, columns, outcome), columns["metadata"] or b"{}")


def to_restore(run: RunRow, inbox: Sequence[Signal]) -> tuple[RunRow, str]:
    """The row that `restore` writes, without the columns that only the server knows, and its wake mode: never, due, now or given.

    The mode says in a word what `row_after_restore` decides by the present instant, because here the server's clock decides it.
    """
    row = row_after_restore(run, inbox, None, 0)
    if row.ended or row.lacks_input:
        wake = "never"
    elif row.cancel_requested or any(signal.address in row.waiting_for for signal in inbox):
        wake = "due"
    else:
        wake = "now" if row.status == "pending" and run.wake_at is None else "given"
    return msgspec.structs.replace(row, wake_at=run.wake_at), wake
