"""What happens to a run, as typed values for whoever listens.

    run_start  run_complete  run_error  run_suspended  run_cancelled          the run, each time it is driven here
    step_start  step_retry  step_timeout                                      attempts at a step
    step_cache_hit  step_cache_miss                                           what `cache=` knew
    step_success  step_error  step_skipped  then  step_complete               how a step came out; skipped: it was recorded before
    signal  lease  persist  warning                                           around the run

Each time a run is driven here it is told from `run_start` (and, with a store, the lease before it) to one of the other four that
begin with `run`, unless the process dies. What an event says was recorded is recorded: nobody is told before the store has
acknowledged it. Every event carries `snapshot`, the run as it stood then: a view, worked out when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeGuard, overload

import msgspec

from perdure.snapshots.parts import StepResult
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.snapshots.view import View

EventType: TypeAlias = Literal[
    "run_start",
    "run_complete",
    "run_error",
    "run_suspended",
    "run_cancelled",
    "step_start",
    "step_success",
    "step_error",
    "step_complete",
    "step_cache_hit",
    "step_cache_miss",
    "step_retry",
    "step_timeout",
    "step_skipped",
    "signal",
    "lease",
    "persist",
    "warning",
]

# Fields by which something is worked out when somebody looks.
_WORKED_OUT: Final = frozenset({"view", "load", "tell"})


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """Something that happened to a run at the instant `at`. What is worked out from its `view` is no part of its value."""

    type: ClassVar[EventType]
    # Whether it ends what this process does for the run. Such events are never dropped.
    is_terminal: ClassVar[bool] = False

    run_id: str
    workflow: str
    at: datetime
    view: View

    @property
    def snapshot(self) -> Snapshot:
        """The run as it stood when this happened."""
        return self.view.snapshot()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Event) and self._told() == other._told()

    def __hash__(self) -> int:
        return hash((type(self), *self._told().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._told().items())})"

    def _told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in _WORKED_OUT}


class RunStart(Event, frozen=True, kw_only=True):
    """The run is driven here from now on. `attempt` counts from 1; `is_resumed`: something was recorded before."""

    type: ClassVar[EventType] = "run_start"
    attempt: int
    is_resumed: bool


class RunComplete(Event, frozen=True, kw_only=True):
    """The run has ended with a value."""

    type: ClassVar[EventType] = "run_complete"
    is_terminal: ClassVar[bool] = True
    load: Callable[[], Any]

    @property
    def result(self) -> Any:
        """The value: a copy, since whoever waits for the run has its own."""
        return self.load()


class RunError(Event, frozen=True, kw_only=True):
    """The run has ended with an error: failed, or dead."""

    type: ClassVar[EventType] = "run_error"
    is_terminal: ClassVar[bool] = True
    error: Any


class RunSuspended(Event, frozen=True, kw_only=True):
    """The run left memory: until `wake_at`, for one of the signals in `waiting_for`, or to be driven again or elsewhere.

    `error` says why, if this process could not go on: the store failed, or another worker has the run.
    """

    type: ClassVar[EventType] = "run_suspended"
    is_terminal: ClassVar[bool] = True
    wake_at: datetime | None
    waiting_for: tuple[str, ...]
    error: BaseException | None = None


class RunCancelled(Event, frozen=True, kw_only=True):
    """The run has ended as cancelled."""

    type: ClassVar[EventType] = "run_cancelled"
    is_terminal: ClassVar[bool] = True


class StepEvent(Event, frozen=True, kw_only=True):
    """Something about one step. `attempt` counts from 1, and is 0 where a cache had the result, so that there was none."""

    key: str
    name: str
    attempt: int


class StepStart(StepEvent, frozen=True, kw_only=True):
    """The step's function is about to be called."""

    type: ClassVar[EventType] = "step_start"


class StepRetry(StepEvent, frozen=True, kw_only=True):
    """An attempt failed with `error`, and the next begins at `next_at`."""

    type: ClassVar[EventType] = "step_retry"
    error: Exception
    next_at: datetime


