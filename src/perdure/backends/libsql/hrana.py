"""Hrana over HTTP: the protocol of libSQL servers (version 3, or 2 where the server is older).

A request is a pipeline for one stream, which is a connection to the database on the server's side. Here a pipeline carries one
batch: statements that are executed in order, each on a condition that looks at how earlier ones ended. A whole transaction is
one batch and so one round trip (`in_transaction`). A stream that stays open between requests is named by a baton, new in each
reply, and the server may redirect it to another address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.backends.base.retries import NoReplyError
from perdure.backends.libsql.address import LibsqlAddress, parse_url
from perdure.backends.libsql.http import HttpError, HttpPool, HttpResponse
from perdure.backends.libsql.wire_values import WireValue, from_wire, to_wire
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result

# A silent connection is given up while a lease of the usual length can still be renewed on another: a renewal waits for the write
# before it. A working server replies sooner: the longest wait there is five seconds, after which it ends a transaction that
# blocks the others.
REQUEST_TIMEOUT: Final = 5.25
VERSIONS: Final = ("/v3", "/v2")
_OK: Final = range(200, 300)


class BatchStep(NamedTuple):
    """A statement of a batch, and on what condition it is executed."""

    statement: Statement
    condition: Mapping[str, Any] | None = None


def has_succeeded(step: int) -> dict[str, Any]:
    """The condition that a step was executed and succeeded."""
    return {"type": "ok", "step": step}


def negate(condition: Mapping[str, Any]) -> dict[str, Any]:
    """The condition that another is not met."""
    return {"type": "not", "cond": condition}


def all_of(*conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The condition that all of these are met."""
    return {"type": "and", "conds": conditions}


class ServerError(Exception):
    """The server refused a statement, or with a `status` of HTTP the request as a whole; `code` is its name for the reason."""

    def __init__(self, message: str, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message, code, status)
        self.message = message
        self.code = code or ""
        self.status = status

    def __str__(self) -> str:
        known = " ".join(str(part) for part in (self.status, self.code) if part)
        return f"{self.message} ({known})" if known else self.message


