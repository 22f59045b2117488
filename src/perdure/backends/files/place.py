"""A namespace on disk: its runs, its index and its settings, and how they change together.

    <root>/n-<prefix>/runs/r-<id>/{lock,log}    one directory for each run
    <root>/n-<prefix>/{index,settings,wake}     what is derived from the runs, what is set, what is touched to wake others
    <root>/n-<prefix>/trash/                    deleted runs on their way out

A change takes the run's lock, checks, marks the run dirty in the index, adds one frame to the log, syncs it, sums the run up in
the index, and lets go. Several runs are locked in the order of their names, and whoever has a run's lock waits for no other kind
but the index's, so nobody waits in a circle.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, TypeVar

from perdure.backends.files.disk import make_directory, refuse_network, sync_directory
from perdure.backends.files.index import Index, Summary
from perdure.backends.files.locks import Busy, kept_too_long, locked
from perdure.backends.files.log import Logs
from perdure.backends.files.names import namespace_name, run_name
from perdure.backends.files.settings import SettingsFile
from perdure.backends.files.state import RunState
from perdure.errors import LeaseLost, PerdureError, RunFinished, RunNotFound, SnapshotCorrupt
from perdure.model.records import Lease, RunRow

T = TypeVar("T")

# How long `claim`, `list` and the like wait for somebody who changes a run of which nothing is known yet.
_WAIT_FOR_WRITERS: Final = 1.0


class LockedRun:
    """A run whose lock is held. `state` is None while there is no run; what a verb changes in it is saved afterwards."""

    def __init__(self, name: str, run_id: str, state: RunState | None) -> None:
        if state is not None and state.row.id != run_id:
            raise SnapshotCorrupt(run_id, "the log", f"in its directory {name!r} is run {state.row.id!r}")
        self.name = name
        self.id = run_id
        self.state = state
        self.before = None if state is None else Summary.of(state)

    def found(self) -> RunState:
        """The run. Raises `RunNotFound`."""
        if self.state is None:
            raise RunNotFound(self.id)
        return self.state

    def unended(self) -> RunState:
        """The run. Raises `RunNotFound`, `RunFinished`."""
        state = self.found()
        if state.row.ended:
            raise RunFinished(self.id, state.row.status)
        return state

    def fenced(self, lease: Lease) -> RunState:
        """The run, if this lease is its current one. An expired lease that nobody took over still is. Raises `LeaseLost`."""
        state = self.state
        if state is None or state.row.epoch != lease.epoch or state.token != lease.token:
            raise LeaseLost(lease.run_id, lease.epoch)
        return state

    @property
    def summary_changed(self) -> bool:
        """Whether the index must hear of what a verb did."""
        return self.state is not None and (self.state.is_new or Summary.of(self.state) != self.before)


class Outcome:
    """What a verb gave or raised."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error


