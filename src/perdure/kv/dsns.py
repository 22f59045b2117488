"""The key-value store that a DSN names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, NamedTuple

from perdure.backends.base.dsn import DsnScheme, no_location, path, path_after_slashes, scheme_of
from perdure.kv.protocol import OpenedKeyValueStore

_FORMS: Final = (
    "memory:, files:directory, sqlite:///relative.db, sqlite:////absolute.db, postgresql://..., mongodb://... or redis://..."
)


class _KeyValueKind(NamedTuple):
    module: str
    name: str
    parse_location: Callable[[str], tuple[str, ...]] | None = None


_POSTGRES: Final = _KeyValueKind("postgres", "PostgresKeyValueStore")
_REDIS: Final = _KeyValueKind("redis", "RedisKeyValueStore")
_MONGO: Final = _KeyValueKind("mongo", "MongoKeyValueStore")
_KINDS: Final = {
    "memory": _KeyValueKind("memory", "MemoryKeyValueStore", no_location),
    "files": _KeyValueKind("files", "FilesKeyValueStore", path),
    "sqlite": _KeyValueKind("sqlite", "SQLiteKeyValueStore", path_after_slashes),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "mongodb": _MONGO,
    "mongodb+srv": _MONGO,
}


def open_key_value_store(dsn: str) -> OpenedKeyValueStore:
    """The key-value store that a DSN names, opened by its first use.

    `?table=` (on MongoDB `?collection=`) and `&namespace=` can follow; other options of a server's DSN are its driver's.
    Raises `ValueError` and `TypeError` without repeating the DSN, which may hold a password.
    """
    kind = _KINDS[scheme_of(dsn, _KINDS, what="key-value store", forms=_FORMS)]
    make: Callable[..., OpenedKeyValueStore] = getattr(importlib.import_module(f"perdure.kv.{kind.module}"), kind.name)
    return DsnScheme(make, kind.parse_location).make_store(dsn)
