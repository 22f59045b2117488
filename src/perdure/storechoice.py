"""Which store a call works on: the one it was given, the one PERDURE_STORE names, or one in memory."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from perdure.store import Store
from perdure.stores import memory, open_store


class Choice(NamedTuple):
    """A store, whether it is ours to close, and whether it is one in memory that nobody asked for."""

    store: Store
    is_owned: bool
    is_implicit: bool


@lru_cache(maxsize=1)
def _process_memory() -> Store:
    return memory()


def choose_store(store: Store | str | None, *, is_anonymous: bool = False) -> Choice:
    """The store to work on. `is_anonymous`: nobody could find the run again, so it gets a memory of its own."""
    if isinstance(store, str):
        return Choice(open_store(store), is_owned=True, is_implicit=False)
    if store is not None:
        if isinstance(store, type) or not hasattr(store, "record"):
            raise TypeError(f"store= takes a store or a DSN such as 'sqlite:///app.db', not {store!r}")
        return Choice(store, is_owned=False, is_implicit=False)
    if is_anonymous:
        return Choice(memory(), is_owned=True, is_implicit=True)
    dsn = os.environ.get("PERDURE_STORE")
    if dsn:
        return Choice(open_store(dsn), is_owned=True, is_implicit=False)
    return Choice(_process_memory(), is_owned=False, is_implicit=True)
