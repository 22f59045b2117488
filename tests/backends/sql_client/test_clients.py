"""What a client must do is found out at set-up, and what it does not do is said, before anything can be lost by it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asyncmy.constants import CLIENT

from perdure.backends.sql_client import SqlClientStore, sql_client
from perdure.backends.sql_client.unfenced import SqlWorkflowStore
from perdure.errors import LeaseLost, PerdureWarning, PersistenceError, RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import Pulse
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run
from tests.backends.sql_client.places import Place

SQLITE = pytest.mark.parametrize("here", ["sqlite"], indirect=True)
MYSQL = pytest.mark.parametrize("here", ["mysql"], indirect=True)


class Changing:
    """A client whose answers are changed on their way, and whose transactions may end in another way."""

    def __init__(self, client: Any, answer: Callable[[Any, int], Any] = lambda rows, count: (rows, count)) -> None:
        self._client = client
        self._answer = answer
        self.key = client.key

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        return self._answer(*await self._client.query(sql, params))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.transaction() as queries:
            inner = Changing(self._client, self._answer)
            inner._client = queries
            yield inner

    async def close(self) -> None:
        await self._client.close()


@SQLITE
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda rows, _: rows, "must give (rows, rowcount), and gave a list of 1"),
        (lambda rows, _: (rows, None), "must give the number of rows as an int, and gave a NoneType"),
        (lambda rows, count: (iter(rows), count), "must give a sequence of rows"),
        (lambda rows, count: ([dict(enumerate(row)) for row in rows], count), "rows as sequences in the order of the columns"),
        (lambda rows, _: (rows, 0), "it gave 0 as the number of rows that an UPDATE matched, not 1"),
        (lambda rows, _: (rows, -1), "it gave -1 as the number of rows"),
    ],
)
async def test_a_client_that_answers_otherwise_is_refused_with_the_reason(here: Place, answer: Any, said: str) -> None:
    store = here.store(Changing(here.client(), answer))
    with pytest.raises(PersistenceError, match=re.escape(said)):
        await store.setup()


@MYSQL
async def test_on_mysql_a_client_must_count_the_rows_that_an_update_leaves_alone(here: Place) -> None:
    store = here.store(here.client(flags=0))
    with pytest.raises(PersistenceError, match=r"connect with CLIENT\.FOUND_ROWS"):
        await store.create(new_run())
    assert CLIENT.FOUND_ROWS == 2


@MYSQL
async def test_on_mysql_a_client_must_read_what_was_committed(here: Place) -> None:
    store = here.store(here.client(isolation="REPEATABLE-READ"))
    with pytest.raises(PersistenceError, match=r"its transactions are REPEATABLE-READ.*use READ-COMMITTED"):
        await store.setup()


@MYSQL
async def test_on_mysql_a_client_must_speak_every_character(here: Place) -> None:
    store = here.store(here.client(charset="latin1"))
    with pytest.raises(PersistenceError, match=r"speak latin1.*connect with utf8mb4"):
        await store.setup()


@MYSQL
async def test_on_mysql_a_client_must_not_cut_what_does_not_fit(here: Place) -> None:
    store = here.store(here.client(sql_mode=""))
    with pytest.raises(PersistenceError, match="lets values be cut"):
        await store.setup()


@SQLITE
@pytest.mark.parametrize(("synchronous", "durability"), [("FULL", "disk"), ("NORMAL", "process"), ("OFF", "process")])
async def test_durability_is_what_the_settings_say(here: Place, synchronous: str, durability: str) -> None:
    store = here.store(here.client(synchronous=synchronous))
    await store.setup()
    assert store.durability == store.sibling().durability == durability


class NeverRollingBack(Changing):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        error = None
        async with self._client.transaction() as queries:
            try:
                yield queries
            except Exception as met:
                error = met
        if error is not None:
            raise error


async def test_a_client_that_does_not_roll_back_is_refused(here: Place) -> None:
    store = here.store(NeverRollingBack(here.client()))
    with pytest.raises(PersistenceError, match="does not roll back when an exception leaves it"):
        await store.setup()
    good = here.store()
    await good.setup()
    rows, _ = await here.client().query("SELECT count(*) FROM perdure_meta", ())
    assert int(rows[0][0]) == 2  # nothing of the probe is left


class KeepingErrors(Changing):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        with contextlib.suppress(RunNotFound):  # what is wrong with it
            async with self._client.transaction() as queries:
                yield queries


@SQLITE
async def test_a_transaction_that_keeps_errors_back_is_not_taken_for_done(here: Place) -> None:
    store = here.store(KeepingErrors(here.client()))
    with pytest.raises(RunNotFound):
        await store.cancel("nobody", now=NOW)


class CountingErrors(Changing):
    met = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        try:
            async with self._client.transaction() as queries:
                yield queries
        except sqlite3.OperationalError:
            self.met += 1
            raise


@SQLITE
async def test_a_plain_begin_does_as_well_and_nobody_fails_because_another_wrote_first(here: Place) -> None:
    await here.store().setup()
    clients = [CountingErrors(here.client(begin="BEGIN")) for _ in range(2)]
    one, two = (here.store(client) for client in clients)
    made = await asyncio.gather(*(store.create(new_run(f"run-{n}"), now=NOW) for n in range(20) for store in (one, two)))
    assert sum(created.is_new for created in made) == 20
    claims = await asyncio.gather(*(store.claim(3, TTL, [("flow", 1)], now=NOW) for store in (one, two) * 10))
    assert sorted(one.run.id for claim in claims for one in claim.claims) == sorted(f"run-{n}" for n in range(20))
    assert [client.met for client in clients] == [0, 0]


class LosingReplies(Changing):
    """Its transactions are committed, but whoever made one hears that the connection was lost."""

    losing = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.transaction() as queries:
            yield queries
        if self.losing:
            self.losing = False
            raise ConnectionResetError("the reply was lost")


async def test_a_commit_whose_reply_was_lost_is_neither_lost_nor_done_twice(here: Place) -> None:
    client = LosingReplies(here.client())
    store = here.store(client)
    await store.setup()
    client.losing = True
    created = await store.create(new_run(), ttl=TTL, now=NOW)
    assert created.is_new
    assert created.claim is not None
    lease = created.claim.lease
    client.losing = True
    assert await store.record(lease, [entry(1)], now=NOW) == Pulse(0, False)
    client.losing = True
    assert await store.signal("run", "go", b"1", now=NOW) == 1
    client.losing = True
    await store.release(lease, now=NOW)
    client.losing = True
    claim = await store.acquire("run", TTL, now=NOW)
    assert claim is not None
    assert (claim.journal, len(claim.inbox), claim.run.attempts) == ([entry(1)], 1, 1)
    client.losing = True
    await store.finish(claim.lease, "completed", b"1", entries=[entry(2)], now=NOW)
    assert not client.losing
    row = await store.get("run")
    assert row is not None
    assert (row.status, await store.journal("run")) == ("completed", [entry(1), entry(2)])


async def test_a_transaction_whose_reply_was_lost_is_found_by_what_it_recorded(here: Place) -> None:
    client = LosingReplies(here.client())
    store = here.store(client)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None

    async def work(*entries: Entry) -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.record(entries)
            client.losing = True

    await work(entry(1))
    with pytest.raises(PersistenceError, match="the reply was lost"):
        await work()  # nobody knows, as nothing tells
    assert await store.journal("run") == [entry(1)]


async def test_a_lease_that_was_lost_is_not_taken_for_a_lost_reply(here: Place) -> None:
    client = LosingReplies(here.client())
    store = here.store(client)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await store.acquire("run", TTL, now=EXPIRED)
    client.losing = True
    with pytest.raises(LeaseLost):
        await store.finish(claim.lease, "completed", b"1", now=EXPIRED)


class Deadlocked(Exception):
    sqlstate = "40P01"


class DeadlockingOften(Changing):
    failing = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.transaction() as queries:
            if self.failing:
                self.failing -= 1
                raise Deadlocked
            yield queries


async def test_a_deadlock_is_tried_again_and_heard_by_nobody(here: Place) -> None:
    client = DeadlockingOften(here.client())
    store = here.store(client)
    await store.setup()
    client.failing = 2
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    assert client.failing == 0


@SQLITE
async def test_what_a_client_raises_is_a_persistence_error_with_its_cause(here: Place) -> None:
    class Failing(Changing):
        async def query(self, sql: str, params: Sequence[Any]) -> Any:
            raise ZeroDivisionError("a bug")

    store = here.store(Failing(here.client()))
    await here.store().setup()
    with pytest.raises(PersistenceError, match="ZeroDivisionError: a bug") as told:
        await store.get("run")
    assert isinstance(told.value.__cause__, ZeroDivisionError)


async def test_a_store_leaves_its_client_open_and_does_without_set_up_when_told(here: Place) -> None:
    client = here.client()
    store = here.store(client, auto_migrate=False)
    with pytest.raises(PersistenceError, match="there are no 'perdure' tables; check the database"):
        await store.count()
    await store.setup()
    await store.close()
    assert await here.store(client, auto_migrate=False).count() == 0


async def test_tables_of_another_kind_or_version_are_left_alone(here: Place) -> None:
    await here.store().setup()
    await here.client().query("UPDATE perdure_meta SET value = 2 WHERE name = 'payloads'", ())
    with pytest.raises(PersistenceError, match="made by another kind of store"):
        await here.store().count()
    await here.client().query("UPDATE perdure_meta SET value = 9 WHERE name = 'schema_version'", ())
    with pytest.raises(PersistenceError, match="belong to a newer perdure"):
        await here.store().count()


@SQLITE
async def test_the_factory_takes_what_it_can_use(here: Place) -> None:
    assert isinstance(sql_client(here.client(), "sqlite", table="mine"), SqlClientStore)
    with pytest.raises(TypeError, match="sql_client takes an object with `async query"):
        sql_client(object(), "sqlite")
    with pytest.raises(ValueError, match="dialect 'oracle' must be one of 'postgres', 'mysql', 'sqlite'"):
        sql_client(here.client(), "oracle")
    for table in ("x; drop table y", "1x", "x" * 46, "", "sqlite_x", 'a"b'):
        with pytest.raises(ValueError, match="must be letters, digits"):
            sql_client(here.client(), "sqlite", table=table)
    with pytest.warns(PerdureWarning, match="has no transaction\\(\\), so its store is unfenced and for one process only"):
        assert isinstance(sql_client(here.client()._reading, "sqlite"), SqlWorkflowStore)


class Failing(Changing):
    """A client that asks nobody once it is told to fail, and fails when it is let go."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.fails = False
        self.go = asyncio.Event()

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        if not self.fails:
            return await super().query(sql, params)
        await self.go.wait()
        raise OSError("gone")


@SQLITE
@pytest.mark.parametrize("is_apart", [False, True], ids=["on the client's loop", "on another loop"])
async def test_what_fails_after_its_caller_has_left_is_no_forgotten_exception(here: Place, is_apart: bool) -> None:
    client = Failing(here.client())
    store = here.store(client)
    await store.setup()
    client.fails = True
    connections, forgotten = asyncio.get_running_loop(), []

    async def ask_and_leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: forgotten.append(told["message"]))
        asking = asyncio.create_task(store.get("run"))
        await asyncio.wait([asking], timeout=0.05)
        asking.cancel()
        await asyncio.wait([asking])
        connections.call_soon_threadsafe(client.go.set)
        await store.close()  # which waits for what is under way
        gc.collect()

    await (asyncio.to_thread(asyncio.run, ask_and_leave()) if is_apart else ask_and_leave())
    assert forgotten == []
