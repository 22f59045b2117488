"""A namespace on disk: its runs and its index, and how they change together.

    <root>/n-<prefix>/runs/r-<id>/{lock,log}    one directory for each run
    <root>/n-<prefix>/{index,settings,wake}     derived from the runs; schedules and queue limits; touched to wake other processes
    <root>/n-<prefix>/starts                    when a run last started in each queue that has a rate
    <root>/n-<prefix>/trash/                    deleted runs that are being removed

A change takes the run's lock, checks, marks the run dirty in the index, adds one frame to the log, syncs it, puts a new summary
into the index, and releases the lock. Several runs are locked in the order of their names, and a thread that has a run's lock
waits for no other kind of lock but the index's, so there is no deadlock.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from perdure.backends.base.damaged_runs import report
from perdure.backends.files.disk import make_directory, namespace_name, refuse_network, run_name, sync_directory
from perdure.backends.files.index import RunIndex, RunSummary
from perdure.backends.files.locks import LockBusy, file_lock, lock_timeout
from perdure.backends.files.log import RunLogs
from perdure.backends.files.run_state import RunState
from perdure.errors import LeaseLost, PerdureError, RunNotFound, SnapshotCorrupt
from perdure.model.records import Lease, RunRow, problem_text

T = TypeVar("T")


class LockedRun:
    """A run whose lock is held. `state` is None while there is no run; what a verb changes in it is saved afterwards."""

    def __init__(self, name: str, run_id: str, state: RunState | None) -> None:
        if state is not None and state.row.id != run_id:
            raise SnapshotCorrupt(run_id, "the log", f"in its directory {name!r} is run {state.row.id!r}")
        self.name = name
        self.id = run_id
        self.state = state
        self.before = None if state is None else RunSummary.of(state)

    def find(self) -> RunState:
        """The run. Raises `RunNotFound`."""
        if self.state is None:
            raise RunNotFound(self.id)
        return self.state

    def find_leased(self, lease: Lease) -> RunState:
        """The run, if this lease is its current one. Raises `LeaseLost`."""
        if self.state is None:
            raise LeaseLost(lease.run_id, lease.epoch)
        self.state.check_fence(lease)
        return self.state

    @property
    def has_new_summary(self) -> bool:
        """Whether what a verb changed must be put into the index."""
        return self.state is not None and (self.state.is_new or RunSummary.of(self.state) != self.before)


class VerbOutcome:
    """What a verb returned or raised."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error


