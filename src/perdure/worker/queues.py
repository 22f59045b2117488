"""`Queue`: how many runs of a queue are driven at once by all workers of a store, and how fast they start.

The store keeps the limits and counts leases, so that they hold for all processes. There a rate is the least time between two
starts, by the store's clock; here it is text, as in `rate="10/s"`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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


def check_queues(queues: Any) -> tuple[Queue, ...]:
    """Return the queues whose limits are to be set. Raises TypeError or ValueError."""
    if queues is None:
        return ()
    if isinstance(queues, Queue):
        raise TypeError(f"queues= takes a list of queues: [{queues!r}]")
    if isinstance(queues, str) or not isinstance(queues, Collection):
        raise _no_queue(queues)
    seen: set[str] = set()
    for queue in queues:
        if not isinstance(queue, Queue):
            raise _no_queue(queue)
        if queue.name in seen:
            raise ValueError(f"queues= has {queue.name!r} twice; give all limits of a queue in one Queue(...)")
        seen.add(queue.name)
    return tuple(queues)


def _no_queue(found: object) -> TypeError:
    hint = f'; to take runs of some queues only, pass only_queues=["{found}"]' if isinstance(found, str) else ""
    return TypeError(f'queues= takes Queue("mail", concurrency=5, ...) objects, whose limits it sets, not {found!r}{hint}')


def check_queue_names(names: Any) -> frozenset[str] | None:
    """Return the names of the queues that a worker takes runs of; None for all. Raises TypeError or ValueError."""
    if names is None:
        return None
    if isinstance(names, str | Queue) or not isinstance(names, Collection):
        raise TypeError(f"only_queues= takes a list of queue names, such as ['mail'], not {names!r}")
    if not names:
        raise ValueError("only_queues= is empty, so this worker would take no run; name a queue, or leave it out for all queues")
    for name in names:
        if isinstance(name, Queue):
            raise TypeError(f"only_queues= takes names, such as {name.name!r}, not {name!r}; queues= sets limits")
    return frozenset(check_id(name, "a queue's name") for name in names)
