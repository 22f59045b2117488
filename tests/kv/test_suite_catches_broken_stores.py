"""The suite of key-value stores catches broken stores: each of these breaks one promise, and fails its case."""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import pytest

from perdure.kv import MemoryKeyValueStore
from perdure.kv.patterns import matches
from perdure.kv.protocol import KeyValueStore
from perdure.model.durations import Duration
from perdure.testing import keyvalue
from perdure.testing.keyvalue import KeyValueFactory

T = TypeVar("T")


class FoldsCase(MemoryKeyValueStore):
    async def get(self, key: str) -> str | None:
        return await super().get(key.lower())

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key.lower(), value, ttl)


class Trims(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key.rstrip(" ") or key, value, ttl)


class Globs(MemoryKeyValueStore):
    async def keys(self, pattern: str) -> list[str]:
        return [key for key in await super().keys("*") if fnmatch.fnmatchcase(key, pattern)]


class Likes(MemoryKeyValueStore):
    async def keys(self, pattern: str) -> list[str]:
        like = re.compile(re.escape(pattern).replace(r"\*", ".*").replace("_", ".").replace("%", ".*"), re.DOTALL)
        return [key for key in await super().keys("*") if like.fullmatch(key)]


class TakesEveryKey(MemoryKeyValueStore):
    async def get(self, key: str) -> str | None:
        return None if "\0" in str(key) else await super().get(key)


class FindsNothingForADict(MemoryKeyValueStore):
    async def get(self, key: str) -> str | None:
        return await super().get(key) if isinstance(key, str) else None


class CutsAtNul(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value.partition("\0")[0], ttl)


class LosesSurrogates(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value.encode("utf-8", "replace").decode(), ttl)


class TakesMore(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value[: 32 << 20], ttl)


class NeverExpires(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value, None if ttl and ttl == 1 else ttl)


class ListsExpired(MemoryKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.ever: set[str] = set()

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value, ttl)
        self.ever.add(key)

    async def delete(self, key: str) -> bool:
        self.ever.discard(key)
        return await super().delete(key)

    async def keys(self, pattern: str) -> list[str]:
        return [key for key in self.ever if matches(key, pattern)]