class Place:
    """One namespace. All methods block, and any thread may call them."""

    def __init__(self, root: str, prefix: str) -> None:
        self.root = root
        self.prefix = prefix
        self._directory = f"{root}/{namespace_name(prefix)}"
        self._runs = f"{self._directory}/runs"
        self._trash = f"{self._directory}/trash"
        self._wake = f"{self._directory}/wake"
        self.logs = Logs(self._runs)
        self.index = Index(self._directory, self._runs)
        self.settings = SettingsFile(self._directory)
        self._is_there = False
        # When the wake file was touched last, as far as this process has noticed.
        self.woken_at = 0

    def start_over(self) -> None:
        """In a forked child: nothing is under way."""
        self.logs.start_over()
        self.index.start_over()

    def ensure(self) -> None:
        """Have the directories and an index of this boot. Raises `PersistenceError` on a file system of the network."""
        if self._is_there:
            return
        refuse_network(self.root)
        make_directory(self.root)
        for directory in (self._directory, self._runs, self._trash):
            make_directory(directory)
        with open(self._wake, "ab"):
            pass
        self.index.ensure()
        for left in os.listdir(self._trash):
            shutil.rmtree(f"{self._trash}/{left}", ignore_errors=True)
        self.woken_at = self.last_wake()
        self._is_there = True

    def guarded(self, call: Callable[[], T]) -> T:
        """What the call gives, with the place there and a lock that is not to be had told as an error."""
        try:
            self.ensure()
            return call()
        except Busy:
            raise kept_too_long(self.root) from None

    def wake(self) -> None:
        """Touch the file that others watch."""
        self.woken_at = time.time_ns()
        with suppress(OSError):  # what was to be told is done, and those who watch look by themselves after a while
            os.utime(self._wake, ns=(self.woken_at, self.woken_at))

    def last_wake(self) -> int:
        """When the wake file was touched last."""
        return os.stat(self._wake).st_mtime_ns

    @contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """A lock of the whole namespace: `claim` or `settings`."""
        with locked(f"{self._directory}/{what}.lock", create=True):
            yield

    def read(self, run_id: str, look: Callable[[RunState], T]) -> T | None:
        """What `look` sees of the run, or None when there is none. It must not keep or change what it is given."""
        name = run_name(run_id)
        with locked(f"{self._runs}/{name}/lock", shared=True) as is_there:
            state = LockedRun(name, run_id, self.logs.load(name)).state if is_there else None
            return None if state is None else look(state)

    @contextmanager
    def locked_run(self, run_id: str, *, create: bool = False, patience: float | None = None) -> Iterator[LockedRun]:
        """The run, for the caller alone."""
        name = run_name(run_id)
        with self._run_lock(name, create=create, patience=patience) as is_there:
            yield LockedRun(name, run_id, self.logs.load(name, may_cut=True) if is_there else None)

    @contextmanager
    def _run_lock(self, name: str, *, create: bool = False, patience: float | None = None) -> Iterator[bool]:
        path = f"{self._runs}/{name}/lock"
        with ExitStack() as stack:
            while True:
                try:
                    is_there = stack.enter_context(locked(path, create=create, patience=patience))
                    break
                except FileNotFoundError:  # only with create: there is no directory yet, or no longer
                    with suppress(FileExistsError):
                        os.mkdir(f"{self._runs}/{name}", 0o700)
            yield is_there

    def save(self, run: LockedRun) -> None:
        """Have what changed about a locked run on disk and in the index."""
        if run.state is None:
            return
        indexed = run.summary_changed
        if indexed:
            self.index.mark_dirty(run.name)
        self.logs.save(run.name, run.state)
        if indexed:
            self.index.put(run.name, run.state)

    def change(
        self, run_id: str, verbs: Sequence[Callable[[LockedRun], Any]], *, create: bool = False, patience: float | None = None
    ) -> list[Outcome]:
        """What each verb gave or was refused with; what they changed is one frame, and on disk."""
        with self.locked_run(run_id, create=create, patience=patience) as run:
            try:
                outcomes = [_outcome(verb, run) for verb in verbs]
                self.save(run)
            except BaseException:
                self.logs.forget(run.name)  # what is in memory may be half of something
                raise
        return outcomes

    def change_one(
        self, run_id: str, verb: Callable[[LockedRun], T], *, create: bool = False, patience: float | None = None
    ) -> T:
        """What the verb gave; what it changed is on disk."""
        (outcome,) = self.change(run_id, [verb], create=create, patience=patience)
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return value

    def tell(self, child_id: str, verb: Callable[[LockedRun, bool], None], now: int, *, patience: float | None = None) -> None:
        """Run a verb that may end a child, with its parent locked too, and then tell the parent.

        The child's frame says that its parent is owed its end, the parent's that it heard of it, and a third that nothing is owed
        any more. After a crash in between `claim` finds the debt in the index and calls this again.
        """
        while True:
            parent_id = self.read(child_id, _parent_of)
            ids = {run_name(one): one for one in (child_id, parent_id) if one is not None}
            with ExitStack() as stack:
                runs = {ids[name]: stack.enter_context(self.locked_run(ids[name], patience=patience)) for name in sorted(ids)}
                child = runs[child_id]
                if child.state is not None and _parent_of(child.state) != parent_id:
                    continue
                try:
                    self._tell(child, None if parent_id is None else runs[parent_id], verb, now)
                except BaseException:
                    for run in runs.values():
                        self.logs.forget(run.name)
                    raise
                return

    def _tell(self, child: LockedRun, parent: LockedRun | None, verb: Callable[[LockedRun, bool], None], now: int) -> None:
        listens = parent is not None and parent.state is not None and not parent.state.row.ended
        verb(child, listens)
        if child.state is None or parent is None or parent.state is None or not child.state.owes_parent:
            self.save(child)
            return
        self.index.mark_dirty(child.name, parent.name)
        self.logs.save(child.name, child.state)
        if listens:
            parent.state.hear(child.state, now)
            self.logs.save(parent.name, parent.state)
        child.state.owes_parent = False
        self.logs.save(child.name, child.state)
        for run in (parent, child):
            self.index.put(run.name, run.state)

    def remove(self, run_ids: Sequence[str], may_go: Callable[[RunRow], bool] | None = None) -> int:
        """Delete those of these runs that may go, and say how many. Without `may_go` also what cannot be read."""
        gone = [moved for run_id in run_ids if (moved := self._move_away(run_id, may_go)) is not None]
        if not gone:
            return 0
        sync_directory(self._runs)
        for moved in gone:
            shutil.rmtree(moved, ignore_errors=True)
        return len(gone)

    def _move_away(self, run_id: str, may_go: Callable[[RunRow], bool] | None) -> str | None:
        name = run_name(run_id)
        with self._run_lock(name) as is_there:
            if not is_there or (may_go is not None and not self._is_such(name, may_go)):
                return None
            target = f"{self._trash}/{secrets.token_hex(16)}"
            self.index.mark_dirty(name)
            self.logs.forget(name)
            os.rename(f"{self._runs}/{name}", target)
            self.index.put(name, None)
            return target

    def _is_such(self, name: str, may_go: Callable[[RunRow], bool]) -> bool:
        state = self.logs.load(name, may_cut=True)
        return state is not None and may_go(state.row)

    def look_around(self) -> None:
        """Have the index know all that was acknowledged, and what a crash left undone done."""
        self.index.refresh()
        if questions := self.index.questions():
            for name, waits in questions:
                self._answer(name, patience=_WAIT_FOR_WRITERS if waits else 0.0)
            self.index.refresh()

    def _answer(self, name: str, *, patience: float) -> None:
        """Sum up a run that is dirty. One that is being changed right now stays as it was known, or unknown if it is new."""
        try:
            with locked(f"{self._runs}/{name}/lock", shared=True, patience=patience) as is_there:
                self.index.put(name, self.logs.load(name, safe=False) if is_there else None)
        except SnapshotCorrupt:
            self.index.give_up(name)  # it says so to whoever asks for it, and must not keep the others from being driven
        except Busy:
            if patience:
                self.index.wait_no_more(name)


def _parent_of(state: RunState) -> str | None:
    row = state.row
    return None if row.parent_id == row.id or row.parent_key is None else row.parent_id


def _outcome(verb: Callable[[LockedRun], Any], run: LockedRun) -> Outcome:
    try:
        return Outcome(verb(run))
    except PerdureError as refusal:  # raised before anything was changed
        return Outcome(error=refusal)
