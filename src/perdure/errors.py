"""Every exception perdure raises.

    Exception
    ├── PerdureError
    │   ├── RunNotFound            no run has this id
    │   ├── RunConflict            this id belongs to a run with another input or workflow
    │   ├── RunFinished            the run has ended, so it takes nothing more
    │   ├── RunCancelled           the run was cancelled
    │   ├── DeadlineExceeded       (also TimeoutError) the run had not ended at its deadline
    │   ├── ChildStuck             a cancelled run waits for a child that cannot end
    │   ├── NotUndone              the run cannot end, because its code does not say how to undo what it has done
    │   ├── CompensationFailed     the run failed or was cancelled, and not everything it had done could be compensated
    │   ├── RunDead                too many attempts failed without recording anything, and the run was set aside
    │   ├── RunInterrupted         the run's own code asked the process to end; its attempt was stopped instead
    │   ├── RunDiverged            the code asks for something new, or ends, and recorded results are left
    │   ├── LeaseLost              another worker holds the run now; nothing was written
    │   ├── LeaseHeld              a live worker drives the run
    │   ├── DuplicateStep          one key used twice in one run
    │   ├── StepNotFound           the run has recorded nothing under this key
    │   ├── StepFailed             a step returned Err, or its exception's class is not known here
    │   ├── StepChanged            a recorded key was asked for as something else
    │   ├── StepTimeout            (also TimeoutError) an attempt took longer than timeout=
    │   ├── RetryAfter             raised by a step's function, to be tried again after so long
    │   ├── StepNotStopped         the worker has stopped, but a step ignores its cancellation and still runs
    │   ├── StepNotPicklable       (also TypeError) a step's function, arguments or result cannot be sent to its executor or back
    │   ├── ExecutorNotFound       a step names an executor that this process was not given
    │   ├── ApprovalNotFound       the run does not wait for an approval of this name
    │   ├── ApprovalAmbiguous      the run waits for several approvals of this name
    │   ├── ApprovalDecided        somebody else was first, or the same person clicked twice
    │   ├── ApprovalExpired        the time for a decision is over
    │   ├── NotAssigned            the approval is for other people
    │   ├── TokenError
    │   │   ├── TokenInvalid       this is no approval token of ours
    │   │   ├── TokenExpired       the token was valid until some time ago
    │   │   └── TokenNotAllowed    the token is for another action
    │   ├── InvalidInput           arguments do not fit the workflow's parameters
    │   ├── ChildrenOpen           a run cannot start over while children of it have not ended
    │   ├── ValueNotStorable       a value cannot be written so that it reads back the same
    │   ├── PersistenceError       the store could not write; the run stopped where it was
    │   │   ├── TransactionFailed  a transaction of ctx.transaction cannot be committed
    │   │   └── StoreClosed        the store was closed, and will not answer again
    │   ├── StoreCapabilityError   the store cannot do this, and says so rather than pretend
    │   ├── StreamFull             a stream holds as many items as it may
    │   ├── StreamEnded            something was emitted to a stream after its end
    │   └── SnapshotError
    │       ├── SnapshotFormatError  a document is no snapshot and no resume state, and where it is not
    │       ├── SnapshotMismatch   recorded state does not belong to this workflow, or to this version of it
    │       └── SnapshotCorrupt    stored data cannot be read back
    ├── StepTraceback              where a recorded error was raised, as text: the cause of the error that is rebuilt
    ├── PerdureWarning (UserWarning)
    asyncio.CancelledError
    └── Unloaded                   the run left memory; its body must not go on

The values that explain an error are its `args`, and the sentence is made in `__str__`, so an error that was recorded
and rebuilt says the same thing again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from perdure.model.durations import Duration
from perdure.model.durations import seconds as to_seconds

# How many of its errors a SnapshotFormatError shows in its text. All of them are in `errors`.
_MAX_SHOWN_ERRORS: Final = 20
# Keys that perdure makes for itself, and no user can choose, as a key of theirs that begins with % is escaped: that of the entry
# which says where the run was cancelled, or its deadline passed; how that of a compensation begins, before the step's key; and
# how that of a sleep or a time limit of asyncio begins, before its instant.
CANCEL_KEY: Final = "%cancel"
COMPENSATION_PREFIX: Final = "%compensate/"
TIMER_PREFIX: Final = "%timer/"
# The error of a step that must not run twice and was started once, in a `StepFailed`.
OUTCOME_UNKNOWN: Final = "OutcomeUnknown"


class PerdureError(Exception):
    """Base of all errors that perdure raises on purpose."""

    def __repr__(self) -> str:
        # The values alone do not tell what happened. They are shown only when no sentence can be made of them.
        try:
            return f"{type(self).__name__}({str(self)!r})"
        except Exception:  # noqa: BLE001 - rebuilt from a record of another version
            return super().__repr__()


class RunNotFound(PerdureError):
    """No run has this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)

    def __str__(self) -> str:
        return f"there is no run {self.args[0]!r} in this store; check the id and the store, or start it first"


