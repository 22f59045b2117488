"""What a key-value store must be able to do to hold runs: keep bytes by key, and change them only if they are still the same.

Everything above knows compare-and-swap only. A store that has none gets it from `Emulated`, which is right for as long as one
process uses it; whatever has it by itself may be used by many.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol, TypeAlias

from perdure.store import Durability

# What tells one content of a key from the next. Only ever compared by the backend that gave it.
Version: TypeAlias = Hashable


class Found(NamedTuple):
    """What is kept under a key."""

    data: bytes
    version: Version


class Plain(Protocol):
    """Bytes by key, for one process."""

    async def read(self, key: str) -> bytes | None:
        """What is kept, or None."""
        ...

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there."""
        ...

    async def remove(self, key: str) -> None:
        """Keep nothing. A key that is not there is no error."""
        ...


class Backend(Protocol):
    """Bytes by key, with compare-and-swap."""

    async def read(self, key: str) -> Found | None:
        """What is kept, or None."""
        ...

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there: for what is written once, or may be lost to a later writer."""
        ...

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Keep this if what is there has this version (None: if nothing is there). The new version, or None when it has not."""
        ...

    async def remove(self, key: str) -> None:
        """Keep nothing. A key that is not there is no error."""
        ...


class ListedBackend(Backend, Protocol):
    """A backend that several processes may use, as it can say which keys there are.

    With an attribute `is_shared = False` it serves one process all the same; `durability` says what it survives.
    """

    async def names(self, prefix: str) -> list[str]:
        """All keys that begin with this."""
        ...


class Names(Protocol):
    """A set of names like paths, kept in a backend, that can be looked through by their beginning."""

    async def add(self, name: str) -> None:
        """Have this name."""
        ...

    async def discard(self, name: str) -> None:
        """Have it no more. One that is not there is no error."""
        ...

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one, sorted. It ends in `/`."""
        ...

    async def within(self, folder: str) -> list[str]:
        """All names in this folder and those under it, sorted. It ends in `/`."""
        ...


class Trait(NamedTuple):
    """What is known of a key-value store before it is used."""

    # Which store it is, in this process or for all: equal ones hold the same keys.
    place: tuple[str, ...]
    # Whether several processes may use it at once.
    is_shared: bool
    durability: Durability
