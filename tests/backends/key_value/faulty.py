"""Key-value stores with faults, over real ones: they die, lose replies, are slow, ignore conditions, or only count requests."""

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
    """As if the process had died."""


class MortalDict:
    """A `KeyValueStore` over a dict. After `writes` writes every call raises `Died`."""

    def __init__(self, values: dict[str, str] | None = None, *, writes: int | None = None) -> None:
        self.values = {} if values is None else values
        self.left = writes
        self.writes = 0

    def get(self, key: str) -> str | None:
        self._live()
        return self.values.get(key)

    def set(self, key: str, value: str, ttl: int | None = None) -> None:
        assert ttl is None
        self._write()
        self.values[key] = value

    def delete(self, key: str) -> bool:
        self._write()
        return self.values.pop(key, None) is not None

    def exists(self, key: str) -> bool:
        self._live()
        return key in self.values

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
    """After `writes` writes every call raises `Died`."""

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
    """Lists its requests, as `get KEY`, `put KEY` and so on, and counts the bytes that were put."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.requests: list[str] = []
        self.bytes_put = 0

    async def get_async(self, path: str) -> Any:
        self.requests.append(f"get {path}")
        return await super().get_async(path)

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        self.requests.append(f"put {path}")
        self.bytes_put += len(data)
        return await super().put_async(path, data, **options)

    async def delete_async(self, path: str) -> None:
        self.requests.append(f"delete {path}")
        await super().delete_async(path)


class ForgetfulBucket(Bucket):
    """Loses the reply to every conditional write of a run's document: the caller gets an error, or its retry fails."""

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
    """Does conditional writes without checking the conditions, as some servers do."""

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        options.pop("mode", None)
        return await super().put_async(path, data, **options)


class Stop:
    """A point at which the first caller waits until `go_on`. Later callers pass."""

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
    """The first put to a key that contains `putting`, or delete of one that contains `deleting`, waits at `stop`."""

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
    """Waits for a random number of turns of the event loop before and after each request, so that calls interleave."""

    def __init__(self, store: Any, seed: int, *, turns: int = 6) -> None:
        """Each wait has fewer than `turns` turns."""
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
