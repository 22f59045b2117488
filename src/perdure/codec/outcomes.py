"""The outcome of a step or a run, as stored bytes and back.

A success is the encoded value. A failure records its origin: an `Err` that was returned, or an exception that was raised.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import msgspec

from perdure.codec import Codec, Loss, dump_error, load_error, register
from perdure.codec.failures import one_line
from perdure.codec.rebuilt_errors import RebuildReport
from perdure.errors import PerdureWarning, RunCancelled, SnapshotCorrupt, StepFailed, ValueNotStorable, name_step
from perdure.model.records import EndStatus, RunInfo, RunRow, Status
from perdure.result import Err, Ok, Outcome

# Results as values, as ctx.map(on_error="collect") gives them, may be stored under any annotation.
register(Ok)
register(Err)

# In place of a step's key when the body itself failed.
BODY: Final = "body"
_MAX_NOTES: Final = 10
# The statuses of runs whose outcome is an error, and how much of it an `error_line` needs, in bytes or characters: class and
# message stand at the beginning.
FAILED: Final[tuple[Status, ...]] = ("failed", "dead")
OUTCOME_START: Final = 2_000
_RECORDED_EXCEPTION: Final = re.compile(r'\{"module":"[^"]*","qualname":"([^"]*)","message":"((?:[^"\\]|\\.)*)')
_CUT_FAILURE: Final = re.compile(r'\{"origin":"(?:result|throw)","error":(.*)', re.DOTALL)


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failure as it is stored. `error` is an encoded value (origin result) or a recorded exception (origin throw)."""

    origin: Literal["result", "throw"]
    error: msgspec.Raw
    cause: msgspec.Raw = msgspec.Raw(b"null")
    # An exception that was returned inside Err rather than raised.
    is_exception: bool = False
    # The cause is a recorded exception too.
    has_exception_cause: bool = False
    # Of a run: the keys whose errors ended it.
    keys: list[str] | None = None


class Hints(NamedTuple):
    """The annotations of what a function returns, of its value and of the error inside an `Err`, and the function's module."""

    value: Any = Any
    error: Any = Any
    module: str = ""


class Ending(NamedTuple):
    """How a run ended: status and payload for the store, outcome for the callers that wait for it."""

    status: EndStatus
    payload: bytes
    outcome: Outcome[Any]


def store_value(codec: Codec, value: Any, hint: Any, *, is_strict: bool) -> tuple[bytes, Any]:
    """The value as bytes, and as a replay would return it. Not strict: what cannot be stored becomes None, with a warning."""
    if is_strict:
        return codec.dump(value, hint)
    losses: list[Loss] = []
    stored = codec.dump(value, hint, losses=losses)
    if losses:
        _warn_of(losses, "strict=True makes that an error")
    return stored


def _warn_of(losses: list[Loss], advice: str) -> None:
    if losses:
        lost = ", ".join(f"{loss.path} ({loss.reason})" for loss in losses[:5])
        warnings.warn(f"what cannot be stored became None: {lost}; {advice}", PerdureWarning, stacklevel=4)


def store_exception(error: BaseException) -> bytes:
    """A raised exception as bytes."""
    return msgspec.json.encode(Failure("throw", msgspec.Raw(dump_error(error))))


def store_err(codec: Codec, err: Err[Any], hint: Any, *, is_strict: bool) -> bytes:
    """A returned `Err` as bytes."""
    is_exception = isinstance(err.error, BaseException)
    error = dump_error(err.error) if is_exception else store_value(codec, err.error, hint, is_strict=is_strict)[0]
    is_cause = isinstance(err.cause, BaseException)
    losses: list[Loss] = []
    cause = dump_error(err.cause) if is_cause else codec.dump(err.cause, losses=losses, path="cause")[0]
    # Not an error even when strict: the error matters more than its cause.
    _warn_of(losses, "a cause is stored as far as it can be")
    return msgspec.json.encode(Failure("result", msgspec.Raw(error), msgspec.Raw(cause), is_exception, is_cause))


def load_failure(
    codec: Codec,
    payload: bytes,
    key: str,
    hint: Any = Any,
    modules: Sequence[str] = (),
    report: RebuildReport | None = None,
) -> Exception:
    """Return a new instance of what a recorded failure raises. Raises ValueError when it cannot be read.

    The classes of exceptions are looked for in their own module and then in `modules`.
    """
    failure = msgspec.json.decode(payload, type=Failure)
    data = bytes(failure.error)
    if failure.origin == "throw":
        return load_error(data, key, modules, report)
    return StepFailed(key, load_error(data, key, modules, report) if failure.is_exception else codec.load(data, hint))


def note_step(error: BaseException, key: str, run_id: str) -> None:
    """Add to the error in which step of which run it was raised. A traceback shows it, and the record keeps it."""
    note = f"in {name_step(key)} of run {run_id!r}"
    with contextlib.suppress(Exception):  # `__notes__` may be anything in a user's class
        notes = getattr(error, "__notes__", ())
        # One object that is raised again and again would collect a note each time.
        if note not in notes and len(notes) < _MAX_NOTES:
            BaseException.add_note(error, note)


