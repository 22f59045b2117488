"""A namespace of a key-value store: reading and writing the pieces of runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from perdure.backends.base.damaged_runs import raise_damage
from perdure.backends.key_value.backend import Backend, NameIndex, Version
from perdure.backends.key_value.editable_run import LeaseGrant
from perdure.backends.key_value.keys import run_name
from perdure.backends.key_value.run_document import (
    JournalChunk,
    RunDocument,
    blob_key,
    chunk_key,
    decode_chunk,
    decode_document,
    encode,
    items_key,
    large_columns,
    numbers_above,
    origins_key,
    temporary_blobs,
)
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Claim, Item, RunRow, Signal

# How many requests one verb has under way at once.
_AT_ONCE: Final = 32

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E", Entry, Item, Signal)


class StoredDocument(NamedTuple):
    """A document as it is stored, with its version and its bytes."""

    document: RunDocument
    version: Version | None
    data: bytes


class KeyValueNamespace:
    """One namespace. All of it runs on one event loop."""

    def __init__(self, backend: Backend, names: NameIndex, root: str, *, is_shared: bool) -> None:
        self.backend = backend
        self.names = names
        self.root = root
        # Whether other processes may write here at the same time.
        self.is_shared = is_shared

    def document_key(self, name: str) -> str:
        """The key of the document of the run with this name."""
        return f"{self.root}/r/{name}"

    def _folder(self, run_id: str, incarnation: str) -> str:
        return f"{self.root}/o/{run_name(run_id)}/{incarnation}/"

    async def load_document(self, name: str, run_id: str = "") -> StoredDocument | None:
        """The document of the run with this name as it is now. Raises `SnapshotCorrupt`, which names the id if it is given."""
        found = await self.backend.read(self.document_key(name))
        return None if found is None else StoredDocument(decode_document(found.data, run_id or name), found.version, found.data)

    async def read(self, run_id: str, look: Callable[[RunDocument, RunRow], Awaitable[A]]) -> A | None:
        """What `look` returns for the run, or None when there is none. It is called again if the run changed meanwhile."""
        while True:
            stored = await self.load_document(run_name(run_id), run_id)
            row = None if stored is None else stored.document.row
            if stored is None or row is None:
                return None
            if row.id != run_id:
                raise SnapshotCorrupt(run_id, "the document", f"it is that of run {row.id!r}")
            try:
                return await look(stored.document, row)
            except SnapshotCorrupt:
                again = await self.load_document(run_name(run_id), run_id)
                if again is not None and again.data == stored.data:
                    raise

    async def read_row(self, run_id: str) -> RunRow | None:
        """The run's row with its payloads, or None when there is no run."""
        return await self.read(run_id, lambda document, row: self.load_columns(row, document.incarnation))

    async def put_blobs(self, run_id: str, incarnation: str, blobs: dict[str, bytes]) -> None:
        """Write these beside the document of this incarnation."""
        folder = self._folder(run_id, incarnation)
        await map_concurrently(lambda blob: self.backend.write(folder + blob[0], blob[1]), blobs.items())

    async def move_tail(self, run_id: str, document: RunDocument) -> None:
        """Move the ends of the journal and of the streams, which are committed, to a chunk each."""
        if document.tail:
            chunk = await self._put_chunk(run_id, document, chunk_key(document.chunks), JournalChunk(entries=document.tail))
            seqs = {entry.seq for entry in chunk.entries}
            document.chunks += 1
            document.tail = [entry for entry in document.tail if entry.seq not in seqs]
        if document.items:
            chunk = await self._put_chunk(run_id, document, items_key(document.item_chunks), JournalChunk(items=document.items))
            numbers = {(item.stream, item.n) for item in chunk.items}
            document.item_chunks += 1
            document.items = [item for item in document.items if (item.stream, item.n) not in numbers]

    async def move_origins(self, run_id: str, document: RunDocument) -> None:
        """Move the origins, which are committed, to a chunk."""
        key = origins_key(document.origin_chunks)
        chunk = await self._put_chunk(run_id, document, key, JournalChunk(origins=document.origins))
        document.origin_chunks += 1
        document.origins = {origin: seq for origin, seq in document.origins.items() if origin not in chunk.origins}

    async def _put_chunk(self, run_id: str, document: RunDocument, key: str, chunk: JournalChunk) -> JournalChunk:
        """The chunk under this key: this one, or that of a concurrent writer, which is as good."""
        path = self._folder(run_id, document.incarnation) + key
        if await self.backend.write_if(path, encode(chunk), None) is not None:
            return chunk
        found = await self.backend.read(path)
        if found is None:
            raise SnapshotCorrupt(run_id, f"chunk {key!r}", "it was there and is not any more")
        return decode_chunk(found.data, run_id)

    async def load_history(self, run_id: str, document: RunDocument) -> JournalChunk:
        """Everything that the run's chunks hold."""
        incarnation, numbers = document.incarnation, range(document.first_chunk, document.chunks)
        entries = [one.entries async for one in self._chunks_backwards(run_id, incarnation, numbers)]
        items = [one.items async for one in self._chunks_backwards(run_id, incarnation, range(document.item_chunks), items_key)]
        folder = self._folder(run_id, incarnation)
        numbers = range(document.origin_chunks)
        moved = await map_concurrently(lambda number: self.backend.read(folder + origins_key(number)), numbers)
        origins = [decode_chunk(found.data, run_id).origins for found in moved if found is not None]
        return JournalChunk(
            [entry for some in entries for entry in some],
            [item for some in items for item in some],
            {origin: seq for some in origins for origin, seq in some.items()},
        )

    async def _chunks_backwards(
        self, run_id: str, incarnation: str, numbers: range, key: Callable[[int], str] = chunk_key
    ) -> AsyncIterator[JournalChunk]:
        """The chunks with these numbers, the last one first, several at a time."""
        folder = self._folder(run_id, incarnation)
        backwards = numbers[::-1]
        for at in range(0, len(backwards), _AT_ONCE):
            some = backwards[at : at + _AT_ONCE]
            values = await map_concurrently(lambda number: self.backend.read(folder + key(number)), some)
            for number, found in zip(some, values, strict=True):
                if found is None:
                    raise SnapshotCorrupt(run_id, f"chunk {key(number)!r} of the journal", "it is not there")
                yield decode_chunk(found.data, run_id)

    async def load_entries(self, run_id: str, document: RunDocument, after: int) -> list[Entry]:
        """The entries with a seq above `after`, by seq, with their payloads."""
        wanted = numbers_above(document.seqs, after)
        found = {entry.seq: entry for entry in document.tail if entry.seq in wanted}
        if len(found) < len(wanted):
            numbers = range(document.first_chunk, document.chunks)
            async for chunk in self._chunks_backwards(run_id, document.incarnation, numbers):
                found |= {entry.seq: entry for entry in chunk.entries if entry.seq in wanted}
                if len(found) == len(wanted):
                    break
        return await self.load_payloads(run_id, document.incarnation, [found[seq] for seq in sorted(found)])

    async def load_items(self, run_id: str, document: RunDocument, stream: str, after: int, limit: int) -> list[Item]:
        """The first items of a stream numbered above `after`, in order, with their payloads."""
        wanted = numbers_above(document.streams.get(stream, []), after, max(0, limit))
        found = {item.n: item for item in document.items if item.stream == stream and item.n in wanted}
        if len(found) < len(wanted):
            numbers = range(document.item_chunks)
            async for chunk in self._chunks_backwards(run_id, document.incarnation, numbers, items_key):
                found |= {item.n: item for item in chunk.items if item.stream == stream and item.n in wanted}
                if len(found) == len(wanted):
                    break
        return await self.load_payloads(run_id, document.incarnation, [found[n] for n in sorted(found)])

    async def load_payloads(self, run_id: str, incarnation: str, rows: Collection[E]) -> list[E]:
        """The rows with their payloads in place of references to blobs."""

        async def load(row: E) -> E:
            key = blob_key(row.payload)
            if key is None:
                return row
            return msgspec.structs.replace(row, payload=await self._load_blob(run_id, incarnation, key))

        return await map_concurrently(load, rows)

    async def load_columns(self, row: RunRow, incarnation: str, names: Collection[str] | None = None) -> RunRow:
        """The row with its payloads, or those in these columns, in place of references to blobs."""
        columns = {name: key for name, key in large_columns(row).items() if names is None or name in names}
        payloads = await map_concurrently(lambda key: self._load_blob(row.id, incarnation, key), columns.values())
        return msgspec.structs.replace(row, **dict(zip(columns, payloads, strict=True))) if columns else row

    async def _load_blob(self, run_id: str, incarnation: str, key: str) -> bytes:
        """A payload that is kept beside the document. Raises `SnapshotCorrupt` when it is not there."""
        found = await self.backend.read(self._folder(run_id, incarnation) + key)
        if found is None:
            raise SnapshotCorrupt(run_id, "a payload", f"its blob {key!r} is not there")
        with raise_damage(run_id, f"the blob {key!r}"):
            return msgspec.json.decode(found.data, type=bytes)

    async def load_claim(self, grant: LeaseGrant) -> Claim:
        """The claim, with all that the driver needs. What this reads was there when the lease was committed."""
        run_id = grant.lease.run_id
        chunks = [one async for one in self._chunks_backwards(run_id, grant.incarnation, grant.chunks)]
        entries = [entry for chunk in chunks for entry in chunk.entries] + grant.tail
        return Claim(
            lease=grant.lease,
            run=await self.load_columns(grant.row, grant.incarnation),
            journal=await self.load_payloads(run_id, grant.incarnation, sorted(entries, key=lambda entry: entry.seq)),
            inbox=await self.load_payloads(run_id, grant.incarnation, grant.inbox),
            inbox_seq=grant.inbox_seq,
            item_counts=grant.item_counts,
        )

    async def remove_blobs(self, run_id: str, incarnation: str, keys: Iterable[str]) -> None:
        """Delete what nothing refers to any more."""
        folder = self._folder(run_id, incarnation)
        await map_concurrently(lambda key: self.backend.remove(folder + key), list(keys))

    async def remove_incarnation(self, run_id: str, document: RunDocument) -> None:
        """Delete everything beside a document that was replaced or deleted."""
        folder = self._folder(run_id, document.incarnation)
        backend: Any = self.backend
        if hasattr(backend, "names"):
            keys = [name.removeprefix(folder) for name in await backend.names(folder)]
        else:
            keys = await self._keys_beside(run_id, document)
        await self.remove_blobs(run_id, document.incarnation, keys)

    async def _keys_beside(self, run_id: str, document: RunDocument) -> list[str]:
        history = await self.load_history(run_id, document)
        payloads = [entry.payload for entry in (*history.entries, *document.tail)]
        payloads += [item.payload for item in (*history.items, *document.items)]
        blobs = {key for payload in payloads if (key := blob_key(payload)) is not None}
        chunks = [
            *map(chunk_key, range(document.first_chunk, document.chunks)),
            *map(items_key, range(document.item_chunks)),
            *map(origins_key, range(document.origin_chunks)),
        ]
        return [*blobs, *temporary_blobs(document), *chunks]

    async def remove_journal(self, run_id: str, incarnation: str, chunks: range, tail: Iterable[Entry]) -> None:
        """Delete a journal that its run has left behind: these chunks, and the blobs of their entries and of the tail's."""
        entries = [*tail]
        async for chunk in self._chunks_backwards(run_id, incarnation, chunks):
            entries += chunk.entries
        blobs = {key for entry in entries if (key := blob_key(entry.payload)) is not None}
        await self.remove_blobs(run_id, incarnation, [*map(chunk_key, chunks), *blobs])


async def map_concurrently(call: Callable[[A], Awaitable[B]], values: Iterable[A]) -> list[B]:
    """What the call returns for each value, in their order; a bounded number of calls is under way at once."""
    waiting = list(values)
    results: list[B] = []
    for at in range(0, len(waiting), _AT_ONCE):
        results += await asyncio.gather(*(call(value) for value in waiting[at : at + _AT_ONCE]))
    return results
