"""Which runs there are: from due keys and exists keys to runs, for `claim`, `due`, `list`, `count` and `purge`.

A due key may be left over from a crash, or belong to a change that is under way. A key that the run's document does not name is
ignored, and deleted when it is certain that no writer is about to name it. If only this process writes, that is certain at once;
if others write too, the document is written once more first, so that a concurrent writer must start again, with another due key.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from perdure.backends.base.damaged_runs import report
from perdure.backends.key_value import verbs
from perdure.backends.key_value.editable_run import EditableRun
from perdure.backends.key_value.keys import (
    EXISTS_KEYS,
    DueKey,
    DuePartition,
    ExistsKey,
    bucket_of,
    bucket_start,
    run_name,
    short_hash,
)
from perdure.backends.key_value.namespace import KeyValueNamespace, StoredDocument, map_concurrently
from perdure.backends.key_value.run_document import key_names
from perdure.backends.key_value.run_writer import RunWriter
from perdure.codec.outcomes import FAILED, run_info
from perdure.errors import SnapshotCorrupt
from perdure.model.durations import microseconds
from perdure.model.records import EndStatus, RunInfo, RunRow
from perdure.model.run_filter import RunFilter, page_of

_AT_ONCE: Final = 32
# How many buckets of the future are listed to find out what is due next.
_FUTURE_BUCKETS: Final = 4
# For how many seconds a key that no document names is left to a writer that may be about to name it.
_GRACE: Final = 5.0
_SUSPECTS: Final = 10_000


class KeyedRun(NamedTuple):
    """A due key, and the row of the run whose document names it."""

    due_key: DueKey
    row: RunRow


class SeenRun(NamedTuple):
    """A run with the keys that were listed for it. While it changes there may be several, or no due key."""

    name: str
    id_start: bytes
    due_keys: list[DueKey]
    exists_keys: list[ExistsKey]

    @property
    def key_names(self) -> list[str]:
        """The names of all its keys."""
        return [key.name for key in self.due_keys] + [key.name for key in self.exists_keys]


class RunLookup:
    """The due keys and exists keys of one namespace."""

    def __init__(self, namespace: KeyValueNamespace, writer: RunWriter) -> None:
        self._namespace = namespace
        self._writer = writer
        # Keys that no document named, and when that was first seen.
        self._suspects: dict[str, float] = {}

    async def list_all(self) -> list[SeenRun]:
        """Every run that existed from beginning to end of this call, and some of the others."""
        folders = [*DuePartition, EXISTS_KEYS]
        *partitions, exists_names = await map_concurrently(lambda folder: self._namespace.names.within(f"{folder}/"), folders)
        due_keys: defaultdict[str, list[DueKey]] = defaultdict(list)
        exists_keys: defaultdict[str, list[ExistsKey]] = defaultdict(list)
        for due_key in (due_key for names in partitions for due_key in _read_due_keys(names)):
            due_keys[due_key.run].append(due_key)
        for exists_key in (key for name in exists_names if (key := ExistsKey.read(name)) is not None):
            exists_keys[exists_key.run].append(exists_key)
        starts = {run: keys[0].id_start for run, keys in due_keys.items()}
        starts |= {run: keys[0].id_start for run, keys in exists_keys.items()}
        return [SeenRun(run, start, due_keys.get(run, []), exists_keys.get(run, [])) for run, start in starts.items()]

    def certain_key(self, seen: SeenRun) -> DueKey | None:
        """The due key that can be trusted without its document: the run has no other, and no key of it is a suspect."""
        has_one_of_each = len(seen.due_keys) == 1 and len(seen.exists_keys) == 1
        if not has_one_of_each or any(name in self._suspects for name in seen.key_names):
            return None
        return seen.due_keys[0]

    async def load_row(self, seen: SeenRun) -> RunRow | None:
        """The run's row, whichever due key it has by now; None when there is no run or it cannot be read.

        Of its large columns it has those that a list needs: the metadata, and the outcome of a failed run.
        """
        stored = await self._load(seen.name, seen.id_start, seen.key_names)
        row = None if stored is None else stored.document.row
        if stored is None or row is None:
            return None
        try:
            names = ("metadata", "outcome") if row.status in FAILED else ("metadata",)
            return await self._namespace.load_columns(row, stored.document.incarnation, names)
        except SnapshotCorrupt:  # it was reopened or deleted meanwhile, or is damaged; a line does without
            return row

    async def is_live(self, run_id: str | None) -> bool:
        """Whether there is such a run and it has not ended."""
        if run_id is None:
            return False
        stored = await self._namespace.load_document(run_name(run_id), run_id)
        row = None if stored is None else stored.document.row
        return row is not None and not row.ended

    async def list_partition(self, partition: DuePartition) -> list[DueKey]:
        """Every due key of a partition."""
        return _read_due_keys(await self._namespace.names.within(f"{partition}/"))

    async def list_timed(self, now: int) -> tuple[list[DueKey], list[DueKey]]:
        """The due keys whose instant has come, and of the others at least those that come next."""
        buckets = await self._namespace.names.folders(f"{DuePartition.DUE}/")
        past = [bucket for bucket in buckets if bucket <= bucket_of(now)]
        future = [bucket for bucket in buckets if bucket > bucket_of(now)]
        names = await map_concurrently(
            lambda bucket: self._namespace.names.within(f"{DuePartition.DUE}/{bucket}/"), [*past, *future[:_FUTURE_BUCKETS]]
        )
        due_keys = [due_key for some in names for due_key in _read_due_keys(some)]
        due_keys += await self.list_partition(DuePartition.LEASED)
        later = [due_key for due_key in due_keys if due_key.wake_at > now]
        later += _first_instants(future[_FUTURE_BUCKETS : _FUTURE_BUCKETS + 1])
        return [due_key for due_key in due_keys if due_key.wake_at <= now], later

    async def in_order(self, due_keys: Iterable[DueKey], order: Callable[[DueKey], Any]) -> AsyncIterator[KeyedRun]:
        """The due keys that a document names, with their runs, in this order and then by id."""

        def order_and_id(due_key: DueKey) -> tuple[Any, bytes]:
            return order(due_key), due_key.id_start

        batch: list[DueKey] = []
        for _, group in groupby(sorted(due_keys, key=order_and_id), key=order_and_id):
            batch += group
            if len(batch) >= _AT_ONCE:
                for keyed in await self._load_in_order(batch, order):
                    yield keyed
                batch = []
        for keyed in await self._load_in_order(batch, order):
            yield keyed

    async def _load_in_order(self, due_keys: list[DueKey], order: Callable[[DueKey], Any]) -> list[KeyedRun]:
        found = [keyed for keyed in await map_concurrently(self._load_keyed, due_keys) if keyed is not None]
        return sorted(found, key=lambda keyed: (order(keyed.due_key), keyed.row.id))

    async def _load_keyed(self, due_key: DueKey) -> KeyedRun | None:
        stored = await self._load(due_key.run, due_key.id_start, [due_key.name])
        row = None if stored is None else stored.document.row
        if stored is None or row is None or stored.document.due_key != due_key.name:
            return None
        return KeyedRun(due_key, row)

    async def _load(self, name: str, id_start: bytes, names: Iterable[str]) -> StoredDocument | None:
        """The run's document, once it is clear which of these key names it names. None also when it cannot be read."""
        try:
            stored = await self._namespace.load_document(name, id_start.decode(errors="replace"))
        except SnapshotCorrupt as problem:
            report(problem)
            return None  # reading the run raises this; here it must not hold up the others
        named = key_names(None if stored is None else stored.document)
        for key_name in names:
            if key_name in named:
                self._suspects.pop(key_name, None)
            else:
                await self._suspect(name, key_name)
        if stored is not None and named:
            self._writer.remember(name, stored)
        return stored

    async def _suspect(self, name: str, key_name: str) -> None:
        """Delete a key that the run's document does not name, if it has not done so for a while."""
        if len(self._suspects) > _SUSPECTS:
            self._suspects.clear()
        seen_at = self._suspects.setdefault(key_name, time.monotonic())
        if self._namespace.is_shared and time.monotonic() - seen_at < _GRACE:
            return
        if await self._writer.change_named(name, lambda run: self._disown(run, key_name)):
            await self._namespace.names.discard(key_name)
        self._suspects.pop(key_name, None)

    def _disown(self, run: EditableRun, key_name: str) -> bool:
        """Whether the document does not name this key, and no concurrent writer can still name it."""
        if key_name in key_names(run.document):
            return False
        if self._namespace.is_shared:
            run.touch()
        return True


