"""`check_structure` accepts everything that loads, without knowing the classes, and refuses what cannot be a value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import Codec
from perdure.codec.structure import check_structure
from tests.codec.models import ALL, Item
from tests.codec.test_corrupt import DATA, SAMPLE
from tests.codec.test_values import VALUES

codec = Codec()
CLASSES = ("classes", "enums")
CLASSLESS = codec.dump({key: part for key, part in SAMPLE.items() if key not in CLASSES}, losses=[])[0]
TAGS = [
    "$tuple",
    "$set",
    "$frozenset",
    "$dict",
    "$int",
    "$float",
    "$str",
    "$bytes",
    "$datetime",
    "$decimal",
    "$path",
    "$lost",
    "$x",
]


def _is_well_formed(data: bytes) -> bool:
    try:
        check_structure(codec, data)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - most of these are errors, some are values
        return False
    return True


def _loads(data: bytes, hint: Any = Any) -> bool:
    try:
        codec.load(data, hint)
    except ValueError:
        return False
    return True


@given(VALUES)
def test_whatever_was_dumped_is_well_formed(value: Any) -> None:
    assert _is_well_formed(codec.dump(value)[0])


def test_classes_need_not_be_known() -> None:
    assert _is_well_formed(DATA)
    assert not _loads(DATA)


def _flipped(data: bytes) -> list[bytes]:
    return [data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)]


def test_without_classes_exactly_what_does_not_load_is_refused() -> None:
    for data in (*_flipped(CLASSLESS), *(CLASSLESS[:length] for length in range(len(CLASSLESS)))):
        assert _is_well_formed(data) is _loads(data), data


@given(st.sampled_from(TAGS), VALUES)
def test_a_tag_around_anything_is_refused_exactly_if_it_does_not_load(tag: str, content: Any) -> None:
    data = b'{"%s":%s}' % (tag.encode(), codec.dump(content)[0])
    assert _is_well_formed(data) is _loads(data)


def test_with_classes_nothing_that_loads_is_refused() -> None:
    for data in _flipped(DATA):
        assert _is_well_formed(data) or not _loads(data, ALL), data


@pytest.mark.parametrize(
    "data",
    [
        b'{"$class":1}',
        b'{"$class":[]}',
        b'{"$class":["m:C"]}',
        b'{"$class":["m:C",[]]}',
        b'{"$class":["m:C",{},{},{}]}',
        b'{"$class":[1,{}]}',
        b'{"$class":["m:C",{"a":{"$date":"x"}}]}',
        b'{"$class":["m:C",{},{"a":{"$set":[[]]}}]}',
        b'[{"$class":["m:C",{"a":{"$class":["m:D",{"b":{"$tuple":1}}]}}]}]',
        b'{"$enum":"m:E"}',
        b'{"$enum":["m:E"]}',
        b'{"$enum":["m:E",1.5]}',
        b'{"$enum":[1,"A"]}',
        b'{"$dict":[[{"$class":["m:C",{"a":{"$int":1}}]},1]]}',
        b'{"a":1,"a":2}',
        b'{"$class":["m:C",{"a":1,"a":2}]}',
    ],
)
def test_what_is_malformed_whatever_the_class_is_refused(data: bytes) -> None:
    assert not _is_well_formed(data)


def test_two_objects_that_look_alike_are_two() -> None:
    one = b'{"$class":["m:C",{"a":1}]}'
    assert _is_well_formed(b'{"$set":[%s,%s]}' % (one, one))
    assert _is_well_formed(b'{"$dict":[[%s,1],[%s,2]]}' % (one, one))
    assert _is_well_formed(b'{"$set":[{"$enum":["m:E","A"]},{"$enum":["m:E","B"]},"object 1"]}')


def test_limits_hold_as_when_loading() -> None:
    small = Codec(max_bytes=20, max_depth=2)
    check_structure(small, b"[[1]]")
    for data in (b"[[[1]]]", b'"' + b"x" * 30 + b'"'):
        with pytest.raises(ValueError, match=r"max_bytes|nested more than 2 deep"):
            check_structure(small, data)
    with pytest.raises(ValueError, match=r"cannot be read|too deeply"):
        check_structure(codec, b"[" * 5000 + b"]" * 5000)
    assert _loads(codec.dump(Item("a"), Item)[0], Item)
