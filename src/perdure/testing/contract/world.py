"""The world of a case: one fresh database, two handles on it, and a clock that stands still until the case moves it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar, cast

import msgspec

from perdure.backends.base.process_owner import label_of
from perdure.errors import LeaseHeld, PersistenceError, StoreCapabilityError
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, EndStatus, Item, Lease, NewInput, NewRun, RunRow, Schedule
from perdure.store import MISSING_PART, Capability, FullStore, Store, require

T = TypeVar("T")

# Later than today, so that a store which goes by its own clock in spite of `now=` fails.
NOW: Final = 2_000_000_000 * MICROSECOND
TTL: Final = 10.0
# By how many turns of the event loop one of two racing calls is delayed, at most.
STAGGER: Final = 6


def at(seconds: float) -> int:
    """The instant this many seconds after `NOW`."""
    return NOW + round(seconds * MICROSECOND)


EXPIRED: Final = at(TTL + 1)


def new_run(run_id: str = "run", **columns: Any) -> NewRun:
    """A run of workflow `flow`, unless the columns say otherwise."""
    return NewRun(**{"id": run_id, "workflow": "flow", "input": b"[]", "input_hash": b"hash", "seed": b"seed", **columns})


def new_input(number: int = 1, **columns: Any) -> NewInput:
    """What a run starts over with, the number `number`, unless the columns say otherwise."""
    given = {"input": b"[%d]" % number, "input_hash": b"hash-%d" % number, "seed": b"seed-%d" % number, **columns}
    return NewInput(**given)


def run_row(run_id: str = "run", **columns: Any) -> RunRow:
    """The row of a pending run as another store might have had it, unless the columns say otherwise."""
    given = {"status": "pending", "wake_at": NOW, "created_at": at(-500), "updated_at": at(-400), **columns}
    return RunRow(**{**msgspec.structs.asdict(new_run(run_id)), **given})


def entry(seq: int, key: str = "", **fields: Any) -> Entry:
    """A closed step, its key made from its seq unless given."""
    return Entry(**{"seq": seq, "key": key or f"step-{seq}", "payload": b"%d" % seq, **fields})


def signals(*names: str) -> list[Awaited]:
    """What to pass as `waiting_for` for these signals."""
    return [Awaited("signal", name) for name in names]


ITEM: Final = Item(stream="log", n=0, payload=b"0")
SCHEDULE: Final = Schedule(id="daily", workflow="flow", spec="0 9 * * *", input=b"[]", next_at=NOW)


class StoreFactory(ABC):
    """One fresh database. The suite makes one for each case, opens handles on it, and closes those handles itself.

    Where making one takes long, a namespace of its own will do: put a unique prefix before the one given to `open`.
    It takes no arguments, and keeps what it needs to reach the database (a path, a DSN) but no open store: for a `shared` store
    it is pickled and sent to other processes, so its class must then be importable by name.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    # How many bytes a value may have, for a store that takes less than the engine may give it (9 MiB), or not much more.
    longest_value: ClassVar[int | None] = None

    @abstractmethod
    async def open(self, prefix: str = "") -> Store:
        """Another handle on this database, in the namespace `prefix`; two handles act like two processes."""

    async def restart(self) -> None:  # noqa: B027 - a database that outlives its handles has nothing to do here
        """What is left to do for a process restart, once every handle is closed: the next `open` reads what is on disk."""

    async def close(self) -> None:  # noqa: B027 - a database may have nothing to remove
        """Remove the database, once every handle is closed."""


