"""Broken streams: readers that are not woken, and items that outlive their run or are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from perdure.backends.memory.store import MemoryStore
from perdure.model.journal import Entry
from perdure.model.records import Created, Item, Lease, NewRun, Pulse
from tests.contract.broken.table import breaks


@breaks("a_watch_for_items_is_woken_by_new_items")
class WakesNoReader(MemoryStore):
    async def watch(self, timeout: float, *, items: bool = False) -> None:
        await super().watch(timeout)


@breaks("a_watch_for_items_is_woken_by_new_items")
class WakesReadersByItemsAlone(MemoryStore):
    """Wakes a reader only by a record that has no entries."""

    async def record(self, lease: Lease, entries: Sequence[Entry] = (), *, items: Sequence[Item] = (), **options: Any) -> Pulse:
        if not entries:
            return await super().record(lease, items=items, **options)
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
            run.write(lease, entries, options.get("consume", ()), items)
            return run.pulse()


@breaks("a_record_takes_thousands_of_items")
class TakesAThousandItems(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), *, items: Sequence[Item] = (), **options: Any) -> Pulse:
        return await super().record(lease, entries, items=items[:1000], **options)


@breaks("a_purged_run_leaves_no_items")
class PurgeLeavesItems(MemoryStore):
    _left: dict[str, dict[tuple[str, int], Item]]

    async def purge(self, older_than: float, **options: Any) -> int:
        with self._lock() as namespace:
            self._left = {run_id: run.items for run_id, run in namespace.runs.items()}
        return await super().purge(older_than, **options)

    async def create(self, run: NewRun, **options: Any) -> Created:
        created = await super().create(run, **options)
        left = getattr(self, "_left", {}).get(run.id)
        if left is not None and created.claim is not None:
            created.claim.item_counts.update({stream: 1 for stream, _ in left})
        return created


@breaks("a_reopened_run_keeps_its_items")
class ReopenDropsItems(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], **options: Any) -> None:
        await super().reopen(run_id, drop, **options)
        with self._lock() as namespace:
            namespace.runs[run_id].items.clear()
