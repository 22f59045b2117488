"""What a store over a key-value store refuses, and how it names things."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from key_value.aio.stores.memory import MemoryStore as PyMemoryStore
from obstore.store import LocalStore, MemoryStore, S3Store

from perdure.backends.key_value import KeyValueRunStore
from perdure.errors import PersistenceError, StoreCapabilityError
from perdure.state import MemoryKeyValueStore
from perdure.store import STANDARD_PARTS
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import NOW, new_run
from tests.backends.key_value.faulty import WavingBucket


def s3(**options: Any) -> S3Store:
    return S3Store("bucket", access_key_id="id", secret_access_key="canary", region="us-east-1", **options)


def test_only_a_key_value_store_can_be_one() -> None:
    for thing in (object(), {}, "redis://", MemoryStore, None):
        with pytest.raises(TypeError, match="is no key-value store"):
            KeyValueRunStore(thing)


def test_capabilities_are_what_the_backend_has() -> None:
    made = {
        "dict": KeyValueRunStore(MemoryKeyValueStore()),
        "py": KeyValueRunStore(PyMemoryStore()),
        "memory": KeyValueRunStore(MemoryStore()),
        "local": KeyValueRunStore(LocalStore()),
        "s3": KeyValueRunStore(s3()),
    }
    assert {name: (sorted(store.capabilities - STANDARD_PARTS), store.durability) for name, store in made.items()} == {
        "dict": ([], "process"),
        "py": ([], "process"),
        "memory": ([], "process"),
        "local": (["durable"], "disk"),
        "s3": (["durable", "shared"], "replicated"),
    }


def test_credentials_are_nowhere_to_be_seen() -> None:
    store = KeyValueRunStore(s3(prefix="folder"), prefix="app")
    assert "canary" not in repr(store) + repr(store.key)
    assert store.key == ("key_value", "S3Store", "bucket=bucket", "folder", "app")


def test_no_store_can_be_carried_into_another_process() -> None:
    with pytest.raises(StoreCapabilityError, match="way into another process"):
        pickle.dumps(KeyValueRunStore(MemoryKeyValueStore()))
    with pytest.raises(TypeError, match="make one over the same bucket"):
        pickle.dumps(KeyValueRunStore(s3()))


@pytest.mark.parametrize(("kv", "error"), [(MemoryKeyValueStore(), StoreCapabilityError), (s3(), PersistenceError)])
async def test_a_forked_child_is_refused(kv: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyValueRunStore(kv)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(error, match="forked process"):
        await store.get("run")


async def test_an_object_store_that_minds_no_condition_is_refused() -> None:
    store = KeyValueRunStore(WavingBucket(MemoryStore()))
    with pytest.raises(StoreCapabilityError, match="compare-and-swap"):
        await store.create(new_run(), now=NOW)
    await store.close()


async def test_one_place_is_not_used_through_two_objects() -> None:
    kept: dict[str, str] = {}

    class Shared:
        def get(self, key: str) -> str | None:
            return kept.get(key)

        def set(self, key: str, value: str, ttl: int | None = None) -> None:
            kept[key] = value

        def delete(self, key: str) -> bool:
            return kept.pop(key, None) is not None

    first, second = KeyValueRunStore(Shared()), KeyValueRunStore(Shared())
    await first.create(new_run(), now=NOW)
    with pytest.raises(StoreCapabilityError, match="open both stores over the same one"):
        await second.create(new_run(), now=NOW)
    await first.close()
    assert not (await second.create(new_run(), now=NOW)).is_new
    await second.close()


async def test_stores_over_one_object_share_what_they_know() -> None:
    kv = MemoryKeyValueStore()
    one, other = KeyValueRunStore(kv), KeyValueRunStore(kv)
    await one.create(new_run(), now=NOW)
    assert (await other.get("run")) == (await one.get("run"))
    assert one.key == other.key
    await one.close()
    await other.close()


def test_ids_never_leave_their_place_nor_show_in_it(tmp_path: Path) -> None:
    async def create_all() -> None:
        store = KeyValueRunStore(LocalStore(tmp_path / "place", mkdir=True), prefix="../é")
        for name in NAMES:
            await store.create(new_run(name), now=NOW)
        assert await store.count() == len(NAMES)
        await store.close()

    asyncio.run(create_all())
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    paths = [str(path.relative_to(tmp_path / "place")) for path in (tmp_path / "place").rglob("*")]
    assert all(re.fullmatch(r"[a-z0-9/-]+", path) for path in paths)
    assert len(paths) == len({path.casefold() for path in paths})


@pytest.mark.parametrize("kv", [MemoryKeyValueStore(), PyMemoryStore()])
def test_a_store_outlives_the_event_loop_it_was_used_on(kv: Any) -> None:
    store = KeyValueRunStore(kv)
    assert asyncio.run(store.create(new_run(), now=NOW)).is_new
    assert not asyncio.run(store.create(new_run(), now=NOW)).is_new
