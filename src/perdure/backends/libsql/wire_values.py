"""SQLite's values as Hrana writes them in JSON, and back.

An integer is sent as decimal text, since JSON numbers lose precision past 2**53 in many readers; a blob as base64, padded or
not. A float is a JSON number, which cannot be an infinity: an infinity is refused when it is sent, and recognised when it is
received, where the server writes null for it.
"""

from __future__ import annotations

import base64
import math
from typing import Final, TypeAlias

import msgspec

SqliteValue: TypeAlias = int | float | str | bytes | None

_MIN_INTEGER: Final = -(1 << 63)
_MAX_INTEGER: Final = (1 << 63) - 1


class Null(msgspec.Struct, frozen=True, tag_field="type", tag="null"):
    """NULL."""


class Integer(msgspec.Struct, frozen=True, tag_field="type", tag="integer"):
    """An INTEGER, as decimal text."""

    value: str | int


class Float(msgspec.Struct, frozen=True, tag_field="type", tag="float"):
    """A REAL."""

    value: float | None


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A TEXT."""

    value: str


class Blob(msgspec.Struct, frozen=True, tag_field="type", tag="blob"):
    """A BLOB, in base64."""

    base64: str | None = None


WireValue: TypeAlias = Null | Integer | Float | Text | Blob

_NULL: Final = Null()


def to_wire(value: object) -> WireValue:
    """The value as it is sent. Raises what sqlite3 raises: `OverflowError`, `TypeError`; and `ValueError` for what JSON lacks."""
    match value:
        case None:
            return _NULL
        case str():
            return _text_to_wire(value)
        case int():
            return _integer_to_wire(value)
        case float():
            return _float_to_wire(value)
        case bytes() | bytearray() | memoryview():
            return Blob(base64.b64encode(value).decode())
    raise TypeError(f"{value!r} is a {type(value).__name__}, which SQLite cannot hold; pass None, int, float, str or bytes")


def from_wire(value: WireValue) -> SqliteValue:
    """The value that was received. Raises `ValueError` for an infinity, since the server does not send its sign."""
    match value:
        case Null():
            return None
        case Integer():
            return int(value.value)
        case Text():
            return value.value
        case Blob():
            return _decode_base64(value.base64 or "")
        case Float():
            if value.value is None:
                raise ValueError("the server sent an infinity, which JSON cannot carry; CAST it to TEXT in the query")
            return value.value


def _integer_to_wire(value: int) -> Integer:
    if not _MIN_INTEGER <= value <= _MAX_INTEGER:
        raise OverflowError(f"{value} does not fit into SQLite's INTEGER of 64 bits")
    return Integer(str(int(value)))


def _float_to_wire(value: float) -> WireValue:
    if math.isnan(value):
        return _NULL  # as SQLite itself stores it
    if math.isinf(value):
        raise ValueError(f"{value} cannot be sent to a libSQL server, since JSON has no infinities")
    return Float(value)


def _text_to_wire(value: str) -> Text:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} has a lone surrogate, which is no text to SQLite") from None
    return Text(str(value))


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
