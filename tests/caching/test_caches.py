from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import unicodedata
import weakref
from collections import UserDict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.caches import FileCache, MemoryCache, StepCache, _temporary_for, as_cache
from perdure.engine import step_cache as caching
from perdure.engine.step_cache import Cached, StepCaching
from perdure.errors import PerdureWarning, PersistenceError
from perdure.kv.protocol import KeyValueStore, maybe_await
from perdure.state import MemoryKeyValueStore
from perdure.testing import ManualClock
from tests.campaign import times
from tests.patience import PATIENCE, turns

T = TypeVar("T")

VALUE: Final = Cached(True, msgspec.Raw(b'{"a":[1,"\xc3\xa9"]}'), b"\x00\xff", None)


class PlainCache:
    """A cache with plain methods that notes how it was called."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.calls: list[tuple[Any, ...]] = []

    def get(self, key: str) -> str | None:
        return self.kept.get(key)

    def set(self, *args: Any) -> None:
        self.calls.append(args)
        self.kept[args[0]] = args[1]

    def delete(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None


def run(doing: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own, so that the rest of a test may look at the disk."""
    return asyncio.run(doing)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def only_file(directory: Path) -> Path:
    (file,) = files(directory)
    return file


@pytest.fixture(params=["memory", "file", "dict", "key-value store", "plain"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> StepCache:
    made: dict[str, Callable[[], Any]] = {
        "memory": MemoryCache,
        "file": lambda: FileCache(tmp_path),
        "dict": dict,
        "key-value store": MemoryKeyValueStore,
        "plain": PlainCache,
    }
    return as_cache(made[request.param]())


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., MemoryCache | FileCache]:
    def made(**options: Any) -> MemoryCache | FileCache:
        return MemoryCache(**options) if request.param == "memory" else FileCache(tmp_path, **options)

    return made


async def test_text_is_kept_until_it_is_deleted(cache: StepCache) -> None:
    assert await maybe_await(cache.get("a")) is None
    assert await maybe_await(cache.delete("a")) is False
    for value in ("1", "2"):
        await maybe_await(cache.set("a", value))
    await maybe_await(cache.set("b", "3"))
    assert await maybe_await(cache.get("a")) == "2"
    assert await maybe_await(cache.delete("a")) is True
    assert await maybe_await(cache.get("a")) is None
    assert await maybe_await(cache.get("b")) == "3"


@pytest.mark.parametrize("key", [{"$gt": ""}, ["a"], b"a", 7, None])
async def test_a_key_that_is_no_text_is_refused(make: Callable[..., MemoryCache | FileCache], key: Any) -> None:
    cache = make()
    for call in (cache.get, cache.delete, lambda wrong: cache.set(wrong, "1")):
        with pytest.raises(TypeError, match="the key of a cached value must be a str"):
            await call(key)


def test_every_key_value_store_is_a_step_cache() -> None:
    def checked(store: KeyValueStore) -> StepCache:
        return store  # for the type checker

    store = MemoryKeyValueStore()
    assert as_cache(checked(store)) is store


async def test_an_expired_value_is_missing(make: Callable[..., MemoryCache | FileCache]) -> None:
    clock = ManualClock()
    cache = make(ttl="10s", clock=clock)
    for key in "ab":
        await cache.set(key, "1")
    clock.advance(9.999999)
    assert await cache.get("a") == "1"
    clock.advance(0.000001)
    assert await cache.get("a") is None
    assert await cache.delete("b") is False


async def test_the_ttl_of_a_value_wins_over_that_of_the_cache(make: Callable[..., MemoryCache | FileCache]) -> None:
    clock = ManualClock()
    cache = make(ttl=10, clock=clock)
    for key, ttl in (("short", 5), ("long", 20), ("default", None), ("renewed", 5), ("shortened", 20)):
        await cache.set(key, "1", ttl)
    await cache.set("renewed", "2")
    await cache.set("shortened", "2", ttl=5)

    async def found() -> list[str]:
        return [key for key in ("short", "long", "default", "renewed", "shortened") if await cache.get(key) is not None]

    clock.advance(5)
    assert await found() == ["long", "default", "renewed"]
    clock.advance(5)
    assert await found() == ["long"]
    clock.advance(10)
    assert await found() == []


@pytest.mark.parametrize(("ttl", "error"), [(0, ValueError), (-1, ValueError), ("soon", ValueError), (True, TypeError)])
async def test_a_ttl_that_is_no_length_of_time_is_refused(
    make: Callable[..., MemoryCache | FileCache], ttl: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="ttl"):
        make(ttl=ttl)
    cache = make()
    with pytest.raises(error, match="ttl"):
        await cache.set("a", "1", ttl)
    assert await cache.get("a") is None


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="max_size must be 1 or more"):
        MemoryCache(size)