class ScheduleNotFound(PerdureError):
    """No schedule has this id."""

    def __init__(self, schedule_id: str) -> None:
        super().__init__(schedule_id)

    def __str__(self) -> str:
        return f"there is no schedule {self.args[0]!r} in this store; `await runtime.schedules()` lists those there are"


class StepNotFound(PerdureError):
    """The run has recorded nothing under this key. `similar` are keys that look alike, or the last ones that it has recorded."""

    def __init__(self, run_id: str, key: str, similar: Iterable[str] = ()) -> None:
        super().__init__(run_id, key, list(similar))

    @property
    def similar(self) -> list[str]:
        return list(self.args[2])

    def __str__(self) -> str:
        run_id, key, similar = self.args
        known = f"did you mean {' or '.join(map(repr, similar))}?" if similar else "it has recorded nothing so far"
        return f"run {run_id!r} has recorded no step {key!r}; {known}"


class RunConflict(PerdureError):
    """The id belongs to a run with another input or of another workflow."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)

    def __str__(self) -> str:
        return f"run {self.args[0]!r} exists already with {self.args[1]}; use another id, or pass the same input to get that run"


class RunFinished(PerdureError):
    """The run has ended and takes nothing more."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(run_id, status)

    def __str__(self) -> str:
        return f"run {self.args[0]!r} has ended ({self.args[1]}) and takes nothing more"


class RunCancelled(PerdureError):
    """The run was cancelled. `not_undone` has the keys of steps that were left as they are, because `undo=False` asked for it."""

    def __init__(self, run_id: str, not_undone: Sequence[str] = ()) -> None:
        super().__init__(run_id, *([list(not_undone)] if not_undone else ()))

    @property
    def not_undone(self) -> list[str]:
        return list(self.args[1]) if len(self.args) > 1 else []

    def __str__(self) -> str:
        left = f"; not undone: {_some(self.not_undone)}" if self.not_undone else ""
        return f"run {self.args[0]!r} was cancelled{left}"


class DeadlineExceeded(PerdureError, TimeoutError):
    """The run had not ended at the deadline that it was started with, and was cancelled."""

    def __init__(self, run_id: str, deadline: str) -> None:
        super().__init__(run_id, deadline)

    def __str__(self) -> str:
        return f"run {self.args[0]!r} had not ended at its deadline, {self.args[1]}; runtime.retry() gives it the same time again"


class CompensationFailed(PerdureError):
    """The run failed or was cancelled, and compensations failed too. `__cause__` is the error that the run failed with."""

    def __init__(self, run_id: str, failures: Sequence[str]) -> None:
        super().__init__(run_id, list(failures))

    @property
    def failures(self) -> list[str]:
        """The key of each step whose compensation failed, with the error of the compensation."""
        return [str(failure) for failure in self.args[1]]

    def __str__(self) -> str:
        return (
            f"run {self.args[0]!r} ended, and these steps could not be compensated: {'; '.join(self.failures)}; "
            "undo by hand what they did. runtime.retry() counts those that returned as done, and calls the others again, under "
            "the same key"
        )


