"""A run's append-only log on disk, and the run as it was last read from it.

`load` must be called with the run's lock, shared or exclusive; everything else with the exclusive one. What was read stays in
memory, and the next `load` reads only what was added since. Frames that this process did not write may come from a process that
died before it synced them, so they are synced here before their content is used.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from perdure.backends.base.damaged_runs import UNREADABLE
from perdure.backends.files.disk import open_file, read_all, run_id_of, run_name, sync, sync_directory, write_all
from perdure.backends.files.frames import HEADER, DamagedLog, check_header, make_frame, new_header, scan
from perdure.backends.files.run_state import LogRecord, RunState, decode_record, encode_record
from perdure.errors import SnapshotCorrupt

_CACHED_BYTES: Final = 64 << 20
# A log is compacted when this much of it, and the larger part, is only about earlier leases and progress.
_MOST_WASTE: Final = 1 << 20

logger: Final = logging.getLogger("perdure")


@dataclass(slots=True)
class LoadedLog:
    """A run as far as its log was read: up to `end`, in the log that begins with `header`.

    `waste` counts the bytes that only changed the row, and that later records have changed again. `is_synced` says whether what
    was read is known to be on the disk, `is_placed` whether the log's entry in its directory is.
    """

    header: bytes
    end: int
    state: RunState
    waste: int = 0
    is_synced: bool = False
    is_placed: bool = False

    @property
    def is_wasteful(self) -> bool:
        """Whether the log should be compacted."""
        return self.waste > max(_MOST_WASTE, self.end // 2)


class RunLogs:
    """The logs below one directory, each in the directory of its run. Any thread may use it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.syncs = 0
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: no thread is reading."""
        # Guards the cache below; no file is read while it is held.
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, LoadedLog] = OrderedDict()
        self._cached_bytes = 0

    def load(self, name: str, *, may_cut: bool = False, is_safe: bool = True) -> RunState | None:
        """The run, or None when there is none. With `may_cut` a torn tail is cut off. Raises `SnapshotCorrupt`.

        With `is_safe` everything that was read is on the disk; without it the result may be lost in a power failure.
        """
        cached = self._pop(name)
        try:
            log = self._read(name, cached, may_cut=may_cut, is_safe=is_safe)
        except (DamagedLog, *UNREADABLE) as reason:
            run_id = (run_id_of(name) or name) if cached is None else cached.state.row.id
            raise SnapshotCorrupt(run_id, "the log", str(reason) or type(reason).__name__) from reason
        if log is None:
            return None
        self._put(name, log)
        return log.state

    def save(self, name: str, state: RunState) -> None:
        """Write what is new about the run to the disk, in one frame."""
        record = state.take_record()
        if record is None:
            return
        try:
            log = self._replace(name, state, record) if record.whole is not None else self._append(name, record)
            if log.is_wasteful:
                log = self._replace(name, state, state.whole_record())
        except BaseException:
            self.forget(name)
            raise
        self._put(name, log)

    def forget(self, name: str) -> None:
        """Read the run from disk the next time: the state in memory is not what is there."""
        self._pop(name)

    def _pop(self, name: str) -> LoadedLog | None:
        """What is cached, for this caller only until it is put back."""
        with self._lock:
            log = self._cache.pop(name, None)
            self._cached_bytes -= 0 if log is None else log.end
            return log

    def _put(self, name: str, log: LoadedLog) -> None:
        with self._lock:
            other = self._cache.pop(name, None)
            self._cached_bytes += log.end - (0 if other is None else other.end)
            self._cache[name] = log
            while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].end

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}/log"

    def _read(self, name: str, cached: LoadedLog | None, *, may_cut: bool, is_safe: bool) -> LoadedLog | None:
        try:
            with open_file(self._path(name), os.O_RDWR) as fd:
                log = self._read_new_frames(name, fd, cached, may_cut=may_cut)
                if is_safe:
                    self._sync_unsynced(name, fd, log)
                return log
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _sync_unsynced(self, name: str, fd: int, log: LoadedLog) -> None:
        if not log.is_synced:
            sync(fd)
        if not log.is_placed:
            sync_directory(f"{self._directory}/{name}")
            sync_directory(self._directory)
        log.is_synced = log.is_placed = True

    def _read_new_frames(self, name: str, fd: int, cached: LoadedLog | None, *, may_cut: bool) -> LoadedLog:
        header = os.pread(fd, HEADER, 0)
        check_header(header)
        size = os.fstat(fd).st_size
        start = HEADER if cached is None or cached.header != header or cached.end > size else cached.end
        if cached is not None and HEADER < start == size:
            return cached
        scanned = scan(read_all(fd, start), header, start)
        records = [decode_record(payload) for payload in scanned.payloads]
        if start == HEADER:
            cached = LoadedLog(header, start, _first_state(name, records))
            records = records[1:]
        if cached is None:
            raise DamagedLog("it is empty")
        for record, payload in zip(records, scanned.payloads[-len(records) :], strict=True) if records else ():
            cached.state.apply(record)
            cached.waste += len(payload) if record.changes_only_row else 0
        cached.end, cached.is_synced = scanned.end, False
        if may_cut and scanned.end < size:
            if scanned.tail_is_whole:
                self._keep_aside(name, os.pread(fd, size - scanned.end, scanned.end), scanned.end)
            os.ftruncate(fd, scanned.end)
        return cached

    def _keep_aside(self, name: str, tail: bytes, end: int) -> None:
        """Write a tail that is about to be cut off to a file beside the log."""
        path = f"{self._path(name)}.cut-{end}"
        with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(fd, tail, 0)
            sync(fd)
        sync_directory(f"{self._directory}/{name}")
        reason = "a write that a crash interrupted was cut off; it was not acknowledged"
        logger.warning("run %r: %s. Its bytes are kept in %r", run_id_of(name) or name, reason, path)

    def _replace(self, name: str, state: RunState, record: LogRecord) -> LoadedLog:
        """Write a new log, in place of what is there."""
        header = new_header()
        data = header + make_frame(encode_record(record), header, HEADER)
        path = self._path(name)
        with open_file(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(fd, data, 0)
            sync(fd)
        os.rename(f"{path}.new", path)
        sync_directory(f"{self._directory}/{name}")
        sync_directory(self._directory)
        self.syncs += 3
        return LoadedLog(header, len(data), state, is_synced=True, is_placed=True)

    def _append(self, name: str, record: LogRecord) -> LoadedLog:
        log = self._pop(name)
        if log is None:
            raise RuntimeError(f"the log of {name} was not read before it was written")
        with open_file(self._path(name), os.O_WRONLY) as fd:
            frame = make_frame(encode_record(record), log.header, log.end)
            try:
                write_all(fd, frame, log.end)
                sync(fd)
            except OSError:
                os.ftruncate(fd, log.end)  # half a frame would be cut off anyway, and a whole one was not acknowledged
                raise
        self.syncs += 1
        log.end += len(frame)
        log.waste += len(frame) if record.changes_only_row else 0
        return log


def _first_state(name: str, records: list[LogRecord]) -> RunState:
    if not records:
        raise DamagedLog("its first record is damaged")
    state = RunState.read(records[0])
    if run_name(state.row.id) != name:
        raise DamagedLog(f"it is the log of run {state.row.id!r}, which belongs into another directory")
    return state
