import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from perdure.backends.libsql.address import LibsqlAddress, parse_url
from perdure.backends.libsql.hrana import (
    BatchStep,
    HranaClient,
    HranaStream,
    ServerError,
    all_of,
    committed_results,
    has_succeeded,
    in_transaction,
    negate,
)
from perdure.backends.libsql.http import HttpError
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result
from tests.backends.libsql.conftest import run
from tests.backends.libsql.test_http import serving
from tests.servers.libsql import LibsqlServer


@pytest.fixture
async def numbers(url: str) -> AsyncIterator[str]:
    """A table with a column n that takes every number once."""
    name = f"numbers_{secrets.token_hex(6)}"
    await run(url, f"CREATE TABLE {name} (n INTEGER PRIMARY KEY)")
    yield name
    await run(url, f"DROP TABLE {name}")


def insert(table: str, *values: int) -> list[Statement]:
    return [Statement(f"INSERT INTO {table} VALUES (?)", (value,)) for value in values]


async def rows(client: HranaClient, table: str) -> list[int]:
    (result,) = (await client.batch([BatchStep(Statement(f"SELECT n FROM {table} ORDER BY n"))])).results_or_raise()
    return [int(str(n)) for (n,) in result.rows]


async def test_a_transaction_is_one_batch(client: HranaClient, numbers: str) -> None:
    results = committed_results(
        await client.batch(in_transaction([*insert(numbers, 1, 2), Statement(f"DELETE FROM {numbers} RETURNING n")]))
    )
    assert results == [Result([], 1), Result([], 1), Result([(1,), (2,)], 2)]


async def test_a_transaction_whose_statement_fails_leaves_nothing_behind(client: HranaClient, numbers: str) -> None:
    ends = await client.batch(in_transaction(insert(numbers, 1, 2, 1, 3)))
    with pytest.raises(ServerError, match="UNIQUE constraint") as refusal:
        committed_results(ends)
    assert refusal.value.code.startswith("SQLITE_CONSTRAINT")
    assert await rows(client, numbers) == []
    assert [result is None for result in ends.results] == [False, False, False, True, True, True, False]


async def test_a_step_is_executed_only_on_its_condition(client: HranaClient, numbers: str) -> None:
    bad = Statement("SELECT * FROM nowhere")
    one, two, three, four = insert(numbers, 1, 2, 3, 4)
    steps = [
        BatchStep(bad),
        BatchStep(one, has_succeeded(0)),
        BatchStep(two, negate(has_succeeded(0))),
        BatchStep(three, all_of(negate(has_succeeded(0)), has_succeeded(2))),
        BatchStep(four, all_of(has_succeeded(2), has_succeeded(1))),
    ]
    ends = await client.batch(steps)
    assert await rows(client, numbers) == [2, 3]
    assert [error is None for error in ends.errors] == [False, True, True, True, True]


async def test_a_stream_goes_on_from_request_to_request(client: HranaClient, numbers: str) -> None:
    stream = HranaStream(client)
    (await stream.batch([BatchStep(Statement("BEGIN IMMEDIATE")), *map(BatchStep, insert(numbers, 1))])).results_or_raise()
    assert stream.is_open
    assert await rows(client, numbers) == []
    (await stream.batch([*map(BatchStep, insert(numbers, 2)), BatchStep(Statement("COMMIT"))], is_last=True)).results_or_raise()
    assert stream._baton is None
    assert await rows(client, numbers) == [1, 2]


async def test_closing_a_stream_rolls_back_what_it_did_not_commit(client: HranaClient, numbers: str) -> None:
    stream = HranaStream(client)
    (await stream.batch([BatchStep(Statement("BEGIN IMMEDIATE")), *map(BatchStep, insert(numbers, 1))])).results_or_raise()
    await stream.close()
    await stream.close()
    committed_results(await client.batch(in_transaction(insert(numbers, 2))))
    assert await rows(client, numbers) == [2]


async def test_a_baton_is_good_once(client: HranaClient) -> None:
    stream = HranaStream(client)
    await stream.batch([BatchStep(Statement("SELECT 1"))])
    copy = HranaStream(client)
    copy._baton = stream._baton
    await stream.batch([BatchStep(Statement("SELECT 1"))])
    with pytest.raises(ServerError, match="baton") as refusal:
        await copy.batch([BatchStep(Statement("SELECT 1"))])
    assert refusal.value.status == 400
    assert not copy.is_open


