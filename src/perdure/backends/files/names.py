"""Ids as file names: every id has one name, and no two ids share one, also where case or normal form do not count.

A name is made of lower-case letters, digits and `-`, with every other byte of the id as `_` and two hex digits. It begins with a
letter and `-`, so that it is never reserved (`con`, `nul`), hidden, empty or a way up (`..`). An id whose name would be longer
than file systems take is named by its hash; what the file holds says which id it really is.
"""

from __future__ import annotations

import hashlib
from typing import Final

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_BYTES: Final = tuple(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in range(256))
# File systems take 255 bytes, encrypted ones 143.
_LONGEST: Final = 140


def run_name(run_id: str) -> str:
    """The directory of this run."""
    return _name("r-", "s-", run_id)


def namespace_name(prefix: str) -> str:
    """The directory of this namespace."""
    return _name("n-", "m-", prefix)


def _name(plain: str, hashed: str, text: str) -> str:
    encoded = text.encode()
    name = plain + "".join([_BYTES[byte] for byte in encoded])
    return name if len(name) <= _LONGEST else hashed + hashlib.sha256(encoded).hexdigest()
