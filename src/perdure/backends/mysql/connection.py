"""One connection: statements that do not depend on each other's results are sent in one packet.

The driver's cursors are not used: they fetch every warning from the server, which is a round trip, and log it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.mysql.errors import is_stale
from perdure.backends.mysql.literals import Quote, fill
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result
from perdure.errors import ValueNotStorable

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
        self._begin = (_READ_COMMITTED, BEGIN) if is_borrowed else (BEGIN,)
        self._pending: Sequence[bytes] = ()

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each statement, in one round trip. The server stops at the first one that fails."""
        return await self.send_texts([fill(statement.sql, statement.values, self.quote) for statement in statements])

    async def send_texts(self, statements: Sequence[bytes]) -> list[Result]:
        """As `send`, for statements whose values are in their text."""
        pending, self._pending = self._pending, ()
        packet = b";".join([*pending, *statements])
        self._check_size(len(packet))
        driver = self.driver_connection
        await driver.query(packet)
        results = [_result(driver)]
        while driver._result.has_next:  # noqa: SLF001 - the only way past the cursors
            await driver.next_result()
            results.append(_result(driver))
        return results[len(pending) :]

    def begin(self) -> None:
        """Begin a transaction with the next statement."""
        self._pending = self._begin

    async def commit(self) -> None:
        """Commit the transaction, if anything was sent in it."""
        if not self._pending:
            await self.send_texts([COMMIT])
        self._pending = ()

    async def transact(self, statements: Sequence[bytes]) -> list[Result]:
        """The results of a whole transaction: one packet, one round trip, one commit."""
        self.begin()
        return (await self.send_texts([*statements, COMMIT]))[:-1]

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
