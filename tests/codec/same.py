"""A comparison stricter than `==`: types, order, signs and NaN count, all the way down."""

from __future__ import annotations

import math
import struct
from datetime import datetime, time
from decimal import Decimal
from typing import Any

import msgspec


def same(left: Any, right: Any) -> bool:
    """Whether two values have the same types and content; sets and frozensets have no order to compare."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, Decimal):
        return bool(left.as_tuple() == right.as_tuple())
    if isinstance(left, datetime | time):
        return _moment(left) == _moment(right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, set | frozenset):
        return _matched(list(left), list(right))
    if isinstance(left, msgspec.Struct):
        return same(msgspec.structs.asdict(left), msgspec.structs.asdict(right))
    return bool(left == right)


def _moment(value: datetime | time) -> tuple[Any, ...]:
    zone = value.tzinfo
    return (value.replace(tzinfo=None), value.fold, type(zone), repr(zone))


def _matched(left: list[Any], right: list[Any]) -> bool:
    for item in left:
        at = next((index for index, other in enumerate(right) if same(item, other)), None)
        if at is None:
            return False
        del right[at]
    return not right


def mutable_parts(value: Any) -> set[int]:
    """The ids of everything in a value that could be changed in place."""
    found = set()
    if isinstance(value, list | dict | set | bytearray):
        found.add(id(value))
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(value, list | tuple | set | frozenset | dict):
        found.update(*(mutable_parts(part) for part in parts), ())
    return found