class NotUndone(PerdureError):
    """The run cannot end, because its code does not say how to undo what it has done: it does not reach these steps."""

    def __init__(self, run_id: str, keys: Sequence[str]) -> None:
        super().__init__(run_id, list(keys))

    @property
    def keys(self) -> list[str]:
        """The keys of the steps and children that would have to be undone."""
        return list(self.args[1])

    def __str__(self) -> str:
        first = self.keys[0]
        return (
            f"run {self.args[0]!r} has failed, was cancelled or starts over, and its code does not reach {_some(self.keys)}, "
            "which it has done and would have to undo. Bring the step back with its compensate= (aliases= if it was renamed), or "
            f"say how it is undone: @workflow(retired={{{first!r}: refund}}), None if nothing is to be undone. To leave it as it "
            "is: runtime.cancel(..., undo=False)"
        )


class ChildStuck(PerdureError):
    """The run was cancelled and cannot end, because a child of it cannot: that has a problem."""

    def __init__(self, run_id: str, child_id: str, problem: str) -> None:
        super().__init__(run_id, child_id, problem)

    @property
    def child_id(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        run_id, child_id, problem = self.args
        return f"run {run_id!r} waits for its child {child_id!r}, which cannot end: {problem}"


def _some(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:5])) + (" and others" if len(keys) > 5 else "")


class RunDead(PerdureError):
    """The run was set aside: again and again its worker was lost, or could not drive it on, before it recorded anything.

    `problem` says why the last attempt that could say so failed; None when each of them ended with its process.
    """

    def __init__(self, run_id: str, attempts: int, problem: str | None = None) -> None:
        super().__init__(run_id, attempts, problem)

    @property
    def problem(self) -> str | None:
        return None if self.args[2] is None else str(self.args[2])

    def __str__(self) -> str:
        run_id, attempts, problem = self.args
        times = "once" if attempts == 1 else f"{attempts} times"
        lost = f"its worker was lost {times} before it recorded anything (does a step end the process?)"
        tried = f"it was tried {times} without recording anything; the last problem: {problem}"
        return f"run {run_id!r} was set aside: {lost if problem is None else tried}; fix the cause, then runtime.retry() it"


class RunInterrupted(PerdureError):
    """The run's own code called `sys.exit` (or raised KeyboardInterrupt in a thread), or its task was cancelled from outside.

    Only the attempt ended, and nothing was recorded for it. It counts as failed, and the run is tried again later.
    """

    def __init__(self, run_id: str, where: str, what: str, advice: str = "raise an ordinary exception") -> None:
        super().__init__(run_id, where, what, advice)

    def __str__(self) -> str:
        run_id, where, what, advice = self.args
        return f"{where} {what}, which stopped this attempt of run {run_id!r} and not the process; {advice}"


class StepNotStopped(PerdureError):
    """A worker has stopped, and what it drove still runs: it was cancelled and went on.

    Its run was not given back. It goes on elsewhere when its lease ends.
    """

    def __init__(self, left: Sequence[str]) -> None:
        super().__init__(list(left))

    def __str__(self) -> str:
        return (
            f"the worker has stopped, but {', and '.join(self.args[0])}: cancelled when drain_after was over, it goes on. "
            "Its run was not given back; let the function end at CancelledError"
        )


class LeaseLost(PerdureError):
    """The lease is no longer valid, usually because another worker holds the run; the write was refused and nothing changed."""

    def __init__(self, run_id: str, epoch: int) -> None:
        super().__init__(run_id, epoch)

    def __str__(self) -> str:
        return f"the lease on run {self.args[0]!r} (epoch {self.args[1]}) is no longer the current one; nothing was written"


class LeaseHeld(PerdureError):
    """The run is held: by a live worker that drives it, or by an operator who put it on hold."""

    def __init__(self, run_id: str, by: str) -> None:
        super().__init__(run_id, by)

    @classmethod
    def by_operator(cls, run_id: str) -> Self:
        """Return the refusal to drive a run that is on hold."""
        return cls(run_id, "an operator, who put it on hold; unhold it first")

    @classmethod
    def by_attempt(cls, run_id: str, status: str) -> Self:
        """Return the refusal to reopen a run that has not ended."""
        return cls(run_id, f"its present attempt (it is {status}); wait until it has ended")

    def __str__(self) -> str:
        return f"run {self.args[0]!r} is held by {self.args[1]}"


