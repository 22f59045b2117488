"""What happens to a run, as typed values that listeners get.

    run_start  run_complete  run_error  run_suspended  run_cancelled          the run, each time this process drives it
    step_start  step_retry  step_timeout                                      attempts at a step
    step_cache_hit  step_cache_miss                                           whether `cache=` had the result
    step_success  step_error  step_skipped  then  step_complete               a step's outcome; skipped: it was recorded before
    signal  lease  persist  warning                                           around the run

Each drive of a run publishes `run_start` first (with a store, the lease comes before it) and ends with one of the other four that
begin with `run`, unless the process dies. What an event reports as recorded is recorded: events are published after the store has
acknowledged the write. Every event carries `snapshot`, the run as it stood then, which is computed when it is read.

Two helpers for listeners are at the end: `ResumeStateCollector` keeps what a run has recorded so far, and `is_step_complete` asks
an event or a recorded state about a step.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeGuard, overload

import msgspec

from perdure.result import WaitingFor
from perdure.snapshots.consistent_view import View
from perdure.snapshots.parts import StepResult
from perdure.snapshots.resume_state import ResumeState, parse_state
from perdure.snapshots.snapshot import Snapshot
from perdure.stepspec import current_run_id

EventType: TypeAlias = Literal[
    "run_start",
    "run_complete",
    "run_error",
    "run_suspended",
    "run_continued",
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

# The fields from which properties are computed when they are read.
_LAZY_FIELDS: Final = frozenset({"view", "load"})


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """Something that happened to a run at the instant `at`. Equality, hash and repr leave out what is computed on reading."""

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
        return type(other) is type(self) and isinstance(other, Event) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in _LAZY_FIELDS}


class RunStartEvent(Event, frozen=True, kw_only=True):
    """This process starts to drive the run. `attempt` counts from 1; `is_resumed`: something was recorded before."""

    type: ClassVar[EventType] = "run_start"
    attempt: int
    is_resumed: bool


class RunCompleteEvent(Event, frozen=True, kw_only=True):
    """The run has ended with a value."""

    type: ClassVar[EventType] = "run_complete"
    is_terminal: ClassVar[bool] = True
    load: Callable[[], Any]

    @property
    def result(self) -> Any:
        """A copy of the value; the caller that awaits the run has another."""
        return self.load()


class RunErrorEvent(Event, frozen=True, kw_only=True):
    """The run has ended with an error: failed, or dead."""

    type: ClassVar[EventType] = "run_error"
    is_terminal: ClassVar[bool] = True
    error: Any


class RunSuspendedEvent(Event, frozen=True, kw_only=True):
    """The run left memory: it waits until `wake_at` or for something in `waiting_for`, or is to be driven again or elsewhere.

    `error` is the reason if this process could not go on: the store failed, or another worker has the run.
    """

    type: ClassVar[EventType] = "run_suspended"
    is_terminal: ClassVar[bool] = True
    wake_at: datetime | None
    waiting_for: tuple[WaitingFor, ...]
    error: BaseException | None = None


class RunContinuedEvent(Event, frozen=True, kw_only=True):
    """The run has started over, with `ctx.continue_as`: it is due, in this generation, with an empty journal."""

    type: ClassVar[EventType] = "run_continued"
    is_terminal: ClassVar[bool] = True
    generation: int


class RunCancelledEvent(Event, frozen=True, kw_only=True):
    """The run has ended as cancelled."""

    type: ClassVar[EventType] = "run_cancelled"
    is_terminal: ClassVar[bool] = True


class StepEvent(Event, frozen=True, kw_only=True):
    """Something about one step. `attempt` counts from 1; it is 0 when a cache had the result, so no attempt was made."""

    key: str
    name: str
    attempt: int


class StepStartEvent(StepEvent, frozen=True, kw_only=True):
    """The step's function is about to be called."""

    type: ClassVar[EventType] = "step_start"


class StepRetryEvent(StepEvent, frozen=True, kw_only=True):
    """An attempt failed with `error`, and the next begins at `next_at`."""

    type: ClassVar[EventType] = "step_retry"
    error: Exception
    next_at: datetime


class StepTimeoutEvent(StepEvent, frozen=True, kw_only=True):
    """An attempt took longer than its `timeout=`."""

    type: ClassVar[EventType] = "step_timeout"
    error: Exception


class StepCacheHitEvent(StepEvent, frozen=True, kw_only=True):
    """The cache has the step's result, so its function is not called."""

    type: ClassVar[EventType] = "step_cache_hit"


