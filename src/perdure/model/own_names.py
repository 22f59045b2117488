"""Names that perdure makes for itself, and what a user wrote for each of them.

Such a name stands beside those of users, in an inbox or a journal, and no user can choose it: signals that begin with `perdure:`
are refused, and a key that begins with % is escaped. People never read one: lists, descriptions, messages and logs have
`awaited_by_user`, `parts_of` and `errors.name_key`, which say what was written and keep the kind apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from perdure.errors import CANCEL_KEY, COMPENSATION_PREFIX
from perdure.model.ids import MAX_ID_BYTES
from perdure.result import WaitingFor

# Names of signals that begin so belong to perdure.
RESERVED: Final = "perdure:"
# The name of the inbox row that asks to cancel the run and to undo nothing.
CANCEL_WITHOUT_UNDO: Final = f"{RESERVED}cancel-without-undo"
_APPROVAL_PREFIX: Final = f"{RESERVED}approval:"
# How much of its name is in the address of an approval: an address is at most as long as an id.
_SHOWN_BYTES: Final = 900
_APPROVAL_ID_CHARS: Final = 32
# What follows in place of a key that is too long.
_HASH: Final = re.compile(r"[0-9a-f]{64}")
# The key of a child that was started again under a key whose first call was cancelled.
_NUMBERED: Final = re.compile(r"%~[0-9]+/")


def approval_address(name: str, approval_id: str) -> str:
    """Return the name of the signal that decides this approval. The approval's own name is in it for people who read lists."""
    shown = name.encode()[:_SHOWN_BYTES].decode(errors="ignore")
    return f"{_APPROVAL_PREFIX}{shown}:{approval_id}"


def approval_name(address: str) -> str | None:
    """Return the name of the approval that the signal of this name decides, possibly cut; None for a user's signal."""
    return address[len(_APPROVAL_PREFIX) : -_APPROVAL_ID_CHARS - 1] if address.startswith(_APPROVAL_PREFIX) else None


def numbered_key(key: str, use: int) -> str:
    """Return the key for the `use`-th child that is started under `key`, after the earlier ones were cancelled."""
    return key if use == 1 else f"%~{use}/{key}"


def awaited_by_user(kind: Literal["signal", "child"], name: str) -> WaitingFor:
    """Return what a run waits for that waits for this name in its inbox."""
    if kind == "child":
        return WaitingFor("child", child_key(name))
    approval = approval_name(name)
    return WaitingFor("signal", name) if approval is None else WaitingFor("approval", approval)


def child_key(parent_key: str) -> str:
    """Return the key under which the child was started that its parent knows by this one."""
    return _NUMBERED.sub("", parent_key, count=1) if parent_key.startswith("%~") else parent_key


def compensation_key(key: str) -> str:
    """Return the key under which the compensation of a step is recorded."""
    name = COMPENSATION_PREFIX + key
    if len(name.encode()) <= MAX_ID_BYTES:
        return name
    return COMPENSATION_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def undone_by(compensations: Iterable[str]) -> set[str]:
    """Return the keys of what these compensations undo, but of those that are too long to be readable."""
    return {child_key(key.removeprefix(COMPENSATION_PREFIX)) for key in compensations if key.startswith(COMPENSATION_PREFIX)}


class KeyParts(NamedTuple):
    """What is recorded under a key: a call of the user's, the compensation of the step `key`, or the cancellation of the run."""

    kind: Literal["call", "compensation", "cancellation"]
    key: str


def parts_of(key: str, journal_keys: Iterable[str] = ()) -> KeyParts:
    """Return what is recorded under this key. A long key of a compensated step is found among `journal_keys`, or is a hash."""
    if key == CANCEL_KEY:
        return KeyParts("cancellation", "")
    if not key.startswith(COMPENSATION_PREFIX):
        return KeyParts("call", key)
    own = key.removeprefix(COMPENSATION_PREFIX)
    if _HASH.fullmatch(own):
        own = next((each for each in journal_keys if compensation_key(each) == key), own)
    return KeyParts("compensation", child_key(own))
