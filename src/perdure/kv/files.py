"""Text by key in plain files, for all processes of one machine, with nothing but the standard library.

    <directory>/values/n-<namespace>/kept/<key>                 one file for each key: a line about it, and the text
    <directory>/values/n-<namespace>/expiring/<minute>/<key>    a marker, empty: check this key when that minute is over
    <directory>/values/n-<namespace>/drafts/                    files that are being written
    <directory>/values/n-<namespace>/lock                       locked while a file is moved into place or removed

A file is never changed: a new one is written and fsynced as a draft and replaces the other by a rename, so readers need no lock
and see a whole text. The lock keeps one process from removing, as expired, a file that another has just renewed. A marker is
created before the file it belongs to; a marker whose key was renewed since is removed when it is checked.
"""

# Paths are the strings that the kernel takes.
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH208

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeVar

import msgspec

from perdure.aio.pending_write import await_reply
from perdure.aio.threads import run_in_thread
from perdure.backends.base.address import path_text
from perdure.backends.base.lifecycle import Lifecycle
from perdure.errors import PersistenceError
from perdure.kv.disk import (
    PLAIN_NAME,
    key_name,
    make_directory,
    namespace_name,
    open_file,
    read_all,
    refuse_network,
    sync,
    sync_directory,
    write_all,
)
from perdure.kv.limits import check_key, check_namespace, decode_value, encode_value, lifetime
from perdure.kv.locks import LockBusy, check_locks, file_lock, lock_timeout
from perdure.kv.patterns import literal_prefix, matches
from perdure.model.durations import MICROSECOND, Duration

P = ParamSpec("P")
T = TypeVar("T")

# How many expired files a write removes: more than it adds, so that they become fewer.
SWEPT_PER_WRITE: Final = 50
_MINUTE: Final = 60 * MICROSECOND
# How long a process does not check again after it found nothing expired, so that not every write lists the minutes.
_SWEEP_EVERY: Final = 1 * MICROSECOND
# No write takes that long, so the process that wrote this draft was killed.
_LEFT_OVER_AFTER: Final = 3600
_MAX_HEAD_BYTES: Final = 16_384


class _FileHead(msgspec.Struct, frozen=True):
    """The first line of a file."""

    key: str
    size: int
    expires_at: int | None = None
    version: int = 1

    @property
    def is_live(self) -> bool:
        return self.expires_at is None or self.expires_at > _now()


class FilesKeyValueStore:
    """A `KeyValueStore` in a directory of a local disk. What was set is on the disk when `set` returns.

    `namespace` keeps several users of one directory apart.
    """

    # What `stores.key_value` says of runs in this store.
    durability: Final = "disk"

    def __init__(self, directory: str | Path, *, namespace: str = "") -> None:
        check_locks()
        self._root = _check_path(directory)
        self._namespace = check_namespace(namespace)
        self._files = _Files(self._root, namespace)
        self._label = f"key-value files {self._root!r}"
        self._lifecycle = Lifecycle(self._label)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"FilesKeyValueStore({self._root!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a FilesKeyValueStore cannot be pickled: send its directory, and open one on it in the other process")

    @property
    def place(self) -> tuple[str, ...]:
        """Two stores with the same place hold the same texts: the real path and the namespace."""
        return ("files", self._root, self._namespace)

    async def get(self, key: str) -> str | None:
        """The text under `key`, or None."""
        data = await self._ask(self._files.read, check_key(key))
        return None if data is None else decode_value(data)

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        """Store the text, for `ttl` or without expiry."""
        name = check_key(key)
        await self._ask(self._files.write, name, encode_value(name, value), lifetime(ttl))

    async def delete(self, key: str) -> bool:
        """Whether there was anything to delete."""
        return await self._ask(self._files.remove, check_key(key))

    async def exists(self, key: str) -> bool:
        """Whether there is text under `key`."""
        return await self._ask(self._files.is_there, check_key(key))

    async def keys(self, pattern: str) -> list[str]:
        """The keys that match the pattern, in any order."""
        if literal_prefix(pattern) is None:
            return []
        return await self._ask(self._files.matching_keys, pattern)

    async def close(self) -> None:
        """Wait for calls in flight. Between calls nothing is open."""
        empty = self._lifecycle.close()
        if empty is not None:
            await asyncio.shield(asyncio.wrap_future(empty))

    async def _ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._process != os.getpid():  # forked: the calls in flight are the parent's
            self._process, self._lifecycle = os.getpid(), Lifecycle(self._label)
        lifecycle = self._lifecycle
        lifecycle.enter()
        try:
            # A cancelled call ends only when the thread is done, so that it cannot overwrite a later `set` of the key.
            return await await_reply(run_in_thread(work, *args, **kwargs))
        except LockBusy:
            raise lock_timeout(self._root) from None
        except OSError as error:
            raise PersistenceError(self._label, f"{error.strerror or error} ({error.filename})") from error
        finally:
            lifecycle.leave()


