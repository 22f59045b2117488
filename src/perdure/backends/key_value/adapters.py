"""Which key-value stores can hold runs, told apart by their methods, and how each is spoken to.

A `KeyValueStore` (get, set, delete) and a store of py-key-value (get, put, delete) have no compare-and-swap, so they serve one
process. An object store of obstore (put_async, get_async) has it, except for the one over a local directory; and so has whatever
is a `ListedBackend`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from perdure.backends.key_value.backend import Backend, Found, Plain, Trait, Version
from perdure.backends.key_value.emulated import Emulated
from perdure.kv.protocol import KeyValueStore, maybe_await
from perdure.store import Durability

_COLLECTION: Final = "perdure"
# How long a conditional put is sent again when nobody answers, and after what pause.
_PATIENCE: Final = 15.0
_PAUSE: Final = 0.1
# What names a bucket, but opens nothing.
_OF_THE_BUCKET: Final = ("bucket", "endpoint", "account_name", "container_name")


class PyKeyValue(Protocol):
    """What is used of a store of py-key-value."""

    def get(self, key: str, *, collection: str) -> Awaitable[Mapping[str, Any] | None]: ...
    def put(self, key: str, value: Mapping[str, Any], *, collection: str) -> Awaitable[None]: ...
    def delete(self, key: str, *, collection: str) -> Awaitable[bool]: ...


class TextByKey:
    """A `KeyValueStore`."""

    def __init__(self, kv: KeyValueStore) -> None:
        self._kv = kv

    async def read(self, key: str) -> bytes | None:
        """What is kept, or None."""
        text = await maybe_await(self._kv.get(_flat(key)))
        return None if text is None else text.encode()

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there."""
        await maybe_await(self._kv.set(_flat(key), data.decode()))

    async def remove(self, key: str) -> None:
        """Keep nothing."""
        await maybe_await(self._kv.delete(_flat(key)))


