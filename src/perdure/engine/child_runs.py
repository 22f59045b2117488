"""The children of a drive: the runs that its body has started, and the verbs to create, read and cancel them.

A child is a run of its own, with an id that follows from its parent's id and its key: a repeated start finds it. Its row in the
store is the truth about it. The inbox row that its end puts into the parent's inbox only says that it is time to read that row,
so an inbox row that is stale, repeated or lost does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from perdure.model.ids import MAX_ID_BYTES, check_id
from perdure.model.journal import Entry, OpenChild, entries_in_force
from perdure.model.own_names import child_key, numbered_key
from perdure.model.records import Awaited, NewRun, RunRow

# How much of an id that is too long stays readable before its hash.
_READABLE_BYTES: Final = 900


class ChildRuns(Protocol):
    """Creates the children of one run, and drives those that are to be driven here. The host has one over a store."""

    def create(self, workflow: Any, new: NewRun, arguments: Any) -> Awaitable[RunRow]:
        """The child, new or found. Raises `RunConflict`, `InvalidInput`."""
        ...

    def get(self, run_id: str) -> Awaitable[RunRow | None]:
        """The child as it stands, or None."""
        ...

    def cancel(self, run_id: str, *, undo: bool = True) -> Awaitable[None]:
        """Ask the child to stop, and to compensate what it has done. Nothing changes if it has ended or does not exist."""
        ...

    def reopen(self, run_id: str) -> Awaitable[None]:
        """Let a child go on that has failed, was cancelled or is dead."""
        ...

    def resume(self, workflow: Any, run: RunRow) -> None:
        """The parent waits for this child, which exists: drive it here if no worker does."""
        ...

    def keeps_parent_in_memory(self) -> bool:
        """Return whether a child is driven here for its parent only, so that the parent should wait for it in memory."""
        ...

    def wake_at(self) -> int | None:
        """Return when the parent must be in memory again, to resume a child that no worker runs."""
        ...


class StartedChild(msgspec.Struct, eq=False):
    """A child that the body has started. `parent_key` names its inbox row; `seq` is that of its open entry, 0 if it has none."""

    key: str
    parent_key: str
    id: str
    is_detached: bool
    seq: int = 0
    # Whether it has ended as far as its parent is concerned: its outcome is recorded, or its row said so.
    is_over: bool = False
    # Done when it exists, or when its call is over.
    created: asyncio.Future[None] = msgspec.field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def address(self) -> Awaited:
        """Return the address that the parent waits for."""
        return Awaited("child", self.parent_key)

    def note_created(self) -> None:
        """It exists, or never will: what waits for that goes on."""
        if not self.created.done():
            self.created.set_result(None)


class Children:
    """The children of one drive, in the order in which the body started them."""

    def __init__(self, run: RunRow, runs: ChildRuns | None, undone: Mapping[str, int]) -> None:
        self.runs = runs
        self.started: list[StartedChild] = []
        # The calls of those of which `ctx.start_child` gave a handle.
        self.handles: list[Any] = []
        self._run = run
        self._uses: dict[str, int] = {}
        # How often each child was undone.
        self._undone = undone
        self._dropped: frozenset[str] | None = None
        # Requests to cancel a child that are on their way to the store.
        self.requests: set[asyncio.Future[None]] = set()
        # When the outcome of a child last arrived.
        self.arrived_at: int | None = None

    def name(self, key: str) -> str:
        """The `parent_key` of the child that is started under `key` now: the key, numbered if a cancelled call used it before.

        No key of a user begins with `%~`: `full_key` escapes it.
        """
        use = self._uses[key] = self._uses.get(key, 0) + 1
        return _shorten(numbered_key(key, use))

    def default_id(self, parent_key: str) -> str:
        """Return the id of a child that was given none. A child that was undone and is done again is another run."""
        return child_id(self._run.id, parent_key, self._run.generation, self._undone.get(child_key(parent_key), 0))

    def chosen_id(self, chosen: str, parent_key: str) -> str:
        """Return the id of a child that was given this one. Done again after it was undone, it is another run."""
        undone = self._undone.get(child_key(parent_key), 0)
        check_id(chosen, "a run's id")
        return _shorten(f"{chosen}~{undone}") if undone else chosen

    def is_own_id(self, run_id: str, parent_key: str) -> bool:
        """Return whether a child of this run, that was given no id, has this one."""
        times = range(self._undone.get(child_key(parent_key), 0) + 1)
        return any(run_id == child_id(self._run.id, parent_key, self._run.generation, undone) for undone in times)

    def is_retried(self, key: str, journal: Sequence[Entry]) -> bool:
        """Return whether a retry of this run has dropped the record of `key`, so that the child may have ended before."""
        return key in self._look_at_drops(journal)

    def _look_at_drops(self, journal: Sequence[Entry]) -> frozenset[str]:
        """The keys that retries have dropped. Read once: what was dropped was so before this drive."""
        if self._dropped is None:
            drops = [entry for entry in journal if entry.phase == "drop"]
            self._dropped = frozenset(key for drop in drops for key in msgspec.json.decode(drop.payload, type=list[str]))
        return self._dropped

    def lingers_until(self, grace: int) -> int | None:
        """Until when the run stays in memory because a child has just ended: others may follow, and each would wake it."""
        return None if self.arrived_at is None else self.arrived_at + grace


async def cancel_open_children(runs: ChildRuns | None, journal: Sequence[Entry], *, undo: bool = True) -> None:
    """Ask the children to stop that the journal of a run has as open, for a run that ends without its body."""
    if runs is None:
        return
    last = {entry.key: entry for entry in entries_in_force(journal) if entry.kind == "child"}
    for entry in last.values():
        if entry.phase == "open":
            with contextlib.suppress(msgspec.MsgspecError):
                info = msgspec.json.decode(entry.payload, type=OpenChild)
                if not info.detached:
                    await runs.cancel(info.id, undo=undo)


def child_id(parent_id: str, parent_key: str, generation: int = 0, undone: int = 0) -> str:
    """Return `parent/key`; in the parent's second round, of a child that was undone once before, `parent;generation=1/key~1`.

    The key is escaped, so that no two children have one id, and all is hashed where it is too long for an id.
    """
    name = parent_key.replace("%", "%25").replace("/", "%2F").replace("~", "%7E")
    round_ = f";generation={generation}" if generation else ""
    return _shorten(f"{parent_id}{round_}/{name}" + (f"~{undone}" if undone else ""))


def _shorten(text: str) -> str:
    """The text if it fits into an id, otherwise its beginning with a hash of all of it."""
    encoded = text.encode()
    if len(encoded) <= MAX_ID_BYTES:
        return text
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return f"{encoded[:_READABLE_BYTES].decode(errors='ignore')}/%~{digest}"
