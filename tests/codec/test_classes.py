"""Instances of classes come back as they were, and only as classes that the program chose."""

from __future__ import annotations

import sys
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypeVar

import attrs
import msgspec
import pydantic
import pytest

from perdure.codec import Codec, Loss, hints, register
from perdure.codec.hints import allowed_classes
from perdure.errors import ValueNotStorable
from tests.codec import models
from tests.codec.models import (  # fmt: skip
    ALL,
    Access,
    Account,
    Box,
    Color,
    Counter,
    Crate,
    Derived,
    Item,
    Level,
    Loose,
    Order,
    Page,
    Place,
    Point,
    Shape,
    Tone,
    Unresolvable,
    User,
    WithExtras,
    Wrapped,
)

codec = Codec()


class Text(str):
    __slots__ = ()


class Meeting(pydantic.BaseModel):
    at: datetime
    others: list[datetime] = []


@pytest.mark.parametrize("offset", ["Z", "+00:00", "+02:00", "-09:30", "+23:59"])
def test_a_pydantic_model_with_an_aware_datetime_from_json_round_trips(offset: str) -> None:
    text = f'{{"at": "2024-01-31T12:00:00.5{offset}", "others": ["2024-01-31T12:00:00{offset}"]}}'
    meeting = Meeting.model_validate_json(text)
    data, kept = codec.dump(meeting, Meeting)
    for copy in (kept, codec.load(data, Meeting)):
        assert copy == meeting
        assert copy.at.isoformat() == meeting.at.isoformat()
        assert type(copy.at.tzinfo) is type(meeting.at.tzinfo)
        assert copy.at.tzinfo == meeting.at.tzinfo
    assert codec.digest(meeting) == codec.digest(kept) is not None


def test_an_offset_of_pydantic_is_an_equal_one_where_pydantic_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Meeting.model_validate_json('{"at": "2024-01-31T12:00:00+02:00"}').at
    data, _ = codec.dump(at)
    monkeypatch.delitem(sys.modules, "pydantic_core")
    there = codec.load(data)
    assert there == at
    assert there.utcoffset() == at.utcoffset() == timedelta(hours=2)


@pytest.mark.parametrize("bad", [b"90000", b'"2"', b"null", b"1.5", b"-86400"])
def test_an_offset_of_pydantic_that_is_none_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        codec.load(b'{"$datetime":{"iso":"2024-01-31T12:00:00","pydantic":' + bad + b"}}")


