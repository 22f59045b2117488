"""Backups by the commands of docs/running.md: runs in every state go on from the copy, and nothing recorded runs again."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import pytest

from perdure import Context, Runtime, Workflow, current_step
from tests.backends.places import libsql_dsn, new_name, run_on_mysql, run_on_postgres
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, REDIS, SQLITE, Backend, on
from tests.campaign import IS_FULL
from tests.servers import mysql, postgres
from tests.servers.libsql import LibsqlServer
from tests.servers.mongo import MongoServer
from tests.servers.redis import RedisServer
from tests.settings_page import PAGE

LEASE: Final = 2.0
# How the runs stand when the copy is made. The last one is being driven, and its lease is copied too.
STATES: Final = {
    "ended": "completed",
    "waiting": "suspended",
    "asleep": "suspended",
    "failed": "failed",
    "later": "pending",
    "working": "running",
}


class Backup(NamedTuple):
    """A store that can be copied: its DSN, the copying, and the restoring, which gives the DSN of the copy."""

    dsn: str
    copy: Callable[[], object]
    restore: Callable[[], str]
    # Whether no worker may run meanwhile.
    is_copied_at_rest: bool = False


def command(first_word: str, directory: Path, **variables: str) -> None:
    """Run the block of the page that begins with this word."""
    (commands,) = re.findall(rf"```sh\n({first_word}[ =].*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = f"{Path(postgres.find_binary('pg_dump')).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", commands], cwd=directory, env={"PATH": path, **variables}, check=True, capture_output=True)


@contextmanager
def sqlite_backup(directory: Path) -> Iterator[Backup]:
    yield Backup(f"sqlite:///{directory}/app.db", lambda: command("sqlite3", directory), lambda: f"sqlite:///{directory}/copy.db")


@contextmanager
def postgres_backup(directory: Path) -> Iterator[Backup]:
    server, names = postgres.shared_server().dsn, (new_name(), new_name())
    source, target = (urlunsplit(urlsplit(server)._replace(path=f"/{name}")) for name in names)
    for name in names:
        run_on_postgres(server, f"CREATE DATABASE {name}")
    try:
        yield Backup(source, lambda: command("pg_dump", directory, SOURCE=source, TARGET=target), lambda: target)
    finally:
        for name in names:
            run_on_postgres(server, f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def mysql_backup(directory: Path) -> Iterator[Backup]:
    server, (source, target) = mysql.shared_server().dsn, (new_name(), new_name())
    where = urlsplit(server)
    (directory / "client.cnf").write_text(
        f"[client]\nhost={where.hostname}\nport={where.port}\nuser={where.username}\npassword={where.password}\n"
    )
    for name in (source, target):
        run_on_mysql(server, f"CREATE DATABASE {name}")
    try:
        yield Backup(
            mysql.with_database(server, source),
            lambda: command("tables", directory, SOURCE=source, TARGET=target),
            lambda: mysql.with_database(server, target),
        )
    finally:
        for name in (source, target):
            run_on_mysql(server, f"DROP DATABASE {name}")


@contextmanager
def redis_backup(directory: Path) -> Iterator[Backup]:
    """The file is read by a server without an append-only file, which then writes one; and the copy of that by a third server."""
    source = RedisServer("--repl-diskless-sync-delay", "0")  # it would wait for other replicas
    reader, target = RedisServer("--appendonly", "no"), RedisServer()

    def restore() -> str:
        shutil.copy(directory / "dump.rdb", reader.directory)
        reader.start()
        assert reader.ask("CONFIG SET appendonly yes").startswith("+OK")
        while "aof_rewrite_in_progress:0" not in reader.ask("INFO persistence"):
            pass
        reader.stop()
        shutil.copytree(reader.directory / "appendonlydir", target.directory / "appendonlydir")
        target.start()
        return target.url

    source.start()
    try:
        yield Backup(source.url, lambda: command("redis-cli", directory, SOURCE=source.url), restore)
    finally:
        for server in (source, reader, target):
            server.remove()


@contextmanager
def libsql_backup(directory: Path) -> Iterator[Backup]:
    source, target = LibsqlServer(own=True), LibsqlServer(own=True)
    source.start()
    target.start()
    try:
        yield Backup(
            libsql_dsn(source),
            lambda: command("curl", directory, SOURCE=source.url, TARGET=target.url),
            lambda: libsql_dsn(target),
        )
    finally:
        source.remove()
        target.remove()


@contextmanager
def mongo_backup(directory: Path) -> Iterator[Backup]:
    """The copy takes the place of the data: a replica set knows its members by host and port."""
    server = MongoServer(own=True)
    server.start()
    data, copy = str(server.process.directory / "data"), str(directory / "data")

    def make_copy() -> None:
        server.stop()
        command("cp", directory, SOURCE=data, TARGET=copy)

    def restore() -> str:
        shutil.rmtree(data)
        command("cp", directory, SOURCE=copy, TARGET=data)
        server.start()
        return server.dsn

    try:
        yield Backup(server.dsn, make_copy, restore, is_copied_at_rest=True)
    finally:
        server.remove()


BACKUPS: Final[dict[Backend, Callable[[Path], AbstractContextManager[Backup]]]] = {
    SQLITE: sqlite_backup,
    POSTGRES: postgres_backup,
    MYSQL: mysql_backup,
    REDIS: redis_backup,
    LIBSQL: libsql_backup,
    MONGO: mongo_backup,
}


# Programs that do not come with the server.
PROGRAMS: Final = {SQLITE: ("sqlite3",), LIBSQL: ("curl", "jq")}


@pytest.fixture
def backup(backend: Backend, tmp_path: Path) -> Iterator[Backup]:
    for program in PROGRAMS.get(backend, ()):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    with BACKUPS[backend](tmp_path) as made:
        yield made


class Shop:
    """A workflow, how often each of its steps was called, and whether what is delivered may arrive."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.has_arrived = asyncio.Event()
        self.order = Workflow("order", self._order)

    async def _order(self, ctx: Context[Any], state: str) -> bytes:
        paid = await ctx.step("pay", self._pay)
        if state == "waiting":
            await ctx.wait_for_signal("arrived")
        elif state == "asleep":
            await ctx.sleep("rest", "1h")
        elif state in ("failed", "working"):
            await ctx.step("deliver", self._deliver, state)
        return paid

    def _pay(self) -> bytes:
        self._count("pay")
        return bytes(range(256))  # every byte, and below text that has to be escaped

    async def _deliver(self, state: str) -> str:
        self._count("deliver")
        if state == "failed" and not self.has_arrived.is_set():
            raise ValueError("it did not arrive")
        await self.has_arrived.wait()
        return 'it\'s "here"; \\ %s \n -- 日本語 🎁'

    def _count(self, step: str) -> None:
        self.calls[f"{current_step().run_id} {step}"] += 1


