"""Close a run between the end of its workflow function and its own: end its children, then undo what was done.

A step with `compensate=` records an intent before its function is called, and so does a child. When the function fails or the
run is cancelled, every such step that was done, or may have been done, is compensated: in reverse order of their intents, one at
a time. A compensation is a step itself, recorded under a key that no user can have, so it runs once however often the process
dies. The functions are not stored: a replay runs the workflow function from the top and meets the same steps with the same
functions.

If the function does not reach such a step any more, because the code has changed, nothing is undone and the run does not end: it
does not fit its code. Otherwise an effect would stay behind that nobody knows of.

All of this runs outside the body, whose tasks have been ended before. It waits for entries of the journal as calls of the body
do: while it goes on by itself none is delivered. A run that leaves memory is not closed: it is resumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from perdure.ctx_calls.children import ChildCall, are_over, end_children, read_open_child, read_outcome, wait_for_any
from perdure.ctx_calls.step_calls import CalledStep, StepCall
from perdure.engine.drive import Drive
from perdure.errors import COMPENSATION_PREFIX, CompensationFailed, NotUndone, PersistenceError, RunCancelled, RunDiverged
from perdure.model.journal import Entry
from perdure.result import Err
from perdure.snapshots.effects import Effect, effects_in
from perdure.snapshots.step_results import load_value
from perdure.stepspec import parameter_type, spec_of


class _Undoing(NamedTuple):
    """How an effect is undone: with this function, which gets a value of this type. None: nothing is to be undone."""

    effect: Effect
    compensate: Callable[[Any], Any] | None
    hint: Any


class Closing:
    """The calls of one drive that have a compensation, its children, and what is done with them in the end."""

    def __init__(self, drive: Drive) -> None:
        # Weak: the drive refers to this.
        self._drive_ref = weakref.ref(drive)
        self._calls: dict[str, StepCall | ChildCall] = {}

    @property
    def _drive(self) -> Drive:
        drive = self._drive_ref()
        if drive is None:
            raise RuntimeError("the drive is over")
        return drive

    def add(self, call: StepCall | ChildCall) -> None:
        """Note that the function makes this call, which has a compensation."""
        self._calls.setdefault(call.key, call)

    def is_needed(self, result: Any) -> bool:
        """Return whether there is something to do before the run ends with this result."""
        if not are_over(self._drive):
            return True
        if self._must_undo(result):
            return bool(self._effects())
        return self._drive.is_resumed and bool(self._begun())

    def unreached(self) -> list[str]:
        """Return the keys of effects that this code cannot undo, because it does not reach their steps."""
        left = (effect for effect in self._effects() if not effect.is_undone and not effect.is_set_aside)
        return [effect.key for effect in left if self._how_to_undo(effect) is None]

    def _must_undo(self, result: Any) -> bool:
        # By `type`, since a value may answer anything when it is looked at.
        return self._drive.undoes and (self._is_cancelled or issubclass(type(result), Err))

    @property
    def _is_cancelled(self) -> bool:
        return self._drive.cancellation.is_delivered

    async def close(self, result: Any) -> Any:
        """End children and compensate. Return the run's result: the function's, a child's error or `CompensationFailed`."""
        failed_child = await end_children(self._drive, must_cancel=isinstance(result, Err) or self._is_cancelled)
        if failed_child is not None:
            result = Err(failed_child)
        if not self._must_undo(result):
            if begun := self._begun():  # the code has changed: its function does not fail any more
                self._drive.misfit(RunDiverged(self._drive.run.id, None, begun))
            return result
        failures: dict[str, Exception] = {}
        for undoing in await self._undoings(failures):
            try:
                await self._compensate(undoing)
            except Exception as error:  # noqa: BLE001 - it is reported with the others, which are compensated all the same
                failures[undoing.effect.key] = error
        if not failures:
            return result
        failed = CompensationFailed(self._drive.run.id, [f"{key}: {error!r}" for key, error in failures.items()])
        if self._is_cancelled:
            failed.__cause__ = RunCancelled(self._drive.run.id)
        elif isinstance(result, Err) and isinstance(result.error, BaseException):
            failed.__cause__ = result.error
        return Err(failed)

    def _begun(self) -> list[str]:
        """Return the keys of compensations that are recorded, and of steps in doubt that the function does not call any more."""
        if not self._drive.idempotency_keys.intents or self._drive.options.on_divergence == "run":
            return []
        calls = self._drive.calls
        in_doubt = [
            effect.key
            for effect in self._effects()
            if effect.opened.kind == "step" and effect.result is None and not effect.is_set_aside and not effect.is_undone
            if not calls.was_called(effect.key) and effect.key not in calls.retired and effect.name not in calls.retired
        ]
        return [*(key for key in calls.cursor.kinds if key.startswith(COMPENSATION_PREFIX)), *in_doubt]

    def _effects(self) -> list[Effect]:
        try:
            return effects_in(self._drive.recorder.journal, also=self._calls)
        except ValueError as reason:
            self._drive.corrupt("what it has done", reason)

    async def _undoings(self, failures: dict[str, Exception]) -> list[_Undoing]:
        """Return how what was done is undone, the last first. Stop the run if that is not known of all of it.

        What a retry has set aside, because its compensation had failed, is a failure again if the function did not get there.
        """
        undoings, unreached = list[_Undoing](), list[str]()
        for effect in self._effects():
            undoing = self._how_to_undo(effect)
            if effect.is_undone:  # the record of that is delivered, whatever the function is today
                has_function = undoing is not None and undoing.compensate is not None
                undoings.append(undoing if undoing is not None and has_function else _Undoing(effect, _was_called, None))
            elif undoing is None and effect.is_set_aside:
                failures[effect.key] = NotUndone(self._drive.run.id, [effect.key])
            elif undoing is None:
                unreached.append(effect.key)
            elif undoing.compensate is not None and (seen := await self._see_end(undoing)) is not None:
                undoings.append(seen)
        if unreached:
            self._drive.misfit(NotUndone(self._drive.run.id, unreached))
        return undoings[::-1]

    def _how_to_undo(self, effect: Effect) -> _Undoing | None:
        """Return the compensation of a call that the function made, or of a retired one; None if there is none."""
        call = self._calls.get(effect.key)
        if call is not None:
            return _Undoing(effect, call.plan.compensate, call.plan.returns)
        retired = self._drive.calls.retired
        if isinstance(retired, Mapping):
            for name in (effect.key, effect.name):
                if name in retired:
                    compensate = retired[name]
                    return _Undoing(effect, compensate, parameter_type(compensate) if compensate is not None else None)
        return None

    async def _see_end(self, undoing: _Undoing) -> _Undoing | None:
        """Return what is to be undone, with its result; None if it is a child that has not completed, which undoes itself."""
        effect = undoing.effect
        if effect.opened.kind != "child" or effect.result is not None:
            return undoing
        try:
            result = await read_outcome(self._drive, effect.opened)
        except PersistenceError as failure:
            self._drive.stop_because(failure)
        return None if result is None else undoing._replace(effect=effect._replace(result=result))

    async def _compensate(self, undoing: _Undoing) -> None:
        drive, effect, fn = self._drive, undoing.effect, undoing.compensate
        if fn is None:
            return
        value = None if effect.result is None or fn is _was_called else self._load(effect.result, undoing.hint)
        undoes = read_open_child(drive, effect.opened).id if effect.intent is None else effect.intent.idempotency_key
        step = StepCall(
            effect.compensation,
            f"compensate {effect.name}",
            fn,
            () if fn is _was_called else (value,),
            msgspec.structs.replace(spec_of(fn).plan, is_bare=False),  # it records an intent: what is being undone is known
            undoes=undoes,
        )
        drive.calls.use(step.key, "step")
        call = CalledStep(drive, step)
        drive.calls.cursor.ask(call)
        await wait_for_any(drive, [call])
        call.result()

    def forget(self) -> None:
        """Drop the references to calls and functions, so that the drive is freed without the garbage collector."""
        self._calls.clear()

    def _load(self, close: Entry, hint: Any) -> Any:
        try:
            return load_value(self._drive.codec, close, hint)
        except (ValueError, msgspec.MsgspecError) as reason:
            self._drive.corrupt(f"the record of step {close.key!r}", reason)


def closing_of(drive: Drive) -> Closing:
    """Return the closing of this drive, made when it is first needed."""
    if not isinstance(drive.closing, Closing):
        drive.closing = Closing(drive)
    return drive.closing


async def _was_called(_: object) -> None:
    """Stand for a compensation that this code does not have any more, and that has succeeded."""
