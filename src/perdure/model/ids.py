"""Ids and namespaces: what they may be, and random bytes for ids and tokens.

Random bytes are fetched many at a time: `os.urandom` releases the GIL, and another thread may keep it for a while.
"""

from __future__ import annotations

import os
from typing import Final

MAX_ID_BYTES: Final = 1024
_MAX_NAMESPACE_BYTES: Final = 255
_MAX_SHOWN: Final = 80


def check_id(text: object, what: str) -> str:
    """`text` as a run id or key: a non-empty str of at most 1,024 UTF-8 bytes without NUL or lone surrogates.

    Raises `TypeError` for what is no text, `ValueError` for text that is no id. Of a subclass of str only the text counts.
    """
    if type(text) is str and text.isascii() and 0 < len(text) <= MAX_ID_BYTES and "\0" not in text:
        return text  # the common case
    checked = check_text(text, what)
    if not checked:
        raise ValueError(f"{what} must have 1 to {MAX_ID_BYTES} UTF-8 bytes, but it is empty")
    return checked


def check_text(text: object, what: str) -> str:
    """As `check_id`, for text that may be empty: a prefix of ids, or a name that a restored run may lack."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    plain = text if type(text) is str else str.__str__(text)
    try:
        size = len(plain.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} {_shorten(plain)!r} contains a lone surrogate, which not every store can hold") from None
    if size > MAX_ID_BYTES or "\0" in plain:
        raise ValueError(
            f"{what} {_shorten(plain)!r} must have at most {MAX_ID_BYTES} UTF-8 bytes and no NUL (it has {size} bytes)"
        )
    return plain


def _shorten(text: str) -> str:
    return text if len(text) < _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def check_namespace(prefix: str, what: str = "prefix") -> str:
    """The prefix as a namespace: `TypeError` unless it is text, `ValueError` unless of at most 255 UTF-8 bytes without NUL."""
    if not isinstance(prefix, str):
        raise TypeError(f"{what} must be a str, not {type(prefix).__name__}")
    try:
        is_good = "\0" not in prefix and len(prefix.encode()) <= _MAX_NAMESPACE_BYTES
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ValueError(f"{what} {prefix!r} must have at most {_MAX_NAMESPACE_BYTES} UTF-8 bytes without NUL")
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
