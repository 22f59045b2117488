"""Whatever a DSN looks like, nothing of its password or token is shown: in no repr, key, error, traceback or log line."""

from __future__ import annotations

import asyncio
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import pytest

from perdure import open_store, stores
from perdure.errors import PersistenceError
from perdure.kv.dsns import open_key_value_store
from perdure.store import FullStore
from perdure.testing.contract.world import new_run, outcomes
from tests.backends.opening import connections_of, store_at
from tests.backends.operators import SqlOperator
from tests.backends.registry import MYSQL, POSTGRES, ServerBackend, on

# Both halves of each password, around what a driver or a parser may stumble over.
LEFT, RIGHT = "c4n4ry", "h1dd3n"
STUMBLING_BLOCKS: Final = (
    "", "/", "#", "@", "?", "%", ":", "[", "]", "[]", " ", "\\", "'", '"', "&", "=", ";", "+", ",", "$", "\t", "\n", "é", "℀",
    "ß@", "//", "://", "@/", "/@", "?@", "#@", "%4", "%41", "%zz", "@host:1/", "?a=b", "?a=b@x/y", "#f",
    "a/b#c?d@e:f%g", "1?2=3&table=x",
)  # fmt: skip
PASSWORDS: Final = [f"{LEFT}{block}{RIGHT}" for block in STUMBLING_BLOCKS]
# Nothing listens there.
AWAY: Final = "127.0.0.1:1"

FORMS: Final[dict[str, list[str]]] = {
    "postgresql": [
        f"postgresql://user:{{}}@{AWAY}/db?sslmode=disable",
        f"postgres://user:{{}}@{AWAY},localhost:1/db?sslmode=disable",
        f"postgresql://{{}}@{AWAY}/db",
        f"postgresql://{AWAY}/db?sslmode=disable&user=u&password={{}}",
        f"postgresql://{AWAY}/db?user=u&sslpassword={{}}",
        "postgresql://user:{}@/db?sslmode=disable&host=/nowhere",
        "host=127.0.0.1 port=1 user=u password={}",
        "user:{}@127.0.0.1/db",
    ],
    "mysql": [
        f"mysql://user:{{}}@{AWAY}/db",
        f"mariadb://user:{{}}@{AWAY}/db?ssl=false",
        f"mysql://{AWAY}/db?password={{}}",
        "mysql://user:{}@localhost/db?unix_socket=/nowhere",
        "mysql://user:{}@host:port/db",
        "user:{}@tcp(127.0.0.1:1)/db",
    ],
    "mongodb": [
        f"mongodb://user:{{}}@{AWAY}/db?serverSelectionTimeoutMS=20",
        f"mongodb://user:{{}}@{AWAY},localhost:1/db?serverSelectionTimeoutMS=20",
        "mongodb+srv://user:{}@cluster.invalid/db?serverSelectionTimeoutMS=20&connectTimeoutMS=20",
        f"mongodb://{AWAY}/db?serverSelectionTimeoutMS=20&tlsCertificateKeyFilePassword={{}}",
        "mongodb://user:{}@%2Fnowhere.sock/db?serverSelectionTimeoutMS=20",
    ],
    "redis": [
        f"redis://:{{}}@{AWAY}/0",
        f"redis://user:{{}}@{AWAY}/0",
        f"rediss://user:{{}}@{AWAY}/0",
        f"redis://{AWAY}/0?password={{}}",
        "unix:///nowhere?password={}",
        "unix://user:{}@/nowhere?db=1",
    ],
    "libsql": [
        f"libsql://{AWAY}?authToken={{}}",
        f"libsql://user:{{}}@{AWAY}",
        f"https://{AWAY}?authToken={{}}",
        f"http://{AWAY}?authToken={{}}",
        f"libsql://{AWAY}?tls=false&authToken={{}}",
        f"wss://{{}}@{AWAY}",
    ],
}
MAKERS: Final[dict[str, Callable[[str], FullStore]]] = {
    "postgresql": stores.postgres,
    "mysql": stores.mysql,
    "mongodb": stores.mongo,
    "redis": stores.redis,
    "libsql": stores.libsql,
}


def dsns(scheme: str) -> Iterator[str]:
    for form in FORMS[scheme]:
        for password in PASSWORDS:
            yield form.format(password)
            yield form.format(quote(password, safe=""))


def check_hidden(shown: str, what: object) -> None:
    for part in (LEFT, RIGHT):
        assert part not in shown, f"{what} shows it"


def shown_by(error: BaseException) -> str:
    return f"{error} {error!r} {''.join(traceback.format_exception(error))}"


@pytest.mark.parametrize("scheme", FORMS)
def test_no_dsn_is_shown(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    makers: list[Callable[[str], object]] = [MAKERS[scheme], open_store]
    if scheme not in {"mysql", "libsql"}:
        makers.append(open_key_value_store)
    refused = taken = 0
    with warnings.catch_warnings(record=True) as warned:
        for dsn in dsns(scheme):
            for make in makers:
                try:
                    store = make(dsn)
                except (ValueError, TypeError) as error:
                    check_hidden(shown_by(error), "the refusal")
                    refused += 1
                else:
                    check_hidden(f"{store!r} {getattr(store, 'key', '')} {getattr(store, 'place', '')}", "the store")
                    taken += 1
    check_hidden(f"{caplog.text} {[str(one.message) for one in warned]}", "a log line")
    assert min(refused, taken) > len(STUMBLING_BLOCKS)


@on(POSTGRES, MYSQL)
async def test_an_error_of_the_server_that_repeats_the_password_does_not_show_it(
    server_backend: ServerBackend, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Here by a rule of the operator's that has it for a name; a proxy may put into an error whatever it was sent."""
    caplog.set_level(logging.DEBUG)
    password, operator = unquote(urlsplit(dsn).password or ""), server_backend.operator
    assert password
    assert isinstance(operator, SqlOperator)
    async with store_at(dsn) as store:
        await store.setup()
        name = f"`{password}`" if server_backend is MYSQL else f'"{password}"'
        await operator.query(dsn, f"ALTER TABLE perdure_runs ADD CONSTRAINT {name} CHECK (priority < 7)")
        with pytest.raises(PersistenceError) as refusal:
            await store.create(new_run(priority=7))
    assert "***" in str(refusal.value)
    assert password not in f"{shown_by(refusal.value)} {caplog.text}"


@pytest.mark.parametrize("scheme", FORMS)
async def test_no_error_of_a_connection_shows_a_password(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    opened: list[FullStore] = []
    for form in FORMS[scheme]:
        if any(text in form for text in ("sslpassword", "//{}@", "+srv")):
            continue  # for these the driver reads files, and blocks
        for password in PASSWORDS[::4]:
            try:
                opened.append(await asyncio.to_thread(MAKERS[scheme], form.format(quote(password, safe=""))))
            except (ValueError, TypeError):
                continue
    assert len(opened) > 10
    monkeypatch.setattr(type(connections_of(opened[0])), "PATIENCE", 0.0)
    for store, answer in zip(opened, await outcomes([store.setup() for store in opened]), strict=True):
        assert isinstance(answer, PersistenceError | ValueError), repr(store)
        check_hidden(f"{shown_by(answer)} {connections_of(store)!r}", repr(store))
    await asyncio.gather(*(store.close() for store in opened))
    check_hidden(caplog.text, "a log line")
