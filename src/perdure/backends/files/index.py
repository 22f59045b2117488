"""The index: what `claim`, `due`, `list` and `count` need to know of every run, so that they need not open its log.

It is one file of lines, to which every process appends and which each reads on from where it was. Before a run's log is changed,
the line "dirty" says that what the index knows is no longer to be trusted; afterwards a line sums the run up anew. Whoever finds
a run that stayed dirty looks at its log, so a process may die anywhere in between. Lines are not synced: those of this boot are
in the page cache, and an index of another boot, or that was copied here, is begun anew with every run dirty. An index that has
grown to several times what it says is begun anew with just that.

Appending takes the index's lock shared, beginning anew takes it alone. A half-written line ends at the next one's newline, its
checksum is wrong, and it is passed over: if it said "dirty" nothing had happened yet, if it summed up the run is still dirty.
"""

from __future__ import annotations

import os
import secrets
import threading
import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from perdure.backends.files.disk import boot_id, opened, read_all
from perdure.backends.files.locks import locked
from perdure.backends.files.state import RunState
from perdure.model.records import RunRow, Status

_VERSION: Final = 1
_SLACK: Final = 1 << 20
# The first line is shorter than this, and it tells files apart: the number of a file is used again once it was replaced.
_HEADER: Final = 200


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """A run as the index knows it."""

    id: str
    workflow: str
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

    @classmethod
    def of(cls, state: RunState) -> Summary:
        """What there is to know of this run."""
        row: RunRow = state.row
        return cls(
            row.id,
            row.workflow,
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
        )


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """The run's directory and its summary; no summary: `is_gone`, or dirty."""

    name: str
    summary: Summary | None = None
    is_gone: bool = False


_line: Final = msgspec.json.Decoder(_Line)


