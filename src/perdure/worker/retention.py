"""The retention of a worker: now and then it deletes the runs whose time is over.

Each worker of a fleet does this by itself and at random times. Two that meet take different runs, or find nothing. A round is one
statement for each workflow and age where nothing is due, and a batch at a time where there is much.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from perdure.model.clock import elapsed
from perdure.model.durations import MICROSECOND
from perdure.model.logs import log
from perdure.model.records import EndStatus
from perdure.model.retention import RetentionRules, ages
from perdure.store import require
from perdure.worker.host import Host

# The longest and the shortest time between two rounds, in seconds; in between it is half of the shortest age.
LONGEST_PAUSE: Final = 600.0
SHORTEST_PAUSE: Final = 10.0
# The first round of a worker comes sooner, since a worker may live for less than the longest pause.
FIRST_PAUSE: Final = 60.0
# How many runs one transition deletes. After a full batch the worker rests for as long as the batch took, and at least so long.
BATCH: Final = 500
REST: Final = 0.05


class RetentionWork:
    """Deletes ended runs of the workflows that are registered with a host, by the rules of the runtime and of each workflow."""

    def __init__(self, host: Host, rules: RetentionRules) -> None:
        self._host = host
        self._rules = rules

    @property
    def has_rules(self) -> bool:
        """Whether there is anything to delete at any time."""
        return bool(self._rules) or any(workflow.retention for workflow in self._host.workflows.values())

    async def work(self) -> None:
        """Delete what is due, again and again, until cancelled.

        Of failures in a row the second is logged: the worker reports a store that is down, and most outages are short.
        """
        failures, pause = 0, min(FIRST_PAUSE, self._pause())
        while True:
            await self._sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - to spread out, not to hide
            try:
                await self.delete_due()
                failures = 0
            except Exception as failure:  # noqa: BLE001 - the store may fail in any way
                failures += 1
                if failures == 2:
                    log.warning("old runs could not be deleted, trying again later: %s", failure)
            pause = self._pause()

    async def delete_due(self) -> int:
        """Delete everything whose time is over, and say how many runs that were."""
        total = 0
        for name, rules in self._rules_by_workflow().items():
            for age, statuses in ages(rules).items():
                deleted = await self._delete(name, age, statuses)
                total += deleted
                if deleted:
                    ends, fields = " or ".join(statuses), {"workflow": name}
                    log.info("deleted %d runs of workflow %r that had been %s for long enough", deleted, name, ends, extra=fields)
        return total

    async def _delete(self, workflow: str, age: float, statuses: list[EndStatus]) -> int:
        store, total = require(self._host.store, "operators"), 0
        while True:
            asked_at, now = elapsed(), self._host.clock.store_now()
            deleted = await store.purge(age, status=statuses, workflow=workflow, limit=BATCH, now=now)
            total += deleted
            if deleted < BATCH:
                return total
            await asyncio.sleep(max(REST, elapsed() - asked_at))

    def _rules_by_workflow(self) -> dict[str, RetentionRules]:
        """The rules of each workflow under each of its names. Of several versions the newest one's hold: a store knows names."""
        known = self._host.workflows
        return {name: {**self._rules, **known[name, version].retention} for name, version in sorted(known)}

    def _pause(self) -> float:
        lengths = [age for rules in (self._rules, *self._rules_by_workflow().values()) for age in ages(rules)]
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, min(lengths, default=LONGEST_PAUSE) / 2))

    async def _sleep(self, length: float) -> None:
        over, clock = asyncio.Event(), self._host.clock
        timer = clock.call_at(clock.now() + round(length * MICROSECOND), over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()
