from __future__ import annotations

import pytest

from tests.backends.ledger import PLACES, Line, check, count_repeats

GOOD = [Line("1", "drive", "run", step) for step in PLACES]


def test_a_run_without_a_kill_is_as_it_must_be() -> None:
    check(GOOD)
    assert count_repeats(GOOD) == 0


def test_a_step_in_flight_may_run_again() -> None:
    again = [*GOOD[:2], Line("2", "next", "run", "a1"), *GOOD[2:]]
    check(again)
    assert count_repeats(again) == 1


@pytest.mark.parametrize(
    "bad",
    [
        [*GOOD, Line("2", "next", "run", "a1")],
        [GOOD[1], *GOOD],
        [*GOOD, GOOD[-1]],
        GOOD[:-1],
        [line for line in GOOD if line.step != "ask"],
        [*GOOD, Line("2", "next", "run", "flaky2")],
    ],
    ids=["acknowledged", "skipped at first", "twice in a drive", "not ended", "left out", "attempt counted again"],
)
def test_what_must_not_be_is_noticed(bad: list[Line]) -> None:
    with pytest.raises(AssertionError):
        check(bad)
