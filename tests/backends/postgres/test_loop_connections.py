"""Connections on the loops that write much: when there are some, and that they go with the loop, the store or the process."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.base.loop_connections import WRITES_BEFORE
from perdure.backends.postgres import PostgresStore
from perdure.model.records import Lease
from perdure.testing.contract.world import TTL, entry, in_another_loop, new_run


@pytest.fixture
def named(dsn: str) -> str:
    """A DSN under whose name nobody else connects."""
    return f"{dsn}&application_name=loop_connections-{os.getpid()}-{time.monotonic_ns()}"


async def connections(dsn: str) -> int:
    """How many there are by this DSN."""
    connection = await asyncpg.connect(dsn)
    number = await connection.fetchval(
        "SELECT count(*) - 1 FROM pg_stat_activity WHERE application_name = current_setting('application_name')"
    )
    await connection.close()
    return int(number)


async def none_left(dsn: str) -> None:
    async with asyncio.timeout(60):
        while await connections(dsn):  # the server knows it, and tells nobody
            gc.collect()
            await asyncio.sleep(0.02)


async def leased(store: PostgresStore) -> Lease:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


async def test_a_loop_that_writes_much_gets_a_connection(store: PostgresStore) -> None:
    lease = await leased(store)
    for seq in range(1, WRITES_BEFORE):
        await store.record(lease, [entry(seq)])
    await store._loop_connections.open_here()  # returns when it is open
    sent = store._batchers.records.statements
    for seq in range(WRITES_BEFORE, 2 * WRITES_BEFORE):
        await store.record(lease, [entry(seq)])
    assert store._batchers.records.statements == sent, "none went to the connections loop any more"
    assert len(await store.journal("run")) == 2 * WRITES_BEFORE - 1


async def test_a_loop_that_writes_a_little_gets_none(named: str) -> None:
    store = PostgresStore(named)
    lease = await leased(store)
    for seq in range(1, WRITES_BEFORE - 1):
        await store.record(lease, [entry(seq)])
    assert await connections(named) == 1
    await store.close()


async def test_another_loop_is_not_given_what_belongs_to_this_one(store: PostgresStore) -> None:
    lease = await leased(store)
    await store._loop_connections.open_here()
    await in_another_loop(lambda: store.record(lease, [entry(1)]))
    await store.record(lease, [entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]


async def test_a_blocked_loop_does_not_keep_leases_from_being_renewed(store: PostgresStore) -> None:
    lease = await leased(store)
    await store._loop_connections.open_here()
    recording = store.record(lease, [entry(1)])
    renewed = threading.Event()

    def renew() -> None:
        asyncio.run(_renew(store, lease))
        renewed.set()

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not renewed.is_set() and time.monotonic() < deadline:  # a step that computes, on the loop that has the loop_pool
        pass
    assert renewed.is_set()
    await recording


async def _renew(store: PostgresStore, lease: Lease) -> None:
    assert await store.renew([lease], TTL) != [None]


def test_the_connections_of_a_loop_go_with_it(named: str) -> None:
    store = PostgresStore(named)
    asyncio.run(_open_and_write(store, 1))
    assert asyncio.run(connections(named)) == 1, "that of the connections loop"
    asyncio.run(_open_and_write(store, 2))  # and another loop gets another
    asyncio.run(store.close())
    asyncio.run(none_left(named))


async def _open_and_write(store: PostgresStore, seq: int) -> None:
    claim = (await store.create(new_run(f"run-{seq}"), ttl=TTL)).claim
    assert claim is not None
    await store._loop_connections.open_here()
    assert store._loop_connections.here() is not None
    await store.record(claim.lease, [entry(seq)])


async def test_closing_the_store_closes_them_on_their_loops(named: str) -> None:
    store = PostgresStore(named)
    await store.setup()
    is_open, is_closed = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        await _open_and_write(store, 1)
        is_open.set()
        assert await asyncio.to_thread(is_closed.wait, 60)

    thread = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(elsewhere())))
    assert await asyncio.to_thread(is_open.wait, 60)
    await store._loop_connections.open_here()
    await store.close()
    await none_left(named)
    is_closed.set()
    await thread


async def test_a_dropped_store_gives_them_back(named: str) -> None:
    store = PostgresStore(named)
    await _open_and_write(store, 1)
    assert await connections(named) == 2
    del store
    await none_left(named)


async def test_where_there_is_no_connection_to_be_had_the_home_loop_does_it(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await leased(store)

    async def refused(_: object) -> None:
        raise asyncpg.TooManyConnectionsError("sorry, too many clients already")

    monkeypatch.setattr("perdure.backends.postgres.connections.PostgresConnections.loop_pool", refused)
    with caplog.at_level("INFO", "perdure"):
        for seq in range(1, 3 * WRITES_BEFORE):
            await store.record(lease, [entry(seq)])
    assert len(await store.journal("run")) == 3 * WRITES_BEFORE - 1
    assert caplog.text.count("too many clients") == 1


def test_what_was_sent_is_answered_when_the_loop_is_shut_down(dsn: str) -> None:
    store = PostgresStore(dsn)

    async def leave_in_the_middle() -> None:
        lease = await leased(store)
        await store._loop_connections.open_here()

        async def record() -> None:
            await store.record(lease, [entry(1)])

        asyncio.get_running_loop().create_task(record())
        await asyncio.sleep(0)  # it has asked, and the loop is shut down with the statement under way
        await asyncio.sleep(0)

    async def look() -> list[int]:
        lines = await store.journal("run")
        await store.close()
        return [line.seq for line in lines]

    asyncio.run(leave_in_the_middle())
    assert asyncio.run(look()) == [1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_forked_child_has_its_own(store: PostgresStore) -> None:
    lease = await leased(store)
    await store._loop_connections.open_here()
    child = os.fork()
    if child == 0:
        os._exit(_exit_code(store, lease))
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await store.record(lease, [entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]


def _exit_code(store: PostgresStore, lease: Lease) -> int:
    """In a thread, as this one still runs the parent's loop."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(_record(store, lease))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return len(failed) + thread.is_alive()


async def _record(store: PostgresStore, lease: Lease) -> None:
    await store.record(lease, [entry(1)])
    await store.close()


_INTERRUPTED = """
import asyncio, signal, sys
from perdure import Context, workflow, stores

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background may have it ignored

async def work(n: int) -> int:
    return n

@workflow
async def long(ctx: Context) -> int:
    for n in range(100_000):
        await ctx.step(work, n, key=str(n))
        if n == 200:
            print("under way", flush=True)
    return 0

async def main() -> None:
    store = stores.postgres(sys.argv[1])
    try:
        await long.run(id="long", store=store)
    finally:
        await store.close()

asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "interrupted.py"
    path.write_text(_INTERRUPTED, encoding="utf-8")
    return path


def test_an_interrupt_gives_the_run_back_and_says_nothing_of_connections(dsn: str, program: Path) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", str(program), dsn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert "KeyboardInterrupt" in said
    assert "Warning" not in said
    assert asyncio.run(_status(dsn)) == "pending", "and not waiting for its lease to expire"


async def _status(dsn: str) -> str:
    store = PostgresStore(dsn)
    run = await store.get("long")
    await store.close()
    assert run is not None
    return run.status
