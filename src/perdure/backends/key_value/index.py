"""The two ways to keep the names by which runs are found (see `NameIndex`).

`ListedNames` keeps each as an object of its own, for a store that lists its keys and that several processes use.

`PagedNames` is for a store that cannot list its keys, or only by looking at all of them, and that one process uses. The names are
in memory, sorted, and cut into pages of a bounded number, each kept as a document; the root has the first name of each page. A
name costs the write of one page, whatever the number of names, and names that arrive while pages are being written go into the
next write. A page that grew too long moves its second half to a new page: the new one is written, then the root that names it,
then the old one without it. After a crash in between, a new page that is not in the root is never read, and of an old page only
what sorts before the next one counts. A page that has no names left is removed in the reverse order.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from perdure.backends.key_value.backend import Backend
from perdure.backends.key_value.keys import new_nonce
from perdure.errors import PersistenceError

T = TypeVar("T")

# Some stores do not list empty objects.
_NOT_EMPTY: Final = b"-"
_LONGEST_PAGE: Final = 64


class ListedNames:
    """A set of names under one folder, each an object that the backend lists."""

    def __init__(self, backend: Backend, root: str) -> None:
        self._backend: Any = backend
        self._root = root

    async def add(self, name: str) -> None:
        """Add this name."""
        await self._backend.write(self._root + name, _NOT_EMPTY)

    async def discard(self, name: str) -> None:
        """Remove this name."""
        await self._backend.remove(self._root + name)

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one, sorted."""
        if hasattr(self._backend, "folders"):
            return sorted(await self._backend.folders(self._root + folder))
        names = await self.within(folder)
        return sorted({name.removeprefix(folder).partition("/")[0] for name in names})

    async def within(self, folder: str) -> list[str]:
        """All names in this folder and those under it, sorted."""
        return sorted(name.removeprefix(self._root) for name in await self._backend.names(self._root + folder))


class _Page(msgspec.Struct):
    """The key of a page, the name from which on names belong to it, and its names."""

    key: str
    begins: str
    names: list[str] = []


class _PageInRoot(msgspec.Struct, array_like=True):
    key: str
    begins: str


class _NameChange(NamedTuple):
    name: str
    is_there: bool
    done: asyncio.Future[None]


_root_decoder: Final = msgspec.json.Decoder(list[_PageInRoot])
_page_decoder: Final = msgspec.json.Decoder(list[str])


class PagedNames:
    """A set of names under one folder, kept in pages. All of it runs on one event loop."""

    def __init__(self, backend: Backend, root: str) -> None:
        self._backend = backend
        self._root = root
        self._pages: list[_Page] = []
        self._waiting: deque[_NameChange] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None

    async def add(self, name: str) -> None:
        """Add this name."""
        await self._change(name, is_there=True)

    async def discard(self, name: str) -> None:
        """Remove this name."""
        await self._change(name, is_there=False)

    async def folders(self, folder: str) -> list[str]:
        """The names of the folders right under this one, sorted."""
        names = await self.within(folder)
        return list(dict.fromkeys(name.removeprefix(folder).partition("/")[0] for name in names))

    async def within(self, folder: str) -> list[str]:
        """All names in this folder and those under it, sorted."""
        await self._ensure_loaded()
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

    async def _change(self, name: str, *, is_there: bool) -> None:
        await self._ensure_loaded()
        change = _NameChange(name, is_there, asyncio.get_running_loop().create_future())
        self._waiting.append(change)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())
        await change.done

    async def _ensure_loaded(self) -> None:
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.ensure_future(self._load())
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        found = await self._backend.read(f"{self._root}root")
        root = [_PageInRoot("first", "")] if found is None else _decode(_root_decoder, found.data, "the root of its index")
        contents = await asyncio.gather(*(self._backend.read(self._root + page.key) for page in root))
        ends = [page.begins for page in root[1:]] + [None]
        self._pages = [
            _Page(page.key, page.begins, _names_before(end, [] if one is None else _decode(_page_decoder, one.data, "its index")))
            for page, one, end in zip(root, contents, ends, strict=True)
        ]

    async def _write_all(self) -> None:
        while self._waiting:
            changes = list(self._waiting)
            self._waiting.clear()
            try:
                await self._write(changes)
            except BaseException as error:  # noqa: BLE001 - the callers get it
                self._loading = None  # what is in memory may not be what is stored
                for change in changes:
                    _resolve(change.done, error)
            else:
                for change in changes:
                    _resolve(change.done, None)

    async def _write(self, changes: list[_NameChange]) -> None:
        await self._ensure_loaded()
        changed: dict[str, _Page] = {}
        for name, is_there, _ in changes:
            page = self._pages[self._page_of(name)]
            if _change_names(page.names, name, is_there=is_there):
                changed[page.key] = page
        for page in list(changed.values()):
            if len(page.names) > _LONGEST_PAGE:
                await self._split(page)
        await asyncio.gather(*(self._put(page) for page in changed.values()))
        await self._drop([page for page in changed.values() if not page.names and page.begins])

    async def _drop(self, empty: list[_Page]) -> None:
        """Remove pages without names, so that there are never more than the names need."""
        if empty:
            self._pages = [page for page in self._pages if page not in empty]
            await self._put_root()
            await asyncio.gather(*(self._backend.remove(self._root + page.key) for page in empty))

    async def _split(self, page: _Page) -> None:
        """Move what is too long for this page to new ones."""
        rest = page.names[_LONGEST_PAGE // 2 :]
        parts = [rest[at : at + _LONGEST_PAGE // 2] for at in range(0, len(rest), _LONGEST_PAGE // 2)]
        new = [_Page(f"p-{new_nonce()}", part[0], part) for part in parts]
        await asyncio.gather(*(self._put(one) for one in new))
        at = self._pages.index(page) + 1
        page.names = page.names[: _LONGEST_PAGE // 2]  # not before the others are there, as `within` may run meanwhile
        self._pages[at:at] = new
        await self._put_root()

    async def _put(self, page: _Page) -> None:
        await self._backend.write(self._root + page.key, msgspec.json.encode(page.names))

    async def _put_root(self) -> None:
        root = [_PageInRoot(page.key, page.begins) for page in self._pages]
        await self._backend.write(f"{self._root}root", msgspec.json.encode(root))

    def _page_of(self, name: str) -> int:
        return bisect_right(self._pages, name, key=lambda page: page.begins) - 1


def _change_names(names: list[str], name: str, *, is_there: bool) -> bool:
    """Add or remove a name in the sorted names; whether that changed them."""
    at = bisect_left(names, name)
    was_there = at < len(names) and names[at] == name
    if is_there and not was_there:
        insort(names, name)
    elif was_there and not is_there:
        del names[at]
    return is_there != was_there


def _names_before(end: str | None, names: list[str]) -> list[str]:
    return names if end is None else [name for name in names if name < end]


def _decode(decoder: msgspec.json.Decoder[list[T]], data: bytes, what: str) -> list[T]:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as reason:
        raise PersistenceError("the key-value store", f"{what} cannot be read back ({reason}); it was left untouched") from reason


def _resolve(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
