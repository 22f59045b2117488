"""The program of processes that use a store on the disk: `python disk_child.py JOB DSN ...`.

It is for tests which need a child process of their own, to run it under strace or to leave it unreaped. After "ready" it waits
for a line on stdin.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from perdure import open_store
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Lease, RunRow, Schedule, Signal
from perdure.store import FullStore
from perdure.testing.contract.world import new_run, run_row

Job = Callable[..., Coroutine[Any, Any, None]]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def wait_for_go() -> None:
    say("ready")
    sys.stdin.readline()


async def create_leased(store: FullStore, run_id: str, **columns: Any) -> Lease:
    """The lease of a new run."""
    claim = (await store.create(new_run(run_id, **columns), ttl=600)).claim
    assert claim is not None
    return claim.lease


def pending_row(run_id: str, **columns: Any) -> RunRow:
    """The row of a run to restore, which is due."""
    return run_row(run_id, **{"wake_at": 1, "created_at": 1, "updated_at": 1, **columns})


def entry(seq: int) -> Entry:
    return Entry(seq=seq, key=f"step-{seq}", payload=b"%d" % seq * 500)


def journal(name: str) -> list[Entry]:
    """Ten entries of 3 kB."""
    return [Entry(seq=seq, key=f"{name}-{seq}", payload=b"x" * 3000) for seq in range(1, 11)]


def inbox(name: str) -> list[Signal]:
    """Five signals of 3 kB."""
    return [Signal(seq=seq, name=name, payload=b"x" * 3000) for seq in range(1, 6)]


async def record(store: FullStore, lease: Lease, seqs: range) -> None:
    """Record entries one by one."""
    for seq in seqs:
        await store.record(lease, [entry(seq)])


async def setup(dsn: str) -> None:
    wait_for_go()
    store = open_store(dsn)
    await store.setup()
    await store.close()


async def hold(dsn: str, run_id: str) -> None:
    """Hold a lease until killed."""
    store = open_store(dsn)
    await create_leased(store, run_id)
    wait_for_go()


async def write(dsn: str, name: str, count: str) -> None:
    """Create four runs and record so many entries in each, in all of them at once."""
    store = open_store(dsn)
    wait_for_go()
    leases = [await create_leased(store, f"{name}-{n}") for n in range(4)]
    await asyncio.gather(*(record(store, lease, range(1, int(count) + 1)) for lease in leases))
    await store.close()


async def create(dsn: str, run_id: str) -> None:
    store = open_store(dsn)
    await store.setup()
    wait_for_go()
    await store.create(new_run(run_id))
    await store.close()


async def create_and_restore(dsn: str) -> None:
    """Create a run with a journal, and replace another by a restored one."""
    store = open_store(dsn)
    wait_for_go()
    await store.create(new_run("created"), ttl=60, entries=journal("created"))
    await store.restore(pending_row("replaced", input=b"new"), journal("new"), inbox("new"))
    await store.close()


async def leave_open(dsn: str) -> None:
    """End without closing, while a watch, a reader and records are in flight."""
    store = open_store(dsn)
    lease = await create_leased(store, "run")
    await store.list()
    tasks = [asyncio.create_task(store.watch(60)), asyncio.create_task(record(store, lease, range(1, 1000)))]
    await asyncio.sleep(0)
    say(len(tasks))


async def fail_to_sync(dsn: str, count: str) -> None:
    """Record one by one, repeat each entry until it is acknowledged, and say how often that failed."""
    store = open_store(dsn)
    lease = await create_leased(store, "run")
    await store.list()
    failed = 0
    for seq in range(1, int(count) + 1):
        while True:
            try:
                await store.record(lease, [entry(seq)])
            except PersistenceError:
                failed += 1
            else:
                break
    say("failed", failed)
    await store.close()


async def write_everything(dsn: str) -> None:
    """Call every verb that writes to more than one run, in one thread, and say after each what was acknowledged."""
    from perdure.aio import threads
    from tests.backends.opening import store_at

    # So that the tenth call is the same one each time: strace counts by thread.
    vars(threads)["_file_threads"] = threads.ThreadPool("perdure-io", 1)
    async with store_at(dsn) as store:
        wait_for_go()
        await _write_everything(store)


async def _write_everything(store: FullStore) -> None:
    await store.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    say("scheduled")
    parent = await create_leased(store, "parent")
    say("created parent")
    child = await create_leased(store, "child", parent_id="parent", parent_key="pay")
    say("created child")
    for seq in range(1, 4):
        await store.record(child, [entry(seq)])
        say("recorded", seq)
    await store.suspend(parent, wake_at=None, waiting_for=[Awaited("child", "pay")])
    say("suspended parent")
    await store.signal("child", "go", b"1", dedupe="d")
    say("signalled")
    await store.finish(child, "completed", b"2", entries=[entry(4)], consume=[1])
    say("finished child")
    await store.fire("daily", expected_at=1, next_at=2, run=new_run("fired"))
    say("fired")
    await store.restore(pending_row("restored"), [entry(7)], [Signal(seq=3, name="go", payload=b"1")])
    say("restored")
    claims = await store.claim(10, 600, [("flow", 1)])
    say("claimed", *sorted(claim.run.id for claim in claims.claims))
    await store.delete("restored")
    say("deleted")


def fork(dsn: str) -> None:
    """Fork while another thread writes; parent and child use the same store object afterwards."""
    store = open_store(dsn)
    lease = asyncio.run(create_leased(store, "before"))
    writing = threading.Thread(target=lambda: asyncio.run(record(store, lease, range(1, 201))))
    writing.start()
    pid = os.fork()
    if pid == 0:
        exit_after(lambda: asyncio.run(_write_in_child(store)))
    writing.join()
    asyncio.run(record(store, lease, range(201, 211)))
    asyncio.run(store.close())  # the parent's last connection must not take SQLite's log away from the child
    say("parent closed")
    _, status = os.waitpid(pid, 0)
    say("child", os.waitstatus_to_exitcode(status))


def exit_after(work: Callable[[], object]) -> None:
    """End a forked child after this work, with 0 if it raised nothing."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


