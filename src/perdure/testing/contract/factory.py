"""What a store author writes to run the suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from perdure.store import Capability, Store


class StoreFactory(ABC):
    """One fresh database. The suite makes one for each case, opens handles on it, and closes those handles itself.

    Where making one takes long, a namespace that nobody else has will do: a prefix of its own before the one given to `open`.
    It takes no arguments, and keeps what it needs to reach the database (a path, a DSN) but no open store: for a `shared` store
    it is pickled and sent to other processes, so its class must then be importable by name.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    @abstractmethod
    async def open(self, prefix: str = "") -> Store:
        """Another handle on this database, in the namespace `prefix`; two handles act like two processes."""

    async def restart(self) -> None:  # noqa: B027 - a database that outlives its handles has nothing to do here
        """What is left to do for a process restart, once every handle is closed: the next `open` reads what is on disk."""

    async def close(self) -> None:  # noqa: B027 - a database may have nothing to remove
        """Remove the database, once every handle is closed."""
