"""Transactional steps: what the function does in the store's own database, and the record of the step, are one transaction.

It is a step in every other way: key, replay, comparison of arguments, retries, time-outs, events. Only the attempt differs. It
opens a transaction of the store under the run's lease, calls the function in it, and leaves it open: when the result is appended
to the journal, the recorder has it written and committed by that transaction (`Recorder.commit` says in which order). What the
function raises, and an `Err` that it returns, rolls the transaction back, and is then recorded like the failure of any step.

A transaction that the database undid for the sake of another one (a serialization failure, a deadlock, a lock that took too long)
is run again from the top, MOST_CONFLICTS times; these are no attempts in the sense of `retry=`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec

from perdure.aio.own_tasks import start_own_task
from perdure.codec import dump_error
from perdure.ctx_calls.step_calls import AttemptResult, Attempts, StepCall
from perdure.engine.recorder import RolledBack
from perdure.errors import LeaseLost, PersistenceError, StepTimeout, TransactionFailed, ValueNotStorable
from perdure.model.durations import MAX_INSTANT, MICROSECOND
from perdure.model.journal import Entry, NextTry
from perdure.model.records import Item, Pulse
from perdure.store import Transaction

# How long a function may keep its transaction open, unless `timeout=` says otherwise. On SQLite no other write of any process is
# committed meanwhile, and none renews its leases: less than the lease of the usual length has left when its renewal is due.
DEFAULT_TIMEOUT: Final = 5.0
MOST_CONFLICTS: Final = 20
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class StepTransaction:
    """The transaction of a function of `ctx.transaction`, until that returns. It never commits or rolls back by itself."""

    __slots__ = ("_opened",)

    def __init__(self, opened: Transaction) -> None:
        self._opened: Transaction | None = opened

    @property
    def connection(self) -> Any:
        """The driver's own connection in this transaction: asyncpg's, asyncmy's, or in a plain function sqlite3's."""
        return self._get().connection

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, with the placeholders of the database's driver, and return its rows."""
        return await self._get().execute(sql, parameters)

    def _get(self) -> Transaction:
        if self._opened is None:
            raise RuntimeError("this transaction has ended with its function; use it only while that runs")
        return self._opened

    def end(self) -> None:
        """Refuse everything from now on."""
        self._opened = None


class _UndoneError(Exception):
    """Leaves a transaction whose function returned an `Err`, or what cannot be recorded."""

    def __init__(self, result: AttemptResult) -> None:
        super().__init__(result)
        self.result = result


class _TooLateError(Exception):
    """Leaves a transaction whose result nobody records."""


class _ConflictError(Exception):
    """A transaction was undone for the sake of another one, and may succeed now."""


class TransactionAttempts(Attempts):
    """The live attempts of one transactional step."""

    _conflicts: int = 0
    # Of the attempt that has succeeded: the transaction, and what ends it.
    _opened: tuple[Transaction, AsyncExitStack] | None = None

    async def _called(self, step: StepCall) -> AttemptResult:
        """The result of the function, whose transaction is left open; or the failure that it returned, with nothing left."""
        while True:
            try:
                return await self._transact(step)
            except _UndoneError as undone:
                return undone.result
            except _ConflictError:
                self._conflicts += 1
            await asyncio.sleep(self._pause_after_conflict())

    async def _transact(self, step: StepCall) -> AttemptResult:
        recorder = self._drive.recorder
        await recorder.hold()
        try:
            async with AsyncExitStack() as stack:
                transaction = await self._begin(stack)
                result = await self._work(step, transaction)
                self._opened = transaction, stack.pop_all()
                return result
        except BaseException:
            recorder.let_go_on()
            raise

    async def _begin(self, stack: AsyncExitStack) -> Transaction:
        try:
            return await stack.enter_async_context(self._drive.recorder.transaction())
        except (PersistenceError, LeaseLost) as failure:
            self._drive.stop_because(failure)

    async def _work(self, step: StepCall, transaction: Transaction) -> AttemptResult:
        """The result of the function in this transaction. Raises to have it rolled back."""
        given = StepTransaction(transaction)
        try:
            value = await self._call_in_transaction(step, transaction, given)
        except Exception as error:
            if self._conflicts < MOST_CONFLICTS and transaction.is_transient(error):
                raise _ConflictError from error
            if isinstance(error, PersistenceError) and not isinstance(error, TransactionFailed):
                self._drive.stop_because(error)  # the store is away, which says nothing about the step
            raise
        finally:
            given.end()
        result = super()._succeeded(value)
        if not result.ok:
            raise _UndoneError(result)
        return result

    async def _call_in_transaction(self, step: StepCall, transaction: Transaction, given: StepTransaction) -> Any:
        try:
            async with asyncio.timeout(step.plan.timeout) as limit:
                if step.plan.is_async:
                    return await step.fn(given, *step.args)
                value = await transaction.call_plain(functools.partial(step.fn, given, *step.args))
                return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if limit.expired():
                raise StepTimeout(step.key, step.plan.timeout or DEFAULT_TIMEOUT) from error
            raise

    def _succeeded(self, value: Any) -> AttemptResult:
        return value if isinstance(value, AttemptResult) else super()._succeeded(value)  # `_called` has encoded it

    async def run(self) -> AttemptResult:
        result = await super().run()
        if self._opened is not None:
            result.write = functools.partial(self._drive.recorder.commit, self._commit)
            result.roll_back = self._roll_back
        return result

    def _roll_back(self) -> None:
        """End the transaction of a result that came too late, and let the run write again."""
        start_own_task(self._end_unrecorded())

    async def _end_unrecorded(self) -> None:
        if self._opened is None:
            return
        (_, stack), self._opened = self._opened, None
        try:
            async with stack:
                raise _TooLateError
        except (_TooLateError, PersistenceError, LeaseLost):
            pass
        finally:
            self._drive.recorder.let_go_on()

    async def _commit(self, entry: Entry, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item]) -> Pulse:
        """Record these in the open transaction, and commit. Called by the recorder, in a task of its own."""
        if self._opened is None:
            raise RuntimeError("there is no open transaction to commit")
        (transaction, stack), self._opened = self._opened, None
        try:
            async with stack:
                return await transaction.record(entries, consume, items)
        except (TransactionFailed, ValueNotStorable) as error:
            raise RolledBack(self._instead_of(entry, error, transaction)) from error

    def _instead_of(self, entry: Entry, error: Exception, transaction: Transaction) -> Entry:
        """The entry in the place of one that could not be committed: when the step runs again, or its failure."""
        if self._conflicts < MOST_CONFLICTS and transaction.is_transient(error):
            self._conflicts += 1
            pause = self._pause_after_conflict()
        elif self._is_retried(error):
            pause = self._step.plan.retry.wait_after(self._attempt, error)
            self._log_failed_attempt(error, pause)
            self._attempt += 1
        else:
            return msgspec.structs.replace(entry, ok=False, payload=self._failed(error).payload)
        now = self._drive.clock.now()
        next_try = NextTry(min(now + round(pause * MICROSECOND), MAX_INSTANT), msgspec.Raw(dump_error(error)))
        return msgspec.structs.replace(
            entry, phase="open", payload=msgspec.json.encode(next_try), attempt=self._attempt, started_at=now, ended_at=now
        )

    def _pause_after_conflict(self) -> float:
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._conflicts)
        return random.uniform(0.0, longest)  # noqa: S311 - to spread out, not to hide
