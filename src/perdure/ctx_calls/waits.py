"""The durable waits of a body: sleeping, waiting for a signal or an approval, a time limit around a block; and `ctx.patched`.

Each wait opens with an entry that holds its absolute deadline and closes with one that says how it came out, both under its key.

`ctx.patched` tells whether a run takes code that was inserted after the run had begun. It waits for the journal to answer. A run
whose journal goes on after the call has been here under the old code and keeps to it; a run whose journal ends here has not, so
it takes the new code, and that is recorded for its replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from perdure.codec import Codec
from perdure.codec.hints import type_name
from perdure.engine.body_tasks import ReplayableTask, cancel_by_ctx
from perdure.engine.drive import Drive
from perdure.engine.keyed_calls import CtxCall
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


async def sleep(drive: Drive, key: str, name: str, deadline: Callable[[], int]) -> None:
    """Return when the deadline, fixed the first time, has passed."""
    await _pause(drive, key, name, "sleep", deadline, None)


async def wait_for_signal(
    drive: Drive, key: str, name: str, deadline: Callable[[], int] | None, default: Any, returns: Any
) -> Any:
    """The payload of the next signal with this name; a time-out raises `TimeoutError` or gives `default`."""
    entry = await _pause(drive, key, name, "signal", deadline, Awaited("signal", name))
    if entry.ok:
        if drive.publisher.subscribers:
            await drive.publisher.publish_signal(entry, lambda: _payload(drive, entry, returns))
        return _payload(drive, entry, returns)
    if isinstance(default, _Missing):
        error = TimeoutError(f"no signal {name!r} came in time for run {drive.run.id!r}; pass default= to go on without one")
        drive.calls.raised(key, error)
        raise error
    return default


class ApprovalRequest(NamedTuple):
    """What `ctx.approve` asks. `hint` is the type of the payload, also of one that was edited."""

    payload: Any
    assignees: tuple[str, ...]
    hint: Any

    def open(self, codec: Codec, deadline: int | None) -> OpenApproval:
        """What the open entry holds. Raises `ValueNotStorable`."""
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
    """What was decided, by a person or by the clock."""
    entry = await _pause(drive, key, name, "approval", deadline, None, partial(request.open, drive.codec))
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


async def _pause(
    drive: Drive,
    key: str,
    name: str,
    kind: Kind,
    deadline: Callable[[], int] | None,
    address: Awaited | None,
    open_wait: Callable[[int | None], OpenWait] = OpenWait,
) -> Entry:
    await drive.calls.admitted()
    call = drive.calls.begin(key, kind)
    if drive.results.is_next(key) and not call.was_cancelled:
        return drive.results.take()
    opened = drive.calls.take_opened(key)
    with call:
        recorded = await drive.calls.turn(call)
        if recorded is not None:
            return recorded
        opened = opened or _open(drive, call, name, deadline, open_wait)
        return await drive.calls.wait(call, _wait(drive, call, opened, address))


def _wait(drive: Drive, call: CtxCall, opened: Entry, address: Awaited | None) -> Wait:
    asked = _read_open(drive, opened)
    expires_with = None
    if isinstance(asked, OpenApproval):
        address = asked.address(opened.name)
        expires_with = None if asked.deadline is None else msgspec.json.encode(expiry(asked.deadline))

    def close(ok: bool, payload: bytes = b"null", consume: int | None = None) -> None:  # noqa: FBT001 - three uses, below
        entry = drive.recorder.append(
            call.key,
            opened.name,
            kind=call.kind,
            ok=ok,
            payload=payload,
            started_at=opened.started_at,
            ended_at=drive.clock.now(),
            consume=consume,
        )
        drive.calls.resolve(entry, call)

    def on_signal(signal: Signal) -> None:
        close(True, signal.payload, signal.seq)

    def on_due() -> None:
        # A sleep that is over went well, and so did an approval that expired; a signal that did not come did not.
        close(address is None or expires_with is not None, expires_with or b"null")

    return Wait(opened.seq, asked.deadline, on_due, address, on_signal, expiry=expires_with)


def _open(
    drive: Drive,
    call: CtxCall,
    name: str,
    deadline: Callable[[], int] | None,
    open_wait: Callable[[int | None], OpenWait] = OpenWait,
) -> Entry:
    """The open entry of this wait, recorded now."""
    payload = msgspec.json.encode(open_wait(None if deadline is None else min(deadline(), MAX_INSTANT)))
    now = drive.clock.now()
    return drive.recorder.append(call.key, name, kind=call.kind, phase="open", payload=payload, started_at=now, ended_at=now)


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
        self._is_over = False
        # Whether the expiry is in the journal, so that it is neither recorded again nor taken for cancelled.
        self._is_recorded = False
        self._call: CtxCall | None = None
        self._wait: Wait | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> Self:
        drive = self._drive
        await drive.calls.admitted()
        self._call = call = drive.calls.begin(self._key, "timeout")
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        if drive.calls.is_recorded(self._key) and not call.was_cancelled:
            self._is_recorded = True
            drive.results.ask(self._key, self)
            return self
        opened = drive.calls.take_opened(self._key) or _open(drive, call, self._name, self._deadline)
        self._wait = Wait(opened.seq, _read_open(drive, opened).deadline, self._due)
        drive.waits.add(self._wait)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._wait is not None:
            self._drive.waits.remove(self._wait)
        self._drive.results.withdraw(self._key)
        if not self._is_over or self._task is None:
            if self._call is not None and kind is not None and issubclass(kind, asyncio.CancelledError):
                self._call.free() if self._is_recorded else self._drive.calls.cancelled(self._call)
            return
        if isinstance(self._task, ReplayableTask):
            self._task.branch.is_cancelled_by_ctx = False  # it goes on
        if self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            late = TimeoutError(f"the time limit {self._name!r} of run {self._drive.run.id!r} has passed")
            self._drive.calls.raised(self._key, late)
            raise late from error

    def deliver(self, entry: Entry) -> bool:
        """The deadline has passed, and it is this record's turn."""
        del entry
        self._is_over = True
        return self._task is not None and cancel_by_ctx(self._task)

    def abandon(self) -> None:
        """Nothing to do: the block can be cancelled at any time."""

    def _due(self) -> None:
        if self._drive.calls.is_recorded(self._key):
            self._drive.results.ask(self._key, self)  # cancelled in an earlier attempt, but not in this one
            return
        self._is_recorded = True
        now = self._drive.clock.now()
        entry = self._drive.recorder.append(self._key, self._name, kind="timeout", started_at=now, ended_at=now)
        self._drive.calls.resolve(entry, self)


async def is_patched(drive: Drive, key: str, name: str) -> bool:
    """Whether the run takes the new code. Decided by the first call with this name, for the whole run."""
    calls = drive.calls
    await calls.admitted()
    known = calls.patches.get(key)
    if known is not None:
        return known
    call = calls.begin(key, "patch")
    if drive.results.is_next(key) and not call.was_cancelled:
        drive.results.take()
        calls.patches[key] = True
        return True
    with call:
        found = await calls.find_patch(call)
        calls.patches[key] = await _record_patch(drive, call, name) if found is None else found
    return calls.patches[key]


async def _record_patch(drive: Drive, call: CtxCall, name: str) -> bool:
    now = drive.clock.now()
    entry = drive.recorder.append(call.key, name, kind="patch", payload=b"true", started_at=now, ended_at=now)
    if not drive.results.reaches_body_at_once(entry):
        await drive.calls.wait_for_delivery(call, entry)
    return True
