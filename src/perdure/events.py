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
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

from perdure.snapshot import Snapshot, StepResult
from perdure.stateview import View

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run at the instant `at`."""

    type: ClassVar[EventType]
    # Whether it ends what this process does for the run. Such events are never dropped.
    is_terminal: ClassVar[bool] = False

    run_id: str
    workflow: str
    at: datetime
    view: View = field(repr=False, compare=False)

    @property
    def snapshot(self) -> Snapshot:
        """The run as it stood when this happened."""
        return self.view.snapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart(Event):
    """The run is driven here from now on. `attempt` counts from 1; `is_resumed`: something was recorded before."""

    type: ClassVar[EventType] = "run_start"
    attempt: int
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComplete(Event):
    """The run has ended with a value."""

    type: ClassVar[EventType] = "run_complete"
    is_terminal: ClassVar[bool] = True
    load: Callable[[], Any] = field(repr=False, compare=False)

    @property
    def result(self) -> Any:
        """The value: a copy, since whoever waits for the run has its own."""
        return self.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError(Event):
    """The run has ended with an error: failed, or dead."""

    type: ClassVar[EventType] = "run_error"
    is_terminal: ClassVar[bool] = True
    error: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSuspended(Event):
    """The run left memory: until `wake_at`, for one of the signals in `waiting_for`, or to be driven again or elsewhere.

    `error` says why, if this process could not go on: the store failed, or another worker has the run.
    """

    type: ClassVar[EventType] = "run_suspended"
    is_terminal: ClassVar[bool] = True
    wake_at: datetime | None
    waiting_for: tuple[str, ...]
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCancelled(Event):
    """The run has ended as cancelled."""

    type: ClassVar[EventType] = "run_cancelled"
    is_terminal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """Something about one step. `attempt` counts from 1, and is 0 where a cache had the result, so that there was none."""

    key: str
    name: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart(StepEvent):
    """The step's function is about to be called."""

    type: ClassVar[EventType] = "step_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRetry(StepEvent):
    """An attempt failed with `error`, and the next begins at `next_at`."""

    type: ClassVar[EventType] = "step_retry"
    error: Exception
    next_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeout(StepEvent):
    """An attempt took longer than it may."""

    type: ClassVar[EventType] = "step_timeout"
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCacheHit(StepEvent):
    """The cache has the step's result, so that its function is not called."""

    type: ClassVar[EventType] = "step_cache_hit"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCacheMiss(StepEvent):
    """The cache does not have the step's result."""

    type: ClassVar[EventType] = "step_cache_miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(StepEvent):
    """The step has an outcome, and it is recorded."""

    started_at: datetime
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSuccess(StepEnded):
    """The step gave a result just now."""

    type: ClassVar[EventType] = "step_success"
    load: Callable[[], Any] = field(repr=False, compare=False)

    @property
    def result(self) -> Any:
        """The value: a copy, since the body has its own."""
        return self.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError(StepEnded):
    """The step failed just now."""

    type: ClassVar[EventType] = "step_error"
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped(StepEnded):
    """The step was recorded before, so that its function is not called."""

    type: ClassVar[EventType] = "step_skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComplete(StepEnded):
    """The step has an outcome: from now, or, with `is_replayed`, from before."""

    type: ClassVar[EventType] = "step_complete"
    is_replayed: bool
    tell: Callable[[], StepResult] = field(repr=False, compare=False)

    @property
    def result(self) -> StepResult:
        """How the step came out, as a snapshot tells it."""
        return self.tell()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived(Event):
    """A wait of the run got its signal just now."""

    type: ClassVar[EventType] = "signal"
    key: str
    name: str
    load: Callable[[], Any] = field(repr=False, compare=False)

    @property
    def payload(self) -> Any:
        """What was sent with the signal."""
        return self.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged(Event):
    """This process got the right to drive the run, gave it back, or lost it."""

    type: ClassVar[EventType] = "lease"
    action: Literal["acquired", "released", "lost"]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(Event):
    """The store has acknowledged everything up to the entry `seq` of the journal."""

    type: ClassVar[EventType] = "persist"
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """Something is not as it should be, and the run goes on: what a `PerdureWarning` says."""

    type: ClassVar[EventType] = "warning"
    message: str
