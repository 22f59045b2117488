"""`testing.runtime(signup)`: a `Runtime` for tests, in memory and in virtual time.

Time passes only while the test waits for a run, and only when everything is at rest: no store call is under way, no step's
function runs, and nothing on the event loop is ready. Then the clock jumps to the next timer: the end of a sleep, a time-out, the
next attempt of a step, a deadline, an instant of a schedule. So the order of events does not depend on how fast the machine is.
While a step's function runs, time stands still, for up to `hang_after` seconds of real time: longer than that, it counts as
hanging, and its `timeout=` is reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from perdure import stores
from perdure.ctx_calls.step_calls import StepCall
from perdure.definition import Workflow
from perdure.model.durations import MICROSECOND, Duration, instant, microseconds, moment
from perdure.model.records import UNFINISHED, Awaited, RunInfo
from perdure.model.run_filter import RunFilter
from perdure.operations.approvals import UNCHANGED
from perdure.result import Outcome, Suspended
from perdure.run import Run
from perdure.runtime import Runtime
from perdure.store import Store
from perdure.testing.clock import EPOCH, ManualClock
from perdure.testing.counted_store import CountedStore
from perdure.testing.history import HistoryItem, assert_same_history, history_of
from perdure.testing.standstill import NothingMoves, explain_wait, is_only_task
from perdure.testing.stubs import _NOTHING, Stub, Stubs
from perdure.worker.active_runs import active_runs

T_co = TypeVar("T_co", covariant=True)

# No lease ends while virtual time jumps.
_LEASE_TTL: Final = "3650d"
# How many turns of the loop in a row must find nothing to do. A loop that does not show what is ready is given more of them.
_QUIET_TURNS: Final = 5
_QUIET_TURNS_UNSEEN: Final = 200
# Between two looks at what threads and servers do in real time.
_PAUSE_SECONDS: Final = 0.001
# How many runs are named when none can move any more.
_MOST_EXPLAINED: Final = 20


class RunCannotGoOn(AssertionError):
    """A run has a problem, and in a test no time changes that: without this, it would be tried again and again."""

    def __init__(self, run_id: str, problem: str) -> None:
        super().__init__(run_id, problem)

    def __str__(self) -> str:
        return f"run {self.args[0]!r} cannot go on: {self.args[1]}"


class _Standstill:
    """Whether the runs that a test awaits have come to a standstill: at once where nothing is left to wait for in real time.

    Otherwise another task of the test, or what a body waits for outside ctx, may go on with them: they get `patience` seconds.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: tuple[int, list[RunInfo]] | None = None
        self._since = 0.0

    def is_reached(self, now: int, left: list[RunInfo], *, is_at_rest: bool) -> bool:
        """Return whether these runs will not move any more, at this virtual time."""
        if self._seen != (now, left):
            self._seen, self._since = (now, left), time.monotonic()
        return is_at_rest or time.monotonic() - self._since > self._patience


class ScriptedAnswer(msgspec.Struct, eq=False):
    """A signal, or a decision on an approval, that each run gets when it waits for it, or one run only."""

    kind: Literal["signal", "approval"]
    name: str
    run_id: str | None
    # Called with the run's id, and with the key of the approval.
    give: Callable[[str, str | None], Awaitable[None]]
    given_to: set[str] = msgspec.field(default_factory=set)

    def is_for(self, run_id: str) -> bool:
        """Whether this run is to get it, and has not."""
        return self.run_id in (None, run_id) and run_id not in self.given_to


class VirtualRun(Run[T_co]):
    """A run whose time passes while it is awaited."""

    def __init__(self, runtime: VirtualRuntime, run_id: str) -> None:
        super().__init__(runtime._host, run_id)  # noqa: SLF001 - one class in two parts
        self._runtime = runtime

    async def outcome(self) -> Outcome[T_co]:
        """How the run ended, or that it is suspended and time alone will not move it."""
        return await self._runtime.wait_for(self.id)

    async def _value(self) -> T_co:
        found: Outcome[T_co] = await self._runtime.wait_for(self.id, through_waits=True)
        return found.unwrap()


