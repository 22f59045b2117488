"""Names kept as empty objects, which the backend itself lists: for stores that several processes use."""

from __future__ import annotations

from typing import Any, Final

from perdure.backends.key_value.backend import Backend

# Some stores do not list what is empty.
_NOTHING: Final = b"-"


class ListedNames:
    """A set of names under one folder."""

    def __init__(self, backend: Backend, root: str) -> None:
        self._backend: Any = backend
        self._root = root

    async def add(self, name: str) -> None:
        """Have this name."""
        await self._backend.write(self._root + name, _NOTHING)

    async def discard(self, name: str) -> None:
        """Have it no more."""
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
