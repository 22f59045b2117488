"""Stores that are wrong on purpose, each with a promise that it breaks.

Every one is the memory store with a single mistake, of a kind that real stores have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from perdure.backends.memory.store import MemoryStore
from perdure.store import STANDARD_PARTS, Capability

S = TypeVar("S", bound=type[MemoryStore])

# Each broken store with a promise that it breaks and what it announces.
BROKEN: Final[list[tuple[type[MemoryStore], str, frozenset[Capability]]]] = []


def breaks(promise: str, *more: Capability, parts: frozenset[Capability] = STANDARD_PARTS) -> Callable[[S], S]:
    """Register a store that announces `parts`, which are those of the memory store unless said otherwise, and `more`."""

    def register(store: S) -> S:
        BROKEN.append((store, promise, parts | frozenset(more)))
        return store

    return register
