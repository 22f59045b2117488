"""Failed statements: what became of them, when they are sent again, and the error that the caller gets."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Final, TypeVar

from perdure.errors import PerdureError, PersistenceError

T = TypeVar("T")

# Seconds of silence after which a connection is given up, well before a lease of the usual length expires. A server may need more
# time for a statement, or for a lock that it waits for: hence the second limit, for a statement that was sent again.
REPLY_WITHIN: Final = 5.0
REPEATED_REPLY_WITHIN: Final = 60.0

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class WriteFailure(enum.Enum):
    """What became of a statement that failed, and what to do."""

    PERMANENT = enum.auto()  # the same statement would fail again
    RETRY = enum.auto()  # nothing was written; it may succeed now
    UNKNOWN = enum.auto()  # the connection broke before the reply: it was written, or not


class NotSentError(Exception):
    """There was no connection to send anything on. Its cause says why."""


class NoReplyError(TimeoutError):
    """The server was silent for too long. It may have received the request."""


def is_untrusted(error: BaseException) -> bool:
    """Whether the certificate of the server was refused. Drivers raise that like a server that is away, which may come back."""
    return "CERTIFICATE_VERIFY_FAILED" in f"{error} {error.__cause__}"


_is_after_silence: Final[ContextVar[bool]] = ContextVar("_is_after_silence", default=False)


def reply_limit() -> float:
    """How many seconds the server may be silent in this attempt: longer in one that follows a silence, on another connection."""
    return REPEATED_REPLY_WITHIN if _is_after_silence.get() else REPLY_WITHIN


def wrap_error(error: BaseException, label: str, text: str, secrets: Collection[str] = ()) -> PersistenceError:
    """A `PersistenceError` with this text and cause. Secrets in the text are hidden, and a cause that shows one is left out."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    wrapped = PersistenceError(label, text)
    if not _shows(error, secrets):
        wrapped.__cause__ = error
    return wrapped


def _shows(error: BaseException | None, secrets: Collection[str]) -> bool:
    """Whether a traceback of the error would show a secret."""
    while error is not None:
        if any(secret in f"{error} {error!r}" for secret in secrets):
            return True
        error = error.__cause__ or error.__context__
    return False


async def retry_transient(
    attempt: Callable[[bool], Awaitable[T]],
    classify: Callable[[BaseException], WriteFailure],
    map_error: Callable[[BaseException], BaseException],
    patience: float,
    on_silence: Callable[[BaseException], Awaitable[bool]],
) -> T:
    """The result of the attempt, which is repeated after transient errors for `patience` seconds.

    It is passed True when an earlier attempt may have been committed. `on_silence` says of an error whether it was a silence; the
    attempts after that have the longer `reply_limit`. The last error is raised as `map_error` gives it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    is_repeated, pause, was_silent = False, _FIRST_PAUSE, _is_after_silence.get()
    while True:
        limit = _is_after_silence.set(was_silent)
        try:
            return await attempt(is_repeated)
        except PerdureError:
            raise
        except NotSentError as carrier:
            error: BaseException = carrier.__cause__ or carrier
            failure = WriteFailure.RETRY
        except Exception as met:  # noqa: BLE001 - classified below, and raised unless it is transient
            error, failure = met, WriteFailure.RETRY if _lacks_thread(met) else classify(met)
        finally:
            _is_after_silence.reset(limit)
        if failure is WriteFailure.UNKNOWN:
            is_repeated, was_silent = True, await on_silence(error) or was_silent
        if is_untrusted(error):
            failure = WriteFailure.PERMANENT
        if failure is WriteFailure.PERMANENT or loop.time() > deadline:
            if _lacks_thread(error):
                raise PersistenceError("a connection", f"the server's name could not be looked up: {error}") from error
            raise map_error(error)
        await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
        pause = min(pause * 2, _LONGEST_PAUSE)


def _lacks_thread(error: BaseException) -> bool:
    """Whether a driver could not look up the server's name, for which asyncio starts a thread. Then nothing was sent."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
