"""Lengths of time, as people write them: a `timedelta`, a number of seconds, or text like `"1h30m"`."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

Duration: TypeAlias = timedelta | float | int | str

MICROSECOND: Final = 1_000_000
# The last instant that a datetime can represent. Deadlines past it are refused when they are set, not when they come due.
MAX_INSTANT: Final = 253_402_300_799 * MICROSECOND

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def seconds(duration: Duration, *, what: str = "duration") -> float:
    """The length in seconds: finite, not negative, short enough to end before the year 10000."""
    if isinstance(duration, bool) or not isinstance(duration, timedelta | float | int | str):
        raise TypeError(f"{what} must be a timedelta, seconds or text like '1h30m', not {duration!r}")
    value = _parse(duration, what) if isinstance(duration, str) else _number(duration)
    if not math.isfinite(value) or value < 0 or value > MAX_INSTANT / MICROSECOND:
        raise ValueError(f"{what} must be zero or more and end before the year 10000, not {duration!r}")
    return value


def _number(duration: timedelta | float | int) -> float:
    try:
        return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except OverflowError:
        return math.inf


def _parse(text: str, what: str) -> float:
    compact = text.strip().replace(" ", "")
    parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        units = ", ".join(_UNITS)
        raise ValueError(f"{what} {text!r} is not a length of time; write it like '90s', '1h30m' or '2d' (units: {units})")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def microseconds(duration: Duration, *, what: str = "duration") -> int:
    """The length in whole microseconds, rounded."""
    return round(seconds(duration, what=what) * MICROSECOND)


def instant(moment: datetime, *, what: str = "moment") -> int:
    """An aware datetime as integer microseconds UTC."""
    if not isinstance(moment, datetime):
        raise TypeError(f"{what} must be a datetime, not {moment!r}")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{what} {moment!r} has no time zone; pass an aware datetime, such as datetime.now(UTC)")
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def moment(at: int) -> datetime:
    """Integer microseconds UTC as an aware datetime."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at)
