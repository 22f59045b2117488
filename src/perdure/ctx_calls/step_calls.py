"""Steps: the recorded result, or live attempts with retry, time-out and the at-most-once promise.

The function of a step runs in a task of the host, outside the body, in a copy of the context of the task that called it.

A plain step is one record: its result. A step that is tried again records, before each pause, which attempt comes next and
when: neither the count nor the pause starts over after a crash. A step that must not run twice, or that has a compensation,
records its intent first. An intent without a result is a failure of the former whose effect is unknown; the latter runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import types
import warnings
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from perdure import events
from perdure.aio.own_tasks import current
from perdure.aio.threads import ThreadsClosed
from perdure.body.calls import UNRECORDED, Call, cancel_again
from perdure.codec import dump_error, tree_of
from perdure.codec.checksums import have_changed
from perdure.codec.failures import line_of
from perdure.codec.outcomes import note_step, store_err, store_exception, store_value
from perdure.codec.rebuilt_errors import RebuildReport
from perdure.codec.shapes import error_text
from perdure.ctx_calls.error_reports import tell_of_losses
from perdure.engine.drive import Drive
from perdure.engine.event_publisher import EventPublisher
from perdure.engine.step_cache import Cached, StepCaching
from perdure.engine.timers_and_signals import Wait
from perdure.errors import (
    OUTCOME_UNKNOWN,
    ExecutorNotFound,
    PerdureWarning,
    PersistenceError,
    RunDiverged,
    StepChanged,
    StepFailed,
    StepNotPicklable,
    StepTimeout,
    ValueNotStorable,
    name_key,
    name_step,
)
from perdure.executors.calls import ExecutorCall, SubmittedCall, call_plain, explain_pickling
from perdure.model.durations import MAX_INSTANT, MICROSECOND, moment
from perdure.model.idempotency import key_of_undoing
from perdure.model.journal import Entry, Intent, NextTry, StepOpening
from perdure.model.logs import log, run_fields
from perdure.model.own_names import compensation_key
from perdure.result import Err, Ok
from perdure.snapshots.step_results import load_error_of, load_value
from perdure.stepspec import StepInfo, StepPlan, current_step, mark_cancelled

_OUTCOMES: Final = (Ok, Err)
# In place of an error's class, of a step that was to run at most once and has no result.


class StepCall(msgspec.Struct, frozen=True):
    """A step as it was called."""

    key: str
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    plan: StepPlan
    caching: StepCaching | None = None
    # The keys that it has or had, the oldest first, if it was renamed.
    names: tuple[str, ...] = ()
    # Another way to run it than `Attempts`.
    attempts: type[Attempts] | None = None
    # Of a compensation: the idempotency key of what it undoes.
    undoes: str | None = None


class AttemptResult(msgspec.Struct):
    """The result of a step: the entry's fields, and the value or error that the body gets."""

    ok: bool
    payload: bytes
    value: Any = None
    error: Exception | None = None
    # Whether it is the step's outcome, which other runs may share.
    is_final: bool = True
    started_at: int = 0
    attempt: int = 1
    # Of a transaction: these write the entry, in place of the recorder's `append`, and give up what was done.
    write: Callable[..., Entry] | None = None
    roll_back: Callable[[], None] | None = None


class NotRecorded(Exception):
    """The call gets this error, and nothing is recorded of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


async def run_step(drive: Drive, step: StepCall) -> Any:
    """Return the step's value, recorded or fresh; raise what it raised."""
    calls = drive.calls
    if calls.is_refusing:
        await calls.admitted()
    if step.caching is not None:
        return await _run_shared(drive, step)
    calls.use(step.key, "step")
    call = CalledStep(drive, step)
    if drive.records_nothing and step.plan.is_bare and step.plan.retry.attempts == 1:
        return await _call_directly(drive, call)
    await calls.ask(call)
    return call.result()


