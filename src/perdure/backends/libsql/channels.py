"""Channels that send the statements of the verbs to the server: as single requests, or as requests of one transaction.

A server sends at most 10 MB in a reply. A larger result is read again page by page, in one transaction and so as of one moment.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from perdure.backends.libsql.errors import is_too_large
from perdure.backends.libsql.hrana import BatchStep, HranaClient, HranaStream, ServerError, has_succeeded
from perdure.backends.libsql.large_values import LargeValues
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.rows import Row
from perdure.backends.sql.session import Result

_PAGE: Final = 256  # rows; half as many when that is still too much
_BEGIN: Final = Statement("BEGIN")
_BEGIN_WRITING: Final = Statement("BEGIN IMMEDIATE")
_COMMIT: Final = Statement("COMMIT")


class _LibsqlChannel(ABC):
    """A channel that stores large payloads in pieces and reads large results in pages."""

    IS_TRANSACTION: ClassVar[bool]

    def __init__(self, client: HranaClient, large: LargeValues) -> None:
        self._client = client
        self._large = large

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each statement."""
        puts, small = self._large.replace(statements)
        return await self.resolve((await self._send([*puts, *small]))[len(puts) :])

    async def resolve(self, results: Sequence[Result]) -> list[Result]:
        """The results with payloads instead of references."""
        return await self._large.resolve(self._send, results, in_transaction=self.IS_TRANSACTION)

    @abstractmethod
    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each statement, whose values are small."""


class SingleRequests(_LibsqlChannel):
    """A channel for statements that only read: each `send` is a request of its own."""

    IS_TRANSACTION = False

    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        try:
            return (await self._client.batch(_chain(statements))).results_or_raise()
        except ServerError as error:
            if not is_too_large(error):
                raise
        reading = OpenTransaction(self._client, self._large, is_writing=False)
        try:
            return await reading.read_in_pages(statements)
        finally:
            await reading.roll_back()


class OpenTransaction(_LibsqlChannel):
    """The channel of one transaction, which begins with the first statement and keeps all others from writing.

    A server ends a transaction that keeps others waiting too long, and loses all open ones when it is restarted. Then the whole
    transaction has to be repeated.
    """

    IS_TRANSACTION = True

    def __init__(self, client: HranaClient, large: LargeValues, *, is_writing: bool = True) -> None:
        super().__init__(client, large)
        self._stream = HranaStream(client)
        self._begin_statement = _BEGIN_WRITING if is_writing else _BEGIN
        self._has_begun = False

    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        try:
            return await self._execute(statements)
        except ServerError as error:
            is_reading = all(statement.sql.lstrip().startswith("SELECT") for statement in statements)
            if not is_too_large(error) or not is_reading:
                raise
        return await self.read_in_pages(statements)

    async def _execute(self, statements: Sequence[Statement]) -> list[Result]:
        if not self._has_begun:
            self._has_begun = True
            outcome = await self._stream.batch(_chain([self._begin_statement, *statements]))
            return outcome.results_or_raise()[1:]
        if not self._stream.is_open:
            raise ServerError("the server has ended the transaction", "STREAM_EXPIRED")
        return (await self._stream.batch(_chain(statements))).results_or_raise()

    async def read_in_pages(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each of these SELECTs, in as many requests as it takes."""
        return [Result(await self._read_pages(statement), 0) for statement in statements]

    async def _read_pages(self, statement: Statement) -> list[Row]:
        rows: list[Row] = []
        size = _PAGE
        while True:
            page = Statement(f"SELECT * FROM ({statement.sql}) LIMIT ? OFFSET ?", (*statement.values, size, len(rows)))
            try:
                (result,) = await self._execute([page])
            except ServerError as error:
                if not is_too_large(error) or size == 1:
                    raise
                size //= 2
                continue
            rows += result.rows
            if len(result.rows) < size:
                return rows

    async def commit(self) -> None:
        """Commit what was sent, if anything was."""
        if self._has_begun:
            (await self._stream.batch(_chain([_COMMIT]), is_last=True)).results_or_raise()

    async def roll_back(self) -> None:
        """Roll it back. The server does so by itself, if it cannot be reached."""
        with contextlib.suppress(Exception):
            await self._stream.close()


def _chain(statements: Sequence[Statement]) -> list[BatchStep]:
    """Steps of which each is executed only if the one before it succeeded."""
    return [BatchStep(statement, has_succeeded(number - 1) if number else None) for number, statement in enumerate(statements)]
