"""`runtime.health()`: whether this process can do its work, for probes of containers and load balancers.

It asks the store one cheap question, waits for the reply for a bounded time, and looks at the worker. It never raises: a probe
that fails with a traceback says less than one that says what is wrong. However often it is called, one question is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec

from perdure.aio.own_tasks import own_context
from perdure.model.durations import MICROSECOND
from perdure.store import Store
from perdure.worker.worker import Worker

# A worker with room for more runs claims at least every ten seconds; one that has not for so many seconds is stuck.
CLAIMS_WITHIN: Final = 30.0


class StoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """How long the store took to reply, and how far its clock is ahead of this machine's.

    The difference is zero when the time until the reply explains it.
    """

    seconds: float
    clock_ahead_seconds: float


class RuntimeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a runtime stands. `reasons` say why it is not `ok`.

    `reply_seconds` and `clock_ahead_seconds` are None when the store did not reply. `is_working`: this process has a worker that
    claims runs; a client has none, and is well without. `last_claim_at` is when the store last answered a claim of the worker.
    `not_undone` counts the runs that the worker stopped because their code cannot undo what they have done: a person has to help
    them, and they are no reason to restart the process.
    """

    ok: bool
    reasons: tuple[str, ...]
    store_reachable: bool
    reply_seconds: float | None
    clock_ahead_seconds: float | None
    is_working: bool
    last_claim_at: datetime | None
    driven: int
    concurrency: int
    not_undone: int


async def ask_store(store: Store) -> StoreReply:
    """Ask the store for its time, by a claim that takes nothing."""
    asked_at, started = time.time_ns() // 1000, time.perf_counter()
    store_time = (await store.claim(0, 1.0, ())).now
    took = time.perf_counter() - started
    received_at = asked_at + round(took * MICROSECOND)
    ahead = store_time - asked_at if store_time < asked_at else max(0, store_time - received_at)
    return StoreReply(seconds=round(took, 6), clock_ahead_seconds=ahead / MICROSECOND)


class HealthCheck:
    """The health of one runtime. `worker` gives the worker it has started last, and the task in which that works."""

    def __init__(self, store: Store, worker: Callable[[], tuple[Worker, asyncio.Task[None]] | None]) -> None:
        self._store = store
        self._worker = worker
        # The question that is under way, with the event loop on which it is.
        self._asking: asyncio.Task[StoreReply] | None = None

    async def check(self, concurrency: int, timeout: float, *, is_closed: bool) -> RuntimeHealth:
        """How the runtime stands. It takes hardly longer than `timeout` seconds."""
        reasons = ["this Runtime was closed"] if is_closed else []
        reply = None if is_closed else await self._ask(timeout, reasons)
        working = self._worker()
        worker = None if working is None else working[0]
        is_working = working is not None and self._examine(*working, reasons)
        return RuntimeHealth(
            ok=not reasons,
            reasons=tuple(reasons),
            store_reachable=reply is not None,
            reply_seconds=None if reply is None else reply.seconds,
            clock_ahead_seconds=None if reply is None else reply.clock_ahead_seconds,
            is_working=is_working,
            last_claim_at=None if worker is None else worker.last_claim_at,
            driven=0 if worker is None else worker.count_driven(),
            concurrency=concurrency,
            not_undone=0 if worker is None else len(worker.not_undone),
        )

    def close(self) -> None:
        """Give up a question that is under way."""
        if self._asking is not None and not self._asking.done():
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                self._asking.get_loop().call_soon_threadsafe(self._asking.cancel)

    async def _ask(self, timeout: float, reasons: list[str]) -> StoreReply | None:
        loop, asking = asyncio.get_running_loop(), self._asking
        if asking is None or asking.done() or asking.get_loop() is not loop:
            # A task of its own, which is not cancelled: a store may have to wait for a reply before it can give up.
            asking = self._asking = loop.create_task(ask_store(self._store), name="perdure-health", context=own_context())
            asking.add_done_callback(_retrieve_error)
        await asyncio.wait([asking], timeout=timeout)
        if not asking.done():
            reasons.append(f"the store did not reply within {timeout:g} s")
        elif asking.cancelled():
            reasons.append("the question to the store was cancelled")
        elif (error := asking.exception()) is not None:
            reasons.append(f"the store cannot be used: {error}")
        else:
            return asking.result()
        return None

    def _examine(self, worker: Worker, task: asyncio.Task[None], reasons: list[str]) -> bool:
        """Whether the worker claims runs; if not, the reason is added."""
        if task.done():
            error = None if task.cancelled() else task.exception()
            reasons.append("the worker has stopped" if error is None else f"the worker has ended: {error!r}")
            return False
        if worker.is_stopping:
            reasons.append("the worker drains")
            return False
        if (blockage := worker.describe_blockage()) is not None:
            reasons.append(f"the event loop of the worker has been blocked for {blockage}")
            return False
        since = worker.seconds_without_claim()
        if since > CLAIMS_WITHIN:
            reasons.append(
                f"the worker has not claimed for {since:.0f} s: the store refuses its claims, or its event loop was blocked"
            )
            return False
        return True


def _retrieve_error(asking: asyncio.Task[StoreReply]) -> None:
    """An error that comes after the last call has stopped waiting is no news: the worker reports it too."""
    if not asking.cancelled():
        asking.exception()
