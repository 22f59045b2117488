"""What a lossy dump leaves out is marked in its place, and can be read from the stored bytes alone."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import Codec, Loss, tree_of
from perdure.errors import ValueNotStorable
from tests.codec.models import ALL, Account, Color, Item, Loose, Order, Page, Place, Point, User, WithExtras
from tests.codec.same import same
from tests.codec.test_values import HASHABLE, KEYS, LEAVES, VALUES
from tests.naming import short_id

codec = Codec()


def _circular(make: Any) -> Any:
    around: list[Any] = [1]
    around.append(make(around))
    return around


class Failing(msgspec.Struct):
    n: Any

    def __post_init__(self) -> None:
        if self.n is None:
            raise RuntimeError("no n")


@dataclass(frozen=True)
class Member:
    n: Any


class Text(str):
    __slots__ = ()


class Hue(enum.Enum):
    RED = 1


STRAY = object.__new__(Hue)  # of the class, but no member
STRAY._name_, STRAY._value_ = "STRAY", 0

UNSTORABLE = st.sampled_from([object(), len, 1j, Member(1), Text("x"), STRAY])
CIRCULAR = st.sampled_from([lambda a: a, lambda a: (a,), lambda a: {"$k": a}, lambda a: {1: a}, lambda a: Item("a", a)]).map(
    _circular
)

HINT: Any = ALL | Failing | Hue


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = HASHABLE | st.sampled_from([Point(1, 2), Color.RED, Place(1.0, "x"), (Color.BLUE,)])  # type: ignore[arg-type]
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS | st.just("$lost"), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Order, inner, inner)
        | st.builds(Account, inner, inner)
        | st.builds(Place, inner, inner)
        | inner.map(lambda part: Loose.model_construct(a=1, **{"$b": part}))
        | inner.map(_with_state)
    )


def _with_state(part: Any) -> WithExtras:
    value = WithExtras(1)
    vars(value)["$lost"] = part
    return value


LOSSY: st.SearchStrategy[Any] = st.recursive(LEAVES | UNSTORABLE | CIRCULAR, _containers, max_leaves=20)


@given(LOSSY)
def test_what_was_lost_is_told_from_the_bytes_as_dump_noted_it(value: Any) -> None:
    losses: list[Loss] = []
    data, copy = codec.dump(value, HINT, losses=losses)
    tree, told = tree_of(data)
    assert told == losses
    assert tree_of(msgspec.json.encode(tree)) == (tree, [])
    assert codec.digest(codec.load(data, HINT)) == codec.digest(copy) is not None


@given(VALUES)
def test_without_losses_the_tree_is_the_stored_json(value: Any) -> None:
    data, _ = codec.dump(value, losses=[])
    assert tree_of(data) == (json.loads(data), [])
    assert b'{"$lost":' not in data


def test_each_reason_is_written_where_the_part_was_and_read_as_none() -> None:
    around: list[Any] = []
    around.append(around)
    losses: list[Loss] = []
    data, copy = codec.dump({"a": (1, object()), "round": around, "e": [STRAY]}, Hue, losses=losses)
    assert json.loads(data) == {
        "a": {"$tuple": [1, {"$lost": "non-json"}]},
        "round": [{"$lost": "circular"}],
        "e": [{"$lost": "encode-failed"}],
    }
    assert copy == {"a": (1, None), "round": [None], "e": [None]} == codec.load(data)
    expected = [Loss('value["a"][1]', "non-json"), Loss('value["round"][0]', "circular"), Loss('value["e"][0]', "encode-failed")]
    assert losses == expected
    assert tree_of(data) == ({"a": {"$tuple": [1, None]}, "round": [None], "e": [None]}, expected)


def test_a_whole_value_that_is_lost_is_one_tag() -> None:
    for value, reason in ((object(), "non-json"), (Failing(0), "encode-failed")):
        if isinstance(value, Failing):
            value.n = None
        losses: list[Loss] = []
        data, copy = codec.dump(value, Failing, losses=losses)
        assert data == b'{"$lost":"%s"}' % reason.encode()
        assert copy is None is codec.load(data)
        assert losses == [Loss("value", reason)]  # type: ignore[arg-type]
        assert tree_of(data) == (None, losses)


def test_a_value_that_cannot_be_rebuilt_without_its_lost_part_is_lost_as_a_whole_and_both_are_noted() -> None:
    losses: list[Loss] = []
    data, copy = codec.dump([Failing(object())], Failing, losses=losses)
    assert (data, copy) == (b'{"$lost":"encode-failed"}', None)
    assert losses == [Loss("value[0].n", "non-json"), Loss("value", "encode-failed")]
    assert tree_of(data) == (None, [Loss("value", "encode-failed")])


@pytest.mark.parametrize(
    ("value", "reason", "inner"),
    [
        ({len, 1}, "non-json", None),
        (frozenset({(1, len)}), "non-json", "value[0][0][1]"),
        ({len: 1, 2: object()}, "non-json", "value[0].key(<built-in function len>)"),
        ({(1, len): 1}, "non-json", "value[0].key((1, <built-in function len>))[1]"),
        ({Member(1)}, "non-json", "value[0][0]"),
    ],
    ids=short_id,
)
def test_a_set_or_dict_that_loses_an_element_or_key_is_one_loss_in_the_bytes(value: Any, reason: str, inner: str | None) -> None:
    losses: list[Loss] = []
    data, copy = codec.dump([value, 1], losses=losses)
    assert data == b'[{"$lost":"%s"},1]' % reason.encode()
    assert copy == [None, 1]
    assert tree_of(data) == ([None, 1], [Loss("value[0]", reason)])  # type: ignore[arg-type]
    assert inner is None or losses == [Loss(inner, reason)]  # type: ignore[arg-type]


def test_a_set_that_contains_itself_is_one_circular_loss() -> None:
    part: list[Any] = []
    member = Circle(part)
    part.append({member})
    data, _ = codec.dump({member}, Circle, losses=[])
    assert tree_of(data) == (None, [Loss("value", "circular")])


class Circle(msgspec.Struct, frozen=True, eq=False):
    parts: list[Any]

    __hash__ = object.__hash__


def test_paths_name_fields_indexes_and_keys_as_dump_does() -> None:
    value = {"orders": {7: Order(1, (Item("a"), Item("b", object())))}, "$x": [object()], "page": Page((0, 1, 2, object()))}  # type: ignore[arg-type]
    value[(1, "é")] = User.model_construct(name=object())  # type: ignore[index]
    value[True] = value[None] = object()  # type: ignore[index]
    losses: list[Loss] = []
    data, _ = codec.dump(value, ALL, losses=losses)
    paths = [
        'value["orders"][7].items[1].price',
        'value["$x"][0]',
        'value["page"].items[3]',
        'value[{"$tuple":[1,"é"]}].name',
        "value[true]",
        "value[null]",
    ]
    assert [loss.path for loss in losses] == paths
    assert [loss.path for loss in tree_of(data)[1]] == paths


def test_a_users_key_that_is_named_like_the_tag_is_a_key() -> None:
    value = {"$lost": "non-json", "a": {"$lost": "circular"}, "$$lost": 1, "s": ["$lost"]}
    data, copy = codec.dump(value, losses=[])
    assert copy == value == codec.load(data)
    assert tree_of(data) == (json.loads(data), [])
    losses: list[Loss] = []
    data, copy = codec.dump({"$lost": object()}, losses=losses)
    assert (data, copy) == (b'{"$$lost":{"$lost":"non-json"}}', {"$lost": None})
    assert tree_of(data) == ({"$$lost": None}, losses) == ({"$$lost": None}, [Loss('value["$lost"]', "non-json")])


def test_an_attribute_that_is_named_like_the_tag_is_an_attribute() -> None:
    value = _with_state("non-json")
    data, copy = codec.dump(value, WithExtras)
    assert vars(copy)["$lost"] == "non-json"
    assert tree_of(data) == (json.loads(data), [])


@pytest.mark.parametrize("content", [b"null", b'"other"', b"1", b"[]", b'["non-json"]', b'{"$lost":"non-json"}', b"true"])
def test_a_loss_with_any_other_reason_is_a_value_error(content: bytes) -> None:
    for data in (b'{"$lost":%s}' % content, b'{"a":[{"$lost":%s}]}' % content):
        with pytest.raises(ValueError, match="reason"):
            codec.load(data)
        with pytest.raises(ValueError, match="reason"):
            tree_of(data)


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b'"\xff"', b'{"$lost":', b"[" * 100_000 + b"]" * 100_000])
def test_what_is_no_json_has_no_tree(data: bytes) -> None:
    with pytest.raises(ValueError, match="is no JSON"):
        tree_of(data)


def test_a_loss_is_told_also_where_another_writer_has_escaped_the_tag() -> None:
    assert tree_of(b'[{"\\u0024lost":"circular"}]') == ([None], [Loss("value[0]", "circular")])


@given(st.sampled_from([b"$tuple", b"$set", b"$dict", b"$class", b"$enum", b"$datetime", b"$future", b"a", b"$$a"]), LOSSY)
def test_planted_losses_are_told_or_a_value_error(tag: bytes, value: Any) -> None:
    data, _ = codec.dump([value, object()], HINT, losses=[])
    for form in (b'{"%s":%s}', b'{"%s":["x",%s]}', b'{"%s":[%s]}', b'{"%s":{"x":%s}}'):
        planted = form % (tag, data)
        tree, _ = tree_of(planted)
        json.dumps(tree)


def test_a_tree_deeper_than_the_stack_is_told() -> None:
    data = b'{"$tuple":[' * 450 + b'{"$lost":"circular"}' + b"]}" * 450
    (loss,) = tree_of(data)[1]
    assert loss.path == "value" + "[0]" * 450


@given(LOSSY)
def test_a_strict_dump_writes_nothing_lossy(value: Any) -> None:
    losses: list[Loss] = []
    data, _ = codec.dump(value, HINT, losses=losses)
    if losses:
        with pytest.raises(ValueNotStorable):
            codec.dump(value, HINT)
        return
    assert codec.dump(value, HINT)[0] == data
    assert codec.digest(value) is not None


def test_what_was_lost_leaves_a_digest_as_it_was() -> None:
    assert codec.digest([None]) != codec.digest([{"$lost": "non-json"}])
    assert codec.digest([object()]) is None
    assert same(codec.dump([None], losses=[])[1], [None])
