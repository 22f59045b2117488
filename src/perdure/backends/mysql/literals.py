"""Values as SQL text, so that several statements with their values make one packet.

Text and bytes both become binary strings, compared byte for byte. There are two spellings. In hexadecimal a value consists of
digits only, whatever the session's settings are: that is for borrowed connections. On our own connections, whose settings are
known (utf8mb4, backslashes escape), only the quote and the backslash are escaped: half the bytes of the other, and a quarter
of the time. Neither byte is part of a longer character in UTF-8, so no byte can end a value early, even in a value that is not
UTF-8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Quote: TypeAlias = Callable[[bytes], bytes]


def quote_hexadecimal(value: bytes) -> bytes:
    """The value as X'...'."""
    return b"X'%b'" % value.hex().encode()


def quote_escaped(value: bytes) -> bytes:
    """The value as _binary'...', for a session in which backslashes escape."""
    return b"_binary'%b'" % value.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


def literal(value: Any, quote: Quote) -> bytes:
    """The value as SQL. Raises `TypeError` for a type that no column has."""
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        return quote(value)
    if isinstance(value, str):
        return quote(value.encode())
    if isinstance(value, int):  # also a bool, as 0 or 1
        return b"%d" % value
    raise TypeError(f"{value!r} is of type {type(value).__name__}, which is in no column")


@functools.lru_cache(maxsize=1024)
def _split(template: str) -> tuple[bytes, ...]:
    return tuple(piece.encode() for piece in template.split("%s"))


def fill(template: str, values: Sequence[Any], quote: Quote) -> bytes:
    """The statement with each `%s` of its template replaced by a value. Raises `ValueError` when their numbers differ."""
    pieces = _split(template)
    if len(pieces) != len(values) + 1:
        raise ValueError(f"the statement has {len(pieces) - 1} places for {len(values)} values")
    parts = [pieces[0]]
    for piece, value in zip(pieces[1:], values, strict=True):
        parts += (literal(value, quote), piece)
    return b"".join(parts)
