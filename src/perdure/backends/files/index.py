"""The index: what `claim`, `due`, `list` and `count` need to know of every run, so that they need not open its log.

It is one file of lines. Every process appends to it, and reads on from where it stopped. Before a run's log is changed, a line
marks the run as dirty: its last summary is no longer valid. Afterwards a line has the new summary. A process that finds a run
which stayed dirty reads its log, so a process may die anywhere in between. Lines are not synced: those of this boot are in the
page cache, and an index of another boot, or a copied one, is rebuilt with every run dirty. An index that has grown to several
times its content is compacted.

Appending takes the index's lock shared, rebuilding takes it exclusively. A half-written line ends at the next one's newline, its
checksum is wrong, and it is skipped: if it marked a run as dirty, the log was not changed yet; if it was a summary, the run is
still dirty.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from perdure.backends.base.damaged_runs import DAMAGED_PAUSE
from perdure.backends.files.disk import boot_id, open_file, read_all, run_id_of
from perdure.backends.files.locks import file_lock
from perdure.backends.files.run_state import RunState
from perdure.codec.outcomes import error_line
from perdure.model.records import Awaited, RunInfo, RunRow, Status, load_metadata

_VERSION: Final = 5
_SLACK: Final = 1 << 20
# The first line is shorter than this, and it identifies the file: an inode number is used again after the file was replaced.
_HEADER: Final = 200


class RunSummary(msgspec.Struct, frozen=True, array_like=True):
    """A run as the index knows it. `metadata` are the user's; `error` is the error of a failed run in one line."""

    id: str
    workflow: str
    version: int
    status: Status
    updated_at: int
    wake_at: int | None
    queue: str
    priority: int
    limit_key: str | None
    held: bool
    lease_owner: str | None
    lease_until: int | None
    ended: bool
    owes_parent: bool
    problem: str | None
    is_suspect: bool
    has_started: bool
    created_at: int
    attempts: int
    generation: int
    waiting_for: tuple[Awaited, ...]
    error: str | None
    metadata: bytes

    @classmethod
    def of(cls, state: RunState) -> RunSummary:
        """The summary of this run."""
        row: RunRow = state.row
        return cls(
            row.id,
            row.workflow,
            row.version,
            row.status,
            row.updated_at,
            row.wake_at,
            row.queue,
            row.priority,
            row.limit_key,
            row.held,
            row.lease_owner,
            row.lease_until,
            row.ended,
            state.owes_parent,
            row.problem,
            row.is_suspect,
            row.has_started,
            row.created_at,
            row.attempts,
            row.generation,
            row.waiting_for,
            error_line(row.status, row.outcome),
            msgspec.json.encode(load_metadata(row.metadata)),
        )

    def line(self) -> RunInfo:
        """The line of this run in a list."""
        return RunInfo.of(self, self.error)


class _IndexLine(msgspec.Struct, frozen=True, array_like=True):
    """A run's directory and its summary. Without a summary the run is removed (`is_removed`) or dirty."""

    name: str
    summary: RunSummary | None = None
    is_removed: bool = False


_line_decoder: Final = msgspec.json.Decoder(_IndexLine)