class DuplicateStep(PerdureError):
    """One key was used twice in one run. Never recorded: fix the code and retry the run."""

    def __init__(self, run_id: str, key: str) -> None:
        super().__init__(run_id, key)

    def __str__(self) -> str:
        return f"step key {self.args[1]!r} was used twice in run {self.args[0]!r}; pass key= to tell them apart"


class RunDiverged(PerdureError):
    """The code asks for something new, or its function ends, while the journal holds results that the code has not asked for.

    The run was stopped before anything happened. It resumes when the code fits it again. `asked` is the new key, or None if the
    function has ended. `missing` has the recorded keys. `unfound` names exception classes that were found when an error was
    recorded and are not found now, so that an `except` clause may not have matched. `raised` is the error that ended the
    function, in one line.
    """

    def __init__(
        self, run_id: str, asked: str | None, missing: Iterable[str], unfound: Iterable[str] = (), raised: str | None = None
    ) -> None:
        super().__init__(run_id, asked, list(missing), list(unfound), raised)

    @property
    def asked(self) -> str | None:
        return None if self.args[1] is None else str(self.args[1])

    @property
    def missing(self) -> list[str]:
        return list(self.args[2])

    @property
    def unfound(self) -> list[str]:
        return list(self.args[3])

    @property
    def raised(self) -> str | None:
        return None if self.args[4] is None else str(self.args[4])

    def __str__(self) -> str:
        run_id, asked, missing, unfound, raised = self.args
        ends = "where its function ends" if raised is None else f"where its function raises {raised}"
        where = ends if asked is None else f"before {asked!r}, which is new"
        why = f": {_names(missing)} is recorded and this code does not ask for it" if missing else ""
        return f"run {run_id!r} was stopped {where}{why}. {self._advice(asked, missing, unfound)}"

    @staticmethod
    def _advice(asked: str | None, missing: list[str], unfound: list[str]) -> str:
        regardless = f'on_divergence="run" {"ends it" if asked is None else "goes on"} regardless'
        if unfound:
            names = ", ".join(unfound)
            return (
                f"The error that a step raised has a class that is not found here, {names}, so `except {names}` does not match; "
                f"define it at module level under this name, in a module that this process imports. {regardless}"
            )
        first = missing[0]
        removed = f"Removed: @workflow(retired={{{first!r}}})."
        if asked is None:
            return f"{removed} {regardless}"
        return (
            f"Renamed: pass aliases=[{first!r}] for the step {asked!r}, or key={first!r} for a wait. {removed} Inserted: "
            f'`if await ctx.patched("..."):` around {asked!r}. {regardless}'
        )


class StepFailed(PerdureError):
    """A step returned `Err`, or raised an exception whose class cannot be rebuilt here.

    In the second case it is also an instance of the nearest base of that class that is found here, so that `except` may name it.
    `error` is what was inside the `Err`, or the recorded error's type name; `cause` is what is known about its cause.
    """

    def __init__(self, key: str, error: Any, message: str | None = None) -> None:
        super().__init__(key, error, message)

    @property
    def key(self) -> str:
        return str(self.args[0])

    @property
    def error(self) -> Any:
        return self.args[1]

    @property
    def was_returned(self) -> bool:
        """Whether the step returned `Err(error)`, rather than raise."""
        return self.args[2] is None

    def __str__(self) -> str:
        if self.was_returned:
            return f"{name_step(self.args[0])} returned Err({self.args[1]!r})"
        return f"{name_step(self.args[0])} failed: {self.args[1]}: {self.args[2]}"


class StepTraceback(Exception):
    """Show where a recorded error was raised. It is the cause of the innermost error of the chain, and is never raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    @property
    def text(self) -> str:
        """The traceback as Python printed it, with those of the error's causes."""
        return str(self.args[0])

    def __str__(self) -> str:
        return "\n" + self.text.rstrip()


