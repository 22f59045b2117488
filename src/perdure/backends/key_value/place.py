"""A namespace of a key-value store: reading and writing the pieces of runs, without knowing what they mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from perdure.backends.key_value.backend import Backend, Names, Version
from perdure.backends.key_value.document import (
    Chunk,
    Document,
    chunk_key,
    encoded,
    large_columns,
    origins_key,
    parcel_of,
    passing_parcels,
    read_chunk,
    read_document,
)
from perdure.backends.key_value.names import run_name
from perdure.backends.key_value.ranges import above
from perdure.backends.key_value.run import Given
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Claim, Item, RunRow, Signal

# How many requests one verb has under way at once.
_AT_ONCE: Final = 32

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E", Entry, Item, Signal)


class Kept(NamedTuple):
    """A document as it is kept, and the bytes that it is."""

    document: Document
    version: Version | None
    data: bytes


class Place:
    """One namespace. All of it runs on one event loop."""

    def __init__(self, backend: Backend, names: Names, root: str, *, is_shared: bool) -> None:
        self.backend = backend
        self.names = names
        self.root = root
        # Whether others may write here at the same time.
        self.is_shared = is_shared

    def document_key(self, run: str) -> str:
        """Where a run's document is."""
        return f"{self.root}/r/{run}"

    def _folder(self, run: str, incarnation: str) -> str:
        return f"{self.root}/o/{run}/{incarnation}/"

    async def document(self, run: str) -> Kept | None:
        """The document of the run with this name as it is now."""
        found = await self.backend.read(self.document_key(run))
        return None if found is None else Kept(read_document(found.data, run), found.version, found.data)

    async def look(self, run_id: str, look: Callable[[Document, RunRow], Awaitable[A]]) -> A | None:
        """What `look` sees of the run, or None when there is none. It looks again when the run changed under its eyes."""
        while True:
            kept = await self.document(run_name(run_id))
            row = None if kept is None else kept.document.row
            if kept is None or row is None:
                return None
            if row.id != run_id:
                raise SnapshotCorrupt(run_id, "the document", f"it is that of run {row.id!r}")
            try:
                return await look(kept.document, row)
            except SnapshotCorrupt:
                again = await self.document(run_name(run_id))
                if again is not None and again.data == kept.data:
                    raise

    async def put_parcels(self, run_id: str, incarnation: str, parcels: dict[str, bytes]) -> None:
        """Have these beside the document of this incarnation."""
        folder = self._folder(run_name(run_id), incarnation)
        await each(lambda one: self.backend.write(folder + one[0], one[1]), parcels.items())

    async def move_tail(self, run_id: str, document: Document) -> None:
        """Move the end of the journal, which is committed, to a chunk."""
        chunk = await self._moved(
            run_id, document, chunk_key(document.chunks), Chunk(entries=document.tail, items=document.items)
        )
        seqs = {entry.seq for entry in chunk.entries}
        places = {(item.stream, item.n) for item in chunk.items}
        document.chunks += 1
        document.tail = [entry for entry in document.tail if entry.seq not in seqs]
        document.items = [item for item in document.items if (item.stream, item.n) not in places]

    async def move_origins(self, run_id: str, document: Document) -> None:
        """Move what must not be taken twice, and is committed, to a chunk."""
        key = origins_key(document.origin_chunks)
        chunk = await self._moved(run_id, document, key, Chunk(origins=document.origins))
        document.origin_chunks += 1
        document.origins = {origin: seq for origin, seq in document.origins.items() if origin not in chunk.origins}

    async def _moved(self, run_id: str, document: Document, key: str, chunk: Chunk) -> Chunk:
        """The chunk under this key: this one, or that of somebody else who was faster, and as right."""
        path = self._folder(run_name(run_id), document.incarnation) + key
        if await self.backend.write_if(path, encoded(chunk), None) is not None:
            return chunk
        found = await self.backend.read(path)
        if found is None:
            raise SnapshotCorrupt(run_id, f"chunk {key!r}", "it was there and is not any more")
        return read_chunk(found.data, run_id)

    async def history(self, run_id: str, document: Document) -> Chunk:
        """Everything that the run's chunks hold."""
        chunks = [one async for one in self._chunks_backwards(run_id, document.incarnation, document.chunks)]
        folder = self._folder(run_name(run_id), document.incarnation)
        moved = await each(lambda number: self.backend.read(folder + origins_key(number)), range(document.origin_chunks))
        origins = [read_chunk(found.data, run_id).origins for found in moved if found is not None]
        return Chunk(
            [entry for one in chunks for entry in one.entries],
            [item for one in chunks for item in one.items],
            {origin: seq for some in origins for origin, seq in some.items()},
        )

    async def _chunks_backwards(self, run_id: str, incarnation: str, count: int) -> AsyncIterator[Chunk]:
        """The chunks, the last one first, several at a time."""
        folder = self._folder(run_name(run_id), incarnation)
        for end in range(count, 0, -_AT_ONCE):
            numbers = range(end - 1, max(0, end - _AT_ONCE) - 1, -1)
            pages = await each(lambda number: self.backend.read(folder + chunk_key(number)), numbers)
            for number, found in zip(numbers, pages, strict=True):
                if found is None:
                    raise SnapshotCorrupt(run_id, f"chunk {number} of the journal", "it is not there")
                yield read_chunk(found.data, run_id)

    async def entries(self, run_id: str, document: Document, after: int) -> list[Entry]:
        """The entries with a seq above `after`, by seq, whole."""
        missing = above(document.seqs, after)
        found = {entry.seq: entry for entry in document.tail if entry.seq in missing}
        if len(found) < len(missing):
            async for chunk in self._chunks_backwards(run_id, document.incarnation, document.chunks):
                found |= {entry.seq: entry for entry in chunk.entries if entry.seq in missing}
                if len(found) == len(missing):
                    break
        return await self.whole(run_id, document.incarnation, [found[seq] for seq in sorted(found)])

    async def items(self, run_id: str, document: Document, stream: str, after: int, limit: int) -> list[Item]:
        """The first items of a stream numbered above `after`, in order, whole."""
        missing = above(document.streams.get(stream, []), after, max(0, limit))
        found = {item.n: item for item in document.items if item.stream == stream and item.n in missing}
        if len(found) < len(missing):
            async for chunk in self._chunks_backwards(run_id, document.incarnation, document.chunks):
                found |= {item.n: item for item in chunk.items if item.stream == stream and item.n in missing}
                if len(found) == len(missing):
                    break
        return await self.whole(run_id, document.incarnation, [found[n] for n in sorted(found)])

    async def whole(self, run_id: str, incarnation: str, rows: Collection[E]) -> list[E]:
        """The rows with their payloads in place of references to them."""

        async def whole_one(row: E) -> E:
            key = parcel_of(row.payload)
            if key is None:
                return row
            return msgspec.structs.replace(row, payload=await self.parcel(run_id, incarnation, key))

        return await each(whole_one, rows)

    async def whole_row(self, row: RunRow, incarnation: str) -> RunRow:
        """The row with its payloads in place of references to them."""
        columns = large_columns(row)
        payloads = await each(lambda key: self.parcel(row.id, incarnation, key), columns.values())
        return msgspec.structs.replace(row, **dict(zip(columns, payloads, strict=True))) if columns else row

    async def parcel(self, run_id: str, incarnation: str, key: str) -> bytes:
        """A payload that is kept beside the document. Raises `SnapshotCorrupt` when it is not."""
        found = await self.backend.read(self._folder(run_name(run_id), incarnation) + key)
        if found is None:
            raise SnapshotCorrupt(run_id, "a payload", f"its parcel {key!r} is not there")
        return _payload(found.data)

    async def claim(self, given: Given) -> Claim:
        """The claim that was given, with all that the driver needs. What it reads was there when the lease was committed."""
        run_id = given.lease.run_id
        chunks = [one async for one in self._chunks_backwards(run_id, given.incarnation, given.chunks)]
        entries = [entry for chunk in chunks for entry in chunk.entries] + given.tail
        return Claim(
            lease=given.lease,
            run=await self.whole_row(given.row, given.incarnation),
            journal=await self.whole(run_id, given.incarnation, sorted(entries, key=lambda entry: entry.seq)),
            inbox=await self.whole(run_id, given.incarnation, given.inbox),
            inbox_seq=given.inbox_seq,
            item_counts=given.item_counts,
        )

    async def remove_parcels(self, run_id: str, incarnation: str, keys: Iterable[str]) -> None:
        """Take away what nothing refers to any more."""
        folder = self._folder(run_name(run_id), incarnation)
        await each(lambda key: self.backend.remove(folder + key), list(keys))

    async def remove_incarnation(self, run_id: str, document: Document) -> None:
        """Take away everything that is kept beside a document that is no more."""
        folder = self._folder(run_name(run_id), document.incarnation)
        backend: Any = self.backend
        if hasattr(backend, "names"):
            keys = [name.removeprefix(folder) for name in await backend.names(folder)]
        else:
            keys = await self._keys_of(run_id, document)
        await self.remove_parcels(run_id, document.incarnation, keys)

    async def _keys_of(self, run_id: str, document: Document) -> list[str]:
        past = await self.history(run_id, document)
        payloads = [entry.payload for entry in (*past.entries, *document.tail)]
        payloads += [item.payload for item in (*past.items, *document.items)]
        parcels = {key for payload in payloads if (key := parcel_of(payload)) is not None}
        chunks = [*map(chunk_key, range(document.chunks)), *map(origins_key, range(document.origin_chunks))]
        return [*parcels, *passing_parcels(document), *chunks]


def _payload(data: bytes) -> bytes:
    return msgspec.json.decode(data, type=bytes)


async def each(call: Callable[[A], Awaitable[B]], values: Iterable[A]) -> list[B]:
    """What the call gives for each value, in their order; not too many at once."""
    waiting = list(values)
    answers: list[B] = []
    for at in range(0, len(waiting), _AT_ONCE):
        answers += await asyncio.gather(*(call(value) for value in waiting[at : at + _AT_ONCE]))
    return answers
