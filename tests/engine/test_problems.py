"""When a run with a problem is tried again, and its problem as text that every store holds."""

from __future__ import annotations

import pytest

from perdure.model.records import misfit_pause, problem_text


def test_the_pause_doubles_from_five_seconds_to_five_minutes() -> None:
    assert [misfit_pause(count) for count in range(8)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert misfit_pause(10**9) == 300


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("step 'charge' is missing", "step 'charge' is missing"),
        (ValueError("no field 'cents'"), "no field 'cents'"),
        (ValueError(), "ValueError"),
        ("", "unknown"),
        ("a\0b\ud800c", "a\\x00b\\ud800c"),
    ],
)
def test_a_problem_is_text_that_every_store_holds(problem: BaseException | str, text: str) -> None:
    assert problem_text(problem) == text


def test_a_long_problem_keeps_its_beginning_and_its_end() -> None:
    text = problem_text("first " + "x" * 100_000 + " last")
    assert len(text) <= 4000
    assert text.startswith("first ")
    assert text.endswith(" last")
