"""Stubs: what is called in place of a step's function. The step is recorded, retried and timed like any other."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import msgspec

from perdure.ctx_calls.step_calls import StepCall

_NOTHING: Final[Any] = object()


class Stub:
    """What is called in place of a step. `calls` has the arguments of each call so far."""

    def __init__(self, target: Any, answer: Callable[..., Any], times: int | None) -> None:
        self.target = target
        self.times = times
        self.calls: list[tuple[Any, ...]] = []
        # How many attempts it stands for so far. Each of them calls it, but not at once if its intent is recorded first.
        self._taken = 0
        self._answer = answer

    def __repr__(self) -> str:
        return f"the stub of {_name(self.target)}"

    def fits(self, step: StepCall) -> bool:
        """Whether it stands for this step, and may be called once more."""
        if self.times is not None and self._taken >= self.times:
            return False
        if isinstance(self.target, str):
            return self.target in (step.key, step.name)
        return bool(_innermost(step.fn) == _innermost(self.target)) and _has_same_self(step.fn, self.target)

    def take(self) -> Callable[..., Any]:
        """Return what one attempt of a step calls."""
        self._taken += 1
        return self._call

    async def _call(self, *args: Any) -> Any:
        """Answer in place of the step's function."""
        self.calls.append(args)
        result = self._answer(*args)
        return await result if inspect.isawaitable(result) else result


class Stubs:
    """The stubs of one runtime. Of several for one step the first that may still be called is, so that they make a sequence."""

    def __init__(self) -> None:
        self._stubs: list[Stub] = []
        self._steps: dict[str, None] = {}

    def add(self, target: Any, *, returns: Any, raises: Any, calls: Any, times: int | None) -> Stub:
        """A new stub. Raises TypeError and ValueError."""
        if not isinstance(target, str) and not callable(target):
            raise TypeError(f"a stub stands for a step's function, or for its key or name as a str, not for {target!r}")
        if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 1):
            raise ValueError(f"times= is a whole number of at least 1, not {times!r}")
        stub = Stub(target, _answer(returns, raises, calls), times)
        self._stubs.append(stub)
        return stub

    def replace(self, step: StepCall) -> StepCall:
        """Return what this attempt of the step calls: the step, or the same with the function of its stub."""
        self._steps[step.key] = None
        stub = next((each for each in self._stubs if each.fits(step)), None)
        if stub is None:
            return step
        plan = step.plan
        is_bare = plan.timeout is None and not plan.at_most_once and plan.compensate is None
        plan = msgspec.structs.replace(plan, is_async=True, is_bare=is_bare, executor=None)
        return msgspec.structs.replace(step, fn=stub.take(), plan=plan)

    def problems(self) -> list[str]:
        """What is to be said of stubs that were not called, or less often than they were to be."""
        ran = ", ".join(self._steps) or "none"
        unused = [f"{stub!r} was never called (steps that ran: {ran})" for stub in self._stubs if not stub.calls]
        short = [
            f"{stub!r} was called {len(stub.calls)} of {stub.times} times"
            for stub in self._stubs
            if stub.times is not None and 0 < len(stub.calls) < stub.times
        ]
        return [*unused, *short]


def _answer(returns: Any, raises: Any, calls: Any) -> Callable[..., Any]:
    given = [name for name, value in (("returns", returns), ("raises", raises), ("calls", calls)) if value is not _NOTHING]
    if len(given) != 1:
        raise TypeError(f"a stub takes one of returns=, raises= and calls=, not {' and '.join(given) or 'none of them'}")
    if returns is not _NOTHING:
        return lambda *_: returns
    if calls is not _NOTHING:
        if not callable(calls):
            raise TypeError(f"calls= is a function that is called in place of the step's, not {calls!r}")
        function: Callable[..., Any] = calls
        return function
    if not (isinstance(raises, Exception) or (isinstance(raises, type) and issubclass(raises, Exception))):
        raise TypeError(f"raises= is an exception or its class, not {raises!r}")

    def fail(*_: Any) -> Any:
        raise raises

    return fail


def _innermost(fn: Any) -> Any:
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    return fn


def _has_same_self(fn: Any, target: Any) -> bool:
    """A method of one object stands for that object's only; `Mailer.send` for that of every mailer."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return not isinstance(target, types.MethodType) or (isinstance(fn, types.MethodType) and fn.__self__ is target.__self__)


def _name(target: Any) -> str:
    return repr(target) if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
