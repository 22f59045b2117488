"""`Queue`: how many runs of a queue are driven at once by all workers of a store, and how fast they start.

The store keeps the limits and counts leases, so that they hold for all processes. There a rate is the least time between two
starts, by the store's clock; here it is text, as in `rate="10/s"`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from perdure.model.durations import MICROSECOND
from perdure.model.ids import check_id
from perdure.model.records import QueueLimits

_UNITS: Final = {"s": MICROSECOND, "m": 60 * MICROSECOND, "h": 3600 * MICROSECOND, "d": 86_400 * MICROSECOND}
_RATE: Final = re.compile(r"([0-9]+)/([smhd])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Queue:
    """The limits of a queue: how many runs are driven at once, in all and for each `limit_key`, and how fast they start.

    `rate` is "10/s", or as many per minute (m), hour (h) or day (d). Runs start evenly: "60/m" is one each second, not sixty at
    once. None is no limit.
    """

    name: str
    _: KW_ONLY
    concurrency: int | None = None
    per_key: int | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_id(self.name, "a queue's name"))
        _ = self.limits  # raises for what is no limit

    @property
    def limits(self) -> QueueLimits:
        """The limits as a store has them."""
        interval = None if self.rate is None else parse_rate(self.rate)
        return QueueLimits(concurrency=self.concurrency, per_key=self.per_key, interval=interval)

    @classmethod
    def of(cls, name: str, limits: QueueLimits) -> Queue:
        """The queue that has these limits in a store."""
        rate = None if limits.interval is None else rate_text(limits.interval)
        return cls(name, concurrency=limits.concurrency, per_key=limits.per_key, rate=rate)


def parse_rate(rate: Any) -> int:
    """The microseconds between two starts at this rate, rounded up. Raises TypeError or ValueError."""
    if not isinstance(rate, str):
        raise TypeError(f'rate is text, such as "10/s" or "600/h", not {rate!r}')
    found = _RATE.fullmatch(rate.replace(" ", ""))
    if found is None:
        raise ValueError(
            f'rate {rate!r} must be a whole number per second, minute, hour or day: "10/s", "30/m", "600/h" or "5/d"'
        )
    number, unit = int(found[1]), _UNITS[found[2]]
    if not 1 <= number <= unit:
        raise ValueError(f"rate {rate!r} must be at least 1 and at most {unit}/{found[2]}")
    return -(-unit // number)


def rate_text(interval: int) -> str:
    """The rate at which runs start that are so many microseconds apart: `parse_rate` of it is the interval, or a little more."""
    for name, unit in _UNITS.items():
        for number in (unit // interval, unit // interval + 1):
            if number and -(-unit // number) == interval:
                return f"{number}/{name}"
    return f"{_UNITS['d'] // interval}/d"


def split_queues(queues: Any) -> tuple[frozenset[str] | None, tuple[Queue, ...]]:
    """The names of these queues, None for all, and those that have limits to be set. Raises TypeError or ValueError."""
    if queues is None:
        return None, ()
    if isinstance(queues, str | Queue) or not isinstance(queues, Collection):
        raise TypeError(f"queues= takes a collection of queues and names: [{queues!r}]")
    limited = tuple(queue for queue in queues if isinstance(queue, Queue))
    names = [queue.name if isinstance(queue, Queue) else check_id(queue, "a queue's name") for queue in queues]
    _refuse_repeated(names)
    return frozenset(names), limited


def _refuse_repeated(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"queues= has {name!r} twice; give all limits of a queue in one Queue(...)")
        seen.add(name)
