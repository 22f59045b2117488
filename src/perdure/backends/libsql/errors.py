"""Errors of the server and of the connection: which of them are retried, and which errors of perdure the others become."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from typing import Final

from perdure.backends.base.retries import NoReplyError, WriteFailure, wrap_error
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.libsql.large_values import PIECES_DELETED
from perdure.errors import PerdureError

# The server's own codes. In each case the transaction is rolled back, or was never begun.
_ROLLED_BACK: Final = frozenset(
    {"TRANSACTION_TIMEOUT", "TRANSACTION_BUSY", "STREAM_EXPIRED", "SQLITE_BUSY", "SQLITE_LOCKED", PIECES_DELETED}
)
_TOO_MANY_REQUESTS: Final = 429
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_SERVER_ERRORS: Final = range(500, 600)
_ADVICE: Final = {
    401: "the server wants a token: pass auth_token=, one that this database accepts and that has not expired",
    403: "the token is good but not for this: pass auth_token= with one that may write",
    404: "there is no database at this address",
    413: "the server takes no requests of this size",
}
_LOST_LOCK_ADVICE: Final = (
    "; where nothing is written any more, sqld has forgotten who may write: "
    "start it anew, and with --checkpoint-interval-s, which prevents that"
)


def classify_failure(error: BaseException) -> WriteFailure:
    """What an error of a request means for what was sent."""
    if isinstance(error, ServerError):
        return _classify_refusal(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return WriteFailure.PERMANENT
    return WriteFailure.UNKNOWN if isinstance(error, OSError) else WriteFailure.PERMANENT  # also a TimeoutError is an OSError


def _classify_refusal(error: ServerError) -> WriteFailure:
    if error.status in _SERVER_ERRORS:
        return WriteFailure.UNKNOWN  # a gateway may reply so after it has forwarded the request
    is_stale_baton = (
        error.status == _BAD_REQUEST and "baton" in error.message
    )  # the server was restarted, and its streams with it
    is_starting = error.status == _NOT_FOUND and "Namespace" in error.message  # it listens before it has opened its databases
    if (
        is_stale_baton
        or is_starting
        or error.status == _TOO_MANY_REQUESTS
        or error.code.partition("_SNAPSHOT")[0] in _ROLLED_BACK
    ):
        return WriteFailure.RETRY
    return WriteFailure.PERMANENT


def is_constraint_violation(error: BaseException) -> bool:
    """Whether a write contradicts what is recorded, or needs a row that is missing."""
    return isinstance(error, ServerError) and error.code.startswith("SQLITE_CONSTRAINT")


def is_too_large(error: BaseException) -> bool:
    """Whether a reply was not sent because it is larger than the server sends."""
    return isinstance(error, ServerError) and error.code == "RESPONSE_TOO_LARGE"


def map_error(error: BaseException, label: str, secrets: Collection[str] = ()) -> BaseException:
    """The error that the caller gets: `PersistenceError` for errors of the server and the system, without the token."""
    if isinstance(error, PerdureError) or not isinstance(error, ServerError | OSError):
        return error
    status = error.status if isinstance(error, ServerError) else None
    text = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
    if isinstance(error, NoReplyError):
        text += _LOST_LOCK_ADVICE
    advice = _ADVICE.get(status or 0)
    if advice is not None:
        text = f"{advice} ({text})"
    return wrap_error(error, label, text, secrets)
