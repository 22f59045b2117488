"""The ctx calls of a body: which keys it used, and when each call may go on.

A call finds its record and gets it when its turn comes, or finds none and goes ahead when the run is live. Every operation (a
step, a sleep, a race) is made of what is here. When the run has left memory or ended, calls are refused; while a run is closed,
those of every task but the one that closes it.

A call whose result is in the journal gets that result: cancelling it takes effect at the branch's next await. On a replay the
result is there from the start, so a cancellation that hid it on the first run would send the replay another way. A call that was
cancelled before it had a result leaves a `cancel` entry, by which a replay tells it from a later call with the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

import msgspec

from perdure.codec.failures import line_of
from perdure.engine.body_tasks import BodyTask, BodyTasks, nothing
from perdure.engine.owed_results import OwedResults
from perdure.engine.replay_order import Receiver, ResultQueue
from perdure.engine.timers_and_signals import Wait, Waits
from perdure.errors import COMPENSATION_PREFIX, DuplicateStep, PerdureError, RunDiverged, RunFinished, StepChanged, Unloaded
from perdure.model.journal import Entry, JournalIndex, Kind, name_kind
from perdure.result import Err
from perdure.stepspec import StepInfo, current

# What a call of ctx.patched gets when the journal goes on after it.
_JOURNAL_GOES_ON: Final = object()
# The key of the call in which the end of the function waits.
_END_KEY: Final = "\0end"
# A body may try a few things on its way out; one that tries for ever must not keep the loop to itself.
MOST_REFUSALS: Final = 100


class Parked(asyncio.Future[Any]):
    """What a branch waits for inside a ctx call.

    Shielded, it refuses: `Task.cancel` then throws CancelledError when the result has come, and `Calls.parked` returns that.
    """

    branch: BodyTask | None = None
    is_shielded = False

    def cancel(self, msg: Any | None = None) -> bool:
        if self.is_shielded:
            return False
        cancelled = super().cancel(msg)
        if cancelled and self.branch is not None:
            self.branch.note_cancel()
        return cancelled


class CtxCall(msgspec.Struct, eq=False):
    """One ctx call in progress: a key, the branch that made it, and the future it waits on.

    Inside `with call:` its branch waits for us. A call that is cancelled there frees its key.
    """

    key: str
    kind: Kind
    branch: BodyTask | None
    calls: Calls
    # Whether an earlier attempt recorded that this call was cancelled, so a result under its key is that of a later call.
    was_cancelled: bool = False
    future: Parked | None = None
    # What has to be done when it is cancelled, before it returns to the body.
    unwind: Callable[[], Coroutine[Any, Any, None]] | None = None

    def __enter__(self) -> None:
        if self.branch is not None:
            self.branch.ours()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        branch = self.branch
        if branch is not None:
            branch.leave()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self.calls.cancelled(self)
        elif branch is not None:
            branch.defer_cancellation()

    async def wait_to_leave(self) -> None:
        """Return when this call, which was cancelled, may return to the body: in the order of cancellation, as on a replay."""
        if self.branch is not None:
            await self.branch.wait_to_leave()

    def left(self) -> None:
        """Its branch has what it asked for, and is about to run its own code again."""
        if self.branch is not None:
            self.branch.leave()

    def free(self) -> None:
        """Let the key be used again."""
        self.calls.free(self.key)

    def park(self, *, is_shielded: bool = False) -> Parked:
        """A new future for this call to wait on; cancelled if the call was and the step's function let that pass."""
        branch = self.branch
        self.future = future = Parked()
        future.branch = branch
        if is_shielded:
            future.is_shielded = True
            if branch is not None:
                branch.note_result()
        elif branch is not None and branch.is_leaving and branch.confirm_cancel():
            future.cancel()
        return future

    def shield(self) -> None:
        """Its result is recorded: cancelling it takes effect after that was delivered."""
        if self.future is not None:
            self.future.is_shielded = True
        if self.branch is not None:
            self.branch.note_result()

    def abandon(self) -> None:
        """No result will be delivered: it can be cancelled."""
        if self.future is not None:
            self.future.is_shielded = False
        if self.branch is not None:
            self.branch.has_result = False

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for something; not any more when it was cancelled."""
        return self.future is not None and not self.future.done()

    def resume(self) -> None:
        """Let the call go on, without a record."""
        if self.branch is not None:
            self.branch.leave()
        if self.future is not None:
            self.future.set_result(None)

    def withdraw(self) -> None:
        """Its result was undone before it was delivered: it does something live again, and can be cancelled."""
        self.abandon()
        if self.branch is not None:
            self.branch.ours()

    def deliver(self, entry: Entry) -> bool:
        """Let the call go on, and its branch with it; False when it was cancelled."""
        if self.future is None or self.future.done():
            return False
        if self.branch is not None:
            self.branch.leave()
        self.future.set_result(entry)
        return True


class Calls:
    """The calls of one drive."""

    def __init__(
        self,
        run_id: str,
        recorded: JournalIndex,
        branches: BodyTasks,
        results: ResultQueue,
        waits: Waits,
        retired: Collection[str],
        *,
        on_cancelled: Callable[[CtxCall], None],
        on_misfit: Callable[[PerdureError], NoReturn],
    ) -> None:
        self.opened = recorded.opened
        self.winners = recorded.winners
        self.retired = retired
        self._run_id = run_id
        self._thread = get_ident()
        self._branches = branches
        self._results = results
        self._waits = waits
        # What each key stands for that the journal has, or a call.
        self.kinds = recorded.kinds
        self._closed_keys = {entry.key for entry in recorded.closes} if recorded.closes else set()
        self.owed = OwedResults(recorded, retired, self._nothing_is_missing)
        self._used: set[str] = set()
        self._freed: set[str] = set()
        # How many calls of each key were cancelled before they had a result.
        self._cancelled = recorded.cancelled
        self._on_cancelled = on_cancelled
        self._on_misfit = on_misfit
        # How many numbers ctx.random() and ctx.uuid4() have given in each scope.
        self.counters: dict[tuple[tuple[str, ...], str], int] = {}
        self._live_waiters: list[CtxCall] = []
        # Calls of ctx.patched that wait until it is known whether the journal goes on after them.
        self._patch_waiters: list[CtxCall] = []
        self.patches: dict[str, bool] = {}
        # Classes of errors that were found when the error was recorded, and are not found now, by the key of the step.
        self._gone: dict[str, list[str]] = {}
        # While the function has ended and results are missing.
        self._end: CtxCall | None = None
        # The error that ended it, in one line.
        self._raised_at_end: str | None = None
        # Set while the store is asked to suspend the run: calls wait for its answer.
        self.suspending: asyncio.Future[None] | None = None
        self.is_cancelling = False
        # Whether calls are refused: the run has left memory or ended, or is being closed and this is not the task that does it.
        self.is_refusing = False
        self._closing_branch: BodyTask | None = None
        self._refusals = 0
        self._raised: list[tuple[BaseException, str]] = []
        self.closed: Literal["unloaded", "ended"] | None = None

    def begin(self, key: str, kind: Kind) -> CtxCall:
        """A new call under `key`, after it was admitted, or the error that says why there cannot be one."""
        branch = self._use(key, kind)
        return CtxCall(key, kind, branch, self, bool(self._cancelled) and self._was_cancelled(key))

    def begin_again(self, key: str, use: int) -> CtxCall:
        """A call that wants what an earlier call of `key` gets. It records nothing, and has a key that no call of a user has."""
        self.check()
        own_key = f"{key}\0{use}"
        return CtxCall(own_key, "step", self._use(own_key, "step"), self)

    def _use(self, key: str, kind: Kind) -> BodyTask | None:
        """The branch that uses the key from now on."""
        if get_ident() != self._thread or current.get() is not self._branches:
            self.check_place(key)
        branch = self._branches.running
        if branch is not None and branch.deferred_cancel:
            branch.check_cancellation()
        if key in self._used:
            raise DuplicateStep(self._run_id, key)
        recorded = self.kinds.setdefault(key, kind)
        if recorded != kind and recorded != "foreign":  # noqa: PLR1714 - a tuple would be made for every step
            changed = StepChanged(self._run_id, key, name_kind(recorded), name_kind(kind))
            if key in self._freed:  # this code has used it as both
                raise changed
            self._on_misfit(changed)
        self._used.add(key)
        if self.owed.unasked or self.owed.missing:
            self.owed.ask(key)
        return branch

    def check_place(self, key: str) -> None:
        """Raise if this is called in a step's function, or in another thread than the body's: nothing here is thread-safe."""
        asked = key.partition("\0")[0]
        if isinstance(current.get(), StepInfo):
            raise RuntimeError(
                f"ctx was used inside a step's function (for {asked!r}); return a value and use ctx in the body instead"
            )
        if get_ident() != self._thread:
            raise RuntimeError(
                f"ctx was used in another thread than the body of run {self._run_id!r} (for {asked!r}); "
                "call ctx in the body, and return values to it from steps and threads"
            )

    def is_in_thread_of_body(self) -> bool:
        """Whether this is called in the thread of the body's event loop."""
        return get_ident() == self._thread

    def _nothing_is_missing(self) -> None:
        """Let calls go ahead that were held back; before the run is live, `go_live` does it."""
        if self._results.is_live:
            asyncio.get_running_loop().call_soon(self.go_live)

    def _was_cancelled(self, key: str) -> bool:
        left = self._cancelled.get(key, 0)
        if left:
            self._cancelled[key] = left - 1
        return left > 0

    def next_record(self, key: str) -> Entry | None:
        """A call of a step from its beginning to its end, if the next record is its own, as on nearly every replay.

        None when the call has to wait, when a key was used by a cancelled call too, and for keys that need escaping.
        """
        if self.is_refusing or not self._results.is_next(key) or key[0] in "/%" or self._cancelled:
            return None
        self._use(key, "step")
        return self._results.take()

    def may_go_ahead(self, call: CtxCall) -> bool:
        """Whether the run is live and has no record of this call, so that there is no `turn` to wait for."""
        return (
            self._results.is_live
            and call.key not in self._closed_keys
            and not self.owed.missing
            and self.suspending is None
            and self.closed is None
        )

    def _is_new(self, call: CtxCall) -> bool:
        """Whether the journal knows nothing of this call: it was not begun before, and not cancelled."""
        return call.key not in self.opened and not call.was_cancelled and call.key not in self._closed_keys

    async def turn(self, call: CtxCall) -> Entry | None:
        """The record of this call when its turn comes; None when there is none and the run is live."""
        if call.key in self._closed_keys and not call.was_cancelled:
            return await self._ask(call)
        if self.suspending is not None:
            await asyncio.shield(self.suspending)
        if not self._results.is_live or (self.owed.missing and self._is_new(call)):
            self._live_waiters.append(call)
            self._results.note_call()
            await self.parked(call, call.park())
        if self.closed is not None:
            self.refuse()
        if call.key in self._closed_keys:
            return await self._ask(call)  # cancelled in an earlier attempt, but not in this one: nothing recorded runs again
        self._results.note_call()
        return None

    def wait_for_delivery(self, call: CtxCall, entry: Entry) -> Coroutine[Any, Any, Any]:
        """Done when the result just recorded is acknowledged and may reach the body."""
        self._closed_keys.add(entry.key)
        future = call.park(is_shielded=True)
        self._results.add(entry, call)
        return self.parked(call, future)

    def resolve(self, entry: Entry, receiver: Receiver) -> None:
        """A timer or a signal resolved a wait; `receiver` gets the record when it is acknowledged and its turn comes."""
        self._closed_keys.add(entry.key)
        if isinstance(receiver, CtxCall):
            receiver.shield()
        self._results.add(entry, receiver)

    def withdraw_result(self, opened: Entry) -> None:
        """The result of this key was undone before it was recorded, and the call runs again: this entry says when."""
        self._closed_keys.discard(opened.key)
        self.opened[opened.key] = [opened]

    def is_recorded(self, key: str) -> bool:
        """Whether the journal has the outcome of `key`."""
        return key in self._closed_keys

    def find_former_key(self, keys: Iterable[str]) -> str | None:
        """The first of these keys that the journal knows and this body has not used."""
        return next((key for key in keys if key in self.kinds and key not in self._used), None)

    def is_known(self, key: str) -> bool:
        """Whether the journal has an entry of `key`."""
        return key in self.kinds

    def is_in_use(self, key: str) -> bool:
        """Return whether a call of the body has this key."""
        return key in self._used

    def was_called(self, key: str) -> bool:
        """Return whether the body has made a call with this key, cancelled or not."""
        return key in self._used or key in self._freed

    def is_foreign(self, key: str) -> bool:
        """Whether others recorded the outcome of `key`."""
        return self.kinds.get(key) == "foreign"

    async def parked(self, call: CtxCall, future: Parked) -> Any:
        """What `future` gives; `Unloaded` when the run left memory instead.

        Cancelled when it has a record, it gives that, and the end of the call sees to the cancellation.
        """
        if self.closed is not None:
            future.cancel()  # nothing will be delivered, and perhaps nothing cancels this task any more
        try:
            return await future
        except asyncio.CancelledError:
            has_record = future.done() and not future.cancelled() and isinstance(future.result(), Entry)
            if has_record and self.closed is None:
                return future.result()
            self._results.withdraw(call.key)
            if call in self._live_waiters:
                self._live_waiters.remove(call)
            if call.unwind is not None:
                await call.unwind()
            await call.wait_to_leave()
            if self.closed == "unloaded":
                self.refuse()
            raise

    def cancelled(self, call: CtxCall) -> None:
        """The body cancelled the call before it had a result: its key may be used again, and the journal tells the two apart."""
        self.free(call.key)
        if self.closed is not None or self._closing_branch is not None:
            return  # nothing uses the key again, and a retry must not take its next call for this one
        if not call.was_cancelled:
            self._on_cancelled(call)
        else:
            self.owed.note_cancelled_again(call.key)

    def free(self, key: str) -> None:
        """Let the key be used again, for the same kind of call."""
        self._used.discard(key)
        self._freed.add(key)

    async def wait(self, call: CtxCall, wait: Wait) -> Entry:
        """The record that resolves `wait`. While it waits the run may leave memory."""
        future = call.park()
        self._waits.add(wait)
        self._results.note_call()
        try:
            entry: Entry = await self.parked(call, future)
        finally:
            self._waits.remove(wait)
        return entry

    async def _ask(self, call: CtxCall) -> Entry:
        future = call.park(is_shielded=True)
        self._results.ask(call.key, call)
        entry: Entry = await self.parked(call, future)
        return entry

    def go_live(self) -> None:
        """The journal is used up: let the calls that found no record go ahead, in the order in which they were made.

        While results are missing, calls that the journal does not know stay: `find_divergence` judges them.
        """
        self.take_patches()
        waiters, self._live_waiters = self._live_waiters, []
        for call in waiters:
            if self.owed.missing and self._is_new(call):
                self._live_waiters.append(call)
            elif call.future is not None and not call.future.done():
                call.future.set_result(None)

    async def find_patch(self, call: CtxCall) -> bool | None:
        """Whether the code at a call of ctx.patched is new to the run: True as recorded, False when the journal goes on after it.

        None when the journal ends here: it is new, and that has to be recorded.
        """
        if call.key in self._closed_keys and not call.was_cancelled:
            await self._ask(call)
            return True
        if not self._results.is_live or (self.owed.missing and self._is_new(call)):
            self._patch_waiters.append(call)
            try:
                self._results.note_call()
                if await self.parked(call, call.park()) is _JOURNAL_GOES_ON:
                    return False
            finally:
                self._patch_waiters.remove(call)
        if call.key in self._closed_keys:  # cancelled in an earlier attempt, but not in this one
            await self._ask(call)
            return True
        return None

    def take_patches(self) -> bool:
        """The journal ends where calls of ctx.patched wait: let them take the new code. False when none may."""
        taken = False
        for call in self._patch_waiters:
            if call.future is not None and not call.future.done() and not (self.owed.missing and self._is_new(call)):
                call.future.set_result(None)
                taken = True
        return taken

    def decide_patch(self) -> bool:
        """The body rests and the next record is not asked for, so the code after the first waiting patch asks for it."""
        for call in self._patch_waiters:
            if call.is_waiting and call.future is not None:
                call.left()
                call.future.set_result(_JOURNAL_GOES_ON)
                return True
        return False

    def note_gone(self, key: str, classes: list[str]) -> None:
        """The error of this step has a stand-in, since its class is gone: an `except` clause that matched may not match now.

        So what was begun after it, such as a wait, is owed too.
        """
        self._gone[key] = classes
        known = self._used | self._freed | self._closed_keys | self._cancelled.keys()
        self.owed.expect_open(
            entries[-1]
            for key, entries in self.opened.items()
            if entries and key not in known and not key.startswith(COMPENSATION_PREFIX)
        )

    def find_gone(self, result: Any) -> list[str]:
        """The classes that are gone of the recorded error that ended the function, or of a member of its group."""
        if not self._gone or not isinstance(result, Err):
            return []
        ended_by = _with_members(result.error)
        return [
            name for error, key in self._raised if any(error is each for each in ended_by) for name in self._gone.get(key, ())
        ]

    async def wait_to_end(self, result: Any) -> None:
        """Return when the run may end: its function has, and the branches that it left have asked for all that is missing.

        If they do not, `find_divergence` finds that when the body is at rest.
        """
        if not self.owed.missing_at_end():
            return
        self._raised_at_end = raised_by(result)
        self._end = call = CtxCall(_END_KEY, "run", self._branches.running, self, was_cancelled=True)
        self.owed.on_may_end = lambda: call.resume() if call.is_waiting else None
        with contextlib.suppress(asyncio.CancelledError), call:
            self._results.note_call()
            await self.parked(call, call.park())
        self._end = self.owed.on_may_end = None

    def stop_judging(self) -> None:
        """The body is cancelled next. Code that has changed may be cancelled all the same, at its end too."""
        self.owed.on_may_end = None
        self.owed.expect_nothing()

    def find_divergence(self) -> RunDiverged | None:
        """The error of a body at rest that wants something new, or has ended, while recorded results are missing."""
        if not self.owed.missing:
            return None
        gone = [name for names in self._gone.values() for name in names]
        if self._end is not None and self._end.is_waiting:
            return RunDiverged(self._run_id, None, self.owed.missing_at_end(), gone, self._raised_at_end)
        waiters = (*self._live_waiters, *self._patch_waiters)
        new = next((call for call in waiters if call.is_waiting and self._is_new(call)), None)
        if new is None:
            return None
        return RunDiverged(self._run_id, new.key, self.owed.missing_keys(), gone)

    def close(self, why: Literal["unloaded", "ended"]) -> None:
        """Refuse every call from now on."""
        if self.closed is None:
            self.closed = why
            self.is_refusing = True
            self._results.close()
            self._on_cancelled = self.owed.on_none_missing = nothing
            self.owed.on_may_end = None
            self._on_misfit = _refuse_misfit

    def begin_to_cancel(self) -> None:
        """The body is being cancelled. It may clean up: calls are taken as before."""
        self.is_cancelling = True

    def admit_only(self, branch: BodyTask) -> None:
        """Refuse the calls of other branches, but those that wait for children: the function has ended, or its time is up."""
        self.is_refusing, self._closing_branch = True, branch

    async def admitted(self) -> None:
        """Return at once while calls are taken.

        Calls that are refused get their error at once. Code that swallows it and calls again and again waits in the end, until
        its task is cancelled.
        """
        if not self._is_refused():
            return
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            await asyncio.get_running_loop().create_future()
        self.refuse()

    def take_opened(self, key: str) -> Entry | None:
        """The open entry of the wait that begins now, if it was recorded before.

        Used up by this: the key of a wait that is cancelled may be used again, for a wait with a deadline of its own.
        """
        opened = self.opened.get(key)
        return opened.pop(0) if opened else None

    def raised(self, key: str, error: BaseException) -> None:
        """This error goes to the body as the outcome of `key`."""
        self._raised.append((error, key))

    def failed_keys(self, result: Any) -> list[str] | None:
        """The keys whose errors ended the body, found among the causes of its own; None when there is none."""
        behind = _behind(result.error if isinstance(result, Err) else None)
        return sorted({key for known, key in self._raised if any(known is error for error in behind)}) or None

    def _is_refused(self) -> bool:
        """Whether a call of the task that runs now is refused."""
        if self.closed is not None or not self.is_refusing:
            return self.is_refusing
        running = self._branches.running
        return running is not self._closing_branch and (running is None or not running.outlives_function)

    def check(self) -> None:
        """Raise if calls are refused."""
        if self._is_refused():
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say why there can be no call."""
        if self.closed == "ended":
            raise RunFinished(self._run_id, "its body has returned, so its ctx cannot be used any more")
        if self.closed is not None:
            raise Unloaded(f"run {self._run_id!r} has left memory; this code will run again when the run is replayed")
        raise asyncio.CancelledError(f"run {self._run_id!r} is at its end, and this task of its body is left behind")


def raised_by(result: Any) -> str | None:
    """Return the error that ended the function in one line, or None if it returned."""
    return line_of(result.error) if isinstance(result, Err) and isinstance(result.error, Exception) else None


def _refuse_misfit(error: PerdureError) -> NoReturn:
    raise error


def _with_members(error: Any) -> list[Any]:
    """The error, and the members of the group that it is."""
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [error, *(each for member in members for each in _with_members(member))]


def _behind(error: Any) -> list[BaseException]:
    """The error, what it was raised from, and what is inside it if it is a group."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and not any(one is known for known in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else []
    return found
