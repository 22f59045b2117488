"""What cannot be stored is refused with its path, or becomes null and is noted."""

from __future__ import annotations

import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given

from perdure.codec import Codec, Loss
from perdure.errors import ValueNotStorable
from tests.codec.models import Color, Item, Order, Page
from tests.codec.same import mutable_parts, same
from tests.codec.test_values import VALUES

codec = Codec()


class Text(str):
    __slots__ = ()


class Bytes(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


class OwnZone(tzinfo):
    def utcoffset(self, _when: datetime | None) -> timedelta:
        return timedelta(0)

    dst = utcoffset

    def tzname(self, _when: datetime | None) -> str:
        return "own"


@dataclass
class AlsoDict(dict[str, int]):
    x: int = 0


class Unreadable:
    def __get__(self, instance: object, owner: type) -> int:
        if instance is not None:
            raise RuntimeError
        return 0

    def __set__(self, instance: object, value: int) -> None: ...


@dataclass
class Hidden:
    x: Unreadable = Unreadable()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "no stored form"),
        (len, "no stored form"),
        (iter([]), "no stored form"),
        (threading.Lock(), "no stored form"),
        (1j, "no stored form"),
        (memoryview(b"x"), "no stored form"),
        (int, "no stored form"),
        (ValueError("x"), "no stored form"),
        (range(3), "no stored form"),
        (Text("x"), "subclass of str"),
        (Bytes(b"x"), "subclass of bytes"),
        (Counter("ab"), "subclass of dict"),
        (defaultdict(int), "subclass of dict"),
        (AlsoDict(), "subclass of dict"),
        (datetime(2024, 1, 1, tzinfo=OwnZone()), "zoneinfo"),
    ],
    ids=lambda value: value if isinstance(value, str) and type(value) is str else type(value).__name__,
)
def test_what_has_no_stored_form_is_refused_with_its_path(value: Any, reason: str) -> None:
    with pytest.raises(ValueNotStorable, match=reason) as caught:
        codec.dump({"items": [0, {"sku": value}]})
    assert caught.value.path == 'value["items"][1]["sku"]'


def test_a_path_names_attributes_indexes_and_keys() -> None:
    order = Order(1, [Item("a"), Item("b", object())])  # type: ignore[arg-type]
    with pytest.raises(ValueNotStorable) as caught:
        codec.dump({"orders": {7: order}}, Order, path="result")
    assert caught.value.path == 'result["orders"][7].items[1].price'


def test_a_key_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(ValueNotStorable, match=r"value\.key\(<built-in function len>\)"):
        codec.dump({len: 1})


def test_a_property_that_raises_is_refused_and_does_not_escape() -> None:
    with pytest.raises(ValueNotStorable, match="reading it raised RuntimeError"):
        codec.dump(Hidden(), Hidden)


def test_a_list_that_contains_itself_is_refused_as_circular() -> None:
    value: list[Any] = [1]
    value.append({"again": value})
    with pytest.raises(ValueNotStorable, match="circular") as caught:
        codec.dump(value)
    assert caught.value.path == 'value[1]["again"]'


def test_an_object_that_contains_itself_is_refused_as_circular() -> None:
    order = Order(1, [])
    order.items.append(order)  # type: ignore[arg-type]
    with pytest.raises(ValueNotStorable, match="circular"):
        codec.dump(order, Order)


def test_one_part_used_twice_is_not_circular() -> None:
    part = (1,)
    assert codec.dump([part, part, {"x": part}])[1] == [(1,), (1,), {"x": (1,)}]


def test_with_losses_a_part_becomes_none_and_is_noted() -> None:
    losses: list[Loss] = []
    circular: list[Any] = []
    circular.append(circular)
    data, copy = codec.dump({"ok": (1,), "bad": [object()], "round": circular}, losses=losses)
    assert copy == {"ok": (1,), "bad": [None], "round": [None]} == codec.load(data)
    assert losses == [Loss('value["bad"][0]', "non-json"), Loss('value["round"][0]', "circular")]


def test_with_losses_a_set_or_dict_that_loses_an_element_or_key_becomes_none_as_a_whole() -> None:
    losses: list[Loss] = []
    assert codec.dump([{len, max, 1}, {len: 1, 2: 2}], losses=losses)[1] == [None, None]
    assert {loss.reason for loss in losses} == {"non-json"}


