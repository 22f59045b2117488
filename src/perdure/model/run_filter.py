"""Which runs are asked for, and in which order: one filter for `list`, `count` and every verb that works on many runs.

A store answers it by its indexes as far as they go. Metadata have no index: a database leaves out the runs whose stored
metadata do not contain `metadata_text`, and `has_metadata` decides about the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias, TypeVar

import msgspec

from perdure.model.ids import check_id, check_text
from perdure.model.records import ALL_STATUSES, STATUSES, ListedRun, Status, encode_metadata, load_metadata

MetadataValue: TypeAlias = str | int | float | bool | None


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs `list`, `count` and the verbs for many runs are asked for: those that have all that is given; None is any.

    `prefix` begins the id, literally. A run was last changed at `updated_after` or later, and before `updated_before`. `metadata`
    is one key and its value, which is compared as JSON: 1, 1.0 and true are three values, and a key that is missing is not null.
    It checks itself: `TypeError` for what is of another type, `ValueError` for text that no run can have.
    """

    prefix: str = ""
    status: tuple[Status, ...] | None = None
    workflow: str | None = None
    queue: str | None = None
    updated_after: int | None = None
    updated_before: int | None = None
    metadata: tuple[str, MetadataValue] | None = None

    def __post_init__(self) -> None:
        checked = {
            "prefix": check_text(self.prefix, "a prefix of ids"),
            "status": _check_statuses(self.status),
            "workflow": None if self.workflow is None else check_text(self.workflow, "a workflow's name"),
            "queue": None if self.queue is None else check_id(self.queue, "a queue's name"),
            "metadata": _check_metadata(self.metadata),
        }
        for name, value in checked.items():
            if value is not getattr(self, name):
                msgspec.structs.force_setattr(self, name, value)
        for name in ("updated_after", "updated_before"):
            if type(getattr(self, name)) not in {int, type(None)}:
                raise TypeError(f"{name} must be an instant in whole microseconds, not {getattr(self, name)!r}")

    def within(self, prefix: str) -> RunFilter:
        """This filter for the ids that begin with `prefix` too. Raises `ValueError` when it has another prefix."""
        if not prefix or prefix == self.prefix:
            return self
        if self.prefix:
            raise ValueError(f"prefix={prefix!r} and the filter's prefix {self.prefix!r} are two; pass one of them")
        return msgspec.structs.replace(self, prefix=prefix)

    @property
    def statuses(self) -> tuple[Status, ...]:
        """The statuses that a run may have."""
        return ALL_STATUSES if self.status is None else self.status

    @property
    def metadata_text(self) -> bytes | None:
        """What the stored metadata of every run contains that has the key and the value, and of few others."""
        return None if self.metadata is None else msgspec.json.encode(dict([self.metadata]))[1:-1]

    def has_metadata(self, stored: bytes) -> bool:
        """Whether these stored metadata have the key and the value. Metadata that cannot be read do not."""
        if self.metadata is None:
            return True
        (key, value), text = self.metadata, self.metadata_text
        if text is None or text not in stored:
            return False
        found = load_metadata(stored)
        return key in found and msgspec.json.encode(found[key]) == msgspec.json.encode(value)

    def matches(self, row: ListedRun) -> bool:
        """Whether this run is asked for."""
        return (
            row.id.startswith(self.prefix)
            and (self.status is None or row.status in self.status)
            and self.workflow in (None, row.workflow)
            and self.queue in (None, row.queue)
            and (self.updated_after is None or row.updated_at >= self.updated_after)
            and (self.updated_before is None or row.updated_at < self.updated_before)
            and self.has_metadata(row.metadata)
        )


def _check_statuses(status: object) -> tuple[Status, ...] | None:
    if status is None:
        return None
    if not isinstance(status, tuple):
        raise TypeError(f"status must be a tuple of statuses, not {status!r}")
    if not status:
        raise ValueError("status is empty, which no run can have; leave it out for any status")
    names = tuple(check_text(one, "a status") for one in status)
    if unknown := [name for name in names if name not in STATUSES]:
        raise ValueError(f"a status is one of {', '.join(ALL_STATUSES)}, not {unknown[0]!r}")
    return tuple(one for one in ALL_STATUSES if one in names)


def _check_metadata(metadata: object) -> tuple[str, MetadataValue] | None:
    match metadata:
        case None:
            return None
        case (str() as key, str() | int() | float() | bool() | None as value):
            plain = str.__str__(value) if isinstance(value, str) else value
            try:
                encoded = encode_metadata({key: plain})
            except (TypeError, ValueError, OverflowError) as reason:
                raise ValueError(f"no run has {metadata!r} in its metadata: {reason}") from reason
            return str.__str__(key), load_metadata(encoded)[key]
    raise TypeError(f"metadata must be one key and a str, a number, a bool or None as its value, not {metadata!r}")


EVERY_RUN: Final = RunFilter()


R = TypeVar("R", bound=ListedRun)


def newest_first(run: ListedRun) -> tuple[int, str]:
    """The order of lists: last changed first, ties by id."""
    return (-run.updated_at, run.id)


def page_of(runs: Iterable[R], before: tuple[int, str] | None, limit: int) -> list[R]:
    """Of these runs, in any order, the page of a list that comes after the line `before`."""
    if before is not None:
        last = (-before[0], before[1])
        runs = [run for run in runs if newest_first(run) > last]
    return sorted(runs, key=newest_first)[:limit]
