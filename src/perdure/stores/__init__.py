"""Where runs are kept. `stores.sqlite("app.db")`, `stores.memory()`, or a DSN through `open_store`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl, unquote

from perdure.store import Store

if TYPE_CHECKING:
    from perdure.stores.memory_store import MemoryStore
    from perdure.stores.sqlite_store import SQLiteStore

__all__ = ["memory", "open_store", "sqlite"]

_FORMS: Final = "sqlite:///relative.db, sqlite:////absolute.db or memory:"


def memory(*, prefix: str = "") -> MemoryStore:
    """A store in this process's memory: for tests, and for runs that may die with the process."""
    from perdure.stores.memory_store import MemoryStore

    return MemoryStore(prefix=prefix)


def sqlite(
    path: str | Path,
    *,
    table: str = "perdure",
    prefix: str = "",
    synchronous: Literal["full", "normal"] = "full",
    auto_migrate: bool = True,
) -> SQLiteStore:
    """A store in an SQLite file, for any number of processes on one machine. Opened by its first use."""
    from perdure.stores.sqlite_store import SQLiteStore

    return SQLiteStore(path, table=table, prefix=prefix, synchronous=synchronous, auto_migrate=auto_migrate)


def open_store(dsn: str) -> Store:
    """The store that a DSN names; keywords of its function can follow as `?table=...&prefix=...`."""
    if not isinstance(dsn, str):
        raise TypeError(f"a DSN is a str like {_FORMS}, not {type(dsn).__name__}")
    scheme, _, rest = dsn.partition(":")
    location, _, query = rest.partition("?")
    if scheme == "memory" and not location.strip("/"):
        return _made(memory, (), query, "memory:")
    if scheme == "sqlite" and location.startswith("///") and len(location) > len("///"):
        return _made(sqlite, (unquote(location.removeprefix("///")),), query, "sqlite:")
    # Not the DSN itself: it may hold a password.
    begins = f" that begins with {scheme + ':'!r}" if rest and scheme.isalnum() else ""
    raise ValueError(f"no store for a DSN{begins}; write {_FORMS}")


def _options(query: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ValueError("what follows ? in a DSN must read option=value&option=value") from None
    if "auto_migrate" in options:
        options["auto_migrate"] = {"true": True, "false": False}.get(options["auto_migrate"], options["auto_migrate"])
    return options


def _made(make: Any, args: tuple[Any, ...], query: str, scheme: str) -> Store:
    try:
        store: Store = make(*args, **_options(query))
    except TypeError as reason:
        raise ValueError(f"a {scheme} DSN does not take these options: {reason}") from reason
    return store
