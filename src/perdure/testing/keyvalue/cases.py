"""The cases: promises in the form of functions, registered in the order in which they are written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from perdure.errors import PerdureError, ValueNotStorable
from perdure.kv.patterns import matches
from perdure.kv.protocol import KeyValueStore, maybe_await
from perdure.testing.keyvalue.world import KeyValueCase, KeyValueFactory, KeyValueWorld, open_handle
from perdure.testing.processes import call_in_processes, kill_this_process

T = TypeVar("T")

# Keys that some database or file system takes for another, for a pattern or for a path out of its directory.
KEYS: Final = (
    "Order-1", "order-1", "order-1 ", " order-1", "\u00f3rder-1", "o\u0301rder-1", "a%b_c*d?[e]", "a%b_c*d?[e]x", "axb_c*d?[e]",
    "x" * 500, "x" * 499 + "X", "x" * 2048, "x" * 2047 + "y", "\U0001f600", "../x", "../../x", "/x", "x/", ".", "..", "con",
    "NUL", "a\nb", "a\r\nb", "__proto__", "$ne", "$set", "a.b", "a", "A", "a:b", "a:b:c", "a%3Ab", "{a}b", "{", "}", "\\", "a\\",
    "a\\*", "'", "''", '"', "--", "; DROP TABLE x", "-", "_", "%", "*", "**", "?", "[", "]", "[a]", "[^a]", "a-z", "\x01", "\x7f",
    "\ud7ff", "\ue000", "\uffff", "\U0010ffff", "a\U0010ffff", "a\U0010ffffb", "b", "None", "0", "00", "-1", "1e3", "true",
)  # fmt: skip
PATTERNS: Final = (
    "*", "**", "a*", "A*", "*a", "*a*", "a*b", "a", "order-1", "order-1*", "o*1", "x*", "xx*y", "a%b_c**", "a%b_c*d?[e]", "a%*",
    "?*", "[*", "[a]*", "\\*", "a\\*", "*\\", "'*", "$*", "{*", "a:*", "*:*", "../*", ".*", "\U0010ffff*", "a\U0010ffff*",
    "\ud7ff*", "\n*", "*\n*", "", "nothing*", "*a*b*c*d*e*", "x" * 2048 + "*", "x" * 3000, "\0*", "\ud800*", "*" * 1500 + "a",
)  # fmt: skip
VALUES: Final = (
    "", " ", "text", "a\0b", "\0", "\r\n", "\n", "\ud800", "a\udfffb", "\ud83d\ude00", "\U0001f600", "\ufeffx", "e\u0301",
    "\u00e9", "'; DROP TABLE x; --", "$value", "$$NOW", "\\x00", "\\", '{"a": [1, null]}', "null", "0", "1e16", "NaN", "true",
    "x" * 100_000,
)  # fmt: skip


CASES: Final[list[KeyValueCase]] = []


Check: TypeAlias = Callable[[KeyValueWorld], Awaitable[None]]


def _promise(check: Check, *, needs_sharing: bool = False) -> Check:
    CASES.append(KeyValueCase(str(getattr(check, "__name__", "")), check, needs_sharing))
    return check


_shared_promise: Final = partial(_promise, needs_sharing=True)


@_promise
async def what_was_never_set_is_missing_to_every_method(world: KeyValueWorld) -> None:
    assert await world.seen("a") == (None, False, [])
    assert await maybe_await(world.kv.delete("a")) is False
    assert await maybe_await(world.kv.keys("*")) == []


@_promise
async def text_is_kept_until_it_is_deleted(world: KeyValueWorld) -> None:
    kv = world.kv
    await maybe_await(kv.set("a", "1"))
    await maybe_await(kv.set("b", "other"))
    await maybe_await(kv.set("a", "2"))
    assert await world.seen("a") == ("2", True, ["a"])
    assert await maybe_await(kv.delete("a")) is True
    assert await maybe_await(kv.delete("a")) is False
    assert await world.seen("a") == (None, False, [])
    assert await world.seen("b") == ("other", True, ["b"])


@_promise
async def keys_are_told_apart_byte_by_byte(world: KeyValueWorld) -> None:
    for n, key in enumerate(KEYS):
        await maybe_await(world.kv.set(key, f"{n}"))
    assert [await maybe_await(world.kv.get(key)) for key in KEYS] == [f"{n}" for n in range(len(KEYS))]
    assert sorted(await maybe_await(world.kv.keys("*"))) == sorted(KEYS)
    for key in KEYS[::2]:
        assert await maybe_await(world.kv.delete(key)) is True
    assert [await maybe_await(world.kv.exists(key)) for key in KEYS] == [bool(n % 2) for n in range(len(KEYS))]
    assert await world.factory.count() == len(KEYS) // 2


@_promise
async def in_a_pattern_only_a_star_is_special(world: KeyValueWorld) -> None:
    for key in KEYS:
        await maybe_await(world.kv.set(key, ""))
    for pattern in PATTERNS:
        found = await maybe_await(world.kv.keys(pattern))
        assert sorted(found) == sorted(key for key in KEYS if matches(key, pattern)), f"for pattern {pattern[:80]!r}"


@_promise
async def a_key_that_not_every_place_can_hold_is_refused(world: KeyValueWorld) -> None:
    for key in ("", "a\0b", "\ud800", "x" * 2049, "\u00f3" * 1025):
        for ask in (world.kv.get, partial(world.kv.set, value="1"), world.kv.delete, world.kv.exists):
            with _refused(f"{key!r} as a key"):
                await maybe_await(ask(key))
    assert await world.factory.count() == 0


@_promise
async def a_key_or_pattern_that_is_no_text_is_refused(world: KeyValueWorld) -> None:
    kv = world.kv
    await maybe_await(kv.set("a", "1"))
    wrong: tuple[Any, ...] = ({"$gt": ""}, ["a"], ("a",), b"a", 1, None)
    asks: tuple[Callable[[Any], Any], ...] = (kv.get, partial(kv.set, value="2"), kv.delete, kv.exists, kv.keys)
    for key in wrong:
        for ask in asks:
            with _refused(f"{key!r} as a key or pattern", TypeError):
                await maybe_await(ask(key))
    assert await world.seen("a") == ("1", True, ["a"])


@_promise
async def every_text_comes_back_as_it_was(world: KeyValueWorld) -> None:
    for n, value in enumerate(VALUES):
        await maybe_await(world.kv.set(f"{n}", value))
        await maybe_await(world.kv.set(f"{n} for an hour", value, 3600))
    assert [await maybe_await(world.kv.get(f"{n}")) for n in range(len(VALUES))] == list(VALUES)
    assert [await maybe_await(world.kv.get(f"{n} for an hour")) for n in range(len(VALUES))] == list(VALUES)
    with _refused("bytes as a value"):
        await maybe_await(world.kv.set("bytes", b"1"))  # type: ignore[arg-type]  # on purpose
    assert await maybe_await(world.kv.exists("bytes")) is False


@_promise
async def a_large_text_is_kept_and_one_that_is_too_large_refused(world: KeyValueWorld) -> None:
    most = world.factory.most_bytes
    await maybe_await(world.kv.set("k" * 2048, "\u00f3" * (most // 2)))
    assert await maybe_await(world.kv.get("k" * 2048)) == "\u00f3" * (most // 2)
    with _refused("a text that is too large", ValueNotStorable):
        await maybe_await(world.kv.set("k" * 2048, "\u00f3" * (most // 2) + "xx"))
    assert await maybe_await(world.kv.get("k" * 2048)) == "\u00f3" * (most // 2)


@_promise
async def an_expired_key_is_missing_to_every_method_at_once(world: KeyValueWorld) -> None:
    kv = world.kv
    for key in ("a", "b"):
        await maybe_await(kv.set(key, "1", 1))
    await maybe_await(kv.set("later", "1", 3600))
    await world.expired("b")
    assert await world.seen("a") == (None, False, [])
    assert await maybe_await(kv.delete("a")) is False
    assert await world.seen("later") == ("1", True, ["later"])
    assert await maybe_await(kv.delete("later")) is True


@_promise
async def a_ttl_of_zero_is_over_at_once(world: KeyValueWorld) -> None:
    await maybe_await(world.kv.set("a", "1"))
    await maybe_await(world.kv.set("a", "2", 0))
    assert await world.seen("a") == (None, False, [])
    assert await maybe_await(world.kv.delete("a")) is False


@_promise
async def setting_replaces_the_ttl_and_without_one_clears_it(world: KeyValueWorld) -> None:
    for key in ("a", "b", "witness"):
        await maybe_await(world.kv.set(key, "1", 1))
    await maybe_await(world.kv.set("a", "2"))
    await maybe_await(world.kv.set("b", "2", 3600))
    await maybe_await(world.kv.set("c", "1", 3600))
    await maybe_await(world.kv.set("c", "2", 1))
    await world.expired("witness")
    await world.expired("c")
    assert [await maybe_await(world.kv.get(key)) for key in "abc"] == ["2", "2", None]


@_promise
async def a_ttl_that_is_no_length_of_time_is_refused(world: KeyValueWorld) -> None:
    await maybe_await(world.kv.set("a", "1"))
    wrong: tuple[Any, ...] = (-1, float("nan"), float("inf"), "soon", True)
    for ttl in wrong:
        with _refused(f"{ttl!r} as a ttl"):
            await maybe_await(world.kv.set("a", "2", ttl))
    assert await maybe_await(world.kv.get("a")) == "1"


@_promise
async def a_ttl_that_ends_in_thousands_of_years_is_taken(world: KeyValueWorld) -> None:
    await maybe_await(world.kv.set("a", "1", 8000 * 365 * 86_400))
    assert await world.seen("a") == ("1", True, ["a"])


@_promise
async def what_has_expired_is_removed_by_later_writes(world: KeyValueWorld) -> None:
    for n in range(150):
        await maybe_await(world.kv.set(f"{n}", "x", 1))
    await maybe_await(world.kv.set("later", "1", 3600))
    await world.expired("149")
    await world.swept(left=2)
    assert sorted(await maybe_await(world.kv.keys("*"))) == ["later", "writer"]


@_promise
async def a_key_that_expired_and_was_set_again_stays(world: KeyValueWorld) -> None:
    for key in ("good", "longer", *(f"gone {n}" for n in range(5))):
        await maybe_await(world.kv.set(key, "1", 1))
    await world.expired("gone 4")
    await maybe_await(world.kv.set("good", "2"))
    await maybe_await(world.kv.set("longer", "2", 3600))
    await world.swept(left=3)
    assert [await maybe_await(world.kv.get(key)) for key in ("good", "longer")] == ["2", "2"]


@_promise
async def one_of_many_deletes_finds_the_text(world: KeyValueWorld) -> None:
    await maybe_await(world.kv.set("a", "1"))
    answers = await asyncio.gather(*(maybe_await(world.kv.delete("a")) for _ in range(20)))
    assert sorted(answers) == [False] * 19 + [True]


@_promise
async def a_reader_sees_whole_texts_while_they_are_replaced(world: KeyValueWorld) -> None:
    texts = [chr(ord("a") + n) * 50_000 for n in range(8)]
    await maybe_await(world.kv.set("a", texts[0]))

    async def write(text: str) -> None:
        for _ in range(5):
            await maybe_await(world.kv.set("a", text))
            await asyncio.sleep(0)

    async def read() -> None:
        for _ in range(10):
            assert await maybe_await(world.kv.get("a")) in texts
            await asyncio.sleep(0)

    await asyncio.gather(*(read() for _ in range(4)), *(write(text) for text in texts))
    assert await maybe_await(world.kv.get("a")) in texts


@_promise
async def a_cancelled_set_does_not_overtake_a_later_one(world: KeyValueWorld) -> None:
    async def set_old(n: int) -> None:
        await maybe_await(world.kv.set("a", f"old {n}" * 1000))

    for n in range(10):
        setting = asyncio.ensure_future(set_old(n))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        setting.cancel()
        with suppress(asyncio.CancelledError):
            await setting
        await maybe_await(world.kv.set("a", f"new {n}"))
        for _ in range(5):  # time for the old one, if it is still in progress
            await maybe_await(world.kv.set("b", ""))
            await asyncio.sleep(0)
        assert await maybe_await(world.kv.get("a")) == f"new {n}"


@_promise
async def event_loops_of_other_threads_may_use_the_same_handle(world: KeyValueWorld) -> None:
    def work(name: str) -> str | None:
        async def work() -> str | None:
            await asyncio.gather(*(maybe_await(world.kv.set(f"{name}-{n}", name)) for n in range(10)))
            return await maybe_await(world.kv.get(f"{name}-9"))

        return asyncio.run(work())

    names = ["one", "two", "three"]
    assert await asyncio.gather(*(asyncio.to_thread(work, name) for name in names)) == names
    assert await asyncio.gather(*(asyncio.to_thread(work, name) for name in names)) == names
    assert len(await maybe_await(world.kv.keys("*-*"))) == 30


@_shared_promise
async def what_one_handle_set_another_has(world: KeyValueWorld) -> None:
    async with open_handle(world.factory) as other:
        await maybe_await(world.kv.set("a", "1"))
        assert await maybe_await(other.get("a")) == "1"
        await maybe_await(other.set("a", "2", 3600))
        assert await world.seen("a") == ("2", True, ["a"])
    async with open_handle(world.factory) as later:
        assert await maybe_await(later.get("a")) == "2"
        assert await maybe_await(later.delete("a")) is True
    assert await maybe_await(world.kv.get("a")) is None


@_shared_promise
async def processes_may_begin_and_work_at_once(world: KeyValueWorld) -> None:
    counts = await _in_processes(world.factory, *(partial(_write_many, name=name) for name in ("one", "two", "three")))
    assert counts == [20, 20, 20]
    kv = world.kv
    assert len(await maybe_await(kv.keys("own-*"))) == 60
    shared = await maybe_await(kv.get("shared"))
    assert shared is not None
    assert shared in {name * 10_000 for name in ("one", "two", "three")}
    assert sum(await _in_processes(world.factory, *[_delete_many] * 3)) == 60
    assert await maybe_await(kv.keys("own-*")) == []


@_shared_promise
async def what_a_killed_process_was_told_is_set_is_there(world: KeyValueWorld) -> None:
    with suppress(BrokenProcessPool):
        await _in_processes(world.factory, _set_and_die)
    assert await maybe_await(world.kv.get("a")) == "acknowledged"


@_shared_promise
async def processes_agree_on_what_has_expired(world: KeyValueWorld) -> None:
    await maybe_await(world.kv.set("a", "1", 1))
    await maybe_await(world.kv.set("b", "1", 3600))
    await world.expired("a")
    assert await _in_processes(world.factory, *[_both] * 2) == [(None, "1")] * 2


async def _write_many(kv: KeyValueStore, name: str) -> int:
    for n in range(20):
        await maybe_await(kv.set(f"own-{name}-{n}", name))
        await maybe_await(kv.set("shared", name * 10_000))
        await maybe_await(kv.set(f"short-{n}", name, 0 if n % 2 else 1))
    return len(await maybe_await(kv.keys(f"own-{name}-*")))


async def _delete_many(kv: KeyValueStore) -> int:
    return sum([await maybe_await(kv.delete(key)) for key in await maybe_await(kv.keys("own-*"))])


async def _set_and_die(kv: KeyValueStore) -> None:
    await maybe_await(kv.set("a", "acknowledged"))
    kill_this_process()


async def _both(kv: KeyValueStore) -> tuple[str | None, str | None]:
    return await maybe_await(kv.get("a")), await maybe_await(kv.get("b"))


def _work(factory: KeyValueFactory, job: Callable[[KeyValueStore], Awaitable[T]]) -> T:
    async def work() -> T:
        async with open_handle(factory) as kv:
            return await job(kv)

    return asyncio.run(work())


async def _in_processes(factory: KeyValueFactory, *jobs: Callable[[KeyValueStore], Awaitable[T]]) -> list[T]:
    """What each job returns, in a process of its own and all at once."""
    return await call_in_processes(*(partial(_work, factory, job) for job in jobs))


class _refused:  # noqa: N801 - reads like a function
    """Expects that the block is refused: by a PerdureError, a ValueError or a TypeError, unless a class is given."""

    def __init__(self, what: str, *errors: type[Exception]) -> None:
        self._what = what
        self._errors = errors or (PerdureError, ValueError, TypeError)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        assert kind is not None, f"{self._what} was not refused"
        return issubclass(kind, self._errors)