class StepCacheMissEvent(StepEvent, frozen=True, kw_only=True):
    """The cache does not have the step's result."""

    type: ClassVar[EventType] = "step_cache_miss"


class StepEndedEvent(StepEvent, frozen=True, kw_only=True):
    """The step has an outcome, and it is recorded."""

    started_at: datetime
    ended_at: datetime


class StepSuccessEvent(StepEndedEvent, frozen=True, kw_only=True):
    """The step has just succeeded."""

    type: ClassVar[EventType] = "step_success"
    load: Callable[[], Any]

    @property
    def result(self) -> Any:
        """A copy of the value; the body has another."""
        return self.load()


class StepErrorEvent(StepEndedEvent, frozen=True, kw_only=True):
    """The step has just failed."""

    type: ClassVar[EventType] = "step_error"
    error: Exception


class StepSkippedEvent(StepEndedEvent, frozen=True, kw_only=True):
    """The step was recorded before, so its function is not called."""

    type: ClassVar[EventType] = "step_skipped"


class StepCompleteEvent(StepEndedEvent, frozen=True, kw_only=True):
    """The step has an outcome: a new one, or, with `is_replayed`, one that was recorded before."""

    type: ClassVar[EventType] = "step_complete"
    is_replayed: bool
    load: Callable[[], StepResult]

    @property
    def result(self) -> StepResult:
        """The outcome, as a snapshot shows it."""
        return self.load()


class SignalReceivedEvent(Event, frozen=True, kw_only=True):
    """A wait of the run has just got its signal."""

    type: ClassVar[EventType] = "signal"
    key: str
    name: str
    load: Callable[[], Any]

    @property
    def payload(self) -> Any:
        """What was sent with the signal."""
        return self.load()


class LeaseChangedEvent(Event, frozen=True, kw_only=True):
    """This process got the right to drive the run, gave it back, or lost it."""

    type: ClassVar[EventType] = "lease"
    action: Literal["acquired", "released", "lost"]
    epoch: int


class PersistedEvent(Event, frozen=True, kw_only=True):
    """The store has acknowledged everything up to the entry `seq` of the journal."""

    type: ClassVar[EventType] = "persist"
    seq: int


class WarningEvent(Event, frozen=True, kw_only=True):
    """Something is probably wrong, and the run goes on; `message` is that of the `PerdureWarning`."""

    type: ClassVar[EventType] = "warning"
    message: str


Listener: TypeAlias = Callable[[Event], Any]


@overload
def is_step_complete(state: Event, /) -> TypeGuard[StepCompleteEvent]: ...
@overload
def is_step_complete(state: ResumeState | Snapshot | dict[str, Any] | str | bytes | None, key: str) -> bool: ...
def is_step_complete(state: Any, key: str | None = None) -> bool:
    """Whether the step `key` is recorded in a state, as a success; with an event alone, whether it is a `step_complete`.

    A state may be its dict or JSON text too, which is read in full: `SnapshotFormatError` when it is no state.
    """
    if key is None:
        return getattr(state, "type", None) == "step_complete"
    if state is None:
        return False
    result = (state if isinstance(state, ResumeState | Snapshot) else parse_state(state)).steps.get(key)
    return result is not None and result.ok


class ResumeStateCollector:
    """The resume state of a running run: pass `handle_event` as `on_event=` or to `run.subscribe`, and save `resume_state()`.

    From the first event on the state includes what the run had recorded before this process drove it, so saving again never loses
    anything. A collector that hears several runs keeps them apart, each as long as the collector lives. In the body or a step of
    one of them, that run is meant; elsewhere, ask for one by its id. In a process that drives many runs, make a collector for
    each: `wf.run(..., on_event=collector.handle_event)`.
    """

    def __init__(self) -> None:
        self._views: dict[str, View] = {}

    def handle_event(self, event: Event) -> None:
        """Remember what is recorded by now."""
        self._views[event.run_id] = event.view

    def resume_state(self, run_id: str | None = None) -> ResumeState:
        """The results of all recorded steps of the run; empty before its first event. ValueError if it is not clear which run."""
        if run_id is None and current_run_id() in self._views:
            run_id = current_run_id()
        if run_id is None and len(self._views) > 1:
            heard = ", ".join(map(repr, list(self._views)[:5])) + (", ..." if len(self._views) > 5 else "")
            raise ValueError(
                f"this collector has events of {len(self._views)} runs: {heard}; ask for one with resume_state(run_id), "
                "or make a collector for each run"
            )
        view = next(iter(self._views.values()), None) if run_id is None else self._views.get(run_id)
        return ResumeState() if view is None else view.resume_state()
