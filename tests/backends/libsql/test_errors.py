import pytest

from perdure.backends.base.failures import Fate
from perdure.backends.libsql.errors import fate_of, mapped
from perdure.backends.libsql.hrana import ServerError
from perdure.backends.libsql.web import HttpError
from perdure.errors import PersistenceError, RunNotFound


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (ServerError("Transaction timed out", "TRANSACTION_TIMEOUT"), Fate.UNDONE),
        (ServerError("database is locked", "SQLITE_BUSY"), Fate.UNDONE),
        (ServerError("database is locked", "SQLITE_BUSY_SNAPSHOT"), Fate.UNDONE),
        (ServerError("The stream has expired due to inactivity", "STREAM_EXPIRED", 400), Fate.UNDONE),
        (ServerError("Received an invalid baton", None, 400), Fate.UNDONE),
        (ServerError("Namespace `default` doesn't exist", None, 404), Fate.UNDONE),
        (ServerError("slow down", None, 429), Fate.UNDONE),
        (ServerError("bad gateway", None, 502), Fate.UNKNOWN),
        (HttpError("the server closed the connection"), Fate.UNKNOWN),
        (TimeoutError("no reply"), Fate.UNKNOWN),
        (ConnectionResetError(), Fate.UNKNOWN),
        (ServerError("near SELEC: syntax error", "SQL_PARSE_ERROR"), Fate.REFUSED),
        (ServerError("UNIQUE constraint failed", "SQLITE_CONSTRAINT"), Fate.REFUSED),
        (ServerError("Unauthorized", None, 401), Fate.REFUSED),
        (ServerError("not here", None, 404), Fate.REFUSED),
        (ValueError("ours"), Fate.REFUSED),
    ],
)
def test_what_passes_is_told_from_what_does_not(error: Exception, fate: Fate) -> None:
    assert fate_of(error) is fate


def test_errors_become_ours_once_and_only_those_of_the_server() -> None:
    error = ServerError("no", "WHY", 500)
    told = mapped(error, "the store")
    assert isinstance(told, PersistenceError)
    assert str(told) == "the store: no (500 WHY)"
    assert told.__cause__ is error
    for other in (RunNotFound("run"), ValueError("bad")):
        assert mapped(other, "the store") is other


def test_a_token_that_a_server_repeats_is_taken_out() -> None:
    told = mapped(ServerError("the token secret is bad"), "the store", "secret")
    assert str(told) == "the store: the token *** is bad"
    assert told.__cause__ is None
