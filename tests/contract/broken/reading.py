"""Broken names, broken lists, and stores that say what is not so."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from perdure.backends.memory.database import Namespace
from perdure.backends.memory.store import MemoryStore
from perdure.model.records import Created, Item, Lease, NewRun, RunInfo, RunRow
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.store import STANDARD_PARTS, Capability, Durability, Transaction
from tests.contract.broken.table import breaks


def _any(wanted: RunFilter, *fields: str) -> RunFilter:
    """The filter without these fields."""
    return msgspec.structs.replace(wanted, **{name: getattr(EVERY_RUN, name) for name in fields})


@breaks("a_prefix_is_literal")
class ListsByPattern(MemoryStore):
    """A prefix becomes a pattern, as with LIKE or glob."""

    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        lines = await super().list(_any(wanted, "prefix"), limit=10**6, **options)
        pattern = wanted.prefix.replace("_", "?").replace("%", "*") + "*"
        return [line for line in lines if fnmatchcase(line.id, pattern)][:limit]


@breaks("a_prefix_may_end_in_the_highest_character")
class ListsByRange(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        lines = await super().list(_any(wanted, "prefix"), limit=10**6, **options)
        return [line for line in lines if wanted.prefix <= line.id <= wanted.prefix + "\uffff"][:limit]


@breaks("lists_begin_with_what_changed_last")
class ListsTheOldestFirst(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        lines = await super().list(wanted, limit=10**6, **options)
        return lines[::-1][:limit]


@breaks("a_list_goes_on_after_the_last_line_seen")
class ListsTiesOnce(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        before = options.get("before") and (options["before"][0], "\U0010ffff")
        return await super().list(wanted, limit=limit, **{**options, "before": before})


@breaks("lists_refuse_a_limit_that_is_no_positive_number")
class ListsNothingForABadLimit(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        is_good = isinstance(limit, int) and limit > 0
        return await super().list(wanted, limit=limit, **options) if is_good else []


@breaks("lists_can_be_narrowed")
@breaks("counts_can_be_narrowed")
class TakesOneStatus(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        return await super().list(self.first_status(wanted), **options)

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        return await super().count(self.first_status(wanted))

    @staticmethod
    def first_status(wanted: RunFilter) -> RunFilter:
        return msgspec.structs.replace(wanted, status=wanted.status and wanted.status[:1])


@breaks("lists_can_be_narrowed")
class ListsAnyQueueOfAWorkflow(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        return await super().list(wanted if wanted.workflow is None else _any(wanted, "queue"), **options)


@breaks("lists_can_be_narrowed")
class ListsTheEndOfASpan(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        until = wanted.updated_before
        return await super().list(msgspec.structs.replace(wanted, updated_before=until and until + 1), **options)


@breaks("lists_can_be_narrowed")
class LimitsBeforeItFilters(MemoryStore):
    """The filter on metadata is applied to a page, rather than to the runs."""

    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        lines = await super().list(_any(wanted, "metadata"), **options)
        return [line for line in lines if wanted.has_metadata(msgspec.json.encode(line.metadata))]


@breaks("metadata_are_compared_as_json")
class ComparesMetadataAsPythonDoes(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        lines = await super().list(_any(wanted, "metadata"), limit=10**6, **options)
        if wanted.metadata is not None:
            key, value = wanted.metadata
            lines = [line for line in lines if line.metadata.get(key, value) == value]
        return lines[:limit]


@breaks("metadata_are_compared_as_json")
class SearchesMetadataAsText(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, *, limit: int = 100, **options: Any) -> list[RunInfo]:
        lines = await super().list(_any(wanted, "metadata"), limit=10**6, **options)
        text = wanted.metadata_text or b""
        return [line for line in lines if text in msgspec.json.encode(line.metadata)][:limit]


@breaks("a_line_tells_how_a_run_stands")
class ListsWholeErrors(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        lines = await super().list(wanted, **options)
        return [msgspec.structs.replace(line, error=line.error and line.error * 2) for line in lines]


@breaks("a_run_is_counted_while_it_changes")
class CountsStatusByStatus(MemoryStore):
    """A run that goes from one to the other meanwhile is counted twice or not at all."""

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        total = 0
        for status in wanted.statuses:
            total += await super().count(msgspec.structs.replace(wanted, status=(status,)))
            await asyncio.sleep(0)
        return total


@breaks("a_counted_prefix_is_literal")
class CountsByPattern(MemoryStore):
    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        pattern = wanted.prefix.replace("_", "?") + "*"
        return sum(fnmatchcase(line.id, pattern) for line in await self.list(_any(wanted, "prefix"), limit=10**6))


@breaks("run_ids_that_differ_are_different_runs")
class FoldsIds(MemoryStore):
    """Ids go through a function that makes some of them equal."""

    @staticmethod
    def fold(text: str) -> str:
        return text.lower()

    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, id=self.fold(run.id)), **options)

    async def get(self, run_id: str) -> RunRow | None:
        return await super().get(self.fold(run_id))


@breaks("run_ids_that_differ_are_different_runs")
class NormalizesIds(FoldsIds):
    @staticmethod
    def fold(text: str) -> str:
        return unicodedata.normalize("NFC", text)


@breaks("run_ids_that_differ_are_different_runs")
class PadsIds(FoldsIds):
    @staticmethod
    def fold(text: str) -> str:
        return text.rstrip(" ")


@breaks("run_ids_that_differ_are_different_runs")
class CutsIds(FoldsIds):
    @staticmethod
    def fold(text: str) -> str:
        return text[:255]


@breaks("a_run_wakes_for_exactly_what_it_waits_for")
@breaks("signal_names_that_differ_are_different_signals")
class FoldsSignalNames(MemoryStore):
    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        return await super().signal(run_id, name.lower(), payload, **options)


@breaks("namespaces_do_not_see_each_other")
class JoinsPrefixAndId(MemoryStore):
    """The namespace is a string in front of the id."""

    @contextmanager
    def _lock(self) -> Iterator[Namespace]:
        prefix, self._prefix = self._prefix, ""
        try:
            with super()._lock() as namespace:
                yield namespace
        finally:
            self._prefix = prefix

    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, id=self._prefix + run.id), **options)

    async def get(self, run_id: str) -> RunRow | None:
        return await super().get(self._prefix + run_id)


@breaks("a_closed_store_refuses_every_verb")
@breaks("a_closed_store_refuses_the_verbs_of_operators")
@breaks("a_closed_store_refuses_the_verbs_of_schedules")
@breaks("a_closed_store_refuses_the_verbs_of_streams")
class ClosesNothing(MemoryStore):
    async def close(self) -> None:
        pass


@breaks("a_store_for_one_process_cannot_be_carried_into_another")
class CanBePickled(MemoryStore):
    def __reduce__(self) -> Any:
        return (MemoryStore, ())


@breaks("a_store_that_keeps_nothing_says_so")
class SaysItIsOnDisk(MemoryStore):
    @property
    def durability(self) -> Durability:
        return "disk"


@breaks("a_store_declares_what_its_factory_declares")
class DeclaresTooMuch(MemoryStore):
    @property
    def capabilities(self) -> frozenset[Capability]:
        return STANDARD_PARTS | {"transaction"}


@breaks("a_store_without_operator_verbs_refuses_them", parts=frozenset())
@breaks("a_store_without_schedules_refuses_them", parts=frozenset())
@breaks("a_store_without_streams_refuses_them", parts=frozenset())
class AnnouncesNoPart(MemoryStore):
    """Does what it does not announce."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset()