def failed_keys_of(payload: bytes) -> set[str] | None:
    """The keys whose errors ended a run, if that is known."""
    try:
        keys = msgspec.json.decode(payload, type=Failure).keys
    except msgspec.MsgspecError:
        return None
    return None if keys is None else set(keys)


def run_ending(codec: Codec, result: Any, hints: Hints, keys: list[str] | None = None, is_strict: bool = True) -> Ending:  # noqa: FBT001, FBT002
    """How a run ends whose body returned `result`, or `Err(exception)` for one that raised because of the steps `keys`."""
    ending = _run_ending(codec, result, hints, is_strict=is_strict)
    if keys is None or ending.status != "failed":
        return ending
    failure = msgspec.json.decode(ending.payload, type=Failure)
    outcome = replace(ending.outcome, step=_only(keys)) if isinstance(ending.outcome, Err) else ending.outcome
    return ending._replace(payload=msgspec.json.encode(msgspec.structs.replace(failure, keys=keys)), outcome=outcome)


def _only(keys: list[str] | None) -> str | None:
    return keys[0] if keys is not None and len(keys) == 1 else None


def _run_ending(codec: Codec, result: Any, hints: Hints, *, is_strict: bool) -> Ending:
    try:
        if isinstance(result, Err):
            return _failed_ending(codec, result, hints, is_strict=is_strict)
        value = result.value if isinstance(result, Ok) else result
        payload, kept = store_value(codec, value, hints.value, is_strict=is_strict)
    except ValueNotStorable as error:
        return Ending("failed", store_exception(error), Err(error))
    return Ending("completed", payload, Ok(kept))


def _failed_ending(codec: Codec, result: Err[Any], hints: Hints, *, is_strict: bool) -> Ending:
    match result.error:
        case StepFailed() as failed if failed.was_returned:
            # A step returned Err and the body did not catch it: that Err is the run's outcome.
            return _err_ending(codec, Err(failed.error), failed.key, hints, is_strict=is_strict)
        case Exception() as error:
            return Ending("failed", store_exception(error), result)
        case BaseException() as error:
            # Raised again it would stop the caller that waits for the run, and look like a cancelled run.
            payload = store_exception(error)
            return Ending("failed", payload, Err(load_failure(codec, payload, BODY)))
        case _:
            return _err_ending(codec, result, "result", hints, is_strict=is_strict)


def _err_ending(codec: Codec, err: Err[Any], key: str, hints: Hints, *, is_strict: bool) -> Ending:
    try:
        return Ending("failed", store_err(codec, err, hints.error, is_strict=True), err)
    except ValueNotStorable as reason:
        # Losing the error would be worse than losing its class: record its text, and the reason.
        described = StepFailed(key, type(err.error).__name__, f"{err.error!r} ({reason})")
        return Ending("failed", store_exception(described), Err(described) if is_strict else err)


def outcome_of(codec: Codec, run: RunRow, hints: Hints = Hints()) -> Ok[Any] | Err[Any]:  # noqa: B008 - immutable
    """The outcome of a run that has ended."""
    payload = run.outcome if run.outcome is not None else b"null"
    try:
        if run.status == "completed":
            return Ok(codec.load(payload, hints.value))
        if run.status == "cancelled":
            return Err(RunCancelled(run.id, msgspec.json.decode(payload, type=list[str] | None) or ()))
        error = load_failure(codec, payload, BODY, hints.error, (hints.module,))
        failure = msgspec.json.decode(payload, type=Failure)
        stored = bytes(failure.cause)
        cause = load_error(stored, BODY, (hints.module,)) if failure.has_exception_cause else codec.load(stored)
    except (ValueError, msgspec.MsgspecError) as reason:
        raise SnapshotCorrupt(run.id, "the outcome", str(reason)) from reason
    returned = error.error if isinstance(error, StepFailed) and failure.origin == "result" else error
    return Err(returned, cause, step=_only(failure.keys))


def run_info(row: RunRow) -> RunInfo:
    """The line of this run in a list."""
    return RunInfo.of(row, error_line(row.status, row.outcome))


def error_line(status: Status, outcome: bytes | None) -> str | None:
    """The error of a failed or dead run in one line, from its outcome or the beginning of that; None for any other run."""
    if status not in FAILED or outcome is None:
        return None
    try:
        failure = msgspec.json.decode(outcome, type=Failure)
        error, is_exception = bytes(failure.error).decode(), failure.origin == "throw" or failure.is_exception
    except (msgspec.MsgspecError, UnicodeDecodeError):
        cut = _CUT_FAILURE.match(outcome.decode(errors="ignore"))
        if cut is None:
            return None
        error, is_exception = cut[1], True  # whether it is one stands at the end; it looks like one if it is
    recorded = _RECORDED_EXCEPTION.match(error) if is_exception else None
    if recorded is None:
        return one_line(_text_from(error[1:-1]) if error[:1] == error[-1:] == '"' else error)
    name, message = recorded[1], _text_from(recorded[2])
    return one_line(f"{name}: {message}" if message else name)


def _text_from(json: str) -> str:
    """The text of a JSON string without its quotes, which may be cut."""
    try:
        return msgspec.json.decode(f'"{json}"', type=str)
    except msgspec.MsgspecError:
        return json
