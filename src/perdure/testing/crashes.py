"""`testing.crash_everywhere(workflow, *args)`: a workflow with a crash before and after every call of the store.

First the workflow runs undisturbed. Then it runs again for each call of the store, and at that call its runtime is lost as by a
kill: the call is not made, or takes effect and is not answered; nothing reaches the store after that; and the body gets no
further. What the store has acknowledged stays. Another runtime takes over, and has to come to the same outcome. Time is virtual.

A step whose result was not recorded at the crash is in doubt and may be called once more. Everything else happens once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from perdure.backends.memory.store import MemoryDatabase, MemoryStore
from perdure.ctx_calls.step_calls import StepCall
from perdure.definition import Workflow
from perdure.errors import LeaseLost, PerdureError, StoreClosed
from perdure.model.durations import instant
from perdure.model.journal import entries_in_force
from perdure.model.records import Lease
from perdure.result import Err, Outcome, Suspended
from perdure.runtime import Runtime
from perdure.stepspec import current_step
from perdure.testing.clock import EPOCH
from perdure.testing.counted_store import CountedStore
from perdure.testing.virtual_runtime import RunCannotGoOn, VirtualRuntime

RUN_ID: Final = "crashed"
# What changes nothing, or may have nothing to change, called as often as a worker happens to look. Counted apart from the other
# verbs, so that the n-th of those is the same one each time.
_LOOKS: Final = frozenset(
    {"claim", "get", "list", "count", "due", "journal", "inbox", "items", "schedules", "queue_limits", "workers"}
    | {"put_worker", "drop_worker", "report"}
)
_StepKey: TypeAlias = tuple[str, str]


class CrashPoint(NamedTuple):
    """The n-th call of the store, among those that look or among those that write."""

    n: int
    is_look: bool
    is_after: bool


class CrashReport(msgspec.Struct, frozen=True):
    """What `crash_everywhere` did: the outcome, and how many crashes it survived, by verb of the store."""

    outcome: Outcome[Any]
    by_verb: dict[str, int]

    @property
    def crash_points(self) -> int:
        """How many times the workflow was run with a crash."""
        return sum(self.by_verb.values())


async def crash_everywhere(
    workflow: Workflow[Any, Any] | Callable[[int], Workflow[Any, Any]],
    /,
    *args: Any,
    effects: Any = None,
    signals: Mapping[str, Any] | None = None,
    workflows: Sequence[Workflow[Any, Any]] = (),
    prepare: Callable[[VirtualRuntime], object] | None = None,
    compare: Callable[[Outcome[Any]], Any] | None = None,
    **options: Any,
) -> CrashReport:
    """Crash the workflow before and after every call of the store, and check that it always comes to the same.

    - `workflow`: the workflow, or a function that makes it from how often there was a restart, 0 or 1: a new deploy.
    - `effects`: what is done to the world: a list that steps append to, a function that gives one, or a Mock.
    - `signals`: payloads by name; a signal is sent when the run waits for it.
    - `workflows`: others that it needs, such as its children.
    - `prepare`: called with each runtime, to stub steps.
    - `compare`: what is compared of an outcome, if not all of it.

    Other options are those of `Runtime`. Raises AssertionError: at which call what was different.
    """
    crashes = _Crashes(workflow, args, _reader(effects), signals or {}, workflows, prepare, options)
    compare = compare or _comparable
    with _quiet():
        undisturbed = await crashes.run(None)
        if undisturbed.problem is not None:
            raise AssertionError(f"without any crash, {undisturbed.problem}")
        if isinstance(undisturbed.outcome, Suspended):
            names = ", ".join(map(str, undisturbed.outcome.waiting_for))
            raise AssertionError(f"the run waits for {names} and does not end; pass what it waits for in signals=")
        by_verb = Counter[str]()
        for is_look in (False, True):
            for is_after in (False, True):
                point: CrashPoint | None = CrashPoint(0, is_look, is_after)
                while point is not None:
                    verb = await _crash_at(crashes, point, undisturbed, compare)
                    by_verb.update([verb] if verb else [])
                    point = point._replace(n=point.n + 1) if verb else None
    return CrashReport(undisturbed.outcome, dict(by_verb))


async def _crash_at(
    crashes: _Crashes, point: CrashPoint, undisturbed: _RunThrough, compare: Callable[[Outcome[Any]], Any]
) -> str | None:
    """Run through with this crash, and check what came of it. The verb; None when there are fewer calls."""
    found = await crashes.run(point)
    if found.verb is None:
        return None
    differences = list(_differences(undisturbed, found, compare, is_deploy=crashes.is_deploy))
    if differences:
        when = f"{'after' if point.is_after else 'before'} call {point.n + 1} that {'looks' if point.is_look else 'writes'}"
        raise AssertionError(f"crashed {when} ({found.verb}): " + "; ".join(differences))
    return found.verb


class _RunThrough(msgspec.Struct):
    """What one run of the workflow, with its restart, came to."""

    outcome: Outcome[Any]
    problem: str | None
    verb: str | None
    calls: Counter[_StepKey]
    in_doubt: set[_StepKey]
    effects: Counter[str]
    # The steps that ran when an effect was noticed; None stands for the body.
    origins: dict[str, set[_StepKey | None]]


class _Watch:
    """Which steps are called, and which effects come while they run."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read
        self._seen = self._count()
        self._running = Counter[_StepKey]()
        self._lock = threading.Lock()
        self.calls = Counter[_StepKey]()
        self.effects = Counter[str]()
        self.origins: dict[str, set[_StepKey | None]] = defaultdict(set)

    def wrap(self, step: StepCall) -> StepCall:
        """The same step, whose calls are noticed. One for an executor of another process is called as it is."""
        if step.plan.executor is not None:
            return step
        fn = step.fn

        async def call_async(*args: Any) -> Any:
            with self._call():
                return await fn(*args)

        def call(*args: Any) -> Any:
            with self._call():
                return fn(*args)

        return msgspec.structs.replace(step, fn=functools.wraps(fn)(call_async if step.plan.is_async else call))

    def look(self) -> None:
        """Notice new effects: they come from the steps that run now, or from the body."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        found = self._count()
        new = found - self._seen
        for text in new:
            self.origins[text].update(key for key, count in self._running.items() if count)
            if not self._running.total():
                self.origins[text].add(None)
        self._seen = found
        self.effects += new

    def _count(self) -> Counter[str]:
        return Counter(map(repr, self._read()))

    @contextmanager
    def _call(self) -> Iterator[None]:
        info = current_step()
        key = info.run_id, info.key
        with self._lock:
            self._look()
            self.calls[key] += 1
            self._running[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._look()
                self._running[key] -= 1


class _CrashingStore(CountedStore):
    """A store whose caller is lost at one call. From then on it answers nothing."""

    def __init__(self, store: MemoryStore, point: CrashPoint | None) -> None:
        super().__init__(store)
        self._point = point
        self._counted = 0
        self.crashed_at: str | None = None

    def before(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.crashed_at is not None:
            self._crash(args)
        point = self._point
        if point is not None and point.is_look == (verb in _LOOKS):
            self._counted += 1
            if self._counted == point.n + 1 and not point.is_after:
                self.crashed_at = verb
                self._crash(args)
        if verb == "create":  # what is derived from the seed is the same in every run-through
            return (msgspec.structs.replace(args[0], seed=hashlib.sha256(args[0].id.encode()).digest()[:16]),)
        return args

    def after(self, verb: str, args: tuple[Any, ...]) -> None:
        point = self._point
        is_counted = point is not None and point.is_look == (verb in _LOOKS)
        if point is not None and is_counted and self._counted == point.n + 1 and self.crashed_at is None:
            self.crashed_at = verb
            self._crash(args)

    def _crash(self, args: tuple[Any, ...]) -> None:
        """For a holder it is as if it had lost its lease: it stops at once, and writes nothing."""
        if args and isinstance(args[0], Lease):
            raise LeaseLost(args[0].run_id, args[0].epoch)
        raise StoreClosed("memory", "this runtime has crashed")


class _Crashes(NamedTuple):
    """Runs of one workflow, each in a memory of its own."""

    workflow: Any
    args: tuple[Any, ...]
    read: Callable[[], Sequence[Any]]
    signals: Mapping[str, Any]
    workflows: Sequence[Workflow[Any, Any]]
    prepare: Callable[[VirtualRuntime], object] | None
    options: dict[str, Any]

    @property
    def is_deploy(self) -> bool:
        """Whether the code may change at the restart."""
        return not getattr(self.workflow, "is_perdure_workflow", False)

    async def run(self, point: CrashPoint | None) -> _RunThrough:
        """Run through, with a crash at this point and a restart after it."""
        database, watch = MemoryDatabase(), _Watch(self.read)
        store = _CrashingStore(MemoryStore(database), point)
        workflow, runtime = self._start(database, store, 0, watch)
        outcome, problem = await self._drive(runtime, workflow, store)
        in_doubt = {key for key in watch.calls if not _is_recorded(database, key)}
        if store.crashed_at is not None:
            watch.look()
            _end_leases(database, instant(runtime.now()))
            second = _CrashingStore(MemoryStore(database), None)
            workflow, restarted = self._start(database, second, 1, watch, runtime)
            outcome, problem = await self._drive(restarted, workflow, second)
        watch.look()
        return _RunThrough(outcome, problem, store.crashed_at, watch.calls, in_doubt, watch.effects, watch.origins)

    def _start(
        self, database: MemoryDatabase, store: _CrashingStore, restarts: int, watch: _Watch, former: VirtualRuntime | None = None
    ) -> tuple[Workflow[Any, Any], VirtualRuntime]:
        """The workflow and a runtime for it; after a restart, in the time and with the script of the former one."""
        workflow = self.workflow(restarts) if self.is_deploy else self.workflow
        start_at = EPOCH if former is None else former.now()
        runtime = VirtualRuntime([workflow, *self.workflows], store=store, start_at=start_at, **self.options)
        runtime.reports_unused = False
        runtime.outside = Runtime(MemoryStore(database), concurrency=0, clock=runtime.clock)
        runtime.watch_steps(watch.wrap)
        for name, payload in self.signals.items():
            runtime.signal_when_waiting(name, payload)
        if self.prepare is not None:
            self.prepare(runtime)
        if former is not None:
            runtime.go_on_from(former)
        return workflow, runtime

    async def _drive(
        self, runtime: VirtualRuntime, workflow: Workflow[Any, Any], store: _CrashingStore
    ) -> tuple[Outcome[Any], str | None]:
        """The outcome of the run, or why there is none."""
        try:
            async with runtime:
                return await runtime.run(workflow, *self.args, id=RUN_ID), None
        except RunCannotGoOn as reason:
            return Suspended(RUN_ID), str(reason)
        except PerdureError:
            if store.crashed_at is None:
                raise
            return Suspended(RUN_ID), None
        finally:
            await runtime.outside.close()


def _differences(
    undisturbed: _RunThrough, found: _RunThrough, compare: Callable[[Outcome[Any]], Any], *, is_deploy: bool
) -> Iterator[str]:
    """What came to be different by the crash, in words."""
    if found.problem is not None:
        yield found.problem
    elif compare(found.outcome) != compare(undisturbed.outcome):
        yield f"the outcome is {found.outcome!r}, and undisturbed it is {undisturbed.outcome!r}"
    repeats = found.calls - undisturbed.calls
    for key in () if is_deploy else found.calls.keys() - undisturbed.calls.keys():
        yield f"step {key[1]!r} was called, which the undisturbed run has not; a key must be the same on every replay"
    for key, count in repeats.items():
        if key in undisturbed.calls and count > (key in found.in_doubt):
            yield f"step {key[1]!r} was called {_again(count)}, although its result was recorded"
    if found.problem is None:
        for key in () if is_deploy else undisturbed.calls.keys() - found.calls.keys():
            yield f"step {key[1]!r} was never called"
        for effect in undisturbed.effects.keys() - found.effects.keys():
            yield f"the effect {effect} was lost"
    yield from _repeated_effects(undisturbed, found, repeats)


def _repeated_effects(undisturbed: _RunThrough, found: _RunThrough, repeats: Counter[_StepKey]) -> Iterator[str]:
    for effect, count in (found.effects - undisturbed.effects).items():
        origins = found.origins[effect] | undisturbed.origins.get(effect, set())
        if None in origins:
            yield f"the effect {effect} happened {_again(count)}: it is outside a step, so every replay repeats it"
        elif count > max(1, undisturbed.effects[effect]) * sum(repeats[key] for key in origins if key is not None):
            yield f"the effect {effect} happened {_again(count)}"


def _again(count: int) -> str:
    return "once more" if count == 1 else f"{count} times more"


def _comparable(outcome: Outcome[Any]) -> Any:
    """The outcome, as far as two of them can be equal: an exception is what its class and its text say."""
    if isinstance(outcome, Err) and isinstance(outcome.error, BaseException):
        return type(outcome.error), str(outcome.error)
    return outcome


def _reader(effects: Any) -> Callable[[], Sequence[Any]]:
    if effects is None:
        return tuple
    if hasattr(effects, "mock_calls"):
        return lambda: list(effects.mock_calls)
    if callable(effects):
        return lambda: list(effects())
    if isinstance(effects, Iterable):
        return lambda: list(effects)
    raise TypeError(f"effects= is a list, a function that gives one, or a Mock, not {effects!r}")


def _is_recorded(database: MemoryDatabase, key: _StepKey) -> bool:
    run = database.namespaces[""].runs.get(key[0])
    entries = [] if run is None else entries_in_force(run.entries.values())
    return any(entry.key == key[1] and entry.phase == "close" for entry in entries)


def _end_leases(database: MemoryDatabase, now: int) -> None:
    """Let the leases of the runtime that was lost end now, so that no time passes until they do."""
    with database.lock:
        for run in database.namespaces[""].runs.values():
            if run.row.lease_until is not None:
                run.row = msgspec.structs.replace(run.row, lease_until=now, wake_at=now)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of the runtimes that are lost."""
    log = logging.getLogger("perdure")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
