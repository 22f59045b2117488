"""Names kept in pages, for a store that cannot list its keys, or only by looking at all of them, and that one process uses.

The names are in memory, sorted, and cut into pages of a bounded number, each kept as a document; the root says with which name
each page begins. A name costs the write of one page, whatever the number of names, and what comes while pages are being written
goes into the next write. A page that grew too long gives its second half to a new one: the new one is written, then the root that
knows it, then the old one without it. After a crash in between, a new page that no root knows is never read, and of an old page
only what comes before the next one counts. The reverse is done with a page that has no names left.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Final, NamedTuple

import msgspec

from perdure.backends.key_value.backend import Backend
from perdure.backends.key_value.names import nonce
from perdure.errors import PersistenceError

_LONGEST: Final = 64


class _Page(msgspec.Struct):
    """Where a page is kept, with which name it begins at the earliest, and its names."""

    key: str
    begins: str
    names: list[str] = []


class _Line(msgspec.Struct, array_like=True):
    key: str
    begins: str


class _Request(NamedTuple):
    name: str
    is_there: bool
    done: asyncio.Future[None]


_root_decoder: Final = msgspec.json.Decoder(list[_Line])
_page_decoder: Final = msgspec.json.Decoder(list[str])


class PagedNames:
    """A set of names under one folder. All of it runs on one event loop."""

    def __init__(self, backend: Backend, root: str) -> None:
        self._backend = backend
        self._root = root
        self._pages: list[_Page] = []
        self._waiting: deque[_Request] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None

    async def add(self, name: str) -> None:
        """Have this name."""
        await self._request(name, is_there=True)

    async def discard(self, name: str) -> None:
        """Have it no more."""
        await self._request(name, is_there=False)

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one, sorted."""
        names = await self.within(folder)
        return list(dict.fromkeys(name.removeprefix(folder).partition("/")[0] for name in names))

    async def within(self, folder: str) -> list[str]:
        """All names in this folder and those under it, sorted."""
        await self._loaded()
        first = max(0, self._page_of(folder))
        found: list[str] = []
        for page in self._pages[first:]:
            at = bisect_left(page.names, folder)
            end = at
            while end < len(page.names) and page.names[end].startswith(folder):
                end += 1
            found += page.names[at:end]
            if end < len(page.names):
                break
        return found

    async def _request(self, name: str, *, is_there: bool) -> None:
        await self._loaded()
        request = _Request(name, is_there, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())
        await request.done

    async def _loaded(self) -> None:
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.ensure_future(self._load())
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        found = await self._backend.read(f"{self._root}root")
        lines = [_Line("first", "")] if found is None else _read(_root_decoder, found.data, "the root of its index")
        contents = await asyncio.gather(*(self._backend.read(self._root + line.key) for line in lines))
        ends = [line.begins for line in lines[1:]] + [None]
        self._pages = [
            _Page(line.key, line.begins, _before([] if one is None else _read(_page_decoder, one.data, "its index"), end))
            for line, one, end in zip(lines, contents, ends, strict=True)
        ]

    async def _write_all(self) -> None:
        while self._waiting:
            requests = list(self._waiting)
            self._waiting.clear()
            try:
                await self._write(requests)
            except BaseException as error:  # noqa: BLE001 - those who asked hear of it
                self._loading = None  # what is in memory may not be what is kept
                for request in requests:
                    _settle(request.done, error)
            else:
                for request in requests:
                    _settle(request.done, None)

    async def _write(self, requests: list[_Request]) -> None:
        await self._loaded()
        changed: dict[str, _Page] = {}
        for name, is_there, _ in requests:
            page = self._pages[self._page_of(name)]
            if _changed(page.names, name, is_there=is_there):
                changed[page.key] = page
        for page in list(changed.values()):
            if len(page.names) > _LONGEST:
                await self._split(page)
        await asyncio.gather(*(self._put(page) for page in changed.values()))
        await self._drop([page for page in changed.values() if not page.names and page.begins])

    async def _drop(self, empty: list[_Page]) -> None:
        """Give up pages without names, so that there are never more than the names need."""
        if empty:
            self._pages = [page for page in self._pages if page not in empty]
            await self._put_root()
            await asyncio.gather(*(self._backend.remove(self._root + page.key) for page in empty))

    async def _split(self, page: _Page) -> None:
        """Let what is too long for this page begin new ones."""
        rest = page.names[_LONGEST // 2 :]
        parts = [rest[at : at + _LONGEST // 2] for at in range(0, len(rest), _LONGEST // 2)]
        new = [_Page(f"p-{nonce()}", part[0], part) for part in parts]
        await asyncio.gather(*(self._put(one) for one in new))
        at = self._pages.index(page) + 1
        page.names = page.names[: _LONGEST // 2]  # not before the others are there, as somebody may be listing them
        self._pages[at:at] = new
        await self._put_root()

    async def _put(self, page: _Page) -> None:
        await self._backend.write(self._root + page.key, msgspec.json.encode(page.names))

    async def _put_root(self) -> None:
        lines = [_Line(page.key, page.begins) for page in self._pages]
        await self._backend.write(f"{self._root}root", msgspec.json.encode(lines))

    def _page_of(self, name: str) -> int:
        return bisect_right(self._pages, name, key=lambda page: page.begins) - 1


def _changed(names: list[str], name: str, *, is_there: bool) -> bool:
    """Whether the sorted names became others by this."""
    at = bisect_left(names, name)
    was_there = at < len(names) and names[at] == name
    if is_there and not was_there:
        insort(names, name)
    elif was_there and not is_there:
        del names[at]
    return is_there != was_there


def _before(names: list[str], end: str | None) -> list[str]:
    return names if end is None else [name for name in names if name < end]


def _read(decoder: msgspec.json.Decoder[list[_Line]] | msgspec.json.Decoder[list[str]], data: bytes, what: str) -> list:  # type: ignore[type-arg]
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as reason:
        raise PersistenceError("the key-value store", f"{what} cannot be read back ({reason}); it was left untouched") from reason


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
