"""A process of its own for the tests beside it: `python child.py JOB PATH ...`. After "ready" it waits for a line on stdin."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from perdure.backends.sqlite import SQLiteStore, connection_thread
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Lease, NewRun, RunRow, Signal

Job = Callable[..., Coroutine[Any, Any, None]]


def new_run(run_id: str) -> NewRun:
    return NewRun(id=run_id, workflow="flow", input=b"[]", input_hash=b"hash", seed=b"seed")


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_for_go() -> None:
    say("ready")
    sys.stdin.readline()


async def started(store: SQLiteStore, run_id: str) -> Lease:
    claim = (await store.create(new_run(run_id), ttl=600)).claim
    assert claim is not None
    return claim.lease


async def record(store: SQLiteStore, lease: Lease, seqs: range) -> None:
    for seq in seqs:
        await store.record(lease, [Entry(seq=seq, key=f"step-{seq}", epoch=lease.epoch)])


async def setup(path: str) -> None:
    wait_for_go()
    store = SQLiteStore(path)
    await store.setup()
    await store.close()


async def hold(path: str, run_id: str) -> None:
    """Hold a lease until killed."""
    store = SQLiteStore(path)
    await started(store, run_id)
    wait_for_go()


async def write(path: str, name: str, count: str) -> None:
    store = SQLiteStore(path)
    wait_for_go()
    leases = [await started(store, f"{name}-{n}") for n in range(4)]
    await asyncio.gather(*(record(store, lease, range(1, int(count) + 1)) for lease in leases))
    await store.close()


async def create(path: str, run_id: str) -> None:
    store = SQLiteStore(path)
    await store.setup()
    wait_for_go()
    await store.create(new_run(run_id))
    await store.close()


def restored(run_id: str, **columns: Any) -> RunRow:
    given = {"status": "pending", "wake_at": 1, "created_at": 1, "updated_at": 1, **columns}
    return RunRow(**{**msgspec.structs.asdict(new_run(run_id)), **given})


def journal(name: str) -> list[Entry]:
    return [Entry(seq=seq, key=f"{name}-{seq}", payload=b"x" * 3000) for seq in range(1, 11)]


def inbox(name: str) -> list[Signal]:
    return [Signal(seq=seq, name=name, payload=b"x" * 3000) for seq in range(1, 6)]


async def begin(path: str) -> None:
    """Create a run with a journal, and put a whole one in place of another."""
    store = SQLiteStore(path)
    wait_for_go()
    await store.create(new_run("begun"), ttl=60, entries=journal("begun"))
    await store.restore(restored("replaced", input=b"new"), journal("new"), inbox("new"))
    await store.close()


async def leave_open(path: str) -> None:
    """End without closing, with a watch, a reader and records under way."""
    store = SQLiteStore(path)
    lease = await started(store, "run")
    await store.list()
    tasks = [asyncio.create_task(store.watch(60)), asyncio.create_task(record(store, lease, range(1, 1000)))]
    await asyncio.sleep(0)
    say(len(tasks))


async def fail_to_sync(path: str, count: str) -> None:
    """Record one by one, going on after each failure with the same entry, and say what was acknowledged and what failed."""
    store = SQLiteStore(path)
    lease = await started(store, "run")
    await store.list()
    failed = 0
    for seq in range(1, int(count) + 1):
        while True:
            try:
                await record(store, lease, range(seq, seq + 1))
            except PersistenceError:
                failed += 1
            else:
                break
    say("failed", failed)
    await store.close()


async def _in_child(store: SQLiteStore, run_id: str) -> None:
    lease = await started(store, run_id)
    await record(store, lease, range(1, 21))
    wait_for_go()
    await record(store, lease, range(21, 41))
    await store.close()


def fork(path: str) -> None:
    """Fork while another thread writes; parent and child use the same store object afterwards."""
    store = SQLiteStore(path)
    lease = asyncio.run(started(store, "before"))
    writing = threading.Thread(target=lambda: asyncio.run(record(store, lease, range(1, 201))))
    writing.start()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(_in_child(store, "child"))
            code = 0
        finally:
            os._exit(code)
    writing.join()
    asyncio.run(record(store, lease, range(201, 211)))
    asyncio.run(store.close())  # the parent's last connection must not take the log away from the child
    say("parent closed")
    _, status = os.waitpid(pid, 0)
    say("child", os.waitstatus_to_exitcode(status))


async def _forked_in_transaction(store: SQLiteStore, lease: Lease) -> int:
    async with store.transaction(lease) as transaction:
        await transaction.record([Entry(seq=1, key="step")])
        return _forked(store)


def _forked(store: SQLiteStore) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            say("child keeps", sum(connection is not None for connection in connection_thread._left_behind))
            thread = threading.Thread(target=lambda: asyncio.run(_refused(store)))  # this one has the parent's loop running
            thread.start()
            thread.join()
            code = 0
        finally:
            os._exit(code)
    return pid


async def _refused(store: SQLiteStore) -> None:
    try:
        await store.count()
    except PersistenceError:
        say("child refused")


def fork_in_transaction(path: str) -> None:
    """Fork while a transaction is open: the child must refuse to touch the file."""
    store = SQLiteStore(path)
    lease = asyncio.run(started(store, "run"))
    os.waitpid(asyncio.run(_forked_in_transaction(store, lease)), 0)
    say("parent committed", len(asyncio.run(store.journal("run"))))


JOBS: dict[str, Job] = {
    "setup": setup,
    "hold": hold,
    "write": write,
    "create": create,
    "begin": begin,
    "leave_open": leave_open,
    "fail_to_sync": fail_to_sync,
}
FORKING: dict[str, Callable[[str], None]] = {"fork": fork, "fork_in_transaction": fork_in_transaction}

if __name__ == "__main__":
    signal.alarm(120)  # nothing here outlives a test
    name, *arguments = sys.argv[1:]
    if name in FORKING:
        FORKING[name](*arguments)
    else:
        asyncio.run(JOBS[name](*arguments))
