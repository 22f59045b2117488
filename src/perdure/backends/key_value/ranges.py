"""Sets of whole numbers that have few gaps, as a list of their ranges: what is recorded, what was consumed, what is streamed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

# First and last number of each range, in order, neither touching nor overlapping.
Ranges: TypeAlias = list[tuple[int, int]]


def has(ranges: Ranges, number: int) -> bool:
    """Whether the number is in one of them."""
    at = bisect_right(ranges, (number, number)) - 1
    # A range that begins with this number and goes on sorts behind (number, number).
    return (at >= 0 and ranges[at][1] >= number) or (at + 1 < len(ranges) and ranges[at + 1][0] == number)


def joined(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """The ranges, with these numbers too."""
    merged: Ranges = []
    for first, last in sorted([*ranges, *((number, number) for number in numbers)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def total(ranges: Ranges) -> int:
    """How many numbers there are."""
    return sum(last - first + 1 for first, last in ranges)


def highest(ranges: Ranges) -> int:
    """The highest number, or zero."""
    return ranges[-1][1] if ranges else 0


def above(ranges: Ranges, number: int, limit: int | None = None) -> set[int]:
    """The numbers above this one, the lowest `limit` of them."""
    found: set[int] = set()
    for first, last in ranges:
        begin = max(first, number + 1)
        end = last if limit is None else min(last, begin + limit - len(found) - 1)
        found.update(range(begin, end + 1))
    return found