def test_with_losses_a_property_that_raises_is_noted_as_encode_failed() -> None:
    losses: list[Loss] = []
    assert codec.dump([Hidden()], Hidden, losses=losses)[1] == [None]
    assert losses == [Loss("value[0]", "encode-failed")]


def test_without_trouble_nothing_is_noted() -> None:
    losses: list[Loss] = []
    codec.dump({"a": (1, 2)}, losses=losses)
    assert losses == []


def _nested(depth: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda value: [value],
    "dict": lambda value: {"k": value},
    "tuple": lambda value: (value,),
    "pairs": lambda value: {1: value},
    "frozenset": lambda value: frozenset([value]),
    "object": lambda value: Order(1, value),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_value_as_deep_as_the_limit_is_stored_and_read_back(wrap: Any) -> None:
    value = _nested(200, wrap)
    data, copy = codec.dump(value, Order)
    assert copy == value == codec.load(data, Order)


@pytest.mark.parametrize("depth", [201, 2_000, 100_000])
@pytest.mark.parametrize("wrap", [WRAPS["list"], WRAPS["tuple"], WRAPS["dict"]], ids=["list", "tuple", "dict"])
def test_a_value_deeper_than_the_limit_is_refused_also_with_losses(wrap: Any, depth: int) -> None:
    value = _nested(depth, wrap)
    with pytest.raises(ValueNotStorable, match="nested more than 200 deep"):
        codec.dump(value)
    with pytest.raises(ValueNotStorable, match="nested more than 200 deep"):
        codec.dump(value, losses=[])


def test_the_depth_limit_counts_levels_not_brackets() -> None:
    wide = [[[index]] for index in range(1_000)]
    assert Codec(max_depth=3).dump(wide)[1] == wide
    with pytest.raises(ValueNotStorable, match="nested more than 2 deep"):
        Codec(max_depth=2).dump(wide)


def test_a_value_larger_than_the_limit_is_refused_with_both_numbers() -> None:
    small = Codec(max_bytes=1_000)
    assert small.dump("x" * 998)[1] == "x" * 998
    for value in ("x" * 999, ["x" * 999], ("x" * 990,)):
        with pytest.raises(ValueNotStorable, match=r"takes 1,\d\d\d bytes, more than the limit of 1,000 bytes"):
            small.dump(value, losses=[])


def test_the_tagging_walk_stops_when_shared_parts_add_up_to_more_than_the_limit() -> None:
    value: Any = (1,)
    for _ in range(60):
        value = (value, value)
    with pytest.raises(ValueNotStorable, match="more than the limit of 10,000 bytes"):
        Codec(max_bytes=10_000).dump(value)


def test_a_value_close_to_the_end_of_the_stack_is_refused_and_not_a_recursion_error() -> None:
    value = _nested(190, WRAPS["object"])

    def down(levels: int) -> Any:
        return down(levels - 1) if levels else codec.dump(value, Order)

    with pytest.raises((ValueNotStorable, RecursionError)) as caught:
        down(800)
    assert caught.type is ValueNotStorable


def _doubled(value: Any, twice: Callable[[Any], Any]) -> Any:
    for _ in range(60):
        value = twice(value)
    return value


# Values that are small in memory and too large for any store, in each way that a part can be shared.
SHARED_TOO_OFTEN: dict[str, Callable[[], Any]] = {
    "lists": lambda: _doubled([1], lambda part: [part, part]),
    "dicts": lambda: _doubled({"a": 1}, lambda part: {"a": part, "b": part}),
    "tuples": lambda: _doubled((1,), lambda part: (part, part)),
    "pairs": lambda: _doubled({1: 1}, lambda part: {1: part, 2: part}),
    "objects": lambda: _doubled(Page([1]), lambda part: Page([part, part])),
    "frozensets": lambda: _doubled(frozenset({1}), lambda part: frozenset({(1, part), (2, part)})),
    "a wide list": lambda: [[[[[0] * 1_000] * 1_000] * 1_000] * 1_000],
    "text": lambda: ["x" * 1_000_000] * 100_000,
    "text in tuples": lambda: [("x" * 1_000_000,)] * 100_000,
    "text behind a number": lambda: {1: ["x" * 1_000_000] * 100_000},
    "surrogates": lambda: ["\ud800" * 1_000_000] * 100_000,
    "bytes": lambda: [b"x" * 1_000_000] * 100_000,
    "bytearrays": lambda: [bytearray(1_000_000)] * 100_000,
    "keys": lambda: [{"$" + "k" * 1_000_000: 1}] * 100_000,
    "integers": lambda: [1 << 8_000_000] * 100_000,
    "decimals": lambda: [Decimal("1" * 1_000_000)] * 100_000,
}


@pytest.mark.parametrize("make", SHARED_TOO_OFTEN.values(), ids=SHARED_TOO_OFTEN)
def test_a_value_that_shares_its_parts_too_often_is_refused_before_it_fills_memory(make: Callable[[], Any]) -> None:
    small, value = Codec(max_bytes=1_000_000), make()
    with _memory_limit(2 * 2**30):
        for losses in (None, list[Loss]()):
            with pytest.raises(ValueNotStorable, match="more than the limit of 1,000,000 bytes"):
                small.dump(value, Page, losses=losses)


@contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Taking this many bytes more is a MemoryError, where the system can limit memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("character", ["a", "\0", "\n", '"', "é", "🙂", "\u2028"])
def test_whatever_it_is_made_of_a_value_as_long_as_the_limit_is_stored(character: str) -> None:
    size = len(msgspec.json.encode(character)) - 2
    for limit in (100, 1_000, 5_000, 40_000, 1_200_000):
        text = character * ((limit - 20) // size)
        for value in ([text], {"k": text}, (text,), [text[:5], 1.5, text[:-10]]):
            data, copy = Codec(max_bytes=limit).dump(value)
            assert copy == value
            assert len(data) <= limit
            with pytest.raises(ValueNotStorable, match="more than the limit of"):
                Codec(max_bytes=len(data) - 1).dump(value)
            assert Codec(max_bytes=len(data)).dump(value) == (data, copy)


@given(VALUES)
def test_a_value_is_stored_when_the_limit_is_exactly_its_length(value: Any) -> None:
    data, copy = codec.dump(value)
    assert same(Codec(max_bytes=len(data)).dump(value)[1], copy)


@given(VALUES)
def test_a_large_value_whose_parts_occur_again_is_written_as_if_they_did_not(value: Any) -> None:
    filler = "x" * 20_000  # past which containers that were walked are remembered
    part, _ = codec.dump(value)
    data, copy = codec.dump([(filler,), [value, (value, {"again": value})] * 3, [[[value]]]])
    thrice = b",".join([b'%s,{"$tuple":[%s,{"again":%s}]}' % (part, part, part)] * 3)
    assert data == b'[{"$tuple":["%s"]},[%s],[[[%s]]]]' % (filler.encode(), thrice, part)
    assert same(copy[1][0], value)
    assert same(copy[2][0][0][0], value)
    assert not mutable_parts(copy[1][0]) & mutable_parts(copy[1][2])


def test_a_part_that_occurs_again_where_it_is_too_deep_is_refused() -> None:
    part = _nested(150, WRAPS["tuple"])
    with pytest.raises(ValueNotStorable, match="nested more than 200 deep"):
        codec.dump([("x" * 20_000,), part, _nested_around(part, 60)], losses=[])


def _nested_around(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = (value,)
    return value


class Answering(type):
    def __getattr__(cls, name: str) -> str:
        return name


class OfAnsweringClass(metaclass=Answering):
    pass


@pytest.mark.parametrize("value", [Mock(spec=Color.RED), Mock(spec=Color), OfAnsweringClass()], ids=["member", "enum", "class"])
def test_what_only_claims_to_be_of_a_class_is_refused_where_it_stands(value: Any) -> None:
    losses: list[Loss] = []
    assert codec.dump([1, value], Color, losses=losses)[1] == [1, None]
    assert losses == [Loss("value[1]", "non-json")]
    with pytest.raises(ValueNotStorable, match="no stored form") as caught:
        codec.dump([1, value], Color)
    assert caught.value.path == "value[1]"


class Exhausting(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise MemoryError


def test_running_out_of_memory_is_neither_a_loss_nor_a_fault_of_the_value_or_the_data() -> None:
    value = Exhausting(1)
    data = codec.dump(value, Exhausting)[0].replace(b'"n":1', b'"n":-1')
    value.n = -1
    for losses in (None, list[Loss]()):
        with pytest.raises(MemoryError):
            codec.dump([value], Exhausting, losses=losses)
        assert not losses
    with pytest.raises(MemoryError):
        codec.load(data, Exhausting)
