"""The streams of one drive: items are numbered here and go to the store with the next record, or within `SEND_WITHIN` seconds.

Nothing is emitted twice by a replay. The items of the body are counted in each stream: the store has a first part of them, which
the last item of the stream tells (`StreamRecord.body_count`), and a replay that emits these again only counts them. The items of
a recorded step are not emitted again, because the step does not run again. They are in the store before its result is: a write
takes every item that is there. A step that runs again emits again, under another attempt or epoch.

At most about `MOST_ITEMS` items and `MOST_BYTES` wait in memory: then a step's `emit` waits for the store. The body's `emit` must
not simply wait: other branches would go on meanwhile, and on a replay, which does not wait, in another order. So after every so
many items, counted on a replay too, it is a hold (`Calls.hold`): nothing reaches the body until it ends, at a rest, and on the
first run not before there is room.

How a step has ended that emitted is written with its result, as an `AttemptEnd`: a reader needs it when the run has started over
and its journal is gone.

After `runtime.retry` the body goes another way from the first result that was dropped. What it had emitted after that stays in
the stream, but does not count as emitted: the stream is read once to find out how many items do. A run that starts over with
another input goes on with its streams, and its body counts from 0 again.
"""

from __future__ import annotations

import asyncio
import contextvars
from bisect import bisect_left
from collections.abc import Awaitable, Generator, Iterable, Mapping
from concurrent.futures import wait
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from perdure.aio.own_tasks import current
from perdure.body.body_queue import BodyQueue
from perdure.body.calls import Calls
from perdure.codec import Codec
from perdure.engine.recorder import Recorder
from perdure.errors import SnapshotCorrupt, StreamEnded, StreamFull, ValueNotStorable, name_step
from perdure.model.journal import Entry
from perdure.model.records import Item, RunRow, check_positive
from perdure.model.stream_items import ATTEMPT_ENDS, AttemptEnd, StreamRecord, check_stream, decode_record, encode_record
from perdure.stepspec import StepInfo
from perdure.store import StreamStore

# How long an item waits for a record that it can go with.
SEND_WITHIN: Final = 0.05
# How much may wait in memory, and how much the body emits between two turns.
MOST_ITEMS: Final = 1000
MOST_BYTES: Final = 1 << 20
# What an item counts beyond its payload.
_OVERHEAD: Final = 100
# The longest value of an item: many go with one write, and what a store takes at once is limited.
MOST_VALUE_BYTES: Final = 1 << 20
# How often a thread that waits for the event loop looks whether that is still there.
_LOOK_SECONDS: Final = 1.0
_PAGE: Final = 1000
_NULL: Final = msgspec.Raw(b"null")


class StreamOwner(Protocol):
    """The drive, as its streams see it."""

    @property
    def run(self) -> RunRow: ...
    @property
    def epoch(self) -> int: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def calls(self) -> Calls: ...
    @property
    def body(self) -> BodyQueue: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def executing(self) -> Mapping[str, int]: ...
    @property
    def may_record(self) -> bool: ...
    def check_open(self) -> None: ...
    def open_streams(self) -> Streams | None: ...


class _Stream:
    """One stream of the run."""

    __slots__ = ("emitted", "is_ended", "length", "stored")

    def __init__(self, length: int = 0, stored: int = 0) -> None:
        # The position of the next item.
        self.length = length
        # How many items of the body the store had when the drive began, and how many the body has emitted in this drive.
        self.stored = stored
        self.emitted = 0
        self.is_ended = False


class _Attempt(NamedTuple):
    """The attempt of a step that emitted last, and the index of its next item."""

    number: int
    next_index: int


