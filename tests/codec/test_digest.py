"""A digest is the same wherever it is taken, and differs where values or their types differ."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import dataclass, field, make_dataclass
from decimal import Decimal, localcontext
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import Codec
from perdure.codec.checksums import have_changed
from tests.codec.models import Color, Item, Level, Order, Point
from tests.codec.same import same
from tests.codec.test_refusals import SHARED_TOO_OFTEN
from tests.codec.test_values import VALUES

codec = Codec()

PROGRAM = """
import sys
from datetime import datetime, UTC
from dataclasses import dataclass
from perdure.codec import Codec
@dataclass(frozen=True)
class P:
    name: str
    tags: frozenset
values = [
    ("a", 1), {"b": 1, "a": {"d": 2, "c": 3}}, {"a", "b", "c", "d"}, {("x", 1): {"q", "r"}, "y": 2, 3: 4},
    P("n", frozenset("abcdef")), {P("n", frozenset("ab")), P("m", frozenset("cd"))}, (datetime(2024, 1, 1, tzinfo=UTC), b"x"),
]
print(*[Codec().digest(value).hex() for value in values])
"""


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    source = str(Path(__file__).parents[2] / "src")
    shown = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": source, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in range(20)
    }
    assert len(shown) == 1


def test_values_of_different_types_have_different_digests() -> None:
    values: list[Any] = [
        1, 1.0, True, "1", b"1", None, [], (), {}, set(), frozenset(), [1], (1,), {1}, frozenset({1}), {"1": 1}, {1: 1}, {1.0: 1},
        {"a": None}, {}, "", 0, 0.0, -0.0, False, float("nan"), "null", [[1], 2], [1, [2]], ((1,),), [(1,)], ([1],), "\ud800",
        {"$tuple": [1]}, {"$$tuple": [1]}, Item("a"), {"sku": "a"}, Point(1, 2), Point(1.0, 2), Color.BLUE, "blue", Level.LOW,
        Order(1, []), 10**640, hex(10**640), bytearray(b"1"),
    ]  # fmt: skip
    distinct = [value for index, value in enumerate(values) if not any(same(value, other) for other in values[:index])]
    digests = [codec.digest(value) for value in distinct]
    assert None not in digests
    assert len(set(digests)) == len(distinct)


@given(VALUES)
def test_equal_values_have_equal_digests_of_16_bytes(value: Any) -> None:
    digest = codec.digest(value)
    assert digest is not None
    assert len(digest) == 16
    assert codec.digest(codec.dump(value)[1]) == digest


@given(st.dictionaries(st.text() | st.integers(), VALUES), st.randoms(use_true_random=False))
def test_the_order_of_a_dict_does_not_matter(value: dict[Any, Any], random: Any) -> None:
    shuffled = list(value.items())
    random.shuffle(shuffled)
    assert codec.digest(dict(shuffled)) == codec.digest(value)
    assert codec.digest((1, dict(shuffled))) == codec.digest((1, value))


@given(st.lists(VALUES, min_size=2, max_size=5))
def test_values_that_differ_have_different_digests(values: list[Any]) -> None:
    for left, right in combinations(values, 2):
        if codec.digest(left) == codec.digest(right):
            assert _unordered(left, right)


def _unordered(left: Any, right: Any) -> bool:
    """Whether two values are the same but for the order of dicts; compared by the characters of their reprs."""
    return type(left) is type(right) and sorted(repr(left)) == sorted(repr(right))


def test_a_class_needs_no_annotation_and_its_name_counts() -> None:
    assert codec.digest(Item("a")) == codec.digest(Item("a")) is not None
    assert codec.digest(Item("a")) != codec.digest(Item("b"))


def test_what_cannot_be_encoded_has_no_digest() -> None:
    circular: list[Any] = []
    circular.append(circular)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), [len], (1, object()), {"a": circular}, circular, deep, {len: 1}):
        assert codec.digest(value) is None


def test_a_digest_does_not_depend_on_the_decimal_context() -> None:
    value = [Decimal("1.5E+50"), Decimal("NaN")]
    with localcontext() as context:
        context.capitals, context.prec = 0, 2
        there = codec.digest(value)
    assert there == codec.digest(value) is not None


def test_a_value_that_shares_its_parts_too_often_has_no_digest() -> None:
    small = Codec(max_bytes=100_000)
    for make in SHARED_TOO_OFTEN.values():
        value = make()
        assert small.digest(value) is None
        assert small.digest((value,)) is None


def test_the_checksum_of_arguments_does_not_depend_on_the_way_it_is_taken() -> None:
    short, long = Codec(), Codec(max_depth=2)  # for the second nothing is short
    for args in ((), (1,), (5, "x"), (None, True, "é", 2**60), ("$",), ('"$',), (1.5,), ([1, 2], {"a": 1}), ((1,),)):
        assert short.checksum(args) == long.checksum(args) is not None, args
        assert len(short.checksum(args) or b"") == 4


@dataclass
class Message:
    role: str
    content: str


@dataclass
class Thread:
    messages: list[Message]
    tags: dict[str, Any]


def _grown(cls: type, *fields: Any, **hints: Any) -> Any:
    """The class after a deploy: with these fields too, each with a default."""
    annotations = [(name, hints.get(name, hint)) for name, hint in get_type_hints(cls).items()]
    made = make_dataclass(cls.__name__, [*annotations, *fields])
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def test_a_default_field_added_to_a_class_proves_no_other_arguments() -> None:
    now = _grown(Message, ("tool", str, None), ("parts", list, field(default_factory=list)))
    later = _grown(Thread, messages=types.GenericAlias(list, now))
    for before, after in (
        (Message("user", "hi"), now("user", "hi")),
        ([Message("user", "hi")], [now("user", "hi")]),
        ({"messages": [1, [Message("user", "hi")]]}, {"messages": [1, [now("user", "hi")]]}),
        (Thread([Message("user", "hi")], {}), later([now("user", "hi")], {})),
    ):
        assert not have_changed(codec.checksum((1, before)), codec.checksum((1, after)))
        assert codec.checksum((1, before)) is not None


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: [each], lambda each: {"a": [1, (each,)]}])
def test_other_fields_of_an_object_prove_other_arguments(wrap: Any) -> None:
    for left, right in (
        (Message("user", "hi"), Message("user", "ho")),
        (Thread([Message("user", "hi")], {}), Thread([Message("user", "ho")], {})),
        (Thread([], {"a": {1, 2}}), Thread([], {"a": {1, 3}})),
        (Thread([], {"a": object}), Thread([], {"a": {1, 3}})),
        (Item("a"), Item("b")),
        (Color.BLUE, Color.RED),
    ):
        is_comparable = codec.checksum((wrap(left),)) is not None
        assert have_changed(codec.checksum((wrap(left),)), codec.checksum((wrap(right),))) is is_comparable
        assert not have_changed(codec.checksum((wrap(right),)), codec.checksum((wrap(right),)))


def test_a_checksum_of_many_objects_takes_as_many_calls_as_of_few() -> None:
    def calls(number: int) -> int:
        messages = [Message("user", f"message {n}") for n in range(number)]
        codec.checksum((messages,))
        count = 0

        def note(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal count
            count += event in {"call", "c_call"}

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            codec.checksum((messages,))
        finally:
            sys.setprofile(before)
        return count

    # Only the buffer grows, a few times.
    assert calls(1000) <= calls(2) + 20 < 100


def test_checksums_do_not_depend_on_the_hash_seed() -> None:
    source = str(Path(__file__).parents[2] / "src")
    program = PROGRAM.replace("Codec().digest(value)", "Codec().checksum((value, [value]))")
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": source, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in range(10)
    }
    assert len(shown) == 1


@given(VALUES)
def test_a_checksum_of_a_copy_proves_nothing(value: Any) -> None:
    assert not have_changed(codec.checksum((value,)), codec.checksum((codec.dump(value)[1],)))


def test_other_arguments_have_another_checksum() -> None:
    codec = Codec()
    others = [(), (1,), (True,), ("1",), (1.0,), (None,), ([1],), ((1,),), (1, 1), ("1,1",), ({"a": 1},), ({"a": "1"},), (b"1",)]
    assert len({codec.checksum(args) for args in others}) == len(others)
    assert codec.checksum(({"a": 1, "b": 2},)) == codec.checksum(({"b": 2, "a": 1},))
    assert codec.checksum((object(),)) is None