class _ServerRefusal(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None

    def error(self, status: int | None = None) -> ServerError:
        return ServerError(self.message, self.code, status)


class _TokenRefusal(msgspec.Struct, frozen=True):
    """The body of a response that refuses a token."""

    error: str


class _StepRows(msgspec.Struct, frozen=True):
    rows: list[list[WireValue]]
    affected_row_count: int = 0

    def result(self) -> Result:
        return Result([tuple(map(from_wire, row)) for row in self.rows], self.affected_row_count)


class _BatchResult(msgspec.Struct, frozen=True):
    step_results: list[_StepRows | None]
    step_errors: list[_ServerRefusal | None]
    replication_index: str | int | None = None


class _BatchResponse(msgspec.Struct, frozen=True):
    type: str
    result: _BatchResult | None = None


class _RequestSucceeded(msgspec.Struct, frozen=True, tag_field="type", tag="ok"):
    response: _BatchResponse


class _RequestFailed(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: _ServerRefusal


class _Pipeline(msgspec.Struct, frozen=True):
    results: list[_RequestSucceeded | _RequestFailed]
    baton: str | None = None
    base_url: str | None = None


_pipeline_decoder: Final = msgspec.json.Decoder(_Pipeline)
_refusal: Final = msgspec.json.Decoder(_ServerRefusal)
_token_refusal: Final = msgspec.json.Decoder(_TokenRefusal)


class BatchOutcome(NamedTuple):
    """For each step of a batch its result, or its error, or neither because its condition was not met."""

    results: Sequence[Result | None]
    errors: Sequence[ServerError | None]

    def raise_first(self) -> None:
        """Raise the error of the first step that has one."""
        for error in self.errors:
            if error is not None:
                raise error

    def results_or_raise(self) -> list[Result]:
        """The results of all steps. Raises `ServerError` unless every step succeeded."""
        self.raise_first()
        results = [result for result in self.results if result is not None]
        if len(results) != len(self.results):
            raise ServerError("the server left out a statement whose condition was met")
        return results


class HranaClient:
    """A client of one database, on one event loop. Its representation hides the token.

    `size` is how many requests may be in flight. Streams that stay open have connections of their own: the next request of one
    may be what all others wait for.
    """

    def __init__(self, address: LibsqlAddress, token: str | None, *, size: int, streams: int = 1) -> None:
        self.address = address
        self._pool = HttpPool(size)
        self._streams = HttpPool(streams)
        # The last change to the database that a reply reported, in the server's own count; None where it does not count.
        self.last_change: int | None = None
        self._version = VERSIONS[0]
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def __repr__(self) -> str:
        return f"HranaClient({self.address.url!r})"

    async def choose_version(self) -> None:
        """Use the newest version of the protocol that the server speaks. Raises `ServerError` when it is none of ours."""
        for version in VERSIONS:
            reply = await self._pool.request(self.address, "GET", version, self._headers, b"", REQUEST_TIMEOUT)
            if reply.status in _OK:
                self._version = version
                return
        raise _error_of(reply)

    async def server_version(self) -> str:
        """The name and version that the server reports, or an empty text."""
        reply = await self._pool.request(self.address, "GET", "/version", self._headers, b"", REQUEST_TIMEOUT)
        return reply.body.decode(errors="replace") if reply.status in _OK else ""

    async def batch(self, steps: Sequence[BatchStep]) -> BatchOutcome:
        """Execute these in a stream that ends with them: one round trip."""
        return await HranaStream(self).batch(steps, is_last=True)

    async def send(self, address: LibsqlAddress, body: bytes, *, is_single: bool) -> HttpResponse:
        """The response to a pipeline. Raises `ServerError` unless the server accepted it."""
        pool = self._pool if is_single else self._streams
        try:
            reply = await pool.request(address, "POST", f"{self._version}/pipeline", self._headers, body, REQUEST_TIMEOUT)
        except NoReplyError:
            self.last_change = None  # the database may be restored to an earlier state, which never reaches this count
            raise
        if reply.status not in _OK:
            raise _error_of(reply)
        return reply

    def update_last_change(self, index: str | int | None) -> None:
        """Remember the count of changes that a reply reported."""
        if index is not None:
            self.last_change = max(int(index), self.last_change or 0)

    def drop_idle(self) -> None:
        """Close the connections that nothing uses now."""
        self._pool.drop_idle()
        self._streams.drop_idle()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()
        await self._streams.close()


class HranaStream:
    """A connection to the database on the server's side, which closes it after some seconds without a request.

    It takes one request at a time. Do not leave it open without need: its transaction may lock out all others.
    """

    def __init__(self, client: HranaClient) -> None:
        self._client = client
        self._address = client.address
        self._baton: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the server keeps it open."""
        return self._baton is not None

    async def batch(self, steps: Sequence[BatchStep], *, is_last: bool = False) -> BatchOutcome:
        """The outcome of these steps; with `is_last` the stream ends too. Raises `ServerError` when nothing was executed."""
        batch: dict[str, Any] = {"steps": [_step(step) for step in steps]}
        if self._client.last_change is not None:
            # A replica waits until it has applied this change, so that a client reads its own acknowledged writes.
            batch["replication_index"] = str(self._client.last_change)
        requests: list[dict[str, Any]] = [{"type": "batch", "batch": batch}]
        is_single = is_last and self._baton is None
        pipeline = await self._request([*requests, {"type": "close"}] if is_last else requests, is_single=is_single)
        answer = pipeline.results[0]
        if isinstance(answer, _RequestFailed):
            raise answer.error.error()
        if answer.response.result is None:
            raise HttpError(f"the server answered a batch with {answer.response.type!r}")
        self._client.update_last_change(answer.response.result.replication_index)
        return _outcome_of(answer.response.result)

    async def close(self) -> None:
        """Close it; the server rolls back what was not committed."""
        if self._baton is not None:
            await self._request([{"type": "close"}])

    async def _request(self, requests: Sequence[Mapping[str, Any]], *, is_single: bool = False) -> _Pipeline:
        body = msgspec.json.encode({"baton": self._baton, "requests": requests})
        self._baton = None  # a baton is valid once; without a reply the stream cannot be reached
        reply = await self._client.send(self._address, body, is_single=is_single)
        try:
            pipeline = _pipeline_decoder.decode(reply.body)
        except msgspec.DecodeError as error:
            raise HttpError(f"the server's reply cannot be read: {error}") from None
        if len(pipeline.results) != len(requests):
            raise HttpError(f"the server gave {len(pipeline.results)} answers to {len(requests)} requests")
        self._baton = pipeline.baton
        if pipeline.base_url is not None:
            self._redirect(pipeline.base_url)
        return pipeline

    def _redirect(self, url: str) -> None:
        try:
            address = parse_url(url).address
        except ValueError:
            raise HttpError("the server asks to go on at an address that cannot be read") from None
        if (self._address.is_encrypted and not address.is_encrypted) or (self._address.is_private and not address.is_private):
            raise HttpError(f"the server asks to go on at {address.url}, which is not encrypted")
        self._address = address


def in_transaction(statements: Sequence[Statement]) -> list[BatchStep]:
    """The steps that execute all of these and commit, or leave nothing behind. The results are found by `committed_results`."""
    steps = [BatchStep(Statement("BEGIN IMMEDIATE"))]
    steps += [BatchStep(statement, has_succeeded(number)) for number, statement in enumerate(statements)]
    commit = len(steps)
    steps.append(BatchStep(Statement("COMMIT"), has_succeeded(commit - 1)))
    steps.append(BatchStep(Statement("ROLLBACK"), all_of(has_succeeded(0), negate(has_succeeded(commit)))))
    return steps


def committed_results(outcome: BatchOutcome) -> list[Result]:
    """The results of the statements of `in_transaction`. Raises the `ServerError` for which they were rolled back."""
    return BatchOutcome(outcome.results[:-1], outcome.errors[:-1]).results_or_raise()[1:-1]


def _step(step: BatchStep) -> dict[str, Any]:
    sql, values = step.statement
    statement = {"sql": sql, "args": [to_wire(value) for value in values], "want_rows": True}
    return {"stmt": statement} if step.condition is None else {"stmt": statement, "condition": step.condition}


def _outcome_of(batch: _BatchResult) -> BatchOutcome:
    results = [None if rows is None else rows.result() for rows in batch.step_results]
    errors = [None if refusal is None else refusal.error() for refusal in batch.step_errors]
    return BatchOutcome(results, errors)


def _error_of(reply: HttpResponse) -> ServerError:
    with contextlib.suppress(msgspec.DecodeError):
        return _refusal.decode(reply.body).error(reply.status)
    with contextlib.suppress(msgspec.DecodeError):
        return ServerError(_token_refusal.decode(reply.body).error, None, reply.status)
    said = " ".join(reply.body[:300].decode(errors="replace").split())
    return ServerError(said or "the server refused the request without a word", None, reply.status)
