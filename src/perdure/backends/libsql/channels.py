"""What carries the statements of the verbs to the server: requests that stand alone, or those of one transaction.

A server gives at most 10 MB in a reply. What is more is asked for again, page by page, and as of one moment.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from perdure.backends.libsql import hrana
from perdure.backends.libsql.errors import is_too_large
from perdure.backends.libsql.hrana import Client, ServerError, Step, Stream, ok
from perdure.backends.libsql.pieces import Pieces
from perdure.backends.sql.session import Result, Row, Statement

_PAGE: Final = 256  # rows; half as many when that is still too much
_BEGIN: Final = Statement("BEGIN", ())
_BEGIN_WRITING: Final = Statement("BEGIN IMMEDIATE", ())
_COMMIT: Final = Statement("COMMIT", ())


class _Channel(ABC):
    """A channel on which large payloads and large replies need no thought."""

    IS_TRANSACTION: ClassVar[bool]

    def __init__(self, client: Client, pieces: Pieces) -> None:
        self._client = client
        self._pieces = pieces

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """What each statement gave."""
        puts, asked = self._pieces.taken_apart(statements)
        return await self.put_together((await self._send([*puts, *asked]))[len(puts) :])

    async def put_together(self, results: Sequence[Result]) -> list[Result]:
        """The results with payloads in the places of references."""
        return await self._pieces.put_together(self._send, results, in_transaction=self.IS_TRANSACTION)

    @abstractmethod
    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        """What each statement gave; their values and all of their rows are small."""


class Alone(_Channel):
    """For statements that only read: each `send` is a request of its own."""

    IS_TRANSACTION = False

    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        try:
            return results_of((await self._client.batch(chained(statements))).given())
        except ServerError as error:
            if not is_too_large(error):
                raise
        reading = OpenTransaction(self._client, self._pieces, is_writing=False)
        try:
            return await reading.read_in_pages(statements)
        finally:
            await reading.roll_back()


class OpenTransaction(_Channel):
    """The statements of one transaction, which begins with the first of them and keeps everybody else from writing.

    A server ends a transaction that keeps others waiting too long, and forgets all of them when it is restarted. Then the whole
    of it has to be done again.
    """

    IS_TRANSACTION = True

    def __init__(self, client: Client, pieces: Pieces, *, is_writing: bool = True) -> None:
        super().__init__(client, pieces)
        self._stream = Stream(client)
        self._beginning = _BEGIN_WRITING if is_writing else _BEGIN
        self._has_begun = False

    async def _send(self, statements: Sequence[Statement]) -> list[Result]:
        try:
            return await self._ask(statements)
        except ServerError as error:
            is_reading = all(statement.sql.lstrip().startswith("SELECT") for statement in statements)
            if not is_too_large(error) or not is_reading:
                raise
        return await self.read_in_pages(statements)

    async def _ask(self, statements: Sequence[Statement]) -> list[Result]:
        if not self._has_begun:
            self._has_begun = True
            return results_of((await self._stream.batch(chained([self._beginning, *statements]))).given()[1:])
        if not self._stream.is_open:
            raise ServerError("the server has ended the transaction", "STREAM_EXPIRED")
        return results_of((await self._stream.batch(chained(statements))).given())

    async def read_in_pages(self, statements: Sequence[Statement]) -> list[Result]:
        """What each of these SELECTs gives, in as many requests as it takes."""
        return [Result(await self._pages(statement), 0) for statement in statements]

    async def _pages(self, statement: Statement) -> list[Row]:
        rows: list[Row] = []
        size = _PAGE
        while True:
            page = Statement(f"SELECT * FROM ({statement.sql}) LIMIT ? OFFSET ?", (*statement.values, size, len(rows)))
            try:
                (result,) = await self._ask([page])
            except ServerError as error:
                if not is_too_large(error) or size == 1:
                    raise
                size //= 2
                continue
            rows += result.rows
            if len(result.rows) < size:
                return rows

    async def commit(self) -> None:
        """Make it last."""
        if self._has_begun:
            (await self._stream.batch(chained([_COMMIT]), is_last=True)).given()

    async def roll_back(self) -> None:
        """Undo it. The server does so by itself, if it cannot be told."""
        with contextlib.suppress(Exception):
            await self._stream.close()


def chained(statements: Sequence[Statement]) -> list[Step]:
    """These, each executed only if the one before it succeeded."""
    asked = [hrana.Statement(*statement) for statement in statements]
    return [Step(statement, ok(number - 1) if number else None) for number, statement in enumerate(asked)]


def results_of(given: Sequence[hrana.Result]) -> list[Result]:
    """The results as the verbs take them."""
    return [Result(rows, affected) for rows, affected in given]
