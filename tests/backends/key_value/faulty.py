"""Key-value stores that die, lose answers, count, or look away: over real ones, for tests."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

from obstore.exceptions import PreconditionError

# How long a broken store is waited for, in seconds.
PATIENCE = 30.0


class Died(Exception):
    """The process is gone, as far as the store can tell."""


class MortalDict:
    """A `KeyValueStore` over a dict. After so many writes it does nothing any more but raise."""

    def __init__(self, kept: dict[str, str] | None = None, *, writes: int | None = None) -> None:
        self.kept = {} if kept is None else kept
        self.left = writes
        self.writes = 0

    def get(self, key: str) -> str | None:
        self._live()
        return self.kept.get(key)

    def set(self, key: str, value: str, ttl: int | None = None) -> None:
        assert ttl is None
        self._write()
        self.kept[key] = value

    def delete(self, key: str) -> bool:
        self._write()
        return self.kept.pop(key, None) is not None

    def exists(self, key: str) -> bool:
        self._live()
        return key in self.kept

    def keys(self, pattern: str) -> list[str]:
        raise AssertionError(f"nobody may look through all keys, not even for {pattern!r}")

    def _live(self) -> None:
        if self.left is not None and self.left < 0:
            raise Died

    def _write(self) -> None:
        self.writes += 1
        if self.left is not None:
            self.left -= 1
        self._live()


class Bucket:
    """An object store that passes everything on to another."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def get_async(self, path: str) -> Any:
        return await self.store.get_async(path)

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        return await self.store.put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:
        await self.store.delete_async(path)

    async def list(self, prefix: str) -> AsyncIterator[Any]:
        async for page in self.store.list(prefix):
            yield page

    async def list_with_delimiter_async(self, prefix: str) -> Any:
        return await self.store.list_with_delimiter_async(prefix)


class MortalBucket(Bucket):
    """After so many writes it does nothing any more but raise."""

    def __init__(self, store: Any, *, writes: int | None = None) -> None:
        super().__init__(store)
        self.left = writes
        self.writes = 0

    async def get_async(self, path: str) -> Any:
        self._live()
        return await super().get_async(path)

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        self._write()
        return await super().put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:
        self._write()
        await super().delete_async(path)

    def _live(self) -> None:
        if self.left is not None and self.left < 0:
            raise Died

    def _write(self) -> None:
        self.writes += 1
        if self.left is not None:
            self.left -= 1
        self._live()


class CountingBucket(Bucket):
    """Notes what it is asked, as `get KEY`, `put KEY` and so on, and how many bytes it was given."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.asked: list[str] = []
        self.given = 0

    async def get_async(self, path: str) -> Any:
        self.asked.append(f"get {path}")
        return await super().get_async(path)

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        self.asked.append(f"put {path}")
        self.given += len(data)
        return await super().put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:
        self.asked.append(f"delete {path}")
        await super().delete_async(path)


class ForgetfulBucket(Bucket):
    """Loses every answer to a conditional write of a run's document, after it was made: by an error, or by being asked twice."""

    def __init__(self, store: Any, *, says: str) -> None:
        super().__init__(store)
        self.says = says
        self.lost = 0

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        answer = await super().put_async(path, data, **options)
        if "mode" not in options or "/r/" not in path:
            return answer
        self.lost += 1
        if self.says == "nothing":
            raise ConnectionError("the answer is lost")
        raise PreconditionError("a client that got no answer asked again, and its own write was in the way")


class WavingBucket(Bucket):
    """Takes conditional writes without minding the conditions, as some servers do."""

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        options.pop("mode", None)
        return await super().put_async(path, data, **options)


class Stop:
    """A place in somebody's way where he waits until he may go on. Only the first who comes by waits."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._may_go_on = threading.Event()

    async def wait_here(self) -> None:
        if not self._reached.is_set():
            self._reached.set()
            await asyncio.to_thread(self._may_go_on.wait, PATIENCE)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE)

    def go_on(self) -> None:
        self._may_go_on.set()


class StoppingBucket(Bucket):
    """Stops whoever is about to put something under a key with this in it, or to delete it."""

    def __init__(self, store: Any, *, putting: str = "", deleting: str = "") -> None:
        super().__init__(store)
        self.stop = Stop()
        self.putting = putting
        self.deleting = deleting

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        if self.putting and self.putting in path:
            await self.stop.wait_here()
        return await super().put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:
        if self.deleting and self.deleting in path:
            await self.stop.wait_here()
        await super().delete_async(path)


class SlowBucket(Bucket):
    """Takes its time, and not always the same, so that what goes on at once meets in many ways."""

    def __init__(self, store: Any, seed: int, *, turns: int = 6) -> None:
        """It waits for fewer than so many turns of the event loop each time."""
        super().__init__(store)
        self.random = random.Random(seed)
        self.turns = turns

    async def get_async(self, path: str) -> Any:
        await self._wait()
        return await super().get_async(path)

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        await self._wait()
        answer = await super().put_async(path, data, **options)
        await self._wait()
        return answer

    async def delete_async(self, path: str) -> None:
        await self._wait()
        await super().delete_async(path)

    async def _wait(self) -> None:
        for _ in range(self.random.randrange(self.turns)):
            await asyncio.sleep(0)
