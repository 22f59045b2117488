"""LibsqlStore: the contract on a libSQL server, in the SQL of `sql_store` and over requests of our own."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Sequence
from typing import Final

from perdure.backends.base.batching import Batcher, Reply
from perdure.backends.base.claim_filter import ClaimRequest
from perdure.backends.base.failures import NotSentError
from perdure.backends.base.leases import lease_microseconds
from perdure.backends.base.new_runs import checked_inbox, checked_journal
from perdure.backends.libsql import batching, closing_batch, creating_batch, errors, pieces, renewing_batch, signal_batch
from perdure.backends.libsql.address import Address, address_of
from perdure.backends.libsql.connections import LibsqlConnections
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.sql import claims, reading, runs
from perdure.backends.sql.closing import close_once
from perdure.backends.sql.dialect import SQLITE
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import Result, Session, Statement
from perdure.backends.sql.store import SqlStore
from perdure.backends.sql.tables import Tables
from perdure.backends.sql.writes import Write
from perdure.errors import PersistenceError
from perdure.model.durations import microseconds
from perdure.model.journal import Entry
from perdure.model.records import Claims, Created, Lease, Pulse, RunRow, Signal
from perdure.store import STANDARD_PARTS, Capability

LOOK_EVERY: Final = 0.5  # seconds between two looks of who watches


class LibsqlStore(SqlStore[LibsqlConnections]):
    """Runs on a libSQL server: sqld, or Turso.

    What holders write is one request, whoever's writes travel in it. The server says at set-up whether it waits for its disk at
    every commit; sqld does not, so what it acknowledged survives the death of any process but maybe not a loss of power there.
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
        """`url` is `libsql://host` and the like (see `place`); `tls=False` is for a `libsql://` without encryption."""
        address = address_of(url, tls=tls)
        token = _checked_token(auth_token if auth_token is not None else address.token)
        connections = LibsqlConnections(Address(address.place, token), Tables(table, SQLITE, pieces.PieceValues()))
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def _on_attach(self) -> None:
        super()._on_attach()
        self._signals: Batcher[signal_batch.Sending, int] = Batcher(self._signal_all, self._connections.is_caused_by_one_request)

    def __repr__(self) -> str:
        connections = self._connections
        return f"LibsqlStore({connections.address.place.url!r}, table={connections.tables.stem!r}, prefix={self._namespace!r})"

    @property
    def key(self) -> tuple[str, ...]:
        """The server and database, the table stem (SQLite folds its case) and the prefix."""
        connections = self._connections
        return ("libsql", connections.address.place.url, connections.tables.stem.lower(), self._namespace)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All there are, `durable` once the server said that it waits for its disk."""
        is_durable = self.durability != "process"
        return STANDARD_PARTS | ({"shared", "transaction", "durable"} if is_durable else {"shared", "transaction"})

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        runs.checked_names(run)
        await self._change(pieces.restore, self._connections.pieces, run, checked_journal(entries), checked_inbox(inbox), now)

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one request."""
        given, length = tuple(leases), lease_microseconds(ttl)
        return await self._submit_renewal(ttl, lambda: self._renew(given, length, now))

    async def _renew(self, leases: Sequence[Lease], length: int, now: int | None) -> builtins.list[Pulse | None]:
        if not leases:
            return []
        statements = renewing_batch.renew_statements(self._connections.tables, self._namespace, leases, length, now)
        results = await self._connections.retry_transient(lambda _: self._connections.commit(statements))
        return renewing_batch.pulses_from(self._connections.tables, leases, results)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox: a share of one request."""
        sent = identity(name, dedupe)
        sending = signal_batch.sending(self._connections.tables, self._namespace, run_id, name, payload, dedupe, sent, now)
        seq = await self._enqueue(lambda: self._signals, sending)
        self._lifecycle.wake()
        return seq

    async def _signal_all(self, asked: Sequence[signal_batch.Sending]) -> Sequence[Reply[int]]:
        statements = [statement for signal in asked for statement in signal.statements]
        return signal_batch.seqs_from(
            self._connections.tables,
            asked,
            await self._connections.retry_transient(lambda _: self._connections.commit(statements)),
        )

    async def _claim(self, request: ClaimRequest) -> Claims:
        idle = await self._connections.read(self._namespace, lambda db: _next_wake(db, request))
        return Claims(claims=[], next_wake_at=idle.next_wake_at) if idle is not None else await super()._claim(request)

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change(pieces.delete, self._connections.pieces, run_id)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        return await self._do(pieces.purge, self._connections.pieces, microseconds(older_than, what="older_than"), limit, now)

    async def watch(self, timeout: float) -> None:
        """Return when this or another process has changed anything, at the latest after `timeout` seconds.

        Nobody tells of what others do, so the server's count of changes is looked at now and then.
        """
        self._reopen_if_forked()
        watcher = self._lifecycle.watch()  # from here on closing the store ends the wait
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
            return False  # the server does not count, or nobody has asked yet: who watches looks for himself
        try:
            return await self._submit(self._connections.look) == before
        except (OSError, ServerError, NotSentError, PersistenceError):
            return False  # he meets the error at his next verb

    async def _record_all(self, asked: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        statements = batching.record_statements(self._connections.tables, self._namespace, asked)
        answered = await self._connections.retry_transient(lambda _: self._in_one_request(statements))
        if isinstance(answered, ServerError):
            # Something is there already, or is not there: what that means needs a closer look, at one after the other.
            return await super()._record_all(asked)
        return batching.answers_from(self._connections.tables, asked, answered)

    async def _close_all(self, asked: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        connections, namespace = self._connections, self._namespace
        batch = closing_batch.ClosingBatch(connections.tables, namespace, asked)

        async def attempt(is_repeated: bool) -> Sequence[Reply[builtins.list[Signal]]] | ServerError:  # noqa: FBT001 - as `retry_transient` calls it
            answered = await self._in_one_request(batch.statements)
            if isinstance(answered, ServerError):
                return answered
            return await connections.read(namespace, lambda db: batch.answers(db, answered, is_repeated=is_repeated))

        answers = await connections.retry_transient(attempt)
        if not isinstance(answers, ServerError):
            return answers
        # As above. If only the reply was too large, the batch was carried out.
        is_done = errors.is_too_large(answers)
        return await connections.perform(namespace, lambda db, again: close_once(db, asked, is_repeated=again or is_done))

    async def _create_all(self, begins: Sequence[runs.Begin]) -> Sequence[Reply[Created | None]]:
        if any(begin.entries or begin.inbox for begin in begins):
            return await super()._create_all(begins)
        statements = creating_batch.create_statements(self._connections.tables, self._namespace, begins)
        return creating_batch.created_from(
            begins, await self._connections.retry_transient(lambda _: self._connections.commit(statements))
        )

    async def _in_one_request(self, statements: Sequence[Statement]) -> Sequence[Result] | ServerError:
        """What the statements gave, or the error that says to do it in another way."""
        try:
            return await self._connections.commit(statements)
        except ServerError as error:
            if errors.is_taken(error) or errors.is_too_large(error):
                return error
            raise


async def _next_wake(db: Session, request: ClaimRequest) -> claims.ClaimResult | None:
    """What a claim gives that takes nothing, if nothing is due: found out without keeping anybody from writing.

    It is looked for twice, since what comes due between the first look and the time of `next_wake_at` would be in neither.
    """
    if await reading.due(db, 1, request.now):
        return None
    result = await claims.claim(db, request._replace(limit=0))
    return None if await reading.due(db, 1, request.now) else result


def _checked_token(token: str | None) -> str | None:
    if not token:
        return None  # as it comes from an environment in which there is none
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("auth_token must be text without spaces, as the server's owner gave it (it is not repeated here)")
    return token
