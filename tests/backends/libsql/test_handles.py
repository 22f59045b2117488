import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.backends.libsql.connections import LibsqlConnections
from perdure.backends.sqlite import SQLiteStore
from perdure.errors import PersistenceError
from perdure.stores import libsql as opened
from perdure.testing.contract.world import TTL, entry, new_run, outcomes
from tests.backends.libsql.tokens import KeyPair
from tests.servers.libsql import LibsqlServer


@pytest.fixture
async def store(url: str, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(url, table=table)
    yield store
    await store.close()


@pytest.fixture(scope="module")
def keys() -> KeyPair:
    return KeyPair()


@pytest.fixture(scope="module")
def guarded(keys: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LibsqlServer]:
    """A server that wants a token."""
    file = tmp_path_factory.mktemp("keys") / "public.pem"
    file.write_bytes(keys.public_key)
    server = LibsqlServer("--auth-jwt-key-file", str(file), own=True)
    server.start()
    yield server
    server.remove()


async def test_a_token_in_the_url_or_beside_it_lets_in(guarded: LibsqlServer, keys: KeyPair) -> None:
    for store in (
        LibsqlStore(guarded.url, auth_token=keys.token()),
        LibsqlStore(f"{guarded.url}?authToken={keys.token()}"),
        LibsqlStore(guarded.url.replace("http", "libsql"), auth_token=keys.token(a="rw"), tls=False),
    ):
        await store.setup()
        await store.close()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("none", "wants a token: pass auth_token="),
        ("expired", "has not expired"),
        ("others", "wants a token: pass auth_token="),
        ("read only", "may write"),
    ],
)
async def test_a_token_that_is_missing_or_not_good_is_said_so(guarded: LibsqlServer, keys: KeyPair, kind: str, says: str) -> None:
    tokens = {"none": None, "expired": keys.token(exp=1), "others": KeyPair().token(), "read only": keys.token(a="ro")}
    store = LibsqlStore(guarded.url, auth_token=tokens[kind])
    with pytest.raises(PersistenceError, match=says):
        await store.create(new_run())
    await store.close()


async def test_a_token_is_never_shown(
    guarded: LibsqlServer, keys: KeyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LibsqlConnections, "PATIENCE", 0.0)
    caplog.set_level(0)
    good = keys.token()
    unreachable = re.sub(r":\d+$", ":1", guarded.url)
    for url, token in ((guarded.url, good), (guarded.url, good + "x"), (unreachable, good)):
        store = LibsqlStore(url, auth_token=token)
        connections = store._connections
        (answer,) = await outcomes([store.setup()])
        assert isinstance(answer, PersistenceError) == (url != guarded.url or token != good)
        shown = [
            store,
            store.key,
            connections,
            connections.target,
            connections.client,
            connections.client._pool,
            answer,
            getattr(answer, "__cause__", None),
        ]
        assert good not in f"{shown!r} {answer} {caplog.text}"
        await store.close()


@pytest.mark.parametrize("token", ["a b", "a\r\nX-Evil: 1", "é"])
def test_a_token_that_is_no_header_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ValueError, match="auth_token") as refusal:
        LibsqlStore("http://127.0.0.1:1", auth_token=token)
    assert token not in str(refusal.value)


async def test_an_unreachable_server_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LibsqlConnections, "PATIENCE", 0.0)
    store = LibsqlStore("http://127.0.0.1:1")
    with pytest.raises(PersistenceError, match=r"libSQL store http://127\.0\.0\.1:1"):
        await store.get("run")
    await store.close()


async def test_a_server_that_does_not_encrypt_is_not_talked_to_when_that_was_asked_for(
    server: LibsqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibsqlConnections, "PATIENCE", 0.0)
    store = LibsqlStore(server.url.replace("http", "libsql"), auth_token="secret")
    with pytest.raises(PersistenceError, match="SSL") as refusal:
        await store.get("run")
    assert "secret" not in repr(refusal.value)
    await store.close()


async def test_stores_are_equal_by_server_tables_and_prefix(url: str) -> None:
    first = LibsqlStore(url)
    assert first.key == LibsqlStore(f"{url}/?authToken=t", table="PERDURE").key
    assert len({first.key, LibsqlStore(url, prefix="x").key, LibsqlStore(url, table="x").key, LibsqlStore(f"{url}/x").key}) == 4


@pytest.mark.parametrize("ttl", [None, 60.0])
@pytest.mark.parametrize("start_at", [None, 4102444800000000])
@pytest.mark.parametrize("created_at", [None, 1])
async def test_a_run_is_dated_by_the_servers_clock(
    store: LibsqlStore, ttl: float | None, start_at: int | None, created_at: int | None
) -> None:
    made = await store.create(new_run(start_at=start_at), ttl=ttl, created_at=created_at)
    assert made.run == await store.get("run")
    assert abs(made.run.updated_at - time.time_ns() // 1000) < 60_000_000
    if made.claim is not None:
        lease = made.claim.lease
        assert (lease.epoch, lease.until) == (made.run.updated_at, made.run.updated_at + 60_000_000)
        await store.record(lease, [entry(1)])


async def test_a_run_of_thousands_of_entries_at_once_is_recorded(store: LibsqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    entries = [entry(seq) for seq in range(1, 3001)]
    await store.record(claim.lease, entries)
    assert await store.journal("run") == entries


async def test_what_a_server_does_not_sync_is_not_called_durable(store: LibsqlStore) -> None:
    await store.setup()
    assert store.durability == "process"
    assert "durable" not in store.capabilities


async def test_an_empty_token_is_none(url: str, table: str) -> None:
    store = LibsqlStore(url, auth_token="", table=table)
    await store.setup()
    await store.close()


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}"])
async def test_a_file_is_an_sqlite_file_like_any_other(tmp_path: Path, form: str) -> None:
    path = tmp_path / "app.db"
    store = opened(form.format(path))
    assert isinstance(store, SQLiteStore)
    await store.create(new_run())
    await store.close()
    again = SQLiteStore(path)
    assert await again.get("run") is not None
    await again.close()


def test_options_of_a_server_are_refused_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for a server"):
        opened("file:x.db", auth_token="secret")
    with pytest.raises(ValueError, match="without options"):
        opened("file:x.db?mode=ro")


async def test_a_url_is_a_store_on_a_server(url: str, table: str) -> None:
    store = opened(url, table=table)
    assert isinstance(store, LibsqlStore)
    await store.close()
