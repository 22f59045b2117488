"""LibsqlStore: the contract on a libSQL server. Its verbs are those of `SqlStore`; the frequent ones are one request each."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from perdure.backends.base.batching import Batcher, Reply
from perdure.backends.base.claim_rules import ClaimRequest
from perdure.backends.base.leases import lease_microseconds, steps_by_lease
from perdure.backends.base.new_runs import check_inbox, check_journal
from perdure.backends.base.retries import NotSentError
from perdure.backends.libsql import errors, large_values, record_batch, run_batches
from perdure.backends.libsql.address import parse_url
from perdure.backends.libsql.connections import LibsqlConnections
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.sql import claims, runs
from perdure.backends.sql.closing import close_once
from perdure.backends.sql.dialect import SQLITE, Statement, Tables
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import Result
from perdure.backends.sql.store import SqlStore
from perdure.errors import PersistenceError
from perdure.model.durations import microseconds
from perdure.model.journal import Entry
from perdure.model.records import END_STATUSES, Claims, Created, EndStatus, Lease, NewInput, Pulse, RunRow, Signal
from perdure.store import STANDARD_PARTS, Capability

LOOK_EVERY: Final = 0.75  # seconds between two looks of a watch at the server's count of changes


class LibsqlStore(SqlStore[LibsqlConnections]):
    """Runs on a libSQL server: sqld, or Turso.

    The writes of all lease holders that arrive together are one request. The server says at set-up whether it waits for its disk
    at every commit; sqld does not, so what it acknowledged survives the death of any process but maybe not a loss of power there.
    It lets one transaction write at a time, and ends one that has kept another waiting for five seconds: a `transaction()` that
    takes longer may fail, and has then written nothing.
    """

    def __init__(
        self,
        url: str,
        *,
        auth_token: str | None = None,
        tls: bool | None = None,
        table: str = "perdure",
        prefix: str = "",
        auto_migrate: bool = True,
    ) -> None:
        """`url` is `libsql://host` and the like (see `address`); `tls=False` is for one without encryption."""
        target = parse_url(url, tls=tls)
        target = target._replace(token=_check_token(auth_token if auth_token is not None else target.token))
        target.check_token()
        tables = Tables(table, SQLITE, large_values.ReferencingValues())
        connections = LibsqlConnections(target, tables)
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def _on_attach(self) -> None:
        super()._on_attach()
        self._signals: Batcher[run_batches.SignalRequest, int] = Batcher(
            self._signal_all, self._connections.is_caused_by_one_request
        )

    def __repr__(self) -> str:
        connections = self._connections
        return f"LibsqlStore({connections.target.address.url!r}, table={connections.tables.stem!r}, prefix={self._namespace!r})"

    @property
    def key(self) -> tuple[str, ...]:
        """The server and database, the table stem (SQLite folds its case) and the prefix."""
        connections = self._connections
        return ("libsql", connections.target.address.url, connections.tables.stem.lower(), self._namespace)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All there are, `durable` once the server said that it waits for its disk."""
        is_durable = self.durability != "process"
        return STANDARD_PARTS | ({"shared", "transaction", "durable"} if is_durable else {"shared", "transaction"})

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, rows = check_journal(entries), check_inbox(inbox)
        await self._change(lambda db: large_values.restore(db, self._connections.large_values, run, journal, rows, now))

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one request."""
        renewed, length, steps = tuple(leases), lease_microseconds(ttl), steps_by_lease(leases, running_steps)
        return await self._submit_renewal(ttl, lambda: self._renew(renewed, length, steps, now))

    async def _renew(
        self, leases: Sequence[Lease], length: int, running_steps: Mapping[Lease, bytes], now: int | None
    ) -> builtins.list[Pulse | None]:
        if not leases:
            return []
        statements = run_batches.renew_statements(self._connections.tables, self._namespace, leases, length, running_steps, now)
        results = await self._connections.retry_transient(lambda _: self._connections.commit(statements))
        return run_batches.pulses_from(self._connections.tables, leases, results)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox: a share of one request."""
        request = run_batches.signal_request(
            self._connections.tables, self._namespace, run_id, name, payload, dedupe, identity(name, dedupe), now
        )
        seq = await self._enqueue(lambda: self._signals, request)
        self._lifecycle.wake()
        return seq

    async def _signal_all(self, requests: Sequence[run_batches.SignalRequest]) -> Sequence[Reply[int]]:
        statements = [statement for signal in requests for statement in signal.statements]
        return run_batches.seqs_from(
            self._connections.tables,
            requests,
            await self._connections.retry_transient(lambda _: self._connections.commit(statements)),
        )

    async def _claim(self, request: ClaimRequest) -> Claims:
        # One request, without the write lock, which a claim takes.
        idle = await self._connections.read(self._namespace, lambda db: claims.see_nothing_due(db, request))
        if idle is None:
            return await super()._claim(request)
        return Claims(claims=[], next_wake_at=idle.next_wake_at, now=idle.now)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over with another input."""
        await self._change(lambda db: large_values.continue_as(db, self._connections.large_values, lease, new, now))

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change(lambda db: large_values.delete(db, self._connections.large_values, run_id))

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        """Delete ended runs, oldest first."""
        age = microseconds(older_than, what="older_than")
        large = self._connections.large_values
        return await self._write(lambda db: large_values.purge(db, large, age, status, workflow, limit, now))

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process has changed anything, at the latest after `timeout` seconds.

        The server does not notify of changes, so its count of changes is read now and then.
        """
        self._reopen_if_forked()
        watcher = self._lifecycle.watch(items=items)  # from here on closing the store ends the wait
        before = self._connections.known_change
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await asyncio.wait([watcher.future], timeout=LOOK_EVERY)
                while not watcher.future.done() and await self._is_unchanged(before):
                    await asyncio.wait([watcher.future], timeout=LOOK_EVERY)
        except TimeoutError:
            pass
        finally:
            self._lifecycle.unwatch(watcher)

    async def _is_unchanged(self, before: int | None) -> bool:
        if before is None:
            return False  # the server does not count, or there was no reply yet: the caller looks for itself
        try:
            return await self._submit(self._connections.read_change) == before
        except (OSError, ServerError, NotSentError, PersistenceError):
            return False  # the caller gets the error from its next verb

    async def _record_all(self, writes: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        statements = record_batch.record_statements(self._connections.tables, self._namespace, writes)
        results = await self._connections.retry_transient(lambda _: self._commit_or_refuse(statements))
        if isinstance(results, ServerError):
            # A write contradicts what is recorded, or repeats it: the shared verb reads before it writes, and says which.
            return await super()._record_all(writes)
        return record_batch.record_replies(self._connections.tables, writes, results)

    async def _close_all(self, writes: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        connections, namespace = self._connections, self._namespace
        batch = record_batch.ClosingBatch(connections.tables, namespace, writes)

        async def attempt(is_repeated: bool) -> Sequence[Reply[builtins.list[Signal]]] | ServerError:  # noqa: FBT001 - as `retry_transient` calls it
            results = await self._commit_or_refuse(batch.statements)
            if isinstance(results, ServerError):
                return results
            return await connections.read(namespace, lambda db: batch.replies(db, results, is_repeated=is_repeated))

        replies = await connections.retry_transient(attempt)
        if not isinstance(replies, ServerError):
            return replies
        # As above. If only the reply was too large, the batch was committed.
        is_done = errors.is_too_large(replies)
        return await connections.perform(namespace, lambda db, again: close_once(db, writes, is_repeated=again or is_done))

    async def _create_all(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created | None]]:
        if any(creation.entries or creation.inbox for creation in creations):
            return await super()._create_all(creations)
        statements = run_batches.create_statements(self._connections.tables, self._namespace, creations)
        return run_batches.created_from(
            creations, await self._connections.retry_transient(lambda _: self._connections.commit(statements))
        )

    async def _commit_or_refuse(self, statements: Sequence[Statement]) -> Sequence[Result] | ServerError:
        """The results of the statements, or the error after which the shared verb has to do it in several requests."""
        try:
            return await self._connections.commit(statements)
        except ServerError as error:
            if errors.is_constraint_violation(error) or errors.is_too_large(error):
                return error
            raise


def _check_token(token: str | None) -> str | None:
    if not token:
        return None  # as an unset environment variable gives it
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("auth_token must be text without spaces, as the server's owner gave it (it is not repeated here)")
    return token
