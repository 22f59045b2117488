"""The part of HTTP/1.1 that a libSQL server needs, on asyncio's streams: POST and GET on connections that are kept alive.

A connection serves one request at a time and returns to the pool when its response was read to the end. Any error in between
closes it: the bytes that are left on it would be read as the next response. `NotSentError` says that a request was never sent,
so that it can be sent again; after any other error the server may have received it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple

from perdure.aio.threads import run_in_thread
from perdure.backends.base.retries import NoReplyError, NotSentError
from perdure.backends.libsql.address import LibsqlAddress

CONNECT_TIMEOUT: Final = 10.0
_SLOWEST_UPLOAD: Final = 128 * 1024  # bytes per second, on the slowest of networks
_READ_SIZE: Final = 256 * 1024  # bytes of a response after which the time limit starts again
_CLOSE_TIMEOUT: Final = 1.0
_MAX_LINE: Final = 64 * 1024
_MAX_HEADERS: Final = 200
_FINAL: Final = 200  # an informational status below this is followed by another


class HttpError(ConnectionError):
    """The server sent no HTTP response, or not a whole one."""


class HttpResponse(NamedTuple):
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpConnection:
    """A connection to a server. After an error it cannot be used again."""

    def __init__(self, address: LibsqlAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._on_data: Callable[[], None] = _ignore  # called for every part of a response's body
        self.is_usable = True

    @property
    def is_idle(self) -> bool:
        """Whether another request may be sent: the last response was whole, and the server has not closed the connection."""
        return self.is_usable and not self._reader.at_eof() and not self._writer.is_closing()

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float) -> HttpResponse:
        """Send a request and read its response. Raises `NoReplyError` when the server is silent for `timeout` seconds."""
        self.is_usable = False  # until the response is whole
        async with _limit_silence(timeout, len(body) / _SLOWEST_UPLOAD) as self._on_data:
            self._writer.write(_request_head(method, self._address, path, headers, len(body)) + body)
            await self._writer.drain()
            status, received = await self._read_head()
            content = b"" if status in {204, 304} else await self._read_body(received)
        self.is_usable = received.get("connection", "").lower() != "close"
        return HttpResponse(status, received, content)

    def close(self) -> None:
        """Close it without waiting."""
        self.is_usable = False
        self._writer.close()

    async def close_gracefully(self) -> None:
        """Close it, and wait until that is done."""
        self.close()
        with contextlib.suppress(OSError):  # the server may have closed it first
            await self._writer.wait_closed()

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        while True:
            line = await self._read_line()
            version, _, rest = line.partition(" ")
            code = rest[:3]
            if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdecimal()):
                raise HttpError(f"the server does not speak HTTP/1.1; it said {line[:80]!r}")
            headers = await self._read_headers()
            if int(code) >= _FINAL:
                return int(code), headers

    async def _read_headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEADERS):
            line = await self._read_line()
            if not line:
                return headers
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        raise HttpError(f"the server sent more than {_MAX_HEADERS} headers")

    async def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._read_chunks()
        length = headers.get("content-length")
        if length is None:
            raise HttpError("the server did not say how long its reply is")
        return await self._read_exactly(_parse_length(length, 10))

    async def _read_chunks(self) -> bytes:
        chunks: list[bytes] = []
        while size := _parse_length((await self._read_line()).partition(";")[0].strip(), 16):
            chunks.append(await self._read_exactly(size))
            await self._read_line()
        while await self._read_line():
            pass  # trailers are ignored
        return b"".join(chunks)

    async def _read_line(self) -> str:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            raise HttpError("the server closed the connection before its reply was whole") from None
        except asyncio.LimitOverrunError:
            raise HttpError(f"the server sent a header of more than {_MAX_LINE} bytes") from None
        return line.decode("latin-1").rstrip("\r\n")

    async def _read_exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = await self._reader.read(min(size, _READ_SIZE))
            if not part:
                raise HttpError("the server closed the connection before its reply was whole")
            self._on_data()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class HttpPool:
    """Connections to servers, at most `size` at a time. All of it runs on one event loop."""

    def __init__(self, size: int) -> None:
        self._idle: dict[LibsqlAddress, deque[HttpConnection]] = {}
        self._slots = asyncio.Semaphore(size)
        self._ssl: ssl.SSLContext | None = None
        self._is_closed = False

    async def request(
        self, address: LibsqlAddress, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> HttpResponse:
        """The server's response, for which it may be silent for `timeout` seconds. Raises `NotSentError` without a connection."""
        async with self._connection(address) as connection:
            return await connection.request(method, path, headers, body, timeout)

    @contextlib.asynccontextmanager
    async def _connection(self, address: LibsqlAddress) -> AsyncIterator[HttpConnection]:
        async with self._slots:
            connection = self._pop_idle(address) or await self._open(address)
            try:
                yield connection
            finally:
                if connection.is_idle and not self._is_closed:
                    self._idle.setdefault(address, deque()).append(connection)
                else:
                    connection.close()

    def _pop_idle(self, address: LibsqlAddress) -> HttpConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()  # the latest, so that the server closes those that are not needed
            if connection.is_idle:
                return connection
            connection.close()
        return None

    async def _open(self, address: LibsqlAddress) -> HttpConnection:
        try:
            context = await self._ssl_context() if address.is_encrypted else None
            async with asyncio.timeout(CONNECT_TIMEOUT):
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=_MAX_LINE)
        except TimeoutError as error:
            raise NotSentError from TimeoutError(f"no connection within {CONNECT_TIMEOUT:g} s: {error}")
        except ssl.SSLCertVerificationError:
            raise  # another attempt would fail in the same way
        except OSError as error:
            raise NotSentError from error
        return HttpConnection(address, reader, writer)

    async def _ssl_context(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = await run_in_thread(ssl.create_default_context)  # reads files
        return self._ssl

    def drop_idle(self) -> None:
        """Close all idle connections without waiting."""
        for connection in self._take_idle():
            connection.close()

    def _take_idle(self) -> list[HttpConnection]:
        idle = [connection for kept in self._idle.values() for connection in kept]
        self._idle.clear()
        return idle

    async def close(self) -> None:
        """Close all idle connections, and keep none from now on."""
        self._is_closed = True
        idle = self._take_idle()
        if idle:
            await asyncio.wait(
                [asyncio.ensure_future(connection.close_gracefully()) for connection in idle], timeout=_CLOSE_TIMEOUT
            )


@contextlib.asynccontextmanager
async def _limit_silence(seconds: float, at_first: float) -> AsyncIterator[Callable[[], None]]:
    """Yields a callback that starts the time limit again. The first limit is longer by `at_first`, the time to send."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds + at_first) as limit:
            yield lambda: limit.reschedule(loop.time() + seconds)
    except TimeoutError:
        raise NoReplyError(f"no reply within {seconds:g} s") from None


def _ignore() -> None:
    pass


def _request_head(method: str, address: LibsqlAddress, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        f"Host: {address.authority}",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _parse_length(text: str, base: int) -> int:
    if not text.isascii() or not text.isalnum():
        raise HttpError(f"the server sent {text[:20]!r} for a length")
    try:
        return int(text, base)
    except ValueError:
        raise HttpError(f"the server sent {text[:20]!r} for a length") from None
