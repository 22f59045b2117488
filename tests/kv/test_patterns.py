"""A range holds exactly the keys that begin so, by their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kv.limits import Range, literal_beginning, range_of

# Few characters, so that they meet: the first and last of each length in UTF-8, and those beside the surrogates.
TEXT = st.text(st.sampled_from("ab\x01\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff"), max_size=4)


@given(TEXT, TEXT)
def test_a_range_has_the_keys_that_begin_so_and_no_others(beginning: str, key: str) -> None:
    first, end = range_of(beginning)
    is_inside = first.encode() <= key.encode() and (end is None or key.encode() < end.encode())
    assert is_inside == key.startswith(beginning) or (end is None and key > beginning)


def test_what_no_text_comes_after_has_no_end() -> None:
    assert range_of("") == Range("", None)
    assert range_of("\U0010ffff\U0010ffff") == Range("\U0010ffff\U0010ffff", None)
    assert range_of("a\U0010ffff") == Range("a\U0010ffff", "b")
    assert range_of("\ud7ff") == Range("\ud7ff", "\ue000")


@pytest.mark.parametrize(
    ("pattern", "beginning"), [("*", ""), ("a*b*", "a"), ("ab", "ab"), ("", None), ("a\0*", None), ("*\ud800", None)]
)
def test_a_pattern_begins_with_what_stands_before_its_first_star(pattern: str, beginning: str | None) -> None:
    assert literal_beginning(pattern) == beginning


def test_a_pattern_is_text() -> None:
    with pytest.raises(TypeError, match="a pattern must be a str, not bytes"):
        literal_beginning(b"*")  # type: ignore[arg-type]  # on purpose
