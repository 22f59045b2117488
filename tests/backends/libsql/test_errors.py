import pytest

from perdure.backends.base.retries import WriteFailure
from perdure.backends.libsql.errors import classify_failure, map_error
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.libsql.http import HttpError
from perdure.errors import PersistenceError, RunNotFound


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (ServerError("Transaction timed out", "TRANSACTION_TIMEOUT"), WriteFailure.RETRY),
        (ServerError("database is locked", "SQLITE_BUSY"), WriteFailure.RETRY),
        (ServerError("database is locked", "SQLITE_BUSY_SNAPSHOT"), WriteFailure.RETRY),
        (ServerError("The stream has expired due to inactivity", "STREAM_EXPIRED", 400), WriteFailure.RETRY),
        (ServerError("Received an invalid baton", None, 400), WriteFailure.RETRY),
        (ServerError("Namespace `default` doesn't exist", None, 404), WriteFailure.RETRY),
        (ServerError("slow down", None, 429), WriteFailure.RETRY),
        (ServerError("bad gateway", None, 502), WriteFailure.UNKNOWN),
        (HttpError("the server closed the connection"), WriteFailure.UNKNOWN),
        (TimeoutError("no reply"), WriteFailure.UNKNOWN),
        (ConnectionResetError(), WriteFailure.UNKNOWN),
        (ServerError("near SELEC: syntax error", "SQL_PARSE_ERROR"), WriteFailure.PERMANENT),
        (ServerError("UNIQUE constraint failed", "SQLITE_CONSTRAINT"), WriteFailure.PERMANENT),
        (ServerError("Unauthorized", None, 401), WriteFailure.PERMANENT),
        (ServerError("not here", None, 404), WriteFailure.PERMANENT),
        (ValueError("ours"), WriteFailure.PERMANENT),
    ],
)
def test_what_passes_is_told_from_what_does_not(error: Exception, fate: WriteFailure) -> None:
    assert classify_failure(error) is fate


def test_errors_become_ours_once_and_only_those_of_the_server() -> None:
    error = ServerError("no", "WHY", 500)
    told = map_error(error, "the store")
    assert isinstance(told, PersistenceError)
    assert str(told) == "the store: no (500 WHY)"
    assert told.__cause__ is error
    for other in (RunNotFound("run"), ValueError("bad")):
        assert map_error(other, "the store") is other


def test_a_token_that_a_server_repeats_is_taken_out() -> None:
    told = map_error(ServerError("the token secret is bad"), "the store", ["secret"])
    assert str(told) == "the store: the token *** is bad"
    assert told.__cause__ is None
