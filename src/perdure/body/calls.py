"""The ctx calls of a body: what a call is, and how it waits for its entry.

Every call (a step, a wait, a child, a patch) has four verbs. It *asks* for the record of its key (`Calls.ask`). Without one it
*starts* (`Call.start`) when the run is live and the body rests. Its end is *recorded*. The entry is *delivered* (`Call.deliver`)
when its turn comes, and then the call returns its value or raises its error: the same on the first run and on every replay.

Cancelling a call:
- Before the body has come to rest nothing can have started, so the call is withdrawn at once. So is a wait, always: there is
  nothing to clean up.
- A step or a child that may have started is cancelled where it runs, and the call waits for its end, which is an entry, too.
- A call whose result was recorded gets that result. The task is cancelled again at its next await, unless what had asked for that
  (a time limit, a TaskGroup) has withdrawn it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Collection, Iterable
from threading import get_ident
from typing import Any, ClassVar, Final, Literal, NoReturn

from perdure.aio.own_tasks import current
from perdure.body.body_queue import BodyQueue
from perdure.body.journal_cursor import AskingCall, JournalCursor
from perdure.codec.failures import line_of
from perdure.errors import DuplicateStep, PerdureError, RunDiverged, RunFinished, StepChanged, Unloaded
from perdure.model.journal import Entry, Kind, name_kind
from perdure.result import Err
from perdure.stepspec import StepInfo

# A body may try a few things on its way out; one that tries for ever must not keep the loop to itself.
MOST_REFUSALS: Final = 100
# In place of an entry.
UNRECORDED: Final = Entry(seq=0, key="")
# So many replayed calls in a row return without letting the pump look at the clock.
MOST_IN_A_ROW: Final = 64


class Call(AskingCall):
    """One ctx call, from its key to its value."""

    __slots__ = ("cancelled_by", "context", "entry", "future", "is_recorded_now", "outcome", "waiters")

    # Whether it only waits, so that cancelling it leaves nothing to clean up.
    is_wait: ClassVar[bool] = False

    def __init__(self, key: str, kind: Kind) -> None:
        super().__init__(key, kind)
        # That of the task which calls, where steps or listeners are to see it. What they set in it reaches the body never.
        self.context: contextvars.Context | None = None
        self.future: asyncio.Future[None] | None = None
        # What waits for it besides.
        self.waiters: list[asyncio.Future[None]] = []
        # The CancelledError that the call got.
        self.cancelled_by: BaseException | None = None
        # The entry that was delivered, and the value or the error that the call gets for it.
        self.entry: Entry | None = None
        self.outcome: tuple[Any, BaseException | None] | None = None
        # Whether this drive has recorded that.
        self.is_recorded_now = False

    def must_end(self) -> bool:
        """Return whether the call, which is cancelled, waits for its end, because it may have started."""
        return self.is_settled and not self.is_wait

    def start(self) -> None:
        """Do what the call is about. The run is live, the body rests, and the journal has no end of the call."""
        raise NotImplementedError

    def stop(self) -> None:
        """The body has cancelled the call, which has started: let its end come soon."""

    def end_unstarted(self) -> None:
        """The body has cancelled the call before it was started in this drive: record its end."""
        raise NotImplementedError

    def dropped(self) -> None:
        """The run leaves memory or has ended: nothing of the call is recorded any more."""

    def withdrawn(self) -> None:
        """The body has cancelled the call, and nothing more is to be recorded of it."""

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        """Return the value that this entry has for the body, or the error."""
        raise NotImplementedError

    def deliver(self, entry: Entry) -> None:
        """Resume the body with this entry."""
        self.entry = entry
        if self.future is not None and not self.future.done():
            self.future.set_result(None)
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        """Wake the other waiters of the call."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def publish(self, publisher: Any, entry: Entry) -> None:
        """Tell listeners, by an `EventPublisher`, of the entry that is delivered, if there is an event for it."""

    def ended(self, task: asyncio.Task[Any]) -> None:
        """The task in which the call does something has ended: record what it came to."""
        raise NotImplementedError

    def tell(self, *, is_new: bool) -> None:
        """Decide a call of `ctx.patched` without a record."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.outcome is None:
            raise RuntimeError(f"the call {self.key!r} has no outcome yet")
        (value, error), self.outcome = self.outcome, None
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # its traceback refers to this frame


class Hold:
    """A wait of the body without a record: nothing is delivered and nothing starts until it ends, at a rest."""

    __slots__ = ("future", "is_over")

    def __init__(self, is_over: Callable[[], bool], future: asyncio.Future[None]) -> None:
        # On a replay it is over at once.
        self.is_over = is_over
        self.future = future


class Calls:
    """The calls of one drive: which keys are used, which calls are refused, and how they wait."""

    def __init__(
        self,
        run_id: str,
        body: BodyQueue,
        cursor: JournalCursor[Call],
        retired: Collection[str],
        on_misfit: Callable[[PerdureError], NoReturn],
    ) -> None:
        self.body = body
        self.cursor = cursor
        self.retired = retired
        self._run_id = run_id
        self._thread = get_ident()
        self._on_misfit = on_misfit
        self._used: set[str] = set()
        self._freed: set[str] = set()
        # How many replayed calls have returned since the last rest.
        self.in_a_row = 0
        self.holds: deque[Hold] = deque()
        # How many numbers ctx.random() and ctx.uuid4() have given in each scope.
        self.counters: dict[tuple[tuple[str, ...], str], int] = {}
        self.patches: dict[str, bool] = {}
        # Classes of errors that were found when the error was recorded, and are not found now, by the key of the step.
        self._gone: dict[str, list[str]] = {}
        self._raised: list[tuple[BaseException, str]] = []
        # Whether calls are refused: the run leaves memory or has ended, or its function has ended and its run is being closed.
        self.is_refusing = False
        self.closed: Literal["unloaded", "ended"] | None = None
        self._refusals = 0
        # The tasks whose calls were refused.
        self.refused: set[asyncio.Task[Any]] = set()

    # Before a call.

    def use(self, key: str, kind: Kind) -> None:
        """Use this key from now on. Raises `DuplicateStep`. Stop the run if the journal has another kind of call there."""
        if get_ident() != self._thread or current.get() is not self.body:
            self.check_place(key)
        if key in self._used:
            raise DuplicateStep(self._run_id, key)
        recorded = self.cursor.kinds.setdefault(key, kind)
        if recorded != kind and recorded != "foreign":  # noqa: PLR1714 - a tuple would be made for every step
            changed = StepChanged(self._run_id, key, name_kind(recorded), name_kind(kind))
            if key in self._freed:  # this code has used it as both
                raise changed
            self._on_misfit(changed)
        self._used.add(key)

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
        """Return whether this is called in the thread of the body's event loop."""
        return get_ident() == self._thread

    def free(self, key: str) -> None:
        """Let the key be used again, for the same kind of call."""
        self._used.discard(key)
        self._freed.add(key)

    def is_in_use(self, key: str) -> bool:
        """Return whether a call of the body has this key."""
        return key in self._used

    def was_called(self, key: str) -> bool:
        """Return whether the body has made a call with this key, cancelled or not."""
        return key in self._used or key in self._freed

    def is_foreign(self, key: str) -> bool:
        """Return whether others recorded the outcome of `key`."""
        return self.cursor.kinds.get(key) == "foreign"

    def find_former_key(self, keys: Iterable[str]) -> str | None:
        """Return the first of these keys that the journal knows and this body has not used."""
        return next((key for key in keys if key in self.cursor.kinds and key not in self._used), None)

    # A call.

    def take_next(self, key: str, kind: Kind) -> Entry | None:
        """Return the next entry if it is the result of this call and nobody could tell whether it was waited for.

        That is so on most replays. None if the call has to wait, and for keys that need escaping.
        """
        if self.is_refusing or self.in_a_row >= MOST_IN_A_ROW or not self.cursor.is_next(key) or key[0] in "/%":
            return None
        if self.holds or not self.body.is_alone():
            return None
        self.use(key, kind)
        self.in_a_row += 1
        entry = self.cursor.take()
        self.body.now = self.cursor.last_at
        return entry

    async def ask(self, call: Call) -> None:
        """Return when the entry of this call is delivered. Raises the CancelledError with which the call ended."""
        cursor, loop = self.cursor, self.body.loop
        cursor.ask(call)
        while call.entry is None:
            future: asyncio.Future[None] = asyncio.Future(loop=loop)
            call.future = future
            try:
                await future
            except asyncio.CancelledError as cancelled:
                if self._is_refused():
                    self._drop(call)
                    if self.closed == "unloaded":
                        self.refuse()
                    raise
                if call.cancelled_by is None:
                    call.cancelled_by = cancelled
                if call.entry is None:
                    self._cancel(call)
        if call.entry.phase == "cancel":
            self.free(call.key)
            raise call.cancelled_by or asyncio.CancelledError
        if call.cancelled_by is not None:
            loop.call_soon(cancel_again, asyncio.current_task(loop), call.cancelled_by.args)

    def _cancel(self, call: Call) -> None:
        """The body has cancelled the call, which has no entry yet. Raises if nothing more will come."""
        if not call.must_end():
            self.cursor.withdraw(call)
            self.free(call.key)
            call.withdrawn()
            call.wake()
            self._let_others_try(call)
            raise call.cancelled_by or asyncio.CancelledError
        if not call.is_cancelled:  # anyio cancels in every turn
            call.is_cancelled = True
            call.stop()

    async def wait_for(self, call: Call) -> None:
        """Return when the entry of a call is delivered that may be awaited often. Cancelling that cancels the call."""
        while call.entry is None and not call.is_withdrawn:
            waiter: asyncio.Future[None] = asyncio.Future(loop=self.body.loop)
            call.waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError as cancelled:
                if self._is_refused():
                    raise
                if call.cancelled_by is None:
                    call.cancelled_by = cancelled
                if call.entry is None:
                    self._cancel(call)

    def _drop(self, call: Call) -> None:
        """The call was cut off. Nothing is recorded of that."""
        self.cursor.withdraw(call)
        call.dropped()

    def drop_all(self) -> None:
        """The body is over: no call gets anything any more."""
        for call in list(self.cursor.asked.values()):
            self._drop(call)

    def give_unrecorded(self, call: Call, error: BaseException) -> None:
        """Let the call raise this, of which nothing is recorded: the function ends by it, and the call is made again."""
        self.cursor.withdraw(call)
        call.outcome = None, error
        call.deliver(UNRECORDED)
        self._let_others_try(call)

    def _let_others_try(self, call: Call) -> None:
        """Wake the calls that wait for the result of this one, which gets none: one of them takes its place."""
        for follower in self.cursor.release_followers(call):
            follower.deliver(UNRECORDED)

    def is_asked(self, call: Call) -> bool:
        """Return whether the call waits for its entry."""
        return self.cursor.asked.get(call.key) is call

    async def hold(self, is_over: Callable[[], bool]) -> None:
        """Return at a rest at which this is over: at once on a replay. Nothing reaches the body meanwhile."""
        hold = Hold(is_over, asyncio.Future(loop=self.body.loop))
        self.holds.append(hold)
        try:
            await hold.future
        except asyncio.CancelledError:
            if hold in self.holds:
                self.holds.remove(hold)
            raise

    def is_awaited(self) -> bool:
        """Return whether a task waits for the entry of a call."""
        return any(call.future is not None or call.waiters for call in self.cursor.asked.values())

    def waited_for(self) -> set[int]:
        """Return the futures, by id, that calls and holds wait for."""
        asked = self.cursor.asked.values()
        waiting = {id(call.future) for call in asked} | {id(waiter) for call in asked for waiter in call.waiters}
        return waiting | {id(hold.future) for hold in self.holds}

    def forget(self) -> None:
        """Drop the references to the drive, so that it is freed without the garbage collector."""
        self._on_misfit = _refuse_misfit
        self.cursor.asked.clear()
        self.holds.clear()
        self.refused.clear()

    # When calls are refused.

    def close(self, why: Literal["unloaded", "ended"]) -> None:
        """Refuse every call from now on."""
        if self.closed is None:
            self.closed = why
            self.is_refusing = True
            self._on_misfit = _refuse_misfit

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

    def _is_refused(self) -> bool:
        """Return whether a call here is refused. What closes the run makes its calls outside the body."""
        return self.closed is not None or (self.is_refusing and current.get() is self.body)

    def check(self) -> None:
        """Raise if calls are refused."""
        if self._is_refused():
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say why there can be no call."""
        if current.get() is self.body and (task := asyncio.current_task(self.body.loop)) is not None:
            self.refused.add(task)
        if self.closed == "ended":
            raise RunFinished(self._run_id, "its body has returned, so its ctx cannot be used any more")
        if self.closed is not None:
            raise Unloaded(f"run {self._run_id!r} has left memory; this code will run again when the run is replayed")
        raise asyncio.CancelledError(f"run {self._run_id!r} is at its end, and this task of its body is left behind")

    # What ended the body.

    def raised(self, key: str, error: BaseException) -> None:
        """This error goes to the body as the outcome of `key`."""
        self._raised.append((error, key))

    def failed_keys(self, result: Any) -> list[str] | None:
        """Return the keys whose errors ended the body, found among the causes of its error; None if there is none."""
        behind = _behind(result.error if isinstance(result, Err) else None)
        return sorted({key for known, key in self._raised if any(known is error for error in behind)}) or None

    def note_gone(self, key: str, classes: list[str]) -> None:
        """The error of this step has a stand-in, since its class is gone: an `except` clause that matched may not match now.

        So what was begun after it, such as a wait, is owed too.
        """
        self._gone[key] = classes
        self.cursor.owes_waits = True

    def find_gone(self, result: Any) -> list[str]:
        """Return the classes that are gone of the recorded error that ended the function, or of a member of its group."""
        if not self._gone or not isinstance(result, Err):
            return []
        ended_by = _with_members(result.error)
        return [
            name for error, key in self._raised if any(error is each for each in ended_by) for name in self._gone.get(key, ())
        ]

    def divergence(self, asked: str | None, missing: list[str], raised: str | None = None) -> RunDiverged:
        """Return the error of a body that asks for something new, or has ended (None), while recorded results are missing."""
        return RunDiverged(self._run_id, asked, missing, [name for names in self._gone.values() for name in names], raised)

    def find_divergence(self) -> RunDiverged | None:
        """Return the error of a body at rest that waits for something new while recorded results are missing.

        Not while a cancelled call has yet to end: the body may ask for those results then.
        """
        if not self.cursor.missing or any(call.is_cancelled for call in self.cursor.asked.values()):
            return None
        new = self.cursor.new_call()
        return None if new is None else self.divergence(new.key, self.cursor.missing_keys())


def cancel_again(task: asyncio.Task[Any] | None, args: tuple[Any, ...]) -> None:
    """Cancel a task whose call has returned a result although it was cancelled. It stays one request."""
    if task is not None and task.cancelling() > 0 and not task.done():
        task.cancel(*args)
        task.uncancel()


def raised_by(result: Any) -> str | None:
    """Return the error that ended the function in one line, or None if it returned."""
    return line_of(result.error) if isinstance(result, Err) and isinstance(result.error, Exception) else None


def _refuse_misfit(error: PerdureError) -> NoReturn:
    raise error


def _with_members(error: Any) -> list[Any]:
    """Return the error, and the members of the group that it is."""
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [error, *(each for member in members for each in _with_members(member))]


def _behind(error: Any) -> list[BaseException]:
    """Return the error, what it was raised from, and what is inside it if it is a group."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and not any(one is known for known in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else []
    return found
