"""Options: those stored with a run, those that hold in this process only, and where each may be set.

Another worker may take a run over, so `runtime.start` takes stored options only. Process options belong to the workflow,
the runtime and `wf.run`; the nearest one that is set wins. The state that a new run starts from belongs to the workflow and
`wf.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypedDict, get_args

import msgspec

from perdure.aio.threads import ThreadPool, step_threads
from perdure.codec import Codec
from perdure.errors import OnChange, OnDivergence
from perdure.model.clock import Clock, SystemClock
from perdure.model.durations import MAX_INSTANT, MICROSECOND, Duration, instant, microseconds
from perdure.model.ids import check_id
from perdure.model.records import check_priority, encode_users_metadata
from perdure.store import Store

if TYPE_CHECKING:
    from perdure.caches import StepCache
    from perdure.events import Listener
    from perdure.simple_stores import StateKeeper
    from perdure.snapshots.importer import StateSource


class StartOptions(TypedDict, total=False):
    """Options that are stored with a run, except its id. They hold for every worker that drives it."""

    queue: str
    priority: int
    limit_key: str
    delay: Duration
    start_at: datetime
    deadline: Duration | datetime
    metadata: dict[str, Any]


class StoredOptions(StartOptions, total=False):
    """Options that are stored with a run, and hold for every worker that drives it."""

    id: str


class ScheduleOptions(TypedDict, total=False):
    """Options that a schedule stores with each of its runs."""

    queue: str
    priority: int
    limit_key: str
    deadline: Duration
    metadata: dict[str, Any]


class ProcessOptions(TypedDict, total=False):
    """Options of a workflow in this process; the nearest one that is set wins."""

    deps: Any
    cache: StepCache | MutableMapping[str, str] | None
    on_event: Listener | None
    strict: bool
    on_changed_arguments: OnChange
    on_unknown_steps: OnChange
    on_definition_change: OnChange
    on_divergence: OnDivergence
    executors: Mapping[str, Executor]


class WorkflowOptions(ProcessOptions, total=False):
    """Options of `@workflow(...)` and `Workflow(...)`. The state, one of two names for it, is for every new run."""

    snapshot: StateSource
    resume_state: StateSource


class RunOptions(StoredOptions, WorkflowOptions, total=False):
    """Options of `wf.run` and `wf.start`."""

    store: Store | StateKeeper | str
    retry_failed: bool
    wait: bool


class Options(msgspec.Struct, frozen=True):
    """The process options in force for a drive."""

    deps: Any = None
    cache: Any = None
    on_event: Listener | None = None
    strict: bool | None = None
    on_changed_arguments: OnChange = "warn"
    on_unknown_steps: OnChange = "warn"
    on_definition_change: OnChange = "warn"
    on_divergence: OnDivergence | None = None
    executors: Mapping[str, Executor] = msgspec.field(default_factory=dict)

    @classmethod
    def nearest(cls, *levels: Mapping[str, Any]) -> Options:
        """The options in force, from levels that go from the farthest to the nearest."""
        merged: dict[str, Any] = {}
        for options in levels:
            if not _PROCESS_OPTIONS.isdisjoint(options):  # most levels set none
                merged |= {name: value for name, value in options.items() if name in _PROCESS_OPTIONS}
        return cls(**merged)


_PROCESS_OPTIONS: Final = frozenset(ProcessOptions.__annotations__)


def check_options(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The options, if all are of this kind and have values they can have. Raises TypeError or ValueError."""
    known = kind.__annotations__.keys()
    if not options.keys() <= known:
        raise TypeError(
            f"unknown option {', '.join(sorted(options.keys() - known))}; there are {', '.join(sorted(known))} "
            "(a workflow's own keyword arguments go through wf.options(...).run(...))"
        )
    if "snapshot" in options and "resume_state" in options:
        raise TypeError("snapshot= and resume_state= are two names for one option; pass one of them")
    for name, value in options.items():
        check = _CHECKS.get(name)
        if check is not None:
            check(name, value)
    return dict(options)


def _check_choice(name: str, value: Any) -> None:
    if value not in get_args(OnChange):
        raise ValueError(f"{name} is one of {', '.join(get_args(OnChange))}, not {value!r}")


def _check_divergence(name: str, value: Any) -> None:
    if value not in get_args(OnDivergence):
        raise ValueError(f"{name} is one of {', '.join(get_args(OnDivergence))}, not {value!r}")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")