@breaks("a_store_without_transactions_refuses_them")
class PretendsTransactions(MemoryStore):
    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:
        @asynccontextmanager
        async def pretend() -> AsyncIterator[Transaction]:
            yield None  # type: ignore[misc]

        return pretend()


@breaks("processes_share_the_due_runs_out", "durable", "shared")
@breaks("processes_bring_each_restored_run_one_input", "durable", "shared")
@breaks("processes_restore_one_run_whole", "durable", "shared")
@breaks("what_was_restored_survives_a_restart", "durable", "shared")
@breaks("a_run_goes_on_after_a_restart", "durable", "shared")
@breaks("everything_acknowledged_survives_a_restart", "durable", "shared")
class Durable(MemoryStore):
    """Says that it is durable and shared; whether that is true depends on what its factory's restart leaves."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return STANDARD_PARTS | {"durable", "shared"}

    @property
    def durability(self) -> Durability:
        return "disk"


class Unchecked:
    """Leaves the verbs of a broken store as they are written: `ChecksIds` does not wrap them."""

    def __init_subclass__(cls) -> None:
        pass


@breaks("ids_that_are_no_text_are_refused")
class ReadsByOperator(Unchecked, MemoryStore):
    """An id that is a dict selects a run, as a filter of MongoDB does."""

    async def get(self, run_id: Any) -> RunRow | None:
        lines = [] if isinstance(run_id, str) else await self.list()
        return await super().get(lines[0].id if lines else run_id)


@breaks("text_that_is_no_id_is_refused")
class FindsNothingUnderNoId(Unchecked, MemoryStore):
    async def get(self, run_id: str) -> RunRow | None:
        return await super().get(run_id) if run_id else None


@breaks("a_subclass_of_str_is_taken_for_its_text")
class AsksTheIdForItsText(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, id=str(run.id)), **options)


@breaks("a_worker_is_kept_with_its_last_sign_of_life")
class WorkersAreNeverDropped(MemoryStore):
    async def drop_worker(self, worker_id: str) -> None: ...


@breaks("a_worker_is_seen_by_the_clock_of_the_store")
class WorkersAreSeenOnlyOnce(MemoryStore):
    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        if now is not None or not await self.workers():
            await super().put_worker(worker_id, info, now=now)


@breaks("operators_ids_that_are_no_text_are_refused")
class DeletesNothingForADict(Unchecked, MemoryStore):
    async def delete(self, run_id: str) -> None:
        if isinstance(run_id, str):
            await super().delete(run_id)


@breaks("schedules_ids_that_are_no_text_are_refused")
class DropsNothingForADict(Unchecked, MemoryStore):
    async def drop_schedule(self, schedule_id: str) -> bool:
        return isinstance(schedule_id, str) and await super().drop_schedule(schedule_id)


@breaks("streams_names_that_are_no_text_are_refused")
class HasNoItemsForADict(Unchecked, MemoryStore):
    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> list[Item]:
        return await super().items(run_id, stream, after=after, limit=limit) if isinstance(stream, str) else []
