"""The registry of workers: each writes itself into the store now and then, so that others see it, and see when it stops.

A sign of life is one row, written once in three lengths of a lease, so a worker that drives nothing costs its store next to
nothing. It comes from the worker's own event loop, unlike the heartbeats that renew leases: a worker whose loop is blocked claims
no runs, and is silent here. A worker that has drained removes itself. One that was killed is shown as silent, and after an hour
any other removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from typing import Final

import msgspec

from perdure.aio.threads import run_in_thread
from perdure.errors import SnapshotCorrupt
from perdure.model.clock import elapsed
from perdure.model.durations import MICROSECOND, moment
from perdure.model.process_owner import Owners, current
from perdure.model.records import WorkerRow, WorkflowVersion
from perdure.store import OperatorStore, require
from perdure.worker.host import Host

# A worker that lives no longer, such as that of a script, does not write itself at all.
FIRST_AFTER: Final = 1.0
# The longest time between two signs of life, in seconds, however long leases are.
LONGEST_PAUSE: Final = 30.0
# After how many pauses without a sign of life a worker counts as silent.
SILENT_AFTER_PAUSES: Final = 2
# After how many seconds without a sign of life a worker is removed, and how often a worker looks for such.
REMOVED_AFTER: Final = 3600.0
# How long a worker that has drained tries to remove itself, in seconds.
_REMOVAL_PATIENCE: Final = 2.0


class _StoredWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of itself: the text that the store keeps and does not read."""

    name: str
    host: str
    pid: int
    started_at: int
    pause: float
    concurrency: int
    driven: int
    queues: tuple[str, ...] | None = None
    workflows: tuple[WorkflowVersion, ...] = ()
    # The process, as leases name it, so that others on its machine can find out that it has ended.
    process: str = ""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as `runtime.workers()` gives it.

    `driven` is how many runs it drove at its last sign of life, at `seen_at` by the store's clock. `is_silent`: it should have
    given another one since, so it has died, or its event loop is blocked, or it does not reach the store. `is_gone`: its process
    ran on this machine and has ended. `queues` is None for all of them; `workflows` has names with versions.
    """

    id: str
    name: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    is_silent: bool
    is_gone: bool
    concurrency: int
    driven: int
    queues: tuple[str, ...] | None
    workflows: tuple[WorkflowVersion, ...]

    @property
    def is_alive(self) -> bool:
        """Whether it is there, as far as its signs of life and its machine tell."""
        return not self.is_silent and not self.is_gone

    def takes(self, queue: str) -> bool:
        """Return whether it is alive and takes runs of this queue."""
        return self.is_alive and (self.queues is None or queue in self.queues)


class WorkerRegistration:
    """The entry of one worker in the registry of its store."""

    def __init__(self, host: Host, concurrency: int, queues: Collection[str] | None, count_driven: Callable[[], int]) -> None:
        hostname, pid = socket.gethostname(), os.getpid()
        self.name = f"{hostname}/{pid}"
        self._host = host
        self._id = f"{self.name}/{secrets.token_hex(4)}"  # a process may have several workers
        self._pause = min(3 * host.lease_ttl, LONGEST_PAUSE)
        self._count_driven = count_driven
        self._stored = _StoredWorker(
            name=self.name,
            host=hostname,
            pid=pid,
            started_at=host.clock.now(),
            pause=self._pause,
            concurrency=concurrency,
            driven=0,
            queues=None if queues is None else tuple(sorted(queues)),
            process=str(current()),
        )
        self._store: OperatorStore | None = None
        if "operators" in host.store.capabilities:
            self._store = require(host.store, "operators")
        self._task: asyncio.Task[None] | None = None
        self._is_written = False
        self._is_stopped = False
        self._looked_at: float | None = None

    def start(self) -> None:
        """Write signs of life from now on."""
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._write_repeatedly(self._store), name="perdure-registration")

    async def ensure(self) -> None:
        """Return when the worker has written itself, unless it has stopped."""
        if self._store is not None and not self._is_written and not self._is_stopped:
            await self._write(self._store)

    def stop(self) -> None:
        """Write no more."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def remove(self) -> None:
        """Remove the worker. If that fails, it is silent for a while, and then removed by another."""
        if self._task is not None:
            await asyncio.wait([self._task])  # it was stopped; a write that comes later would undo this
        if self._store is not None and self._is_written:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_REMOVAL_PATIENCE):
                    await self._store.drop_worker(self._id)

    async def _write_repeatedly(self, store: OperatorStore) -> None:
        await asyncio.sleep(min(FIRST_AFTER, self._pause))
        while True:
            with contextlib.suppress(Exception):  # the claims report a store that fails
                await self._write(store)
                await self._remove_the_dead(store)
            await asyncio.sleep(self._pause)

    async def _write(self, store: OperatorStore) -> None:
        self._is_written = True  # also if the reply is lost
        workflows = tuple(sorted(self._host.workflows))
        stored = msgspec.structs.replace(self._stored, driven=self._count_driven(), workflows=workflows)
        await store.put_worker(self._id, msgspec.json.encode(stored), now=self._host.clock.store_now())

    async def _remove_the_dead(self, store: OperatorStore) -> None:
        now = elapsed()
        if self._looked_at is not None and now - self._looked_at < REMOVED_AFTER:
            return
        self._looked_at = now
        await self._host.ask_time()
        last = self._host.clock.now() - round(REMOVED_AFTER * MICROSECOND)
        for row in await store.workers():
            if row.seen_at < last:
                await store.drop_worker(row.id)


async def list_workers(host: Host) -> list[WorkerInfo]:
    """The workers in the registry of the store, by name. Raises `SnapshotCorrupt`."""
    rows = await require(host.store, "operators").workers()
    await host.ask_time()
    infos = await run_in_thread(lambda: list(_infos(rows, host.clock.now())))
    return sorted(infos, key=lambda info: (info.name, info.started_at, info.id))


async def is_worker_known(host: Host) -> bool:
    """Return whether a worker has given a sign of life in this store lately. A store without a registry knows none."""
    return "operators" in host.store.capabilities and not all(info.is_silent for info in await list_workers(host))


def _infos(rows: Iterable[WorkerRow], now: int) -> Iterable[WorkerInfo]:
    """The workers, as these rows tell them. Reads of the system which of their processes have ended."""
    owners = Owners()
    for row in rows:
        try:
            stored = msgspec.json.decode(row.info, type=_StoredWorker)
        except (msgspec.MsgspecError, ValueError) as reason:
            raise SnapshotCorrupt(row.id, "the worker", str(reason)) from reason
        yield WorkerInfo(
            id=row.id,
            name=stored.name,
            host=stored.host,
            pid=stored.pid,
            started_at=moment(stored.started_at),
            seen_at=moment(row.seen_at),
            is_silent=now - row.seen_at > SILENT_AFTER_PAUSES * stored.pause * MICROSECOND,
            is_gone=owners.has_ended(stored.process),
            concurrency=stored.concurrency,
            driven=stored.driven,
            queues=stored.queues,
            workflows=stored.workflows,
        )
