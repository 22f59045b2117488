"""As much HTTP/1.1 as talking to a libSQL server takes, on asyncio's streams: POST and GET on connections that are kept.

A connection serves one request at a time and goes back to the pool when its reply was read to the end. Whatever goes wrong in
between closes it: what is left on the wire would be taken for the next reply. Errors tell apart what was never sent
(`NotSentError`) from what may have been received, since only the first can be sent again without a thought.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple

from perdure.backends.base.failures import NotSentError
from perdure.backends.libsql.address import LibsqlAddress

CONNECT_TIMEOUT: Final = 10.0
_SLOWEST: Final = 128 * 1024  # bytes of a request that arrive in a second, on the slowest of networks
_PIECE: Final = 256 * 1024  # of a reply: who reads so much knows that the server still speaks
_GOODBYE_TIMEOUT: Final = 1.0
_MAX_LINE: Final = 64 * 1024
_MAX_HEADERS: Final = 200
_FINAL: Final = 200  # a status below this is followed by another


class HttpError(ConnectionError):
    """What came back is no HTTP reply, or not a whole one."""


class NoReplyError(TimeoutError):
    """The server was silent for too long. It may have received what was sent."""


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A connection to a server. After an error it is of no use any more."""

    def __init__(self, place: LibsqlAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._place = place
        self._reader = reader
        self._writer = writer
        self._heard: Callable[[], None] = _nothing  # called for every piece of a reply's body
        self.is_usable = True

    @property
    def is_idle(self) -> bool:
        """Whether another request may be sent on it: the server has not closed it, nor said anything unasked."""
        return self.is_usable and not self._reader.at_eof() and not self._writer.is_closing()

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Reply:
        """Send a request and read its reply to the end. Raises `NoReplyError` when the server is silent so many seconds."""
        self.is_usable = False  # until the reply is whole
        async with _silence_limited(timeout, len(body) / _SLOWEST) as self._heard:
            self._writer.write(_head(method, self._place, path, headers, len(body)) + body)
            await self._writer.drain()
            status, told = await self._status_and_headers()
            content = b"" if status in {204, 304} else await self._content(told)
        self.is_usable = told.get("connection", "").lower() != "close"
        return Reply(status, told, content)

    def close(self) -> None:
        """Hang up without waiting."""
        self.is_usable = False
        self._writer.close()

    async def hang_up(self) -> None:
        """Hang up, and wait until that is done."""
        self.close()
        with contextlib.suppress(OSError):  # the server may have hung up first
            await self._writer.wait_closed()

    async def _status_and_headers(self) -> tuple[int, dict[str, str]]:
        while True:
            line = await self._line()
            version, _, rest = line.partition(" ")
            code = rest[:3]
            if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdecimal()):
                raise HttpError(f"the server does not speak HTTP/1.1; it said {line[:80]!r}")
            headers = await self._headers()
            if int(code) >= _FINAL:
                return int(code), headers

    async def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEADERS):
            line = await self._line()
            if not line:
                return headers
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        raise HttpError(f"the server sent more than {_MAX_HEADERS} headers")

    async def _content(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._chunks()
        length = headers.get("content-length")
        if length is None:
            raise HttpError("the server did not say how long its reply is")
        return await self._exactly(_number(length, 10))

    async def _chunks(self) -> bytes:
        chunks: list[bytes] = []
        while size := _number((await self._line()).partition(";")[0].strip(), 16):
            chunks.append(await self._exactly(size))
            await self._line()
        while await self._line():
            pass  # trailers say nothing of use
        return b"".join(chunks)

    async def _line(self) -> str:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            raise HttpError("the server closed the connection before its reply was whole") from None
        except asyncio.LimitOverrunError:
            raise HttpError(f"the server sent a header of more than {_MAX_LINE} bytes") from None
        return line.decode("latin-1").rstrip("\r\n")

    async def _exactly(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size:
            piece = await self._reader.read(min(size, _PIECE))
            if not piece:
                raise HttpError("the server closed the connection before its reply was whole")
            self._heard()
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class Pool:
    """Connections to servers, at most `size` at a time. All of it runs on one event loop."""

    def __init__(self, size: int) -> None:
        self._idle: dict[LibsqlAddress, deque[Connection]] = {}
        self._places_free = asyncio.Semaphore(size)
        self._encryption: ssl.SSLContext | None = None
        self._is_closed = False

    async def request(
        self, place: LibsqlAddress, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> Reply:
        """The server's reply, for which it may be silent so many seconds. Raises `NotSentError` without a connection."""
        async with self._connection(place) as connection:
            return await connection.request(method, path, headers, body, timeout)

    @contextlib.asynccontextmanager
    async def _connection(self, place: LibsqlAddress) -> AsyncIterator[Connection]:
        async with self._places_free:
            connection = self._kept(place) or await self._opened(place)
            try:
                yield connection
            finally:
                if connection.is_idle and not self._is_closed:
                    self._idle.setdefault(place, deque()).append(connection)
                else:
                    connection.close()

    def _kept(self, place: LibsqlAddress) -> Connection | None:
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()  # the latest: the others may then grow old and be closed by the server
            if connection.is_idle:
                return connection
            connection.close()
        return None

    async def _opened(self, place: LibsqlAddress) -> Connection:
        try:
            encryption = await self._context() if place.is_encrypted else None
            async with asyncio.timeout(CONNECT_TIMEOUT):
                reader, writer = await asyncio.open_connection(place.host, place.port, ssl=encryption, limit=_MAX_LINE)
        except TimeoutError as error:
            raise NotSentError from TimeoutError(f"no connection within {CONNECT_TIMEOUT:g} s: {error}")
        except ssl.SSLCertVerificationError:
            raise  # it would be the same the next time
        except OSError as error:
            raise NotSentError from error
        return Connection(place, reader, writer)

    async def _context(self) -> ssl.SSLContext:
        if self._encryption is None:
            self._encryption = await asyncio.to_thread(ssl.create_default_context)  # it reads files
        return self._encryption

    async def close(self) -> None:
        """Hang up everywhere, and keep no connection from now on."""
        self._is_closed = True
        idle = [connection for kept in self._idle.values() for connection in kept]
        self._idle.clear()
        if idle:
            await asyncio.wait([asyncio.ensure_future(connection.hang_up()) for connection in idle], timeout=_GOODBYE_TIMEOUT)


@contextlib.asynccontextmanager
async def _silence_limited(seconds: float, at_first: float) -> AsyncIterator[Callable[[], None]]:
    """Gives what is to be called whenever something was heard. The time to send is allowed for once, `at_first`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds + at_first) as limit:
            yield lambda: limit.reschedule(loop.time() + seconds)
    except TimeoutError:
        raise NoReplyError(f"no reply within {seconds:g} s") from None


def _nothing() -> None:
    pass


def _head(method: str, place: LibsqlAddress, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [
        f"{method} {place.path}{path} HTTP/1.1",
        f"Host: {place.authority}",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _number(text: str, base: int) -> int:
    if not text.isascii() or not text.isalnum():
        raise HttpError(f"the server sent {text[:20]!r} for a length")
    try:
        return int(text, base)
    except ValueError:
        raise HttpError(f"the server sent {text[:20]!r} for a length") from None
