"""How stores are opened: by a function or a DSN, without telling anybody's password, and without a lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import open_store, stores

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


async def test_a_directory_is_opened_by_its_path(tmp_path: Path) -> None:
    store = open_store(f"files:{tmp_path}/runs?prefix=a")
    assert store.key == stores.files(tmp_path / "runs", prefix="a").key
    await store.close()
    with pytest.raises(ValueError, match="no store for such a DSN; write"):
        open_store("files:")
    with pytest.raises(ValueError, match="does not take these options"):
        open_store(f"files:{tmp_path}?table=flows")


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
