"""A range has exactly the keys with the prefix, by their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kv.patterns import KeyRange, key_range, literal_prefix

# Few characters, so that they meet: the first and last of each length in UTF-8, and those beside the surrogates.
TEXT = st.text(st.sampled_from("ab\x01\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff"), max_size=4)


@given(TEXT, TEXT)
def test_a_range_has_the_keys_that_begin_so_and_no_others(beginning: str, key: str) -> None:
    first, end = key_range(beginning)
    is_inside = first.encode() <= key.encode() and (end is None or key.encode() < end.encode())
    assert is_inside == key.startswith(beginning) or (end is None and key > beginning)


def test_what_no_text_comes_after_has_no_end() -> None:
    assert key_range("") == KeyRange("", None)
    assert key_range("\U0010ffff\U0010ffff") == KeyRange("\U0010ffff\U0010ffff", None)
    assert key_range("a\U0010ffff") == KeyRange("a\U0010ffff", "b")
    assert key_range("\ud7ff") == KeyRange("\ud7ff", "\ue000")


@pytest.mark.parametrize(
    ("pattern", "beginning"), [("*", ""), ("a*b*", "a"), ("ab", "ab"), ("", None), ("a\0*", None), ("*\ud800", None)]
)
def test_a_pattern_begins_with_what_stands_before_its_first_star(pattern: str, beginning: str | None) -> None:
    assert literal_prefix(pattern) == beginning


def test_a_pattern_is_text() -> None:
    with pytest.raises(TypeError, match="a pattern must be a str, not bytes"):
        literal_prefix(b"*")  # type: ignore[arg-type]  # on purpose
