"""The processes of the campaign on patterns: a worker that kills itself at a store call, and one that takes over from it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import perdure.context
from perdure import Run, Runtime
from perdure.ctx_calls.step_calls import StepCall, run_step
from perdure.engine.drive import Drive
from perdure.model.journal import Entry
from perdure.store import FullStore, Transaction
from tests.backends import patterns
from tests.backends.opening import store_at
from tests.backends.patterns import EffectLedger, Pattern, ProcessLedger
from tests.backends.processes import ParentPipe
from tests.backends.skewed import SkewedStore

# No worker loses its lease while it lives, however busy the machine is. The one that takes over does not wait for its end either:
# it has a clock that is so much ahead.
LEASE_TTL: Final = 60.0
# What is no verb, or sends nothing.
NOT_COUNTED: Final = frozenset({"close", "sibling", "setup", "watch"})
# What changes nothing, or may have nothing to change, called as often as a worker happens to look. Counted apart from what is
# written for each run, so that the n-th write of a run is the same one in every run-through.
LOOKS: Final = frozenset(
    {"claim", "get", "list", "count", "due", "journal", "inbox", "items", "schedules", "queue_limits", "workers", "put_worker"}
)


class KillPoint(NamedTuple):
    """The n-th call that writes for this run, or, where `run` is empty, the n-th of all others.

    The process dies just before the call, or when it has taken effect and the reply is still to come.
    """

    n: int
    run: str
    after: bool

    def __str__(self) -> str:
        of_run = f"for run {self.run}" if self.run else "for no run"
        return f"{'after' if self.after else 'before'} call {self.n} {of_run}"


class Place(NamedTuple):
    """Where a pattern is run through once."""

    dsn: str
    ledger: Path


class NotingStore:
    """A store that notes in a ledger which results it holds. At one of its calls the process kills itself."""

    def __init__(self, store: Any, ledger: EffectLedger, dies_at: KillPoint | None = None) -> None:
        self._store = store
        self._ledger = ledger
        self._dies_at = dies_at
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method) or name in NOT_COUNTED:
            return method
        if name == "transaction":
            return lambda lease: self._transaction(lease.run_id, method(lease))
        is_look = name in LOOKS

        def call(*args: Any, **options: Any) -> Any:
            return self._call("" if is_look else _run_of(args), name, method, args, options)

        return call

    def _call(
        self, run: str, name: str, method: Callable[..., Awaitable[Any]], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        is_last = self._count(run, name)
        reply = method(*args, **options)

        async def wait() -> Any:
            received = await reply
            self._note_effect(name, args, options)
            if is_last:
                self._die(name)
            return received

        return wait()

    def _count(self, run: str, name: str) -> bool:
        """Whether the process is to die after this call; it dies here if that is before it."""
        point = self._dies_at
        if point is None or point.run != run:
            return False
        self._calls += 1
        if self._calls == point.n + 1 and not point.after:
            self._die(name)
        return self._calls == point.n + 1

    def _die(self, name: str) -> None:
        self._ledger.note("killed", "", name)
        os.kill(os.getpid(), signal.SIGKILL)

    def _note_effect(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name == "reopen":
            self._ledger.note("reopened", args[0])
        elif name in ("record", "suspend", "finish"):
            entries = args[1] if name == "record" and len(args) > 1 else options.get("entries", ())
            self.note_entries(args[0].run_id, entries)

    def note_entries(self, run_id: str, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.kind == "step" and entry.phase == "close":
                self._ledger.note("recorded" if entry.ok else "failed", run_id, entry.key)

    @asynccontextmanager
    async def _transaction(self, run_id: str, entered: AbstractAsyncContextManager[Transaction]) -> AsyncIterator[Any]:
        """A transaction whose statements are calls too, and its begin and its end."""
        is_last = self._count(run_id, "begin")
        recorded: list[Entry] = []
        async with entered as transaction:
            if is_last:
                self._die("begin")
            yield _CountedTransaction(transaction, partial(self._call, run_id), recorded)
            is_last = self._count(run_id, "commit")
        self.note_entries(run_id, recorded)
        if is_last:
            self._die("commit")


def _run_of(args: tuple[Any, ...]) -> str:
    """The run that a verb writes for: it is given first, as an id, a lease or a new run. Empty if there is none."""
    first = args[0] if args else ""
    return first if isinstance(first, str) else getattr(first, "run_id", "") or getattr(first, "id", "")


class _CountedTransaction:
    """A transaction whose verbs are calls of the store."""

    def __init__(self, transaction: Transaction, call: Callable[..., Any], recorded: list[Entry]) -> None:
        self._transaction = transaction
        self._call = call
        self._recorded = recorded

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transaction, name)
        if name not in ("execute", "record"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if name == "record":
                self._recorded += args[0] if args else options["entries"]
            return self._call(f"transaction.{name}", found, args, options)

        return call


async def _run_noted_step(drive: Drive, step: StepCall) -> Any:
    """As `run_step`, and the ledger says that the body has the result."""
    assert ProcessLedger.current is not None
    try:
        result = await run_step(drive, step)
    except Exception:
        ProcessLedger.current.note("failed", drive.run.id, step.key)
        raise
    ProcessLedger.current.note("returned", drive.run.id, step.key)
    return result


def _prepare(name: str, ledger: EffectLedger) -> Any:
    """The pattern, whose steps write to this ledger."""
    logging.getLogger("perdure").setLevel(logging.ERROR)  # it would warn of runs that fail, and of a clock that is ahead
    perdure.context.run_step = _run_noted_step  # type: ignore[attr-defined]  # no public name is called for every step
    ProcessLedger.current = ledger
    return import_module(f"{patterns.__name__}.{name}")


def _runtime(pattern: Pattern, store: Any) -> Runtime:
    options: dict[str, Any] = dict(getattr(pattern, "OPTIONS", {}))
    return Runtime(store, pattern.WORKFLOWS, lease_ttl=LEASE_TTL, unload_grace="10ms", **options)


async def _wait_for_end(runtime: Runtime, runs: Sequence[Run[Any]]) -> None:
    """Return when these runs have ended, whatever their outcomes, and with them all others."""
    await asyncio.gather(*runs, return_exceptions=True)
    while left := [info for info in await runtime.list(limit=1000) if info.status in ("pending", "running", "suspended")]:
        for info in left:
            run = await runtime.get(info.id)
            assert run is not None
            await asyncio.gather(run, return_exceptions=True)


async def work_until_killed(parent: ParentPipe, name: str, place: Place, dies_at: KillPoint | None) -> None:
    """Run through the pattern, or be killed on the way."""
    ledger = EffectLedger(place.ledger, "mortal")
    pattern = _prepare(name, ledger)
    async with store_at(place.dsn) as store:
        await store.setup()
        async with _runtime(pattern, NotingStore(store, ledger, dies_at)) as runtime:
            await _wait_for_end(runtime, await pattern.start(runtime, ledger))


async def take_over(parent: ParentPipe, name: str) -> None:
    """In each place that the test names, do what goes on meanwhile, and when told so, work until everything has ended.

    The answer is how each run ended.
    """
    while (place := await parent.receive()) is not None:
        ledger = EffectLedger(place.ledger, "survivor")
        pattern = _prepare(name, ledger)
        async with store_at(place.dsn) as store:
            await store.setup()
            client = Runtime(store, pattern.WORKFLOWS, concurrency=0)
            meanwhile = getattr(pattern, "meanwhile", None)
            other = None if meanwhile is None else asyncio.create_task(meanwhile(client))
            parent.send("ready")
            await parent.receive()
            ahead = SkewedStore(store, LEASE_TTL + 1)
            async with _runtime(pattern, NotingStore(ahead, ledger)) as runtime:
                runs = await pattern.start(runtime, ledger)
                if other is not None:
                    await other
                await _wait_for_end(runtime, runs)
                await pattern.check(runtime, ledger)
            parent.send(await _ends(store))
            await client.close()
        ledger.close()


async def _ends(store: FullStore) -> dict[str, tuple[str, str]]:
    """How each run ended, by its id: the status, and the value or the error."""
    lines = await store.list(limit=1000)
    rows = [(line, await store.get(line.id)) for line in lines]
    return {line.id: (line.status, line.error or str(row and row.outcome)) for line, row in rows}
