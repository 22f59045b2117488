"""A DSN selects the right store, opens nothing before its first use, and its password appears in no message."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from perdure import stores
from perdure.errors import PersistenceError
from perdure.kv import (
    FilesKeyValueStore,
    MemoryKeyValueStore,
    MongoKeyValueStore,
    PostgresKeyValueStore,
    RedisKeyValueStore,
    SQLiteKeyValueStore,
    open_key_value_store,
)
from tests.kv.places import Place

# No server listens there.
SERVERS: Final = {
    "postgresql://ada:s3cr3t@127.0.0.1:1/app?sslmode=disable": PostgresKeyValueStore,
    "postgres://ada@127.0.0.1:1/app?sslmode=disable&password=s3cr3t": PostgresKeyValueStore,
    "redis://ada:s3cr3t@127.0.0.1:1/0": RedisKeyValueStore,
    "rediss://ada:s3cr3t@127.0.0.1:1/0": RedisKeyValueStore,
    "mongodb://ada:s3cr3t@127.0.0.1:1/app?serverSelectionTimeoutMS=100": MongoKeyValueStore,
}


def parse_address(kv: Any) -> tuple[str, ...]:
    place: tuple[str, ...] = kv.place
    return place


@pytest.mark.parametrize(("dsn", "kind"), SERVERS.items())
def test_a_server_is_not_asked_before_the_first_use(dsn: str, kind: type) -> None:
    assert type(open_key_value_store(dsn)) is kind


def test_a_place_on_disk_is_not_made_before_the_first_use(tmp_path: Path) -> None:
    assert type(open_key_value_store(f"files:{tmp_path}/kept")) is FilesKeyValueStore
    assert type(open_key_value_store(f"sqlite:///{tmp_path}/app.db")) is SQLiteKeyValueStore
    assert type(open_key_value_store("memory:")) is MemoryKeyValueStore
    assert list(tmp_path.iterdir()) == []


def test_paths_are_relative_or_absolute_and_may_be_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {
        "sqlite:///a%20b.db": "a b.db",
        f"sqlite:///{tmp_path}/x.db": "x.db",
        "files:a%3Fb": "a?b",
        f"files:{tmp_path}/kept": "kept",
        f"files://{tmp_path}/kept": "kept",
    }
    assert {dsn: parse_address(open_key_value_store(dsn))[1] for dsn in paths} == {
        dsn: str(tmp_path / name) for dsn, name in paths.items()
    }


@pytest.mark.parametrize("dsn", SERVERS)
def test_our_options_are_ours_and_the_others_the_drivers(dsn: str) -> None:
    word = "collection" if dsn.startswith("mongodb") else "table"
    plain = parse_address(open_key_value_store(dsn))
    chosen = parse_address(open_key_value_store(f"{dsn}{'&' if '?' in dsn else '?'}{word}=mine&namespace=a%3Ab"))
    assert plain != chosen
    assert any(part.startswith("mine") for part in chosen)
    assert "a:b" in chosen or any(part.endswith("a%3Ab:") for part in chosen)


@pytest.mark.parametrize(
    "dsn",
    ["", "app.db", "sqlite:", "sqlite:app.db", "sqlite:///", "files:", "memory:x", "mysql://ada:s3cr3t@h/d", "s3cr3t", "s3cr3t:x",
     "files:x?table=y", "sqlite:///x.db?tabel=y", "sqlite:///x.db?table=a-b", "sqlite:///x.db?x", "redis://ada:s3cr3t@h:port/0",
     "redis://h?table=a%20b", "redis://h?namespace=%00", "postgresql://ada:s3cr3t@[h/d", "postgresql://h/d?table=a%22b",
     "mongodb://h/?collection=a.b", "mongodb:s3cr3t@h"],
)  # fmt: skip
def test_a_dsn_that_leads_nowhere_is_refused_without_its_password(dsn: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        open_key_value_store(dsn)
    if "s3cr3t@" in dsn:
        assert "s3cr3t" not in str(refusal.value)


def test_a_dsn_is_text() -> None:
    with pytest.raises(TypeError, match="a DSN is a str like memory:"):
        open_key_value_store(Path("app.db"))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("dsn", SERVERS)
async def test_no_password_is_shown_when_a_server_does_not_answer(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv: Any = open_key_value_store(dsn)
    monkeypatch.setattr(type(kv._connections), "PATIENCE", 0.1)
    assert "s3cr3t" not in repr(kv)
    assert "127.0.0.1:1" in repr(kv)
    with pytest.raises(PersistenceError) as refusal:
        await kv.get("a")
    assert "127.0.0.1:1" in str(refusal.value)
    error: BaseException | None = refusal.value
    while error is not None:
        assert "s3cr3t" not in f"{error!r} {error}"
        error = error.__cause__
    await kv.close()


@pytest.mark.parametrize(
    ("module", "dsn", "extra"),
    [("asyncpg", "postgresql://h/d", "postgres"), ("redis", "redis://h", "redis"), ("pymongo", "mongodb://h", "mongo")],
)
def test_a_missing_driver_is_named_with_what_to_install(module: str, dsn: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{module!r}] = None
from perdure.state import StatePersistence
try:
    StatePersistence.open({dsn!r})
except ImportError as missing:
    print(missing)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert f"pip install 'perdure[{extra}]'" in said


def test_no_driver_is_imported_for_what_needs_none() -> None:
    program = """
