"""The durable waits of a body: sleeping, waiting for a signal or an approval, a time limit around a block; and `ctx.patched`.

Each wait opens with an entry that holds its absolute deadline and closes with one that says how it came out, both under its key.

`ctx.patched` tells whether a run takes code that was inserted after the run had begun. It waits for the journal to answer. A run
whose journal goes on after the call has been here under the old code and keeps to it; a run whose journal ends here has not, so
it takes the new code, and that is recorded for its replays.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from perdure.body.calls import UNRECORDED, Call
from perdure.codec import Codec
from perdure.codec.hints import type_name
from perdure.engine.drive import Drive
from perdure.engine.event_publisher import EventPublisher
from perdure.engine.timers_and_signals import Wait
from perdure.errors import InvalidInput, ValueNotStorable
from perdure.model.approvals import MAX_PAYLOAD_BYTES, OpenApproval, expiry, new_nonce
from perdure.model.durations import MAX_INSTANT
from perdure.model.journal import Entry, Kind, OpenWait
from perdure.model.records import Awaited, Signal
from perdure.result import Approved, Expired, Rejected
from perdure.snapshots.step_results import load_decision, load_value


class _Missing:
    """The default of `default=`: no default, a time-out raises."""

    def __repr__(self) -> str:
        return "no default"


MISSING: Final = _Missing()


class WaitCall(Call):
    """A call that waits for an instant or an inbox row: `ctx.sleep`, `wait_for_signal`, `approve`."""

    __slots__ = ("_address", "_deadline", "_drive", "_make_opening", "_wait", "name")
    is_wait = True

    def __init__(
        self,
        drive: Drive,
        key: str,
        name: str,
        kind: Kind,
        deadline: Callable[[], int] | None,
        address: Awaited | None = None,
        make_opening: Callable[[int | None], OpenWait] = OpenWait,
    ) -> None:
        super().__init__(key, kind)
        self.name = name
        self._drive = drive
        # The instant is fixed now: at the rest at which the wait begins its length would count from another one.
        self._deadline = None if deadline is None else min(deadline(), MAX_INSTANT)
        self._address = address
        self._make_opening = make_opening
        self._wait: Wait | None = None

    def start(self) -> None:
        """Wait from now on. The instant and what is awaited are recorded, or were before."""
        drive = self._drive
        opened = self.opened[-1] if self.opened else self._open()
        asked = _read_open(drive, opened)
        address, expiry_payload = self._address, None
        if isinstance(asked, OpenApproval):
            address = asked.address(opened.name)
            expiry_payload = None if asked.deadline is None else msgspec.json.encode(expiry(asked.deadline))
        self._wait = Wait(opened.seq, asked.deadline, partial(self._end, opened), address, expiry_payload)
        drive.waits.add(self._wait)

    def _open(self) -> Entry:
        drive, now = self._drive, self._drive.clock.now()
        payload = msgspec.json.encode(self._make_opening(self._deadline))
        opened = drive.recorder.append(
            self.key, self.name, kind=self.kind, phase="open", payload=payload, started_at=now, ended_at=now
        )
        self.opened.append(opened)
        return opened

    def _end(self, opened: Entry, signal: Signal | None) -> None:
        """The wait is over. A sleep went well, and so did an approval that expired; a signal that did not come did not."""
        drive, wait = self._drive, self._wait
        payload, ok, consume = b"null", True, None
        if signal is not None:
            payload, consume = signal.payload, signal.seq
        elif wait is not None and wait.address is not None:
            ok, payload = wait.expiry is not None, wait.expiry or b"null"
        drive.record(
            self,
            name=opened.name,
            ok=ok,
            payload=payload,
            started_at=opened.started_at,
            ended_at=drive.clock.now(),
            consume=consume,
        )

    def withdrawn(self) -> None:
        """The body gave the wait up. If it had begun live, its journal says so, for people who read it."""
        drive, wait = self._drive, self._wait
        if wait is None:
            return
        drive.body.on_host(drive.waits.remove, wait)
        now = drive.clock.now()
        drive.recorder.append(self.key, "", kind=self.kind, phase="cancel", started_at=now, ended_at=now)

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        del entry  # what a wait returns is made where it is called
        return None, None


async def sleep(drive: Drive, key: str, name: str, deadline: Callable[[], int]) -> None:
    """Return when the deadline, fixed the first time, has passed."""
    await _wait(drive, WaitCall(drive, key, name, "sleep", deadline))


async def wait_for_signal(
    drive: Drive, key: str, name: str, deadline: Callable[[], int] | None, default: Any, returns: Any
) -> Any:
    """Return the payload of the next signal with this name; a time-out raises `TimeoutError` or gives `default`."""
    entry = await _wait(drive, SignalCall(drive, key, name, deadline, returns))
    if entry.ok:
        return _payload(drive, entry, returns)
    if isinstance(default, _Missing):
        error = TimeoutError(f"no signal {name!r} came in time for run {drive.run.id!r}; pass default= to go on without one")
        drive.calls.raised(key, error)
        raise error
    return default


class SignalCall(WaitCall):
    """A call that waits for a signal."""

    __slots__ = ("returns",)

    def __init__(self, drive: Drive, key: str, name: str, deadline: Callable[[], int] | None, returns: Any) -> None:
        super().__init__(drive, key, name, "signal", deadline, Awaited("signal", name))
        self.context = contextvars.copy_context()
        self.returns = returns

    def publish(self, publisher: EventPublisher, entry: Entry) -> None:
        if entry.ok:
            publisher.publish_signal(entry, lambda: _payload(self._drive, entry, self.returns))


class ApprovalRequest(NamedTuple):
    """The request of `ctx.approve`. `hint` is the type of the payload, also of one that was edited."""

    payload: Any
    assignees: tuple[str, ...]
    hint: Any

    def open(self, codec: Codec, deadline: int | None) -> OpenApproval:
        """Return the payload of the open entry. Raises `ValueNotStorable`."""
        payload, _ = codec.dump(self.payload, self.hint, path="payload")
        if len(payload) > MAX_PAYLOAD_BYTES:
            reason = (
                f"it takes {len(payload):,} bytes, and an approval at most {MAX_PAYLOAD_BYTES:,}: ask about a reference to it"
            )
            raise ValueNotStorable("payload", reason)
        return OpenApproval(
            deadline, id=new_nonce(), payload=msgspec.Raw(payload), assignees=self.assignees, type=type_name(self.hint)
        )


async def wait_for_approval(
    drive: Drive, key: str, name: str, deadline: Callable[[], int] | None, request: ApprovalRequest
) -> Approved[Any] | Rejected | Expired:
    """Return what was decided, by a person or by the clock."""
    make_opening = partial(request.open, drive.codec)
    make_opening(None)  # refuses a payload that cannot be stored, before the wait begins
    entry = await _wait(drive, WaitCall(drive, key, name, "approval", deadline, None, make_opening))
    try:
        decision = load_decision(drive.codec, entry)
        by, at = decision.by or "", decision.at
        if decision.decision == "expired":
            return Expired(at)
        if decision.decision == "rejected":
            return Rejected(decision.reason, by, at)
        payload = drive.codec.load(bytes(decision.payload), request.hint)
    except ValueError as reason:
        drive.corrupt(f"the decision about {name!r}", reason)
    if not decision.is_edited:
        return Approved(payload, by, at)
    try:
        return Approved(drive.codec.conform(payload, request.hint), by, at)
    except ValueError as reason:
        raise InvalidInput(drive.run.workflow, f"approval {name!r}, with the payload of {by!r}: {reason}") from reason


def _payload(drive: Drive, entry: Entry, returns: Any) -> Any:
    try:
        value = load_value(drive.codec, entry, returns)
    except ValueError as reason:
        drive.corrupt(f"the signal {entry.name!r}", reason)
    try:
        return drive.codec.conform(value, returns)
    except ValueError as reason:
        raise InvalidInput(drive.run.workflow, f"signal {entry.name!r}: {reason}") from reason


async def _wait(drive: Drive, call: WaitCall) -> Entry:
    """Return the entry of this call."""
    calls = drive.calls
    await calls.admitted()
    calls.use(call.key, call.kind)
    await calls.ask(call)
    if call.entry is None:
        raise RuntimeError(f"the wait {call.key!r} has ended without an entry")
    return call.entry


def _read_open(drive: Drive, opened: Entry) -> OpenWait:
    try:
        return msgspec.json.decode(opened.payload, type=OpenApproval if opened.kind == "approval" else OpenWait)
    except msgspec.MsgspecError as reason:
        drive.corrupt(f"the deadline of {opened.key!r}", reason)


class TimeLimit:
    """`async with ctx.timeout(name, length)`: the block is cancelled and `TimeoutError` raised when the deadline passes.

    The deadline is fixed the first time and the expiry is recorded, so a replay cuts the block off at the same place.
    """

    def __init__(self, drive: Drive, key: str, name: str, deadline: Callable[[], int]) -> None:
        self._drive = drive
        self._key = key
        self._name = name
        self._deadline = deadline
        self._call: _LimitCall | None = None

    async def __aenter__(self) -> Self:
        calls = self._drive.calls
        await calls.admitted()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("ctx.timeout is used inside a task")
        calls.use(self._key, "timeout")
        self._call = call = _LimitCall(self._drive, self._key, self._name, self._deadline, task)
        calls.cursor.ask(call)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        drive, call = self._drive, self._call
        if call is None:
            return
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if call.entry is None:
            if not drive.is_closed:
                drive.calls.cursor.withdraw(call)
                if is_cancelled:
                    drive.calls.free(self._key)
                call.withdrawn()
            return
        if call.task.uncancel() <= call.requests and is_cancelled:
            late = TimeoutError(f"the time limit {self._name!r} of run {drive.run.id!r} has passed")
            drive.calls.raised(self._key, late)
            raise late from error


class _LimitCall(WaitCall):
    """The time limit of a block: when its entry is delivered, the task is cancelled."""

    __slots__ = ("requests", "task")

    def __init__(self, drive: Drive, key: str, name: str, deadline: Callable[[], int], task: asyncio.Task[Any]) -> None:
        super().__init__(drive, key, name, "timeout", deadline)
        self.task = task
        self.requests = task.cancelling()

    def deliver(self, entry: Entry) -> None:
        self.entry = entry
        self.task.cancel()


class PatchCall(Call):
    """A call of `ctx.patched`."""

    __slots__ = ("_drive", "name")

    def __init__(self, drive: Drive, key: str, name: str) -> None:
        super().__init__(key, "patch")
        self._drive = drive
        self.name = name

    def start(self) -> None:
        """The journal ends here: the run takes the new code, and that is recorded."""
        now = self._drive.clock.now()
        self._drive.record(self, name=self.name, payload=b"true", started_at=now, ended_at=now)

    end_unstarted = start

    def load(self, entry: Entry) -> tuple[Any, BaseException | None]:
        del entry
        return True, None

    def tell(self, *, is_new: bool) -> None:
        """Decide it without a record. The journal may go on after this call: then the run has been here, under the old code."""
        self.outcome = is_new, None
        self.deliver(UNRECORDED)


async def is_patched(drive: Drive, key: str, name: str) -> bool:
    """Return whether the run takes the new code. Decided by the first call with this name, for the whole run."""
    calls = drive.calls
    await calls.admitted()
    known = calls.patches.get(key)
    if known is not None:
        return known
    calls.use(key, "patch")
    call = PatchCall(drive, key, name)
    await calls.ask(call)
    calls.patches[key] = found = bool(call.result())
    return found
