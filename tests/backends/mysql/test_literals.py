import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure.backends.mysql.connection import MysqlConnection
from perdure.backends.mysql.literals import Quote, fill, quote_escaped, quote_hexadecimal
from perdure.backends.sql.dialect import Statement
from perdure.errors import ValueNotStorable
from tests.backends.mysql.conftest import connect
from tests.campaign import times

# What could end a value early, and what precedes it in the encodings that have longer characters.
_DANGEROUS = [b"'", b"\\", b'"', b"\0", b"\x1a", b"\n", b"--", b"/*", b"*/", b";", b"%s", b"`", b"\xbf", b"\xc3", b"\xf0"]


def _value(rng: random.Random) -> bytes:
    parts = [rng.choice(_DANGEROUS) if rng.random() < 0.7 else rng.randbytes(rng.randrange(4)) for _ in range(rng.randrange(12))]
    return b"".join(parts)


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[Any]:
    connection = await connect(dsn)
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("quote", "settings"),
    [
        (quote_escaped, "SET sql_mode = 'STRICT_ALL_TABLES'"),
        (quote_hexadecimal, "SET sql_mode = 'STRICT_ALL_TABLES'"),
        (quote_hexadecimal, "SET sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'"),
        (quote_hexadecimal, "SET NAMES sjis"),
        (quote_hexadecimal, "SET NAMES gbk"),
    ],
)
async def test_no_bytes_are_anything_but_a_value(connection: Any, quote: Quote, settings: str) -> None:
    await connection.query(settings)
    rng = random.Random(7)
    connected = MysqlConnection(connection, quote, 1 << 24, "store", is_borrowed=False)
    for _ in range(times(2000)):
        values = [_value(rng) for _ in range(5)]
        (first, second) = await connected.send(
            [
                Statement("SELECT %s AS a, %s AS b, %s AS c", tuple(values[:3])),
                Statement("SELECT %s AS a, %s AS b, 7", tuple(values[3:])),
            ]
        )
        assert (list(first.rows[0]), list(second.rows[0])) == (values[:3], [*values[3:], 7])


async def test_values_of_every_kind_come_back(connection: Any) -> None:
    connected = MysqlConnection(connection, quote_escaped, 1 << 24, "store", is_borrowed=False)
    values = [None, 2**63 - 1, -(2**63), True, "órder 😀", b"\xff\x00"]
    (reply,) = await connected.send([Statement(f"SELECT {', '.join(f'%s AS c{n}' for n in range(len(values)))}", tuple(values))])
    assert list(reply.rows[0]) == [None, 2**63 - 1, -(2**63), 1, "órder 😀".encode(), b"\xff\x00"]


def test_a_value_without_a_column_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        fill("SELECT %s", [1.5], quote_escaped)
    with pytest.raises(ValueError, match="1 places for 2 values"):
        fill("SELECT %s", [1, 2], quote_escaped)


async def test_a_packet_that_the_server_would_not_take_is_refused_before_it_is_sent(connection: Any) -> None:
    connected = MysqlConnection(connection, quote_escaped, 1000, "store", is_borrowed=False)
    with pytest.raises(ValueNotStorable, match="max_allowed_packet=1,000"):
        await connected.send([Statement("SELECT %s AS a", (b"x" * 1000,))])
    assert (await connected.send([Statement("SELECT %s AS a", (b"x" * 900,))]))[0].rows == ((b"x" * 900,),)