class _Files:
    """The files of one namespace. Every method blocks, and any thread may call it."""

    def __init__(self, root: str, namespace: str) -> None:
        self._root = root
        self._directory = f"{root}/values/{namespace_name(namespace)}"
        self._kept = f"{self._directory}/kept"
        self._expiring = f"{self._directory}/expiring"
        self._drafts = f"{self._directory}/drafts"
        self._lock = f"{self._directory}/lock"
        self._is_made = False
        self._next_sweep_at = 0

    def read(self, key: str) -> bytes | None:
        """The text under the key, or None."""
        path = self._path(key)
        try:
            with open_file(path, os.O_RDONLY) as fd:
                content = read_all(fd)
        except FileNotFoundError:
            return None
        line, _, data = content.partition(b"\n")
        head = self._head(path, line)
        if head.key != key or head.size != len(data):
            raise self._damage_error(path, f"it says it holds {head.size} bytes of {head.key!r}, and has {len(data)}")
        return data if head.is_live else None

    def is_there(self, key: str) -> bool:
        """Whether there is text under the key."""
        head = self._peek(self._path(key))
        return head is not None and head.is_live

    def write(self, key: str, data: bytes, length: int | None) -> None:
        """Write the text to the disk."""
        self._make()
        expires_at = None if length is None else _now() + length
        head = msgspec.json.encode(_FileHead(key, len(data), expires_at))
        draft = f"{self._drafts}/{secrets.token_hex(8)}"
        try:
            with open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, head + b"\n" + data)
                sync(fd)
            self._put(draft, key, expires_at)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        sync_directory(self._kept)
        with suppress(OSError, LockBusy):  # the text is on the disk; a later write sweeps what this one could not
            self._sweep()

    def remove(self, key: str) -> bool:
        """Remove the text under the key; whether there was any."""
        path = self._path(key)
        with file_lock(self._lock) as is_made:
            head = self._peek(path) if is_made else None
            if head is None:
                return False
            os.unlink(path)
        sync_directory(self._kept)
        return head.is_live

    def matching_keys(self, pattern: str) -> list[str]:
        """The live keys that match the pattern."""
        try:
            names = [entry.name for entry in os.scandir(self._kept)]
        except FileNotFoundError:
            return []
        prefix = key_name(pattern.partition("*")[0])
        heads = (self._peek(f"{self._kept}/{name}") for name in names if _may_match(name, prefix))
        return [head.key for head in heads if head is not None and head.is_live and matches(head.key, pattern)]

    def _path(self, key: str) -> str:
        return f"{self._kept}/{key_name(key)}"

    def _make(self) -> None:
        if self._is_made:
            return
        refuse_network(self._root)
        for directory in (self._kept, self._expiring, self._drafts):
            make_directory(directory)
        for entry in os.scandir(self._drafts):
            with suppress(FileNotFoundError):  # another process has removed it
                if entry.stat().st_mtime < time.time() - _LEFT_OVER_AFTER:
                    os.unlink(entry.path)
        self._is_made = True

    def _put(self, draft: str, key: str, expires_at: int | None) -> None:
        """Move the draft into place, after creating the marker for its expiry."""
        with file_lock(self._lock, create=True):
            if expires_at is not None:
                minute = f"{self._expiring}/{expires_at // _MINUTE}"
                with suppress(FileExistsError):
                    os.mkdir(minute, 0o700)
                with open_file(f"{minute}/{key_name(key)}", os.O_WRONLY | os.O_CREAT):
                    pass
            os.rename(draft, self._path(key))

    def _sweep(self) -> None:
        """Remove some of the expired files."""
        now = _now()
        if now < self._next_sweep_at:
            return
        due = sorted(int(name) for name in os.listdir(self._expiring) if name.isdecimal() and int(name) <= now // _MINUTE)
        markers = list(islice(chain.from_iterable(map(self._markers, due)), SWEPT_PER_WRITE))
        for minute, name in markers:
            self._check_marker(minute, name)
        if len(markers) < SWEPT_PER_WRITE:
            self._next_sweep_at = now + _SWEEP_EVERY

    def _markers(self, minute: int) -> Iterator[tuple[int, str]]:
        directory = f"{self._expiring}/{minute}"
        with suppress(FileNotFoundError):
            names = os.listdir(directory)
            if not names and minute < _now() // _MINUTE:
                with file_lock(self._lock), suppress(OSError):  # no longer empty, or removed by another process
                    os.rmdir(directory)
            yield from ((minute, name) for name in names)

    def _check_marker(self, minute: int, name: str) -> None:
        """Remove the file and its marker if the file has expired; remove the marker alone if it no longer applies."""
        with file_lock(self._lock), suppress(FileNotFoundError):
            head = None
            with suppress(PersistenceError):  # reading the key raises it
                head = self._peek(f"{self._kept}/{name}")
            if head is not None and not head.is_live:
                os.unlink(f"{self._kept}/{name}")
            elif head is not None and head.expires_at is not None and head.expires_at // _MINUTE == minute:
                return
            os.unlink(f"{self._expiring}/{minute}/{name}")

    def _peek(self, path: str) -> _FileHead | None:
        """The head of the file, or None when there is no file."""
        try:
            with open_file(path, os.O_RDONLY) as fd:
                return self._head(path, os.pread(fd, _MAX_HEAD_BYTES, 0).partition(b"\n")[0])
        except FileNotFoundError:
            return None

    def _head(self, path: str, line: bytes) -> _FileHead:
        try:
            return msgspec.json.decode(line, type=_FileHead)
        except msgspec.DecodeError as reason:
            raise self._damage_error(path, str(reason)) from None

    def _damage_error(self, path: str, reason: str) -> PersistenceError:
        return PersistenceError(f"key-value files {self._root!r}", f"{path!r} cannot be read ({reason}); it was left as it is")


def _may_match(name: str, prefix: str) -> bool:
    """Whether the file has to be read. Unless a name is a hash, it begins as its key does."""
    return name.startswith(prefix) or not (_is_plain(name) and _is_plain(prefix))


def _is_plain(name: str) -> bool:
    return name.startswith(PLAIN_NAME)


def _now() -> int:
    return time.time_ns() // 1000


def _check_path(directory: str | Path) -> str:
    text = path_text(directory, 'a key-value store in files takes the path of a directory, such as "values"')
    if not text or "\0" in text:
        raise ValueError(f"directory {directory!r} must name a directory; without one use MemoryKeyValueStore()")
    return os.path.realpath(text)