class VirtualRuntime(Runtime):
    """A `Runtime` in virtual time, with stubs, scripted signals and assertions on history.

    When its context is left, stubs and scripted signals that were not used raise AssertionError.
    """

    def __init__(
        self,
        workflows: Iterable[Workflow[Any, Any]],
        *,
        store: Store | str | None = None,
        auto_skip: bool = True,
        hang_after: Duration = 1,
        start_at: datetime = EPOCH,
        **options: Any,
    ) -> None:
        if "clock" in options:
            raise TypeError("testing.runtime has a clock of its own; start_at= says when it starts")
        self._is_store_ours = store is None or isinstance(store, str)
        opened = stores.memory() if store is None else stores.open_store(store) if isinstance(store, str) else store
        self._counted = opened if isinstance(opened, CountedStore) else CountedStore(opened)
        self.clock = ManualClock(start_at)
        self._auto_skip = auto_skip
        self._hang_after = microseconds(hang_after, what="hang_after") / MICROSECOND
        self._stubs = Stubs()
        # Whether stubs and scripted signals that were not used are an error at the end.
        self.reports_unused = True
        self._scripted: list[ScriptedAnswer] = []
        # Gives the scripted answers: another process, where this one may crash.
        self.outside: Runtime = self
        # One at a time moves the clock.
        self._moving = asyncio.Lock()
        options.setdefault("lease_ttl", _LEASE_TTL)
        super().__init__(self._counted, workflows, clock=self.clock, **options)
        self._host.settings = replace(self._host.settings, replace_step=self._stubs.replace, limits_steps_by_clock=True)

    def now(self) -> datetime:
        """The virtual time."""
        return moment(self.clock.now())

    async def skip(self, duration: Duration) -> None:
        """Let this much time pass: everything that it brings happens, in its order, and comes to rest."""
        await self._skip_to(self.clock.now() + microseconds(duration))

    async def skip_to(self, at: datetime) -> None:
        """Let time pass until this instant, as `skip` does."""
        await self._skip_to(instant(at, what="skip_to"))

    async def settle(self) -> None:
        """Return when everything is at rest. No time passes."""
        async with self._moving:
            await self._settle()

    async def wait_for(self, run_id: str, *, through_waits: bool = False) -> Outcome[Any]:
        """Return the outcome of the run when it has ended or, unless `through_waits`, waits for what time does not bring.

        With `auto_skip=False` no time passes: then it is the outcome when everything is at rest. Through waits it raises
        `NothingMoves` when nothing is left that could end them.
        """
        standstill = _Standstill(self._hang_after)
        while True:
            async with self._moving:
                await self._settle()
                row = await self._host.row(run_id)
                if row.ended:
                    return self._host.ended_outcome(row)
                if self._auto_skip and await self._jump():
                    continue
                if not through_waits:
                    break
                left = await self._unfinished()
                if standstill.is_reached(self.clock.now(), left, is_at_rest=not active_runs.count(self._host) and is_only_task()):
                    raise NothingMoves(run_id, [await self._explain_wait(info.id) for info in left[:_MOST_EXPLAINED]])
            await asyncio.sleep(_PAUSE_SECONDS)  # what it waits for may come from another task of the test, or from a thread
        wake_at = None if row.wake_at is None or row.status == "running" else moment(row.wake_at)
        return Suspended(run_id, wake_at, tuple(each.by_user for each in row.waiting_for))

    def stub(
        self, target: Any, /, *, returns: Any = _NOTHING, raises: Any = _NOTHING, calls: Any = _NOTHING, times: int | None = None
    ) -> Stub:
        """Call something else in place of a step's function: `rt.stub(charge, returns=Payment("p-1"))`.

        `target` is the function, or the key or name of a step. The stub returns a value, raises an exception, or calls another
        function with the step's arguments; with `times=` so often, and then the next stub of the step, or the step itself.
        """
        return self._stubs.add(target, returns=returns, raises=raises, calls=calls, times=times)

    def watch_steps(self, wrap: Callable[[StepCall], StepCall]) -> None:
        """Have each step called as `wrap` gives it, stubbed or not."""
        settings = self._host.settings
        self._host.settings = replace(settings, replace_step=lambda step: wrap(self._stubs.replace(step)))

    def go_on_from(self, former: VirtualRuntime) -> None:
        """Give no answer again that another runtime with the same script has given."""
        for mine, theirs in zip(self._scripted, former._scripted, strict=True):
            mine.given_to = theirs.given_to

    def signal_when_waiting(self, name: str, payload: Any = None, *, run_id: str | None = None) -> None:
        """Send this signal to each run as soon as it waits for it, or only to `run_id`. A second one is for the second wait."""
        self._scripted.append(ScriptedAnswer("signal", name, run_id, lambda found, _: self.outside.signal(found, name, payload)))

    def approve_when_waiting(self, name: str, *, by: str, payload: Any = UNCHANGED, run_id: str | None = None) -> None:
        """Approve what each run asks with `ctx.approve(name)`, as soon as it does, or only what `run_id` asks."""
        approve = lambda found, key: self.outside.approve(found, name, by=by, payload=payload, key=key)  # noqa: E731 - one of three alike
        self._scripted.append(ScriptedAnswer("approval", name, run_id, approve))

    def reject_when_waiting(self, name: str, *, by: str, reason: str | None = None, run_id: str | None = None) -> None:
        """Reject what each run asks with `ctx.approve(name)`, as soon as it does, or only what `run_id` asks."""
        reject = lambda found, key: self.outside.reject(found, name, by=by, reason=reason, key=key)  # noqa: E731
        self._scripted.append(ScriptedAnswer("approval", name, run_id, reject))

    async def history(self, run: Run[Any] | str) -> list[HistoryItem]:
        """What the run has recorded, in order; `str(item)` is a line to read."""
        run_id = run if isinstance(run, str) else run.id
        await self._host.row(run_id)  # raises RunNotFound
        return history_of(await self._store.journal(run_id))

    async def assert_history(self, run: Run[Any] | str, expected: list[str]) -> None:
        """Raise AssertionError, with the difference line by line, unless the run has recorded exactly this."""
        assert_same_history(run if isinstance(run, str) else run.id, await self.history(run), expected)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            if self._is_store_ours:
                await self._counted.inner.close()
        problems = self._stubs.problems()
        problems += [f"no run waited for the scripted {each.kind} {each.name!r}" for each in self._scripted if not each.given_to]
        if problems and kind is None and self.reports_unused:
            raise AssertionError("; ".join(problems))

    if not TYPE_CHECKING:  # the signature is that of Runtime

        async def run(self, workflow: Any, /, *args: Any, **options: Any) -> Outcome[Any]:
            return await self.wait_for((await self.start(workflow, *args, **options)).id)

    def _run_with(self, run_id: str) -> VirtualRun[Any]:
        return VirtualRun(self, run_id)

    async def _skip_to(self, target: int) -> None:
        async with self._moving:
            await self._settle()
            while (at := self.clock.next_at()) is not None and at <= target:
                await self._advance_to(at)
            await self._advance_to(target)

    async def _jump(self) -> bool:
        """Go to the next timer; False when no run waits for the time. A schedule alone would go on for ever."""
        at, unfinished = self.clock.next_at(), await self._unfinished()
        for info in unfinished:
            if info.problem is not None:
                raise RunCannotGoOn(info.id, info.problem)
        if at is None:
            return False
        # Of a running one it is the end of its lease, which nothing waits for. What it does wait for comes before that.
        leases = [instant(info.wake_at) for info in unfinished if info.status == "running" and info.wake_at is not None]
        is_awaited = any(info.status != "running" and info.wake_at is not None for info in unfinished)
        if not is_awaited and at >= min(leases, default=at):
            return False
        await self._advance_to(at)
        return True

    async def _advance_to(self, at: int) -> None:
        self.clock.advance(max(0, at - self.clock.now()) / MICROSECOND)
        await self._settle()

    async def _settle(self) -> None:
        """Return when everything is at rest, and every scripted signal that a run waits for was sent."""
        while True:
            await self._rest()
            if not await self._send_scripted():
                return

    async def _rest(self) -> None:
        loop, quiet, before = asyncio.get_running_loop(), 0, -1
        ready = getattr(loop, "_ready", None)
        turns = _QUIET_TURNS_UNSEEN if ready is None else _QUIET_TURNS
        busy_since = time.monotonic()
        while quiet < turns:
            await asyncio.sleep(0)
            if self._counted.calls != before:
                quiet, before, busy_since = 0, self._counted.calls, time.monotonic()
            elif self._counted.in_flight or self._is_step_running():
                if time.monotonic() - busy_since > self._hang_after and not self._counted.in_flight:
                    return
                quiet = 0
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                quiet = 0 if ready else quiet + 1

    def _is_step_running(self) -> bool:
        return any(run.drive.executing for run in active_runs.of(self._host))

    async def _send_scripted(self) -> bool:
        """Give the scripted answers that runs wait for now. Whether there was one."""
        waiting: list[tuple[ScriptedAnswer, str, str | None]] = []
        for name in self._names("signal"):
            for info in await self._unfinished():
                script = self._script("signal", name, info.id)
                if script is not None and await self._waits_for(info.id, name):
                    script.given_to.add(info.id)
                    waiting.append((script, info.id, None))
        if self._names("approval"):
            for pending in await self.outside.approvals(limit=10_000):
                script = self._script("approval", pending.name, pending.run_id)
                if script is not None:
                    script.given_to.add(pending.run_id)
                    waiting.append((script, pending.run_id, pending.key))
        for script, run_id, key in waiting:
            await script.give(run_id, key)
        return bool(waiting)

    def _names(self, kind: str) -> list[str]:
        return list(dict.fromkeys(each.name for each in self._scripted if each.kind == kind))

    def _script(self, kind: str, name: str, run_id: str) -> ScriptedAnswer | None:
        """The next scripted answer of this name for this run."""
        return next((each for each in self._scripted if (each.kind, each.name) == (kind, name) and each.is_for(run_id)), None)

    async def _explain_wait(self, run_id: str) -> str:
        active = active_runs.find(self._host.store, run_id)
        return explain_wait(await self._host.row(run_id), None if active is None else active.drive, self.clock.now())

    async def _unfinished(self) -> list[RunInfo]:
        found: list[RunInfo] = await self._counted.inner.list(RunFilter(status=UNFINISHED), limit=10_000)
        return found

    async def _waits_for(self, run_id: str, name: str) -> bool:
        """Whether the run waits for this signal, and none is on its way."""
        active = active_runs.find(self._host.store, run_id)
        if active is not None:
            return Awaited("signal", name) in active.drive.waits.addresses()
        row = await self._counted.inner.get(run_id)
        return any(each.kind == "signal" and each.name == name for each in row.waiting_for)


def runtime(*workflows: Workflow[Any, Any], **options: Any) -> VirtualRuntime:
    """A runtime for a test: `async with testing.runtime(signup) as rt: assert await rt.run(signup, "ada") == Ok(...)`.

    Options are those of `Runtime`, without `clock`, and: `store` (by default one in memory), `auto_skip=False` (time passes only
    by `rt.skip`), `start_at` (the time at first) and `hang_after` (how long a step may run in real time while time stands still).
    """
    return VirtualRuntime(workflows, **options)
