"""Cards and badges: by which runs are found.

Each run has one card, a name that says what `claim`, `due`, `list` and `purge` need to know. It changes with the run:

    <shelf>/<bucket>/<wake_at>.<updated_at>.<status>.<priority>.<workflow>.<queue>.<start of the id>.<run>.<nonce>

Shelves: `due` for runs that wait for an instant (and ended ones whose parent is still to be told), `leased` for those that are
driven, `rest` for those that only somebody can wake, `ended`. Buckets are spans of time, so that what is due is found without
looking through what is not.

Shelves are listed one after the other, so a card that is moved meanwhile may be on none of them. That is why each run has a
badge too, which stays where it is for as long as the run is there:

    all/<start of the id>.<run>.<incarnation>

Both are put down before the run's document says that they are the run's, and taken away after others have their place. So
whatever happens in between, a run always has its card and its badge; there may only be others besides, which the run's document
disowns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from perdure.backends.key_value.names import nonce, run_name, short
from perdure.model.records import RunRow, Status

DUE: Final = "due"
LEASED: Final = "leased"
REST: Final = "rest"
ENDED: Final = "ended"
SHELVES: Final = (DUE, LEASED, REST, ENDED)
BADGES: Final = "all"

# About 18 minutes in microseconds.
_BUCKET_BITS: Final = 30
_LATEST: Final = 10**19
_ID_BYTES: Final = 12
_STATUSES: Final[dict[str, Status]] = {
    "p": "pending", "r": "running", "s": "suspended", "c": "completed", "f": "failed", "x": "cancelled", "d": "dead",
}  # fmt: skip
_LETTERS: Final = {status: letter for letter, status in _STATUSES.items()}


class Card(NamedTuple):
    """What a card says. `begins` are the first bytes of the id; `wake_at` is zero on the shelves where nothing is waited for."""

    shelf: str
    wake_at: int
    updated_at: int
    status: Status
    priority: int
    workflow: str
    queue: str
    begins: bytes
    run: str
    nonce: str = ""

    @classmethod
    def of(cls, row: RunRow, *, owes_parent: bool) -> Card:
        """The card of this run, without what makes its name the only one of its kind."""
        shelf, wake_at = _place(row, owes_parent=owes_parent)
        return cls(
            shelf,
            min(max(wake_at, 0), _LATEST),
            min(max(row.updated_at, 0), _LATEST),
            row.status,
            row.priority,
            short(row.workflow),
            short(row.queue),
            _begin(row.id),
            run_name(row.id),
        )

    @classmethod
    def read(cls, name: str) -> Card | None:
        """The card with this name, or None when it is no card."""
        shelf, _, rest = name.partition("/")
        parts = rest.partition("/")[2].split(".")
        if len(parts) != 9 or parts[2] not in _STATUSES:
            return None
        wake_at, updated_at, letter, priority, workflow, queue, begins, run, one = parts
        try:
            numbers = int(wake_at), int(updated_at), _STATUSES[letter], _signed(priority)
            return cls(shelf, *numbers, workflow, queue, bytes.fromhex(begins), run, one)
        except ValueError:
            return None

    @property
    def name(self) -> str:
        """Where it is put down."""
        letter = _LETTERS[self.status]
        sign = "m" if self.priority < 0 else "p"
        instants = f"{self.wake_at:020d}.{self.updated_at:020d}"
        what = f"{letter}.{sign}{abs(self.priority)}.{self.workflow}.{self.queue}.{self.begins.hex()}"
        return f"{self.shelf}/{bucket(self._sorted_by)}/{instants}.{what}.{self.run}.{self.nonce}"

    @property
    def _sorted_by(self) -> int:
        return self.wake_at if self.shelf in (DUE, LEASED) else self.updated_at

    def signed(self) -> Card:
        """The same card, under a name that no other has: whoever takes that away takes no other's."""
        return self._replace(nonce=nonce())

    def says(self, other: Card | None) -> bool:
        """Whether both say the same."""
        return other is not None and self._replace(nonce="") == other._replace(nonce="")


class Badge(NamedTuple):
    """That a run is there."""

    begins: bytes
    run: str
    incarnation: str

    @classmethod
    def of(cls, run_id: str, incarnation: str) -> Badge:
        """The badge of this run since it began."""
        return cls(_begin(run_id), run_name(run_id), incarnation)

    @classmethod
    def read(cls, name: str) -> Badge | None:
        """The badge with this name, or None when it is none."""
        parts = name.removeprefix(f"{BADGES}/").split(".")
        if len(parts) != 3:
            return None
        begins, run, incarnation = parts
        try:
            return cls(bytes.fromhex(begins), run, incarnation)
        except ValueError:
            return None

    @property
    def name(self) -> str:
        """Where it is put down."""
        return f"{BADGES}/{self.begins.hex()}.{self.run}.{self.incarnation}"


def bucket(instant: int) -> str:
    """The span of time this instant is in."""
    return f"{instant >> _BUCKET_BITS:014d}"


def begin_of(bucket_name: str) -> int:
    """The first instant of a span."""
    return int(bucket_name) << _BUCKET_BITS


def _begin(run_id: str) -> bytes:
    return run_id.encode()[:_ID_BYTES]


def _place(row: RunRow, *, owes_parent: bool) -> tuple[str, int]:
    if row.ended:
        return (DUE, row.updated_at) if owes_parent else (ENDED, 0)
    if row.status == "running" and row.lease_until is not None:
        return LEASED, row.lease_until
    if row.held or row.wake_at is None:
        return REST, 0
    return DUE, row.wake_at


def _signed(text: str) -> int:
    return -int(text[1:]) if text.startswith("m") else int(text.removeprefix("p"))
