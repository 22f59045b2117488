"""Adapters: a `Backend` for each kind of key-value store that can hold runs. The kind is recognized by its methods.

A `KeyValueStore` (get, set, delete) and a store of py-key-value (get, put, delete) have no compare-and-swap, so they serve one
process. An object store of obstore (put_async, get_async) has it, except for the one over a local directory; and so has a
`ListedBackend` of the user's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from perdure.aio.threads import run_in_thread
from perdure.backends.key_value.backend import Backend, KeyValueTraits, PlainBackend, StoredValue, Version
from perdure.backends.key_value.emulated_cas import EmulatedBackend
from perdure.kv.protocol import KeyValueStore, maybe_await
from perdure.store import Durability

_COLLECTION: Final = "perdure"
# For how long a conditional put is sent again when there is no reply, and after what pause.
_PATIENCE: Final = 15.0
_PAUSE: Final = 0.1
# The settings that identify a bucket; none of them is a credential.
_BUCKET_SETTINGS: Final = ("bucket", "endpoint", "account_name", "container_name")


class PyKeyValue(Protocol):
    """The methods of a store of py-key-value that are used."""

    def get(self, key: str, *, collection: str) -> Awaitable[Mapping[str, Any] | None]: ...
    def put(self, key: str, value: Mapping[str, Any], *, collection: str) -> Awaitable[None]: ...
    def delete(self, key: str, *, collection: str) -> Awaitable[bool]: ...


class KeyValueStoreBackend:
    """A `KeyValueStore`."""

    def __init__(self, kv: KeyValueStore) -> None:
        self._kv = kv

    async def read(self, key: str) -> bytes | None:
        """What is stored, or None."""
        text = await maybe_await(self._kv.get(_flatten(key)))
        # A client of Redis is such a store too, and gives bytes.
        return text.encode() if isinstance(text, str) else text

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there."""
        await maybe_await(self._kv.set(_flatten(key), data.decode()))

    async def remove(self, key: str) -> None:
        """Delete what is there."""
        await maybe_await(self._kv.delete(_flatten(key)))


class PyKeyValueBackend:
    """A store of py-key-value, which keeps JSON objects."""

    def __init__(self, kv: PyKeyValue) -> None:
        self._kv = kv

    async def read(self, key: str) -> bytes | None:
        """What is stored, or None."""
        value = await self._kv.get(_flatten(key), collection=_COLLECTION)
        return None if value is None else str(value["text"]).encode()

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there."""
        await self._kv.put(_flatten(key), {"text": data.decode()}, collection=_COLLECTION)

    async def remove(self, key: str) -> None:
        """Delete what is there."""
        await self._kv.delete(_flatten(key), collection=_COLLECTION)


class ObjectStoreBackend:
    """An object store of obstore that can put conditionally."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def read(self, key: str) -> StoredValue | None:
        """What is stored, or None."""
        try:
            result = await self._store.get_async(key)
        except FileNotFoundError:
            return None
        return StoredValue(bytes(await result.bytes_async()), _version(result.meta))

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there."""
        await self._store.put_async(key, data)

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Store this if the version is still the same. None also if it was stored before, by a request whose reply was lost.

        Such a request is sent again here. obstore does that for all others, but cannot know that the condition makes it harmless.
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
                if _has_reply(error) or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_PAUSE)

    async def remove(self, key: str) -> None:
        """Delete what is there."""
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


class LocalObjectBackend:
    """The object store of obstore over a local directory, which has no conditional put and does not fsync."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._objects = ObjectStoreBackend(store)
        self._root = Path(store.prefix or "/")
        # Folders whose directory entries are on the disk.
        self._synced = {self._root}

    async def read(self, key: str) -> bytes | None:
        """What is stored, or None."""
        found = await self._objects.read(key)
        return None if found is None else found.data

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there, which stays until this is on the disk."""
        draft = f"{key}-new"
        await self._objects.write(draft, data)
        await run_in_thread(_sync, self._root / draft)
        await self._store.rename_async(draft, key)
        await run_in_thread(self._sync_folders, self._root / key)

    async def remove(self, key: str) -> None:
        """Delete what is there."""
        await self._objects.remove(key)

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


def _flatten(key: str) -> str:
    """The key without slashes, which a store that makes a file of each key may take for folders. Our keys have no dots."""
    return key.replace("/", ".")


def _has_reply(error: Exception) -> bool:
    """Whether the server replied with an error, rather than the connection failing. obstore says so only in its message."""
    return "status code" in str(error)


def _version(meta: Mapping[str, Any]) -> Version:
    return tuple((name, meta[name]) for name in ("e_tag", "version") if meta.get(name) is not None)


def backend_of(kv: Any) -> Backend:
    """The backend over this key-value store."""
    if _is_listed_backend(kv):
        backend: Backend = kv
        return backend
    return ObjectStoreBackend(kv) if _is_object_store(kv) and not _is_local(kv) else EmulatedBackend(_plain_backend(kv))


def _plain_backend(kv: Any) -> PlainBackend:
    if _is_object_store(kv):
        return LocalObjectBackend(kv)
    return KeyValueStoreBackend(kv) if _has(kv, "set") else PyKeyValueBackend(kv)


def traits_of(kv: Any) -> KeyValueTraits:
    """What is known of this key-value store. Raises `TypeError` when it is none."""
    if _is_listed_backend(kv):
        return KeyValueTraits(_object_identity(kv), is_shared=bool(getattr(kv, "is_shared", True)), durability=_durability_of(kv))
    if _is_object_store(kv):
        return _object_store_traits(kv)
    if _has(kv, "get", "set", "delete") or _has(kv, "get", "put", "delete"):
        return KeyValueTraits(_object_identity(kv), is_shared=False, durability=_durability_of(kv))
    raise TypeError(
        f"a {type(kv).__name__} is no key-value store: it needs get, set and delete, or get, put and delete as in py-key-value, "
        "or to be an object store of obstore"
    )


def _object_store_traits(kv: Any) -> KeyValueTraits:
    kind = type(kv).__name__
    if _is_local(kv):
        return KeyValueTraits((kind, str(kv.prefix or "")), is_shared=False, durability="disk")
    if _is_a(kv, "MemoryStore"):
        return KeyValueTraits(_object_identity(kv), is_shared=False, durability="process")
    config = getattr(kv, "config", {})
    parts = [f"{name}={config[name]}" for name in _BUCKET_SETTINGS if name in config]
    identity = (kind, *parts, str(getattr(kv, "prefix", None) or "")) if parts else _object_identity(kv)
    return KeyValueTraits(identity, is_shared=True, durability="replicated")


def _durability_of(kv: Any) -> Durability:
    """The store's own attribute `durability`; without one it may lose everything with the process."""
    durability = getattr(kv, "durability", None)
    return durability if durability in ("disk", "replicated") else "process"


def _object_identity(kv: Any) -> tuple[str, ...]:
    return (type(kv).__name__, f"{id(kv):x}")


def _is_listed_backend(kv: Any) -> bool:
    """Whether it has the methods of a `ListedBackend`."""
    return _has(kv, "read", "write", "write_if", "remove", "names")


def _is_object_store(kv: Any) -> bool:
    return _has(kv, "get_async", "put_async", "delete_async", "list", "list_with_delimiter_async")


def _is_local(kv: Any) -> bool:
    return _is_a(kv, "LocalStore")


def _is_a(kv: Any, name: str) -> bool:
    return any(one.__name__ == name for one in type(kv).__mro__)


def _has(kv: Any, *names: str) -> bool:
    return not isinstance(kv, type) and all(callable(getattr(kv, name, None)) for name in names)
