"""Ids in the verbs of a store: checked in one place, before the store sees them.

A run id often comes from outside as parsed JSON, and what is no text means something else to a database: a dict is an operator
to MongoDB, so `get({"$gt": ""})` would read the run of another user. `ChecksIds` wraps the verbs that a store defines, so that
no store can forget one. It also makes plain text of a subclass of str, which drivers treat in different ways.

The verbs of a driver are not wrapped, because every step calls one: they take a `Lease`, which checks itself when it is made, and
entries whose keys the engine has checked. `create` and `fire` check their run in `check_start`, `claim` in `ClaimFilter.of`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from perdure.model.ids import MAX_ID_BYTES, check_id, check_text
from perdure.model.records import END_STATUSES, NewRun, Schedule
from perdure.model.run_filter import RunFilter

Check: TypeAlias = Callable[[Any], Any]
N = TypeVar("N", bound=NewRun)
_OPTIONAL_NAMES: Final = ("limit_key", "parent_id", "parent_key")
_BY_POSITION: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


def check_names(run: N) -> N:
    """The run, if its names are text that every store can hold. Raises `TypeError` or `ValueError` otherwise."""
    id_, workflow, queue = run.id, run.workflow, run.queue
    if (
        type(id_) is str
        and type(workflow) is str
        and type(queue) is str
        and run.limit_key is run.parent_id is run.parent_key is None
    ):
        together = id_ + workflow + queue
        if id_ and queue and together.isascii() and len(together) <= MAX_ID_BYTES and "\0" not in together:
            return run  # the common case, for every run that is started
    names = {
        "id": check_id(run.id, "a run's id"),
        "workflow": check_text(run.workflow, "a workflow's name"),  # a restored run may lack it
        "queue": check_id(run.queue, "a queue's name"),
    }
    for name in _OPTIONAL_NAMES:
        if (text := getattr(run, name)) is not None:
            names[name] = check_text(text, name)
    if all(getattr(run, name) is text for name, text in names.items()):
        return run
    return msgspec.structs.replace(run, **names)


def _check_run_id(run_id: object) -> str:
    return check_id(run_id, "a run's id")


def _check_dedupe(dedupe: object) -> str | None:
    return None if dedupe is None else check_id(dedupe, "a signal's dedupe")


def _check_filter(wanted: object) -> RunFilter:
    if not isinstance(wanted, RunFilter):
        raise TypeError(f"list and count take a RunFilter, which checks itself, not {wanted!r}")
    return wanted


def _check_before(before: object) -> tuple[int, str] | None:
    match before:
        case None:
            return None
        case (int() as updated_at, str() as run_id):
            return updated_at, check_text(run_id, "a run's id")
    raise TypeError(f"before must be the (updated_at, id) of a line, not {before!r}")


def _check_workflow(workflow: object) -> str | None:
    return None if workflow is None else check_text(workflow, "a workflow's name")


def _check_end_statuses(status: object) -> tuple[str, ...]:
    if isinstance(status, str) or not isinstance(status, list | tuple | set | frozenset):
        raise TypeError(f"status must be a collection of statuses, not {status!r}")
    names = tuple(check_text(one, "a status") for one in status)
    if unknown := [name for name in names if name not in END_STATUSES]:
        raise ValueError(f"an ended run is one of {', '.join(END_STATUSES)}, not {unknown[0]!r}")
    return names


def _check_drop(drop: object) -> tuple[str, ...]:
    if isinstance(drop, str | bytes) or not isinstance(drop, list | tuple | set | frozenset):
        raise TypeError(f"drop must be a collection of keys, not a {type(drop).__name__}")
    return tuple(check_id(key, "a key") for key in drop)


def _check_schedule(schedule: Schedule) -> Schedule:
    names = check_id(schedule.id, "a schedule's id"), check_id(schedule.workflow, "a workflow's name")
    return msgspec.structs.replace(schedule, id=names[0], workflow=names[1])


_RUN: Final[Mapping[str, Check]] = {"run_id": _check_run_id}
_FILTER: Final[Mapping[str, Check]] = {"wanted": _check_filter}
_SCHEDULE: Final[Mapping[str, Check]] = {"schedule_id": lambda schedule_id: check_id(schedule_id, "a schedule's id")}
_WORKER: Final[Mapping[str, Check]] = {"worker_id": lambda worker_id: check_id(worker_id, "a worker's id")}
# By verb, the parameters that are checked.
_CHECKS: Final[Mapping[str, Mapping[str, Check]]] = {
    **dict.fromkeys(("acquire", "cancel", "get", "journal", "inbox", "hold", "unhold", "delete", "save", "load"), _RUN),
    "reopen": {**_RUN, "drop": _check_drop},
    "signal": {**_RUN, "name": lambda name: check_id(name, "a signal's name"), "dedupe": _check_dedupe},
    "items": {**_RUN, "stream": lambda stream: check_id(stream, "a stream's name")},
    "list": {**_FILTER, "prefix": lambda prefix: check_text(prefix, "a prefix of ids"), "before": _check_before},
    "count": _FILTER,
    "purge": {"status": _check_end_statuses, "workflow": _check_workflow},
    "restore": {"run": check_names},
    "put_worker": _WORKER,
    "drop_worker": _WORKER,
    "put_schedule": {"schedule": _check_schedule},
    "drop_schedule": _SCHEDULE,
    "fire": _SCHEDULE,
    "limit_queue": {"queue": lambda queue: check_id(queue, "a queue's name")},
}


class ChecksIds:
    """A base class of stores: their verbs raise `TypeError` for ids that are no text, `ValueError` for text that is no id."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, checks in _CHECKS.items():
            if name in vars(cls):
                setattr(cls, name, _check_arguments(vars(cls)[name], checks))


def _check_arguments(verb: Callable[..., Any], checks: Mapping[str, Check]) -> Callable[..., Any]:
    parameters = inspect.signature(verb).parameters.values()
    # Those that may be given by position come first in every verb, after `self`.
    in_order = [checks[one.name] for one in parameters if one.name in checks and one.kind is _BY_POSITION]

    @functools.wraps(verb)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        for name in options.keys() & checks.keys():
            options[name] = checks[name](options[name])
        given = [check(arg) for check, arg in zip(in_order, args, strict=False)]
        return verb(self, *given, *args[len(given) :], **options)

    return checked
