"""Values without tags, as people and other programs read them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given

from perdure.codec import Codec, readable, tree_of
from tests.codec.models import Color, Item
from tests.codec.test_values import VALUES


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Item("a", Decimal("1.50")), {"sku": "a", "price": "1.50"}),
        ([{"order": (Item("a"), 1)}], [{"order": [{"sku": "a", "price": "0"}, 1]}]),
        ({1: "a", "b": 2, (1, 2): 3}, {"1": "a", "b": 2, "[1,2]": 3}),
        ({1: "a", "1": "b"}, [[1, "a"], ["1", "b"]]),
        ({"$price": 3}, {"$price": 3}),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
        (datetime(2026, 1, 2, 3, tzinfo=ZoneInfo("Europe/Berlin")), "2026-01-02T03:00:00[Europe/Berlin]"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(hours=1, seconds=5), "1:00:05"),
        (-timedelta(hours=1), "-1:00:00"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"abc", "YWJj"),
        (PurePosixPath("/a/b"), "/a/b"),
        (Color.RED, "RED"),
        (float("inf"), "inf"),
        ("a\udc80", "a\\udc80"),
        (frozenset({1}), [1]),
    ],
)
def test_a_value_is_plain_json(value: Any, plain: Any) -> None:
    hint = list[dict[str, tuple[Item, int]]] if isinstance(value, list) else type(value)
    assert readable(tree_of(Codec().dump(value, hint)[0])[0]) == plain


@pytest.mark.parametrize(
    "tree", [{"$class": 1}, {"$enum": []}, {"$timedelta": "1"}, {"$dict": [1]}, {"$other": 1}, {"$class": []}]
)
def test_what_is_not_understood_stays(tree: Any) -> None:
    assert readable(tree) == tree


@given(VALUES)
def test_every_value_can_be_written_as_json(value: Any) -> None:
    msgspec.json.encode(readable(tree_of(Codec().dump(value)[0])[0]))
