"""Hrana over HTTP: how a libSQL server is asked (version 3 of the protocol, or 2 where the server is older).

A request is a pipeline for one stream, which is a connection to the database on the server's side. Here a pipeline carries one
batch: statements that are executed in order, each on a condition that looks at how earlier ones ended. A whole transaction is
one batch and so one round trip (`in_transaction`). A stream that stays open between requests is named by a baton, new in each
reply, and may be told to go on at another address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.backends.libsql.address import LibsqlAddress, address_of
from perdure.backends.libsql.values import Plain, Value, from_wire, to_wire
from perdure.backends.libsql.web import HttpError, NoReplyError, Pool, Reply

# A connection on which nothing comes any more is given up while a lease of the usual length can still be renewed on another. A
# server that works answers sooner: who waits longest there waits five seconds, until it ends a transaction that is in his way.
REQUEST_TIMEOUT: Final = 10.0
VERSIONS: Final = ("/v3", "/v2")
_OK: Final = range(200, 300)


class Statement(NamedTuple):
    """One SQL statement with its values."""

    sql: str
    values: Sequence[object] = ()


class Step(NamedTuple):
    """A statement of a batch, and on what condition it is executed."""

    statement: Statement
    condition: Mapping[str, Any] | None = None


def ok(step: int) -> dict[str, Any]:
    """The condition that a step was executed and succeeded."""
    return {"type": "ok", "step": step}


def negated(condition: Mapping[str, Any]) -> dict[str, Any]:
    """The condition that another is not met."""
    return {"type": "not", "cond": condition}


def both(*conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The condition that all of these are met."""
    return {"type": "and", "conds": conditions}


class Result(NamedTuple):
    """What a statement gave: its rows, and how many it changed."""

    rows: list[tuple[Plain, ...]]
    affected: int


class ServerError(Exception):
    """The server refused something: `code` is its word for why, `status` that of HTTP if it refused the request as a whole."""

    def __init__(self, message: str, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message, code, status)
        self.message = message
        self.code = code or ""
        self.status = status

    def __str__(self) -> str:
        known = " ".join(str(part) for part in (self.status, self.code) if part)
        return f"{self.message} ({known})" if known else self.message