def _read_due_keys(names: Iterable[str]) -> list[DueKey]:
    return [due_key for name in names if (due_key := DueKey.read(name)) is not None]


def _first_instants(buckets: list[str]) -> list[DueKey]:
    """For buckets that were not listed: that a run may be due at their beginning."""
    return [DueKey("", bucket_start(bucket), 0, "pending", 0, "", 0, "", b"", "") for bucket in buckets]


class KeyFilter:
    """A filter as far as the keys of a run tell; they have hashes of the workflow's and the queue's name."""

    def __init__(self, wanted: RunFilter, before: tuple[int, str] | None = None) -> None:
        self._wanted = wanted
        self._encoded = wanted.prefix.encode()
        self._workflow = None if wanted.workflow is None else short_hash(wanted.workflow)
        self._queue = None if wanted.queue is None else short_hash(wanted.queue)
        self._first = 0 if wanted.updated_after is None else wanted.updated_after
        lasts = (None if before is None else before[0], None if wanted.updated_before is None else wanted.updated_before - 1)
        self._last = min((last for last in lasts if last is not None), default=None)

    def may_match(self, seen: SeenRun) -> bool:
        """Whether the beginning of the id does not rule the run out."""
        length = min(len(seen.id_start), len(self._encoded))
        return seen.id_start[:length] == self._encoded[:length]

    def may_match_key(self, due_key: DueKey) -> bool:
        """Whether the rest of the due key does not rule the run out either."""
        return (
            (self._wanted.status is None or due_key.status in self._wanted.status)
            and self._workflow in (None, due_key.workflow)
            and self._queue in (None, due_key.queue)
            and self._first <= due_key.updated_at
            and (self._last is None or due_key.updated_at <= self._last)
        )

    def is_decided_by(self, due_key: DueKey) -> bool:
        """Whether a run that may match by this due key surely does."""
        return len(self._encoded) <= len(due_key.id_start) and self._wanted.metadata is None


