"""A store as one process sees it. It dawdles, notes what was accepted, and refuses everything once its process is dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import LeaseLost, StoreClosed
from perdure.model.journal import Entry
from perdure.model.records import Claims, Created, Lease
from perdure.testing.counted_store import UNCOUNTED, CountedStore

if TYPE_CHECKING:
    from tests.fuzz.process import Process
    from tests.fuzz.world import World

# The verbs after which a process may be lost: they change a run.
_WRITES: Final = frozenset({"create", "record", "suspend", "finish", "continue_as", "release"})
# How often a signal is accepted between a record and its reply.
_SENT_BEFORE_REPLY: Final = 0.1


class MortalStore(CountedStore):
    """The store of one process. Two of them never share a drive, although they share the database."""

    def __init__(self, store: Any, process: Process) -> None:
        super().__init__(store)
        self._process = process

    @property
    def key(self) -> tuple[str, ...]:
        return (*self.inner.key, f"process {self._process.name}")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name == "watch":
            return self._watch
        if not callable(found) or name in UNCOUNTED:
            return found
        if name == "transaction":
            return lambda lease, **options: self._transaction(lease, lambda: found(lease, **options))
        return lambda *args, **options: self._call(name, found, args, options)

    async def _watch(self, *args: Any, **options: Any) -> None:
        self._refuse_if_dead(None)
        await self.inner.watch(*args, **options)
        self._refuse_if_dead(None)

    async def _call(self, verb: str, method: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        lease = args[0] if args and isinstance(args[0], Lease) else None
        is_write = verb in _WRITES
        self._refuse_if_dead(lease)
        if is_write:
            await self._dawdle()
        entries: Sequence[Entry] = options.get("entries") or (args[1] if verb == "record" and len(args) > 1 else ())
        is_last = lease is not None and self._process.dies_at(lease.run_id, verb, entries)
        if is_last and not self._process.dies_after:
            self._process.die()
        self._refuse_if_dead(lease)
        self.calls += 1
        self.in_flight += 1
        try:
            reply = await method(*args, **options)
        finally:
            self.in_flight -= 1
        self._note(verb, lease, args, options, entries, reply)
        if verb == "record" and lease is not None and self._process.world.rng.random() < _SENT_BEFORE_REPLY:
            await self._process.send_before_reply(lease.run_id)
        if is_last:
            self._process.die()
        if is_write:
            await self._dawdle()
        self._refuse_if_dead(lease)
        return reply

    def _note(
        self, verb: str, lease: Lease | None, args: tuple[Any, ...], options: dict[str, Any], entries: Sequence[Entry], reply: Any
    ) -> None:
        world, process = self._process.world, self._process
        if isinstance(reply, Created):
            world.tell("created", reply.run.id)
            process.hold(reply.claim)
        elif isinstance(reply, Claims):
            for claim in reply.claims:
                process.hold(claim)
        elif verb == "acquire":
            process.hold(reply)
        if lease is None:
            return
        world.accept(lease.run_id, entries, options.get("consume", ()))
        match verb:
            case "suspend" if not reply:
                process.leave(lease)
            case "finish":
                world.tell("ended", lease.run_id, args[1])
                process.leave(lease)
            case "continue_as":
                world.tell("started_over", lease.run_id)
                process.leave(lease)
            case "release":
                process.release(lease, options.get("problem"))

    @contextlib.asynccontextmanager
    async def _transaction(self, lease: Lease, enter: Any) -> AsyncIterator[Any]:
        self._refuse_if_dead(lease)
        entered: AbstractAsyncContextManager[Any] = enter()
        noticed: list[Entry] = []
        consumed: list[int] = []
        async with entered as transaction:
            yield _NoticedTransaction(transaction, noticed, consumed)
            self._refuse_if_dead(lease)
        self._process.world.accept(lease.run_id, noticed, consumed)
        self._refuse_if_dead(lease)

    async def _dawdle(self) -> None:
        """Take a little while, or a turn of the loop, or no time at all."""
        pause = self._process.world.rng.choice((None, None, 0.0, 0.0, 0.0005, 0.002))
        if pause is not None:
            await asyncio.sleep(pause)

    def _refuse_if_dead(self, lease: Lease | None) -> None:
        if not self._process.is_dead:
            return
        if lease is not None:
            raise LeaseLost(lease.run_id, lease.epoch)
        raise StoreClosed("fuzz", "this process is dead")


class _NoticedTransaction:
    """A transaction whose records are noticed."""

    def __init__(self, transaction: Any, noticed: list[Entry], consumed: list[int]) -> None:
        self._transaction = transaction
        self._noticed = noticed
        self._consumed = consumed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Any] = ()) -> Any:
        reply = await self._transaction.record(entries, consume, items)
        self._noticed += entries
        self._consumed += consume
        return reply


class ClientStore(CountedStore):
    """A store as clients see it: it notes the signals that it has accepted."""

    def __init__(self, store: Any, world: World) -> None:
        super().__init__(store)
        self._world = world

    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        # A step that sends a signal may be cancelled meanwhile, and the signal is accepted all the same.
        sending = asyncio.ensure_future(self._signal(run_id, name, payload, options))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(sending)

    async def _signal(self, run_id: str, name: str, payload: bytes, options: dict[str, Any]) -> int:
        seq: int = await self.inner.signal(run_id, name, payload, **options)
        if not name.startswith("perdure:"):
            self._world.tell("sent", run_id, seq, name, payload.decode().strip('"'))
        return seq
