"""The key-value store that a DSN names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from perdure.backends.base.dsn import Scheme, nowhere, path, path_after_slashes
from perdure.kv.protocol import KeyValueStore

_FORMS: Final = (
    "memory:, files:directory, sqlite:///relative.db, sqlite:////absolute.db, postgresql://..., mongodb://... or redis://..."
)


class _Kind(NamedTuple):
    module: str
    name: str
    located: Callable[[str], tuple[str, ...]] | None = None


_POSTGRES: Final = _Kind("postgres", "PostgresKeyValueStore")
_REDIS: Final = _Kind("redis", "RedisKeyValueStore")
_MONGO: Final = _Kind("mongo", "MongoKeyValueStore")
_KINDS: Final = {
    "memory": _Kind("memory", "MemoryKeyValueStore", nowhere),
    "files": _Kind("files", "FilesKeyValueStore", path),
    "sqlite": _Kind("sqlite", "SQLiteKeyValueStore", path_after_slashes),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "mongodb": _MONGO,
    "mongodb+srv": _MONGO,
}


def open_key_value_store(dsn: str) -> KeyValueStore:
    """The key-value store that a DSN names, opened by its first use.

    `?table=` (on MongoDB `?collection=`) and `&namespace=` can follow; other options of a server's DSN are its driver's.
    Raises `ValueError` and `TypeError` without repeating the DSN, which may hold a password.
    """
    if not isinstance(dsn, str):
        raise TypeError(f"a DSN is a str like {_FORMS}, not {type(dsn).__name__}")
    scheme, colon, _ = dsn.partition(":")
    if not colon or scheme not in _KINDS:
        begins = f" that begins with {scheme + ':'!r}" if colon and scheme.replace("+", "").isalnum() else ""
        raise ValueError(f"no key-value store for a DSN{begins}; write {_FORMS}")
    kind = _KINDS[scheme]
    make: Any = getattr(importlib.import_module(f"perdure.kv.{kind.module}"), kind.name)
    arguments, options = Scheme(make, kind.located).read(dsn)
    try:
        opened: KeyValueStore = make(*arguments, **options)
    except TypeError as reason:
        raise ValueError(f"a {scheme}: DSN does not take these options: {reason}") from reason
    return opened
