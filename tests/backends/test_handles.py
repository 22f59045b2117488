"""What a program may do with the handle of a store on a server: open, cancel, fork, lend, drop and close it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

from perdure import open_store, stores
from perdure.errors import PersistenceError
from perdure.model.records import Lease
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, in_another_loop, new_run, outcomes
from tests.backends.opening import connections_of, store_at
from tests.backends.operators import Operator
from tests.backends.places import with_options
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, SERVER_BACKENDS, ServerBackend, on

PATIENCE: Final = 60.0

with_schema = on(*(backend for backend in SERVER_BACKENDS if backend.operator is not None))
with_driver = on(*(backend for backend in SERVER_BACKENDS if backend.driver is not None))
with_password = on(*(backend for backend in SERVER_BACKENDS if backend.login is not None))
with_counted_connections = on(*(backend for backend in SERVER_BACKENDS if backend.count_connections is not None))
with_lender = on(*(backend for backend in SERVER_BACKENDS if backend.lender is not None))


@pytest.fixture
def operator(server_backend: ServerBackend) -> Operator:
    assert server_backend.operator is not None
    return server_backend.operator


@pytest.fixture
def login(server_backend: ServerBackend, dsn: str) -> Iterator[str]:
    assert server_backend.login is not None
    with server_backend.login(dsn) as login:
        yield login


@pytest.fixture
async def borrow(server_backend: ServerBackend, dsn: str) -> AsyncIterator[Callable[[], FullStore]]:
    assert server_backend.lender is not None
    async with server_backend.lender(dsn) as borrow:
        yield borrow


@pytest.fixture
async def store(shared_dsn: str, server_backend: ServerBackend) -> AsyncIterator[FullStore]:
    async with store_at(shared_dsn) as store:
        yield store


async def leased(store: FullStore, run_id: str = "run", **columns: object) -> Lease:
    claim = (await store.create(new_run(run_id, **columns), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


@with_schema
async def test_without_auto_migrate_nothing_is_created(operator: Operator, dsn: str) -> None:
    async with store_at(with_options(dsn, "auto_migrate=false")) as store:
        with pytest.raises(PersistenceError, match=r"check the .* make (the store|them) with `await store\.setup\(\)`"):
            await store.get("run")
        assert await asyncio.to_thread(operator.count_tables, dsn) == 0
        await store.setup()
        assert await asyncio.to_thread(operator.count_tables, dsn) > 0
        assert await store.get("run") is None


@with_schema
async def test_tables_of_another_version_are_left_alone(operator: Operator, dsn: str) -> None:
    async with store_at(dsn) as store, store_at(dsn) as other:
        await store.setup()
        await asyncio.to_thread(operator.set_schema_version, dsn, 99)
        with pytest.raises(PersistenceError, match="schema version 99"):
            await other.get("run")


@with_password
async def test_a_password_is_never_shown(login: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    escaped = urlsplit(login).password or ""
    wrong, unreachable = login.replace(escaped, f"{escaped}x"), re.sub(r"@127\.0\.0\.1:\d+", "@127.0.0.1:1", login)
    assert len({login, wrong, unreachable}) == 3
    for dsn in (login, wrong, unreachable):
        async with store_at(dsn) as store:
            connections = connections_of(store)
            monkeypatch.setattr(type(connections), "PATIENCE", 0.0)
            (answer,) = await outcomes([store.setup()])
            assert isinstance(answer, PersistenceError) == (dsn is not login)
            shown = [
                store,
                store.key,
                connections,
                getattr(connections, "address", None),
                answer,
                getattr(answer, "__cause__", None),
            ]
            assert not any(secret in f"{shown!r} {answer} {caplog.text}" for secret in (escaped, unquote(escaped)))


@pytest.mark.parametrize("name", ["", "a}b", "a{b", "a:b", "a b", "a/b", "a*", "a\n", "é", "a" * 101])
def test_a_name_that_could_lead_to_the_tables_or_keys_of_others_is_refused(server_backend: ServerBackend, name: str) -> None:
    make: Callable[..., FullStore] = getattr(stores, server_backend.name)
    option = "collection" if server_backend is MONGO else "table"
    scheme = {"postgres": "postgresql", "mongo": "mongodb"}.get(server_backend.name, server_backend.name)
    with pytest.raises(ValueError, match=f"{option} .* must (be|consist of)"):
        make(f"{scheme}://127.0.0.1:1/db", **{option: name})


@with_password
def test_a_dsn_is_refused_without_showing_its_password(server_backend: ServerBackend) -> None:
    make: Callable[[str], FullStore] = getattr(stores, server_backend.name)
    for dsn in server_backend.refused_dsns:
        with pytest.raises(ValueError, match=server_backend.dsn_name) as refusal:
            make(dsn)
        assert "secret" not in repr(refusal.value)
        assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


@with_driver
def test_a_missing_driver_says_what_to_install(server_backend: ServerBackend, dsn: str) -> None:
    program = (
        f"import sys; sys.modules[{server_backend.driver!r}] = None\n"
        "from perdure import open_store\n"
        "try: open_store(sys.argv[1])\n"
        "except ImportError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", program, dsn], check=True, capture_output=True, text=True).stdout
    assert f"pip install 'perdure[{server_backend.name}]'" in shown


async def test_cancelling_a_caller_leaves_the_store_usable(store: FullStore) -> None:
    lease = await leased(store)
    tasks = [asyncio.ensure_future(store.record(lease, [entry(seq)])) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks)
    assert {line.seq for line in await store.journal("run")} >= set(range(2, 21, 2))


async def test_children_and_their_parent_may_end_at_once(store: FullStore) -> None:
    parent = await leased(store, "parent")
    children = [await leased(store, f"child-{n}", parent_id="parent", parent_key=f"key-{n}") for n in range(10)]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(store.finish(lease, "completed", b"1") for lease in (*children, parent)))
    assert await store.count(RunFilter(status=("completed",))) == 11


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:UserWarning")
def test_a_store_can_be_used_on_both_sides_of_a_fork(server_backend: ServerBackend, shared_dsn: str) -> None:
    store = open_store(shared_dsn)

    async def begin() -> Lease:
        lease = await leased(store)
        await store.record(lease, [entry(1)])
        return lease

    async def work_in_child() -> None:
        async with asyncio.timeout(PATIENCE):
            await store.record(lease, [entry(2)])
            await store.create(new_run("child"))
            await store.close()

    async def work_in_parent() -> None:
        await store.record(lease, [entry(3)])
        await store.create(new_run("parent"))
        assert await store.journal("run") == [entry(seq) for seq in range(1, 4)]
        assert await store.count() == 3
        await store.close()

    lease = asyncio.run(begin())
    assert exit_code_of_fork(lambda: asyncio.run(work_in_child())) == 0
    asyncio.run(work_in_parent())


def exit_code_of_fork(work: Callable[[], None]) -> int:
    """The exit code of a forked child: 0 when its work raised nothing."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@with_counted_connections
