"""When something happens again: by a cron expression in a time zone, or every so often.

Cron follows Debian's rules over daylight-saving changes. A job at a certain time of day that the change leaves out runs once,
right after it; one whose time comes twice runs the first time only. A job with `*` in its minutes or hours follows the real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.model.durations import MAX_INSTANT, MICROSECOND, Duration, instant, microseconds, moment

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

_MINUTE: Final = 60 * MICROSECOND
_DAY: Final = 24 * 60 * _MINUTE
# How far `latest` looks back, step by step: near first, since walking through a year of seconds would take minutes.
_WINDOWS: Final = (_MINUTE, 60 * _MINUTE, _DAY, 31 * _DAY, 366 * _DAY, 9 * 366 * _DAY)


class Recurrence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cron expression in a time zone, or a length in microseconds that is counted from `anchor`."""

    cron: str | None = None
    tz: str = "UTC"
    every: int | None = None
    anchor: int = 0

    def after(self, at: int) -> int | None:
        """The first instant after `at`; None when there is none."""
        if self.every is not None:
            following = self.anchor + ((at - self.anchor) // self.every + 1) * self.every
            return following if following <= MAX_INSTANT else None
        return next((each for each in self._cron_instants(at) if each > at), None)

    def latest(self, first: int, now: int) -> int:
        """The last instant up to `now`, of those from `first` on, which is one of them."""
        if self.every is not None:
            return max(first, now - (now - self.anchor) % self.every)
        for window in _WINDOWS:
            found = None
            for each in self._cron_instants(max(first, now - window) - 1):
                if each > now:
                    break
                found = each if each >= first else found
            if found is not None:
                return found
        return first

    def _cron_instants(self, at: int) -> Iterator[int]:
        """Instants in order, some of which may be at `at` or shortly before it."""
        for each in _parse(self.cron or "", moment(at).astimezone(_zone(self.tz))):
            yield instant(each.astimezone(UTC))


def recurrence(cron: str | None, every: Duration | None, tz: str | None, anchor: int) -> Recurrence:
    """The recurrence that a user describes. Raises TypeError or ValueError for one that is none."""
    if (cron is None) == (every is None):
        raise TypeError('pass cron="0 3 * * *" or every="5m", one of them')
    if every is not None:
        if tz is not None:
            raise TypeError("tz= is for cron=; every= counts seconds, which are the same everywhere")
        length = microseconds(every, what="every")
        if length < MICROSECOND:
            raise ValueError(f"every must be at least a second, not {every!r}")
        return Recurrence(every=length, anchor=anchor)
    zone = "UTC" if tz is None else tz
    if not isinstance(cron, str) or not isinstance(zone, str):
        raise TypeError(f"cron= and tz= are texts, not {cron!r} and {tz!r}")
    made = Recurrence(cron=" ".join(cron.split()), tz=zone)
    if made.after(anchor) is None:
        raise ValueError(f"cron expression {cron!r} never comes to pass")
    return made


def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # imported only if there is a cron expression

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as reason:
        raise ValueError(f"there is no time zone {name!r} here; write it like 'Europe/Berlin'") from reason


def _parse(cron: str, start: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as reason:
        raise ImportError("cron= needs cronsim: pip install 'perdure[cron]'") from reason
    try:
        return CronSim(cron, start)
    except CronSimError as reason:
        raise ValueError(f"cron expression {cron!r} cannot be read: {reason}; write it like '0 3 * * 1-5'") from reason
