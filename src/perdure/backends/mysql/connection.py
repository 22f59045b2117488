"""One connection: statements that do not depend on each other's results are sent in one packet, if the server takes it.

The driver's cursors are not used: they fetch every warning from the server, which is a round trip, and log it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from perdure.backends.base import retries
from perdure.backends.base.retries import NoReplyError
from perdure.backends.mysql.errors import is_stale
from perdure.backends.mysql.large_values import VariableQuote, split_into_packets
from perdure.backends.mysql.literals import Quote, fill
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result
from perdure.errors import ValueNotStorable

_SLOWEST_UPLOAD: Final = 128 * 1024  # bytes per second, on the slowest of networks
BEGIN: Final = b"START TRANSACTION"
COMMIT: Final = b"COMMIT"
# Only for the next transaction: a borrowed session is left as it was.
_READ_COMMITTED: Final = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class MysqlConnection:
    """A connection of the driver, with the quoting and the packet size of its session."""

    def __init__(self, driver_connection: Any, quote: Quote, max_packet: int, label: str, *, is_borrowed: bool) -> None:
        self.driver_connection = driver_connection
        self.quote = quote
        self._max_packet = max_packet
        self._label = label
        # The statements that begin a transaction; sent with its first statement.
        self._transport = driver_connection._transport  # noqa: SLF001 - the driver closes it only when all is sent
        self._begin = (_READ_COMMITTED, BEGIN) if is_borrowed else (BEGIN,)
        self._pending: Sequence[bytes] = ()

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each statement, in one round trip unless they are too long for one packet.

        The server stops at the first one that fails.
        """
        texts = [fill(statement.sql, statement.values, self.quote) for statement in statements]
        if self.takes(texts):
            return await self.send_texts(texts)
        variables = self.new_variables()
        texts = [fill(statement.sql, statement.values, variables) for statement in statements]
        before = variables.statements
        results = await self.send_texts([*before, *texts, *variables.cleanup])
        return results[len(before) : len(before) + len(texts)]

    @property
    def max_statement(self) -> int:
        """How long a statement should be, where there is a choice."""
        return self._max_packet // 2

    def takes(self, statements: Iterable[bytes]) -> bool:
        """Whether each of these fits into a packet."""
        return all(len(statement) + 1 < self._max_packet for statement in statements)

    def new_variables(self) -> VariableQuote:
        """Quotes the values of statements that would not fit into a packet."""
        return VariableQuote(self.quote, self._max_packet, self._label)

    async def send_texts(self, statements: Sequence[bytes], *, limit: float | None = None) -> list[Result]:
        """As `send`, for statements whose values are in their text.

        Raises `NoReplyError` after `limit` seconds, by default those of this attempt.
        """
        pending, self._pending = self._pending, ()
        packets = [b";".join(packet) for packet in split_into_packets([*pending, *statements], self._max_packet)]
        for packet in packets:
            self._check_size(len(packet))
        results: list[Result] = []
        for packet in packets:
            results += await self._send_packet(packet, limit or retries.reply_limit())
        return results[len(pending) :]

    async def _send_packet(self, packet: bytes, limit: float) -> list[Result]:
        try:
            async with asyncio.timeout(limit + len(packet) / _SLOWEST_UPLOAD):
                return await self._exchange(packet)
        except TimeoutError:
            self.abort()
            raise NoReplyError("no reply in time") from None

    async def _exchange(self, packet: bytes) -> list[Result]:
        driver = self.driver_connection
        await driver.query(packet)
        results = [_result(driver)]
        while driver._result.has_next:  # noqa: SLF001 - the only way past the cursors
            await driver.next_result()
            results.append(_result(driver))
        return results

    def abort(self) -> None:
        """Close the connection at once: what the driver has not sent yet is thrown away, and no reply is waited for."""
        if self._transport is not None:
            self._transport.abort()
        self.driver_connection.close()

    def begin(self) -> None:
        """Begin a transaction with the next statement."""
        self._pending = self._begin

    async def commit(self) -> None:
        """Commit the transaction, if anything was sent in it."""
        if not self._pending:
            await self.send_texts([COMMIT])
        self._pending = ()

    async def transact(self, statements: Sequence[bytes], variables: VariableQuote | None = None) -> list[Result]:
        """The results of a whole transaction: one commit, and one packet and round trip unless it is too long for that."""
        self.begin()
        before, after = ([], []) if variables is None else (variables.statements, variables.cleanup)
        results = await self.send_texts([*before, *statements, COMMIT, *after])
        return results[len(before) : len(before) + len(statements)]

    def _check_size(self, size: int) -> None:
        # One byte is the command. A server closes the connection over a larger packet, without an error.
        if size + 1 >= self._max_packet:
            raise ValueNotStorable(
                "value",
                f"this write makes a packet of {size:,} bytes, and {self._label} takes max_allowed_packet={self._max_packet:,}; "
                "record less at once, or raise max_allowed_packet on the server",
            )

    @property
    def in_transaction(self) -> bool:
        """Whether the server says that a transaction is open."""
        return bool(self.driver_connection.get_transaction_status())

    async def roll_back(self, error: BaseException | None = None) -> None:
        """Leave no transaction open after this error: roll it back, or close the connection."""
        self._pending = ()
        if error is not None and (is_stale(error) or not isinstance(error, Exception)):
            self.driver_connection.close()
            return
        try:
            if self.in_transaction:
                await self.driver_connection.rollback()
        except Exception:  # noqa: BLE001 - the server rolls back when its connection is closed
            self.driver_connection.close()


def _result(driver_connection: Any) -> Result:
    result = driver_connection._result  # noqa: SLF001 - as above
    # The driver ignores a status of 0, which a session without autocommit has after a COMMIT.
    driver_connection.server_status = result.server_status
    return Result(result.rows or (), result.affected_rows)
