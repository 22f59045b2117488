"""The words of update pipelines. Whatever a caller gave is a `$literal`: it may begin with a dollar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Expression: TypeAlias = Any

_MICROSECONDS: Final = 1000
_WHOLE_ARRAY: Final = 2**31 - 1


def literal(value: Any) -> Expression:
    """The value itself, whatever it looks like."""
    return {"$literal": value}


def instant(now: int | None) -> Expression:
    """The instant given, or the server's own time."""
    return literal(now) if now is not None else {"$multiply": [{"$toLong": "$$NOW"}, _MICROSECONDS]}


def appended(field: str, values: Sequence[Any]) -> Expression:
    """The array with these at its end."""
    return {"$concatArrays": [f"${field}", literal(list(values))]}


def without_first(field: str, count: int) -> Expression:
    """The array without so many at its beginning."""
    return {"$slice": [f"${field}", count, _WHOLE_ARRAY]}


def plus(field: str, number: Expression) -> Expression:
    """The sum."""
    return {"$add": [f"${field}", number]}


def earlier(field: str, at: Expression) -> Expression:
    """The earlier of the field and the instant; the instant when the field is null."""
    return {"$min": [f"${field}", at]}


def either(condition: Expression, then: Expression, otherwise: Expression) -> Expression:
    """One or the other."""
    return {"$cond": [condition, then, otherwise]}


def is_leased(at: Expression) -> Expression:
    """Whether a lease is alive. Null is less than every instant."""
    return {"$gt": ["$lease_until", at]}


def is_due(at: Expression) -> Expression:
    """Whether the run may be claimed, as far as time goes."""
    return {"$and": [{"$ne": ["$wake_at", None]}, {"$lte": ["$wake_at", at]}]}


def freed(**columns: Expression) -> dict[str, Expression]:
    """What gives up the lease and stops waiting, with other columns in the same change."""
    return {"token": None, "lease_owner": None, "lease_until": None, "waiting_for": [], **columns}
