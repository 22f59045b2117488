"""Caches: where a step with `cache=` keeps its result for other runs.

A cache may drop values at any time, and then a step runs again; it must never return a torn value, or the value of another key.
The values are text that perdure made. Instants come from the wall clock, because files outlive the process that wrote them.

`FileCache` has one file for each key, named after the key's hash. A file is never changed: a new one is written beside it under a
temporary name and replaces it by a rename, so any number of processes may use a directory at once. There is no lock, because a
stopped process could hold it for ever; the price is that a value renewed at the very moment at which its expired predecessor is
removed may be removed too. An expired file is removed when its key is asked for, and by later writes, each of which checks the
heads of some files. Files are not fsynced: after a power cut one may be torn, which is detected on reading. A call that is
cancelled goes on in its thread and leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import warnings
from collections import OrderedDict, deque
from collections.abc import Awaitable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from perdure.aio.fork_locks import new_fork_lock
from perdure.aio.threads import run_in_thread
from perdure.errors import PerdureWarning
from perdure.model.clock import Clock, SystemClock
from perdure.model.durations import MICROSECOND, Duration, microseconds

_FORMAT_VERSION: Final = 1
_KEPT_FILE: Final = re.compile(r"perdure-[0-9a-f]{64}\.json")
_TEMPORARY_FILE: Final = re.compile(r"perdure-[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
# How a file begins that expires, and how much of a file is read to see that.
_EXPIRING_HEAD: Final = re.compile(rb'\{"version": 1, "expires_at": (\d+), ')
_HEAD_BYTES: Final = 64
# How many files a write checks, and how long after the directory was listed it is listed again.
_CHECKED_PER_WRITE: Final = 50
_LIST_EVERY: Final = 60 * MICROSECOND
# No write takes that long, so the process that wrote this file was killed.
_LEFT_OVER_AFTER: Final = 3600


class StepCache(Protocol):
    """Text by key, across runs. Methods may be plain or async, so every `KeyValueStore` is one."""

    def get(self, key: str) -> Awaitable[str | None] | str | None:
        """The text under `key`, or None."""
        ...

    def set(self, key: str, value: str, ttl: int | None = None) -> Awaitable[None] | None:
        """Store the text, for `ttl` seconds or for as long as this cache keeps values.

        The ttl, in whole seconds, rounded up, only saves space: the text contains the exact instant, and perdure checks it.
        """
        ...

    def delete(self, key: str) -> Awaitable[bool] | bool:
        """Delete the text; whether there was any. The step with this key runs again when it is called next."""
        ...


def _ttl_microseconds(ttl: Duration) -> int:
    length = microseconds(ttl, what="ttl")
    if length == 0:
        raise ValueError(f"ttl must be a microsecond or more, not {ttl!r}; leave it out to keep values for good")
    return length


def _check_size(max_size: int) -> int:
    if isinstance(max_size, bool) or not isinstance(max_size, int):
        raise TypeError(f"max_size must be a whole number, not {max_size!r}")
    if max_size < 1:
        raise ValueError(f"max_size must be 1 or more, not {max_size!r}; leave it out for a cache without a limit")
    return max_size


def _check_key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key of a cached value must be a str, not {type(key).__name__}")
    return key


class _Lifetimes:
    """When values expire: by the ttl of `set`, otherwise by that of the cache, otherwise never."""

    def __init__(self, ttl: Duration | None, clock: Clock | None) -> None:
        self._ttl = None if ttl is None else _ttl_microseconds(ttl)
        self.now = (clock or SystemClock()).now

    def expires_at(self, ttl: Duration | None) -> int | None:
        length = self._ttl if ttl is None else _ttl_microseconds(ttl)
        return None if length is None else self.now() + length

    def is_over(self, expires_at: int | None) -> bool:
        return expires_at is not None and expires_at <= self.now()


class _CachedText(NamedTuple):
    value: str
    expires_at: int | None


class MemoryCache:
    """A `StepCache` that lives as long as this object.

    Beyond `max_size` values, the least recently used are dropped. `ttl` is for values that are set without one.
    """

    def __init__(self, max_size: int | None = None, ttl: Duration | None = None, *, clock: Clock | None = None) -> None:
        self._max_size = None if max_size is None else _check_size(max_size)
        self._lifetimes = _Lifetimes(ttl, clock)
        # Event loops of several threads may share a cache.
        self._lock = new_fork_lock()
        # The least recently used first.
        self._values: OrderedDict[str, _CachedText] = OrderedDict()
        # A heap of (expires_at, key). The pair of a replaced or dropped value stays in it, and is skipped when it comes due.
        self._expiring: list[tuple[int, str]] = []

    async def get(self, key: str) -> str | None:
        _check_key(key)
        with self._lock:
            self._drop_expired_values()
            kept = self._values.get(key)
            if kept is None:
                return None
            self._values.move_to_end(key)
            return kept.value

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        _check_key(key)
        expires_at = self._lifetimes.expires_at(ttl)
        with self._lock:
            self._drop_expired_values()
            self._values[key] = _CachedText(value, expires_at)
            self._values.move_to_end(key)
            self._note_expiry(key, expires_at)
            if self._max_size is not None and len(self._values) > self._max_size:
                self._values.popitem(last=False)

    async def delete(self, key: str) -> bool:
        _check_key(key)
        with self._lock:
            self._drop_expired_values()
            return self._values.pop(key, None) is not None

    async def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._expiring.clear()

    def __len__(self) -> int:
        with self._lock:
            self._drop_expired_values()
            return len(self._values)

    def _note_expiry(self, key: str, expires_at: int | None) -> None:
        if expires_at is not None:
            heapq.heappush(self._expiring, (expires_at, key))
        if len(self._expiring) > 2 * len(self._values):  # most pairs are stale
            self._expiring = [(kept.expires_at, key) for key, kept in self._values.items() if kept.expires_at is not None]
            heapq.heapify(self._expiring)

    def _drop_expired_values(self) -> None:
        while self._expiring and self._lifetimes.is_over(self._expiring[0][0]):
            expires_at, key = heapq.heappop(self._expiring)
            kept = self._values.get(key)
            if kept is not None and kept.expires_at == expires_at:
                del self._values[key]


class _CacheFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a file of a `FileCache`."""

    version: Literal[1]
    expires_at: int | None
    key: str
    value: str

    # In the order of the fields, as expiry is read off the beginning. Not msgspec's JSON: any str can be a key, also one with
    # lone surrogates.
    def to_bytes(self) -> bytes:
        return json.dumps(msgspec.structs.asdict(self), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, content: bytes) -> _CacheFile:
        try:
            return msgspec.convert(json.loads(content.decode("utf-8", "surrogatepass")), cls)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