def _encode_line(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    return b"\n%08x %b\n" % (zlib.crc32(text), text)


def _check_line(line: bytes) -> bytes | None:
    """The line's text, or None when its checksum is wrong."""
    checksum, _, text = line.partition(b" ")
    return text if text and checksum == b"%08x" % zlib.crc32(text) else None


class RunIndex:
    """The index of one namespace. Any thread may use it."""

    def __init__(self, directory: str, runs: str) -> None:
        self._path = f"{directory}/index"
        self._lock_path = f"{directory}/index.lock"
        self._runs = runs
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: no thread is reading."""
        # Guards the tables below and the offset in the file.
        self._mutex = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._identity: bytes | None = None
        self._offset = 0
        self.known: dict[str, RunSummary] = {}
        # Runs that have not ended, of those in `known`.
        self.live: dict[str, RunSummary] = {}
        # Runs whose log must be read, in the order in which they became dirty.
        self.dirty: dict[str, None] = {}
        # Runs whose log cannot be read, dirty or not: why, and from when on a dirty one is tried again.
        self.unreadable: dict[str, tuple[str, float]] = {}
        # Dirty runs whose lock was not released in time; it is not waited for again.
        self.stuck: set[str] = set()

    def ensure(self) -> None:
        """Rebuild the index unless it is of this boot."""
        with self._mutex, file_lock(self._lock_path, create=True):
            if self._read_identity() != self._identity_of_runs() or not boot_id():
                self._rebuild(_IndexLine(name) for name in sorted(os.listdir(self._runs)))

    def _read_identity(self) -> str | None:
        """The identity in the header, or None when there is no index of this version."""
        try:
            with open_file(self._path, os.O_RDONLY) as fd:
                lines = os.pread(fd, _HEADER, 0).split(b"\n")
            text = _check_line(lines[1]) if len(lines) > 2 else None
            version, identity, _ = msgspec.json.decode(text or b"null", type=tuple[int, str, str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return identity if version == _VERSION else None

    def _identity_of_runs(self) -> str:
        """What a valid index says: this boot, and these very directories rather than a copy of them."""
        status = os.stat(self._runs)
        return f"{boot_id()} {status.st_dev} {status.st_ino}"

    def _rebuild(self, lines: Iterable[_IndexLine]) -> None:
        draft = f"{self._path}.new"
        with open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd, os.fdopen(os.dup(fd), "wb") as file:
            file.write(_encode_line([_VERSION, self._identity_of_runs(), secrets.token_hex(8)]))
            file.writelines(map(_encode_line, lines))
        os.rename(draft, self._path)

    def mark_dirty(self, *names: str) -> None:
        """Mark these runs as about to change."""
        self._append(b"".join([_encode_line(_IndexLine(name)) for name in names]))

    def put(self, name: str, state: RunState | None) -> None:
        """Append the run's summary, or that it was removed. The caller has the run's lock."""
        summary = None if state is None else RunSummary.of(state)
        self._append(_encode_line(_IndexLine(name, summary, is_removed=summary is None)))

    def erase(self, names: Iterable[str]) -> None:
        """Overwrite the summaries of these runs, which were removed: they hold texts of the runs, such as a problem.

        Spaces have a wrong checksum, so readers that have not come so far skip them. The line that says that the run was removed
        stays, and a summary that comes after that line is one of a new run.
        """
        with self._mutex, file_lock(self._lock_path, create=True), open_file(self._path, os.O_RDWR) as fd:
            data = read_all(fd, 0)
            for name in names:
                key = msgspec.json.encode(name)
                removed_at = data.rfind(b" [%b,null,true]\n" % key)
                at = data.find(b" [%b,[" % key, 0, max(removed_at, 0))
                while at >= 0:
                    end = data.index(b"\n", at)
                    os.pwrite(fd, b" " * (end - at), at)
                    at = data.find(b" [%b,[" % key, end, removed_at)

    def _append(self, lines: bytes) -> None:
        try:
            self._write(lines)
        except FileNotFoundError:  # the file was deleted
            self.ensure()
            self._write(lines)

    def _write(self, lines: bytes) -> None:
        with file_lock(self._lock_path, shared=True, create=True), open_file(self._path, os.O_WRONLY | os.O_APPEND) as fd:
            written = os.write(fd, lines)
            if written != len(lines):
                raise OSError(28, "no space left for the index", self._path)

    def refresh(self) -> None:
        """Read what was added since the last time."""
        with self._mutex:
            if self._offset > _SLACK + 8 * self._content_size():
                self._compact()
            try:
                self._read_new_lines()
            except FileNotFoundError:
                self.ensure()
                self._read_new_lines()

    def _content_size(self) -> int:
        return 250 * len(self.known)

    def _read_new_lines(self) -> None:
        with open_file(self._path, os.O_RDONLY) as fd:
            identity, size = os.pread(fd, _HEADER, 0).partition(b"]")[0], os.fstat(fd).st_size
            if identity != self._identity or size < self._offset:
                self._clear()
                self._identity = identity
            if size == self._offset:
                return
            data = read_all(fd, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        is_first = self._offset == 0
        self._offset += len(whole)
        texts = [text for line in whole.split(b"\n") if line and (text := _check_line(line)) is not None]
        for text in texts[1:] if is_first else texts:
            self._apply(_line_decoder.decode(text))

    def _compact(self) -> None:
        with file_lock(self._lock_path, create=True):
            self._read_new_lines()
            summaries = [_IndexLine(name, summary) for name, summary in self.known.items()]
            self._rebuild([*summaries, *(_IndexLine(name) for name in self.dirty)])

    def _apply(self, line: _IndexLine) -> None:
        name = line.name
        self.unreadable.pop(name, None)
        self.stuck.discard(name)
        if line.summary is not None:
            self._set(name, line.summary)
        elif line.is_removed:
            self._remove(name)
        else:
            self.dirty[name] = None

    def _set(self, name: str, summary: RunSummary) -> None:
        self.dirty.pop(name, None)
        self.known[name] = summary
        if summary.ended and not summary.owes_parent:
            self.live.pop(name, None)
        else:
            self.live[name] = summary

    def _remove(self, name: str) -> None:
        self.dirty.pop(name, None)
        self.known.pop(name, None)
        self.live.pop(name, None)

    def dirty_runs(self) -> list[tuple[str, bool]]:
        """The runs whose log must be read, and whether to wait for its lock: only if the run is unknown and not stuck."""
        with self._mutex:
            now = time.monotonic()
            readable = [name for name in self.dirty if self.unreadable.get(name, ("", 0.0))[1] <= now]
            return [(name, name not in self.known and name not in self.stuck) for name in readable]

    def mark_unreadable(self, name: str, problem: str) -> None:
        """Remember that this run's log cannot be read, and why, until it can be or the run is changed."""
        with self._mutex:
            self.unreadable[name] = problem, time.monotonic() + DAMAGED_PAUSE

    def mark_readable(self, name: str) -> None:
        """Forget that this run's log could not be read."""
        if name in self.unreadable:
            with self._mutex:
                self.unreadable.pop(name, None)

    def mark_stuck(self, name: str) -> None:
        """Remember that the writer of this run is stopped."""
        with self._mutex:
            self.stuck.add(name)

    def unfinished(self) -> list[RunSummary]:
        """The runs that have not ended, or whose parent was not notified."""
        with self._mutex:
            return list(self.live.values())

    def all(self) -> list[RunSummary]:
        """All runs, those whose log cannot be read with that as their problem, if their id is known."""
        with self._mutex:
            found = dict(self.known)
            for name, (problem, _) in self.unreadable.items():
                summary = found.get(name) or _unknown_run(name)
                if summary is not None:
                    found[name] = msgspec.structs.replace(summary, problem=problem)
            return list(found.values())


def _unknown_run(name: str) -> RunSummary | None:
    """A run of which only the directory's name is known."""
    run_id = run_id_of(name)
    if run_id is None:
        return None
    return RunSummary(
        run_id, "", 0, "pending", 0, None, "", 0, None, True, None, None, False, False, None, False, False, 0, 0, 0, (), None,
        b"{}",
    )  # fmt: skip
