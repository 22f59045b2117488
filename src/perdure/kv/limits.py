"""What a key, a value, a lifetime and a namespace may be: the same in every key-value store.

Keys are text that every database can hold and compare byte for byte. Values are any text: they are stored as UTF-8, and a lone
surrogate as the three bytes that UTF-8 would have for it.
"""

from __future__ import annotations

from typing import Final

from perdure.errors import ValueNotStorable
from perdure.model.durations import Duration, microseconds
from perdure.model.ids import check_namespace as stores_namespace

# The longest run id, and as much again for a prefix.
MAX_KEY_BYTES: Final = 2048
MAX_VALUE_BYTES: Final = 64 << 20
_MAX_SHOWN: Final = 80


def check_key(key: str) -> str:
    """The key. Raises `ValueError` unless it has 1 to 2,048 UTF-8 bytes, without NUL or lone surrogates, `TypeError` for no text.

    Of a subclass of str only the text counts.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    key = key if type(key) is str else str.__str__(key)
    size = _size(key)
    if size is None:
        raise ValueError(f"key {_shorten(key)!r} contains a lone surrogate, which not every key-value store can hold")
    if not key or size > MAX_KEY_BYTES or "\0" in key:
        raise ValueError(f"key {_shorten(key)!r} must have 1 to {MAX_KEY_BYTES} UTF-8 bytes and no NUL (it has {size} bytes)")
    return key


def encode_value(key: str, value: str, *, most: int = MAX_VALUE_BYTES) -> bytes:
    """The bytes of a value. Raises `ValueNotStorable` when there are more than `most`."""
    if not isinstance(value, str):
        raise TypeError(f"the value of key {_shorten(key)!r} must be a str, not {type(value).__name__}")
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > most:
        raise ValueNotStorable(f"key {_shorten(key)!r}", f"it has {len(data)} bytes, and this key-value store takes {most}")
    return data


def decode_value(data: bytes) -> str:
    """The value that has these bytes."""
    return data.decode("utf-8", "surrogatepass")


def lifetime(ttl: Duration | None) -> int | None:
    """The ttl in microseconds; None: no expiry. Raises `ValueError` for what is no length of time."""
    return None if ttl is None else microseconds(ttl, what="ttl")


def check_namespace(namespace: str) -> str:
    """The namespace. Raises `ValueError` unless it is text of at most 255 UTF-8 bytes without NUL."""
    return stores_namespace(namespace, "namespace")


def escape_colons(text: str) -> str:
    """The text with its colons escaped, so that a colon can stand before or after it."""
    return text.replace("%", "%25").replace(":", "%3A")


def unescape_colons(escaped: str) -> str | None:
    """The text that `escape_colons` escaped, or None when it did not write this."""
    text = escaped.replace("%3A", ":").replace("%25", "%")
    return text if escape_colons(text) == escaped else None


def _size(text: str) -> int | None:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _shorten(text: str) -> str:
    return text if len(text) < _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