def _check_cache(_: str, value: Any) -> None:
    if value is not None:
        from perdure.caches import as_cache  # imported only where there is a cache

        as_cache(value)


def _check_listener(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a function that takes an event, not {value!r}")


def _check_executors(_: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f'executors= takes executors by name, {{"cpu": ProcessPoolExecutor()}}, not {value!r}')
    for name, executor in value.items():
        if not isinstance(name, str) or not isinstance(executor, Executor):
            raise TypeError(f"executors= has {name!r}: {executor!r}, and takes objects of concurrent.futures.Executor by name")


# The other options are checked where they are used.
_CHECKS: Final[Mapping[str, Callable[[str, Any], None]]] = {
    "on_changed_arguments": _check_choice,
    "on_unknown_steps": _check_choice,
    "on_definition_change": _check_choice,
    "on_divergence": _check_divergence,
    "strict": _check_switch,
    "retry_failed": _check_switch,
    "wait": _check_switch,
    "cache": _check_cache,
    "on_event": _check_listener,
    "executors": _check_executors,
}


def check_stored_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of `runtime.start` and `runtime.run`; others are refused with the reason."""
    refused = options.keys() - StoredOptions.__annotations__.keys()
    if refused:
        raise TypeError(
            f"runtime.start and runtime.run do not take {', '.join(sorted(refused))}: another worker may take the run over, "
            f"so only what is stored with it counts ({', '.join(sorted(StoredOptions.__annotations__))}); "
            "set the rest on Runtime or @workflow, and pass the workflow's own arguments by position"
        )
    return options


def counts_from_now(options: Mapping[str, Any]) -> bool:
    """Whether one of these options is a length of time from now on, so that the store's time must be known."""
    return options.get("delay") is not None or _is_length(options.get("deadline"))


def _is_length(deadline: Any) -> bool:
    return deadline is not None and not isinstance(deadline, datetime)


def columns_of(options: Mapping[str, Any], now: int) -> dict[str, Any]:
    """The columns of a run that these options set, checked. The id is not among them. `now` is the store's time."""
    columns = {name: _COLUMNS[name](value) for name, value in options.items() if name in _COLUMNS}
    delay, deadline = options.get("delay"), options.get("deadline")
    if delay is not None:
        if options.get("start_at") is not None:
            raise TypeError("delay= and start_at= both say when the run starts; pass one of them")
        columns["start_at"] = min(now + microseconds(delay, what="delay"), MAX_INSTANT)
    if deadline is not None:
        length = microseconds(deadline, what="deadline") if _is_length(deadline) else None
        columns["deadline"] = instant(deadline, what="deadline") if length is None else min(now + length, MAX_INSTANT)
        # Instants are compared with instants and lengths with lengths: a start that is repeated later must not fail by that.
        is_comparable = columns.get("start_at") is not None and (delay is None) == (length is None)
        if is_comparable and columns["deadline"] <= columns["start_at"]:
            raise ValueError(f"the deadline {deadline!r} comes before the run starts; both count from when it is created")
    return columns


_COLUMNS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "queue": lambda queue: check_id(queue, "a queue's name"),
    "priority": check_priority,
    "limit_key": lambda key: None if key is None else check_id(key, "a limit key"),
    "start_at": lambda at: None if at is None else instant(at, what="start_at"),
    "metadata": encode_users_metadata,
}


# Seconds for which a run is leased, unless `lease_ttl=` says otherwise. It is renewed after each third of that.
LEASE_TTL: Final = 10.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The clock, codec and threads of a runtime, and its limits.

    `unload_grace` is in microseconds; `drain_after`, and `cancel_grace` for the clean-up of a cancelled body, are in seconds.
    """

    clock: Clock = field(default_factory=SystemClock)
    codec: Codec = field(default_factory=Codec)
    threads: ThreadPool = step_threads
    unload_grace: int = MICROSECOND
    max_attempts: int = 10
    drain_after: float = 10.0
    cancel_grace: float = 30.0
    # For how long an event loop may be blocked, in seconds, before the leases of its runs are not renewed. None: for ever.
    max_blocked: float | None = 60.0
    # What is called in place of a step: a step as it was called, for another. `perdure.testing` has stubs.
    replace_step: Callable[[Any], Any] | None = None
    # Which changes of which workflow a warning was about; None: each is warned of.
    said_changes: set[tuple[str, int, str]] | None = None
    # Whether `timeout=` of a step counts by `clock`, and not by the event loop: under a virtual clock only.
    limits_steps_by_clock: bool = False
