"""A program in virtual time: its runs, processes that drive them and die, and an operator who interferes.

One process drives at a time. It dies at a call of the store, or at any moment; the next one drives what its leases leave. The
operator works through the program's list meanwhile. In the end everything is brought to its end: signals are sent, and versions
of the code are rolled back until every run has one that it fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

from perdure import Runtime, stores
from perdure.engine.heartbeat import HeldLease
from perdure.errors import PersistenceError
from perdure.model.clock import elapsed
from tests.sagas.bodies import flows_of, some_pause
from tests.sagas.judge import Judge, Violation
from tests.sagas.operating import Operator
from tests.sagas.programs import Op, Program
from tests.sagas.provider import Event, Provider
from tests.simulation import WRITES, LoopClock, simulate

LEASE: Final = 30.0
MOST_SECONDS: Final = 1_000_000
# How long the runs are left alone between two looks at what has not ended, in seconds, and how often.
_LOOK_EVERY: Final = 150.0
_LOOKS: Final = 80
# How often runs may be claimed before somebody must be driving them in circles.
_MOST_CLAIMS: Final = 2000
# At which of these looks code is deployed that says how to undo what it does not reach.
_REPAIRS: Final = (15, 41)
# After how many looks without an end the code is rolled back to another version, again and again.
_PATIENCE: Final = 2
_READS: Final = frozenset({"get", "journal", "inbox", "list", "count", "due", "items"})


class TickingClock(LoopClock):
    """The loop's time, which also passes a little whenever somebody asks: no two instants are alike, as with real clocks."""

    def __init__(self) -> None:
        self._ticks = 0

    def now(self) -> int:
        self._ticks += 1
        return super().now() + self._ticks


class Died(Exception):
    """What a process raises that has died: nothing comes of it."""


