"""What every store needs to give a lease."""

from __future__ import annotations

from typing import Final

from perdure.model.durations import MICROSECOND, microseconds
from perdure.model.ids import random_bytes

_A_YEAR: Final = 366 * 86_400.0


def lease_microseconds(ttl: float) -> int:
    """The length of a lease. Raises `ValueError` unless it is finite and above zero."""
    if type(ttl) is float and 0 < ttl < _A_YEAR:
        return round(ttl * MICROSECOND)  # as nearly all are
    length = microseconds(ttl, what="ttl")
    if length <= 0:
        raise ValueError(f"ttl must be above zero, not {ttl!r}")
    return length


def new_token() -> str:
    """A token that nobody can guess."""
    return random_bytes().hex()


def length_in_microseconds(seconds: float) -> int:
    """The length in whole microseconds."""
    return round(seconds * MICROSECOND)
