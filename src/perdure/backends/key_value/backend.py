"""What a key-value store must be able to do to hold runs: keep bytes by key, and change them only if they are still the same.

Everything above uses compare-and-swap only. A store that has none gets it from `EmulatedBackend`, which is right for as long as
one process uses the store; a store that has it by itself may be used by many.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol, TypeAlias

from perdure.store import Durability

# Differs between two contents of a key. Compared only by the backend that returned it.
Version: TypeAlias = Hashable


class StoredValue(NamedTuple):
    """What is stored under a key."""

    data: bytes
    version: Version


class PlainBackend(Protocol):
    """Bytes by key, for one process."""

    async def read(self, key: str) -> bytes | None:
        """What is stored, or None."""
        ...

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there."""
        ...

    async def remove(self, key: str) -> None:
        """Delete what is there. It is no error when there is nothing."""
        ...


class Backend(Protocol):
    """Bytes by key, with compare-and-swap."""

    async def read(self, key: str) -> StoredValue | None:
        """What is stored, or None."""
        ...

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there: for what is written once, or may be overwritten by a later writer."""
        ...

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Store this if what is there has this version (None: if nothing is there). The new version, or None if it has not."""
        ...

    async def remove(self, key: str) -> None:
        """Delete what is there. It is no error when there is nothing."""
        ...


class ListedBackend(Backend, Protocol):
    """A backend that several processes may use, as it can list its keys.

    With an attribute `is_shared = False` it is for one process all the same; `durability` says what it survives.
    """

    async def names(self, prefix: str) -> list[str]:
        """All keys that begin with this."""
        ...


class NameIndex(Protocol):
    """A set of names like paths, kept in a backend, that can be listed by folder."""

    async def add(self, name: str) -> None:
        """Add this name."""
        ...

    async def discard(self, name: str) -> None:
        """Remove this name. It is no error when it is not there."""
        ...

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one, sorted. It ends in `/`."""
        ...

    async def within(self, folder: str) -> list[str]:
        """All names in this folder and those under it, sorted. It ends in `/`."""
        ...


class KeyValueTraits(NamedTuple):
    """What is known of a key-value store before it is used."""

    # Which store it is, in this process or for all: equal ones hold the same keys.
    identity: tuple[str, ...]
    # Whether several processes may use it at the same time.
    is_shared: bool
    durability: Durability