class Streams:
    """Numbers the items of one drive and hands them to its recorder. Belongs to the event loop of the drive."""

    def __init__(self, drive: StreamOwner, lengths: Mapping[str, int]) -> None:
        self._drive = drive
        self._loop = asyncio.get_running_loop()
        self._streams = {name: _Stream(length) for name, length in lengths.items()}
        self._attempts: dict[str, _Attempt] = {}
        self._ends = self._streams.pop(ATTEMPT_ENDS, _Stream())
        # Steps of which a retry has dropped results: attempts that had succeeded do not count any more.
        self._dropped: frozenset[str] = frozenset()
        # What waits in memory, the write in flight included.
        self._count = self._bytes = 0
        # What the body has emitted since its last turn.
        self._turn_count = self._turn_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._is_closed = False
        drive.recorder.on_items_written = self._take_acknowledgement

    async def load(self, store: StreamStore, run: RunRow, journal: Iterable[Entry]) -> None:
        """Find out how many items of the body each stream has. Nothing may be emitted before."""
        self._dropped = _dropped_keys(entry for entry in journal if entry.phase == "drop")
        for name, stream in self._streams.items():
            items = await store.items(run.id, name, after=stream.length - 2, limit=1)
            last = _record_of(run.id, items[-1])
            drops = [entry for entry in journal if entry.phase == "drop" and entry.epoch > last.epoch]
            if (last.continued_at, last.generation) != (run.continued_at, run.generation):
                continue  # the run has started over since, and emitted nothing
            dropped_from = _first_dropped(journal, drops)
            if dropped_from is None:
                stream.stored = last.body_count
            else:
                stream.stored = await _count_before(store, run, name, dropped_from)

    def add_of_body(self, name: str, value: bytes, max_items: int, *, is_end: bool = False) -> None:
        """The next item of the body, which the store may have already."""
        stream = self._open(name)
        is_new = stream.emitted >= stream.stored
        if is_new and stream.length >= max_items and not is_end:
            raise StreamFull(self._drive.run.id, name, max_items)
        stream.emitted += 1
        stream.is_ended = is_end
        self._turn_count += 1
        self._turn_bytes += len(value) + _OVERHEAD
        if is_new:
            self._put(name, stream, None, 0, 0, value, is_end=is_end)

    def add_of_step(self, info: StepInfo, name: str, value: bytes, max_items: int) -> None:
        """The next item of this attempt of a step."""
        if info.key not in self._drive.executing:
            raise RuntimeError(f"{name_step(info.key)} of run {info.run_id!r} is over: nothing more can be emitted in it")
        stream = self._open(name)
        if stream.length >= max_items:
            raise StreamFull(info.run_id, name, max_items)
        attempt = self._attempts.get(info.key)
        index = attempt.next_index if attempt is not None and attempt.number == info.attempt else 0
        self._attempts[info.key] = _Attempt(info.attempt, index + 1)
        self._put(name, stream, info.key, info.attempt, index, value)

    def note_end(self, key: str, attempt: int) -> None:
        """Note that the step has succeeded in this attempt, or failed for good (0), before its result is appended."""
        if key not in self._attempts and key not in self._dropped:
            return
        epoch, journal = self._drive.epoch, self._drive.recorder.journal
        end = AttemptEnd(key, min(journal[0].epoch, epoch) if journal else epoch, epoch, attempt)
        self._add(ATTEMPT_ENDS, self._ends, msgspec.json.encode(end))

    def is_turn_over(self) -> bool:
        """Return whether the body has emitted so much that it has to take a turn; then the next one begins."""
        if self._turn_count < MOST_ITEMS and self._turn_bytes < MOST_BYTES:
            return False
        self._turn_count = self._turn_bytes = 0
        return True

    @property
    def has_room(self) -> bool:
        """Return whether an item may be added without waiting for the store. Nothing is waited for while nothing may be sent."""
        return (self._count < MOST_ITEMS and self._bytes < MOST_BYTES) or not self._drive.may_record

    async def wait_for_room(self) -> None:
        """Return when there is room. Raises when the run has left memory or ended meanwhile."""
        while not self.has_room:
            self._drive.check_open()
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def close(self) -> None:
        """Send nothing more by the timer, and let everything that waits for room go on."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _open(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream()
        elif stream.is_ended:
            raise StreamEnded(self._drive.run.id, name)
        return stream

    def _put(
        self, name: str, stream: _Stream, key: str | None, attempt: int, index: int, value: bytes, *, is_end: bool = False
    ) -> None:
        drive = self._drive
        body_count = max(stream.stored, stream.emitted)
        seq, epoch, run = drive.calls.cursor.last_seq, drive.epoch, drive.run
        origin = (epoch, run.generation, run.continued_at, key, attempt, index)
        ends_before = None if key is None else self._ends.length
        record = StreamRecord(body_count, seq, *origin, is_end, msgspec.Raw(value), ends_before)
        self._add(name, stream, encode_record(record))
        if not self.has_room:
            self._send()
        if self._timer is None and not self._is_closed:
            # Not the context of a body or of a step: what is created there is theirs.
            self._timer = self._loop.call_later(SEND_WITHIN, self._time_is_up, context=contextvars.Context())

    def _add(self, name: str, stream: _Stream, payload: bytes) -> None:
        self._drive.recorder.items.append(Item(stream=name, n=stream.length, payload=payload))
        stream.length += 1
        self._count += 1
        self._bytes += len(payload) + _OVERHEAD

    def _time_is_up(self) -> None:
        self._timer = None
        self._send()
        if self._drive.recorder.items and not self._is_closed:  # a write is in flight, or the run is not live yet
            self._timer = self._loop.call_later(SEND_WITHIN, self._time_is_up, context=contextvars.Context())

    def _send(self) -> None:
        if self._drive.may_record:
            self._drive.recorder.flush_items()

    def _take_acknowledgement(self, items: list[Item]) -> None:
        """The store has these items."""
        self._count -= len(items)
        self._bytes -= sum(len(item.payload) + _OVERHEAD for item in items)
        if not self.has_room:
            self._send()
        else:
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._drive.body.schedule()


async def emit_in_body(drive: StreamOwner, name: str, value: Any, max_items: int) -> None:
    """`ctx.emit`: queue an item of the body."""
    streams, payload = await _begin(drive, name, value, max_items)
    if streams is not None:
        streams.add_of_body(name, payload, max_items)
        if streams.is_turn_over():
            await drive.calls.hold(lambda: streams.has_room)


async def end_stream(drive: StreamOwner, name: str) -> None:
    """`ctx.end_stream`: queue the mark that ends the stream."""
    streams, _ = await _begin(drive, name, None, 1)
    if streams is not None:
        streams.add_of_body(name, bytes(_NULL), 1, is_end=True)


async def _begin(drive: StreamOwner, name: str, value: Any, max_items: int) -> tuple[Streams | None, bytes]:
    """Return the streams and the encoded value, for a call in the body. Without a store there are no streams."""
    check_stream(name)
    check_positive(max_items, "max_items")
    if isinstance(current.get(), StepInfo):
        raise RuntimeError(f"ctx.emit() belongs in the body; in a step's function: current_step().emit({name!r}, ...)")
    drive.calls.check_place(name)
    if drive.calls.is_refusing:
        await drive.calls.admitted()
    return drive.open_streams(), _encode(drive, value)


def _encode(drive: StreamOwner, value: Any) -> bytes:
    payload, _ = drive.codec.dump(value, path="item")
    if len(payload) > MOST_VALUE_BYTES:
        raise ValueNotStorable("item", f"it takes {len(payload):,} bytes, and an item of a stream at most {MOST_VALUE_BYTES:,}")
    return payload


class Queued:
    """An item that is queued: awaited, it waits until there is room for the next."""

    __slots__ = ("_streams",)

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = streams

    def __await__(self) -> Generator[Any, None, None]:
        if self._streams is not None and not self._streams.has_room:
            yield from self._streams.wait_for_room().__await__()


def emit_in_step(drive: StreamOwner, info: StepInfo, name: str, value: Any, max_items: int) -> Awaitable[None]:
    """`current_step().emit`: queue an item of a step. In another thread than the event loop's it blocks until there is room."""
    check_stream(name)
    check_positive(max_items, "max_items")
    drive.check_open()
    payload = _encode(drive, value)
    if not drive.calls.is_in_thread_of_body():
        _call_on_loop(drive, info, name, payload, max_items)
        return Queued()
    streams = drive.open_streams()
    if streams is not None:
        streams.add_of_step(info, name, payload, max_items)
    return Queued(streams)


