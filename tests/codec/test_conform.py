"""What comes from outside fits its annotation or is refused with path and reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NewType, Protocol, Tuple, TypeVar, Union  # noqa: UP035 - users write Tuple
from uuid import UUID

import msgspec
import pytest

from perdure.codec import Codec
from perdure.result import Err, Ok
from tests.codec.models import (  # fmt: skip
    Access,
    Account,
    Box,
    Color,
    Crate,
    Item,
    Level,
    Order,
    Page,
    Place,
    Point,
    Shape,
    Tone,
    User,
    WithExtras,
    Wrapped,
)
from tests.naming import short_id

codec = Codec()
T = TypeVar("T")
UserId = NewType("UserId", int)


class Closable(Protocol):
    def close(self) -> None: ...


class Own:
    pass


@dataclass
class Checked:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n must not be negative")


RIGHT: list[tuple[Any, Any]] = [
    (1, int),
    (True, int),
    (Level.LOW, int),
    (Tone.SOFT, str),
    (1, float | int),
    (None, None),
    (None, int | None),
    ("2024-01-01", str),
    ("2024-01-01", datetime | str),
    (b"x", bytes),
    ([1], list[int]),
    ([1], list),
    ((1, 2), Sequence[int]),
    ([1, 2], Sequence[int]),
    ("ab", Sequence[str]),
    ((1, "a"), tuple[int, str]),
    ((), tuple[()]),
    ((1, 2), Tuple),  # noqa: UP006 - as above
    ((1, 2, 3), tuple[int, ...]),
    ({1}, set[int]),
    ({"a": 1}, dict[str, int]),
    ({"a": 1}, Mapping[str, int]),
    ({1: "a"}, dict[int, str]),
    ([1], Iterable[int]),
    (Item("a"), Item),
    ([Item("a")], list[Item]),
    (Page([1]), Page[int]),
    ({"point": Point(1, 2), "sides": 3}, Shape),
    (User(name="a"), User),
    ("a", Literal["a", "b"]),
    (3, UserId),
    (3, Annotated[int, msgspec.Meta(gt=0)]),
    (object(), T),
    (object(), Any),
    (object(), object),
    (object(), Closable),
    (len, Callable[[Any], int]),
    (int, type[int]),
    ("anything", "Unresolved"),
    (Path("a"), Path),
    (datetime(2024, 1, 1, tzinfo=UTC), date),
    (Ok(1), Ok[int] | Err[str]),
]


@pytest.mark.parametrize(("value", "hint"), RIGHT, ids=short_id)
def test_what_is_right_already_passes_as_the_same_object(value: Any, hint: Any) -> None:
    assert codec.conform(value, hint) is value


def test_an_instance_of_an_unsupported_class_passes() -> None:
    own = Own()
    assert codec.conform(own, Own) is own


CONVERTED: list[tuple[Any, Any, Any]] = [
    (1, float, 1.0),
    ("2024-01-01T00:00:00Z", datetime, datetime(2024, 1, 1, tzinfo=UTC)),
    ("2024-01-01", date, date(2024, 1, 1)),
    ("PT1H", timedelta, timedelta(hours=1)),
    ("1.50", Decimal, Decimal("1.50")),
    ("00000000-0000-0000-0000-000000000007", UUID, UUID(int=7)),
    ("blue", Color, Color.BLUE),
    (2, Level, Level.HIGH),
    (3, Access, Access.READ | Access.WRITE),
    ("blue", Literal[Color.BLUE], Color.BLUE),
    ("a/b", Path, Path("a/b")),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, "a"], tuple[int, str], (1, "a")),
    ([1, 2], set[int], {1, 2}),
    ([1], frozenset[int], frozenset({1})),
    ({"1": "a"}, dict[int, str], {1: "a"}),
    ({"sku": "a", "price": "1.5"}, Item, Item("a", Decimal("1.5"))),
    ([{"sku": "a"}], list[Item], [Item("a")]),
    ({"x": {"sku": "a"}}, dict[str, Item | None], {"x": Item("a")}),
    ({"items": [{"sku": "a"}]}, Page[Item], Page([Item("a")])),
    ({"x": 1, "y": 2}, Item | Point, Point(1.0, 2.0)),
    ({"x": 1, "y": 2}, Union[Item, Point], Point(1.0, 2.0)),  # noqa: UP007 - the other spelling
    ({"userId": 1, "roles": ["a"]}, Account, Account(1, ("a",))),
    ({"type": "Account", "userId": 1}, Account, Account(1)),
    ({"lat": 1, "tags": ["a"]}, Place, Place(1.0, {"a"})),
    ([1, ["a"]], Place, Place(1.0, {"a"})),
    ({"size": 3, "inside": {"sku": "a"}}, Box, Box(3, Item("a"))),
    ({"n": 4}, Crate, Crate(4)),
    ({"name": "a", "tags": ["x"]}, User, User(name="a", tags={"x"})),
    ({"value": {"sku": "a"}}, Wrapped[Item], Wrapped[Item](value=Item("a"))),
    ({"point": {"x": 1, "y": 2}, "sides": 3}, Shape, {"point": Point(1.0, 2.0), "sides": 3}),
    ({"seed": 2}, WithExtras, WithExtras(2)),
]


@pytest.mark.parametrize(("value", "hint", "expected"), CONVERTED, ids=str)
def test_what_json_left_of_a_value_becomes_the_value_again(value: Any, hint: Any, expected: Any) -> None:
    result = codec.conform(value, hint)
    assert result == expected
    assert type(result) is type(expected)


REFUSED: list[tuple[Any, Any, str]] = [
    ("1", int, "value: expected int, got str"),
    (1, str, "value: expected str, got int"),
    (1.0, int, "value: expected int, got float"),
    (True, float, r"value: Expected `float`, got `bool`"),
    ("YQ==", bytes, "value: expected bytes, got str"),
    (None, int, "value: expected int, got None"),
    (1, None, "value: expected None, got int"),
    ("soon", datetime, "value: Invalid RFC3339"),
    ("green", Color, "'green' is no value of Color"),
    (64, Access, "value: "),
    ("c", Literal["a", "b"], r"value: expected Literal\['a', 'b'\], got str"),
    (True, Literal[1], "value: expected"),
    ((1,), list[int], "value: expected list"),
    ([1, "x"], list[int], r"value\[1\]: expected int, got str"),
    ([1], tuple[int, str], "expected a tuple of 2, got 1 items"),
    (1, tuple[int, ...], "expected tuple, got int"),
    ([[]], set[list[int]], "value: unhashable"),
    ({"a": "x"}, dict[str, int], r"value\['a'\]: expected int"),
    ({"x": 1}, dict[int, int], r"value\.key\('x'\)"),
    ([], dict[str, int], "value: expected dict, got list"),
    ({}, Item, "missing 1 required positional argument: 'sku'"),
    ({"sku": "a", "colour": 1}, Item, "unexpected keyword argument 'colour'"),
    ({"sku": 1}, Item, r"value\.sku: expected str, got int"),
    ({"sku": 1}, Item | None, r"value\.sku: expected str, got int"),
    (1, Item | str, "value: expected .*Item | str, got int"),
    ({"n": -1}, Checked, "value: n must not be negative"),
    ({"id": 1, "items": [{"sku": "a"}, {"sku": 2}]}, Order, r"value\.items\[1\]\.sku: expected str"),
    ({"type": "Other", "userId": 1}, Account, "type is 'Other', not 'Account'"),
    ([1, [], "x", "y"], Place, "Place has 3 fields, got 4 items"),
    ({"name": 1}, User, "(?s)value: .*name"),
    ({"sides": 3}, Shape, "Shape needs 'point'"),
    ([], Shape, "expected Shape, got list"),
    (0, Annotated[int, msgspec.Meta(gt=0)], "value: Expected `int` >= 1"),
    ({}, Own, "value: expected Own, got dict"),
    (1, Path, "value: expected Path, got int"),
]


@pytest.mark.parametrize(("value", "hint", "reason"), REFUSED, ids=str)
def test_what_does_not_fit_is_refused_with_path_and_reason(value: Any, hint: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        codec.conform(value, hint)


def test_initvar_parameters_are_checked_too() -> None:
    @dataclass
    class Seeded:
        seed: InitVar[int]

    with pytest.raises(ValueError, match=r"value\.seed: expected int"):
        codec.conform({"seed": "x"}, Seeded)


@dataclass
class Left:
    child: Left | Right | None = None


@dataclass
class Right:
    child: Left | Right | None = None


def test_a_union_inside_itself_does_not_take_twice_the_time_for_each_level() -> None:
    right: Any = None
    wrong: Any = "x"
    for _ in range(60):
        right, wrong = {"child": right}, {"child": wrong}
    result, depth = codec.conform(right, Left | Right), 0
    while result is not None:
        assert type(result) is Left
        result, depth = result.child, depth + 1
    assert depth == 60
    with pytest.raises(ValueError, match=r"^value(\.child){60}: expected"):
        codec.conform(wrong, Left | Right)


@dataclass
class Node:
    children: list[Node] = field(default_factory=list)


def test_a_value_without_end_is_refused_and_not_a_recursion_error() -> None:
    circular: dict[str, Any] = {"children": []}
    circular["children"].append(circular)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"children": [deep]}
    for value in (circular, deep):
        with pytest.raises(ValueError, match="nested too deeply"):
            codec.conform(value, Node)


@pytest.mark.parametrize(
    "value",
    [{"user_id": "no number"}, {"userId": 1, "user_id": "no number"}, {"userId": 1, "else": 2}],
    ids=str,
)
def test_a_renamed_field_of_a_struct_cannot_be_given_unchecked_under_its_other_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"value: Account has no field '(user_id|else)'"):
        codec.conform(value, Account)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({"1": "a", "1.0": "b"}, dict[float, str]),
        ({"1": "a", 1: "b"}, dict[int, str]),
        ({"true": "a", "1": "b"}, dict[bool, str]),
        (
            {"0000000A-0000-0000-0000-000000000000": 1, "0000000a-0000-0000-0000-000000000000": 2},
            dict[UUID, int],
        ),
    ],
    ids=str,
)
def test_two_keys_that_become_one_are_refused_rather_than_one_of_them_dropped(value: Any, hint: Any) -> None:
    with pytest.raises(ValueError, match="value: two keys are the same"):
        codec.conform(value, hint)


def test_an_integer_that_no_float_equals_is_refused() -> None:
    assert codec.conform(2**53, float) == 2.0**53
    for number in (2**53 + 1, 10**400, -(2**60) - 1):
        with pytest.raises(ValueError, match="value: "):
            codec.conform(number, float)


class Alias:
    @property
    def __value__(self) -> Any:
        raise NameError("what the alias names exists only for the type checker")


def test_an_alias_that_cannot_be_resolved_is_not_checked() -> None:
    assert codec.conform(1, Alias()) == 1
    with pytest.raises(ValueError, match="expected None"):
        codec.conform(1, SimpleNamespace(__value__=None))
    assert codec.conform([1], list[Alias()]) == [1]  # type: ignore[misc]
