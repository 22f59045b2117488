"""JSON text that is given up as soon as it is too long.

A value may refer to one part a billion times, and a step may return the whole table: the JSON of what fits into memory need
not fit. msgspec has no limit of its own, but it writes into a bytearray, and one that somebody else looks at cannot grow.
"""

from __future__ import annotations

from typing import Any

import msgspec

_into = msgspec.json.Encoder().encode_into
# Nearly every value fits into the first buffer. To write a part of a larger one in vain, and to clear a buffer that is too
# large for it, cost about the same with this growth.
_FIRST, _GROWTH = 1024, 8


def encoded(value: Any, limit: int, size: int = _FIRST) -> bytes | None:
    """The value's JSON, or None when it is longer than `limit` by far; memory for many times the limit is never taken.

    What is only a little longer is given all the same, so that the caller can tell its length.
    """
    buffer = bytearray(size)
    _watched = memoryview(buffer)
    try:
        _into(value, buffer)
    except BufferError:
        # msgspec asks for some room before it knows what it needs, hence twice.
        enough = 2 * limit + _FIRST
        return encoded(value, limit, min(size * _GROWTH, enough)) if size < enough else None
    return bytes(buffer)
