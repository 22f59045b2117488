"""The namespace that a store's `prefix=` names: a column of every key, never a part of an id."""

from __future__ import annotations

from typing import Final

_MAX_NAMESPACE_BYTES: Final = 255


def checked_namespace(prefix: str, what: str = "prefix") -> str:
    """The prefix as a namespace. Raises `ValueError` unless it is text of at most 255 UTF-8 bytes without NUL."""
    try:
        is_good = isinstance(prefix, str) and "\0" not in prefix and len(prefix.encode()) <= _MAX_NAMESPACE_BYTES
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ValueError(f"{what} {prefix!r} must be a str of at most {_MAX_NAMESPACE_BYTES} UTF-8 bytes without NUL")
    return prefix
