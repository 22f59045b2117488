"""One run copied from a store into another: what the copy must look like, and whether what is there may be replaced by it.

The row that `restore` writes follows from the source's row alone, because it is given the instant as well: that of the run's last
change, or its epoch if that is higher. So a copy is known when it is seen again, runs keep their age and their place in lists,
and every lease that the target gives has a higher epoch than any that the source gave. Two things are the target's own: whether a
run is on hold there, and how high its epoch is by then.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from time import time_ns
from typing import Any, Final

import msgspec

from perdure.duration import moment
from perdure.errors import LeaseHeld, PersistenceError
from perdure.journal import Entry
from perdure.records import Signal
from perdure.stateview import View, stored_view
from perdure.store import Store
from perdure.stores.beginning import restored_row

COPIED: Final = "copied"
ALREADY_THERE: Final = "already there"


async def copy_run(source: Store, target: Store, run_id: str) -> str | None:
    """`COPIED`, `ALREADY_THERE`, or why the run was left out; None when it is gone. Raises `PersistenceError`."""
    given = await stored_view(source, run_id)
    if given is None:
        return None
    if given.row.lease_until is not None and given.row.lease_until > time_ns() // 1000:
        return f"a worker drives it in the source, with a lease until {moment(given.row.lease_until).isoformat()}"
    copy, found = _copy_of(given), await stored_view(target, run_id)
    if found is not None:
        if _is_copy(found, given, copy):
            return ALREADY_THERE
        reason = _why_not_replaced(found, given, copy)
        if reason is not None:
            return reason
    try:
        await target.restore(given.row, given.journal, given.inbox, now=copy.row.updated_at)
    except LeaseHeld as reason:
        return f"{reason} in the target"
    await _check(target, given, copy)
    return COPIED


def _copy_of(given: View) -> View:
    """What the target must have then, if it had nothing before."""
    row = given.row
    at = max(row.updated_at, row.epoch)
    return View(restored_row(row, given.inbox, None, at), given.journal, given.length, given.inbox)


def _is_copy(found: View, given: View, copy: View) -> bool:
    return digest(found) == digest(copy) and found.row.epoch >= given.row.epoch


def digest(view: View) -> bytes:
    """A hash of everything that a run and its copy have in common."""
    row = msgspec.structs.replace(view.row, epoch=0, held=False, waiting_for=tuple(sorted(view.row.waiting_for, key=_by_name)))
    parts = (row, sorted(view.journal[: view.length], key=_by_seq), sorted(view.inbox, key=_by_seq))
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _why_not_replaced(found: View, given: View, copy: View) -> str | None:
    """Why what the target has must stay; None when it is an older copy that nobody has touched."""
    if (found.row.workflow, found.row.seed, found.row.created_at) != (given.row.workflow, given.row.seed, given.row.created_at):
        return "another run has this id in the target"
    added = given.journal[found.length :]
    is_older = (
        found.row.updated_at <= copy.row.updated_at
        and found.row.cancel_requested <= given.row.cancel_requested
        and list(found.journal) == list(given.journal[: found.length])
        and (bool(added) or not found.row.ended)
        and _were_consumed([row for row in found.inbox if row not in given.inbox], added)
    )
    return None if is_older else "it has gone on in the target since it was copied"


def _were_consumed(rows: Sequence[Signal], added: Sequence[Entry]) -> bool:
    """Whether the run took these inbox rows when it recorded these entries. If not, somebody sent them to the target."""
    taken = Counter((entry.kind, entry.payload) for entry in added if entry.phase == "close")
    return Counter((row.kind, row.payload) for row in rows) <= taken


async def _check(target: Store, given: View, copy: View) -> None:
    """Refuse a copy that does not read back as what was copied. A worker may be at it already."""
    found = await stored_view(target, given.row.id)
    if found is None or not (_is_copy(found, given, copy) or _has_gone_on(found, copy)):
        raise PersistenceError(
            f"run {given.row.id!r} was copied, but does not read back the same",
            "stop what changes it in the target, then migrate again; the source is as it was",
        )


def _has_gone_on(found: View, copy: View) -> bool:
    is_begun_with = list(found.journal[: copy.length]) == list(copy.journal[: copy.length])
    return is_begun_with and found.row.epoch > copy.row.epoch


def _by_name(awaited: Any) -> tuple[str, str]:
    return awaited.kind, awaited.name


def _by_seq(row: Entry | Signal) -> int:
    return row.seq