async def _call_directly(drive: Drive, call: CalledStep) -> Any:
    """Call the function in the task of the body, for a run of which nothing is recorded: there is no order to keep.

    A step without a store costs half as much as in a task of its own.
    """
    step, context = call.step, call.new_context()
    attempt = Attempts(drive, call, step)
    info = StepInfo(drive.run.id, call.key, 1, drive.idempotency_keys.of(call.key, step.names), None, False, drive.reference)
    context.run(current.set, info)
    task = asyncio.current_task()
    requests = 0 if task is None else task.cancelling()
    try:
        value = await _await_in(context, context.run(step.fn, *step.args))
    except (Exception, BaseExceptionGroup, asyncio.CancelledError) as raised:  # noqa: BLE001 - a step may raise anything
        if isinstance(raised, asyncio.CancelledError):
            drive.calls.free(call.key)
        call.outcome = None, attempt.fail(raised)
    else:
        result = attempt.succeed(value)
        call.outcome = result.value, result.error
        if task is not None and task.cancelling() > requests:  # the function has ended all the same
            asyncio.get_running_loop().call_soon(cancel_again, task, ())
    drive.note_time()
    if (error := call.outcome[1]) is not None:
        drive.calls.raised(call.key, error)
    del error  # its traceback refers to this frame
    return call.result()


