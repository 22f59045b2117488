"""Writes that are longer than the server's max_allowed_packet: several packets of one transaction.

A packet is one command of the protocol, and the server takes none that is longer than max_allowed_packet. Statements are
distributed over packets. The values of a statement that would be too long by itself are first put into variables of the
session, piece by piece, and the statement names the variables. So only a value that is longer than a packet is refused: the
server could not join its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.backends.mysql.literals import Quote
from perdure.errors import ValueNotStorable

# Of max_allowed_packet: what a statement may have of values in its text, and how long a piece is. Escaping may double both.
_SHARE: Final = 4
# Shorter values always stay in the text.
_SHORTEST_IN_VARIABLE: Final = 256
# The longest row apart from its payload, and the header of a packet.
_MARGIN: Final = 4096


class VariableQuote:
    """Quotes values like `quote` at first, and then puts them into variables of the session.

    `statements` set the variables, and have to be sent before those that name them; `cleanup` frees their memory.
    """

    def __init__(self, quote: Quote, max_packet: int, label: str) -> None:
        self._quote = quote
        self._max_packet = max_packet
        self._label = label
        self._left = max_packet // _SHARE
        self._count = 0
        self.statements: list[bytes] = []

    def __call__(self, value: bytes) -> bytes:
        """The value, or the variable that has it. Raises `ValueNotStorable` when it is longer than a packet."""
        if len(value) < _SHORTEST_IN_VARIABLE or 2 * len(value) < self._left:
            self._left -= len(value)
            return self._quote(value)
        if len(value) + _MARGIN > self._max_packet:
            raise ValueNotStorable(
                "value",
                f"a value of {len(value):,} bytes does not fit into a packet, and {self._label} takes "
                f"max_allowed_packet={self._max_packet:,}; store less in one value, or raise max_allowed_packet on the server",
            )
        name = b"@perdure_%d" % self._count
        self._count += 1
        size = self._max_packet // _SHARE
        for start in range(0, len(value), size):
            piece = self._quote(value[start : start + size])
            self.statements.append(b"SET %b = CONCAT(%b, %b)" % (name, name, piece) if start else b"SET %b = %b" % (name, piece))
        return name

    @property
    def cleanup(self) -> list[bytes]:
        """The statement that sets the variables to NULL, if there are any."""
        names = [b"@perdure_%d = NULL" % number for number in range(self._count)]
        return [b"SET " + b", ".join(names)] if names else []


def split_into_packets(statements: Sequence[bytes], max_packet: int) -> list[list[bytes]]:
    """The statements in groups that make one packet each. One that is too long by itself is a group."""
    packets: list[list[bytes]] = []
    size = max_packet
    for statement in statements:
        # One byte is the semicolon, and one for each packet the command.
        if size + len(statement) + 1 >= max_packet:
            packets.append([])
            size = 1
        packets[-1].append(statement)
        size += len(statement) + 1
    return packets
