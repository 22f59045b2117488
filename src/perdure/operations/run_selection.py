"""Which runs a caller of `Runtime` asks for, as keywords: checked, and made the filter that stores take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol, TypedDict

from perdure.model.durations import Duration, instant, microseconds
from perdure.model.records import ALL_STATUSES, Status
from perdure.model.run_filter import EVERY_RUN, MetadataValue, RunFilter


class NamedWorkflow(Protocol):
    """A workflow, as far as its runs are looked for."""

    @property
    def name(self) -> str:
        """The name under which its runs are stored."""
        ...


class RunSelection(TypedDict, total=False):
    """Which runs are asked for: those that have all that is given.

    `prefix` begins the id, literally. The run was last changed at `updated_after` or later, and before `updated_before`: an aware
    datetime, or how long ago. `metadata` has one key; its value is compared as JSON.
    """

    workflow: NamedWorkflow | str | None
    status: Status | Collection[Status] | None
    queue: str | None
    prefix: str
    updated_after: datetime | Duration | None
    updated_before: datetime | Duration | None
    metadata: Mapping[str, MetadataValue] | None


def run_filter(selection: RunSelection, now: int) -> RunFilter:
    """The filter for this selection, at the instant `now`. Raises `TypeError` and `ValueError`, and says what can be given."""
    if unknown := selection.keys() - RunSelection.__annotations__.keys():
        raise TypeError(f"runs cannot be selected by {', '.join(sorted(unknown))}; by {', '.join(RunSelection.__annotations__)}")
    if not selection:
        return EVERY_RUN
    return RunFilter(
        prefix=selection.get("prefix", ""),
        status=_statuses(selection.get("status")),
        workflow=_workflow_name(selection.get("workflow")),
        queue=selection.get("queue"),
        updated_after=_instant(selection.get("updated_after"), now, "updated_after"),
        updated_before=_instant(selection.get("updated_before"), now, "updated_before"),
        metadata=_metadata(selection.get("metadata")),
    )


def _statuses(status: Any) -> tuple[Status, ...] | None:
    if status is None or isinstance(status, tuple):
        return status
    if isinstance(status, str):
        return (status,)  # type: ignore[return-value]  # the filter checks it
    if isinstance(status, list | set | frozenset):
        return tuple(status)
    raise TypeError(f"status is one of {', '.join(ALL_STATUSES)}, or several of them, not {status!r}")


def _workflow_name(workflow: Any) -> str | None:
    if workflow is None or isinstance(workflow, str):
        return workflow
    if not getattr(workflow, "is_perdure_workflow", False):
        raise TypeError(f"workflow is a workflow or its name, not {workflow!r}")
    name: str = workflow.name
    return name


def _instant(given: Any, now: int, what: str) -> int | None:
    if given is None:
        return None
    if isinstance(given, datetime):
        return instant(given, what=what)
    if isinstance(given, bool) or not isinstance(given, timedelta | int | float | str):
        raise TypeError(f"{what} is a datetime, or how long ago: a timedelta, seconds or text like '1h30m', not {given!r}")
    return now - microseconds(given, what=what)


def _metadata(metadata: Any) -> tuple[str, MetadataValue] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping) or len(metadata) != 1:
        raise ValueError(f"metadata is a dict with one key, such as {{'customer': 'c-7'}}, not {metadata!r}")
    ((key, value),) = metadata.items()
    return key, value
