"""How long a body is waited for that is busy with something of its own. The body and its calls are stood in for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from perdure.body.patience import MOST_PATIENCE, Patience
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry
from perdure.testing import ManualClock

GRACE = 10 * MICROSECOND


class Body:
    """A body, its calls and its place in the journal, as far as patience is concerned."""

    def __init__(self) -> None:
        self.is_busy = True
        self.calls_made = 0
        self.last_at = 0
        self.times_scheduled = 0

    @property
    def cursor(self) -> Body:
        return self

    def has_own_waits(self, known: object) -> bool:
        return self.is_busy

    def waited_for(self) -> set[int]:
        return set()

    def schedule(self) -> None:
        self.times_scheduled += 1


class Waiting:
    """A body that is waited for."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.body = Body()
        body = cast("Any", self.body)
        self.patience = Patience(self.clock, GRACE, body, body)

    def has(self, took: int = 0, *, is_spinning: bool = False) -> bool:
        return self.patience.has(Entry(seq=1, key="a", started_at=took), is_spinning=is_spinning)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.advance(seconds)


async def test_a_body_that_is_busy_by_itself_is_waited_for_as_long_as_the_grace() -> None:
    waiting = Waiting()
    assert waiting.has()
    waiting.pass_seconds(9)
    assert waiting.has()
    waiting.pass_seconds(1)
    assert not waiting.has()


async def test_a_body_in_which_nothing_is_busy_by_itself_is_not_waited_for() -> None:
    waiting = Waiting()
    waiting.body.is_busy = False
    assert not waiting.has()
    assert not waiting.patience.has_for_leaving()


async def test_a_body_that_never_rests_is_waited_for() -> None:
    waiting = Waiting()
    waiting.body.is_busy = False
    assert waiting.has(is_spinning=True)


@pytest.mark.parametrize(
    ("took", "seconds"), [(1, 10), (60, 120), (100_000, MOST_PATIENCE // MICROSECOND)], ids=["grace", "twice", "at most"]
)
async def test_an_entry_is_waited_for_twice_as_long_as_it_took_in_bounds(took: int, seconds: int) -> None:
    waiting = Waiting()
    waiting.body.last_at = 5 * MICROSECOND
    started_at = (5 + took) * MICROSECOND
    assert waiting.has(started_at)
    waiting.pass_seconds(seconds - 1)
    assert waiting.has(started_at)
    waiting.pass_seconds(1)
    assert not waiting.has(started_at)


async def test_a_call_of_the_body_begins_the_patience_again() -> None:
    waiting = Waiting()
    assert waiting.has()
    waiting.pass_seconds(9)
    waiting.body.calls_made += 1
    assert waiting.has()
    waiting.pass_seconds(9)
    assert waiting.has()
    waiting.pass_seconds(1)
    assert not waiting.has()


async def test_a_delivery_begins_the_patience_again() -> None:
    waiting = Waiting()
    assert waiting.has()
    waiting.pass_seconds(9)
    waiting.patience.end()
    assert waiting.has()
    waiting.pass_seconds(9)
    assert waiting.has()


async def test_the_body_is_looked_at_again_when_the_patience_has_ended() -> None:
    waiting = Waiting()
    assert waiting.has()
    assert waiting.clock.next_at() == waiting.clock.now() + GRACE


async def test_nothing_is_looked_at_once_the_body_has_gone_on() -> None:
    waiting = Waiting()
    assert waiting.has()
    waiting.patience.end()
    assert waiting.clock.next_at() is None


async def test_a_run_whose_body_is_busy_by_itself_stays_in_memory_for_the_grace() -> None:
    waiting = Waiting()
    assert waiting.patience.has_for_leaving()
    waiting.pass_seconds(10)
    assert not waiting.patience.has_for_leaving()
