"""Bytes that `dump` did not write are a ValueError, whatever they are."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import Codec, load_error, tree_of
from perdure.errors import ValueNotStorable
from tests.codec.models import ALL, Access, Account, Box, Color, Counter, Crate, Item, Order, Place, User
from tests.codec.test_values import VALUES

codec = Codec()

SAMPLE: Any = {
    "plain": [1, 1.5, "text", None, True],
    "set": {1, 2},
    "pairs": {(1,): b"x"},
    "at": datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "more": (Decimal("1.5"), UUID(int=7), Path("a"), float("nan"), 10**700, "\ud800", frozenset({1}), bytearray(b"x")),
    "$key": datetime(2024, 1, 1, tzinfo=UTC),
    "classes": [Order(1, [Item("a")]), Account(1), Place(1.0, {"a"}), Box(1), Crate(1), User(name="a"), Counter(1)],
    "enums": [Color.RED, Access.READ | Access.WRITE],
    "lost": object(),
}
DATA = codec.dump(SAMPLE, ALL, losses=[])[0]


def _load(data: bytes) -> None:
    """Load, and let nothing but ValueError happen."""
    try:
        codec.load(data, ALL)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - most of these are errors, some are other values
    try:
        load_error(data, "key")
    except ValueError as error:
        assert str(error)  # noqa: PT017 - as above
    try:
        tree_of(data)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - as above


def test_every_flipped_bit_is_another_value_or_a_value_error() -> None:
    for at in range(len(DATA)):
        for bit in range(8):
            _load(DATA[:at] + bytes([DATA[at] ^ (1 << bit)]) + DATA[at + 1 :])


def test_every_truncation_is_a_value_error() -> None:
    for length in range(len(DATA)):
        with pytest.raises(ValueError, match="cannot be read"):
            codec.load(DATA[:length], ALL)


@given(st.binary())
def test_random_bytes_are_a_value_or_a_value_error(data: bytes) -> None:
    _load(data)


@given(st.sampled_from([b"$tuple", b"$set", b"$frozenset", b"$dict", b"$class", b"$enum", b"$int", b"$float", b"$str", b"$bytes",
                        b"$bytearray", b"$datetime", b"$time", b"$date", b"$timedelta", b"$decimal", b"$uuid", b"$path",
                        b"$unset", b"$lost", b"$", b"$nonsense"]), VALUES)  # fmt: skip
def test_a_tag_around_anything_is_a_value_or_a_value_error(tag: bytes, content: Any) -> None:
    data, _ = codec.dump(content)
    _load(b'{"' + tag + b'":' + data + b"}")
    _load(b'{"' + tag + b'":["tests.codec.models:Item",' + data + b"]}")
    _load(b'{"' + tag + b'":[["PosixPath",' + data + b"]]}")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"nonsense", "malformed"),
        (b'"\xff"', "utf-8"),
        (b"NaN", "malformed"),
        (b"1 2", "malformed"),
        (b'{"a":1,"a":1}', "'a' stands twice"),
        (b'[{"x":{"b":1,"b":2}}]', "'b' stands twice"),
        (b'{"a":1,"\\u0061":2}', "'a' stands twice"),
        (b'{"$tuple":[1],"$tuple":[2]}', "stands twice"),
        (b'{"$future":1}', "no tag that this version"),
        (b'{"\\u0024future":1}', "no tag that this version"),
        (b'{"$tuple":[1],"x":1}', "among other keys"),
        (b'{"$tuple":1}', "must hold a list"),
        (b'{"$set":[1,1]}', "twice"),
        (b'{"$set":[1,true]}', "twice"),
        (b'{"$set":[[1]]}', "unhashable"),
        (b'{"$dict":[[1,2],[1,3]]}', "twice"),
        (b'{"$dict":[1]}', "cannot be read"),
        (b'{"$dict":["ab"]}', "must hold a list"),
        (b'{"$dict":[{"a":1,"b":2}]}', "must hold a list"),
        (b'{"$dict":[[1,2,3]]}', "cannot be read"),
        (b'{"$int":"0x1g"}', "invalid literal"),
        (b'{"$int":"10"}', "malformed"),
        (b'{"$int":10}', "a string was expected"),
        (b'{"$float":"1.5"}', "nan, inf or -inf"),
        (b'{"$float":[]}', "nan, inf or -inf"),
        (b'{"$bytes":"a"}', "cannot be read"),
        (b'{"$bytes":"a\xc3\xa9=="}', "cannot be read"),
        (b'{"$str":"/w=="}', "utf-8"),
        (b'{"$datetime":"yesterday"}', "cannot be read"),
        (b'{"$datetime":{"iso":"2024-01-01","zone":"../../etc/passwd"}}', "no time zone"),
        (b'{"$datetime":{"iso":"2024-01-01","zone":"Nowhere/Here"}}', "not known on this machine"),
        (b'{"$datetime":{"iso":"2024-01-01","fold":2}}', "fold"),
        (b'{"$datetime":{"x":1}}', "malformed"),
        (b'{"$timedelta":[1,2]}', "cannot be read"),
        (b'{"$timedelta":[0,99999999,0]}', "malformed"),
        (b'{"$timedelta":[9999999999,0,0]}', "cannot be read"),
        (b'{"$decimal":"x"}', "cannot be read"),
        (b'{"$decimal":" 1 "}', "malformed"),
        (b'{"$uuid":"{00000000-0000-0000-0000-000000000000}"}', "malformed"),
        (b'{"$path":["Popen","x"]}', "a path is malformed"),
        (b'{"$class":["tests.codec.models:Item",[]]}', "must hold a dict"),
        (b'{"$class":["tests.codec.models:Item",{},{},{}]}', "malformed"),
        (b'{"$class":["tests.codec.models:Color",{}]}', "malformed"),
        (b'{"$class":[]}', "cannot be read"),
        (b'{"$enum":["tests.codec.models:Color","GREEN"]}', "no member 'GREEN'"),
        (b'{"$enum":["tests.codec.models:Color","__class__"]}', "no member"),
        (b'{"$enum":["tests.codec.models:Item","sku"]}', "no member"),
        (b'{"$enum":["tests.codec.models:Access",64]}', "cannot be read"),
        (b"[" * 201 + b"]" * 201, "nested more than 200 deep"),
        (b'{"$tuple":[' * 201 + b"]}" * 201, "nested more than 200 deep"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"9" * 5000, "cannot be read"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_corrupt_data_is_a_value_error_that_says_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){reason}"):
        codec.load(data, ALL)


def test_data_that_came_through_another_json_writer_is_read_all_the_same() -> None:
    data = msgspec.json.format(codec.dump({"a": (1, {"b": 1e16})})[0])
    assert codec.load(data) == {"a": (1, {"b": 1e16})}


def test_a_decimal_context_without_traps_does_not_make_nan_of_garbage() -> None:
    program = (
        "import decimal; decimal.getcontext().traps[decimal.InvalidOperation] = False\n"
        "from perdure.codec import Codec\n"
        'try: Codec().load(b\'{"$decimal":"garbage"}\')\n'
        "except ValueError: print('refused')"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment).stdout
    assert shown == "refused\n"


def test_data_larger_than_the_limit_is_not_decoded() -> None:
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        Codec(max_bytes=10).load(b'"0123456789"')


# Integers whose hashes are all 0; those of their tuples, floats and so on are equal too.
COLLIDING = [n * (2**61 - 1) for n in range(3000)]
COLLIDING_KEYS: dict[str, list[Any]] = {
    "integers": COLLIDING,
    "tuples": [{"$tuple": [n, 1]} for n in COLLIDING],
    "decimals": [{"$decimal": str(n)} for n in COLLIDING],
    "uuids": [{"$uuid": str(UUID(int=n))} for n in COLLIDING],
}


@pytest.mark.parametrize("tag", ["$set", "$frozenset", "$dict"])
@pytest.mark.parametrize("keys", COLLIDING_KEYS.values(), ids=COLLIDING_KEYS)
def test_keys_that_all_have_one_hash_are_refused(keys: list[Any], tag: str) -> None:
    content = [[key, 0] for key in keys] if tag == "$dict" else keys
    with pytest.raises(ValueError, match=r"2,999 of its 3,000 keys have the same hash as another; 1,000 may"):
        codec.load(msgspec.json.encode({tag: content}))
    few = codec.load(msgspec.json.encode({tag: content[:900]}))
    assert len(few) == 900


def test_keys_of_one_hash_are_refused_where_an_annotation_makes_keys_of_text() -> None:
    with pytest.raises(ValueError, match="2,999 of its 3,000 keys have the same hash as another"):
        codec.conform({str(n): 0 for n in COLLIDING}, dict[int, int])
    with pytest.raises(ValueError, match="2,999 of its 3,000 keys have the same hash as another"):
        codec.conform(COLLIDING, set[int])
    assert codec.conform([1, 2] * 3000, set[int]) == {1, 2}
    assert len(codec.conform(list(range(-5000, 5000)), frozenset[int])) == 10_000


def test_a_set_of_keys_that_have_one_hash_is_refused_when_it_is_stored() -> None:
    with pytest.raises(ValueNotStorable, match="2,999 of its 3,000 keys have the same hash as another"):
        codec.dump(set(COLLIDING))


def test_a_value_that_repeats_a_lost_part_a_million_times_is_refused_in_time() -> None:
    value: Any = [object()]
    for _ in range(40):
        value = [value, value]
    losses: list[Any] = []
    with pytest.raises(ValueNotStorable, match="and so it is with 10,000 other parts of the value"):
        codec.dump(value, losses=losses)
    assert len(losses) == 10_000
