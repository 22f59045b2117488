"""Calling a step's function by an executor: in a thread of the user's, in another process or on another machine.

An `ExecutorCall` is what is submitted. In this process it runs in the step's context. To another process only what the function
needs is pickled: its arguments and its `StepInfo`, for `current_step()`. Processes import this module to unpickle a call, so it
imports little.
"""

from __future__ import annotations

import contextvars
import functools
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, Final

import msgspec

from perdure.aio.interrupts import InterruptInThread
from perdure.aio.own_tasks import current
from perdure.aio.threads import ThreadPool, ThreadsClosed
from perdure.errors import StepFailed, StepNotPicklable
from perdure.stepspec import StepInfo

# What the messages of pickle, cloudpickle, loky and Dask have in common when something cannot be pickled.
_PICKLING_WORDS: Final = ("pickle", "local object", "serialize")
_MAX_REASON: Final = 500


class ExecutorCall:
    """A step's function with its arguments, to be called by an executor."""

    def __init__(
        self,
        info: StepInfo,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None = None,
        on_call: Callable[[], None] | None = None,
    ) -> None:
        self._info = info
        self._fn = fn
        self._args = args
        # Both only in the process that made the call.
        self._context = context
        self._on_call = on_call
        # Dask names a task by it.
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __reduce__(self) -> tuple[type[ExecutorCall], tuple[Any, ...]]:
        return ExecutorCall, (msgspec.structs.replace(self._info, drive=None), self._fn, self._args)

    def __call__(self) -> Any:
        if self._context is not None:
            return self._context.run(call_plain, self._fn, self._args, self._on_call)
        context = contextvars.copy_context()
        context.run(current.set, self._info)
        try:
            return context.run(call_plain, self._fn, self._args, None)
        except Exception as error:
            if (reason := _find_pickling_problem(error)) is None:
                raise
            # A process pool breaks, for all of its calls, when it cannot unpickle an exception.
            message = f"{error} (as text, because the exception itself cannot be sent from its process: {reason})"
            raise StepFailed(self._info.key, type(error).__qualname__, message) from error


def call_plain(fn: Callable[..., Any], args: tuple[Any, ...], on_call: Callable[[], None] | None) -> Any:
    """What the plain function of a step gives, called in this thread; `on_call` is called first."""
    if on_call is not None:
        on_call()
    try:
        return fn(*args)
    except StopIteration as error:
        # No future can carry it, so the step would never end. Python turns it into this in a coroutine.
        raise RuntimeError("the step's function raised StopIteration") from error
    except KeyboardInterrupt as error:
        raise InterruptInThread(*error.args) from error


class SubmittedCall(Future[Any]):
    """What becomes of a call that a thread of ours submits: `submit` may block, since a process pool starts processes in it.

    It is running from the moment at which it is submitted. Cancelling it then cancels the executor's own future, if that can be.
    """

    def __init__(self, executor: Executor, call: ExecutorCall) -> None:
        super().__init__()
        self._executor = executor
        self._call = call
        # The executor's own future, until it is done.
        self._inner: Future[Any] | None = None
        self._is_unwanted = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        self._is_unwanted = True
        inner = self._inner
        return inner is not None and inner.cancel()

    def submit(self, threads: ThreadPool, on_submitted: Callable[[], None] | None) -> None:
        """Let a thread submit the call, and then call `on_submitted`. Raises `ThreadsClosed`."""
        threads.submit_patiently(functools.partial(self._submit, on_submitted)).add_done_callback(self._take_failure)

    def _submit(self, on_submitted: Callable[[], None] | None) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            self._inner = inner = self._executor.submit(self._call)
        except BrokenExecutor:
            raise
        except RuntimeError as reason:
            if "interpreter shutdown" in str(reason):
                raise ThreadsClosed(str(reason)) from reason
            advice = "shut it down only after the runtime was closed"
            raise RuntimeError(f"{self._executor!r} takes no call: {reason}; {advice}") from reason
        if on_submitted is not None:
            on_submitted()
        if self._is_unwanted:
            inner.cancel()
        inner.add_done_callback(self._take_result)

    def _take_failure(self, submitting: Future[None]) -> None:
        """The call was not submitted."""
        if (failure := submitting.exception()) is not None and (self.running() or self.set_running_or_notify_cancel()):
            self.set_exception(failure)

    def _take_result(self, inner: Future[Any]) -> None:
        self._inner = None  # Dask computes a result again that its worker loses, as long as the future is referred to
        if inner.cancelled():
            self.set_exception(RuntimeError(f"{self._executor!r} was shut down, or dropped the call, before it made it"))
        elif (failure := inner.exception()) is not None:
            self.set_exception(failure)
        else:
            self.set_result(inner.result())


def explain_pickling(error: Exception, key: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> StepNotPicklable | None:
    """What could not be pickled, if that is why the call of this step failed with `error`."""
    text = str(error)
    is_likely = isinstance(error, pickle.PicklingError | TypeError | AttributeError)
    if not is_likely or not any(word in text for word in _PICKLING_WORDS) or _was_raised_by_function(error):
        return None
    if not _can_pickle(fn):
        what = f"{fn!r} cannot be imported there: define it at the top of a module, not as a lambda or inside a function"
    elif not _can_pickle(args):
        what = "its arguments cannot be pickled: pass plain values, or what the function can open there by itself"
    else:
        what = "what it returned cannot be pickled: it ran, and is not called again"
    return StepNotPicklable(key, what, text[:_MAX_REASON])


def _was_raised_by_function(error: Exception) -> bool:
    """Whether the error went through `call_plain`, by its own traceback or by the text of the one from another process."""
    name = call_plain.__name__
    if any(frame.f_code.co_name == name for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    return error.__cause__ is not None and f"in {name}" in str(error.__cause__)


def _can_pickle(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the value's own code may raise anything
        return False
    return True


def _find_pickling_problem(error: Exception) -> str | None:
    """Why the error would not survive the way to the process that waits for it; None if it does."""
    pickler: Any = sys.modules.get("cloudpickle", pickle)  # what loky and Dask use, and have imported here
    try:
        pickle.loads(pickler.dumps(error))  # noqa: S301 - its own bytes
    except Exception as reason:  # noqa: BLE001 - the error's own code may raise anything
        return str(reason)
    return None
