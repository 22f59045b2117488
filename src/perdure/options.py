"""Options: what is stored with a run, what holds in this process only, and where each may be given.

Another worker may take a run over, so only stored options can be given to `runtime.start`. Process options belong to the
workflow, the runtime and `wf.run`; the nearest one given wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, get_args

import msgspec

from perdure.caching import as_cache
from perdure.errors import PerdureError, PerdureWarning
from perdure.store import Store

if TYPE_CHECKING:
    from perdure.caches import StepCache
    from perdure.importing import GivenState
    from perdure.listeners import Listener
    from perdure.stores.state_store import StateKeeper

OnChange: TypeAlias = Literal["warn", "error", "ignore"]

# What the narrowest integer column of all stores holds.
MAX_PRIORITY: Final = 2**31 - 1


class StoredOptions(TypedDict, total=False):
    """Options that are stored with a run, so that they hold for whoever drives it."""

    id: str
    queue: str
    priority: int
    start_at: datetime
    metadata: dict[str, Any]


class ProcessOptions(TypedDict, total=False):
    """Options of a workflow in this process; the nearest one given wins."""

    deps: Any
    cache: StepCache | MutableMapping[str, str] | None
    on_event: Listener | None
    strict: bool
    on_changed_arguments: OnChange
    on_unknown_steps: OnChange
    on_definition_change: OnChange


class RunOptions(StoredOptions, ProcessOptions, total=False):
    """Options of `wf.run` and `wf.start`."""

    store: Store | StateKeeper | str
    snapshot: GivenState
    resume_state: GivenState
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

    @classmethod
    def nearest(cls, *given: Mapping[str, Any]) -> Options:
        """Those given, from the farthest to the nearest."""
        merged: dict[str, Any] = {}
        for options in given:
            if options:
                merged |= only(ProcessOptions, options)
        return cls(**merged)


def only(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are of this kind."""
    return {name: value for name, value in options.items() if name in kind.__annotations__}


def checked(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The options, all of this kind and with values they can have."""
    unknown = options.keys() - kind.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(sorted(kind.__annotations__))} "
            "(a workflow's own keyword arguments go through wf.options(...).run(...))"
        )
    for name in ("on_changed_arguments", "on_unknown_steps", "on_definition_change"):
        if name in options and options[name] not in get_args(OnChange):
            raise ValueError(f"{name} is one of {', '.join(get_args(OnChange))}, not {options[name]!r}")
    for name in ("strict", "retry_failed", "wait"):
        if not isinstance(options.get(name, True), bool):
            raise TypeError(f"{name} is True or False, not {options[name]!r}")
    if options.get("cache") is not None:
        as_cache(options["cache"])
    if options.get("on_event") is not None and not callable(options["on_event"]):
        raise TypeError(f"on_event is a function that takes an event, not {options['on_event']!r}")
    return dict(options)


def react(choice: OnChange, error: PerdureError) -> None:
    """Do with a mismatch what the option says: raise it, warn with its sentence, or ignore it."""
    if choice == "error":
        raise error
    if choice == "warn":
        warnings.warn(str(error), PerdureWarning, stacklevel=3)


def stored_only(options: Mapping[str, Any]) -> StoredOptions:
    """The options of `runtime.start` and `runtime.run`; others are refused with the reason."""
    refused = options.keys() - StoredOptions.__annotations__.keys()
    if refused:
        raise TypeError(
            f"runtime.start and runtime.run do not take {', '.join(sorted(refused))}: another worker may take the run over, "
            f"so only what is stored with it counts ({', '.join(sorted(StoredOptions.__annotations__))}); "
            "set the rest on Runtime or @workflow, and pass the workflow's own arguments by position"
        )
    return stored_part(options)


def stored_part(options: Mapping[str, Any]) -> StoredOptions:
    """Those of the options that are stored."""
    part: Any = only(StoredOptions, options)
    stored: StoredOptions = part
    return stored


def checked_priority(number: Any) -> int:
    """A priority that every store can hold."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"priority must be a whole number, not {number!r}")
    if not -MAX_PRIORITY <= number <= MAX_PRIORITY:
        raise ValueError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {number}")
    return number


def encoded_metadata(metadata: Any) -> bytes:
    """Metadata as JSON: a dict that reads back as it is."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of JSON values, not {metadata!r}")
    try:
        encoded = msgspec.json.encode(metadata)
    except (TypeError, ValueError) as reason:
        raise TypeError(f"metadata must be a dict of JSON values: {reason}") from reason
    if msgspec.json.decode(encoded) != metadata:
        raise TypeError(f"metadata must be a dict of JSON values, which {metadata!r} is not")
    return encoded
