"""What errors of the server and the way to it mean: the one place where they become errors of perdure, or another attempt."""

from __future__ import annotations

import ssl
from typing import Final

from perdure.backends.base.failures import WriteFailure
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.libsql.pieces import GONE
from perdure.backends.libsql.web import NoReplyError
from perdure.errors import PerdureError, PersistenceError

# The server's own words. In each case the transaction is rolled back, or was never begun.
_UNDONE: Final = frozenset({"TRANSACTION_TIMEOUT", "TRANSACTION_BUSY", "STREAM_EXPIRED", "SQLITE_BUSY", "SQLITE_LOCKED", GONE})
_TOO_MANY_REQUESTS: Final = 429
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_BROKEN: Final = range(500, 600)
_ADVICE: Final = {
    401: "the server wants a token: pass auth_token=, one that this database accepts and that has not expired",
    403: "the token is good but not for this: pass auth_token= with one that may write",
    404: "there is no database at this address",
    413: "the server takes no requests of this size",
}
_SILENT: Final = (
    "; where nothing is written any more, sqld has forgotten who may write: "
    "start it anew, and with --checkpoint-interval-s, which prevents that"
)


def classify_failure(error: BaseException) -> WriteFailure:
    """What to make of an error that a request met."""
    if isinstance(error, ServerError):
        return _classify_refusal(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return WriteFailure.PERMANENT
    return WriteFailure.UNKNOWN if isinstance(error, OSError) else WriteFailure.PERMANENT  # also a TimeoutError is an OSError


def _classify_refusal(error: ServerError) -> WriteFailure:
    if error.status in _BROKEN:
        return WriteFailure.UNKNOWN  # a gateway may say this after it passed the request on
    is_stale_baton = error.status == _BAD_REQUEST and "baton" in error.message  # the server was restarted: its streams are gone
    is_starting = error.status == _NOT_FOUND and "Namespace" in error.message  # it listens before it has opened its databases
    if is_stale_baton or is_starting or error.status == _TOO_MANY_REQUESTS or error.code.partition("_SNAPSHOT")[0] in _UNDONE:
        return WriteFailure.RETRY
    return WriteFailure.PERMANENT


def is_taken(error: BaseException) -> bool:
    """Whether something could not be written because of what is there, or is not there."""
    return isinstance(error, ServerError) and error.code.startswith("SQLITE_CONSTRAINT")


def is_too_large(error: BaseException) -> bool:
    """Whether a reply was not sent because it has more bytes than the server gives at once."""
    return isinstance(error, ServerError) and error.code == "RESPONSE_TOO_LARGE"


def map_error(error: BaseException, label: str, secret: str | None = None) -> BaseException:
    """What the caller gets: `PersistenceError` for what the server and the system say, without the token."""
    if isinstance(error, PerdureError) or not isinstance(error, ServerError | OSError):
        return error
    status = error.status if isinstance(error, ServerError) else None
    said = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
    if isinstance(error, NoReplyError):
        said += _SILENT
    advice = _ADVICE.get(status or 0)
    if advice is not None:
        said = f"{advice} ({said})"
    if secret and secret in said:
        return PersistenceError(label, said.replace(secret, "***"))
    result = PersistenceError(label, said)
    result.__cause__ = error
    return result