class StepChanged(PerdureError):
    """A recorded key was asked for as another kind of step, or, if so configured, with other arguments."""

    def __init__(self, run_id: str, key: str, recorded: str, asked: str) -> None:
        super().__init__(run_id, key, recorded, asked)

    @property
    def key(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        run_id, key, recorded, asked = self.args
        return (
            f"run {run_id!r} recorded {name_key(key)} as {recorded}, but the code now asks for it as {asked}; "
            "give the new step a key of its own"
        )


class StepTimeout(PerdureError, TimeoutError):
    """An attempt of a step took longer than its `timeout=`."""

    def __init__(self, key: str, seconds: float) -> None:
        super().__init__(key, seconds)

    def __str__(self) -> str:
        return f"{name_step(self.args[0])} did not finish within {self.args[1]:g} s"


class RetryAfter(PerdureError):
    """Raise it in a step's function to have the step tried again after this time: `raise RetryAfter("30s") from error`.

    It counts as an attempt and takes the place of the pause of `retry=`, also if it is longer than `wait_max`. Without `retry=`,
    and in the last attempt, it is an ordinary failure of the step.
    """

    def __init__(self, wait: Duration) -> None:
        super().__init__(to_seconds(wait, what="RetryAfter(wait)"))

    @property
    def seconds(self) -> float:
        return float(self.args[0])

    def __str__(self) -> str:
        return f"the step asks to be tried again after {self.args[0]:g} s; that takes retry= with attempts left"


class StepNotPicklable(PerdureError, TypeError):
    """A step has an executor in another process, and its function, its arguments or its result cannot be pickled."""

    def __init__(self, key: str, what: str, reason: str) -> None:
        super().__init__(key, what, reason)

    def __str__(self) -> str:
        key, what, reason = self.args
        return f"{name_step(key)} has an executor in another process, but {what} ({reason})"


class ExecutorNotFound(PerdureError):
    """A step has `executor="name"`, and this process was given no executor of that name. Nothing was recorded."""

    def __init__(self, key: str, name: str, known: Iterable[str]) -> None:
        super().__init__(key, name, sorted(known))

    def __str__(self) -> str:
        key, name, known = self.args
        there_are = f"there are {', '.join(map(repr, known))}" if known else "there are none"
        advice = f"pass executors={{{name!r}: ...}} to the Runtime"
        return f"{name_step(key)} has executor={name!r}, which is not known here ({there_are}); {advice}"


class ApprovalNotFound(PerdureError):
    """The run does not wait for an approval of this name or key. `pending` are the keys of those that it waits for."""

    def __init__(self, run_id: str, name: str, pending: Iterable[str] = ()) -> None:
        super().__init__(run_id, name, list(pending))

    @property
    def pending(self) -> list[str]:
        return list(self.args[2])

    def __str__(self) -> str:
        run_id, name, pending = self.args
        waits = f"it waits for {', '.join(map(repr, pending))}" if pending else "it waits for none"
        return f"run {run_id!r} does not wait for an approval {name!r}; {waits}"


class ApprovalAmbiguous(PerdureError):
    """The run waits for several approvals of this name; `keys` tells them apart."""

    def __init__(self, run_id: str, name: str, keys: Iterable[str]) -> None:
        super().__init__(run_id, name, list(keys))

    @property
    def keys(self) -> list[str]:
        return list(self.args[2])

    def __str__(self) -> str:
        run_id, name, keys = self.args
        return f"run {run_id!r} waits for {len(keys)} approvals {name!r}; pass key= with one of {', '.join(map(repr, keys))}"


class ApprovalDecided(PerdureError):
    """The approval was decided before, and stays so. `decision` is "approved" or "rejected", `at` an ISO date and time in UTC."""

    def __init__(self, run_id: str, name: str, decision: str, by: str, at: str) -> None:
        super().__init__(run_id, name, decision, by, at)

    @property
    def decision(self) -> str:
        return str(self.args[2])

    @property
    def by(self) -> str:
        return str(self.args[3])

    @property
    def at(self) -> str:
        return str(self.args[4])

    def __str__(self) -> str:
        run_id, name, decision, by, at = self.args
        return f"approval {name!r} of run {run_id!r} was {decision} by {by!r} at {at}; it is decided only once"


class ApprovalExpired(PerdureError):
    """No decision came in time. The run goes on without one. `at` is an ISO date and time in UTC."""

    def __init__(self, run_id: str, name: str, at: str) -> None:
        super().__init__(run_id, name, at)

    @property
    def at(self) -> str:
        return str(self.args[2])

    def __str__(self) -> str:
        run_id, name, at = self.args
        return f"approval {name!r} of run {run_id!r} expired at {at}; it takes no decision any more"


class NotAssigned(PerdureError):
    """The approval is for other people."""

    def __init__(self, run_id: str, name: str, by: str, assignees: Iterable[str]) -> None:
        super().__init__(run_id, name, by, list(assignees))

    def __str__(self) -> str:
        run_id, name, by, assignees = self.args
        return f"approval {name!r} of run {run_id!r} is not for {by!r} to decide, but for {', '.join(map(repr, assignees))}"


class TokenError(PerdureError):
    """An approval token cannot be used. No error about a token shows it."""


class TokenInvalid(TokenError):
    """The text is no approval token that was signed with a secret of this runtime, for its store."""

    def __str__(self) -> str:
        return (
            "this is no approval token of this runtime: it was changed or cut, or made with another secret or for another store"
        )


class TokenExpired(TokenError):
    """The token was valid until `at`, an ISO date and time in UTC."""

    def __init__(self, at: str) -> None:
        super().__init__(at)

    @property
    def at(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"the approval token was valid until {self.args[0]}; make a new one with runtime.approval_token"


class TokenNotAllowed(TokenError):
    """The token allows only another action."""

    def __init__(self, action: str, allowed: str) -> None:
        super().__init__(action, allowed)

    def __str__(self) -> str:
        return f"the approval token allows to {self.args[1]} and not to {self.args[0]}"


class InvalidInput(PerdureError):
    """The arguments do not fit the workflow's parameters; nothing was written."""

    def __init__(self, workflow: str, reason: str) -> None:
        super().__init__(workflow, reason)

    def __str__(self) -> str:
        return f"workflow {self.args[0]!r} cannot take this input: {self.args[1]}"


class ChildrenOpen(PerdureError):
    """A run cannot start over while children of it have not ended: their outcomes would reach a run that does not know them."""

    def __init__(self, run_id: str, keys: Sequence[str]) -> None:
        super().__init__(run_id, list(keys))

    @property
    def keys(self) -> list[str]:
        return list(self.args[1])

    def __str__(self) -> str:
        return (
            f"run {self.args[0]!r} cannot start over while its children {_some(self.keys)} have not ended; "
            "await or cancel them before ctx.continue_as, or start them with detached=True"
        )


class ValueNotStorable(PerdureError):
    """A value cannot be written so that it reads back the same, or is longer than the store takes; `path` says which part of it.

    A store raises it from a verb for a value that it will never take, and then has changed nothing.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)

    @property
    def path(self) -> str:
        return str(self.args[0])

    @property
    def reason(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        return f"the value at {self.args[0]} cannot be stored: {self.args[1]}"


class PersistenceError(PerdureError):
    """The store could not write, so the run stopped; what was acknowledged before is safe."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class TransactionFailed(PersistenceError):
    """The database, or the function at work in it, made a transaction fail: it cannot be committed."""


class StoreClosed(PersistenceError):
    """The store was closed, or the event loop of the connections it borrowed: it will not answer again."""

    def __init__(self, what: str, reason: str = "it was closed; open a new one") -> None:
        super().__init__(what, reason)


class StoreCapabilityError(PerdureError):
    """The store cannot do this."""

    def __init__(self, store: str, capability: str) -> None:
        super().__init__(store, capability)

    def __str__(self) -> str:
        return f"the {self.args[0]} store has no {self.args[1]}; use a store that has (see the table of stores in the README)"


class StreamFull(PerdureError):
    """A stream of a run holds as many items as it may."""

    def __init__(self, run_id: str, stream: str, limit: int) -> None:
        super().__init__(run_id, stream, limit)

    def __str__(self) -> str:
        run_id, stream, limit = self.args
        return f"stream {stream!r} of run {run_id!r} holds {limit} items, which is its limit; emit fewer, or raise max_items="


class StreamEnded(PerdureError):
    """Something was emitted to a stream of a run after `ctx.end_stream`."""

    def __init__(self, run_id: str, stream: str) -> None:
        super().__init__(run_id, stream)

    def __str__(self) -> str:
        run_id, stream = self.args
        return f"stream {stream!r} of run {run_id!r} was ended by ctx.end_stream; emit before that, or to another stream"


class SnapshotError(PerdureError):
    """Recorded state cannot be used."""


class SnapshotMismatch(SnapshotError):
    """Recorded state does not belong to this workflow, or to this version of it."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)

    @property
    def reason(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        return f"run {self.args[0]!r} does not fit this workflow: {self.reason}"


class FormatProblem(NamedTuple):
    """One thing that is wrong with a document: where it is, as a JSON path, and a sentence about it."""

    path: str
    reason: str


class SnapshotFormatError(SnapshotError):
    """A document is no snapshot, or no resume state. Nothing was started with it.

    `errors` has everything that is wrong, `path` is that of the first error.
    """

    def __init__(self, errors: Iterable[tuple[str, str]], what: str = "the snapshot") -> None:
        super().__init__([[path, reason] for path, reason in errors], what)

    @property
    def errors(self) -> tuple[FormatProblem, ...]:
        return tuple(FormatProblem(path, reason) for path, reason in self.args[0])

    @property
    def path(self) -> str:
        return self.errors[0].path

    def __str__(self) -> str:
        errors, what = self.args
        shown = "; ".join(f"{path} {reason}" for path, reason in errors[:_MAX_SHOWN_ERRORS])
        more = f"; and {len(errors) - _MAX_SHOWN_ERRORS} more" if len(errors) > _MAX_SHOWN_ERRORS else ""
        return f"{what} cannot be read: {shown}{more}"


class SnapshotCorrupt(SnapshotError):
    """Stored data of a run cannot be read back. It is left as it is, and the run is not started from the beginning."""

    def __init__(self, run_id: str, what: str, reason: str) -> None:
        super().__init__(run_id, what, reason)

    def __str__(self) -> str:
        run_id, what, reason = self.args
        return f"{what} of run {run_id!r} cannot be read back ({reason}); it was left untouched"


class Unloaded(asyncio.CancelledError):
    """The run left memory while this code still ran; it will be replayed, so this code must not go on.

    A `CancelledError`, hence invisible to `except Exception`.
    """


class PerdureWarning(UserWarning):
    """Something works, but probably not as you meant it."""


# What to do when a run does not fit its code: the options `on_changed_arguments`, `on_unknown_steps`, `on_definition_change`.
OnChange: TypeAlias = Literal["warn", "error", "ignore"]
# What to do when the code asks for something new while recorded results are left: the option `on_divergence`.
OnDivergence: TypeAlias = Literal["stop", "run"]


def _names(keys: list[str]) -> str:
    return ", ".join(map(name_key, keys[:_MAX_SHOWN_ERRORS])) + (" and others" if len(keys) > _MAX_SHOWN_ERRORS else "")


def name_key(key: str) -> str:
    """Return how a message names the key: `'charge'`, `the compensation of 'charge'`, `the cancellation of the run`."""
    if key == CANCEL_KEY:
        return "the cancellation of the run"
    if key.startswith(TIMER_PREFIX):
        return "a timer of asyncio"
    own = key.removeprefix(COMPENSATION_PREFIX)
    return repr(key) if own == key else f"the compensation of {own!r}"


def name_step(key: str) -> str:
    """Return how a message names the step under this key: `step 'charge'`, `the compensation of 'charge'`."""
    named = name_key(key)
    return f"step {named}" if named == repr(key) else named
