"""The keys under which everything is stored: lower-case letters, digits, `-` and `/` only, whatever the ids look like.

    <root>/r/<run>                   a run's document
    <root>/o/<run>/<incarnation>/    what is too large for the document: chunks of its journal, large payloads
    <root>/x/                        the due keys and exists keys, by which runs are found
    <root>/settings, wake, turn      schedules and limits; written to wake watchers; the lock for claims
    <root>/workers                   the registry of workers

A run is named by a hash of its id, so an id can be anything, never leaves its namespace, and differs from any other also where
case does not count. The document says which id it really is.

Each run has one due key, which has all that `claim`, `due`, `list` and `purge` need to know. It changes with the run:

    <partition>/<bucket>/<wake_at>.<updated_at>.<status>.<priority>.<workflow>.<version>.<queue>.<start of the id>.<run>.<nonce>

Partitions (`DuePartition`): `due` for runs that wait for an instant (and ended ones whose parent must still be notified),
`leased` for those that are driven, `rest` for those that only a signal or an operator can wake, `ended`. Buckets are spans of
time, so that what is due is found without listing what is not.

Partitions are listed one after the other, so a due key that moves meanwhile may be seen in none of them. That is why each run has
an exists key too, which stays the same for as long as the run exists:

    all/<start of the id>.<run>.<incarnation>

Both are written before the run's document names them, and deleted after the document names others. So whatever happens in
between, a run always has its due key and its exists key; there may only be more of them, which the run's document does not name.
"""

from __future__ import annotations

import enum
import hashlib
import re
import secrets
from typing import Final, NamedTuple

from perdure.model.records import RunRow, Status

_SIMPLE: Final = re.compile(r"[a-z0-9-]{0,40}")


def root_of(prefix: str) -> str:
    """The folder of the namespace `prefix`."""
    simple = _SIMPLE.fullmatch(prefix) is not None
    return f"perdure/n-{prefix}" if simple else f"perdure/m-{_hash(prefix, 16)}"


def run_name(run_id: str) -> str:
    """The name of this run."""
    return _hash(run_id, 16)


def short_hash(text: str) -> str:
    """Stands for this text where there is no room for it; another text may, very rarely, have the same."""
    return _hash(text, 6)


def new_nonce() -> str:
    """A name that is used once."""
    return secrets.token_hex(8)


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


class DuePartition(enum.StrEnum):
    """Where a due key is listed."""

    DUE = "due"
    LEASED = "leased"
    REST = "rest"
    ENDED = "ended"


EXISTS_KEYS: Final = "all"

# A bucket is about 18 minutes, in microseconds.
_BUCKET_BITS: Final = 30
_LATEST: Final = 10**19
_ID_BYTES: Final = 12
_STATUSES: Final[dict[str, Status]] = {
    "p": "pending", "r": "running", "s": "suspended", "c": "completed", "f": "failed", "x": "cancelled", "d": "dead",
}  # fmt: skip
_LETTERS: Final = {status: letter for letter, status in _STATUSES.items()}


class DueKey(NamedTuple):
    """The content of a due key. `wake_at` is zero in the partitions whose runs wait for no instant."""

    partition: str
    wake_at: int
    updated_at: int
    status: Status
    priority: int
    workflow: str
    version: int
    queue: str
    id_start: bytes
    run: str
    nonce: str = ""

    @classmethod
    def of(cls, row: RunRow, *, owes_parent: bool) -> DueKey:
        """The due key of this run, without the nonce that makes its name unique."""
        partition, wake_at = _partition_of(row, owes_parent=owes_parent)
        return cls(
            partition,
            min(max(wake_at, 0), _LATEST),
            min(max(row.updated_at, 0), _LATEST),
            row.status,
            row.priority,
            short_hash(row.workflow),
            row.version,
            short_hash(row.queue),
            _id_start(row.id),
            run_name(row.id),
        )

    @classmethod
    def read(cls, name: str) -> DueKey | None:
        """The due key with this name, or None when it is none."""
        partition, _, rest = name.partition("/")
        parts = rest.partition("/")[2].split(".")
        if len(parts) != 10 or parts[2] not in _STATUSES:
            return None
        wake_at, updated_at, letter, priority, workflow, version, queue, id_start, run, nonce = parts
        try:
            numbers = int(wake_at), int(updated_at), _STATUSES[letter], _read_priority(priority)
            return cls(partition, *numbers, workflow, int(version), queue, bytes.fromhex(id_start), run, nonce)
        except ValueError:
            return None

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        letter = _LETTERS[self.status]
        sign = "m" if self.priority < 0 else "p"
        instants = f"{self.wake_at:020d}.{self.updated_at:020d}"
        what = f"{letter}.{sign}{abs(self.priority)}.{self.workflow}.{self.version}.{self.queue}.{self.id_start.hex()}"
        return f"{self.partition}/{bucket_of(self._sorted_by)}/{instants}.{what}.{self.run}.{self.nonce}"

    @property
    def _sorted_by(self) -> int:
        return self.wake_at if self.partition in (DuePartition.DUE, DuePartition.LEASED) else self.updated_at

    def with_nonce(self) -> DueKey:
        """The same due key under a unique name, so that deleting it deletes no other."""
        return self._replace(nonce=new_nonce())

    def has_content_of(self, other: DueKey | None) -> bool:
        """Whether both are equal but for their nonces."""
        return other is not None and self._replace(nonce="") == other._replace(nonce="")


class ExistsKey(NamedTuple):
    """The key that says that a run exists."""

    id_start: bytes
    run: str
    incarnation: str

    @classmethod
    def of(cls, run_id: str, incarnation: str) -> ExistsKey:
        """The exists key of this run since it was created."""
        return cls(_id_start(run_id), run_name(run_id), incarnation)

    @classmethod
    def read(cls, name: str) -> ExistsKey | None:
        """The exists key with this name, or None when it is none."""
        parts = name.removeprefix(f"{EXISTS_KEYS}/").split(".")
        if len(parts) != 3:
            return None
        id_start, run, incarnation = parts
        try:
            return cls(bytes.fromhex(id_start), run, incarnation)
        except ValueError:
            return None

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return f"{EXISTS_KEYS}/{self.id_start.hex()}.{self.run}.{self.incarnation}"


def bucket_of(instant: int) -> str:
    """The bucket of this instant."""
    return f"{instant >> _BUCKET_BITS:014d}"


def bucket_start(bucket: str) -> int:
    """The first instant of a bucket."""
    return int(bucket) << _BUCKET_BITS


def _id_start(run_id: str) -> bytes:
    return run_id.encode()[:_ID_BYTES]


def _partition_of(row: RunRow, *, owes_parent: bool) -> tuple[DuePartition, int]:
    if row.ended:
        return (DuePartition.DUE, row.updated_at) if owes_parent else (DuePartition.ENDED, 0)
    if row.status == "running" and row.lease_until is not None:
        return DuePartition.LEASED, row.lease_until
    if row.held or row.wake_at is None:
        return DuePartition.REST, 0
    return DuePartition.DUE, row.wake_at


def _read_priority(text: str) -> int:
    return -int(text[1:]) if text.startswith("m") else int(text.removeprefix("p"))
