"""What every store needs to give a lease."""

from __future__ import annotations

from perdure.duration import microseconds
from perdure.randomness import random_bytes


def lease_microseconds(ttl: float) -> int:
    """The length of a lease. Raises `ValueError` unless it is finite and above zero."""
    length = microseconds(ttl, what="ttl")
    if length <= 0:
        raise ValueError(f"ttl must be above zero, not {ttl!r}")
    return length


def new_token() -> str:
    """A token that nobody can guess."""
    return random_bytes().hex()