@pytest.mark.parametrize("size", [1.0, "1", True])
def test_a_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="max_size must be a whole number"):
        MemoryCache(size)


class ModelOfLru:
    """What a `MemoryCache` does, the slow way: (key, value, expires_at), the least recently used first."""

    def __init__(self, max_size: int | None) -> None:
        self.max_size = max_size
        self.kept: list[tuple[str, str, int | None]] = []

    def forget_expired(self, now: int) -> None:
        self.kept = [each for each in self.kept if each[2] is None or each[2] > now]

    def get(self, key: str) -> str | None:
        for each in self.kept:
            if each[0] == key:
                self.kept.remove(each)
                self.kept.append(each)
                return each[1]
        return None

    def set(self, key: str, value: str, expires_at: int | None) -> None:
        self.delete(key)
        self.kept.append((key, value, expires_at))
        if self.max_size is not None:
            self.kept = self.kept[-self.max_size :]

    def delete(self, key: str) -> bool:
        before = len(self.kept)
        self.kept = [each for each in self.kept if each[0] != key]
        return len(self.kept) < before


async def test_reading_and_writing_both_count_as_use() -> None:
    cache = MemoryCache(3)
    for key in "abc":
        await cache.set(key, "1")
    await cache.get("a")
    await cache.set("b", "2")
    await cache.set("d", "1")
    assert [await cache.get(key) for key in "abcd"] == ["1", "2", None, "1"]


async def test_no_live_value_is_forgotten_while_an_expired_one_takes_its_place() -> None:
    clock = ManualClock()
    cache = MemoryCache(2, clock=clock)
    await cache.set("live", "1")
    await cache.set("expired", "1", 5)
    clock.advance(5)
    await cache.set("new", "1")
    assert [await cache.get(key) for key in ("live", "new")] == ["1", "1"]


KEYS: Final = st.sampled_from("abcde")
ACTIONS: Final = st.one_of(
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("set"), KEYS, st.sampled_from([None, 1, 2, 5])),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("advance"), st.sampled_from([1, 3])),
    st.tuples(st.just("look")),
)


@given(st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, 2]), st.lists(ACTIONS, min_size=20, max_size=60))
async def test_the_least_recently_used_is_forgotten_first_and_the_expired_before_it(
    max_size: int | None, ttl: int | None, actions: list[tuple[Any, ...]]
) -> None:
    clock, values = ManualClock(), itertools.count()
    cache, model = MemoryCache(max_size, ttl, clock=clock), ModelOfLru(max_size)
    for action, *args in actions:
        model.forget_expired(clock.now())
        match action, args:
            case "get", [key]:
                assert await cache.get(key) == model.get(key)
            case "set", [key, own_ttl]:
                length = ttl if own_ttl is None else own_ttl
                value = str(next(values))
                model.set(key, value, None if length is None else clock.now() + length * 1_000_000)
                await cache.set(key, value, own_ttl)
            case "delete", [key]:
                assert await cache.delete(key) == model.delete(key)
            case "advance", [length]:
                clock.advance(length)
            case "look", []:
                assert len(cache) == len(model.kept)
                assert list(cache._values) == [key for key, _, _ in model.kept]
    model.forget_expired(clock.now())
    assert [await cache.get(key) for key in "abcde"] == [model.get(key) for key in "abcde"]


async def test_a_cleared_cache_is_empty_and_takes_values_again() -> None:
    clock = ManualClock()
    cache = MemoryCache(clock=clock)
    await cache.set("a", "1", 5)
    await cache.clear()
    assert (len(cache), await cache.get("a")) == (0, None)
    await cache.set("a", "2")
    clock.advance(5)
    assert (len(cache), await cache.get("a")) == (1, "2")


async def test_values_that_are_replaced_deleted_or_expired_cost_no_memory() -> None:
    clock = ManualClock()
    cache = MemoryCache(clock=clock)
    for n in range(1000):
        await cache.set("replaced", "", 3600)
        await cache.set(f"deleted {n}", "", 3600)
        await cache.delete(f"deleted {n}")
        await cache.set(f"expired {n}", "", 1)
        clock.advance(1)
    assert len(cache) == len(cache._values) == 1
    assert len(cache._expiring) <= 6