@on(*(backend for backend in BACKUPS if IS_FULL or backend is not MONGO))  # whose emulated server takes half a minute
async def test_runs_go_on_from_a_backup(backend: Backend, backup: Backup) -> None:
    shop = Shop()
    async with Runtime(backup.dsn, [shop.order], lease_ttl=LEASE) as runtime:
        await bring_into_their_states(runtime, shop)
        if not backup.is_copied_at_rest:
            await asyncio.to_thread(backup.copy)
        shop.has_arrived.set()
        await _value(runtime, "working")
    if backup.is_copied_at_rest:
        await asyncio.to_thread(backup.copy)
    async with Runtime(await asyncio.to_thread(backup.restore), [shop.order], lease_ttl=LEASE) as restored:
        await go_on(restored, shop, is_working_again=not backup.is_copied_at_rest)


async def bring_into_their_states(runtime: Runtime, shop: Shop) -> None:
    for state in STATES:
        await runtime.start(shop.order, state, id=state, delay="1h" if state == "later" else 0)
    async with asyncio.timeout(30):
        while await _statuses(runtime) != STATES or not shop.calls["working deliver"]:  # noqa: ASYNC110 - what a store says
            await asyncio.sleep(0.02)


async def go_on(restored: Runtime, shop: Shop, *, is_working_again: bool) -> None:
    assert {**await _statuses(restored), "working": "running"} == STATES
    await restored.signal("waiting", "arrived")
    await restored.retry("failed")
    async with asyncio.timeout(30):
        for run_id in ("ended", "waiting", "failed", "working"):
            assert await _value(restored, run_id) == bytes(range(256))
    others = {"asleep": "suspended", "later": "pending"}
    assert await _statuses(restored) == {**dict.fromkeys(STATES, "completed"), **others}
    assert shop.calls == {
        **{f"{state} pay": 1 for state in STATES if state != "later"},
        "failed deliver": 2,  # which is retried
        "working deliver": 1 + is_working_again,  # as its record came after the copy
    }


async def _value(runtime: Runtime, run_id: str) -> bytes:
    run = await runtime.get(run_id)
    assert run is not None
    value: bytes = await run
    return value


async def _statuses(runtime: Runtime) -> dict[str, str]:
    return {info.id: info.status for info in await runtime.list()}
