"""Ready-made key-value stores: text by key in memory, files, SQLite, PostgreSQL, MongoDB and Redis.

    kv = SQLiteKeyValueStore("app.db")          # or open_key_value_store("sqlite:///app.db")
    states = StatePersistence.open("redis://localhost/0")

All of them take the same keys, values and patterns, can be used from any event loop, and are opened by their first use. Those on
a server need its driver, which is imported when one is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.kv.dsns import open_key_value_store as open_key_value_store
    from perdure.kv.files import FilesKeyValueStore as FilesKeyValueStore
    from perdure.kv.memory import MemoryKeyValueStore as MemoryKeyValueStore
    from perdure.kv.mongo import MongoKeyValueStore as MongoKeyValueStore
    from perdure.kv.postgres import PostgresKeyValueStore as PostgresKeyValueStore
    from perdure.kv.redis import RedisKeyValueStore as RedisKeyValueStore
    from perdure.kv.sqlite import SQLiteKeyValueStore as SQLiteKeyValueStore

_MODULE_OF = {
    "FilesKeyValueStore": "files",
    "MemoryKeyValueStore": "memory",
    "MongoKeyValueStore": "mongo",
    "PostgresKeyValueStore": "postgres",
    "RedisKeyValueStore": "redis",
    "SQLiteKeyValueStore": "sqlite",
    "open_key_value_store": "dsns",
}

__all__ = [  # noqa: PLE0604 - built from the table, so that it cannot drift from it
    *sorted(_MODULE_OF),
]


if not TYPE_CHECKING:  # checkers know the names above and no others

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'perdure.kv' has no attribute {name!r}")
        return getattr(importlib.import_module(f"perdure.kv.{_MODULE_OF[name]}"), name)
