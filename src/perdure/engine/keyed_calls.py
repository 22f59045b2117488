"""The ctx calls of a body: which keys it used, and when each call may go on.

A call finds its record and gets it when its turn comes, or finds none and goes ahead when the run is live. Every operation (a
step, a sleep, a race) is made of what is here. When the run has left memory or ended, or is being cancelled, calls are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

import msgspec

from perdure.engine.body_tasks import Branch, Branches
from perdure.engine.replay_order import Receiver, Turnstile
from perdure.engine.timers_and_signals import Wait, Waits
from perdure.errors import DuplicateStep, RunFinished, StepChanged, Unloaded
from perdure.model.journal import Entry, JournalIndex, Kind
from perdure.result import Err
from perdure.stepspec import StepInfo, place

# A body may try a few things on its way out; one that tries for ever must not keep the loop to itself.
MOST_REFUSALS: Final = 100


class Parked(asyncio.Future[Any]):
    """What a branch waits for inside a ctx call."""

    branch: Branch | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.branch is not None:
            self.branch.note_cancel()
        return cancelled


class CtxCall(msgspec.Struct, eq=False):
    """One ctx call under way: a key, the branch that made it, and the future it waits on.

    Inside `with call:` its branch waits for us. A call that is cancelled there awaits `wait_to_leave` and frees its key, which is
    one of `used`.
    """

    key: str
    kind: Kind
    branch: Branch | None
    used: set[str]
    future: Parked | None = None

    def __enter__(self) -> None:
        if self.branch is not None:
            self.branch.ours()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.branch is not None:
            self.branch.leave()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self.free()

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
        self.used.discard(self.key)

    def park(self) -> Parked:
        """A new future for this call to wait on; cancelled if the call was and the step's function let that pass."""
        self.future = Parked()
        self.future.branch = self.branch
        if self.branch is not None and self.branch.confirm_cancel():
            self.future.cancel()
        return self.future

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for something; not any more when it was cancelled."""
        return self.future is not None and not self.future.done()

    def deliver(self, entry: Entry) -> bool:
        """Let the call go on, and its branch with it; False when it was cancelled."""
        if self.future is None or self.future.done():
            return False
        self.left()
        self.future.set_result(entry)
        return True


class Shared:
    """The first use of a cached key in a run: its record once the body has it, and the calls that want the same."""

    __slots__ = ("entry", "waiting")

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.waiting: list[CtxCall] = []


class Calls:
    """The calls of one drive."""

    def __init__(self, run_id: str, recorded: JournalIndex, branches: Branches, turnstile: Turnstile, waits: Waits) -> None:
        self.opened = recorded.opened
        self.winners = recorded.winners
        self._run_id = run_id
        self._branches = branches
        self._turnstile = turnstile
        self._waits = waits
        self._kinds = recorded.kinds
        self._closed_keys = {entry.key for entry in recorded.closes} if recorded.closes else set()
        self._used: set[str] = set()
        # JournalIndex keys that the body has not asked for so far.
        self.unasked = {*self._closed_keys, *self.winners}
        # How many numbers ctx.random() and ctx.uuid4() have given in each scope.
        self.counters: dict[tuple[tuple[str, ...], str], int] = {}
        self._live_waiters: list[CtxCall] = []
        # Set while the store is asked to suspend the run: calls wait for its answer.
        self.suspending: asyncio.Future[None] | None = None
        self.is_cancelling = False
        # Whether calls are refused: the run has left memory or ended, or is being cancelled.
        self.is_refusing = False
        self._refusals = 0
        self._raised: list[tuple[BaseException, str]] = []
        # Cached keys that were used, so that a second use gives what the first gave, and how many of those had to wait.
        self.shared: dict[str, Shared] = {}
        self._repeats = 0
        self.closed: Literal["unloaded", "ended"] | None = None

    def begin(self, key: str, kind: Kind) -> CtxCall:
        """A new call under `key`, after it was admitted, or the error that says why there cannot be one."""
        return CtxCall(key, kind, self._use(key, kind), self._used)

    def _use(self, key: str, kind: Kind) -> Branch | None:
        """The branch that uses the key from now on."""
        if isinstance(place.get(), StepInfo):
            raise _out_of_place(key)
        if key in self._used:
            raise DuplicateStep(self._run_id, key)
        recorded = self._kinds.setdefault(key, kind)
        if recorded != kind and recorded != "foreign":  # noqa: PLR1714 - a tuple would be made for every step
            raise StepChanged(self._run_id, key, f"a {recorded}", f"a {kind}")
        self._used.add(key)
        if self.unasked:
            self.unasked.discard(key)
        branch = self._branches.running
        if branch is not None:
            branch.called = True
        return branch

    def next_record(self, key: str) -> Entry | None:
        """A call of a step from its beginning to its end, if the next record is its own, as on nearly every replay.

        None when the call has to wait, or somebody has to be told, and for keys that may stand for others than they seem to.
        """
        if self.is_refusing or not self._turnstile.is_next(key) or key[0] in "/%":
            return None
        self._use(key, "step")
        return self._turnstile.take()

    def may_go_ahead(self, call: CtxCall) -> bool:
        """Whether the run is live and has no record of this call, so that there is no `turn` to wait for."""
        return self._turnstile.is_live and call.key not in self._closed_keys and self.suspending is None and self.closed is None

    async def turn(self, call: CtxCall) -> Entry | None:
        """The record of this call when its turn comes; None when there is none and the run is live."""
        if call.key in self._closed_keys:
            return await self._ask(call)
        if self.suspending is not None:
            await asyncio.shield(self.suspending)
        if not self._turnstile.is_live:
            self._live_waiters.append(call)
            self._turnstile.touch()
            await self.parked(call, call.park())
        if self.closed is not None:
            self.refuse()
        self._turnstile.touch()
        return None

    def goes_through(self, entry: Entry) -> bool:
        """Whether the result just recorded may reach the body at once. Otherwise it has to be handed over."""
        self._closed_keys.add(entry.key)
        return self._turnstile.pass_through(entry)

    async def hand_over(self, call: CtxCall, entry: Entry) -> None:
        """Return when the result just recorded may reach the body."""
        self._turnstile.recorded(entry)
        await self._ask(call)

    @contextmanager
    def sharing(self, key: str) -> Iterator[None]:
        """Around the first use of a cached key. Without a record in the end, whoever waits for it is to try for themselves."""
        shared = self.shared[key] = Shared()
        try:
            yield
        finally:
            if shared.entry is None:
                del self.shared[key]
                self._pass_on(shared, Entry(seq=0, key=key, phase="open"))

    async def same_as(self, key: str, shared: Shared) -> Entry:
        """The record of the first use of `key`, after it reached the body; an open entry when there will be none."""
        self.check()
        if isinstance(place.get(), StepInfo):
            raise _out_of_place(key)
        if shared.entry is not None:
            return shared.entry
        # No key of a user's has this character, so the call is told apart from the first, and by the number from all others.
        self._repeats += 1
        call = CtxCall(f"{key}\0{self._repeats}", "step", self._branches.running, self._used)
        if call.branch is not None:
            call.branch.called = True
        shared.waiting.append(call)
        with call:
            self._turnstile.touch()
            try:
                entry: Entry = await self.parked(call, call.park())
            except asyncio.CancelledError:
                await call.wait_to_leave()
                raise
        return entry

    def got(self, entry: Entry) -> None:
        """The body has this record. Calls that want the same get it next, in the order in which they came."""
        shared = self.shared.get(entry.key)
        if shared is not None and shared.entry is None:
            shared.entry = entry
            self._pass_on(shared, entry)

    def _pass_on(self, shared: Shared, entry: Entry) -> None:
        # Asked for only now: while they wait for the first use nothing of theirs is under way, and the run may leave memory.
        calls = [call for call in shared.waiting if call.is_waiting]
        shared.waiting.clear()
        for call in calls:
            self._turnstile.ask(call.key, call)
        self._turnstile.follow_up([msgspec.structs.replace(entry, key=call.key) for call in calls])

    def resolve(self, entry: Entry, receiver: Receiver) -> None:
        """Something was decided outside the body; `receiver` gets the record when its turn comes."""
        self._closed_keys.add(entry.key)
        self._turnstile.recorded(entry)
        self._turnstile.ask(entry.key, receiver)

    def is_recorded(self, key: str) -> bool:
        """Whether the journal has the outcome of `key`."""
        return key in self._closed_keys

    def is_foreign(self, key: str) -> bool:
        """Whether others recorded the outcome of `key`."""
        return self._kinds.get(key) == "foreign"

    async def parked(self, call: CtxCall, future: Parked) -> Any:
        """What `future` gives; `Unloaded` when the run left memory instead."""
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(call, future)
            if self.closed == "unloaded":
                self.refuse()
            raise

    async def wait(self, call: CtxCall, wait: Wait) -> Entry:
        """The record that resolves `wait`. While it waits the run may leave memory."""
        future = call.park()
        self._waits.add(wait)
        self._turnstile.touch()
        try:
            entry: Entry = await self.parked(call, future)
        finally:
            self._waits.remove(wait)
        return entry

    async def _ask(self, call: CtxCall) -> Entry:
        future = call.park()
        self._turnstile.ask(call.key, call)
        entry: Entry = await self.parked(call, future)
        return entry

    def _withdraw(self, call: CtxCall, future: Parked) -> None:
        """The body cancelled the call. What is recorded stays recorded, for a later call with the same key."""
        self._turnstile.withdraw(call.key)
        if not future.cancelled() and future.done() and isinstance(future.result(), Entry):
            self._turnstile.give_back(future.result())
        if call in self._live_waiters:
            self._live_waiters.remove(call)

    def go_live(self) -> None:
        """The journal is used up: let the calls that found no record go ahead, in the order in which they were made."""
        waiters, self._live_waiters = self._live_waiters, []
        for call in waiters:
            if call.future is not None and not call.future.done():
                call.future.set_result(None)

    def close(self, why: Literal["unloaded", "ended"]) -> None:
        """Refuse every call from now on."""
        if self.closed is None:
            self.closed = why
            self.is_refusing = True

    def begin_to_cancel(self) -> None:
        """Refuse every call from now on, since the body is being cancelled."""
        self.is_cancelling = self.is_refusing = True

    async def admitted(self) -> None:
        """Return at once while calls are taken.

        Calls that are refused get their error at once. Code that swallows it and calls again and again waits in the end, until
        its task is cancelled.
        """
        if not self.is_refusing:
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

    def check(self) -> None:
        """Raise if calls are refused."""
        if self.is_refusing:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say why there can be no call."""
        if self.closed == "ended":
            raise RunFinished(self._run_id, "its body has returned, so its ctx cannot be used any more")
        if self.closed is not None:
            raise Unloaded(f"run {self._run_id!r} has left memory; this code will run again when the run is replayed")
        raise asyncio.CancelledError(f"run {self._run_id!r} is being cancelled")


def _out_of_place(key: str) -> RuntimeError:
    return RuntimeError(f"ctx was used inside a step's function (for {key!r}); return a value and use ctx in the body instead")


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
