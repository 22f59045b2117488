import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.backends.libsql.hrana import BatchStep, HranaClient
from perdure.backends.libsql.wire_values import Blob, WireValue, from_wire, to_wire
from perdure.backends.sql.dialect import Statement

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.none() | INTEGERS | FLOATS | TEXTS | st.binary()

EDGES: list[Any] = [
    None, 0, -1, 2**53 + 1, -(2**63), 2**63 - 1, 0.0, -0.0, 1.0, 1e16, 5e-324, 1.7976931348623157e308, 0.1,
    "", "a", "😀", "nul \0 inside", "\ufeff", "'; DROP TABLE x; --", "line\r\nbreak", b"", b"\0", b"\0\xff" * 3,
    bytes(range(256)),
]  # fmt: skip


def through_json(value: object) -> object:
    return from_wire(msgspec.json.decode(msgspec.json.encode(to_wire(value)), type=WireValue))


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


@given(VALUES)
def test_every_value_survives_the_wire_format_exactly(value: object) -> None:
    assert same(through_json(value), value)


async def test_every_value_survives_the_server_exactly(client: HranaClient) -> None:
    sql = "SELECT " + ", ".join("?" for _ in EDGES) + ", " + ", ".join("typeof(?)" for _ in EDGES)
    (result,) = (await client.batch([BatchStep(Statement(sql, (*EDGES, *EDGES)))])).results_or_raise()
    back, types = result.rows[0][: len(EDGES)], result.rows[0][len(EDGES) :]
    assert [(got, want) for got, want in zip(back, EDGES, strict=True) if not same(got, want)] == []
    names = {type(None): "null", int: "integer", float: "real", str: "text", bytes: "blob"}
    assert list(types) == [names[type(value)] for value in EDGES]


@pytest.mark.parametrize("text", ["AA", "AA=="])
def test_base64_is_read_with_and_without_padding(text: str) -> None:
    assert from_wire(Blob(text)) == b"\0"


@pytest.mark.parametrize("text", ["A", "A*==", "A A="])
def test_bad_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|padding|characters"):
        from_wire(Blob(text))


def test_a_bool_is_an_integer_and_nan_is_null_as_in_sqlite() -> None:
    assert (through_json(True), through_json(math.nan)) == (1, None)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (2**63, OverflowError),
        (-(2**63) - 1, OverflowError),
        (math.inf, ValueError),
        (-math.inf, ValueError),
        ("\ud800", ValueError),
        (object(), TypeError),
        ([1], TypeError),
    ],
)
def test_what_sqlite_or_json_cannot_hold_is_refused_before_it_is_sent(value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        to_wire(value)


async def test_an_infinity_from_the_server_is_an_error_and_no_null(client: HranaClient) -> None:
    with pytest.raises(ValueError, match="infinity"):
        await client.batch([BatchStep(Statement("SELECT 9e999"))])