@pytest.mark.parametrize("is_closed", [False, True], ids=["dropped", "closed"])
async def test_a_store_that_is_closed_or_only_dropped_gives_its_connections_back(
    server_backend: ServerBackend, dsn: str, is_closed: bool
) -> None:
    named = with_options(dsn, server_backend.client_name)
    assert server_backend.count_connections is not None
    store = await asyncio.to_thread(open_store, named)
    lease = await leased(store)
    await store.watch(1)  # opens a connection of its own where the server notifies of changes
    async with AsyncExitStack() as transactions:
        if "transaction" in store.capabilities:
            await transactions.enter_async_context(store.transaction(lease))
        assert await asyncio.to_thread(server_backend.count_connections, named) >= 2
    if is_closed:
        await store.close()
    del store, transactions
    async with asyncio.timeout(PATIENCE):
        while await asyncio.to_thread(server_backend.count_connections, named):
            gc.collect()  # the connections' thread may have kept a reference to the last verb for a moment longer
            await asyncio.sleep(0.02)


@with_lender
async def test_what_is_borrowed_is_used_on_its_loop_and_left_open(borrow: Callable[[], FullStore]) -> None:
    store = borrow()
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    lease = claim.lease
    await in_another_loop(lambda: store.record(lease, [entry(1)], now=NOW))
    sibling = store.sibling()
    assert sibling.key == store.key
    assert len(await in_another_loop(lambda: sibling.renew([lease], TTL, now=NOW))) == 1
    entries = [entry(1)]
    if "transaction" in store.capabilities:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(2)])
        entries.append(entry(2))
    await asyncio.wait_for(store.watch(0.01), PATIENCE)
    await sibling.close()
    await store.close()
    again = borrow()
    assert await again.journal("run") == entries
    await again.close()


@with_lender
async def test_a_loop_that_blocks_the_renewals_of_what_it_lent_is_reported(
    borrow: Callable[[], FullStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = borrow()
    lease = await leased(store)
    sibling = store.sibling()
    renewing = asyncio.create_task(in_another_loop(lambda: sibling.renew([lease], 0.3)))
    await asyncio.sleep(0)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # a step that computes
        pass
    assert await renewing != [None]
    assert re.search("event loop of the borrowed .* was blocked", caplog.text)
    await sibling.close()
    await store.close()


@on(POSTGRES, MYSQL, LIBSQL)
async def test_a_transaction_cancelled_while_it_begins_leaves_no_lock(store: FullStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    lease = claim.lease

    async def work() -> None:
        async with store.transaction(lease):
            await asyncio.sleep(60)

    for turns in range(30):
        task = asyncio.create_task(work())
        await asyncio.sleep(0.0005 * turns)
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(PATIENCE):
        assert await store.acquire("run", TTL, now=EXPIRED) is not None


@on(POSTGRES, MYSQL)
async def test_create_finds_a_run_without_waiting_for_an_open_transaction(store: FullStore) -> None:
    lease = await leased(store)
    async with asyncio.timeout(5), store.transaction(lease):
        assert not (await store.create(new_run())).is_new
