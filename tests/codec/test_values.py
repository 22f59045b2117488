"""What goes in comes out: the same types, the same order, nothing shared."""

from __future__ import annotations

import decimal
import json
import subprocess
import sys
import zoneinfo
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import Codec, Loss
from perdure.codec.tagging import Tagger
from perdure.errors import ValueNotStorable
from tests.codec.same import mutable_parts, same

codec = Codec()

FIXED = st.builds(
    timezone,
    st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59)),
) | st.builds(timezone, st.integers(-86399, 86399).map(lambda s: timedelta(seconds=s)), st.text(st.characters(codec="utf-8")))
ZONES = st.none() | st.just(UTC) | FIXED | st.sampled_from(["Europe/Berlin", "UTC", "America/New_York"]).map(ZoneInfo)
TEXT = st.text(st.characters()) | st.sampled_from(["$", "$$", "$tuple", "\ud800", "a\0b", "\udc80é", "{", "[", ""])
KEYS = TEXT | st.sampled_from(["$class", "$$x", "$datetime", "a"])
NUMBERS = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 2**63, 2**64, -(2**63) - 1, 10**639, 10**640, -(10**641), 10**4000])
    | st.floats()
    | st.sampled_from([-0.0, 0.0, 1e16, 5e-324, float("nan"), float("inf"), -float("inf")])
)
HASHABLE_LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | TEXT
    | st.binary()
    | st.datetimes(timezones=ZONES, allow_imaginary=True)
    | st.dates()
    | st.times(timezones=ZONES)
    | st.timedeltas()
    | st.decimals().filter(lambda number: not number.is_snan())
    | st.uuids()
    | st.sampled_from([Path("a/b"), PurePosixPath("/x"), PureWindowsPath("C:/y"), Path("\udc80")])
)
LEAVES = HASHABLE_LEAVES | st.binary().map(bytearray) | st.decimals()
HASHABLE: st.SearchStrategy[Any] = st.recursive(
    HASHABLE_LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=5
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    )


VALUES: st.SearchStrategy[Any] = st.recursive(LEAVES, _containers, max_leaves=20)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    data, copy = codec.dump(value)
    assert same(codec.load(data), value)
    assert same(copy, value)


@given(VALUES)
def test_what_dump_returns_shares_nothing_mutable_with_what_it_was_given(value: Any) -> None:
    _, copy = codec.dump(value)
    assert not mutable_parts(copy) & mutable_parts(value)


@given(VALUES)
def test_stored_json_is_read_by_any_parser_and_repeats_no_key(value: Any) -> None:
    data, _ = codec.dump(value)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=pytest.fail)


@given(PLAIN)
def test_plain_json_is_stored_as_itself_unless_a_key_needs_escaping(value: Any) -> None:
    data, _ = codec.dump(value)
    if b'"$' not in data:
        assert same(json.loads(data), value)


@given(VALUES)
def test_the_fast_way_and_the_walk_write_the_same(value: Any) -> None:
    tree = Tagger(lambda _cls: None, 200).tag(value, "value")
    assert codec.dump(value)[0] == msgspec.json.encode(tree)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**70),
        [2**70],
        {"n": 10**300},
        [1, True, 1.0, "1"],
        [True, False, 0, 1, 0.0, -0.0],
        {"b": 1, "a": 2},
        {1: "int", "1": "str", None: 0, (1, 2): [3]},
        {True: 1},
        {1.5: 1, b"k": 2},
        ([],),
        [()],
        [set()],
        {"x": frozenset()},
        [b""],
        bytearray(b"x"),
        "",
        "$",
        ["$5.00"],
        {"$": 1},
        {"$tuple": [1]},
        {"$$tuple": [1]},
        {"$class": ["os:system", {"command": "id"}]},
        {"a": 1, "$b": 2},
        {"\ud800": 1},
        10**4400,
        [-(16**5000)],
        9**700,
        Decimal("-0"),
        Decimal("sNaN123"),
        Decimal("-NaN"),
        Decimal("Infinity"),
        Decimal("1E+400"),
        Decimal("1.10"),
        time(1, 2, 3, 4, tzinfo=UTC, fold=1),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2024, 1, 1, fold=1),  # noqa: DTZ001 - naive values are values too
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")),
        datetime(1900, 1, 1, tzinfo=timezone(timedelta(minutes=53, seconds=28, microseconds=5))),
        datetime.min,  # noqa: DTZ901 - as above
        datetime.max,  # noqa: DTZ901 - as above
        date(1, 1, 1),
        timedelta.min,
        timedelta.max,
        UUID(int=0),
        Path(),
        PureWindowsPath("//host/share/x"),
        [["[" * 300, "{" * 300]],
        "1" * 5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_come_back_exactly(value: Any) -> None:
    data, copy = codec.dump(value)
    assert same(codec.load(data), value)
    assert same(copy, value)


