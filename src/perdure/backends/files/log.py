"""A run's log on disk, and the run as it was last read from it.

`load` must be called with the run's lock, shared or not; everything else with the exclusive one. What was read is kept, and the
next `load` reads only what was added since. Frames that this process did not write may come from one that died before it synced
them, so they are synced here before anybody hears of them.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from perdure.backends.files.disk import opened, read_all, sync, sync_directory, write_all
from perdure.backends.files.frames import HEADER, Damaged, check_header, framed, new_header, scan
from perdure.backends.files.names import run_name
from perdure.backends.files.state import Change, RunState, decoded, encoded
from perdure.errors import SnapshotCorrupt

_KEPT_BYTES: Final = 64 << 20
# A log is written anew when this much of it, and the larger part, is about nothing but earlier leases and progress.
_MOST_WASTE: Final = 1 << 20


@dataclass(slots=True)
class Read:
    """A run as far as its log was read: up to `end`, in the log that begins with `header`.

    `waste` counts the bytes that only changed the row, which later ones have changed again. `is_synced` is what was read,
    `is_placed` that the log is in its directory: whether it is known to be on the disk.
    """

    header: bytes
    end: int
    state: RunState
    waste: int = 0
    is_synced: bool = False
    is_placed: bool = False

    @property
    def is_wasteful(self) -> bool:
        """Whether the log should be written anew."""
        return self.waste > max(_MOST_WASTE, self.end // 2)


class Logs:
    """The logs below one directory, each in the directory of its run. Any thread may use it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.syncs = 0
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: nobody is reading."""
        # Guards the tables below; nothing is read from disk under it.
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Read] = OrderedDict()
        self._bytes = 0

    def load(self, name: str, *, may_cut: bool = False, safe: bool = True) -> RunState | None:
        """The run, or None when there is none. With `may_cut` a torn tail is cut off. Raises `SnapshotCorrupt`.

        Not `safe` is for whoever only wants to know what to look at closer.
        """
        kept = self._take(name)
        try:
            read = self._read(name, kept, may_cut=may_cut, safe=safe)
        except (Damaged, ValueError, LookupError, TypeError, msgspec.MsgspecError) as reason:
            raise SnapshotCorrupt(name if kept is None else kept.state.row.id, "the log", str(reason)) from reason
        if read is None:
            return None
        self._keep(name, read)
        return read.state

    def save(self, name: str, state: RunState) -> None:
        """Have what is new about the run on disk, in one frame."""
        change = state.taken_change()
        if change is None:
            return
        try:
            read = self._begin(name, state, change) if change.whole is not None else self._append(name, change)
            if read.is_wasteful:
                read = self._begin(name, state, state.whole_change())
        except BaseException:
            self.forget(name)
            raise
        self._keep(name, read)

    def forget(self, name: str) -> None:
        """Read the run from disk the next time: what is in memory is not what is there."""
        self._take(name)

    def _take(self, name: str) -> Read | None:
        """What is kept, for the caller alone until it is kept again."""
        with self._lock:
            read = self._kept.pop(name, None)
            self._bytes -= 0 if read is None else read.end
            return read

    def _keep(self, name: str, read: Read) -> None:
        with self._lock:
            other = self._kept.pop(name, None)
            self._bytes += read.end - (0 if other is None else other.end)
            self._kept[name] = read
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].end

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}/log"

    def _read(self, name: str, kept: Read | None, *, may_cut: bool, safe: bool) -> Read | None:
        try:
            with opened(self._path(name), os.O_RDWR) as fd:
                read = self._read_on(name, fd, kept, may_cut=may_cut)
                if safe:
                    self._make_safe(name, fd, read)
                return read
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _make_safe(self, name: str, fd: int, read: Read) -> None:
        if not read.is_synced:
            sync(fd)
        if not read.is_placed:
            sync_directory(f"{self._directory}/{name}")
            sync_directory(self._directory)
        read.is_synced = read.is_placed = True

    def _read_on(self, name: str, fd: int, kept: Read | None, *, may_cut: bool) -> Read:
        header = os.pread(fd, HEADER, 0)
        check_header(header)
        size = os.fstat(fd).st_size
        start = HEADER if kept is None or kept.header != header or kept.end > size else kept.end
        if kept is not None and HEADER < start == size:
            return kept
        scanned = scan(read_all(fd, start), header, start)
        changes = [decoded(payload) for payload in scanned.payloads]
        if start == HEADER:
            kept = Read(header, start, _first(name, changes))
            changes = changes[1:]
        if kept is None:
            raise Damaged("it is empty")
        for change, payload in zip(changes, scanned.payloads[-len(changes) :], strict=True) if changes else ():
            kept.state.apply(change)
            kept.waste += len(payload) if _only_row(change) else 0
        kept.end, kept.is_synced = scanned.end, False
        if may_cut and scanned.end < size:
            os.ftruncate(fd, scanned.end)
        return kept

    def _begin(self, name: str, state: RunState, change: Change) -> Read:
        """A new log, in place of whatever is there."""
        header = new_header()
        data = header + framed(encoded(change), header, HEADER)
        path = self._path(name)
        with opened(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(fd, data, 0)
            sync(fd)
        os.rename(f"{path}.new", path)
        sync_directory(f"{self._directory}/{name}")
        sync_directory(self._directory)
        self.syncs += 3
        return Read(header, len(data), state, is_synced=True, is_placed=True)

    def _append(self, name: str, change: Change) -> Read:
        read = self._take(name)
        if read is None:
            raise RuntimeError(f"the log of {name} was not read before it was written")
        with opened(self._path(name), os.O_WRONLY) as fd:
            frame = framed(encoded(change), read.header, read.end)
            try:
                write_all(fd, frame, read.end)
                sync(fd)
            except OSError:
                os.ftruncate(fd, read.end)  # half a frame would be cut off anyway, and a whole one was not acknowledged
                raise
        self.syncs += 1
        read.end += len(frame)
        read.waste += len(frame) if _only_row(change) else 0
        return read


def _only_row(change: Change) -> bool:
    return not (change.entries or change.inbox or change.consumed or change.items)


def _first(name: str, changes: list[Change]) -> RunState:
    if not changes:
        raise Damaged("its first record is damaged")
    state = RunState.read(changes[0])
    if run_name(state.row.id) != name:
        raise Damaged(f"it is the log of run {state.row.id!r}, which belongs into another directory")
    return state
