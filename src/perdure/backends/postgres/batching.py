"""The hot verbs in batches: records, ends and sleeps, and new runs, many in one statement."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from perdure.backends.base.batching import Batcher, Reply
from perdure.backends.postgres import creating, recording
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.sql import closing, runs
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.backends.sql.store import Batchers
from perdure.errors import LeaseLost
from perdure.model.records import Created, Pulse, Signal


def make_batchers(connections: PostgresConnections, namespace: str, *, records_in_flight: int = 1) -> Batchers:
    """Batchers on the loop of these connections, with at most so many statements of records in flight."""
    batches, culprit = _Batches(connections, namespace), connections.is_caused_by_one_request
    return Batchers(
        Batcher(batches.record, culprit, max_in_flight=records_in_flight),
        Batcher(batches.close, culprit),
        Batcher(batches.create, culprit),
    )


class _Batches:
    """Sends batches. A batch that is sent again, since its reply may have been lost, must find what it wrote."""

    def __init__(self, connections: PostgresConnections, namespace: str) -> None:
        self._connections = connections
        self._namespace = namespace

    def record(self, writes: Sequence[Write]) -> Awaitable[Sequence[Reply[Pulse]]]:
        is_careful = not recording.are_plain(writes)

        def record(db: Session, _: bool) -> Awaitable[Sequence[Reply[Pulse]]]:  # noqa: FBT001 - as all work
            nonlocal is_careful
            if is_careful:
                return recording.record_all(db, writes)
            is_careful = True  # what does not go through at once is looked at closely
            return recording.append_all(db, writes)

        return self._connections.autocommit(self._namespace, record)

    async def close(self, writes: Sequence[Write]) -> Sequence[Reply[list[Signal]]]:
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
                [] if isinstance(answer, LeaseLost) and await closing.was_closed(db, write) else answer
                for write, answer in zip(writes, answers, strict=True)
            ]

        return await self._connections.autocommit(self._namespace, close)

    async def create(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created]]:
        new = await self._connections.autocommit(self._namespace, lambda db, _: creating.create_all(db, creations))
        return await runs.find_others(self._connections, self._namespace, creations, new)
