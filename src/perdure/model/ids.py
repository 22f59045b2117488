"""Ids and namespaces: what they may be, and random bytes for ids and tokens.

Random bytes are fetched many at a time: `os.urandom` releases the GIL, and another thread may keep it for a while.
"""

from __future__ import annotations

import os
from typing import Final

MAX_ID_BYTES: Final = 1024
_MAX_NAMESPACE_BYTES: Final = 255


def check_id(text: object, what: str) -> str:
    """`text` as a run id or key: a non-empty str of at most 1,024 UTF-8 bytes without NUL or lone surrogates."""
    if type(text) is str and text.isascii() and 0 < len(text) <= MAX_ID_BYTES and "\0" not in text:
        return text  # the common case
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} {text!r} contains a lone surrogate, which not every store can hold") from None
    if not text or size > MAX_ID_BYTES or "\0" in text:
        shown = text if len(text) < 80 else text[:77] + "..."
        raise ValueError(f"{what} {shown!r} must have 1 to {MAX_ID_BYTES} UTF-8 bytes and no NUL (it has {size} bytes)")
    return text


def check_namespace(prefix: str, what: str = "prefix") -> str:
    """The prefix as a namespace. Raises `ValueError` unless it is text of at most 255 UTF-8 bytes without NUL."""
    try:
        is_good = isinstance(prefix, str) and "\0" not in prefix and len(prefix.encode()) <= _MAX_NAMESPACE_BYTES
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ValueError(f"{what} {prefix!r} must be a str of at most {_MAX_NAMESPACE_BYTES} UTF-8 bytes without NUL")
    return prefix


_SIZE: Final = 16
_AT_ONCE: Final = 64

# Fetched and not used yet. `list.pop` is atomic, so any thread may take one.
_ready: Final[list[bytes]] = []


def random_bytes() -> bytes:
    """Sixteen random bytes."""
    while True:
        try:
            return _ready.pop()
        except IndexError:
            fresh = os.urandom(_SIZE * _AT_ONCE)
            _ready.extend(fresh[start : start + _SIZE] for start in range(0, len(fresh), _SIZE))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ready.clear)  # the parent uses them
