"""How stores are opened: by a function or a DSN, without telling anybody's password, and without a lock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Runtime, migrate_store, open_key_value_store, open_store, stores, workflow

# What a DSN leads to: the function with its first argument, and what of the DSN's options the server gets.
SERVERS = [
    ("postgresql://ada:hunter2@db.example/shop?sslmode=disable", stores.postgres),
    ("mysql://ada:hunter2@db.example/shop", stores.mysql),
    ("redis://ada:hunter2@db.example:6380/2", stores.redis),
    ("libsql://db.example?authToken=hunter2", stores.libsql),
]
ALL = [getattr(stores, name) for name in stores.__all__ if name != "open_store"]


@pytest.mark.parametrize(("dsn", "function"), SERVERS)
async def test_a_dsn_is_its_function_with_the_options_as_keywords(dsn: str, function: Callable[..., Any]) -> None:
    options = f"{'&' if '?' in dsn else '?'}table=flows&prefix=a%2Fb"
    one, same, other = open_store(dsn + options), function(dsn, table="flows", prefix="a/b"), function(dsn)
    assert one.key == same.key != other.key
    for store in (one, same, other):
        await store.close()


@pytest.mark.parametrize(("dsn", "function"), SERVERS)
async def test_nothing_that_shows_a_store_shows_its_password(dsn: str, function: Callable[..., Any]) -> None:
    store = function(dsn)
    assert "hunter2" not in f"{store!r} {store.key}"
    with pytest.raises(TypeError, match="cannot be pickled: send its DSN") as refused:
        store.__reduce__()
    assert "hunter2" not in str(refused.value)
    await store.close()


@pytest.mark.parametrize("function", ALL)
def test_a_lock_is_refused_because_leases_are_always_on(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"takes no lock=: leases are always on"):
        function("somewhere", lock=True)


@workflow
async def noop(ctx: Context) -> None:
    """Do nothing."""


ASKING: dict[str, Callable[[str], object]] = {
    "open_store": open_store,
    "Runtime": lambda dsn: Runtime(dsn, [noop]),
    "run": lambda dsn: asyncio.run(noop.run(id="a", store=dsn)),
    "migrate_store": lambda dsn: asyncio.run(migrate_store(dsn, "memory:")),
}


@pytest.mark.parametrize(
    ("dsn", "directory", "file"),
    [
        ("files:runs", "runs", "sqlite:///runs.db"),
        ("files:/var/lib/my%20runs/", "/var/lib/my runs", "sqlite:////var/lib/my%20runs.db"),
        ("files:runs?prefix=a", "runs", "sqlite:///runs.db"),
        ("files:", "runs", "sqlite:///runs.db"),
    ],
)
@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_files_are_a_key_value_store_and_what_to_write_for_runs_is_said(
    dsn: str, directory: str, file: str, ask: Callable[[str], object]
) -> None:
    with pytest.raises(ValueError, match="files: names a key-value store, which holds texts and not runs") as refused:
        ask(dsn)
    assert f"write {file}, " in str(refused.value)
    assert f"stores.key_value(FilesKeyValueStore({directory!r}))" in str(refused.value)


def test_the_environment_cannot_name_files_as_the_store_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STORE", "files:runs")
    with pytest.raises(ValueError, match=r"to store runs write sqlite:///runs\.db"):
        asyncio.run(noop.run(id="a"))


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("memory:here", "a DSN of memory has no place in it; write memory:"),
        ("sqlite:app.db", "a DSN of SQLite names no file; write sqlite:///relative.db or sqlite:////absolute.db"),
        ("sqlite:///", "a DSN of SQLite names no file; write sqlite:///relative.db or sqlite:////absolute.db"),
    ],
)
def test_a_dsn_whose_place_is_wrong_is_told_how_it_is_written(dsn: str, message: str) -> None:
    for read in (open_store, open_key_value_store):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read(dsn)


async def test_the_database_of_mongodb_is_an_option_or_the_path_or_perdure() -> None:
    for dsn, name in (
        ("mongodb://ada:hunter2@db.example/shop?database=other&collection=flows", "other"),
        ("mongodb://ada:hunter2@db.example/shop", "shop"),
        ("mongodb://ada:hunter2@db.example", "perdure"),
    ):
        store = open_store(dsn)
        assert name in store.key
        assert "hunter2" not in f"{store!r} {store.key}"
        await store.close()


async def test_a_local_libsql_file_is_an_sqlite_file(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/app.db?table=flows")
    assert store.key == stores.sqlite(tmp_path / "app.db", table="flows").key
    await store.close()


@pytest.mark.parametrize("function", [stores.postgres, stores.mysql, stores.mongo, stores.redis])
def test_a_store_on_a_server_takes_a_url_or_what_is_connected(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"url|URL"):
        function()