def test_utc_comes_back_as_the_one_utc() -> None:
    assert codec.dump(datetime(2024, 1, 1, tzinfo=UTC))[1].tzinfo is UTC


def test_two_nan_in_a_set_stay_two() -> None:
    assert len(codec.dump({float("nan"), float("nan")})[1]) == 2


def test_a_shared_part_comes_back_as_equal_copies() -> None:
    part = [1]
    copy = codec.dump([part, part])[1]
    assert copy == [[1], [1]]
    assert copy[0] is not copy[1]


def test_decimals_are_exact_under_any_decimal_context() -> None:
    with decimal.localcontext() as context:
        context.prec, context.capitals = 3, 0
        data, copy = codec.dump([Decimal("1.23456789E+50")])
    assert same(copy, [Decimal("1.23456789E+50")])
    assert same(codec.load(data), copy)


def test_integers_are_written_so_that_a_process_with_fewer_digits_reads_them() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        data = codec.dump([10**639, 10**3000, 10**6000])[0]
        sys.set_int_max_str_digits(640)
        assert codec.load(data) == [10**639, 10**3000, 10**6000]
    finally:
        sys.set_int_max_str_digits(before)


def test_the_form_of_each_tag_is_fixed() -> None:
    value = [(1,), {2}, b"a", datetime(2024, 1, 1, tzinfo=UTC), {3: 4}, float("nan"), "\ud800", {"$a": 5}]
    assert json.loads(codec.dump(value)[0]) == [
        {"$tuple": [1]},
        {"$set": [2]},
        {"$bytes": "YQ=="},
        {"$datetime": "2024-01-01T00:00:00+00:00"},
        {"$dict": [[3, 4]]},
        {"$float": "nan"},
        {"$str": "7aCA"},
        {"$$a": 5},
    ]


def test_order_of_a_dict_is_kept_also_where_it_is_a_list_of_pairs() -> None:
    assert list(codec.dump({3: 0, 1: 0, 2: 0})[1]) == [3, 1, 2]


def test_a_subclass_of_dict_is_refused_even_if_it_is_equal_to_one() -> None:
    with pytest.raises(Exception, match="subclass of dict"):
        codec.dump(OrderedDict(a=1))


def test_importing_the_codec_loads_only_the_standard_library_and_msgspec() -> None:
    program = "import sys, msgspec; before = set(sys.modules); import perdure.codec; print(*set(sys.modules) - before)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=_environment()).stdout
    loaded = {name.partition(".")[0] for name in shown.split()}
    assert loaded <= sys.stdlib_module_names | {"msgspec", "perdure"}  # what msgspec itself loads is msgspec's affair


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}


@pytest.mark.parametrize("value", [2**2126, 10**640 - 1, -(10**639), 10**639, 10**638, -(10**640) + 1])
def test_an_integer_is_written_the_same_alone_as_among_others(value: int) -> None:
    among = json.loads(codec.dump((value,))[0])["$tuple"][0]
    assert json.loads(codec.dump(value)[0]) == among == json.loads(codec.dump([value])[0])[0]


def test_a_windows_path_whose_text_means_another_path_is_not_changed_silently() -> None:
    path = PureWindowsPath("./c:a")  # before 3.12 its text is "c:a", which names a drive
    try:
        assert codec.dump(path)[1] == path
    except ValueNotStorable as error:
        assert "another path" in str(error)  # noqa: PT017 - which of the two depends on the version of Python


def test_a_time_zone_from_a_file_is_refused_whatever_key_it_was_given() -> None:
    source = next(found for root in zoneinfo.TZPATH if (found := Path(root, "America/New_York")).exists())
    with source.open("rb") as file:
        zone = ZoneInfo.from_file(file, key="Europe/Berlin")
    with pytest.raises(ValueNotStorable, match="time zone"):
        codec.dump([datetime(2024, 1, 1, tzinfo=zone)])
    fresh = ZoneInfo.no_cache("Europe/Berlin")
    assert same(codec.dump(datetime(2024, 1, 1, tzinfo=fresh))[1], datetime(2024, 1, 1, tzinfo=fresh))


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize("name", ["\ud800", Name("CET")])
def test_a_time_zone_whose_name_cannot_be_stored_is_refused_with_its_path(name: str) -> None:
    losses: list[Loss] = []
    value = [1, datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), name))]
    assert codec.dump(value, losses=losses)[1] == [1, None]
    assert losses == [Loss("value[1]", "non-json")]