async def _write_in_child(store: FullStore) -> None:
    lease = await create_leased(store, "child")
    await record(store, lease, range(1, 21))
    wait_for_go()
    await record(store, lease, range(21, 41))
    await store.close()


def fork_in_transaction(dsn: str) -> None:
    """Fork while a transaction on SQLite is open: the child must refuse to touch the file."""
    store = open_store(dsn)
    lease = asyncio.run(create_leased(store, "run"))
    os.waitpid(asyncio.run(_fork_in_transaction(store, lease)), 0)
    say("parent committed", len(asyncio.run(store.journal("run"))))


async def _fork_in_transaction(store: FullStore, lease: Lease) -> int:
    async with store.transaction(lease) as transaction:
        await transaction.record([Entry(seq=1, key="step")])
        pid = os.fork()
        if pid == 0:
            exit_after(lambda: _use_in_child(store))
        return pid


def _use_in_child(store: FullStore) -> None:
    from perdure.backends.sqlite import connection_thread

    say("child keeps", sum(connection is not None for connection in connection_thread._left_behind))
    thread = threading.Thread(target=lambda: asyncio.run(_expect_refusal(store)))  # this one has the parent's loop running
    thread.start()
    thread.join()


async def _expect_refusal(store: FullStore) -> None:
    try:
        await store.count()
    except PersistenceError:
        say("child refused")


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        setup, hold, write, create, create_and_restore, leave_open, fail_to_sync, write_everything,
    )
}  # fmt: skip
FORKING_JOBS: dict[str, Callable[[str], None]] = {"fork": fork, "fork_in_transaction": fork_in_transaction}

if __name__ == "__main__":
    signal.alarm(120)  # nothing here outlives a test
    name, *arguments = sys.argv[1:]
    if name in FORKING_JOBS:
        FORKING_JOBS[name](*arguments)
    else:
        asyncio.run(JOBS[name](*arguments))
