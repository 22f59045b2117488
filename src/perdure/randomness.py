"""Random bytes for seeds and lease tokens, fetched many at a time.

Asking the system for them takes no time, but lets another thread have the interpreter meanwhile, and it may keep it for a while.
"""

from __future__ import annotations

import os
from typing import Final

_SIZE: Final = 16
_AT_ONCE: Final = 64

# Fetched and not given out. Any thread takes one off the end, which nothing can come between.
_ready: Final[list[bytes]] = []


def random_bytes() -> bytes:
    """Sixteen bytes that nobody else gets."""
    while True:
        try:
            return _ready.pop()
        except IndexError:
            fresh = os.urandom(_SIZE * _AT_ONCE)
            _ready.extend(fresh[start : start + _SIZE] for start in range(0, len(fresh), _SIZE))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ready.clear)  # they are the parent's
