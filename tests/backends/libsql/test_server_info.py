"""What a server is asked at set-up, answered word for word as a test wants it."""

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from perdure.backends.libsql.hrana import HranaClient
from perdure.backends.libsql.server_info import durability_of, warn_of_lost_lock
from perdure.errors import PerdureWarning
from tests.backends.libsql.test_http import serving


def reply(text: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def pragma(value: int) -> bytes:
    rows = f'[[{{"type": "integer", "value": "{value}"}}]]'
    batch = f'{{"step_results": [{{"rows": {rows}}}], "step_errors": [null]}}'
    answer = f'{{"type": "ok", "response": {{"type": "batch", "result": {batch}}}}}'
    return reply(f'{{"results": [{answer}, {{"type": "ok", "response": {{"type": "close"}}}}]}}')


NO_PRAGMAS = reply('{"message": "no such statement", "code": "SQL_PARSE_ERROR"}', "400 Bad Request")


@asynccontextmanager
async def asking(*answers: bytes) -> AsyncIterator[HranaClient]:
    async with serving(*answers, reply("")) as server:
        client = HranaClient(server.place, None, size=1)
        try:
            yield client
        finally:
            await client.close()


async def ask(*answers: bytes) -> None:
    async with asking(*answers) as client:
        await warn_of_lost_lock(client, "libSQL store")


@pytest.mark.parametrize(
    ("answer", "durability"), [(pragma(3), "disk"), (pragma(2), "disk"), (pragma(1), "process"), (NO_PRAGMAS, "process")]
)
async def test_a_commit_is_durable_where_the_server_says_that_it_waits_for_its_disk(answer: bytes, durability: str) -> None:
    async with asking(answer) as client:
        assert await durability_of(client) == durability


@pytest.mark.parametrize("version", ["sqld 0.24.32 (40c272de 2025-02-14)", "sqld 0.25.0", "sqld 1.0.0"])
async def test_a_server_that_may_come_to_a_halt_is_warned_about(version: str) -> None:
    with pytest.warns(PerdureWarning, match=rf"libSQL store: {version[:11]}.* four processes .* --checkpoint-interval-s 60"):
        await ask(pragma(1000), reply(version))


@pytest.mark.parametrize(
    "answers",
    [
        [pragma(0), reply("sqld 0.24.32")],
        [NO_PRAGMAS, reply("sqld 0.24.32")],
        [pragma(1000), reply("sqld 0.24.31 (x)")],
        [pragma(1000), reply("sqld 0.9.40")],
        [pragma(1000), reply("another server 9.0.0")],
        [pragma(1000), reply("sqld 0.24.32", "404 Not Found")],
    ],
    ids=["no checkpoints after commits", "no pragmas", "before", "long before", "not sqld", "no version"],
)
async def test_others_are_not_warned_about(answers: list[bytes]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await ask(*answers)
