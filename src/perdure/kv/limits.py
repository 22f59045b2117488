"""What a key, a value, a lifetime, a namespace and a pattern may be: the same in every key-value store.

No text of a pattern ever becomes a LIKE, a glob or a regular expression. A pattern asks the database for the keys from its
literal beginning on, up to where that beginning ends; what comes back is matched with `fits`.

Keys are text that every database can hold and compare byte for byte. Values are any text at all: they are kept as UTF-8, lone
surrogates as the three bytes they would have.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from perdure.errors import ValueNotStorable
from perdure.model.durations import Duration, microseconds
from perdure.model.ids import checked_namespace as stores_namespace

# The longest run id, and as much again for a prefix.
MAX_KEY_BYTES: Final = 2048
MAX_VALUE_BYTES: Final = 64 << 20
_SHOWN: Final = 80


def checked_key(key: str) -> str:
    """The key. Raises `ValueError` unless it has 1 to 2,048 UTF-8 bytes, without NUL or lone surrogates."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    size = _size(key)
    if size is None:
        raise ValueError(f"key {_shown(key)!r} contains a lone surrogate, which not every key-value store can hold")
    if not key or size > MAX_KEY_BYTES or "\0" in key:
        raise ValueError(f"key {_shown(key)!r} must have 1 to {MAX_KEY_BYTES} UTF-8 bytes and no NUL (it has {size} bytes)")
    return key


def encoded(key: str, value: str, *, most: int = MAX_VALUE_BYTES) -> bytes:
    """The bytes of a value. Raises `ValueNotStorable` when there are more than `most`."""
    if not isinstance(value, str):
        raise TypeError(f"the value of key {_shown(key)!r} must be a str, not {type(value).__name__}")
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > most:
        raise ValueNotStorable(f"key {_shown(key)!r}", f"it has {len(data)} bytes, and this key-value store takes {most}")
    return data


def decoded(data: bytes) -> str:
    """The value that has these bytes."""
    return data.decode("utf-8", "surrogatepass")


def lifetime(ttl: Duration | None) -> int | None:
    """For how many microseconds a value is kept; None is for good. Raises `ValueError` for what is no length of time."""
    return None if ttl is None else microseconds(ttl, what="ttl")


def checked_namespace(namespace: str) -> str:
    """The namespace. Raises `ValueError` unless it is text of at most 255 UTF-8 bytes without NUL."""
    return stores_namespace(namespace, "namespace")


def escaped(namespace: str) -> str:
    """The namespace without colons, so that one can end it."""
    return namespace.replace("%", "%25").replace(":", "%3A")


def _size(text: str) -> int | None:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _shown(text: str) -> str:
    return text if len(text) < _SHOWN else text[: _SHOWN - 3] + "..."


class Range(NamedTuple):
    """The keys from `first` on and before `end`, by their bytes; without an `end`, all the rest."""

    first: str
    end: str | None


def literal_beginning(pattern: str) -> str | None:
    """What every key that fits begins with, or None when no key can fit, because keys are text without NUL."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, not {type(pattern).__name__}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        return None
    return None if "\0" in pattern or not pattern else pattern.partition("*")[0]


def range_of(beginning: str) -> Range:
    """The range of the keys that begin so."""
    kept = beginning.rstrip("\U0010ffff")
    if not kept:
        return Range(beginning, None)
    last = ord(kept[-1]) + 1
    return Range(beginning, kept[:-1] + chr(0xE000 if last == 0xD800 else last))  # surrogates are no text