def test_loops_of_several_threads_may_share_a_memory_cache() -> None:
    cache = MemoryCache(2, ttl=1e-5)
    begin = threading.Barrier(4)

    async def use(seed: int) -> None:
        rng = random.Random(seed)
        begin.wait()
        for _ in range(3000):
            key = rng.choice("abcd")
            await cache.set(key, key)
            await cache.get(rng.choice("abcd"))
            await cache.delete(rng.choice("abcd"))
            assert len(cache) <= 2

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(_step_by_step, use(seed)) for seed in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)


def _step_by_step(doing: Coroutine[Any, Any, None]) -> None:
    """Without a loop: nothing in here waits, and a loop would take the guard for the barrier."""
    with pytest.raises(StopIteration):
        doing.send(None)


ANY_TEXT: Final = st.text(st.characters(exclude_categories=()), max_size=30)
COMPOSED: Final = unicodedata.normalize("NFC", "\u00e9")
ODD_KEYS: Final = [
    *("", ".", "..", "/", "../../etc/passwd", "a/b", "a\\b", "\0", "a\0", "a", "A", "CON", "*", " ", "a" * 100_000),
    *(COMPOSED, unicodedata.normalize("NFD", COMPOSED), "\ud83d\ude00", "\U0001f600", "\udcff", "\ud83d\ude00"[:1]),
]


@given(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=8))
@example({key: f"{n}" for n, key in enumerate(ODD_KEYS)})
def test_any_text_is_a_key_and_a_value_and_no_two_are_taken_for_each_other(kept: dict[str, str]) -> None:
    async def kept_and_found(cache: FileCache) -> dict[str, str | None]:
        for key, value in kept.items():
            await cache.set(key, value)
        return {key: await cache.get(key) for key in kept}

    with tempfile.TemporaryDirectory() as directory:
        inner = Path(directory, "cache")
        assert run(kept_and_found(FileCache(inner))) == kept
        assert files(Path(directory)) == ([inner] if kept else [])
        assert len(files(inner)) == len(kept) if kept else True


