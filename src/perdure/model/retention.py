"""Retention: for how long ended runs are kept, by the status with which they ended.

It is set on a `Runtime` and on a workflow: one length of time for every end, or one by status. The workflow's wins, by status.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeAlias

from perdure.model.durations import Duration, seconds
from perdure.model.records import END_STATUSES, EndStatus

# A length of time for every end, or one by status. None keeps the runs.
Retention: TypeAlias = Duration | Mapping[EndStatus, Duration | None]
# Seconds by status. A status that is missing is left to the next level.
RetentionRules: TypeAlias = dict[EndStatus, float | None]


def check_retention(retention: Any) -> RetentionRules:
    """What was given as `retention=`, in seconds by status. Raises `TypeError` and `ValueError`."""
    if retention is None:
        return {}
    if isinstance(retention, bool) or not isinstance(retention, Mapping | timedelta | float | int | str):
        example = "{'completed': '30d'}"
        raise TypeError(f"retention= takes a length of time like '30d', or one by status: {example}, not {retention!r}")
    if not isinstance(retention, Mapping):
        length = _check_length(retention, "retention")
        return dict.fromkeys(END_STATUSES, length)
    if unknown := [status for status in retention if status not in END_STATUSES]:
        raise ValueError(f"retention= has {unknown[0]!r}, and takes {', '.join(END_STATUSES)}")
    return {
        status: None if length is None else _check_length(length, f"retention of {status} runs")
        for status, length in retention.items()
    }


def _check_length(length: Any, what: str) -> float:
    checked = seconds(length, what=what)
    if checked <= 0:
        raise ValueError(f"{what} must be longer than zero; runs that have just ended are still awaited")
    return checked


def ages(rules: RetentionRules) -> dict[float, list[EndStatus]]:
    """The statuses that are deleted at each age, in seconds."""
    found: dict[float, list[EndStatus]] = {}
    for status, age in rules.items():
        if age is not None:
            found.setdefault(age, []).append(status)
    return found
