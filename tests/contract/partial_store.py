"""The memory store with only some parts of the contract, as an author who has just begun would have it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final, NoReturn

from perdure.backends.memory.database import MemoryDatabase
from perdure.backends.memory.store import MemoryStore
from perdure.errors import StoreCapabilityError
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse
from perdure.store import Capability, OperatorStore, ScheduleStore, Store, StreamStore

PROTOCOLS: Final[dict[Capability, type]] = {"operators": OperatorStore, "schedules": ScheduleStore, "streams": StreamStore}


class PartialStore:
    """Has the members of `Store` and of the parts given, and no others."""

    def __init__(self, database: MemoryDatabase, *parts: Capability, prefix: str = "") -> None:
        self._store = MemoryStore(database, prefix=prefix)
        self.capabilities: Final = frozenset(parts)
        protocols = [Store, *(PROTOCOLS[part] for part in parts)]
        self._members = {name for protocol in protocols for name in vars(protocol) if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        if name not in self._members:
            raise AttributeError(f"PartialStore has no attribute {name!r}")
        return getattr(self._store, name)

    def __reduce__(self) -> NoReturn:
        raise StoreCapabilityError("partial", "way into another process")

    def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Awaitable[Pulse]:
        if not options.keys() <= ({"consume", "now", "items"} if "streams" in self.capabilities else {"consume", "now"}):
            raise TypeError(f"record() got an unexpected keyword argument: {sorted(options)}")
        return self._store.record(lease, entries, **options)
