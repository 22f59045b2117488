"""SQLite's values as Hrana writes them in JSON, and back.

An integer travels as decimal text, since JSON numbers lose precision past 2**53 in many readers; a blob as base64, padded or
not. A float is a JSON number, so infinities cannot travel: they are refused on the way out, and recognised on the way in, where
the server writes null for them.
"""

from __future__ import annotations

import base64
import math
from typing import Final, TypeAlias

import msgspec

Plain: TypeAlias = int | float | str | bytes | None

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1


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


Value: TypeAlias = Null | Integer | Float | Text | Blob

_NULL: Final = Null()


def to_wire(value: object) -> Value:
    """The value as it is sent. Raises what sqlite3 raises: `OverflowError`, `TypeError`; and `ValueError` for what JSON lacks."""
    match value:
        case None:
            return _NULL
        case str():
            return _text(value)
        case int():
            return _integer(value)
        case float():
            return _float(value)
        case bytes() | bytearray() | memoryview():
            return Blob(base64.b64encode(value).decode())
    raise TypeError(f"{value!r} is a {type(value).__name__}, which SQLite cannot hold; pass None, int, float, str or bytes")


def from_wire(value: Value) -> Plain:
    """The value that was received. Raises `ValueError` for an infinity, of which the server does not say which."""
    match value:
        case Null():
            return None
        case Integer():
            return int(value.value)
        case Text():
            return value.value
        case Blob():
            return _unpadded(value.base64 or "")
        case Float():
            if value.value is None:
                raise ValueError("the server sent an infinity, which JSON cannot carry; CAST it to TEXT in the query")
            return value.value


def _integer(value: int) -> Integer:
    if not _LEAST <= value <= _MOST:
        raise OverflowError(f"{value} does not fit into SQLite's INTEGER of 64 bits")
    return Integer(str(int(value)))


def _float(value: float) -> Value:
    if math.isnan(value):
        return _NULL  # as SQLite itself takes it
    if math.isinf(value):
        raise ValueError(f"{value} cannot be sent to a libSQL server, since JSON has no infinities")
    return Float(value)


def _text(value: str) -> Text:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} has a lone surrogate, which is no text to SQLite") from None
    return Text(str(value))


def _unpadded(text: str) -> bytes:
    return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
