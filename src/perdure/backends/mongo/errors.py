"""The driver, pymongo, and what its errors mean: an error of perdure, or another attempt."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any, Final

from perdure.backends.base.retries import WriteFailure, wrap_error
from perdure.errors import PerdureError, ValueNotStorable

DUPLICATE_KEY: Final = 11000
_WRITE_CONFLICT: Final = 112
_UNKNOWN_CODES: Final = frozenset({
    6, 7, 89,  # the host cannot be reached, or is not found, or took too long
    64,  # the write was not acknowledged by a majority in time
    91, 11600, 11602,  # the server is shutting down, or was interrupted by that
    189, 10058, 10107, 13435, 13436,  # it is not the primary any more
    50, 262,  # the operation took too long
    9001,  # a socket failed
})  # fmt: skip
# A document would have more than 16 MiB.
_TOO_LARGE_CODES: Final = frozenset({10334, 17419, 17420})
# The moment of a read is too old for the server, or not yet available there.
_SNAPSHOT_CODES: Final = frozenset({239, 246})
_LABELS: Final = ("RetryableWriteError", "TransientTransactionError", "UnknownTransactionCommitResult")


def driver() -> ModuleType:
    """pymongo, imported by the first use. Raises `ImportError` that says what to install."""
    try:
        import pymongo
    except ImportError as missing:
        raise ImportError("the MongoDB store needs pymongo 4.13 or newer: pip install 'perdure[mongo]'") from missing
    if not hasattr(pymongo, "AsyncMongoClient"):
        raise ImportError(f"the MongoDB store needs pymongo 4.13 or newer, not {pymongo.version}: pip install 'perdure[mongo]'")
    return pymongo


class TornError(Exception):
    """A run that was read in several parts changed in between. It has to be read again."""


def classify_failure(error: BaseException) -> WriteFailure:
    """What became of a command that met this error."""
    from pymongo import errors

    if isinstance(error, errors.ServerSelectionTimeoutError | TornError):
        return WriteFailure.RETRY  # no server could be selected, or nothing was to be written
    if isinstance(error, errors.ConnectionFailure | OSError) or _is_label_bug(error):
        return WriteFailure.UNKNOWN
    codes = _codes(error)
    if codes & _UNKNOWN_CODES or (isinstance(error, errors.PyMongoError) and any(map(error.has_error_label, _LABELS))):
        return WriteFailure.UNKNOWN
    return WriteFailure.RETRY if codes & {_WRITE_CONFLICT, DUPLICATE_KEY, *_SNAPSHOT_CODES} else WriteFailure.PERMANENT


def _is_label_bug(error: BaseException) -> bool:
    """Whether this is the bug of pymongo 4.19 with the labels of an unacknowledged write, as from a server that shuts down."""
    return isinstance(error, AttributeError) and "RawBSONDocument" in str(error)


def is_silence(error: BaseException) -> bool:
    """Whether no reply came in time."""
    from pymongo.errors import NetworkTimeout

    return isinstance(error, NetworkTimeout | TimeoutError)


def has_only_duplicates(error: BaseException) -> bool:
    """Whether a bulk write failed only for documents that exist already."""
    details: dict[str, Any] = getattr(error, "details", None) or {}
    return not details.get("writeConcernErrors") and _codes(error) == {DUPLICATE_KEY}


def _codes(error: BaseException) -> set[int]:
    """The error's code, or the codes of a bulk write's errors."""
    details: dict[str, Any] = getattr(error, "details", None) or {}
    parts = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
    return {part.get("code", 0) for part in parts} if parts else {getattr(error, "code", None) or 0}


def map_error(error: BaseException, label: str, secrets: Collection[str] = ()) -> BaseException:
    """What the caller gets: `PersistenceError` for what the driver, the server and the system say, without the password.

    `ValueNotStorable` for a document that is too large.
    """
    from bson.errors import BSONError
    from pymongo.errors import DocumentTooLarge, PyMongoError

    kinds = PyMongoError | BSONError | TornError | OSError | TimeoutError | OverflowError
    if isinstance(error, PerdureError) or not (isinstance(error, kinds) or _is_label_bug(error)):
        return error
    message = f"{type(error).__name__}: {_short(error)}"
    if isinstance(error, DocumentTooLarge) or _codes(error) & _TOO_LARGE_CODES or "object to insert too large" in message:
        refusal = ValueNotStorable("value", message)
        refusal.__cause__ = error
        return refusal
    return wrap_error(error, label, message, secrets)


def _short(error: BaseException) -> str:
    """The error's message, without the documents that a bulk write's error repeats."""
    details: dict[str, Any] = getattr(error, "details", None) or {}
    parts = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
    return str(parts[0].get("errmsg")) if parts else str(error)