class FilesNamespace:
    """One namespace. All methods block, and any thread may call them."""

    def __init__(self, root: str, prefix: str) -> None:
        self.root = root
        self.prefix = prefix
        self.directory = f"{root}/{namespace_name(prefix)}"
        self._runs = f"{self.directory}/runs"
        self._trash = f"{self.directory}/trash"
        self._wake = f"{self.directory}/wake"
        self.logs = RunLogs(self._runs)
        self.index = RunIndex(self.directory, self._runs)
        self._is_there = False
        # When the wake file was touched last, as far as this process has noticed.
        self.woken_at = 0

    def start_over(self) -> None:
        """In a forked child: nothing is under way."""
        self.logs.start_over()
        self.index.start_over()

    def _ensure(self) -> None:
        """Create the directories and an index of this boot, if missing. Raises `PersistenceError` on a network file system."""
        if self._is_there:
            return
        refuse_network(self.root)
        make_directory(self.root)
        for directory in (self.directory, self._runs, self._trash):
            make_directory(directory)
        with open(self._wake, "ab"):
            pass
        self.index.ensure()
        for left in os.listdir(self._trash):
            shutil.rmtree(f"{self._trash}/{left}", ignore_errors=True)
        self.woken_at = self.last_wake()
        self._is_there = True

    def guard(self, call: Callable[[], T]) -> T:
        """What the call returns, with the directories there and `LockBusy` raised as a `PersistenceError`."""
        try:
            self._ensure()
            return call()
        except LockBusy:
            raise lock_timeout(self.root) from None

    def wake(self) -> None:
        """Touch the file that other processes watch."""
        self.woken_at = time.time_ns()
        with suppress(OSError):  # the change itself is done, and watchers look by themselves after a while
            os.utime(self._wake, ns=(self.woken_at, self.woken_at))

    def last_wake(self) -> int:
        """When the wake file was touched last."""
        return os.stat(self._wake).st_mtime_ns

    @contextmanager
    def lock(self, what: str, *, shared: bool = False) -> Iterator[None]:
        """A lock of the whole namespace: `limits`, `claim` or `settings`. A thread takes them in this order."""
        with file_lock(f"{self.directory}/{what}.lock", shared=shared, create=True):
            yield

    def read(self, run_id: str, look: Callable[[RunState], T]) -> T | None:
        """What `look` returns for the run, or None when there is none. It must not keep or change what it is given."""
        name = run_name(run_id)
        with file_lock(f"{self._runs}/{name}/lock", shared=True) as is_there:
            state = LockedRun(name, run_id, self._load(name)).state if is_there else None
            if state is None:
                self.check_directory()
                return None
            return look(state)

    @contextmanager
    def lock_run(self, run_id: str, *, create: bool = False, patience: float | None = None) -> Iterator[LockedRun]:
        """The run, under its exclusive lock."""
        name = run_name(run_id)
        with self._lock_directory(name, create=create, patience=patience) as is_there:
            run = LockedRun(name, run_id, self._load(name, may_cut=True) if is_there else None)
            if run.state is None and not create:
                self.check_directory()
            yield run

    def check_directory(self) -> None:
        """Raise FileNotFoundError if not only a run is missing but all of them: a disk that is not mounted has lost no run."""
        os.stat(self._runs)

    def _load(self, name: str, *, may_cut: bool = False, is_safe: bool = True) -> RunState | None:
        """The run in this directory. One that cannot be read is logged, and has that as its problem in lists."""
        try:
            state = self.logs.load(name, may_cut=may_cut, is_safe=is_safe)
        except SnapshotCorrupt as problem:
            report(problem)
            self.index.mark_unreadable(name, problem_text(problem))
            raise
        self.index.mark_readable(name)
        return state

    @contextmanager
    def _lock_directory(self, name: str, *, create: bool = False, patience: float | None = None) -> Iterator[bool]:
        path = f"{self._runs}/{name}/lock"
        with ExitStack() as stack:
            while True:
                try:
                    is_there = stack.enter_context(file_lock(path, create=create, patience=patience))
                    break
                except FileNotFoundError:  # only with create: there is no directory yet, or no longer
                    with suppress(FileExistsError):
                        os.mkdir(f"{self._runs}/{name}", 0o700)
            yield is_there

    def _save(self, run: LockedRun) -> None:
        """Write what changed about a locked run to its log and to the index."""
        if run.state is None:
            return
        has_new_summary = run.has_new_summary
        if has_new_summary:
            self.index.mark_dirty(run.name)
        self.logs.save(run.name, run.state)
        if has_new_summary:
            self.index.put(run.name, run.state)

    def change(
        self, run_id: str, verbs: Sequence[Callable[[LockedRun], Any]], *, create: bool = False, patience: float | None = None
    ) -> list[VerbOutcome]:
        """What each verb returned or was refused with; what they changed is one frame, and on disk."""
        with self.lock_run(run_id, create=create, patience=patience) as run:
            try:
                outcomes = [_call(verb, run) for verb in verbs]
                self._save(run)
            except BaseException:
                self.logs.forget(run.name)  # the state in memory may be half changed
                raise
        return outcomes

    def change_one(
        self, run_id: str, verb: Callable[[LockedRun], T], *, create: bool = False, patience: float | None = None
    ) -> T:
        """What the verb returned; what it changed is on disk."""
        (outcome,) = self.change(run_id, [verb], create=create, patience=patience)
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return value

    def change_and_notify(
        self, child_id: str, verb: Callable[[LockedRun, bool], None], now: int, *, patience: float | None = None
    ) -> None:
        """Run a verb that may end a child, with its parent locked too, and then notify the parent.

        The child's frame says that its parent must be notified, the parent's frame has the outcome, and a third frame, the
        child's again, says that the parent was notified. After a crash in between, `repair` finds the child in the index and
        calls this again.
        """
        while True:
            parent_id = self.read(child_id, _parent_of)
            ids = {run_name(one): one for one in (child_id, parent_id) if one is not None}
            with ExitStack() as stack:
                runs = {ids[name]: stack.enter_context(self.lock_run(ids[name], patience=patience)) for name in sorted(ids)}
                child = runs[child_id]
                if child.state is not None and _parent_of(child.state) != parent_id:
                    continue
                try:
                    self._change_and_notify(child, None if parent_id is None else runs[parent_id], verb, now)
                except BaseException:
                    for run in runs.values():
                        self.logs.forget(run.name)
                    raise
                return

    def _change_and_notify(
        self, child: LockedRun, parent: LockedRun | None, verb: Callable[[LockedRun, bool], None], now: int
    ) -> None:
        listens = parent is not None and parent.state is not None and not parent.state.row.ended
        verb(child, listens)
        if child.state is None or parent is None or parent.state is None or not child.state.owes_parent:
            self._save(child)
            return
        self.index.mark_dirty(child.name, parent.name)
        self.logs.save(child.name, child.state)
        if listens:
            parent.state.deliver_outcome(child.state, now)
            self.logs.save(parent.name, parent.state)
        child.state.owes_parent = False
        self.logs.save(child.name, child.state)
        for run in (parent, child):
            self.index.put(run.name, run.state)

    def remove(self, run_ids: Sequence[str], may_remove: Callable[[RunRow], bool] | None = None) -> int:
        """Delete those of these runs that may be removed; how many. Without `may_remove` also runs that cannot be read."""
        trashed = [path for run_id in run_ids if (path := self._move_to_trash(run_id, may_remove)) is not None]
        if not trashed:
            return 0
        sync_directory(self._runs)
        for path in trashed:
            shutil.rmtree(path, ignore_errors=True)
        self.index.erase(map(run_name, run_ids))
        return len(trashed)

    def _move_to_trash(self, run_id: str, may_remove: Callable[[RunRow], bool] | None) -> str | None:
        name = run_name(run_id)
        with self._lock_directory(name) as is_there:
            if not is_there:
                self.check_directory()
                return None
            if may_remove is not None and not self._is_removable(name, may_remove):
                return None
            target = f"{self._trash}/{secrets.token_hex(16)}"
            self.index.mark_dirty(name)
            self.logs.forget(name)
            os.rename(f"{self._runs}/{name}", target)
            self.index.put(name, None)
            return target

    def _is_removable(self, name: str, may_remove: Callable[[RunRow], bool]) -> bool:
        try:
            state = self._load(name, may_cut=True)
        except SnapshotCorrupt:  # one run that cannot be read must not keep the others
            return False
        return state is not None and may_remove(state.row)

    def index_from_log(self, name: str, *, patience: float) -> None:
        """Put a summary of the run in this directory into the index. Raises `SnapshotCorrupt`, `LockBusy`."""
        with file_lock(f"{self._runs}/{name}/lock", shared=True, patience=patience) as is_there:
            self.index.put(name, self._load(name, is_safe=False) if is_there else None)


def _parent_of(state: RunState) -> str | None:
    row = state.row
    return None if row.parent_id == row.id or row.parent_key is None else row.parent_id


def _call(verb: Callable[[LockedRun], Any], run: LockedRun) -> VerbOutcome:
    try:
        return VerbOutcome(verb(run))
    except PerdureError as refusal:  # raised before anything was changed
        return VerbOutcome(error=refusal)
