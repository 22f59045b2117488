"""The batchers of one connections: what holders write often, and what begins runs, many in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from perdure.backends.base.batching import SEND_AGAIN, Batcher, Reply
from perdure.backends.postgres import recording, runs
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.postgres.schema import Session
from perdure.errors import LeaseLost, PerdureError
from perdure.model.records import Created, Pulse, Signal


class Lanes:
    """Records, ends and sleeps, and beginnings."""

    def __init__(self, connections: PostgresConnections, namespace: str, *, max_in_flight: int = 1) -> None:
        """`max_in_flight` is how many statements of records there may be under way."""
        self._connections = connections
        self._namespace = namespace
        self.records: Batcher[recording.Write, Pulse] = Batcher(
            self._record_all, connections.is_caused_by_one_request, max_in_flight=max_in_flight
        )
        self.closings: Batcher[recording.Write, list[Signal]] = Batcher(self._close_all, connections.is_caused_by_one_request)
        self.beginnings: Batcher[runs.Begin, Created] = Batcher(self._create_all, connections.is_caused_by_one_request)

    def _record_all(self, writes: Sequence[recording.Write]) -> Awaitable[Sequence[Reply[Pulse]]]:
        is_careful = not recording.are_plain(writes)

        def record(db: Session, _: bool) -> Awaitable[Sequence[Reply[Pulse]]]:  # noqa: FBT001 - as all work
            nonlocal is_careful
            if is_careful:
                return recording.record_all(db, writes)
            is_careful = True  # what does not go through at once is looked at closely
            return recording.append_all(db, writes)

        return self._connections.perform(self._namespace, record)

    async def _close_all(self, writes: Sequence[recording.Write]) -> Sequence[Reply[list[Signal]]]:
        is_plain, was_tried = recording.are_plain_ends(writes), False

        async def close(db: Session, is_repeated: bool) -> Sequence[Reply[list[Signal]]]:  # noqa: FBT001 - as all work
            nonlocal was_tried
            # A plain attempt is two statements where some need a closer look: the first may stand although the second failed.
            may_be_done = is_repeated or (is_plain and was_tried)
            end_all = recording.end_all if is_plain and not was_tried else recording.close_all
            was_tried = True
            answers = await end_all(db, writes)
            if not may_be_done:
                return answers
            return [
                [] if isinstance(answer, LeaseLost) and await recording.was_closed(db, write) else answer
                for write, answer in zip(writes, answers, strict=True)
            ]

        return await self._connections.perform(self._namespace, close)

    async def _create_all(self, begins: Sequence[runs.Begin]) -> Sequence[Reply[Created]]:
        made = await self._connections.perform(self._namespace, lambda db, _: runs.create_all(db, begins))
        found = await asyncio.gather(*(self._found(begin) for begin, one in zip(begins, made, strict=True) if one is None))
        others = iter(found)
        return [one if one is not None else next(others) for one in made]

    async def _found(self, begin: runs.Begin) -> Reply[Created]:
        """The run that is there already. One that is gone again is created once more."""
        try:
            found = await self._connections.perform(self._namespace, lambda db, _: runs.find(db, begin))
        except PerdureError as refusal:
            return refusal
        return SEND_AGAIN if found is None else found