import sys
from perdure.state import StatePersistence
StatePersistence.open("memory:"), StatePersistence.open("files:x"), StatePersistence.open("sqlite:///x.db")
print({"asyncpg", "redis", "pymongo"} & set(sys.modules))
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "set()"


async def test_namespaces_and_tables_are_kept_apart(shared_place: Place) -> None:
    place = shared_place
    word = "collection" if place.dsn.startswith("mongodb") else "table"
    mark = "&" if "?" in place.dsn else "?"
    names = ["", "a", "A", "a:b", "a%3Ab", "%", "../x", "a" * 255, "\u00f3", "*"]
    options = [f"namespace={quote(name, safe='')}" for name in names]
    if not place.dsn.startswith("files:") and f"{word}=" not in place.dsn:
        options.append(f"{word}=other")
    stores: list[Any] = [await place.open(), *[await opened(f"{place.dsn}{mark}{option}") for option in options[1:]]]
    for n, kv in enumerate(stores):
        await kv.set("b:c", f"{n}")
        await kv.set("*", "", 3600)
    assert [await kv.get("b:c") for kv in stores] == [f"{n}" for n in range(len(stores))]
    assert [sorted(await kv.keys("*")) for kv in stores] == [["*", "b:c"]] * len(stores)
    assert len({kv.place for kv in stores}) == len(stores)
    for kv in stores:
        assert await kv.delete("b:c") is True
        assert await kv.delete("*") is True
        await kv.close()


async def opened(dsn: str) -> Any:
    return await asyncio.to_thread(open_key_value_store, dsn)


@pytest.mark.parametrize("namespace", ["a" * 256, "\u00f3" * 128, "a\0", "\ud800"])
def test_a_namespace_that_not_every_place_can_hold_is_refused(namespace: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 255 UTF-8 bytes without NUL"):
        SQLiteKeyValueStore(tmp_path / "app.db", namespace=namespace)


@pytest.mark.parametrize("namespace", [1, b"a", {"$gt": ""}, None])
def test_a_namespace_that_is_no_text_is_refused(namespace: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="namespace must be a str"):
        SQLiteKeyValueStore(tmp_path / "app.db", namespace=namespace)
    with pytest.raises(TypeError, match="prefix must be a str"):
        stores.memory(prefix=namespace)


@pytest.mark.parametrize("kind", [RedisKeyValueStore, PostgresKeyValueStore, MongoKeyValueStore])
def test_a_server_is_named_by_url_or_brought_along(kind: Any) -> None:
    with pytest.raises(ValueError, match="URL"):
        kind()