class TextInCollection:
    """A store of py-key-value, which keeps JSON objects."""

    def __init__(self, kv: PyKeyValue) -> None:
        self._kv = kv

    async def read(self, key: str) -> bytes | None:
        """What is kept, or None."""
        value = await self._kv.get(_flat(key), collection=_COLLECTION)
        return None if value is None else str(value["text"]).encode()

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there."""
        await self._kv.put(_flat(key), {"text": data.decode()}, collection=_COLLECTION)

    async def remove(self, key: str) -> None:
        """Keep nothing."""
        await self._kv.delete(_flat(key), collection=_COLLECTION)


class Bucket:
    """An object store of obstore that can put conditionally."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def read(self, key: str) -> Found | None:
        """What is kept, or None."""
        try:
            answer = await self._store.get_async(key)
        except FileNotFoundError:
            return None
        return Found(bytes(await answer.bytes_async()), _version(answer.meta))

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there."""
        await self._store.put_async(key, data)

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Keep this if nobody else has written since. None also if it was kept before, at a request whose answer was lost.

        That request is sent again here, as obstore does with all others: it cannot know that the condition makes it harmless.
        """
        from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError

        mode: Any = "create" if version is None else dict(version)  # type: ignore[call-overload]
        give_up_at = time.monotonic() + _PATIENCE
        while True:
            try:
                return _version(await self._store.put_async(key, data, mode=mode))
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return None
            except GenericError as error:
                if _was_answered(error) or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_PAUSE)

    async def remove(self, key: str) -> None:
        """Keep nothing."""
        try:
            await self._store.delete_async(key)
        except FileNotFoundError:
            return

    async def names(self, folder: str) -> list[str]:
        """All keys that begin with this."""
        return [one["path"] async for page in self._store.list(folder) for one in page]

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one."""
        listed = await self._store.list_with_delimiter_async(folder)
        return [str(path).rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"]]


class LocalObjects:
    """The object store of obstore over a local directory, which puts unconditionally and leaves syncing to others."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._bucket = Bucket(store)
        self._root = Path(store.prefix or "/")
        # Folders whose names are on the disk.
        self._synced = {self._root}

    async def read(self, key: str) -> bytes | None:
        """What is kept, or None."""
        found = await self._bucket.read(key)
        return None if found is None else found.data

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there. What is there stays until this is on the disk."""
        unfinished = f"{key}-new"
        await self._bucket.write(unfinished, data)
        await asyncio.to_thread(_sync, self._root / unfinished)
        await self._store.rename_async(unfinished, key)
        await asyncio.to_thread(self._sync_folders, self._root / key)

    async def remove(self, key: str) -> None:
        """Keep nothing."""
        await self._bucket.remove(key)

    def _sync_folders(self, file: Path) -> None:
        for folder in file.parents:
            _sync(folder)
            if folder in self._synced:
                return
            self._synced.add(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _flat(key: str) -> str:
    """The key without slashes, which a store that makes a file of each key may take for folders. Keys have no dots."""
    return key.replace("/", ".")


def _was_answered(error: Exception) -> bool:
    """Whether the server said no, and not the way to it. There is no other sign of it."""
    return "status code" in str(error)


def _version(meta: Mapping[str, Any]) -> Version:
    return tuple((name, meta[name]) for name in ("e_tag", "version") if meta.get(name) is not None)


def backend_of(kv: Any) -> Backend:
    """How this key-value store is spoken to. Raises `TypeError` when it is none."""
    if _is_own(kv):
        own: Backend = kv
        return own
    return Bucket(kv) if _is_object_store(kv) and not _is_local(kv) else Emulated(_plain(kv))


def _plain(kv: Any) -> Plain:
    if _is_object_store(kv):
        return LocalObjects(kv)
    return TextByKey(kv) if _has(kv, "set") else TextInCollection(kv)


def trait_of(kv: Any) -> Trait:
    """What is known of this key-value store. Raises `TypeError` when it is none."""
    if _is_own(kv):
        return Trait(_this(kv), is_shared=bool(getattr(kv, "is_shared", True)), durability=_told(kv))
    if _is_object_store(kv):
        return _object_store_trait(kv)
    if _has(kv, "get", "set", "delete") or _has(kv, "get", "put", "delete"):
        return Trait(_this(kv), is_shared=False, durability=_told(kv))
    raise TypeError(
        f"a {type(kv).__name__} is no key-value store: it needs get, set and delete, or get, put and delete as in py-key-value, "
        "or to be an object store of obstore"
    )


def _object_store_trait(kv: Any) -> Trait:
    kind = type(kv).__name__
    if _is_local(kv):
        return Trait((kind, str(kv.prefix or "")), is_shared=False, durability="disk")
    if _is_a(kv, "MemoryStore"):
        return Trait(_this(kv), is_shared=False, durability="process")
    config = getattr(kv, "config", {})
    parts = [f"{name}={config[name]}" for name in _OF_THE_BUCKET if name in config]
    place = (kind, *parts, str(getattr(kv, "prefix", None) or "")) if parts else _this(kv)
    return Trait(place, is_shared=True, durability="replicated")


def _told(kv: Any) -> Durability:
    """What a store says itself that it survives, by an attribute `durability`; one that says nothing may forget everything."""
    told = getattr(kv, "durability", None)
    return told if told in ("disk", "replicated") else "process"


def _this(kv: Any) -> tuple[str, ...]:
    return (type(kv).__name__, f"{id(kv):x}")


def _is_own(kv: Any) -> bool:
    """Whether somebody wrote a `ListedBackend` of his own."""
    return _has(kv, "read", "write", "write_if", "remove", "names")


def _is_object_store(kv: Any) -> bool:
    return _has(kv, "get_async", "put_async", "delete_async", "list", "list_with_delimiter_async")


def _is_local(kv: Any) -> bool:
    return _is_a(kv, "LocalStore")


def _is_a(kv: Any, name: str) -> bool:
    return any(one.__name__ == name for one in type(kv).__mro__)


def _has(kv: Any, *names: str) -> bool:
    return not isinstance(kv, type) and all(callable(getattr(kv, name, None)) for name in names)