@dataclass(slots=True)
class World:
    """`a` and `b` are two handles on one database, which stand for two processes. Here they have the verbs of the core."""

    factory: StoreFactory
    handles: list[Store] = field(default_factory=list)
    factories: list[StoreFactory] = field(default_factory=list)

    @property
    def a(self) -> Store:
        return self.handles[0]

    @property
    def b(self) -> Store:
        return self.handles[1]

    async def open(self) -> None:
        """Open the two handles."""
        for _ in range(2):
            self.handles.append(await self.factory.open())

    async def open_namespace(self, prefix: str) -> Store:
        """A third handle, in another namespace of the same database."""
        store = await self.factory.open(prefix)
        self.handles.append(store)
        return store

    async def open_other_database(self) -> Store:
        """A handle on another database."""
        factory = type(self.factory)()
        self.factories.append(factory)
        store = await factory.open()
        self.handles.append(store)
        return store

    async def restart(self) -> None:
        """End both processes and start two new ones."""
        await self._close_handles()
        await self.factory.restart()
        await self.open()

    async def close(self) -> None:
        """Close the handles and remove the databases."""
        await self._close_handles()
        for factory in [self.factory, *self.factories]:
            await factory.close()

    async def _close_handles(self) -> None:
        handles, self.handles = self.handles, []
        for store in handles:
            await store.close()

    async def start(self, run_id: str = "run", *, now: int = NOW, ttl: float = TTL, **columns: Any) -> Claim:
        """Create a run and lease it at once."""
        created = await self.a.create(new_run(run_id, **columns), ttl=ttl, now=now)
        holds(created.claim is not None, "a new run created with ttl= is leased at once")
        return _given(created.claim)

    async def lease(self, run_id: str = "run", *, now: int = NOW, **columns: Any) -> Lease:
        """Create a run and give only its lease."""
        return (await self.start(run_id, now=now, **columns)).lease

    async def suspended(
        self,
        run_id: str = "run",
        *,
        wake_at: int | None = None,
        waiting_for: Iterable[Awaited] = (),
        now: int = NOW,
        **columns: Any,
    ) -> Lease:
        """Create a run and suspend it; its old lease is given."""
        lease = await self.lease(run_id, now=now, **columns)
        await self.a.suspend(lease, wake_at=wake_at, waiting_for=list(waiting_for), now=now)
        return lease

    async def ended(self, run_id: str = "run", status: EndStatus = "completed", *, now: int = NOW, **columns: Any) -> Lease:
        """Create a run and end it; its old lease is given."""
        lease = await self.lease(run_id, now=now, **columns)
        await self.a.finish(lease, status, b'"outcome"', now=now)
        return lease

    async def take(self, run_id: str = "run", *, now: int = EXPIRED, due_only: bool = True, ttl: float = TTL) -> Claim:
        """Acquire the run on the other handle, which must succeed."""
        claim = await self.b.acquire(run_id, ttl, due_only=due_only, now=now)
        holds(claim is not None, f"run {run_id!r} can be acquired")
        return _given(claim)

    async def row(self, run_id: str = "run") -> RunRow:
        """The run's row as the other handle sees it."""
        row = await self.b.get(run_id)
        if row is None:
            raise AssertionError(f"run {run_id!r} is there, but get() gives None")
        return row

    async def lease_held(self, run_id: str = "run") -> LeaseHeld:
        """Return the error for whoever wants this leased run."""
        return LeaseHeld(run_id, label_of((await self.row(run_id)).lease_owner))

    async def dump(self, *run_ids: str, streams: Iterable[str] = ("log",)) -> bytes:
        """Everything that can be read of these runs, as bytes to compare."""
        seen: list[Any] = []
        for run_id in run_ids:
            items = [await self.items_in(run_id, stream) for stream in streams]
            seen += [await self.b.get(run_id), await self.b.journal(run_id), await self.b.inbox(run_id), items]
        return msgspec.msgpack.encode(seen)

    async def items_in(self, run_id: str = "run", stream: str = "log") -> list[Item]:
        """The items of a stream; a store without streams has none."""
        return await require(self.b, "streams").items(run_id, stream) if "streams" in self.b.capabilities else []

    async def record_item(self, lease: Lease, *entries: Entry, now: int = NOW) -> None:
        """Record these entries, with `ITEM` where the store has streams."""
        if "streams" in self.a.capabilities:
            await require(self.a, "streams").record(lease, entries, items=[ITEM], now=now)
        else:
            await self.a.record(lease, entries, now=now)


class FullWorld(World):
    """The same, for cases of optional parts: the handles have the verbs of all parts, of which a case uses those it declares."""

    __slots__ = ()

    @property
    def a(self) -> FullStore:
        return cast("FullStore", self.handles[0])

    @property
    def b(self) -> FullStore:
        return cast("FullStore", self.handles[1])


def equal(actual: object, expected: object, what: str) -> None:
    """Fail unless both are the same."""
    if actual != expected:
        raise AssertionError(f"{what}: {expected!r} was promised, but it is {actual!r}")


def holds(condition: object, what: str) -> None:
    """Fail unless the condition is true."""
    if not condition:
        raise AssertionError(f"promised, but not so: {what}")


@contextmanager
def refused_part(capability: Literal["operators", "schedules", "streams", "transaction", "outbox"], what: str) -> Iterator[None]:
    """Fail unless the block raises the `StoreCapabilityError` for a part that the store does not announce."""
    with refused(StoreCapabilityError, what):
        try:
            yield
        except StoreCapabilityError as raised:
            equal(raised.args[1], MISSING_PART[capability], f"what the error for {what} says is missing")
            raise


@contextmanager
def refused(error: Exception | type[Exception] | tuple[type[Exception], ...], what: str) -> Iterator[None]:
    """Fail unless the block raises this error, or one of these; an instance has to say the same text."""
    kinds = error if isinstance(error, tuple) else (type(error) if isinstance(error, Exception) else error,)
    try:
        yield
    except kinds as raised:
        if isinstance(error, Exception):
            equal(str(raised), str(error), f"the text of the error for {what}")
        return
    names = " or ".join(one.__name__ for one in kinds)
    raise AssertionError(f"{what}: it should have raised {names}, but was accepted")


def no_input(run_id: str) -> ValueError:
    """Return the error for a new run without an input hash."""
    return ValueError(f"run {run_id!r} has an empty input_hash, which only a run restored without its input may have")


def refused_write(run_id: str, reason: str) -> PersistenceError:
    """Return the error of a write that contradicts itself or what is recorded."""
    return PersistenceError(f"run {run_id!r}", f"{reason}; nothing was written")


async def claimed_ids(
    store: Store, limit: int = 100, *, now: int = NOW, workflows: Iterable[str] = ("flow",), version: int = 1, **options: Any
) -> list[str]:
    """The ids that one `claim` gives, in its order."""
    claims = await store.claim(limit, TTL, [(name, version) for name in workflows], now=now, **options)
    return [claim.run.id for claim in claims.claims]


async def after(turns: int, call: Callable[[], Awaitable[T]]) -> T:
    """The call's answer; it starts this many turns of the event loop later."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return await call()


async def outcomes(calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """What many concurrent calls returned or raised, in their order."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def in_another_loop(call: Callable[[], Awaitable[T]]) -> T:
    """The call's answer, given in a thread with an event loop of its own."""

    async def called() -> T:
        return await call()

    return await asyncio.to_thread(lambda: asyncio.run(called()))


def _given(claim: Claim | None) -> Claim:
    if claim is None:
        raise AssertionError("there is a claim")
    return claim