class OneProcess:
    """A process that drives runs, and what it shares with none."""

    pace = 1.0
    prefix = ""

    def __init__(self, trial: Trial, dies_at: int | None = None, *, after_commit: bool = False) -> None:
        self.trial = trial
        self.provider = trial.provider
        self.clock = trial.clock
        self.is_alive = True
        self.has_claimed = False
        # After how many writes it dies, or fails once.
        self.writes_left: int | None = dies_at
        self._after_commit = after_commit
        self._fails_only = False
        self._lingers = 0.0
        self.store: Any = ProcessStore(trial.store, self)

    def die_at(self, writes: int, *, after_commit: bool, fails_only: bool = False) -> None:
        """Die at a write to come, or only lose that one."""
        self.writes_left, self._after_commit, self._fails_only = writes, after_commit, fails_only

    def die(self) -> None:
        self.is_alive = False

    def check(self) -> None:
        if not self.is_alive:
            raise Died

    async def dawdle(self, what: str) -> None:
        seconds = some_pause(what, self.trial.program.seed)
        if seconds:
            await asyncio.sleep(seconds)

    def linger(self, seconds: float) -> None:
        self._lingers = seconds

    async def write(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._check_store()
        if self.writes_left is None:
            return await method(*args, **kwargs)
        self.writes_left -= 1
        if self.writes_left > 0:
            return await method(*args, **kwargs)
        self.writes_left = None
        if not self._fails_only:
            self.is_alive = False
        if self._after_commit:
            await method(*args, **kwargs)
        raise PersistenceError("this process", "has lost its store")

    async def read(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._check_store()
        return await method(*args, **kwargs)

    def _check_store(self) -> None:
        if not self.is_alive:
            raise PersistenceError("this process", "has died")

    def submit_patiently(self, work: Callable[[], Any]) -> Future[Any]:
        """Stand for the threads of plain steps: each is called at a turn of the loop, and returns when it no longer lingers."""
        call = Future[Any]()
        loop = asyncio.get_running_loop()

        def run() -> None:
            if not call.set_running_or_notify_cancel():
                return
            self._lingers = 0.0
            try:
                value = work()
            except BaseException as error:
                loop.call_later(self._lingers, call.set_exception, error)
            else:
                loop.call_later(self._lingers, call.set_result, value)

        loop.call_soon(run)
        return call

    def close(self) -> None:
        """Nothing to do: there are no threads."""


class ProcessStore:
    """The store as one process sees it."""

    def __init__(self, store: Any, process: OneProcess) -> None:
        self._store = store
        self._process = process

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in WRITES:
            around = self._process.write
        elif name in _READS and inspect.iscoroutinefunction(method):
            around = self._process.read
        else:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await around(method, args, kwargs)
            if name == "claim" and result.claims:
                self._process.has_claimed = True
                self._process.trial.claims += len(result.claims)
            return result

        return call


class Beat:
    """Renews the leases of one process in virtual time, and when it is told of a change."""

    def __init__(self, process: OneProcess) -> None:
        self._process = process
        self._held: dict[str, HeldLease] = {}

    def hold(self, held: HeldLease) -> None:
        self._held[held.lease.token] = held

    def drop(self, held: HeldLease) -> None:
        self._held.pop(held.lease.token, None)

    async def renew(self) -> None:
        held = list(self._held.values())
        if not held:
            return
        with contextlib.suppress(PersistenceError):
            pulses = await self._process.store.renew([one.lease for one in held], LEASE, now=self._process.clock.now())
            for one, pulse in zip(held, pulses, strict=True):
                if pulse is None:
                    one.mark_lost()
                else:
                    one.extend(elapsed(), pulse)


@dataclass
class Trial:
    """One program, and what becomes of it."""

    program: Program
    provider: Provider = field(default_factory=Provider)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: Any = stores.memory()
        self.clock = TickingClock()
        self._process: OneProcess | None = None
        self._beat: Beat | None = None
        self._must_restart = False
        self._is_over = False
        self._poisoned = 0
        self.claims = 0
        self._poke: asyncio.Event
        # How the runs ended, and whether their charges were refunded.
        self.ends: list[str] = []

    async def run(self) -> list[Violation]:
        """What went wrong."""
        self._poke = asyncio.Event()
        self.provider.on_event = self.in_book
        # Branches that a body leaves behind when it fails say so.
        asyncio.get_running_loop().set_exception_handler(lambda _, __: None)
        try:
            async with asyncio.timeout(MOST_SECONDS), Runtime(self.store, clock=self.clock, concurrency=0) as runtime:
                operator = Operator(runtime, self.program, note=self.note)
                fleet = asyncio.ensure_future(self._work(operator))
                try:
                    await operator.start(OneProcess(self))
                    for op in self.program.ops:
                        await asyncio.sleep(op.after)
                        await self._operate(operator, op)
                    await self._bring_to_an_end(operator)
                finally:
                    self._is_over = True
                    self._poke.set()
                    await fleet
                book = self.provider.read()
                self.ends = [*await operator.statuses(), *(event.kind for event in book if event.kind in ("charge", "refund"))]
                spinning = [Violation("spins", f"runs were claimed {self.claims} times")] if self.claims > _MOST_CLAIMS else []
                return [*spinning, *await operator.hanging(), *Judge(book, await operator.ended()).violations()]
        except TimeoutError:
            return [Violation("hang", "the program does not come to an end")]

    def in_book(self, event: Event) -> None:
        """Let the log tell what the provider is asked."""
        said = [event.kind, event.thing, event.key and f"under {event.key!r}", event.of and f"of {event.of!r}"]
        self.note(" ".join([*filter(None, said), *(["in doubt"] if event.in_doubt else [])]))

    def note(self, what: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():9.2f} {what}")

    # The processes.

    async def _work(self, operator: Operator) -> None:
        """Drive what is due, in one process after the other."""
        while not self._is_over:
            process = self._process = OneProcess(self, 2 if self._poisoned else None, after_commit=False)
            self._poisoned = max(0, self._poisoned - 1)
            self._must_restart = False
            await self._live(process, operator)

    async def _live(self, process: OneProcess, operator: Operator) -> None:
        runtime = Runtime(
            process.store,
            flows_of(process, operator.versions, operator.current),
            clock=self.clock,
            concurrency=0,
            lease_ttl=LEASE,
            unload_grace=self.program.grace,
            max_attempts=self.program.max_attempts,
        )
        host: Any = runtime._host
        self._beat = host._heartbeat = Beat(process)
        host.settings = replace(host.settings, threads=process)
        sweeps: set[asyncio.Task[None]] = set()
        pause, renew_at = 0.1, LEASE / 3
        loop = asyncio.get_running_loop()
        renew_at += loop.time()
        while process.is_alive and not self._must_restart and not self._is_over:
            sweeps.add(sweep := asyncio.ensure_future(_sweep(runtime)))
            sweep.add_done_callback(sweeps.discard)
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, max(0.01, renew_at - loop.time()))):
                    await self._poke.wait()
            if loop.time() >= renew_at or self._poke.is_set():
                await self._beat.renew()
                renew_at = loop.time() + LEASE / 3
            pause = 0.1 if process.has_claimed or self._poke.is_set() else min(2 * pause, 10.0)
            process.has_claimed = False
        self.note("process ends" if process.is_alive else "process has died")
        await runtime.close()
        process.die()
        if sweeps:
            await asyncio.wait(sweeps)

    # The operator.

    async def _operate(self, operator: Operator, op: Op) -> None:
        """Do it, if it can be done now."""
        process = self._process
        match op.kind:
            case "crash" | "flaky" if process is not None:
                process.die_at(op.n, after_commit=op.is_after, fails_only=op.kind == "flaky")
            case "kill" if process is not None:
                process.die()
            case "poison":
                self._poisoned, self._must_restart = op.n, True
            case _ if operator.deploy(op):
                self._must_restart = True
            case _:
                await operator.change_runs(op)
        self.note(str(op))
        self._poke.set()

    async def _bring_to_an_end(self, operator: Operator) -> None:
        for look in range(_LOOKS):
            if not await operator.push_on() or self.claims > _MOST_CLAIMS:
                return
            if look > _PATIENCE and look % 2:
                await (operator.repair() if look in _REPAIRS else operator.roll_back())
                self._must_restart = True
            self._poke.set()
            await asyncio.sleep(_LOOK_EVERY)


async def _sweep(runtime: Runtime) -> None:
    with contextlib.suppress(PersistenceError):
        await runtime.sweep()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log and warn of nothing: most of what these programs do deserves a warning."""
    log = logging.getLogger("perdure")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def try_out(program: Program) -> tuple[list[Violation], Trial]:
    """What goes wrong with this program, and the trial with its log."""
    trial = Trial(program)
    random.seed(program.seed)  # for the pauses of retries
    with _quiet():
        return simulate(trial.run()), trial