@pytest.mark.parametrize(
    "value",
    [
        Item("a", Decimal("1.50")),
        Point(float("inf"), -0.0),
        Page([Item("a")], "next"),
        Page[Item]([Item("a")]),
        Derived("a", at=datetime(2024, 1, 1, tzinfo=UTC)),
        Account(1, ("admin",)),
        Place(1.0, {"a"}),
        Box(3, Item("b")),
        Crate(4),
        User(name="a"),
        User(name="a", nick=None, tags={"x"}, price=Decimal("1.0")),
        Loose.model_validate({"a": 1, "b": [1]}),
        Wrapped[Item](value=Item("a")),
        Color.RED,
        Level.HIGH,
        Tone.SOFT,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        [{"deep": (Item("a"), {Level.LOW: Place(0.0, set())})}],
        {Point(1, 2): 1, Color.BLUE: 2},
        frozenset({Point(1, 2), Level.LOW}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_instances_come_back_as_they_were(value: Any) -> None:
    data, copy = codec.dump(value, ALL)
    assert copy == value
    assert type(copy) is type(value)
    assert codec.load(data, ALL) == value


def test_post_init_does_not_run_again() -> None:
    order = Order(1, [Item("a")])
    models.made.clear()
    data, copy = codec.dump(order, Order)
    assert (copy.note, codec.load(data, Order).note, models.made) == ("!", "!", [])


def test_attrs_post_init_does_not_run_again() -> None:
    crate = Crate(4)
    models.made.clear()
    assert codec.dump(crate, Crate)[1].double == 8
    assert models.made == []


def test_a_struct_keeps_its_recorded_fields_although_its_post_init_runs() -> None:
    assert codec.dump(Counter(1), Counter)[1].n == 2


def test_attributes_beside_the_fields_are_kept_and_cached_properties_are_not() -> None:
    value = WithExtras(seed=3)
    assert value.expensive == 0
    copy = codec.dump(value, WithExtras)[1]
    assert vars(copy) == {"base": 0, "grown": 6}


def test_a_hash_that_attrs_remembered_is_not_stored() -> None:
    box = Box(3)
    hash(box)
    data, copy = codec.dump(box, Box)
    assert hash(copy) == hash(box)
    assert b"cached_hash" not in data


def test_a_pydantic_model_keeps_what_was_set_and_what_is_private() -> None:
    user = User(name="a")
    user._secret = 7
    copy = codec.dump(user, User)[1]
    assert (copy.model_fields_set, copy._secret, copy.price) == ({"name"}, 7, Decimal("1.0"))


def test_a_pydantic_model_keeps_the_exact_types_that_validation_would_change() -> None:
    user = User.model_construct(name=1, tags=["not", "a", "set"])
    assert codec.dump(user, User)[1].tags == ["not", "a", "set"]


def test_a_pydantic_model_comes_back_with_its_extra_values() -> None:
    copy = codec.dump(Loose.model_validate({"a": 1, "b": (1,)}), Loose)[1]
    assert copy.model_extra == {"b": (1,)}
    assert hash(copy.a) == 1


def test_a_field_that_the_class_gained_gets_its_default_and_one_it_lost_is_dropped() -> None:
    data = codec.dump(Item("a"), Item)[0].replace(b'"price":{"$decimal":"0"}', b'"weight":3')
    assert codec.load(data, Item) == Item("a", Decimal(0))


def test_a_missing_field_without_a_default_is_an_error_that_names_it() -> None:
    data = codec.dump(Item("a"), Item)[0].replace(b'"sku"', b'"sko"')
    with pytest.raises(ValueError, match="field 'sku'"):
        codec.load(data, Item)


@pytest.mark.parametrize(
    "hint",
    [
        list[Item],
        dict[str, Item],
        Item | None,
        Optional[Item],  # noqa: UP045 - the other spelling
        tuple[int, Item],
        Annotated[Item, "text"],
        Annotated[list[Item], ["unhashable"]],
        NewType("Alias", Item),
        TypeVar("Bound", bound=Item),
        Page[Item],
        Order,
        type[Item],
    ],
    ids=str,
)
def test_every_class_that_an_annotation_reaches_is_allowed(hint: Any) -> None:
    item = Item("a")
    assert codec.dump(item, hint)[1] == item


def test_classes_in_the_fields_of_a_typed_dict_are_allowed() -> None:
    value = {"point": Point(1, 2), "sides": 3}
    assert codec.dump(value, Shape)[1] == value


def test_an_enum_named_by_a_literal_is_allowed() -> None:
    assert codec.dump(Color.RED, Literal[Color.RED])[1] is Color.RED


def test_an_annotation_that_cannot_be_resolved_does_not_hide_the_others() -> None:
    value = Unresolvable(Item("a"), 1)
    assert codec.dump(value, Unresolvable)[1] == value


def test_a_class_made_inside_a_function_is_found_through_its_annotation() -> None:
    local = make_dataclass("Local", [("x", int)])
    data, copy = codec.dump(local(1), list[local])  # type: ignore[valid-type]
    assert copy == local(1)
    assert codec.load(data, local | None) == local(1)


def _class_named(name: str) -> Any:
    return make_dataclass(name, [("x", int)], namespace={"__module__": __name__})


@dataclass
class Twin:
    x: int


def test_two_classes_of_one_name_are_both_refused() -> None:
    first = Twin
    second = _class_named("Twin")
    with pytest.raises(ValueNotStorable, match="not in the annotation"):
        codec.dump(first(1), first | second)


def test_a_class_that_is_not_in_the_annotation_is_refused_and_the_message_says_what_to_do() -> None:
    with pytest.raises(ValueNotStorable) as caught:
        codec.dump([Item("a")], list[Point])
    assert caught.value.path == "value[0]"
    text = str(caught.value)
    assert all(word in text for word in ("Item", "annotate", "returns=", "register"))


def test_a_subclass_of_an_annotated_class_is_refused() -> None:
    with pytest.raises(ValueNotStorable, match="Derived"):
        codec.dump(Derived("a"), Item)


def test_a_stored_class_that_the_annotation_no_longer_allows_cannot_be_loaded() -> None:
    data = codec.dump(Item("a"), Item)[0]
    with pytest.raises(ValueError, match="neither in the annotation nor registered"):
        codec.load(data, int)


def test_a_registered_class_needs_no_annotation() -> None:
    @register
    @dataclass
    class Parcel:
        inside: Item

    parcel = Parcel(Item("a"))
    data, copy = codec.dump([parcel])
    assert copy == [parcel]
    assert codec.load(data) == [parcel]


def test_two_classes_cannot_be_registered_under_one_name() -> None:
    first, second = _class_named("SameName"), _class_named("SameName")
    assert register(first) is first
    assert register(first) is first
    with pytest.raises(ValueError, match="SameName"):
        register(second)


def test_only_classes_that_can_be_rebuilt_can_be_registered() -> None:
    with pytest.raises(TypeError, match="cannot be registered"):
        register(object)


def test_a_hint_is_resolved_once() -> None:
    unhashable = Annotated[Item, []]
    assert allowed_classes(list[Item]) is allowed_classes(list[Item])
    assert allowed_classes(unhashable) is allowed_classes(unhashable)


def test_unset_fields_of_a_struct_are_kept() -> None:
    class Patch(msgspec.Struct):
        name: str | msgspec.UnsetType = "x"

    assert codec.dump(Patch(msgspec.UNSET), Patch)[1].name is msgspec.UNSET


def test_a_planted_class_name_neither_imports_nor_calls() -> None:
    for name in ("os:system", "antigravity:geohash", "builtins:eval", "builtins:dict", "tests.codec.models:Crate"):
        for tag in ("$class", "$enum"):
            planted = msgspec.json.encode({tag: [name, {"command": "exit 1"}]})
            with pytest.raises(ValueError, match="neither in the annotation nor registered"):
                codec.load(planted, Point)
    assert "antigravity" not in sys.modules


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Picky(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise Mute


def test_a_class_that_refuses_its_data_with_an_unprintable_error_is_a_value_error_all_the_same() -> None:
    data = codec.dump(Picky(1), Picky)[0].replace(b'"n":1', b'"n":-1')
    with pytest.raises(ValueError, match="Mute"):
        codec.load(data, Picky)
    with pytest.raises(ValueError, match="Mute"):
        codec.conform({"n": -1}, Picky)
    picky = Picky(1)
    picky.n = -1
    with pytest.raises(ValueNotStorable, match="could not be rebuilt: Mute"):
        codec.dump(picky, Picky)


def test_a_user_dict_that_looks_like_a_tag_stays_a_dict() -> None:
    planted = {"$class": ["tests.codec.models:Item", {"sku": "a"}]}
    assert codec.load(codec.dump(planted, Item)[0], Item) == planted


def test_a_class_recorded_from_main_is_found_where_the_file_was_imported_since() -> None:
    data, _ = Codec().dump(Point(1, 2), Point)
    moved = data.replace(f"{Point.__module__}:".encode(), b"__main__:")
    assert moved != data
    assert Codec().load(moved, Point) == Point(1, 2)
    with pytest.raises(ValueError, match="__main__"):
        Codec().load(moved, int)


@dataclass
class Doubled:
    x: int


def test_a_registered_class_is_not_taken_for_another_one_of_its_name_in_the_annotation() -> None:
    registered, annotated = _class_named("Doubled"), Doubled
    register(registered)
    assert type(codec.dump([registered(1)])[1][0]) is registered
    assert type(codec.dump([annotated(1)], annotated)[1][0]) is annotated
    with pytest.raises(ValueNotStorable, match="Doubled"):
        codec.dump([registered(1)], list[annotated])  # type: ignore[valid-type]


@pytest.mark.parametrize("name", [1, Text("x"), "\ud800", None])
def test_an_attribute_whose_name_is_no_text_is_refused_and_not_renamed(name: Any) -> None:
    item = Item("a")
    vars(item)[name] = 1
    with pytest.raises(ValueNotStorable, match="attribute") as caught:
        codec.dump([item], Item)
    assert caught.value.path == "value[0]"
    losses: list[Loss] = []
    assert codec.dump([1, item], Item, losses=losses)[1] == [1, None]
    assert losses == [Loss("value[1]", "non-json")]


@dataclass
class Lazy:
    __slots__ = ("a", "b")
    a: int
    b: int

    def __getattr__(self, name: str) -> int:
        models.made.append(name)
        return 7


def test_reading_an_empty_slot_does_not_ask_the_class_for_a_value() -> None:
    value = Lazy(1, 2)
    del value.b
    models.made.clear()
    data = codec.dump(Lazy(1, 2), Lazy)[0]
    with pytest.raises(ValueNotStorable, match="'b'"):
        codec.dump(value, Lazy)
    assert models.made == []
    assert codec.load(data, Lazy).b == 2


@attrs.define
class Grown:
    a: int
    b: int = attrs.field()
    c: list[int] = attrs.field(init=False)

    @b.default
    def _b(self) -> int:
        return self.a + 1

    @c.default
    def _c(self) -> list[int]:
        return [self.a, self.b]


def test_a_default_of_attrs_that_is_computed_from_other_fields_sees_them() -> None:
    data = codec.dump(Grown(1), Grown)[0]
    shrunk = data.replace(b',"b":2,"c":[1,2]', b"")
    assert shrunk != data
    assert codec.load(shrunk, Grown) == Grown(1)


class Richer(pydantic.BaseModel):
    a: int
    b: int = pydantic.Field(default_factory=lambda given: given["a"] + 1)
    _c: list[int] = pydantic.PrivateAttr(default_factory=list)
    _d: int = pydantic.PrivateAttr()


def test_a_pydantic_model_that_gained_fields_and_private_attributes_has_their_defaults() -> None:
    value = Richer(a=1, b=5)
    value._c.append(3)
    copy = codec.dump(value, Richer)[1]
    assert (copy, copy._c) == (value, [3])
    data = codec.dump(Richer(a=1), Richer)[0]
    name = data[: data.index(b",{")].decode()
    poorer = f'{name},{{"a":1}}]}}'.encode()
    first, second = codec.load(poorer, Richer), codec.load(poorer, Richer)
    assert (first, first.b, first._c) == (Richer(a=1), 2, [])
    assert first._c is not second._c
    assert not hasattr(first, "_d")


def test_a_private_attribute_that_was_deleted_stays_deleted() -> None:
    value = Richer(a=1)
    del value._c
    assert not hasattr(codec.dump(value, Richer)[1], "_c")


def test_an_unhashable_hint_is_resolved_also_while_another_thread_clears_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(dict[int, Any]):
        def __setitem__(self, key: int, value: Any) -> None:
            super().__setitem__(key, value)
            self.clear()

    monkeypatch.setattr(hints, "_unhashable", Cleared())
    assert codec.dump(Item("a"), Annotated[Item, ["unhashable"]])[1] == Item("a")


def test_a_class_registered_while_another_thread_collects_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = _class_named("Early"), _class_named("Late")
    collect = hints._collect
    racing: list[Any] = [late]

    def interrupted(found: list[Any]) -> Any:
        if racing and early in found:
            register(racing.pop())  # what another thread would do after this one has looked at the registry
        return collect(found)

    monkeypatch.setattr(hints, "_collect", interrupted)
    register(early)
    codec.dump([early(1)])
    assert codec.dump([late(1)])[1] == [late(1)]


class Proxy(msgspec.Struct):
    data: dict[str, int]

    def __getattr__(self, name: str) -> int:
        return self.data[name]


class ProxyTuple(NamedTuple):
    data: dict[str, int]

    def __getattr__(self, name: str) -> int:
        return self.data[name]


class Open(msgspec.Struct, dict=True):
    n: int


@pytest.mark.parametrize("value", [Proxy({"a": 1}), ProxyTuple({"a": 1})], ids=["struct", "tuple"])
def test_a_class_that_answers_for_any_attribute_is_only_asked_for_its_own(value: Any) -> None:
    assert codec.dump(value, Proxy | ProxyTuple)[1] == value


def test_what_a_struct_or_a_named_tuple_holds_beside_its_fields_is_kept() -> None:
    class Wide(Place):
        pass

    value, wide = Open(1), Wide(1.0, set())
    value.more = (1,)  # type: ignore[attr-defined]
    wide.more = (2,)  # type: ignore[attr-defined]
    assert codec.dump(value, Open)[1].more == (1,)
    assert codec.dump(wide, Wide)[1].more == (2,)