def _written(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    return b"\n%08x %b\n" % (zlib.crc32(text), text)


def _text_of(line: bytes) -> bytes | None:
    """What the line says, if it is whole."""
    checksum, _, text = line.partition(b" ")
    return text if text and checksum == b"%08x" % zlib.crc32(text) else None


class Index:
    """The index of one namespace. Any thread may use it."""

    def __init__(self, directory: str, runs: str) -> None:
        self._path = f"{directory}/index"
        self._lock_path = f"{directory}/index.lock"
        self._runs = runs
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: nobody is reading."""
        # Guards the tables below and the place in the file.
        self._mutex = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._identity: bytes | None = None
        self._offset = 0
        self.known: dict[str, Summary] = {}
        # Runs that have not ended, of those in `known`.
        self.live: dict[str, Summary] = {}
        # Runs whose log must be looked at, and what was known before; and those of them that cannot be read.
        self.dirty: dict[str, None] = {}
        self.unreadable: set[str] = set()
        # Dirty runs whose lock somebody did not let go of in good time; nobody waits for it again.
        self.stuck: set[str] = set()

    def ensure(self) -> None:
        """Have an index of this boot."""
        with self._mutex, locked(self._lock_path, create=True):
            header = self._header()
            if header is None or header[1] != self._age() or not boot_id():
                self._begin_anew(_Line(name) for name in sorted(os.listdir(self._runs)))

    def _header(self) -> tuple[int, str] | None:
        try:
            with opened(self._path, os.O_RDONLY) as fd:
                lines = os.pread(fd, _HEADER, 0).split(b"\n")
            text = _text_of(lines[1]) if len(lines) > 2 else None
            version, age, _ = msgspec.json.decode(text or b"null", type=tuple[int, str, str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return (version, age) if version == _VERSION else None

    def _age(self) -> str:
        """What an index must say to be trusted: this boot, and these very directories rather than a copy of them."""
        status = os.stat(self._runs)
        return f"{boot_id()} {status.st_dev} {status.st_ino}"

    def _begin_anew(self, lines: Iterable[_Line]) -> None:
        draft = f"{self._path}.new"
        with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd, os.fdopen(os.dup(fd), "wb") as file:
            file.write(_written([_VERSION, self._age(), secrets.token_hex(8)]))
            file.writelines(map(_written, lines))
        os.rename(draft, self._path)

    def mark_dirty(self, *names: str) -> None:
        """Say that these runs are about to change."""
        self._append(b"".join([_written(_Line(name)) for name in names]))

    def put(self, name: str, state: RunState | None) -> None:
        """Say how the run stands now, or that it is gone. The caller has the run's lock."""
        summary = None if state is None else Summary.of(state)
        self._append(_written(_Line(name, summary, is_gone=summary is None)))

    def _append(self, lines: bytes) -> None:
        try:
            self._write(lines)
        except FileNotFoundError:  # somebody took the file away
            self.ensure()
            self._write(lines)

    def _write(self, lines: bytes) -> None:
        with locked(self._lock_path, shared=True, create=True), opened(self._path, os.O_WRONLY | os.O_APPEND) as fd:
            written = os.write(fd, lines)
            if written != len(lines):
                raise OSError(28, "no space left for the index", self._path)

    def refresh(self) -> None:
        """Read what was added since the last time."""
        with self._mutex:
            if self._offset > _SLACK + 8 * self._said():
                self._compact()
            try:
                self._read_on()
            except FileNotFoundError:
                self.ensure()
                self._read_on()

    def _said(self) -> int:
        return 200 * len(self.known)

    def _read_on(self) -> None:
        with opened(self._path, os.O_RDONLY) as fd:
            identity, size = os.pread(fd, _HEADER, 0).partition(b"]")[0], os.fstat(fd).st_size
            if identity != self._identity or size < self._offset:
                self._forget()
                self._identity = identity
            if size == self._offset:
                return
            data = read_all(fd, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        is_first = self._offset == 0
        self._offset += len(whole)
        texts = [text for line in whole.split(b"\n") if line and (text := _text_of(line)) is not None]
        for text in texts[1:] if is_first else texts:
            self._heed(_line.decode(text))

    def _compact(self) -> None:
        with locked(self._lock_path, create=True):
            self._read_on()
            summed = [_Line(name, summary) for name, summary in self.known.items()]
            self._begin_anew([*summed, *(_Line(name) for name in self.dirty)])

    def _heed(self, line: _Line) -> None:
        name = line.name
        self.unreadable.discard(name)
        self.stuck.discard(name)
        if line.summary is not None:
            self._know(name, line.summary)
        elif line.is_gone:
            self._unknow(name)
        else:
            self.dirty[name] = None

    def _know(self, name: str, summary: Summary) -> None:
        self.dirty.pop(name, None)
        self.known[name] = summary
        if summary.ended and not summary.owes_parent:
            self.live.pop(name, None)
        else:
            self.live[name] = summary

    def _unknow(self, name: str) -> None:
        self.dirty.pop(name, None)
        self.known.pop(name, None)
        self.live.pop(name, None)

    def questions(self) -> list[tuple[str, bool]]:
        """The runs whose log must be looked at, and whether to wait for each: nothing is known of it, and nobody has waited."""
        with self._mutex:
            return [
                (name, name not in self.known and name not in self.stuck) for name in self.dirty if name not in self.unreadable
            ]

    def give_up(self, name: str) -> None:
        """Remember that this run's log cannot be read, until somebody changes it."""
        with self._mutex:
            self.unreadable.add(name)

    def wait_no_more(self, name: str) -> None:
        """Remember that whoever changes this run stands still."""
        with self._mutex:
            self.stuck.add(name)

    def living(self) -> list[tuple[str, Summary]]:
        """The runs that have not ended, or whose parent was not told, by directory."""
        with self._mutex:
            return list(self.live.items())

    def all(self) -> list[tuple[str, Summary]]:
        """All runs, by directory."""
        with self._mutex:
            return list(self.known.items())