def test_values_are_there_for_the_next_process(tmp_path: Path) -> None:
    run(FileCache(tmp_path).set("a", "1"))
    program = (
        "import asyncio, sys; from perdure.caches import FileCache; print(asyncio.run(FileCache(sys.argv[1]).get('a')), end='')"
    )
    shown = subprocess.run([sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True).stdout
    assert shown == "1"


def test_the_directory_is_made_when_a_value_is_and_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "cache"
    cache = FileCache(str(directory))
    assert (run(cache.get("a")), run(cache.delete("a")), run(cache.clear())) == (None, False, None)
    assert files(tmp_path) == []
    run(cache.set("a", "1"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(directory).stat().st_mode) == 0o600


def test_a_directory_that_exists_keeps_its_mode_and_one_that_goes_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    cache = FileCache(directory)
    run(cache.set("a", "1"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    only_file(directory).unlink()
    directory.rmdir()
    run(cache.set("a", "2"))
    assert run(cache.get("a")) == "2"


@pytest.mark.parametrize(("directory", "error"), [("", ValueError), (1, TypeError), (b"x", TypeError), (None, TypeError)])
def test_a_directory_that_is_no_path_is_refused(directory: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        FileCache(directory)


def test_a_directory_that_is_a_file_is_an_error_rather_than_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = FileCache(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        run(cache.get("a"))
    with pytest.raises(OSError, match="file"):
        run(cache.set("a", "1"))


WRITTEN: Final = {"version": 1, "key": "a", "expires_at": None, "value": "1"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 100_000,
        b"9" * 10_000,
        *(
            json.dumps(WRITTEN | change).encode()
            for change in ({"version": 2}, {"key": "b"}, {"key": None}, {"expires_at": "1"}, {"value": 1}, {"more": 1})
        ),
        *(json.dumps({name: WRITTEN[name] for name in WRITTEN if name != missing}).encode() for missing in WRITTEN),
    ],
)
def test_a_file_that_is_not_ours_is_a_miss_with_one_warning_until_it_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = FileCache(tmp_path)
    run(cache.set("a", "1"))
    file = only_file(tmp_path)
    file.write_bytes(json.dumps(WRITTEN).encode())
    assert run(cache.get("a")) == "1"
    file.write_bytes(content)
    with pytest.warns(PerdureWarning) as told:
        assert run(cache.get("a")) is None
    assert [str(file) in str(each.message) for each in told] == [True]
    assert file.read_bytes() == content
    run(cache.set("a", "2"))
    assert run(cache.get("a")) == "2"


def test_a_torn_file_is_a_miss_wherever_it_ends(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    run(cache.set("a", '{"x":"\u00e9"}', 60))
    file = only_file(tmp_path)
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.warns(PerdureWarning, match=file.name):
            assert run(cache.get("a")) is None


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), IsADirectoryError(21, "Is a directory")])
def test_a_file_that_may_not_be_read_is_a_miss_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(self: Path) -> bytes:
        raise error

    cache = FileCache(tmp_path)
    run(cache.set("a", "1"))
    monkeypatch.setattr(Path, "read_bytes", refuse)  # the superuser may read everything, so a mode would not do
    with pytest.warns(PerdureWarning, match=only_file(tmp_path).name):
        assert run(cache.get("a")) is None


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Input/output error"):
        run(FileCache(tmp_path).get("a"))


def test_deleting_a_file_that_cannot_be_read_deletes_it(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    run(cache.set("a", "1"))
    only_file(tmp_path).write_bytes(b"?")
    assert run(cache.delete("a")) is False
    assert files(tmp_path) == []


@pytest.mark.parametrize("method", ["get", "delete"])
def test_an_expired_file_is_removed_when_it_is_met(tmp_path: Path, method: str) -> None:
    clock = ManualClock()
    cache = FileCache(tmp_path, clock=clock)
    run(cache.set("a", "1", 5))
    clock.advance(5)
    assert run(getattr(cache, method)("a")) in {None, False}
    assert files(tmp_path) == []


def test_later_writes_remove_expired_files_that_nobody_asks_for(tmp_path: Path) -> None:
    clock = ManualClock()
    cache = FileCache(tmp_path, clock=clock)
    for n in range(120):
        run(cache.set(f"{n}", "1", 5))
    run(cache.set("kept", "1"))
    run(cache.set("later", "1", 3600))
    run(cache.set("renewed", "1", 5))
    run(cache.set("renewed", "2", 3600))
    foreign = tmp_path / "notes.json"
    foreign.write_text('{"version": 1, "expires_at": 1, "key": "a", "value": "b"}')
    torn = tmp_path / f"perdure-{'0' * 64}.json"
    torn.write_bytes(b'{"version": 1, "expi')
    clock.advance(60)
    for left in (80, 30, 7):
        run(cache.set("writer", "1"))
        assert len(files(tmp_path)) <= left
    assert set(files(tmp_path)) >= {foreign, torn}
    assert [run(cache.get(key)) for key in ("kept", "later", "renewed", "writer", "7")] == ["1", "1", "2", "1", None]


def test_another_process_removes_expired_files_too_and_reads_no_value_for_that(tmp_path: Path) -> None:
    clock = ManualClock()
    run(FileCache(tmp_path, clock=clock).set("a", "1" * 1_000_000, 5))
    long = only_file(tmp_path)
    clock.advance(5)
    run(FileCache(tmp_path, clock=clock).set("b", "2"))
    assert not long.exists()
    assert len(files(tmp_path)) == 1


class MeddlingClock(ManualClock):
    """A clock that lets another process come in between, the next time it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.meddle: Iterator[Callable[[], None]] = iter(())

    def now(self) -> int:
        at = super().now()
        next(self.meddle, lambda: None)()
        return at


@pytest.mark.parametrize("looks", [0, 1])
def test_a_value_renewed_while_the_expired_one_is_removed_stays(tmp_path: Path, looks: int) -> None:
    clock = MeddlingClock()
    cache = FileCache(tmp_path, clock=clock)
    run(cache.set("a", "old", 5))
    clock.advance(5)
    clock.meddle = iter([lambda: None] * looks + [lambda: run(FileCache(tmp_path).set("a", "new"))])
    assert run(cache.get("a")) is None
    assert next(clock.meddle, None) is None
    assert run(cache.get("a")) == "new"


def test_of_many_that_delete_a_value_one_is_told_so(tmp_path: Path) -> None:
    async def delete() -> list[bool]:
        return await asyncio.gather(*(FileCache(tmp_path).delete("a") for _ in range(20)))

    run(FileCache(tmp_path).set("a", "1"))
    assert sorted(run(delete())) == [False] * 19 + [True]
    assert files(tmp_path) == []


@pytest.mark.parametrize("method", ["stat", "replace"])
def test_a_write_that_fails_leaves_the_old_value_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    works: Callable[..., Any] = getattr(Path, method)

    def fail(self: Path, *args: Any, **options: Any) -> Any:
        if self.suffix == ".tmp":
            raise OSError(28, "No space left on device")
        return works(self, *args, **options)

    cache = FileCache(tmp_path)
    run(cache.set("a", "1"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, fail)
        with pytest.raises(OSError, match="No space left"):
            run(cache.set("a", "2"))
    assert len(files(tmp_path)) == 1
    assert run(cache.get("a")) == "1"


def test_the_first_write_removes_what_killed_processes_left_an_hour_ago(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    run(cache.set("a", "1"))
    kept = only_file(tmp_path)
    old, new, late = _temporary_for(kept), _temporary_for(kept), _temporary_for(kept)
    foreign = [tmp_path / "notes.tmp", tmp_path / f"{kept.stem}.tmp", tmp_path / f"{old.name}.txt"]
    for file in (old, new, late, *foreign):
        file.touch()
    written_at = kept.stat().st_mtime
    for file in (kept, old, *foreign):
        os.utime(file, (written_at - 3700, written_at - 3700))
    os.utime(new, (written_at - 3500, written_at - 3500))
    fresh = FileCache(tmp_path)
    run(fresh.set("a", "2"))
    assert set(files(tmp_path)) == {kept, new, late, *foreign}
    os.utime(late, (written_at - 3700, written_at - 3700))
    run(fresh.set("a", "3"))
    assert late.exists()


def test_clear_deletes_the_values_and_nothing_else(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    for key in "ab":
        run(cache.set(key, "1"))
    foreign = [tmp_path / "perdure-settings.json", tmp_path / "notes.json", _temporary_for(files(tmp_path)[0])]
    for file in foreign:
        file.touch()
    run(cache.clear())
    assert set(files(tmp_path)) == set(foreign)
    assert run(cache.get("a")) is None


HAMMER: Final = """
import asyncio, random, sys
from perdure.caches import FileCache

async def hammer(directory, seed, rounds):
    rng, hits = random.Random(seed), 0
    for _ in range(rounds):
        cache = FileCache(directory)
        match rng.randrange(8):
            case 0 | 1 | 2:
                size = rng.randrange(300_000)
                await cache.set("key", f"{size}:" + "x" * size, rng.choice([None, 0.0001, 60]))
            case 3:
                await cache.delete("key")
            case _:
                value = await cache.get("key")
                if value is not None:
                    size, _, rest = value.partition(":")
                    assert rest == "x" * int(size), (size, len(rest))
                    hits += 1
    print(hits)

asyncio.run(hammer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def test_processes_that_hammer_one_key_find_nothing_or_a_whole_value(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", HAMMER, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(seed), str(times(5000))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    shown = [process.communicate(timeout=300) for process in processes]
    assert [error for _, error in shown] == ["", "", ""]
    assert sum(int(hits) for hits, _ in shown) > 0
    assert {file.suffix for file in files(tmp_path)} <= {".json"}


WRITER: Final = """
import asyncio, sys
from perdure.caches import FileCache

async def write(directory, digit):
    cache = FileCache(directory)
    while True:
        await cache.set("key", digit * 3_000_000)
        print("written", flush=True)

async def write_many(directory):
    await asyncio.gather(*(write(directory, digit) for digit in "12345678"))

asyncio.run(write_many(sys.argv[1]))
"""


def test_writers_that_are_killed_leave_a_whole_value(tmp_path: Path) -> None:
    for kills in range(times(100)):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(1 + kills % 10):
            assert writer.stdout.readline() == "written\n"
        writer.kill()
        writer.communicate()
        for left_over in tmp_path.glob("*.tmp"):  # dozens of megabytes
            left_over.unlink()
        value = run(FileCache(tmp_path).get("key"))
        assert value is not None
        assert value == value[0] * 3_000_000


def test_an_object_with_get_set_and_delete_is_used_as_it_is() -> None:
    class Both(UserDict[str, str]):
        def set(self, key: str, value: str, ttl: int | None = None) -> None:
            self[key] = value

        def delete(self, key: str) -> bool:
            return self.pop(key, None) is not None

    for cache in (MemoryCache(), PlainCache(), Both()):
        assert as_cache(cache) is cache


@pytest.mark.parametrize("cache", [None, "redis://", [], (), frozenset(), object(), MemoryCache, dict, len])
def test_anything_else_is_refused_with_what_cache_takes(cache: Any) -> None:
    with pytest.raises(TypeError, match=r"cache= takes a dict, MemoryCache\(\), FileCache\(directory\), or an object with"):
        as_cache(cache)


@pytest.mark.parametrize("make_mapping", [dict, UserDict])
async def test_a_dict_is_the_cache_itself(make_mapping: Callable[[], dict[str, str]]) -> None:
    mapping = make_mapping()
    steps = StepCaching(mapping, ManualClock())
    await steps.keep("a", VALUE)
    assert list(mapping) == ["a"]
    assert await steps.read("a") == VALUE
    mapping.pop("a")
    assert await steps.read("a") is None
    other = StepCaching(mapping, ManualClock())
    await other.keep("a", VALUE)
    assert await steps.read("a") == VALUE


JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=10,
)
INSTANTS: Final = st.none() | st.integers(0, 2**62)


@given(st.booleans(), JSON_VALUES, st.none() | st.binary(max_size=40), INSTANTS)
def test_what_is_kept_for_a_step_reads_back_the_same(
    ok: bool, value: Any, args_hash: bytes | None, expires_at: int | None
) -> None:
    payload = msgspec.json.encode(value)
    cached = Cached(ok, msgspec.Raw(payload), args_hash, expires_at)
    found = Cached.from_text(cached.to_text())
    assert found == cached
    assert bytes(found.payload) == payload


STEP: Final = {"ok": True, "payload": {"x": 1}, "args_hash": None, "expires_at": None}
NOT_KEPT: Final[list[Any]] = [
    *("", "{", "null", "[]", "{}", '{"version":1}', VALUE.to_text() + "x", VALUE.to_text()[:-1], "\ud800", 7, b"{}", {}),
    VALUE.to_text().replace('{"a"', '[1}{"a"'),
    json.dumps({"version": 1, "step": STEP}).replace('{"x": 1}', "[" * 100_000 + "]" * 100_000),
    *(json.dumps({"version": version, "step": STEP}) for version in (0, 2, "1", True, None)),
    *(json.dumps({"version": 1, "step": STEP | change}) for change in ({"ok": 1}, {"args_hash": 5}, {"args_hash": "?"})),
    *(json.dumps({"version": 1, "step": STEP | change}) for change in ({"expires_at": "1"}, {"expires_at": 1.5}, {"more": 1})),
    *(json.dumps({"version": 1, "step": {name: STEP[name] for name in STEP if name != missing}}) for missing in STEP),
    json.dumps({"step": STEP}),
    json.dumps({"version": 1, "step": STEP, "more": 1}),
]


def test_the_document_that_the_bad_ones_are_made_of_is_good() -> None:
    assert Cached.from_text(json.dumps({"version": 1, "step": STEP})) == Cached(True, msgspec.Raw(b'{"x": 1}'), None, None)


@pytest.mark.parametrize("text", NOT_KEPT, ids=range(len(NOT_KEPT)))
async def test_text_that_is_not_ours_is_a_miss_with_a_warning_that_names_the_key(text: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        Cached.from_text(text)
    with pytest.warns(PerdureWarning, match="under 'step:1' cannot be read") as told:
        assert await StepCaching({"step:1": text}, ManualClock()).read("step:1") is None
    assert len(told) == 1


@pytest.mark.parametrize("make_cache", [dict, PlainCache, MemoryCache, MemoryKeyValueStore])
async def test_a_ttl_counts_to_the_microsecond_whatever_the_cache_makes_of_it(make_cache: Callable[[], Any]) -> None:
    clock = ManualClock()
    steps = StepCaching(make_cache(), clock)
    await steps.keep("a", VALUE, 1.5)
    clock.advance(1.499999)
    kept = await steps.read("a")
    assert kept == msgspec.structs.replace(VALUE, expires_at=clock.now() + 1)
    clock.advance(0.000001)
    assert await steps.read("a") is None
    await steps.keep("a", VALUE)
    clock.advance("100w")
    assert await steps.read("a") == VALUE


async def test_a_cache_is_told_whole_seconds_and_nothing_of_a_ttl_that_is_not() -> None:
    cache = PlainCache()
    steps = StepCaching(cache, ManualClock())
    for ttl in (None, 1.5, 2.0, 0.001):
        await steps.keep("a", VALUE, ttl)
    assert [call[2:] for call in cache.calls] == [(), (2,), (2,), (1,)]
    assert all(type(ttl) is int for _, _, *ttls in cache.calls for ttl in ttls)


class BrokenCache:
    def get(self, key: str) -> str | None:
        raise ConnectionError("refused")

    async def set(self, key: str, value: str, ttl: int | None = None) -> None:
        raise ConnectionError("refused")

    def delete(self, key: str) -> bool:
        raise ConnectionError("refused")


class BrokenAsyncCache(BrokenCache):
    async def get(self, key: str) -> str | None:  # type: ignore[override]
        raise ConnectionError("refused")


@pytest.mark.parametrize("cache", [BrokenCache(), BrokenAsyncCache()])
async def test_a_cache_that_cannot_be_asked_is_an_error_and_one_that_does_not_keep_a_warning(cache: Any) -> None:
    steps = StepCaching(cache, ManualClock())
    with pytest.raises(PersistenceError, match="asked for step 'a': ConnectionError: refused") as raised:
        await steps.read("a")
    assert isinstance(raised.value.__cause__, ConnectionError)
    with pytest.warns(PerdureWarning, match=r"did not keep step 'a' \(ConnectionError: refused\)") as told:
        await steps.keep("a", VALUE)
    assert len(told) == 1


async def test_cancelling_a_cache_is_no_failure_of_it() -> None:
    class Slow(PlainCache):
        async def get(self, key: str) -> str | None:  # type: ignore[override]
            await asyncio.Event().wait()
            return None

        async def set(self, *args: Any) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    steps = StepCaching(Slow(), ManualClock())
    for doing in (steps.read("a"), steps.keep("a", VALUE)):
        task = asyncio.ensure_future(doing)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Airport:
    """Runs that want to do the same step, and who is doing it."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.log: list[str] = []
        self.landing: dict[str, asyncio.Event] = {}

    async def fly(self, name: str, steps: StepCaching, key: str = "a") -> None:
        self.landing[name] = asyncio.Event()
        async with steps.flight(key):
            self.inside.append(name)
            self.log.append(name)
            try:
                await self.landing[name].wait()
            finally:
                self.inside.remove(name)

    async def start(self, name: str, steps: StepCaching, key: str = "a") -> asyncio.Task[None]:
        task = asyncio.create_task(self.fly(name, steps, key))
        await turns(5)
        return task


@pytest.fixture(autouse=True)
def no_flight_is_left() -> Iterator[None]:
    assert caching._flights == {}
    yield
    assert caching._flights == {}


async def test_one_is_inside_and_the_others_follow_in_the_order_in_which_they_asked() -> None:
    airport, cache = Airport(), dict[str, str]()
    tasks = [await airport.start(name, StepCaching(cache, ManualClock())) for name in "abcd"]
    for n, name in enumerate("abcd"):
        assert airport.inside == [name]
        airport.landing[name].set()
        await turns(5)
        assert tasks[n].done()
    assert airport.log == list("abcd")
    assert caching._flights == {}


async def test_other_keys_and_other_caches_do_not_wait_even_if_they_are_equal() -> None:
    airport, first, second = Airport(), dict[str, str](), dict[str, str]()
    tasks = [
        await airport.start("1", StepCaching(first, ManualClock())),
        await airport.start("2", StepCaching(second, ManualClock())),
        await airport.start("3", StepCaching(first, ManualClock()), "b"),
    ]
    assert airport.inside == ["1", "2", "3"]
    for landing in airport.landing.values():
        landing.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    airport, steps = Airport(), StepCaching({}, ManualClock())
    a, b, c = [await airport.start(name, steps) for name in "abc"]
    b.cancel()
    await turns(5)
    assert b.cancelled()
    airport.landing["a"].set()
    await turns(5)
    assert (a.done(), airport.inside) == (True, ["c"])
    airport.landing["c"].set()
    await c


async def test_a_cancelled_holder_lets_the_next_one_in() -> None:
    airport, steps = Airport(), StepCaching({}, ManualClock())
    a, b = [await airport.start(name, steps) for name in "ab"]
    a.cancel()
    await turns(5)
    assert (a.cancelled(), airport.inside) == (True, ["b"])
    airport.landing["b"].set()
    await b


async def test_a_waiter_cancelled_when_its_turn_has_come_passes_it_on() -> None:
    airport, steps = Airport(), StepCaching({}, ManualClock())
    a, b, c = [await airport.start(name, steps) for name in "abc"]
    airport.landing["a"].set()
    for _ in range(20):
        if airport.inside:
            await asyncio.sleep(0)
    assert airport.inside == []  # a has left, and b was woken but has not run yet
    b.cancel()
    await turns(5)
    assert (a.done(), b.cancelled(), airport.inside) == (True, True, ["c"])
    airport.landing["c"].set()
    await c


async def test_a_holder_that_raises_lets_the_next_one_in() -> None:
    steps = StepCaching({}, ManualClock())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with steps.flight("a"):
                raise ZeroDivisionError


async def test_asking_for_a_key_from_inside_it_is_an_error_rather_than_a_wait_for_ever() -> None:
    cache = dict[str, str]()
    landed = asyncio.Event()

    async def ask(key: str) -> None:
        async with StepCaching(cache, ManualClock()).flight(key):
            pass

    async def ask_later() -> None:
        await landed.wait()
        await ask("a")

    async with StepCaching(cache, ManualClock()).flight("a"), StepCaching(cache, ManualClock()).flight("b"):
        for key in "ab":
            with pytest.raises(RuntimeError, match=f"step '{key}' was reached from inside a step with the same key"):
                await asyncio.create_task(ask(key))
        await ask("c")
        later = asyncio.create_task(ask_later())
    await ask("a")
    landed.set()
    await later


async def test_a_latecomer_waits_for_whoever_waited_before_it() -> None:
    airport, steps = Airport(), StepCaching({}, ManualClock())
    a, b = [await airport.start(name, steps) for name in "ab"]
    airport.landing["a"].set()
    await a
    c = await airport.start("c", steps)
    assert airport.inside == ["b"]
    for name in "bc":
        airport.landing[name].set()
    await asyncio.gather(b, c)
    assert airport.log == list("abc")


EVENTS: Final = st.tuples(st.sampled_from(["start", "start", "land", "cancel"]), st.integers(0, 9), st.integers(0, 3))


@given(st.lists(EVENTS, max_size=40))
async def test_whoever_is_cancelled_one_is_inside_at_a_time_and_all_others_get_their_turn(
    events: list[tuple[str, int, int]],
) -> None:
    airport, cache = Airport(), dict[str, str]()
    tasks: list[asyncio.Task[None]] = []
    for event, n, pause in events:
        if event == "start":
            tasks.append(asyncio.create_task(airport.fly(str(len(tasks)), StepCaching(cache, ManualClock()))))
        elif event == "cancel" and n < len(tasks):
            tasks[n].cancel()
        elif str(n) in airport.landing:
            airport.landing[str(n)].set()
        await turns(pause)
        assert len(airport.inside) <= 1
    await turns(5)
    for landing in airport.landing.values():
        landing.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    flown = [int(name) for name in airport.log]
    assert flown == sorted(flown)
    assert {n for n, task in enumerate(tasks) if not task.cancelled()} <= set(flown)
    assert caching._flights == {}


def test_loops_do_not_wait_for_each_other() -> None:
    steps = StepCaching({}, ManualClock())

    async def inside() -> None:
        async with steps.flight("a"):
            await asyncio.to_thread(lambda: asyncio.run(asyncio.wait_for(alone(), PATIENCE)))

    async def alone() -> None:
        async with steps.flight("a"):
            assert len(caching._flights) == 2

    asyncio.run(inside())


async def test_a_cache_lives_while_somebody_is_inside() -> None:
    class Mapping(dict[str, str]):
        pass

    airport, cache = Airport(), Mapping()
    alive = weakref.ref(cache)
    task = await airport.start("1", StepCaching(cache, ManualClock()))
    del cache
    gc.collect()
    assert alive() is not None
    airport.landing["1"].set()
    await task
    del task
    gc.collect()
    assert alive() is None


def test_a_loop_that_is_closed_with_somebody_inside_leaves_no_flight() -> None:
    loop = asyncio.new_event_loop()
    steps = StepCaching({}, ManualClock())
    doing = Airport().fly("1", steps)
    task = loop.create_task(doing)
    loop.run_until_complete(turns(5))
    assert len(caching._flights) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    doing.close()
    assert caching._flights == {}
