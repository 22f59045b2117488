"""One connection: statements go out in one packet as far as they need no answer in between.

The driver's cursors are not used: they ask the server for every warning, which is a round trip, and log it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.mysql.errors import is_stale
from perdure.backends.mysql.literals import Quote, filled
from perdure.backends.sql.session import Result
from perdure.backends.sql.tables import Statement
from perdure.errors import PersistenceError

BEGIN: Final = b"START TRANSACTION"
COMMIT: Final = b"COMMIT"
# Only for the next transaction: a borrowed session is left as it was.
_READ_COMMITTED: Final = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class Wire:
    """One connection of the driver's, and what has to be known to write on it."""

    def __init__(self, connection: Any, quote: Quote, max_packet: int, label: str, *, is_borrowed: bool) -> None:
        self.connection = connection
        self.quote = quote
        self._max_packet = max_packet
        self._label = label
        # What a transaction begins with; sent with its first statement.
        self._begin = (_READ_COMMITTED, BEGIN) if is_borrowed else (BEGIN,)
        self._pending: Sequence[bytes] = ()

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """What each of these statements gave, in one round trip. Those after one that fails are not carried out."""
        return await self.send_texts([filled(statement.sql, statement.values, self.quote) for statement in statements])

    async def send_texts(self, statements: Sequence[bytes]) -> list[Result]:
        """As `send`, for statements that are whole."""
        pending, self._pending = self._pending, ()
        packet = b";".join([*pending, *statements])
        self._check_size(len(packet))
        connection = self.connection
        await connection.query(packet)
        results = [_result(connection)]
        while connection._result.has_next:  # noqa: SLF001 - the only way past the cursors
            await connection.next_result()
            results.append(_result(connection))
        return results[len(pending) :]

    def begin(self) -> None:
        """Have the next statement begin a transaction."""
        self._pending = self._begin

    async def commit(self) -> None:
        """Make the transaction last, if anything was sent in it."""
        if not self._pending:
            await self.send_texts([COMMIT])
        self._pending = ()

    async def transact(self, statements: Sequence[bytes]) -> list[Result]:
        """What each statement of a whole transaction gave: one packet, one round trip, one commit."""
        self.begin()
        return (await self.send_texts([*statements, COMMIT]))[:-1]

    def _check_size(self, size: int) -> None:
        # One byte is the command. A server closes the connection on whoever sends more, without a word.
        if size + 1 >= self._max_packet:
            raise PersistenceError(
                self._label,
                f"this write makes a packet of {size} bytes, and the server takes max_allowed_packet={self._max_packet}; "
                "record less at once, or raise max_allowed_packet on the server",
            )

    @property
    def in_transaction(self) -> bool:
        """Whether the server says that a transaction is open."""
        return bool(self.connection.get_transaction_status())

    async def roll_back(self, error: BaseException | None = None) -> None:
        """Leave no transaction open, after this error: undone, or by the end of the connection."""
        self._pending = ()
        if error is not None and (is_stale(error) or not isinstance(error, Exception)):
            self.connection.close()
            return
        try:
            if self.in_transaction:
                await self.connection.rollback()
        except Exception:  # noqa: BLE001 - without its connection it is undone too
            self.connection.close()


def _result(connection: Any) -> Result:
    result = connection._result  # noqa: SLF001 - as above
    # The driver does not believe a status of 0, which is what a session that commits nothing by itself has after a COMMIT.
    connection.server_status = result.server_status
    return Result(result.rows or (), result.affected_rows)
