"""`runtime.start(..., connection=)` and `runtime.signal(..., connection=)`: written in the caller's own transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import aiosqlite
import asyncmy
import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from perdure import Context, Runtime, StepTransaction, stores, workflow
from perdure.errors import RunConflict, RunNotFound, StoreCapabilityError
from perdure.store import FullStore
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.places import new_name
from tests.backends.processes import ParentPipe
from tests.backends.registry import MYSQL, POSTGRES, SQLITE, Backend, on

PATIENCE: Final = 60.0
# Opens a transaction, gives its connection, and commits or rolls back at the end.
Transact: TypeAlias = Callable[[str, bool], AbstractAsyncContextManager[Any]]


def path_of(dsn: str) -> str:
    return dsn.partition("?")[0].removeprefix("sqlite:///")


def mysql_options(dsn: str) -> dict[str, Any]:
    where = urlsplit(dsn)
    return {
        "host": where.hostname, "port": where.port, "user": where.username, "password": where.password or "",
        "db": where.path.strip("/"),
    }  # fmt: skip


@asynccontextmanager
async def with_asyncpg(dsn: str, commits: bool) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn, ssl=False)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield connection
        await (transaction.commit() if commits else transaction.rollback())
    finally:
        await connection.close()


@asynccontextmanager
async def with_asyncmy(dsn: str, commits: bool) -> AsyncIterator[Any]:
    connection = await asyncmy.connect(**mysql_options(dsn))
    await connection.begin()
    try:
        yield connection
        await (connection.commit() if commits else connection.rollback())
    finally:
        connection.close()


@asynccontextmanager
async def with_aiosqlite(dsn: str, commits: bool) -> AsyncIterator[Any]:
    async with aiosqlite.connect(path_of(dsn)) as connection:
        await connection.execute("BEGIN")
        yield connection
        await (connection.commit() if commits else connection.rollback())


def new_engine(dsn: str, **options: Any) -> AsyncEngine:
    scheme, _, rest = dsn.partition("?")[0].partition(":")
    driver = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}[scheme]
    arguments: dict[str, Any] = {}
    if scheme == "postgresql":
        options_of_dsn = dict(parse_qsl(urlsplit(dsn).query))
        # Without ssl=False asyncpg looks for certificates, which blocks.
        arguments = {"ssl": False, "server_settings": {"search_path": options_of_dsn["search_path"]}}
    return create_async_engine(f"{scheme}+{driver}:{rest}", connect_args=arguments, **options)


@asynccontextmanager
async def with_alchemy_connection(dsn: str, commits: bool) -> AsyncIterator[Any]:
    engine = await asyncio.to_thread(new_engine, dsn)
    async with engine.connect() as connection:
        yield connection
        await (connection.commit() if commits else connection.rollback())
    await engine.dispose()


@asynccontextmanager
async def with_alchemy_session(dsn: str, commits: bool) -> AsyncIterator[Any]:
    engine = await asyncio.to_thread(new_engine, dsn)
    async with AsyncSession(engine) as session:
        yield session
        await (session.commit() if commits else session.rollback())
    await engine.dispose()


DRIVERS: Final[list[tuple[Backend, Transact]]] = [
    (POSTGRES, with_asyncpg),
    (MYSQL, with_asyncmy),
    (SQLITE, with_aiosqlite),
    *(
        (backend, transact)
        for backend in (POSTGRES, MYSQL, SQLITE)
        for transact in (with_alchemy_connection, with_alchemy_session)
    ),
]
each_driver = pytest.mark.parametrize(
    ("backend", "transact"), DRIVERS, ids=[f"{backend}-{transact.__name__}" for backend, transact in DRIVERS], scope="session"
)


@workflow
async def greet(ctx: Context, name: str) -> str:
    return f"{name}: {await ctx.wait_for_signal('word', default='silence', timeout='50ms')}"


@pytest.fixture
async def store(backend: Backend, dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(dsn) as store:
        await store.setup()
        yield store


@each_driver
async def test_a_run_and_its_signal_exist_if_the_caller_commits(store: FullStore, dsn: str, transact: Transact) -> None:
    async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):
        async with transact(dsn, False) as connection:
            run = await runtime.start(greet, "ada", id="undone", connection=connection)
        with pytest.raises(RunNotFound):
            await run.status()
        async with transact(dsn, True) as connection:
            run = await runtime.start(greet, "ada", id="done", connection=connection)
            await runtime.signal("done", "word", "hello", connection=connection)
            again = await runtime.start(greet, "ada", id="done", connection=connection)
            assert again.id == run.id
        assert await run == "ada: hello"
        async with transact(dsn, True) as connection:
            with pytest.raises(RunConflict):
                await runtime.start(greet, "bob", id="done", connection=connection)
    assert [info.id for info in await store.list()] == ["done"]


def begin_on_sqlite3(dsn: str) -> Any:
    connection = sqlite3.connect(path_of(dsn), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def begin_on_alchemy(dsn: str) -> Any:
    return create_engine(dsn.partition("?")[0]).connect()


def begin_on_alchemy_session(dsn: str) -> Any:
    return Session(create_engine(dsn.partition("?")[0]))


@pytest.mark.parametrize("begin", [begin_on_sqlite3, begin_on_alchemy, begin_on_alchemy_session])
def test_a_program_without_a_loop_starts_a_run_in_its_transaction(begin: Callable[[str], Any], tmp_path: Path) -> None:
    dsn = f"sqlite:///{tmp_path}/app.db"
    with Runtime(dsn, [greet]).sync as runtime:
        assert runtime.list() == []
        connection = begin(dsn)
        runtime.start(greet, "ada", id="undone", connection=connection)
        connection.rollback()
        assert runtime.get("undone") is None
        if begin is begin_on_sqlite3:
            connection.execute("BEGIN IMMEDIATE")
        run = runtime.start(greet, "ada", id="done", connection=connection)
        runtime.signal("done", "word", "hello", connection=connection)
        connection.commit()
        assert run.result() == "ada: hello"
        connection.close()
        if begin is not begin_on_sqlite3:
            connection.get_bind().dispose() if begin is begin_on_alchemy_session else connection.engine.dispose()


@on(POSTGRES, MYSQL, SQLITE)
async def test_a_connection_without_a_transaction_is_refused(backend: Backend, store: FullStore, dsn: str) -> None:
    @asynccontextmanager
    async def plain() -> AsyncIterator[Any]:
        if backend is POSTGRES:
            connection = await asyncpg.connect(dsn, ssl=False)
            yield connection
            await connection.close()
        elif backend is MYSQL:
            connection = await asyncmy.connect(**mysql_options(dsn), autocommit=True)
            yield connection
            await connection.ensure_closed()
        else:
            async with aiosqlite.connect(path_of(dsn)) as connection:
                yield connection

    @asynccontextmanager
    async def autocommit() -> AsyncIterator[Any]:
        engine = await asyncio.to_thread(new_engine, dsn, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            yield connection
        await engine.dispose()

    async with Runtime(store, concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        for opened in (plain(), autocommit()):
            async with opened as connection:
                with pytest.raises(ValueError, match="no transaction is open"):
                    await runtime.start(greet, "ada", connection=connection)
                with pytest.raises(ValueError, match="no transaction is open"):
                    await runtime.signal("none", "word", connection=connection)
    assert await store.list() == []


@on(POSTGRES, MYSQL, SQLITE)
async def test_a_connection_to_another_database_is_refused(backend: Backend, store: FullStore, dsn: str, tmp_path: Path) -> None:
    async with Runtime(store, concurrency=0) as runtime, asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as stack:
        if backend is SQLITE:
            other = f"sqlite:///{tmp_path}/other.db"
            transact: Transact = with_aiosqlite
        elif backend is POSTGRES:
            name = new_name()
            admin = await asyncpg.connect(dsn, ssl=False)
            await admin.execute(f'CREATE DATABASE "{name}"')
            stack.push_async_callback(admin.close)
            stack.push_async_callback(admin.execute, f'DROP DATABASE "{name}"')
            where = urlsplit(dsn)
            other, transact = where._replace(path=f"/{name}").geturl(), with_asyncpg
        else:
            other, transact = urlsplit(dsn)._replace(path="/mysql").geturl(), with_asyncmy
        async with transact(other, False) as connection:
            with pytest.raises(ValueError, match="connection= leads to"):
                await runtime.start(greet, "ada", connection=connection)


@on(POSTGRES, MYSQL, SQLITE)
async def test_what_is_no_connection_of_the_driver_is_refused(store: FullStore) -> None:
    async with Runtime(store, concurrency=0) as runtime:
        with pytest.raises(TypeError, match="must be a connection of"):
            await runtime.start(greet, "ada", connection=object())


async def test_a_store_without_an_outbox_says_which_have_one() -> None:
    async with Runtime(stores.memory(), concurrency=0) as runtime:
        with pytest.raises(StoreCapabilityError, match="SQLite, PostgreSQL, MySQL and sql_client"):
            await runtime.start(greet, "ada", connection=object())


@on(POSTGRES, MYSQL)
async def test_a_transactional_step_starts_a_run_with_its_own_commit(store: FullStore) -> None:
    async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):

        async def order(transaction: StepTransaction, fails: bool) -> str:
            await runtime.start(greet, "ada", id=f"started-{fails}", connection=transaction.connection)
            if fails:
                raise ValueError("undone")
            return "ordered"

        @workflow
        async def flow(ctx: Context) -> str:
            with pytest.raises(ValueError, match="undone"):
                await ctx.transaction("fails", order, True)
            return await ctx.transaction(order, False)

        assert await (await runtime.start(flow)) == "ordered"
        assert await runtime.get("started-True") is None
        run = await runtime.get("started-False")
        assert run is not None
        assert await run == "ada: silence"


async def start_in_transaction(parent: ParentPipe, dsn: str, transact: Transact, stops: str) -> None:
    """Start a run in a transaction, and wait to be killed before or after its commit."""
    async with store_at(dsn) as store, Runtime(store, concurrency=0) as runtime:
        async with transact(dsn, True) as connection:
            await runtime.start(greet, "ada", id="run", connection=connection)
            if stops == "before":
                parent.send("started")
                await parent.receive()
        parent.send("committed")
        await parent.receive()


KILLED: Final = [(POSTGRES, with_asyncpg), (MYSQL, with_asyncmy), (SQLITE, with_aiosqlite)]


@pytest.mark.parametrize(("backend", "transact"), KILLED, ids=[str(backend) for backend, _ in KILLED], scope="session")
@pytest.mark.parametrize("stops", ["before", "after"])
async def test_a_caller_that_is_killed_has_started_a_run_exactly_if_it_had_committed(
    store: FullStore, dsn: str, transact: Transact, stops: str, start: Start
) -> None:
    caller = await asyncio.to_thread(start, start_in_transaction, dsn, transact, stops)
    assert await asyncio.to_thread(caller.receive) == ("started" if stops == "before" else "committed")
    os.kill(caller.pid, signal.SIGKILL)
    await asyncio.to_thread(caller.kill)
    async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):
        if stops == "before":
            run = await runtime.start(greet, "bob", id="run")  # the id is free
            assert await run == "bob: silence"
        else:
            found = await runtime.get("run")
            assert found is not None
            assert await found == "ada: silence"
    assert [info.id for info in await store.list()] == ["run"]
