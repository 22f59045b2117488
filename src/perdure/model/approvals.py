"""Approvals as they are stored: what a run asks, and what was decided.

An approval is a wait. Its open entry is an `OpenApproval`. A decision is a row of the inbox under a name that only this approval
has, and all decisions of it have one `dedupe`: the store keeps the first and ignores the others, which makes `signal` a
compare-and-set. The expiry is decided the same way, by a row that the run's worker sends at the deadline, or a caller who comes
too late, so a person and the clock cannot both be told that they were first. Each row has a nonce by which its sender knows it.

The id of an approval is random. It names one call of `ctx.approve` in one run, also when the run was deleted and its id was used
again, or when its journal was numbered anew by a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from perdure.model.durations import moment
from perdure.model.ids import check_id, random_bytes
from perdure.model.journal import OpenWait
from perdure.model.own_names import RESERVED, approval_address
from perdure.model.records import Awaited

# The one `dedupe` of all decisions of an approval.
DEDUPE: Final = "decision"
# A person reads it, and its decision holds it once more.
MAX_PAYLOAD_BYTES: Final = 2**20
MAX_REASON_CHARS: Final = 10_000
_MAX_ASSIGNEES: Final = 1_000


class OpenApproval(OpenWait, frozen=True, kw_only=True):
    """The payload of the open entry of an approval. `type` names the type of `payload`, if it is a builtin or one class."""

    id: str
    payload: msgspec.Raw
    assignees: tuple[str, ...] = ()
    type: str | None = None

    def address(self, name: str) -> Awaited:
        """Where the decision about this approval, called `name`, goes to."""
        return Awaited("signal", approval_address(name, self.id))


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of a decision, in the inbox and in the close entry. `payload` is what was approved, edited or not."""

    decision: Literal["approved", "rejected", "expired"]
    at: datetime
    nonce: str
    by: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")
    is_edited: bool = False
    reason: str | None = None


def default_key(name: str) -> str:
    """The key of an approval that was asked for without one."""
    return f"approve:{name}"


def new_nonce() -> str:
    """A random text: the id of an approval, or what tells one decision from another."""
    return random_bytes().hex()


def expiry(deadline: int) -> Decision:
    """The decision that an approval gets at its deadline."""
    return Decision(decision="expired", at=moment(deadline), nonce=new_nonce())


def check_signal_name(name: object) -> str:
    """The name of a user's signal. Raises `TypeError`, and `ValueError` for a name that is reserved."""
    checked = check_id(name, "a signal's name")
    if checked.startswith(RESERVED):
        raise ValueError(
            f"signals whose names begin with {RESERVED!r} are perdure's own, so {checked!r} cannot be sent or waited for; "
            "approvals are decided by runtime.approve and runtime.reject"
        )
    return checked


def check_assignees(assignees: Any) -> tuple[str, ...]:
    """The people who may decide, each once; none: everyone may."""
    if isinstance(assignees, str) or not isinstance(assignees, Iterable):
        raise TypeError(f"assignees= takes a list of names: [{assignees!r}]")
    checked = tuple(dict.fromkeys(check_id(each, "an assignee") for each in assignees))
    if len(checked) > _MAX_ASSIGNEES:
        raise ValueError(f"an approval has at most {_MAX_ASSIGNEES:,} assignees, not {len(checked):,}")
    return checked


def check_reason(reason: object) -> str | None:
    """Why something was rejected: text of bounded length, or None."""
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, not {type(reason).__name__}")
    if len(reason) > MAX_REASON_CHARS:
        raise ValueError(f"reason must have at most {MAX_REASON_CHARS:,} characters, not {len(reason):,}")
    return reason.encode("utf-8", "replace").decode()