async def list_runs(lookup: RunLookup, wanted: RunFilter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """The runs that are asked for, last changed first."""
    by_key = KeyFilter(wanted, before)
    uncertain: list[SeenRun] = []
    certain: list[tuple[int, SeenRun]] = []
    for seen in await lookup.list_all():
        due_key = lookup.certain_key(seen)
        if by_key.may_match(seen) and due_key is None:
            uncertain.append(seen)
        elif by_key.may_match(seen) and due_key is not None and by_key.may_match_key(due_key):
            certain.append((-due_key.updated_at, seen))
    # Any of the uncertain ones may be the first or the last.
    rows = _wanted_rows(await map_concurrently(lookup.load_row, uncertain), wanted, before)
    for order, batch in _batches(certain, min(limit, _AT_ONCE)):
        rows += _wanted_rows(await map_concurrently(lookup.load_row, batch), wanted, before)
        if sum(-row.updated_at <= order for row in rows) >= limit:
            break
    return [run_info(row) for row in page_of(rows, before, limit)]


def _wanted_rows(rows: Iterable[RunRow | None], wanted: RunFilter, before: tuple[int, str] | None) -> list[RunRow]:
    found = [row for row in rows if row is not None and wanted.matches(row)]
    return page_of(found, before, len(found))


def _batches(runs: list[tuple[int, SeenRun]], size: int) -> Iterator[tuple[int, list[SeenRun]]]:
    """The runs in order, `size` at a time or some more, with the order of the last: equal ones are in one batch."""
    batch: list[SeenRun] = []
    order = 0
    for order, group in groupby(sorted(runs, key=itemgetter(0)), key=itemgetter(0)):
        batch += [seen for _, seen in group]
        if len(batch) >= size:
            yield order, batch
            batch = []
    if batch:
        yield order, batch


async def count_runs(lookup: RunLookup, wanted: RunFilter) -> int:
    """How many runs that are asked for there are. A document is read only where the keys leave a doubt."""
    by_key = KeyFilter(wanted)
    certain, uncertain = 0, []
    for seen in await lookup.list_all():
        if not by_key.may_match(seen):
            continue
        due_key = lookup.certain_key(seen)
        if due_key is None:
            uncertain.append(seen)
        elif by_key.may_match_key(due_key):
            if by_key.is_decided_by(due_key):
                certain += 1
            else:
                uncertain.append(seen)
    rows = await map_concurrently(lookup.load_row, uncertain)
    return certain + sum(row is not None and wanted.matches(row) for row in rows)


async def purge(
    lookup: RunLookup,
    writer: RunWriter,
    older_than: float,
    status: Collection[EndStatus],
    workflow: str | None,
    limit: int,
    now: int,
) -> int:
    """Delete ended runs, oldest first."""
    last, short = now - microseconds(older_than), None if workflow is None else short_hash(workflow)
    ended = await lookup.list_partition(DuePartition.ENDED)
    old = [key for key in ended if key.updated_at <= last and key.status in status and short in (None, key.workflow)]
    deleted = 0
    async for keyed in lookup.in_order(old, lambda due_key: due_key.updated_at):
        if deleted >= limit:
            break
        row = keyed.row
        if workflow in (None, row.workflow) and not await lookup.is_live(row.parent_id):
            deleted += await writer.change(row.id, lambda run: verbs.delete(run, ended_before=last))
    return deleted