def _call_on_loop(drive: StreamOwner, info: StepInfo, name: str, payload: bytes, max_items: int) -> None:
    """In the thread of a step: return when the item is queued and there is room for the next."""

    async def emit() -> None:
        drive.check_open()
        if info.is_cancelled:
            raise RuntimeError(
                f"{name_step(info.key)} of run {info.run_id!r} was cancelled or timed out; its items would be discarded"
            )
        streams = drive.open_streams()
        if streams is not None:
            streams.add_of_step(info, name, payload, max_items)
            await streams.wait_for_room()

    emitting = emit()
    try:
        queued = asyncio.run_coroutine_threadsafe(emitting, drive.loop)
    except RuntimeError:  # the loop is closed
        emitting.close()
        raise
    while not wait([queued], _LOOK_SECONDS).done:
        if drive.loop.is_closed():
            raise RuntimeError(f"the event loop that drove run {info.run_id!r} was closed")
    queued.result()


def _first_dropped(journal: Iterable[Entry], drops: Iterable[Entry]) -> int | None:
    """The seq of the first result that these entries have dropped, or None."""
    closes = [entry for entry in journal if entry.phase == "close"]
    found: list[int] = []
    for drop in drops:
        dropped = _dropped_keys([drop])
        found += [entry.seq for entry in closes if entry.key in dropped and entry.seq < drop.seq]
    return min(found, default=None)


def _dropped_keys(drops: Iterable[Entry]) -> frozenset[str]:
    return frozenset(key for drop in drops for key in msgspec.json.decode(drop.payload, type=list[str]))


async def _count_before(store: StreamStore, run: RunRow, name: str, seq: int) -> int:
    """Return how many items of the body were emitted before the record with this seq had reached it."""
    seqs: list[int] = []
    after = -1
    while items := await store.items(run.id, name, after=after, limit=_PAGE):
        for item in items:
            record = _record_of(run.id, item)
            if record.key is None and record.continued_at == run.continued_at:
                del seqs[record.body_count - 1 :]  # since an earlier retry the body went another way
                seqs.append(record.seq)
        after = items[-1].n
    return bisect_left(seqs, seq)


def _record_of(run_id: str, item: Item) -> StreamRecord:
    try:
        return decode_record(item.payload)
    except msgspec.MsgspecError as reason:
        raise SnapshotCorrupt(run_id, f"item {item.n} of stream {item.stream!r}", str(reason)) from reason