async def test_concurrent_transactions_wait_for_each_other(client: HranaClient, numbers: str) -> None:
    count = 40
    batches = [client.batch(in_transaction(insert(numbers, n))) for n in range(count)]
    for ends in await asyncio.gather(*batches):
        committed_results(ends)
    assert await rows(client, numbers) == list(range(count))


async def test_an_older_server_is_asked_in_the_older_version() -> None:
    pipeline = msgspec.json.encode({"baton": None, "base_url": None, "results": [_selected(1), _CLOSED]})
    async with serving(_reply(b"", 404), _reply(b""), _reply(pipeline)) as server:
        client = HranaClient(server.place, None, size=1)
        await client.choose_version()
        assert (await client.batch([BatchStep(Statement("SELECT 1"))])).results_or_raise() == [Result([(1,)], 0)]
        assert [request.split()[:2] for request in server.requests] == [
            [b"GET", b"/base/v3"],
            [b"GET", b"/base/v2"],
            [b"POST", b"/base/v2/pipeline"],
        ]
        await client.close()


async def test_a_stream_goes_on_where_the_server_says() -> None:
    async with serving() as first, serving(_reply(_pipeline(_selected(2)))) as second:
        there = f"http://127.0.0.1:{second.place.port}/elsewhere"
        first.answers.append(_reply(_pipeline(_selected(1), baton="b", base_url=there)))
        client = HranaClient(first.place, "t", size=2)
        stream = HranaStream(client)
        await stream.batch([BatchStep(Statement("SELECT 1"))])
        assert (await stream.batch([BatchStep(Statement("SELECT 2"))])).results_or_raise() == [Result([(2,)], 0)]
        assert second.requests[0].startswith(b"POST /elsewhere/v3/pipeline")
        assert b'"baton":"b"' in second.requests[0]
        await client.close()


async def test_a_stream_never_goes_on_without_the_encryption_it_began_with() -> None:
    stream = HranaStream(HranaClient(LibsqlAddress("h", 443, "", is_encrypted=True), "secret", size=1))
    with pytest.raises(HttpError, match="not encrypted"):
        stream._redirect("http://h")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{}", b'{"results": [{"type": "ok"}]}', b'{"results": []}', b'{"results": [{"type": "huh"}]}']
)
async def test_a_reply_that_is_no_hrana_is_an_error(body: bytes) -> None:
    async with serving(_reply(body)) as server:
        client = HranaClient(server.place, None, size=1)
        with pytest.raises(HttpError):
            await client.batch([BatchStep(Statement("SELECT 1"))])
        await client.close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"message": "no", "code": "STREAM_EXPIRED"}', "no (400 STREAM_EXPIRED)"),
        (502, b"<html>\n bad gateway</html>", "<html> bad gateway</html> (502)"),
        (503, b"", "the server refused the request without a word (503)"),
    ],
)
async def test_a_refused_request_says_what_the_server_said(status: int, body: bytes, message: str) -> None:
    async with serving(_reply(body, status)) as server:
        client = HranaClient(server.place, None, size=1)
        with pytest.raises(ServerError) as refusal:
            await client.batch([BatchStep(Statement("SELECT 1"))])
        assert str(refusal.value) == message
        await client.close()


async def test_the_server_gives_its_clock_in_microseconds_and_it_does_not_go_back(client: HranaClient) -> None:
    sql = "SELECT CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
    told = [(await client.batch([BatchStep(Statement(sql))])).results_or_raise()[0].rows[0][0] for _ in range(20)]
    assert told == sorted(told, key=str)
    assert all(isinstance(instant, int) and abs(instant - time.time_ns() // 1000) < 60_000_000 for instant in told)


async def test_a_server_that_was_restarted_is_reached_again(restartable: LibsqlServer) -> None:
    client = HranaClient(parse_url(restartable.url).address, None, size=2)
    await client.batch([BatchStep(Statement("SELECT 1"))])
    await asyncio.to_thread(restartable.kill)
    await asyncio.to_thread(restartable.start)
    assert (await client.batch([BatchStep(Statement("SELECT 2"))])).results_or_raise() == [Result([(2,)], 0)]
    await client.close()


_CLOSED = {"type": "ok", "response": {"type": "close"}}


def _selected(value: int) -> dict[str, object]:
    row = {"cols": [], "rows": [[{"type": "integer", "value": str(value)}]], "affected_row_count": 0}
    return {"type": "ok", "response": {"type": "batch", "result": {"step_results": [row], "step_errors": [None]}}}


def _pipeline(*results: object, **others: object) -> bytes:
    return msgspec.json.encode({"results": results, "baton": None, "base_url": None, **others})


def _reply(body: bytes, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