class _Unreadable(Exception):
    """There is a file for the key, but it cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cache file {str(path)!r} is taken for missing until it is replaced: {reason}")


def _read(path: Path, key: str) -> _CacheFile | None:
    try:
        file = _CacheFile.from_bytes(path.read_bytes())
    except FileNotFoundError:
        return None
    except (PermissionError, IsADirectoryError, ValueError) as error:
        raise _Unreadable(path, str(error)) from error
    if file.key != key:
        raise _Unreadable(path, f"it belongs to key {file.key!r}")
    return file


def _expiry_of(path: Path) -> int | None:
    with path.open("rb") as file:
        head = _EXPIRING_HEAD.match(file.read(_HEAD_BYTES))
    return None if head is None else int(head[1])


def _temporary_for(path: Path) -> Path:
    return path.with_suffix(f".{os.urandom(8).hex()}.tmp")


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    # An inode number alone may be reused as soon as the file is removed.
    return (one.st_ino, one.st_mtime_ns) == (other.st_ino, other.st_mtime_ns)


class FileCache:
    """A `StepCache` in a directory, which any number of processes may share.

    The directory is created with the first value. Results may be private, so it and the files are readable by their owner only; a
    directory that exists keeps its permissions. `ttl` is for values that are set without one. A file that is torn, or was not
    written by perdure, counts as missing, with a `PerdureWarning`.
    """

    def __init__(self, directory: str | os.PathLike[str], ttl: Duration | None = None, *, clock: Clock | None = None) -> None:
        if not os.fspath(directory):
            raise ValueError("directory is empty; pass '.' for the current one")
        self._directory = Path(directory)
        self._lifetimes = _Lifetimes(ttl, clock)
        self._is_swept = False
        # Files that later writes check. Several threads take from it.
        self._unchecked: deque[Path] = deque()
        self._list_at = 0

    async def get(self, key: str) -> str | None:
        try:
            return await run_in_thread(self._get, _check_key(key))
        except _Unreadable as problem:
            warnings.warn(str(problem), PerdureWarning, stacklevel=2)
            return None

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        file = _CacheFile(_FORMAT_VERSION, self._lifetimes.expires_at(ttl), _check_key(key), value)
        await run_in_thread(self._set, file)

    async def delete(self, key: str) -> bool:
        return await run_in_thread(self._delete, _check_key(key))

    async def clear(self) -> None:
        """Delete the files of this cache; others in the directory stay, and so does the directory."""
        await run_in_thread(self._clear)

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return self._directory / f"perdure-{digest}.json"

    def _get(self, key: str) -> str | None:
        path = self._path(key)
        file = _read(path, key)
        if file is None:
            return None
        if not self._lifetimes.is_over(file.expires_at):
            return file.value
        self._drop_expired(path)
        return None

    def _set(self, file: _CacheFile) -> None:
        path = self._path(file.key)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = _temporary_for(path)
        try:
            with open(temporary, "xb", opener=_open_private) as writing:
                writing.write(file.to_bytes())
            self._sweep_once(temporary.stat().st_mtime)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # the value is there; a later write checks what this one could not
            self._drop_some_expired()

    def _delete(self, key: str) -> bool:
        path = self._path(key)
        was_live = self._is_live(path, key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return was_live

    def _drop_some_expired(self) -> None:
        """Check some files, more than a write adds, so that expired ones become fewer."""
        now = self._lifetimes.now()
        if not self._unchecked and now >= self._list_at:
            self._list_at = now + _LIST_EVERY
            self._unchecked.extend(self._files(_KEPT_FILE))
        for _ in range(_CHECKED_PER_WRITE):
            try:
                path = self._unchecked.popleft()
            except IndexError:
                return
            self._drop_expired(path)

    def _drop_expired(self, path: Path) -> None:
        """Remove the file if it has expired, unless another process renews it meanwhile."""
        with suppress(FileNotFoundError):
            seen = path.stat()
            if self._lifetimes.is_over(_expiry_of(path)) and _is_same(path.stat(), seen):
                path.unlink()

    def _clear(self) -> None:
        for path in self._files(_KEPT_FILE):
            path.unlink(missing_ok=True)

    def _is_live(self, path: Path, key: str) -> bool:
        try:
            file = _read(path, key)
        except _Unreadable:
            return False
        return file is not None and not self._lifetimes.is_over(file.expires_at)

    def _files(self, name: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in self._directory.iterdir() if name.fullmatch(path.name)]
        except FileNotFoundError:
            return []

    def _sweep_once(self, now: float) -> None:
        """Delete the temporary files of killed processes. `now` is the file system's time, which may be another machine's."""
        if self._is_swept:
            return
        self._is_swept = True
        for path in self._files(_TEMPORARY_FILE):
            with suppress(OSError):  # another process has removed it, or another user owns it
                if path.stat().st_mtime < now - _LEFT_OVER_AFTER:
                    path.unlink()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def as_cache(cache: Any) -> StepCache:
    """A `StepCache` over what was passed as `cache=`: the object itself, or one that reads and writes the user's own dict."""
    is_class = isinstance(cache, type)
    if not is_class and all(callable(getattr(cache, name, None)) for name in ("get", "set", "delete")):
        return cache  # type: ignore[no-any-return]
    if isinstance(cache, MutableMapping):
        return _MappingCache(cache)
    given = f"the class {cache.__name__} instead of an object of it" if is_class else f"a {type(cache).__name__}"
    raise TypeError(
        "cache= takes a dict, MemoryCache(), FileCache(directory), or an object with get(key), set(key, value, ttl) "
        f"and delete(key), not {given}"
    )


class _MappingCache:
    """A `StepCache` over a mapping. It ignores the ttl."""

    def __init__(self, mapping: MutableMapping[str, str]) -> None:
        self._mapping = mapping

    async def get(self, key: str) -> str | None:
        return self._mapping.get(key)

    async def set(self, key: str, value: str, ttl: int | None = None) -> None:  # noqa: ARG002 - part of the protocol
        self._mapping[key] = value

    async def delete(self, key: str) -> bool:
        try:
            del self._mapping[key]
        except KeyError:
            return False
        return True
