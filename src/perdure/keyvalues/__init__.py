"""Key-value stores, ready-made: text by key in memory, files, SQLite, PostgreSQL, MongoDB and Redis.

    kv = SQLiteKeyValueStore("app.db")          # or open_key_value_store("sqlite:///app.db")
    states = StatePersistence.open("redis://localhost/0")

All of them take the same keys, values and patterns, can be used from any event loop, and are opened by their first use. Those on
a server need its driver, which is imported when one is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.keyvalues.dsns import open_key_value_store as open_key_value_store
    from perdure.keyvalues.in_files import FilesKeyValueStore as FilesKeyValueStore
    from perdure.keyvalues.in_memory import MemoryKeyValueStore as MemoryKeyValueStore
    from perdure.keyvalues.in_mongo import MongoKeyValueStore as MongoKeyValueStore
    from perdure.keyvalues.in_postgres import PostgresKeyValueStore as PostgresKeyValueStore
    from perdure.keyvalues.in_redis import RedisKeyValueStore as RedisKeyValueStore
    from perdure.keyvalues.in_sqlite import SQLiteKeyValueStore as SQLiteKeyValueStore

_HOMES = {
    "FilesKeyValueStore": "in_files",
    "MemoryKeyValueStore": "in_memory",
    "MongoKeyValueStore": "in_mongo",
    "PostgresKeyValueStore": "in_postgres",
    "RedisKeyValueStore": "in_redis",
    "SQLiteKeyValueStore": "in_sqlite",
    "open_key_value_store": "dsns",
}

__all__ = [  # noqa: PLE0604 - built from the table, so that it cannot drift from it
    *sorted(_HOMES),
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'perdure.keyvalues' has no attribute {name!r}")
    return getattr(importlib.import_module(f"perdure.keyvalues.{_HOMES[name]}"), name)
