"""Failed statements: what became of them, when they are sent again, and the error that the caller gets."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from perdure.errors import PerdureError, PersistenceError

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class WriteFailure(enum.Enum):
    """What became of a statement that failed, and what to do."""

    PERMANENT = enum.auto()  # the same statement would fail again
    RETRY = enum.auto()  # nothing was written; it may succeed now
    UNKNOWN = enum.auto()  # the connection broke before the reply: it was written, or not


class NotSentError(Exception):
    """There was no connection to send anything on. Its cause says why."""


def wrap_error(error: BaseException, label: str, text: str, secret: str | None = None) -> PersistenceError:
    """A `PersistenceError` with this text and cause. Where the text shows the secret, that is hidden, and the cause left out."""
    if secret and secret in text:
        return PersistenceError(label, text.replace(secret, "***"))
    wrapped = PersistenceError(label, text)
    wrapped.__cause__ = error
    return wrapped


async def retry_transient(
    attempt: Callable[[bool], Awaitable[T]],
    classify: Callable[[BaseException], WriteFailure],
    map_error: Callable[[BaseException], BaseException],
    patience: float,
) -> T:
    """The result of the attempt, which is repeated after transient errors for `patience` seconds.

    It is passed True when an earlier attempt may have been committed. The last error is raised as `map_error` gives it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    is_repeated, pause = False, _FIRST_PAUSE
    while True:
        try:
            return await attempt(is_repeated)
        except PerdureError:
            raise
        except NotSentError as carrier:
            error: BaseException = carrier.__cause__ or carrier
            failure = WriteFailure.RETRY
        except Exception as met:  # noqa: BLE001 - classified below, and raised unless it is transient
            error, failure = met, WriteFailure.RETRY if _lacks_thread(met) else classify(met)
        if failure is WriteFailure.PERMANENT or loop.time() > deadline:
            if _lacks_thread(error):
                raise PersistenceError("a connection", f"the server's name could not be looked up: {error}") from error
            raise map_error(error)
        is_repeated |= failure is WriteFailure.UNKNOWN
        await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
        pause = min(pause * 2, _LONGEST_PAUSE)


def _lacks_thread(error: BaseException) -> bool:
    """Whether a driver could not look up the server's name, for which asyncio starts a thread. Then nothing was sent."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