@types.coroutine
def _await_in(context: contextvars.Context, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await this, with each of its turns in this context."""
    coroutine: Any = awaitable if type(awaitable) is types.CoroutineType else _awaited(awaitable)
    resume, value = coroutine.send, None
    while True:
        try:
            waits_for = context.run(resume, value)
        except StopIteration as ended:
            return ended.value
        try:
            value, resume = (yield waits_for), coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - cancelled, or what the awaited future raised
            value, resume = error, coroutine.throw


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _run_shared(drive: Drive, step: StepCall) -> Any:
    """As `run_step`, for a step whose key names a cached value: used again, it gives what the first use gave."""
    drive.calls.check_place(step.key)
    while (first := drive.shared_calls.get(step.key)) is not None:
        again = UsedAgain(first, CalledStep(drive, step))
        if first.entry is None:
            drive.calls.cursor.follow(first, again)
            await drive.calls.ask(again)
        entry = first.entry
        if entry is not None and entry is not UNRECORDED and entry.phase == "close":
            if have_changed(entry.args_hash, again.called.args_hash):  # by the same code, which may handle it
                changed = changed_arguments(drive, step.key)
                drive.warn_or_raise(drive.options.on_changed_arguments, changed, f"arguments of {step.name}")
            value, error = load_result(drive, step.key, step.plan, entry)
            if error is not None:
                raise error
            return value
    drive.calls.use(step.key, "step")
    call = drive.shared_calls[step.key] = CalledStep(drive, step)
    try:
        await drive.calls.ask(call)
    finally:
        is_recorded = call.entry is not None and call.entry.seq and call.entry.phase == "close"
        if not is_recorded and drive.shared_calls.get(step.key) is call:
            del drive.shared_calls[step.key]
    return call.result()


def replay_step(drive: Drive, entry: Entry, plan: StepPlan, args: tuple[Any, ...]) -> Any:
    """Return what a recorded step gives the body, or raise its error, when its turn has come without waiting."""
    args_hash = drive.codec.checksum(args) if args and drive.compares_arguments else None
    compare_arguments(drive, entry.key, entry, args_hash)
    value, error = load_result(drive, entry.key, plan, entry)
    if error is not None:
        raise error
    return value


class UsedAgain(Call):
    """A call whose key names a cached value, and was used before: it records nothing, and gets what the first use has got."""

    __slots__ = ("called",)
    is_wait = True

    def __init__(self, first: Call, called: CalledStep) -> None:
        super().__init__(f"{first.key}\0{id(self)}", "step")
        self.called = called

    def start(self) -> None:
        """The first use does it."""

    def deliver(self, entry: Entry) -> None:
        super().deliver(entry if entry.phase == "close" else UNRECORDED)

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        del entry  # each use loads the result by itself: errors are not shared
        return None, None


class CalledStep(Call):
    """The call of a step."""

    __slots__ = ("_attempts", "_drive", "_result", "_task", "args_hash", "step")

    def __init__(self, drive: Drive, step: StepCall) -> None:
        super().__init__(step.key, "step")
        self.step = step
        # Now, since the body may change what it passed while the call waits.
        self.args_hash = drive.codec.checksum(step.args) if step.args and drive.compares_arguments else None
        self.context = contextvars.copy_context()
        self._drive = drive
        self._attempts: Attempts | None = None
        self._task: asyncio.Task[AttemptResult] | None = None
        # The entry that was recorded just now, and what it is made of.
        self._result: tuple[Entry, AttemptResult] | None = None

    def start(self) -> None:
        drive, step = self._drive, self.step
        if self._attempts is None:  # otherwise its transaction was rolled back after its result was recorded
            self._attempts = (step.attempts or Attempts)(drive, self, step)
        drive.at_work.add(self)
        self._task = task = drive.body.run_first_turn(self._attempts.run(), self.new_context())
        if task.done():
            self.ended(task)
        else:
            drive.steps[task] = self
            task.add_done_callback(self.ended, context=drive.body.context)

    def new_context(self) -> contextvars.Context:
        """Return a copy of the context of the task that called the step, outside the body."""
        context = contextvars.copy_context() if self.context is None else self.context.copy()
        context.run(current.set, None)
        return context

    def stop(self) -> None:
        if self._task is not None:
            self._drive.body.on_host(self._task.cancel)

    def end_unstarted(self) -> None:
        now = self._drive.clock.now()
        self._drive.record(self, phase="cancel", ok=False, name=self.step.name, started_at=now, ended_at=now)

    def ended(self, task: asyncio.Task[AttemptResult]) -> None:
        """The step has come to an end, whatever it is: record it."""
        drive = self._drive
        if task is not self._task:
            return
        self._task = None
        drive.at_work.discard(self)
        drive.steps.pop(task, None)
        if drive.must_not_record or not drive.calls.is_asked(self):
            if not task.cancelled() and task.exception() is None and (roll_back := task.result().roll_back) is not None:
                roll_back()
        elif task.cancelled() and not self.is_cancelled:
            drive.note_cancelled_from_outside(name_step(self.key))
        elif task.cancelled():
            self.end_unstarted()
        elif (failure := task.exception()) is None:
            result = task.result()
            self._result = self._record(result), result
        elif isinstance(failure, NotRecorded):
            drive.calls.free(self.key)  # another use of the key gets the same error
            drive.calls.give_unrecorded(self, failure.error)
        elif isinstance(failure, Exception | SystemExit | KeyboardInterrupt):
            drive.fail(failure)
        else:  # what is no exception ends the function, and is not recorded as a result
            drive.calls.give_unrecorded(self, failure)

    def _record(self, result: AttemptResult) -> Entry:
        drive, step = self._drive, self.step
        if drive.streams is not None:  # whose readers are told how each step has ended
            drive.streams.note_end(self.key, result.attempt if result.ok else 0)
        return drive.record(
            self,
            write=result.write,
            ok=result.ok,
            name=step.name,
            payload=result.payload,
            attempt=result.attempt,
            args_hash=self.args_hash,
            started_at=result.started_at,
            ended_at=drive.clock.now(),
        )

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        if self._result is not None and self._result[0] is entry:
            _, result = self._result
            if result.error is not None:
                self._drive.calls.raised(self.key, result.error)
            return result.value, result.error
        if self._result is None and entry.phase == "close":
            compare_arguments(self._drive, self.key, entry, self.args_hash)
        return load_result(self._drive, self.key, self.step.plan, entry)

    def deliver(self, entry: Entry) -> None:
        self._attempts = None  # which refers to this
        super().deliver(entry)

    def dropped(self) -> None:
        self._attempts = None

    def publish(self, publisher: EventPublisher, entry: Entry) -> None:
        publisher.publish_result(self, entry, self.step.name, self.step.plan.returns)


def compare_arguments(drive: Drive, key: str, entry: Entry, args_hash: bytes | None) -> None:
    """React if a recorded step was called with other arguments, as `on_changed_arguments` says."""
    if entry.args_hash != args_hash and have_changed(entry.args_hash, args_hash):
        drive.react(drive.options.on_changed_arguments, changed_arguments(drive, key), f"arguments of {entry.name}")


def load_result(drive: Drive, key: str, plan: StepPlan, entry: Entry) -> tuple[Any, Exception | None]:
    """Return the recorded value, or the recorded error."""
    try:
        if entry.ok:
            return load_value(drive.codec, entry, plan.returns), None
        error = rebuild_error(drive, key, plan, entry)
    except (ValueError, msgspec.MsgspecError) as reason:
        drive.corrupt(f"the record of {name_step(key)}", reason)
    drive.calls.raised(key, error)
    return None, error


def rebuild_error(drive: Drive, key: str, plan: StepPlan, failed: Entry) -> Exception:
    """Return a new instance of the error that this entry records. Raises ValueError."""
    report = RebuildReport()
    error = load_error_of(drive.codec, failed, key, plan.fails_with, (plan.module, drive.module), report)
    if not drive.is_check:  # which tells in its own way
        tell_of_losses(drive.run, key, report)
    if report.gone:
        drive.note_gone(failed, report.gone)
    return error


def changed_arguments(drive: Drive, key: str, by: str = "") -> StepChanged:
    """The error of a step that was called with other arguments than those that are recorded."""
    return StepChanged(drive.run.id, key, f"called with other arguments{by}", "called with these")


class Attempts(msgspec.Struct):
    """The live attempts of one step, in a task of the host."""

    _drive: Drive
    _call: CalledStep
    _step: StepCall
    _attempt: int = 1
    # Whether no attempt was made here: the context is as it was when the step was called.
    _is_first: bool = True
    # A plain function that timed out and still runs in its thread, or in its executor.
    _lingering: asyncio.Future[Any] | None = None
    # Where the function is called, if not in a thread of ours.
    _executor: Executor | None = None

    @property
    def _args_hash(self) -> bytes | None:
        return self._call.args_hash

    async def run(self) -> AttemptResult:
        """Return what the step came to."""
        caching = self._step.caching
        result = await (self._until_done() if caching is None else self._cached(caching))
        result.attempt = self._attempt
        return result

    async def _cached(self, caching: StepCaching) -> AttemptResult:
        """Return the cached value, or the function's: one run at a time asks for it, and keeps it for the others."""
        async with caching.flight(self._step.key):
            cached = await self._read(caching)
            found = None if cached is None else self._from_cache(cached)
            if found is not None:
                self._attempt = 0
                await self._publish(events.StepCacheHitEvent)
                found.started_at = self._drive.clock.now()
                return found
            await self._publish(events.StepCacheMissEvent)
            result = await self._until_done()
            if result.is_final:
                kept = Cached(result.ok, msgspec.Raw(result.payload), self._args_hash, None)
                await caching.keep(self._step.key, kept, self._step.plan.ttl)
            return result

    async def _read(self, caching: StepCaching) -> Cached | None:
        try:
            cached = await caching.read(self._step.key)
        except PersistenceError as failure:
            if self._step.plan.at_most_once:
                # Another run may have done it, and doing it twice is worse than waiting for the cache.
                self._drive.stop_because(failure)
            caching.warn_of_failure(f"{failure}; the step is done without it")
            return None
        if cached is not None and have_changed(cached.args_hash, self._args_hash):
            error = changed_arguments(self._drive, self._step.key, " by the run whose result is in the cache")
            try:
                self._drive.warn_or_raise(self._drive.options.on_changed_arguments, error, f"arguments of {self._step.name}")
            except Exception as refusal:
                raise NotRecorded(refusal) from refusal
        return cached

    def _from_cache(self, cached: Cached) -> AttemptResult | None:
        """Return the cached result for this run. None if it cannot be rebuilt: its class has changed, or it is another step's."""
        codec, step, payload = self._drive.codec, self._step, bytes(cached.payload)
        try:
            if not cached.ok:
                return AttemptResult(False, payload, error=self._rebuild(payload))
            if self._drive.is_strict and (losses := tree_of(payload)[1]):
                return self._failed(ValueNotStorable(losses[0].path, "the run that kept it in the cache was not strict"))
            return AttemptResult(True, payload, value=codec.load(payload, step.plan.returns))
        except (ValueError, msgspec.MsgspecError) as reason:
            message = f"what the cache has under {step.key!r} cannot be used, so that the step runs again: {reason}"
            warnings.warn(message, PerdureWarning, stacklevel=2)
            return None

    async def _publish(self, kind: type[events.StepEvent], **fields: Any) -> None:
        if self._drive.publisher.subscribers:
            await self._drive.publisher.publish_step(kind, self._step, self._attempt, **fields)

    async def _publish_start(self) -> None:
        await self._publish(events.StepStartEvent)
        await self._drive.may_start()  # a listener takes time, in which anything may happen

    async def _until_done(self) -> AttemptResult:
        drive, step = self._drive, self._step
        opened = drive.calls.cursor.openings.get(step.key)
        if opened is not None and (unknown := await self._resume_after(opened)) is not None:
            unknown.started_at = opened.started_at
            return unknown
        undoes = step.undoes
        idempotency_key = drive.idempotency_keys.of(step.key, step.names) if undoes is None else key_of_undoing(undoes)
        while True:
            if not drive.may_start_now():
                await drive.may_start()
            if drive.publisher.subscribers:
                await self._publish_start()
            started_at = drive.clock.now()
            result = await self._attempt_once(idempotency_key, started_at)
            if result is not None:
                result.started_at = started_at
                return result

    async def _attempt_once(self, idempotency_key: str, started_at: int) -> AttemptResult | None:
        """Call the function once; None if it failed, and the time for the next attempt has come."""
        drive, replace_step = self._drive, self._drive.settings.replace_step
        step = self._step if replace_step is None else replace_step(self._step)
        self._executor = None if step.plan.executor is None else self._find_executor(step.plan.executor)
        info = StepInfo(drive.run.id, step.key, self._attempt, idempotency_key, step.undoes, False, drive.reference)
        token = current.set(info)
        drive.executing[step.key] = started_at
        try:
            work = step.fn(*step.args) if step.plan.is_bare else self._called(step)
            value = await (work if self._is_first else self._in_new_context(work))
        except (KeyboardInterrupt, SystemExit) as interrupt:
            drive.stop_at_exit(interrupt, name_step(step.key))
        except (Exception, asyncio.CancelledError, BaseExceptionGroup) as raised:  # noqa: BLE001 - a step may raise anything
            error = raised
        else:
            return self._succeeded(value)
        finally:
            current.reset(token)
            del drive.executing[step.key]
            self._is_first = False
            if drive.must_stop:
                drive.look_whether_drained()
        try:
            return await self._after(error)
        finally:
            del error  # its traceback refers to this frame

    def _in_new_context(self, work: Awaitable[Any]) -> Awaitable[Any]:
        """Run another attempt without what the one before has set in its context."""
        context = self._call.new_context()
        context.run(current.set, current.get())
        return context.run(asyncio.ensure_future, work)

    def _find_executor(self, executor: Executor | str) -> Executor:
        """The executor that is meant. If none has this name here, the run does not fit this process; it may fit another."""
        if not isinstance(executor, str):
            return executor
        known = self._drive.options.executors
        if executor not in known:
            self._drive.misfit(ExecutorNotFound(self._step.key, executor, known))
        return known[executor]

    async def _after(self, raised: BaseException) -> AttemptResult | None:
        """Return the result of the step; None when the time for another attempt has come."""
        if isinstance(raised, ThreadsClosed):  # that says nothing about the step
            self._drive.stop()
            return None
        error = self._as_exception(raised)
        if isinstance(error, StepTimeout):
            await self._publish(events.StepTimeoutEvent, error=error)
        if isinstance(error, StepNotPicklable) or not self._is_retried(error):
            if self._attempt > 1:
                self._log_last_attempt(error)
            return self._failed(error, is_final=isinstance(raised, Exception))
        await self._pause(error)
        return None

    def _is_retried(self, error: Exception) -> bool:
        """Return whether the step is tried again after this error: not if the function that `Retry(on=)` has raises itself."""
        try:
            return self._step.plan.retry.wants(error, self._attempt)
        except Exception as failure:  # noqa: BLE001 - a user's function may raise anything
            run, key, what = self._drive.run, self._step.key, f"{type(failure).__name__}: {error_text(failure)}"
            with contextlib.suppress(Exception):  # `__notes__` may be anything in a user's class
                BaseException.add_note(error, f"not tried again, because the function of Retry(on=) raised {what}")
            log.warning(
                "step %s of run %r (%s) is not tried again, because the function of its Retry(on=) raised %s",
                name_key(key),
                run.id,
                run.workflow,
                what,
                exc_info=failure,
                extra=run_fields(run, key=key),
            )
            return False

    def _log_last_attempt(self, error: Exception) -> None:
        run, key = self._drive.run, self._step.key
        fields = {**run_fields(run, key=key), "attempt": self._attempt}
        log.warning("%s of run %r failed after %d attempts: %r", name_step(key), run.id, self._attempt, error, extra=fields)

    def _log_failed_attempt(self, error: Exception, pause: float) -> None:
        run, key, attempt = self._drive.run, self._step.key, self._attempt
        fields = {**run_fields(run, key=key), "attempt": attempt}
        log.warning(
            "%s of run %r of workflow %r failed in attempt %d, and is tried again in %.1f s: %s",
            name_step(key),
            run.id,
            run.workflow,
            attempt,
            pause,
            line_of(error),
            extra=fields,
        )
        log.debug("attempt %d of %s of run %r:", attempt, name_step(key), run.id, exc_info=error, extra=fields)

    def _as_exception(self, raised: BaseException) -> Exception:
        """Return the error of the function. A CancelledError that nobody requested is its own failure; others are raised."""
        if isinstance(raised, Exception):
            return raised
        task = asyncio.current_task()
        if task is None or task.cancelling() or self._drive.must_not_record:
            raise raised if isinstance(raised, asyncio.CancelledError) else asyncio.CancelledError from raised
        if isinstance(raised, BaseExceptionGroup):
            return exception_group(raised, self._step.key)
        return StepFailed(self._step.key, "CancelledError", str(raised) or "raised by the step's function itself")

    def _outcome_unknown(self, opened: Entry) -> AttemptResult:
        error = StepFailed(
            self._step.key,
            OUTCOME_UNKNOWN,
            f"it was started at {moment(opened.started_at).isoformat()} and it, or its process, ended without a result; "
            "with at_most_once=True it is not run again, so find out what it did",
        )
        return self._failed(error, is_final=False)

    def fail(self, raised: BaseException) -> Exception:
        """Return what the call raises for this. Raises CancelledError if the call was cancelled."""
        result = self._failed(self._as_exception(raised))
        return result.error or StepFailed(self._step.key, type(raised).__name__, str(raised))

    def succeed(self, value: Any) -> AttemptResult:
        """Return what the call gets for this value."""
        return self._succeeded(value)

    def _succeeded(self, value: Any) -> AttemptResult:
        codec, step = self._drive.codec, self._step
        try:
            if isinstance(value, _OUTCOMES):
                if isinstance(value, Err):
                    payload = store_err(codec, value, step.plan.fails_with, is_strict=self._drive.is_strict)
                    returned = self._rebuild(payload) if self._drive.rebuilds_errors else StepFailed(step.key, value.error)
                    return AttemptResult(False, payload, error=returned)
                value = value.value
            payload, kept = store_value(codec, value, step.plan.returns, is_strict=self._drive.is_strict)
        except Exception as error:  # noqa: BLE001 - or what the value's own code raises when it is looked at
            # The effect has happened: recorded as failed, or it would be repeated for ever.
            error.add_note(f"{name_step(step.key)} ran, but what it returned cannot be recorded")
            return self._failed(error)
        return AttemptResult(True, payload, kept)

    def _failed(self, error: Exception, *, is_final: bool = True) -> AttemptResult:
        note_step(error, self._step.key, self._drive.run.id)
        payload = store_exception(error)
        raised = self._rebuild(payload) if self._drive.rebuilds_errors else error
        return AttemptResult(False, payload, error=raised, is_final=is_final)

    def _rebuild(self, payload: bytes) -> Exception:
        """The error as a replay raises it."""
        return rebuild_error(
            self._drive, self._step.key, self._step.plan, Entry(seq=0, key=self._step.key, ok=False, payload=payload)
        )

    def _open(self, payload: bytes) -> Entry:
        now = self._drive.clock.now()
        entry = self._drive.recorder.append(
            self._step.key,
            self._step.name,
            phase="open",
            payload=payload,
            attempt=self._attempt,
            args_hash=self._args_hash,
            started_at=now,
            ended_at=now,
        )
        # For a later call too: this one may be cancelled and its key used again.
        self._drive.calls.cursor.openings[self._step.key] = entry
        return entry

    async def _pause(self, error: Exception) -> None:
        """Record which attempt is next and when, wait until then, and for a thread that is still at it."""
        pause = self._step.plan.retry.wait_after(self._attempt, error)
        self._log_failed_attempt(error, pause)
        at = min(self._drive.clock.now() + round(pause * MICROSECOND), MAX_INSTANT)
        failed, self._attempt = self._attempt, self._attempt + 1
        opened = self._open(msgspec.json.encode(NextTry(at, msgspec.Raw(dump_error(error)))))
        if self._drive.publisher.subscribers:
            await self._drive.recorded()
            await self._drive.publisher.publish_step(events.StepRetryEvent, self._step, failed, error=error, next_at=moment(at))
        await self._wait_until(at, opened.seq)
        if self._lingering is not None and not self._step.plan.abandon:
            await asyncio.wait([self._lingering])
        self._lingering = None

    async def _resume_after(self, opened: Entry) -> AttemptResult | None:
        """Go on after what was begun before: wait for the next attempt, or, where there must be none, give that as the result."""
        drive, undoing = self._drive, compensation_key(self._step.key)
        if drive.calls.cursor.is_known(undoing):  # it was undone, or is about to be
            drive.misfit(RunDiverged(drive.run.id, self._step.key, [undoing]))
        try:
            next_try = msgspec.json.decode(opened.payload, type=StepOpening)
        except msgspec.MsgspecError as reason:
            drive.corrupt(f"what was begun of {name_step(self._step.key)}", reason)
        if isinstance(next_try, Intent) and next_try.belongs_to is not None:
            return None  # another run has begun it
        if self._step.plan.at_most_once:
            return self._outcome_unknown(opened)
        if isinstance(next_try, Intent):
            return None  # the step has a compensation, or had at_most_once=True when it was started
        self._attempt = opened.attempt
        await self._wait_until(next_try.at, opened.seq)
        return None

    async def _wait_until(self, at: int, seq: int) -> None:
        """Pause; unless a thread of ours still runs, the run may leave memory meanwhile."""
        drive = self._drive
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on(_: object) -> None:
            drive.at_work.add(self._call)  # now: the run must not leave memory before this goes on
            if not over.done():
                over.set_result(None)

        wait = Wait(seq, at, go_on, is_immediate=True)
        may_leave = self._lingering is None or self._lingering.done()
        if may_leave:
            drive.at_work.discard(self._call)
        drive.waits.add(wait)
        drive.body.schedule()
        try:
            await over
        finally:
            drive.waits.remove(wait)
            drive.at_work.add(self._call)

    async def _called(self, step: StepCall) -> Any:
        """Call the function once as its plan says, and return its value. A test may replace the step by another."""
        plan = step.plan
        if plan.at_most_once or plan.compensate is not None or step.undoes is not None:
            await self._record_intent(step.key, plan)
        if plan.timeout is not None:
            return await self._call_in_time(step, plan.timeout)
        if plan.is_async:
            return await step.fn(*step.args)
        return await self._call_in_executor(step)

    async def _record_intent(self, key: str, plan: StepPlan) -> None:
        intents = self._drive.idempotency_keys.intents
        known, is_compensated = intents.get(key), plan.compensate is not None
        if known is None or (is_compensated and not known.is_compensated):
            intents[key] = intent = Intent(current_step().idempotency_key, is_compensated=is_compensated)
            self._open(msgspec.json.encode(intent))
            await self._drive.recorded()

    async def _call_in_time(self, step: StepCall, timeout: float) -> Any:
        """Return the function's value. Its time counts from the call: a plain function may have to wait for a thread before that.

        An executor of another process does not say when it calls the function: there the time counts from `submit`.
        """
        plan, is_by_clock = step.plan, self._drive.settings.limits_steps_by_clock
        try:
            async with asyncio.timeout(timeout if plan.is_async and not is_by_clock else None) as limit:
                if is_by_clock:
                    return await self._call_until(step, self._drive.clock.now() + round(timeout * MICROSECOND), limit)
                if plan.is_async:
                    return await step.fn(*step.args)
                return await self._call_in_executor(
                    step, _LimitFromCall(limit, asyncio.get_running_loop(), timeout, contextvars.copy_context()).start
                )
        except TimeoutError as error:
            if limit.expired():
                raise StepTimeout(step.key, timeout) from error
            raise

    async def _call_until(self, step: StepCall, at: int, limit: asyncio.Timeout) -> Any:
        """Return the function's value. Its time is over at this instant of a clock that is not the event loop's."""
        timer = self._drive.clock.call_at(at, lambda: limit.reschedule(asyncio.get_running_loop().time()))
        try:
            return await (step.fn(*step.args) if step.plan.is_async else self._call_in_executor(step))
        finally:
            timer.cancel()

    async def _call_in_executor(self, step: StepCall, on_call: Callable[[], None] | None = None) -> Any:
        """Return the value of a plain function, called in a thread of ours or by the executor of the step."""
        info = current_step()
        call = self._submit(step, info, on_call)
        self._lingering = running = asyncio.wrap_future(call)
        try:
            # Cancelling cannot stop a thread or a process, and whether it has ended must stay known. Not with `asyncio.shield`:
            # some versions of Python report what the function raises after that.
            await _end_of(running)
            value = running.result()
        except (asyncio.CancelledError, GeneratorExit):
            mark_cancelled(info)
            running.add_done_callback(_drop_failure)
            call.add_done_callback(_close_result)  # not `running`: the loop may be closed before the thread ends
            if call.cancel():  # no thread has taken it, and none will
                self._lingering = None
            raise
        except Exception as error:
            self._lingering = None
            if self._executor is None:
                raise
            explained = explain_pickling(error, step.key, step.fn, step.args)
            if explained is None:
                raise
            raise explained from error
        self._lingering = None
        return await value if inspect.isawaitable(value) else value

    def _submit(self, step: StepCall, info: StepInfo, on_call: Callable[[], None] | None) -> Future[Any]:
        context, fn, args = contextvars.copy_context(), step.fn, step.args
        if self._executor is None:
            return self._drive.settings.threads.submit_patiently(functools.partial(context.run, call_plain, fn, args, on_call))
        call = SubmittedCall(self._executor, ExecutorCall(info, fn, args, context, on_call))
        call.submit(self._drive.settings.threads, None if type(self._executor) is ThreadPoolExecutor else on_call)
        return call


def exception_group(group: BaseExceptionGroup[Any], key: str) -> ExceptionGroup[Exception]:
    """Return the group with its `Exception` members, and with `StepFailed` in place of others."""
    members: list[Exception] = []
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup) and not isinstance(member, Exception):
            members.append(exception_group(member, key))
        elif isinstance(member, Exception):
            members.append(member)
        else:
            members.append(StepFailed(key, type(member).__qualname__, str(member)))
    found = ExceptionGroup(group.message, members).with_traceback(group.__traceback__)
    found.__cause__, found.__context__, found.__suppress_context__ = (
        group.__cause__,
        group.__context__,
        group.__suppress_context__,
    )
    with contextlib.suppress(Exception):  # `__notes__` may be anything in a user's class
        for note in getattr(group, "__notes__", ()):
            found.add_note(note)
    return found


class _LimitFromCall(msgspec.Struct, frozen=True):
    """A time limit on an event loop that begins when a thread calls the function, or has submitted it to an executor."""

    limit: asyncio.Timeout
    loop: asyncio.AbstractEventLoop
    seconds: float
    # That of the step, and not the thread's: the timer belongs to the step, and not to the body.
    context: contextvars.Context

    def start(self) -> None:
        """In the thread: the loop may be busy, so the time is taken here."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._reschedule, self.loop.time() + self.seconds, context=self.context)

    def _reschedule(self, at: float) -> None:
        with contextlib.suppress(RuntimeError):  # the step has ended, or was cancelled
            self.limit.reschedule(at)


def _end_of(running: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Return a future that is done when this one is. It may be cancelled on its own."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    return ended


def _drop_failure(running: asyncio.Future[Any]) -> None:
    """Retrieve what a function raised that nobody waits for any more, so that asyncio does not report it."""
    if not running.cancelled():
        running.exception()


def _close_result(call: Future[Any]) -> None:
    """Close the coroutine that a plain function returned after its call was cancelled."""
    if not call.cancelled() and call.exception() is None and inspect.iscoroutine(call.result()):
        call.result().close()