class StepTimeout(StepEvent, frozen=True, kw_only=True):
    """An attempt took longer than it may."""

    type: ClassVar[EventType] = "step_timeout"
    error: Exception


class StepCacheHit(StepEvent, frozen=True, kw_only=True):
    """The cache has the step's result, so that its function is not called."""

    type: ClassVar[EventType] = "step_cache_hit"


class StepCacheMiss(StepEvent, frozen=True, kw_only=True):
    """The cache does not have the step's result."""

    type: ClassVar[EventType] = "step_cache_miss"


class StepEnded(StepEvent, frozen=True, kw_only=True):
    """The step has an outcome, and it is recorded."""

    started_at: datetime
    ended_at: datetime


class StepSuccess(StepEnded, frozen=True, kw_only=True):
    """The step gave a result just now."""

    type: ClassVar[EventType] = "step_success"
    load: Callable[[], Any]

    @property
    def result(self) -> Any:
        """The value: a copy, since the body has its own."""
        return self.load()


class StepError(StepEnded, frozen=True, kw_only=True):
    """The step failed just now."""

    type: ClassVar[EventType] = "step_error"
    error: Exception


class StepSkipped(StepEnded, frozen=True, kw_only=True):
    """The step was recorded before, so that its function is not called."""

    type: ClassVar[EventType] = "step_skipped"


class StepComplete(StepEnded, frozen=True, kw_only=True):
    """The step has an outcome: from now, or, with `is_replayed`, from before."""

    type: ClassVar[EventType] = "step_complete"
    is_replayed: bool
    tell: Callable[[], StepResult]

    @property
    def result(self) -> StepResult:
        """How the step came out, as a snapshot tells it."""
        return self.tell()


class SignalReceived(Event, frozen=True, kw_only=True):
    """A wait of the run got its signal just now."""

    type: ClassVar[EventType] = "signal"
    key: str
    name: str
    load: Callable[[], Any]

    @property
    def payload(self) -> Any:
        """What was sent with the signal."""
        return self.load()


class LeaseChanged(Event, frozen=True, kw_only=True):
    """This process got the right to drive the run, gave it back, or lost it."""

    type: ClassVar[EventType] = "lease"
    action: Literal["acquired", "released", "lost"]
    epoch: int


class Persisted(Event, frozen=True, kw_only=True):
    """The store has acknowledged everything up to the entry `seq` of the journal."""

    type: ClassVar[EventType] = "persist"
    seq: int


class Warned(Event, frozen=True, kw_only=True):
    """Something is not as it should be, and the run goes on: what a `PerdureWarning` says."""

    type: ClassVar[EventType] = "warning"
    message: str


Listener: TypeAlias = Callable[[Event], Any]


@overload
def is_step_complete(state: Event, /) -> TypeGuard[StepComplete]: ...
@overload
def is_step_complete(state: ResumeState | Snapshot | None, key: str) -> bool: ...
def is_step_complete(state: Any, key: str | None = None) -> bool:
    """Whether the step `key` is recorded there, and as a success; or whether an event is a step's `step_complete`."""
    if key is None:
        return getattr(state, "type", None) == "step_complete"
    result = None if state is None else state.steps.get(key)
    return result is not None and result.ok


class ResumeStateCollector:
    """Pass `handle_event` as `on_event=`, or to `run.subscribe`, and save `resume_state()` as often as you like.

    What the run had recorded before it was driven here is part of it from the first event on, so that saving again never loses
    anything. One collector is for one run; of several, it knows the one it heard of last.
    """

    def __init__(self) -> None:
        self._view: View | None = None

    def handle_event(self, event: Event) -> None:
        """Take note of what is recorded by now."""
        self._view = event.view

    def resume_state(self) -> ResumeState:
        """The results of all steps that are recorded; empty before the first event."""
        return ResumeState() if self._view is None else self._view.resume_state()
