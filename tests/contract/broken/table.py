"""Stores that are wrong on purpose, each with the promise that has to find it out.

Every one is the memory store with a single mistake, of a kind that real stores have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from perdure.backends.memory.store import MemoryStore
from perdure.store import Capability

S = TypeVar("S", bound=type[MemoryStore])

# Each broken store with a promise that it breaks and what it declares.
BROKEN: Final[list[tuple[type[MemoryStore], str, frozenset[Capability]]]] = []


def breaks(promise: str, *capabilities: Capability) -> Callable[[S], S]:
    def register(store: S) -> S:
        BROKEN.append((store, promise, frozenset(capabilities)))
        return store

    return register
