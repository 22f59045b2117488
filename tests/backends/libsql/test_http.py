"""The HTTP of the client, against a server that answers word for word what a test gives it: sqld sends no chunks."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.backends.base.retries import NotSentError, WriteFailure
from perdure.backends.libsql.address import LibsqlAddress
from perdure.backends.libsql.errors import classify_failure
from perdure.backends.libsql.http import HttpError, HttpPool, HttpResponse
from tests.servers.certificates import make_certificate

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Server:
    """Gives one of `answers` for each request; None hangs up instead. `requests` has what it read, `met` counts connections."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.met = 0
        self.is_patient = True
        self.pause = 0.0
        self.pause_from = 0
        self.serving: list[asyncio.Task[None] | None] = []
        self.place = LibsqlAddress("", 0, "", is_encrypted=False)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        self.serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for byte in range(0, len(answer), 3):  # in pieces, as a network may bring them
                    writer.write(answer[byte : byte + 3])
                    await writer.drain()
                    await asyncio.sleep(self.pause if byte >= self.pause_from else 0)
                if b"onnection: close" in answer or not self.answers or not self.is_patient:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(*answers: bytes | None, encryption: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(list(answers))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=encryption)
    server.place = LibsqlAddress("localhost", listening.sockets[0].getsockname()[1], "/base", is_encrypted=encryption is not None)
    try:
        yield server
    finally:
        listening.close()
        for task in filter(None, server.serving):
            await task


@contextlib.asynccontextmanager
async def pooled(size: int = 1) -> AsyncIterator[HttpPool]:
    pool = HttpPool(size)
    yield pool
    await pool.close()


async def ask(pool: HttpPool, server: Server, timeout: float = 5.0) -> HttpResponse:
    return await pool.request(server.place, "POST", "/x", {"Authorization": "Bearer t"}, b"body", timeout)


async def test_a_request_is_whole_and_its_reply_is_read_to_the_end() -> None:
    async with serving(WHOLE) as server, pooled() as pool:
        reply = await ask(pool, server)
        assert (reply.status, reply.body) == (200, b"hi")
        lines = server.requests[0].split(b"\r\n")
        assert lines[0] == b"POST /base/x HTTP/1.1"
        assert lines[1] == f"Host: localhost:{server.place.port}".encode()
        assert {b"Content-Length: 4", b"Authorization: Bearer t"} <= set(lines)
        assert lines[-1] == b"body"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1;ext=1\r\ni\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n002\r\nhi\r\n0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
        b"HTTP/1.1 200\r\ncontent-LENGTH:2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi",
    ],
)
async def test_every_form_of_reply_is_understood_and_leaves_the_connection_usable(answer: bytes) -> None:
    async with serving(answer, WHOLE, WHOLE) as server, pooled() as pool:
        assert [(await ask(pool, server)).body for _ in range(3)] == [b"hi"] * 3
        assert server.met == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 300 + b"\r\n",
    ],
)
async def test_a_reply_that_is_not_whole_is_an_error_and_its_connection_is_not_used_again(answer: bytes | None) -> None:
    async with serving(answer, WHOLE) as server, pooled() as pool:
        server.is_patient = False
        with pytest.raises(HttpError):
            await ask(pool, server)
        assert (await ask(pool, server)).body == b"hi"
        assert server.met == 2


async def test_a_connection_that_the_server_wants_closed_is_not_used_again() -> None:
    async with serving(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), WHOLE) as server, pooled() as pool:
        assert [(await ask(pool, server)).body for _ in range(2)] == [b"hi"] * 2
        assert server.met == 2


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used_again() -> None:
    async with serving(WHOLE) as server, pooled() as pool:  # it hangs up after its last answer
        await ask(pool, server)
        connection = pool._idle[server.place][0]
        while connection.is_idle:  # noqa: ASYNC110 - until the news has reached this side
            await asyncio.sleep(0)
        server.answers.append(WHOLE)
        assert (await ask(pool, server)).body == b"hi"


async def test_a_server_that_does_not_answer_in_time_is_an_error() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", WHOLE) as server, pooled() as pool:
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await ask(pool, server, timeout=0.05)


async def test_a_server_that_takes_its_time_but_is_never_silent_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of the body is a sign of life: all of them take longer than a silence may."""
    monkeypatch.setattr("perdure.backends.libsql.http._READ_SIZE", 3)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n"
    async with serving(head + b"x" * 60, WHOLE) as server, pooled() as pool:
        server.pause, server.pause_from = 0.05, len(head)
        assert (await ask(pool, server, timeout=0.5)).body == b"x" * 60


async def test_a_large_request_is_given_the_time_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.libsql.http._SLOWEST_UPLOAD", 2)  # so the four bytes of the body may take two seconds
    async with serving(WHOLE, WHOLE) as server, pooled() as pool:
        server.pause = 0.05
        assert (await ask(pool, server, timeout=0.4)).body == b"hi"


async def test_what_was_never_sent_is_told_apart() -> None:
    async with serving() as server:
        gone = server.place
    with pytest.raises(NotSentError) as refusal:
        await HttpPool(1).request(gone, "POST", "/x", {}, b"", 5.0)
    assert isinstance(refusal.value.__cause__, OSError)


async def test_no_more_connections_are_open_at_once_than_the_pool_may_have() -> None:
    async with serving(*[WHOLE] * 50) as server, pooled(3) as pool:
        await asyncio.gather(*(ask(pool, server) for _ in range(49)))
        assert server.met <= 3


async def test_a_closed_pool_keeps_no_connection() -> None:
    async with serving(WHOLE, WHOLE, WHOLE) as server, pooled() as pool:
        await ask(pool, server)
        await pool.close()
        await ask(pool, server)
        assert (server.met, sum(map(len, pool._idle.values()))) == (2, 0)


@pytest.fixture
def encrypting(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a server encrypts with, and what a client trusts it by."""
    made = make_certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    return server, ssl.create_default_context(cafile=made.certificate)


async def test_an_encrypted_server_that_is_trusted_is_talked_to(encrypting: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async with serving(WHOLE, WHOLE, WHOLE, encryption=encrypting[0]) as server, pooled() as pool:
        pool._ssl = encrypting[1]
        assert [(await ask(pool, server)).body for _ in range(2)] == [b"hi"] * 2
        assert server.met == 1


async def test_an_encrypted_server_that_nobody_vouches_for_is_told_nothing(
    encrypting: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with serving(WHOLE, encryption=encrypting[0]) as server, pooled() as pool:
        with pytest.raises(ssl.SSLCertVerificationError) as refusal:
            await ask(pool, server)
        assert classify_failure(refusal.value) is WriteFailure.PERMANENT
        assert server.requests == []
