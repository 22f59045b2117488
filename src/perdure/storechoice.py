"""Which store a call works on: the one it was given, the one PERDURE_STORE names, or one in memory."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.store import Store
from perdure.stores import memory, open_store

if TYPE_CHECKING:
    from perdure.stores.state_store import StateKeeper


class Choice(NamedTuple):
    """A store, whether it is ours to close, and whether it is one in memory that nobody asked for."""

    store: Store
    is_owned: bool
    is_implicit: bool


@lru_cache(maxsize=1)
def _process_memory() -> Store:
    return memory()


def choose_store(store: Store | StateKeeper | str | None, *, is_anonymous: bool = False, is_for_workers: bool = False) -> Choice:
    """The store to work on.

    `is_anonymous`: nobody could find the run again, so it gets a memory of its own. `is_for_workers`: it must tell what is due.
    """
    if isinstance(store, str):
        return Choice(open_store(store), is_owned=True, is_implicit=False)
    if store is not None:
        return Choice(_given(store, is_for_workers=is_for_workers), is_owned=False, is_implicit=False)
    if is_anonymous:
        return Choice(memory(), is_owned=True, is_implicit=True)
    dsn = os.environ.get("PERDURE_STORE")
    if dsn:
        return Choice(open_store(dsn), is_owned=True, is_implicit=False)
    return Choice(_process_memory(), is_owned=False, is_implicit=True)


def _given(store: Any, *, is_for_workers: bool) -> Store:
    if not isinstance(store, type) and hasattr(store, "record"):
        given: Store = store
        return given
    from perdure.stores.state_store import keeps_states, state_store

    if keeps_states(store):
        if callable(getattr(store, "due", None)):
            from perdure.stores.workflow_adapter import workflow_store

            return workflow_store(store)
        if is_for_workers:
            raise TypeError(f"a Runtime needs a store that knows what is due, not {store!r}, which can be the store= of wf.run")
        return state_store(store)
    raise TypeError(
        f"store= takes a store or a DSN such as 'sqlite:///app.db', or one of your own with save(run), load(id), delete(id) and "
        f"due(now, limit), or for wf.run what has save(id, snapshot), load(id) and delete(id), such as StatePersistence(kv), "
        f"not {store!r}"
    )