class _Refusal(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None

    def error(self, status: int | None = None) -> ServerError:
        return ServerError(self.message, self.code, status)


class _Denial(msgspec.Struct, frozen=True):
    """What comes instead of a refusal when a token is not accepted."""

    error: str


class _Rows(msgspec.Struct, frozen=True):
    rows: list[list[Value]]
    affected_row_count: int = 0

    def result(self) -> Result:
        return Result([tuple(map(from_wire, row)) for row in self.rows], self.affected_row_count)


class _Ends(msgspec.Struct, frozen=True):
    step_results: list[_Rows | None]
    step_errors: list[_Refusal | None]
    replication_index: str | int | None = None


class _Response(msgspec.Struct, frozen=True):
    type: str
    result: _Ends | None = None


class _Ok(msgspec.Struct, frozen=True, tag_field="type", tag="ok"):
    response: _Response


class _Error(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: _Refusal


class _Pipeline(msgspec.Struct, frozen=True):
    results: list[_Ok | _Error]
    baton: str | None = None
    base_url: str | None = None


_pipeline: Final = msgspec.json.Decoder(_Pipeline)
_refusal: Final = msgspec.json.Decoder(_Refusal)
_denial: Final = msgspec.json.Decoder(_Denial)


class Ends(NamedTuple):
    """How the steps of a batch ended: with a result, with an error, or with neither because their condition was not met."""

    results: Sequence[Result | None]
    errors: Sequence[ServerError | None]

    def raise_first(self) -> None:
        """Raise the error of the first step that has one."""
        for error in self.errors:
            if error is not None:
                raise error

    def given(self) -> list[Result]:
        """The results, if every step was executed. Raises `ServerError` otherwise."""
        self.raise_first()
        results = [result for result in self.results if result is not None]
        if len(results) != len(self.results):
            raise ServerError("the server left out a statement whose condition was met")
        return results


class Client:
    """A way to one database. All of it runs on one event loop. The token is shown nowhere.

    `size` is how many requests may be under way. Streams that stay open have connections of their own: the next request of one
    may be what all others wait for.
    """

    def __init__(self, place: LibsqlAddress, token: str | None, *, size: int, streams: int = 1) -> None:
        self.place = place
        self._pool = Pool(size)
        self._streams = Pool(streams)
        # The last change to the database that a reply told of, in the server's own count; None where it does not count.
        self.last_change: int | None = None
        self._version = VERSIONS[0]
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def __repr__(self) -> str:
        return f"Client({self.place.url!r})"

    async def choose_version(self) -> None:
        """Find out which version of the protocol the server speaks. Raises `ServerError` when it is none of ours."""
        for version in VERSIONS:
            reply = await self._pool.request(self.place, "GET", version, self._headers, b"", REQUEST_TIMEOUT)
            if reply.status in _OK:
                self._version = version
                return
        raise _refused(reply)

    async def server_version(self) -> str:
        """What the server calls itself; nothing when it does not say."""
        reply = await self._pool.request(self.place, "GET", "/version", self._headers, b"", REQUEST_TIMEOUT)
        return reply.body.decode(errors="replace") if reply.status in _OK else ""

    async def batch(self, steps: Sequence[Step]) -> Ends:
        """Have these executed in a stream that ends with them: one round trip."""
        return await Stream(self).batch(steps, is_last=True)

    async def send(self, place: LibsqlAddress, body: bytes, *, is_alone: bool) -> Reply:
        """The reply to a pipeline that was accepted. Raises `ServerError` for any other."""
        pool = self._pool if is_alone else self._streams
        try:
            reply = await pool.request(place, "POST", f"{self._version}/pipeline", self._headers, body, REQUEST_TIMEOUT)
        except NoReplyError:
            self.last_change = None  # the database may have been put back to an earlier state, and would never come as far
            raise
        if reply.status not in _OK:
            raise _refused(reply)
        return reply

    def note_change(self, index: str | int | None) -> None:
        """Keep in mind how far the database is."""
        if index is not None:
            self.last_change = max(int(index), self.last_change or 0)

    async def close(self) -> None:
        """Hang up."""
        await self._pool.close()
        await self._streams.close()


class Stream:
    """A connection to the database on the server's side, which ends it after some seconds without a word.

    One request at a time; what is not asked for soon should not be left open, as its transaction may lock everybody else out.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._place = client.place
        self._baton: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the server keeps it."""
        return self._baton is not None

    async def batch(self, steps: Sequence[Step], *, is_last: bool = False) -> Ends:
        """How these steps ended; with `is_last` the stream ends too. Raises `ServerError` when nothing was executed."""
        batch: dict[str, Any] = {"steps": [_step(step) for step in steps]}
        if self._client.last_change is not None:
            # A replica waits until it has come as far, so that nobody reads less than what was acknowledged to him.
            batch["replication_index"] = str(self._client.last_change)
        requests: list[dict[str, Any]] = [{"type": "batch", "batch": batch}]
        is_alone = is_last and self._baton is None
        told = await self._ask([*requests, {"type": "close"}] if is_last else requests, is_alone=is_alone)
        answer = told.results[0]
        if isinstance(answer, _Error):
            raise answer.error.error()
        if answer.response.result is None:
            raise HttpError(f"the server answered a batch with {answer.response.type!r}")
        self._client.note_change(answer.response.result.replication_index)
        return _ends(answer.response.result)

    async def close(self) -> None:
        """End it, and roll back what it did not commit."""
        if self._baton is not None:
            await self._ask([{"type": "close"}])

    async def _ask(self, requests: Sequence[Mapping[str, Any]], *, is_alone: bool = False) -> _Pipeline:
        body = msgspec.json.encode({"baton": self._baton, "requests": requests})
        self._baton = None  # it is good once; without a reply the stream is out of reach
        reply = await self._client.send(self._place, body, is_alone=is_alone)
        try:
            told = _pipeline.decode(reply.body)
        except msgspec.DecodeError as error:
            raise HttpError(f"the server's reply cannot be read: {error}") from None
        if len(told.results) != len(requests):
            raise HttpError(f"the server gave {len(told.results)} answers to {len(requests)} requests")
        self._baton = told.baton
        if told.base_url is not None:
            self._move(told.base_url)
        return told

    def _move(self, url: str) -> None:
        try:
            place = address_of(url).place
        except ValueError:
            raise HttpError("the server asks to go on at an address that cannot be read") from None
        if self._place.is_encrypted and not place.is_encrypted:
            raise HttpError(f"the server asks to go on at {place.url}, which is not encrypted")
        self._place = place


def in_transaction(statements: Sequence[Statement]) -> list[Step]:
    """The steps that execute all of these and commit, or leave nothing behind. The results are found by `committed`."""
    steps = [Step(Statement("BEGIN IMMEDIATE"))]
    steps += [Step(statement, ok(number)) for number, statement in enumerate(statements)]
    commit = len(steps)
    steps.append(Step(Statement("COMMIT"), ok(commit - 1)))
    steps.append(Step(Statement("ROLLBACK"), both(ok(0), negated(ok(commit)))))
    return steps


def committed(ends: Ends) -> list[Result]:
    """The results of the statements of `in_transaction`. Raises the `ServerError` for which they were rolled back."""
    return Ends(ends.results[:-1], ends.errors[:-1]).given()[1:-1]


def _step(step: Step) -> dict[str, Any]:
    sql, values = step.statement
    statement = {"sql": sql, "args": [to_wire(value) for value in values], "want_rows": True}
    return {"stmt": statement} if step.condition is None else {"stmt": statement, "condition": step.condition}


def _ends(told: _Ends) -> Ends:
    results = [None if rows is None else rows.result() for rows in told.step_results]
    errors = [None if refusal is None else refusal.error() for refusal in told.step_errors]
    return Ends(results, errors)


def _refused(reply: Reply) -> ServerError:
    with contextlib.suppress(msgspec.DecodeError):
        return _refusal.decode(reply.body).error(reply.status)
    with contextlib.suppress(msgspec.DecodeError):
        return ServerError(_denial.decode(reply.body).error, None, reply.status)
    said = " ".join(reply.body[:300].decode(errors="replace").split())
    return ServerError(said or "the server refused the request without a word", None, reply.status)
