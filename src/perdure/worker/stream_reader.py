"""Reading a stream of a run, from any process: pages from the store, and its watch in between.

A reader keeps nothing but its position: many read one stream, and each goes on where it stopped, also in another process. A
stream has ended when its last item is the mark of `ctx.end_stream`, or when the run has ended and everything was read; a read
that times out is not an end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic, Self, TypeVar

import msgspec

from perdure.codec import Codec, readable, tree_of
from perdure.errors import RunNotFound, SnapshotCorrupt
from perdure.model.durations import Duration, seconds
from perdure.model.journal import Entry
from perdure.model.records import MAX_POSITION, Item, RunRow
from perdure.model.stream_items import ATTEMPT_ENDS, AttemptEnd, StreamItem, StreamRecord, check_stream, decode_record
from perdure.store import StreamStore, require
from perdure.worker.active_runs import active_runs
from perdure.worker.host import Host

T_co = TypeVar("T_co", covariant=True)

# How many items are read at once.
PAGE: Final = 500
# As `returns=`: the value as plain JSON, whatever classes it is made of.
PLAIN: Final = object()


class StreamReader(Generic[T_co]):
    """An async iterator over a stream of a run, and where it stands.

    `run.stream(name, start=reader.position)` goes on where this one stands, in any process. After a `TimeoutError`, or an error
    of the store, the same reader goes on too.
    """

    def __init__(
        self,
        host: Host,
        run_id: str,
        stream: str,
        *,
        start: int = 0,
        timeout: Duration | None = None,
        returns: Any = Any,
        details: bool = False,
        drop_failed: bool = False,
    ) -> None:
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= MAX_POSITION:
            raise ValueError(f"start must be a whole number from 0 to {MAX_POSITION}, not {start!r}")
        self._store: StreamStore = require(host.store, "streams")
        self._codec: Codec = host.settings.codec
        self._run_id = run_id
        self._stream = check_stream(stream)
        self._timeout = None if timeout is None else seconds(timeout, what="timeout")
        self._returns = returns
        self._details = details
        self._attempts = AttemptsOfSteps(self._store, run_id) if drop_failed else None
        # Read and not given yet, and the position after the last that was read.
        self._read: deque[tuple[int, StreamRecord]] = deque()
        self._next = start
        self._is_ended = False

    @property
    def position(self) -> int:
        """The position of the next item; at the end of the stream that of its mark, by which another reader finds the end."""
        return self._read[0][0] if self._read else self._next - self._is_ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        """The next item; `TimeoutError` when none came in time. Raises `RunNotFound`, and what the store raises."""
        while not self._read:
            if not await self._read_on():
                raise StopAsyncIteration
        position, record = self._read[0]
        value = self._load(position, record)
        self._read.popleft()
        if self._details:
            value = StreamItem(
                position=position,
                value=value,
                key=record.key,
                attempt=record.attempt,
                epoch=record.epoch,
                index=record.index,
            )
        return value  # type: ignore[no-any-return]  # decoded

    async def _read_on(self) -> bool:
        """Read a page, once there is one; False when the stream has ended."""
        if await self._read_page():
            return True
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        while True:
            with active_runs.expect_change(self._store, self._run_id, items=True) as change:
                await asyncio.sleep(0)  # starts the watch before anything is read, so that no change falls between the two
                run = await self._row()  # first: a run that had ended then has no items after those that are read next
                if await self._read_page():
                    return True
                if run.ended or self._is_ended:
                    return False
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    raise TimeoutError(f"no item {self._next} of stream {self._stream!r} of run {self._run_id!r} in time")
                await asyncio.wait([change], timeout=left)

    async def _row(self) -> RunRow:
        run = await self._store.get(self._run_id)
        if run is None:
            raise RunNotFound(self._run_id)
        return run

    async def _read_page(self) -> bool:
        """Read the next page, and whether there was one. What is dropped of it is passed over."""
        items = await self._store.items(self._run_id, self._stream, after=self._next - 1, limit=PAGE)
        if not items:
            return False
        records = [(item.n, self._record_of(item)) for item in items]
        if self._attempts is not None:
            records = await self._attempts.without_failed(records)
        self._is_ended = bool(records) and records[-1][1].is_end
        self._next = items[-1].n + 1
        self._read.extend(entry for entry in records if not entry[1].is_end)
        return True

    def _record_of(self, item: Item) -> StreamRecord:
        try:
            return decode_record(item.payload)
        except msgspec.MsgspecError as reason:
            raise SnapshotCorrupt(self._run_id, f"item {item.n} of stream {self._stream!r}", str(reason)) from reason

    def _load(self, position: int, record: StreamRecord) -> Any:
        payload = bytes(record.value)
        if self._returns is PLAIN:
            return readable(tree_of(payload)[0])
        try:
            return self._codec.load(payload, self._returns)
        except ValueError as reason:
            raise SnapshotCorrupt(self._run_id, f"item {position} of stream {self._stream!r}", str(reason)) from reason


class AttemptsOfSteps:
    """Which attempts of a run's steps have failed or were lost, as far as the store knows.

    The journal says it of the steps since the run began with its present input, `EndsOfAttempts` of those before.
    """

    def __init__(self, store: StreamStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._epoch = 0
        self._has_ended = False
        self._ends = EndsOfAttempts(store, run_id)
        self._start_over(0, None)

    def _start_over(self, generation: int, continued_at: int | None) -> None:
        self._generation, self._continued_at = generation, continued_at
        self._seq = 0
        # By the step's key: the attempt whose result is recorded (None if that failed), and the first that has not failed.
        self._succeeded: dict[str, tuple[int, int] | None] = {}
        self._next: dict[str, tuple[int, int]] = {}

    async def without_failed(self, records: Sequence[tuple[int, StreamRecord]]) -> list[tuple[int, StreamRecord]]:
        """These without the items of attempts that have failed or were lost."""
        of_steps = [record for _, record in records if record.key is not None]
        if of_steps:
            await self._refresh()
            await self._ends.read_for([record for record in of_steps if self._is_left_behind(record)])
        return [(position, record) for position, record in records if not self._has_failed(record)]

    async def _refresh(self) -> None:
        # The row first: what was recorded under an earlier epoch than it shows is all there by then.
        run = await self._store.get(self._run_id)
        if run is None:
            return
        self._epoch, self._has_ended = run.epoch, run.ended
        if (run.generation, run.continued_at) != (self._generation, self._continued_at):
            self._start_over(run.generation, run.continued_at)
        for entry in await self._store.journal(self._run_id, after=self._seq):
            self._seq = entry.seq
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if entry.phase == "drop":
            for key in msgspec.json.decode(entry.payload, type=list[str]):
                self._succeeded.pop(key, None)
                self._next.pop(key, None)
        elif entry.kind == "step" and entry.phase == "close":
            self._succeeded[entry.key] = (entry.epoch, entry.attempt) if entry.ok else None
        elif entry.kind == "step" and entry.phase == "open":
            self._next[entry.key] = (entry.epoch, entry.attempt)

    def _has_failed(self, record: StreamRecord) -> bool:
        if record.key is None:
            return False
        if self._is_left_behind(record):
            return self._ends.say_failed(record)
        attempt = record.epoch, record.attempt
        if record.key in self._succeeded:
            return attempt != self._succeeded[record.key]
        return self._has_ended or record.epoch < self._epoch or attempt < self._next.get(record.key, (0, 0))

    def _is_left_behind(self, record: StreamRecord) -> bool:
        """Return whether the run has started over since, and the journal with it."""
        return (record.continued_at, record.generation) != (self._continued_at, self._generation)


class EndsOfAttempts:
    """How steps ended before the run started over, from the stream `ATTEMPT_ENDS`, which is read as far as it is asked for.

    Ask only for records that the run has left behind, since their ends are all there, and in the order of their positions, since
    older ends are forgotten.
    """

    def __init__(self, store: StreamStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        # The number of the next end; None while nothing was asked for.
        self._next: int | None = None
        # Until the run began with the input of the last end that was read.
        self._read_until_epoch = 0
        self._by_key: dict[str, list[AttemptEnd]] = {}

    async def read_for(self, records: Sequence[StreamRecord]) -> None:
        """Read all that says how the attempts of these records have ended, and forget what is older."""
        known = [record for record in records if record.ends_before is not None]
        if not known:
            return
        first_epoch, last_epoch = known[0].epoch, known[-1].epoch
        self._by_key = {
            key: left for key, ends in self._by_key.items() if (left := [end for end in ends if end.epoch >= first_epoch])
        }
        if self._next is None:
            self._next = known[0].ends_before or 0
        while self._read_until_epoch <= last_epoch:
            items = await self._store.items(self._run_id, ATTEMPT_ENDS, after=self._next - 1, limit=PAGE)
            if not items:
                return
            for item in items:
                self._take(item)

    def _take(self, item: Item) -> None:
        try:
            end = msgspec.json.decode(item.payload, type=AttemptEnd)
        except msgspec.MsgspecError as reason:
            raise SnapshotCorrupt(self._run_id, f"item {item.n} of stream {ATTEMPT_ENDS!r}", str(reason)) from reason
        self._next = item.n + 1
        self._read_until_epoch = end.first_epoch
        self._by_key.setdefault(end.key, []).append(end)

    def say_failed(self, record: StreamRecord) -> bool:
        """Return whether the attempt of this record failed, was lost or was cancelled. Without ends, nobody knows."""
        if record.ends_before is None:
            return False
        ends = self._by_key.get(record.key or "", [])
        last = next((end for end in reversed(ends) if end.first_epoch <= record.epoch <= end.epoch), None)
        return last is None or (last.epoch, last.attempt) != (record.epoch, record.attempt)