class KeepsTheOldTtl(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        before = self._texts.get(key)
        await super().set(key, value, ttl)
        if ttl is None and before is not None:
            self._texts[key] = before._replace(value=value)


class TakesZeroForNever(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value, ttl or None)


class TakesEveryTtl(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value, 1 if ttl == -1 else ttl)


class RefusesALongTtl(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        if isinstance(ttl, int) and ttl > 1 << 32:
            raise OverflowError
        await super().set(key, value, ttl)


class NeverSweeps(MemoryKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.rows: set[str] = set()

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        self.rows.add(key)
        await super().set(key, value, ttl)


class SweepsWhatWasRenewed(MemoryKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, int] = {}

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value, ttl)
        if ttl is not None:
            self.first.setdefault(key, self._texts[key].expires_at or 0)
        for name, expires_at in self.first.items():
            if expires_at <= self._clock.now() and name != key:
                self._texts.pop(name, None)


class DeletesTwice(MemoryKeyValueStore):
    async def delete(self, key: str) -> bool:
        was_there = await self.exists(key)
        await asyncio.sleep(0)
        await super().delete(key)
        return was_there


class Tears(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        await super().set(key, value[: len(value) // 2], ttl)
        await asyncio.sleep(0)
        await super().set(key, value, ttl)


class GoesOnAfterACancel(MemoryKeyValueStore):
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        async def later() -> None:
            for _ in range(4 if len(value) > 100 else 0):
                await asyncio.sleep(0)
            await super(GoesOnAfterACancel, self).set(key, value, ttl)

        await asyncio.shield(asyncio.ensure_future(later()))


class BelongsToALoop(MemoryKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("another loop")
        await super().set(key, value, ttl)


class InventsKeys(MemoryKeyValueStore):
    async def exists(self, key: str) -> bool:
        await super().exists(key)
        return True


class NeverDeletes(MemoryKeyValueStore):
    async def delete(self, key: str) -> bool:
        return await self.exists(key)


BROKEN: dict[type[MemoryKeyValueStore], str] = {
    InventsKeys: "what_was_never_set_is_missing_to_every_method",
    NeverDeletes: "text_is_kept_until_it_is_deleted",
    FoldsCase: "keys_are_told_apart_byte_by_byte",
    Trims: "keys_are_told_apart_byte_by_byte",
    Globs: "in_a_pattern_only_a_star_is_special",
    Likes: "in_a_pattern_only_a_star_is_special",
    TakesEveryKey: "a_key_that_not_every_place_can_hold_is_refused",
    CutsAtNul: "every_text_comes_back_as_it_was",
    LosesSurrogates: "every_text_comes_back_as_it_was",
    TakesMore: "a_large_text_is_kept_and_one_that_is_too_large_refused",
    ListsExpired: "an_expired_key_is_missing_to_every_method_at_once",
    NeverExpires: "an_expired_key_is_missing_to_every_method_at_once",
    TakesZeroForNever: "a_ttl_of_zero_is_over_at_once",
    KeepsTheOldTtl: "setting_replaces_the_ttl_and_without_one_clears_it",
    TakesEveryTtl: "a_ttl_that_is_no_length_of_time_is_refused",
    RefusesALongTtl: "a_ttl_that_ends_in_thousands_of_years_is_taken",
    NeverSweeps: "what_has_expired_is_removed_by_later_writes",
    SweepsWhatWasRenewed: "a_key_that_expired_and_was_set_again_stays",
    FindsNothingForADict: "a_key_or_pattern_that_is_no_text_is_refused",
    DeletesTwice: "one_of_many_deletes_finds_the_text",
    Tears: "a_reader_sees_whole_texts_while_they_are_replaced",
    GoesOnAfterACancel: "a_cancelled_set_does_not_overtake_a_later_one",
    BelongsToALoop: "event_loops_of_other_threads_may_use_the_same_handle",
}


class BrokenFactory(KeyValueFactory):
    is_shared: ClassVar[bool] = False

    def __init__(self, kind: type[MemoryKeyValueStore]) -> None:
        self.kv = kind()

    async def open(self) -> KeyValueStore:
        return self.kv

    async def count(self) -> int:
        return len(self.kv.rows if isinstance(self.kv, NeverSweeps) else self.kv._texts)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_store_is_caught(kind: type[MemoryKeyValueStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyvalue.world, "PATIENCE", 2.0)
    case = next(case for case in keyvalue.CASES if case.name == BROKEN[kind])
    with pytest.raises((AssertionError, RuntimeError, OverflowError)):
        asyncio.run(case.run(BrokenFactory(kind)))


def test_every_promise_for_one_process_is_broken_by_somebody() -> None:
    assert {case.name for case in keyvalue.CASES if not case.needs_sharing} == set(BROKEN.values())


class Plain:
    """A store whose methods are not async, over one whose methods are and never wait."""

    def __init__(self) -> None:
        self.inner = MemoryKeyValueStore()

    def get(self, key: str) -> str | None:
        return _now(self.inner.get(key))

    def set(self, key: str, value: str, ttl: int | None = None) -> None:
        _now(self.inner.set(key, value, ttl))

    def delete(self, key: str) -> bool:
        return _now(self.inner.delete(key))

    def exists(self, key: str) -> bool:
        return _now(self.inner.exists(key))

    def keys(self, pattern: str) -> list[str]:
        return _now(self.inner.keys(pattern))


class PlainFactory(KeyValueFactory):
    is_shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self.kv = Plain()

    async def open(self) -> KeyValueStore:
        return self.kv

    async def count(self) -> int:
        return len(self.kv.inner._texts)


def _now(answer: Coroutine[Any, Any, T]) -> T:
    try:
        answer.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("it waited")


test_plain_methods_will_do = keyvalue.key_value_tests(PlainFactory)


def test_no_case_can_be_left_out() -> None:
    class Skips(BrokenFactory):
        def __init__(self) -> None:
            super().__init__(MemoryKeyValueStore)

        async def open(self) -> KeyValueStore:
            pytest.skip("no time")

    run = keyvalue.key_value_tests(Skips)
    with pytest.raises(pytest.fail.Exception, match="cannot be left out"):
        run(keyvalue.CASES[0])
