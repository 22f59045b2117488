"""The outcome of a run or a step: `Ok`, `Err`, `Suspended`; and of an approval: `Approved`, `Rejected`, `Expired`.

match await checkout.run(order, id="order-1"):
    case Ok(receipt): ...
    case Err(error): ...
    case Suspended(wake_at=at): ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Ok(Generic[T_co]):
    """A success; `value` is the result."""

    value: T_co

    def unwrap(self) -> T_co:
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Err(Generic[E_co]):
    """A failure; `error` is an exception, or the value that the function put into `Err`.

    Of a run's outcome, `step` is the key of the step that ended the run, if it was one.
    """

    error: E_co
    cause: Any = None
    step: str | None = field(default=None, kw_only=True, repr=False, compare=False)

    def unwrap(self) -> NoReturn:
        """Raise the error; one that is no exception is raised inside `StepFailed`."""
        if isinstance(self.error, BaseException):
            raise self.error
        from perdure.errors import StepFailed

        raise StepFailed(self.step or "result", self.error) from (self.cause if isinstance(self.cause, BaseException) else None)


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """What a suspended run waits for: a signal or an approval by its name, a child by its key. As text it is `signal 'paid'`."""

    kind: Literal["signal", "approval", "child"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Suspended:
    """The run waits: until `wake_at`, for one of the things in `waiting_for`, or for the first of both."""

    run_id: str
    wake_at: datetime | None = None
    waiting_for: tuple[WaitingFor, ...] = ()

    def unwrap(self) -> NoReturn:
        """Raise: there is no value yet."""
        raise RuntimeError(f"run {self.run_id!r} is suspended and has no value yet; await the run, or signal it")


@dataclass(frozen=True, slots=True)
class Approved(Generic[T_co]):
    """A person approved. `payload` is what was asked for, or what `by` made of it; do what it says, not what was asked."""

    payload: T_co
    by: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Rejected:
    """A person rejected, and perhaps said why."""

    reason: str | None
    by: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Expired:
    """No decision came before the approval expired, at this instant."""

    at: datetime


T = TypeVar("T")
Outcome: TypeAlias = Ok[T] | Err[Any] | Suspended
