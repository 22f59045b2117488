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

from perdure.backends.files import FilesStore, disk, log, threads
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Lease, NewRun, RunRow, Schedule, Signal

Job = Callable[..., Coroutine[Any, Any, None]]


def new_run(run_id: str, **columns: Any) -> NewRun:
    return NewRun(**{"id": run_id, "workflow": "flow", "input": b"[]", "input_hash": b"hash", "seed": b"seed", **columns})


def restored(run_id: str, **columns: Any) -> RunRow:
    given = {"status": "pending", "wake_at": 1, "created_at": 1, "updated_at": 1, **columns}
    return RunRow(**{**msgspec.structs.asdict(new_run(run_id)), **given})


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def wait_for_go() -> None:
    say("ready")
    sys.stdin.readline()


async def started(store: FilesStore, run_id: str, **columns: Any) -> Lease:
    claim = (await store.create(new_run(run_id, **columns), ttl=600)).claim
    assert claim is not None
    return claim.lease


def entry(seq: int) -> Entry:
    return Entry(seq=seq, key=f"step-{seq}", payload=b"%d" % seq * 500)


async def record(store: FilesStore, lease: Lease, seqs: range) -> None:
    for seq in seqs:
        await store.record(lease, [entry(seq)])


async def setup(path: str) -> None:
    wait_for_go()
    store = FilesStore(path)
    await store.setup()
    await store.close()


async def hold(path: str, run_id: str) -> None:
    """Hold a lease until killed."""
    store = FilesStore(path)
    await started(store, run_id)
    wait_for_go()


async def write(path: str, name: str, count: str) -> None:
    store = FilesStore(path)
    wait_for_go()
    leases = [await started(store, f"{name}-{n}") for n in range(4)]
    await asyncio.gather(*(record(store, lease, range(1, int(count) + 1)) for lease in leases))
    await store.close()


async def live(path: str) -> None:
    """Do all that changes something in one thread, and say each time what was acknowledged."""
    threads.THREADS = 1  # type: ignore[misc]  # so that the tenth call is the same one each time: strace counts by thread
    store = FilesStore(path)
    wait_for_go()
    await store.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    say("scheduled")
    parent = await started(store, "parent")
    say("created parent")
    child = await started(store, "child", parent_id="parent", parent_key="pay")
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
    await store.restore(restored("restored"), [entry(7)], [Signal(seq=3, name="go", payload=b"1")])
    say("restored")
    claims = await store.claim(10, 600, [("flow", 1)])
    say("claimed", *sorted(claim.run.id for claim in claims.claims))
    await store.delete("restored")
    say("deleted")
    await store.close()


async def stop_in_create(path: str) -> None:
    """Stand still where a new run's log is synced, with the run locked."""
    store = FilesStore(path)
    await store.setup()
    wait_for_go()

    def stop_first(fd: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        disk.sync(fd)

    vars(log)["sync"] = stop_first
    await store.create(new_run("stopped"))
    await store.close()


async def fail_to_sync(path: str, count: str) -> None:
    """Record one by one, going on after each failure with the same entry, and say how many failed."""
    store = FilesStore(path)
    lease = await started(store, "run")
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


async def _in_child(store: FilesStore, run_id: str) -> None:
    lease = await started(store, run_id)
    await record(store, lease, range(1, 21))
    await store.close()


def fork(path: str) -> None:
    """Fork while another thread writes; parent and child use the same store object afterwards."""
    store = FilesStore(path)
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
    _, status = os.waitpid(pid, 0)
    asyncio.run(store.close())
    say("child", os.waitstatus_to_exitcode(status))


JOBS: dict[str, Job] = {
    "setup": setup,
    "hold": hold,
    "write": write,
    "live": live,
    "stop_in_create": stop_in_create,
    "fail_to_sync": fail_to_sync,
}


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        fork(sys.argv[2])
    else:
        asyncio.run(JOBS[sys.argv[1]](*sys.argv[2:]))
