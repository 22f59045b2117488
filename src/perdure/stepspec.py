"""`@step`, `Retry`, `current_step`, and what is known of a step's function before it is called: its options, what it returns."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from types import FunctionType as _Function
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack
from weakref import ref

import msgspec

from perdure.aio.own_tasks import current
from perdure.errors import RetryAfter, name_step
from perdure.model.durations import Duration, seconds
from perdure.model.ids import check_id
from perdure.model.stream_items import MAX_STREAM_ITEMS
from perdure.result import Err, Ok

F = TypeVar("F", bound=Callable[..., Any])


class StepDefaults(TypedDict, total=False):
    """Options of `@step(...)`: defaults beside the function."""

    retry: Retry | int | None
    timeout: Duration | None
    abandon: bool
    returns: Any
    at_most_once: bool
    cache: Literal[False]
    ttl: Duration | None
    aliases: Sequence[str]
    executor: str | Executor | None
    compensate: Callable[[Any], Any] | None


class StepOptions(StepDefaults, total=False):
    """Options of `ctx.step`."""

    key: str


OPTION_NAMES: Final = frozenset(StepOptions.__annotations__)
_ATTRIBUTE: Final = "__perdure_step__"


def step(**options: Unpack[StepDefaults]) -> Callable[[F], F]:
    """Attach default options to a step's function, which stays an ordinary function. Options of the call take precedence."""
    if "key" in options:
        raise TypeError("@step takes no key=: a key belongs to one call, so pass it to ctx.step")
    check_options(options)

    def attach(fn: F) -> F:
        if not callable(fn):
            raise TypeError(f"@step(...) decorates a function, not {fn!r}")
        setattr(fn, _ATTRIBUTE, dict(options))
        return fn

    return attach


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are unknown or contradict each other."""
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        raise TypeError(
            f"unknown step option {', '.join(sorted(unknown))}; there are {', '.join(sorted(OPTION_NAMES))} "
            "(keyword arguments for the function itself: functools.partial(fn, name=value))"
        )
    retry = Retry.of(options.get("retry"))
    if options.get("at_most_once") and retry.attempts > 1:
        raise ValueError("at_most_once=True and retry= contradict each other: a step that must not run twice has one attempt")
    timeout = options.get("timeout")
    if timeout is not None and seconds(timeout, what="timeout") == 0:
        raise ValueError("timeout must be longer than zero")
    if options.get("cache", False) is not False:
        raise TypeError(
            "a step takes only cache=False, to leave the cache alone; the cache itself belongs to the workflow or the run"
        )
    check_aliases(options.get("aliases", ()))
    executor = options.get("executor")
    if executor is not None and not isinstance(executor, str | Executor):
        raise TypeError(f"executor= is a name in executors= or an object of concurrent.futures.Executor, not {executor!r}")
    compensate = options.get("compensate")
    if compensate is not None and not callable(compensate):
        raise TypeError(f"compensate= takes a function of the step's result, not {compensate!r}")
    ttl = options.get("ttl")
    if ttl is not None and seconds(ttl, what="ttl") == 0:
        raise ValueError("ttl must be longer than zero; cache=False keeps a step out of the cache")


def check_aliases(aliases: Any) -> tuple[str, ...]:
    """Former names, the oldest first. Raises TypeError and ValueError."""
    if isinstance(aliases, str) or not isinstance(aliases, Sequence):
        raise TypeError(f"aliases= takes a list of former names, the oldest first: [{aliases!r}]")
    return tuple(check_id(alias, "an alias") for alias in aliases)


class StepPlan(msgspec.Struct, frozen=True):
    """How a step runs: what kind of function it has, and its effective options, checked."""

    is_async: bool
    returns: Any
    fails_with: Any
    retry: Retry
    timeout: float | None
    abandon: bool
    at_most_once: bool
    may_cache: bool
    ttl: float | None
    # Whether the function is only called and awaited: no thread, no timeout, no intent to record.
    is_bare: bool
    # Former names, the oldest first.
    aliases: tuple[str, ...] = ()
    # Where a plain function is called: a name in the option `executors`, or the executor itself. None: in a thread of ours.
    executor: str | Executor | None = None
    # Called with the step's result, or None if that is not known, when the run fails or is cancelled after the step.
    compensate: Callable[[Any], Any] | None = None
    # The module of the function, where classes of its errors may be found.
    module: str = ""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A function as a step. `plan` is for a call without options of its own."""

    name: str | None
    is_async: bool
    returns: Any
    fails_with: Any
    options: dict[str, Any]
    module: str = ""
    plan: StepPlan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", self.plan_with({}))

    def plan_with(self, options: Mapping[str, Any]) -> StepPlan:
        """The plan with these options of a call, which take precedence over those of `@step`. Raises for invalid ones."""
        options = {**self.options, **options}
        check_options(options)
        if self.is_async and options.get("executor") is not None:
            raise TypeError(
                f"executor= is for plain functions, and {self.name!r} is async: it runs on the event loop, which an executor "
                "does not have; write the heavy part as a plain function and make that a step of its own"
            )
        timeout, ttl = options.get("timeout"), options.get("ttl")
        returns, fails_with = self.returns, self.fails_with
        if "returns" in options:
            returns, error = split_result(options["returns"])
            fails_with = fails_with if error is Any else error
        return StepPlan(
            is_async=self.is_async,
            returns=returns,
            fails_with=fails_with,
            retry=Retry.of(options.get("retry")),
            timeout=None if timeout is None else seconds(timeout, what="timeout"),
            abandon=bool(options.get("abandon")),
            at_most_once=bool(options.get("at_most_once")),
            may_cache=options.get("cache") is not False,
            ttl=None if ttl is None else seconds(ttl, what="ttl"),
            is_bare=self.is_async and timeout is None and not options.get("at_most_once") and options.get("compensate") is None,
            aliases=tuple(options.get("aliases", ())),
            executor=options.get("executor"),
            compensate=options.get("compensate"),
            module=self.module,
        )


# By weak reference to the function. Not a WeakKeyDictionary: its lookup, once for each step, takes several times as long.
_specs: dict[ref[Any], StepSpec] = {}


def spec_of(fn: Any) -> StepSpec:
    """The spec of `fn`, computed once for each function: bound methods and partials share that of what they wrap.

    A partial that `@step(...)` decorated has options of its own.
    """
    if type(fn) is _Function and (known := _specs.get(ref(fn))) is not None:
        return known
    if isinstance(fn, functools.partial) and _ATTRIBUTE in vars(fn):
        inner = spec_of(fn.func)
        return replace(inner, options={**inner.options, **vars(fn)[_ATTRIBUTE]})
    plain = _innermost_function(fn)
    try:
        known = _specs.get(ref(plain))
    except TypeError:  # not hashable, or takes no weak reference: computed each time
        return _inspect(plain)
    if known is None:
        known = _specs[ref(plain, _forget)] = _inspect(plain)
    return known


def _forget(dead: ref[Any]) -> None:
    _specs.pop(dead, None)


def _inspect(fn: Any) -> StepSpec:
    if inspect.iscoroutine(fn):
        fn.close()
        raise TypeError(
            "ctx.step takes a function and its arguments, not a coroutine: write ctx.step(fetch, 1), not ctx.step(fetch(1))"
        )
    if not callable(fn):
        raise TypeError(f"ctx.step takes a function, not {fn!r}")
    if is_mock(fn):
        return _inspect_mock(fn)
    if getattr(fn, "is_perdure_workflow", False):
        raise TypeError(f"{fn!r} is a workflow, not a step; start it as a child: await ctx.child({fn.__name__}, ...)")
    name = getattr(fn, "__name__", None)
    value, error = _results(fn)
    return StepSpec(
        name=None if name == "<lambda>" else name,
        # A plain function may return an awaitable; that shows only when it is called, and then the result is awaited.
        is_async=_is_async(fn),
        returns=value,
        fails_with=error,
        options=dict(getattr(fn, _ATTRIBUTE, {})),
        module=module_of(fn),
    )


def module_of(fn: Any) -> str:
    """Return the name of the module in which a function is defined, or an empty text."""
    module = getattr(fn, "__module__", None)
    return module if isinstance(module, str) else ""


def is_mock(fn: Any) -> bool:
    """Whether it is a `Mock` of any kind, without importing them."""
    unittest_mock = sys.modules.get("unittest.mock")
    return unittest_mock is not None and isinstance(fn, unittest_mock.NonCallableMock)


def _inspect_mock(fn: Any) -> StepSpec:
    """The spec of a `Mock`. It has any attribute that is asked for, so what others tell about themselves means nothing here.

    It is called as a plain function: what an `AsyncMock` returns is awaited.
    """
    # "charge" of Mock(name="charge"), mock.patch("shop.charge") and Mock().gateway.charge. Only a repr shows it otherwise.
    name: str = fn._extract_mock_name().rpartition(".")[2]  # noqa: SLF001
    is_named = name not in ("mock", "mock()")
    options = dict(vars(fn).get(_ATTRIBUTE, {}))
    return StepSpec(name if is_named else None, is_async=False, returns=Any, fails_with=Any, options=options)


def _innermost_function(fn: Any) -> Any:
    while True:
        # By its type, because a mock of a method has the method's class.
        if issubclass(type(fn), functools.partial):
            fn = fn.func
        elif type(fn) is types.MethodType:
            fn = fn.__func__
        else:
            return fn


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(_call_of(fn))


def _call_of(fn: Any) -> Any:
    """The `__call__` of a callable object; None for functions and classes."""
    return None if inspect.isroutine(fn) or isinstance(fn, type) else getattr(type(fn), "__call__", None)  # noqa: B004


def _results(fn: Any) -> tuple[Any, Any]:
    """The annotations of what is returned: of the value, and of the error inside `Err`."""
    if isinstance(fn, type):
        return fn, Any
    try:
        hint = typing.get_type_hints(_call_of(fn) or fn, include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 - an annotation may raise anything; then the function counts as not annotated
        return Any, Any
    return split_result(_awaited_type(hint))


def parameter_type(fn: Callable[[Any], Any]) -> Any:
    """Return the annotation of the one argument that the function takes, `Any` if it has none."""
    try:
        name = next(iter(inspect.signature(fn).parameters), "")
        plain = _innermost_function(fn)
        return typing.get_type_hints(_call_of(plain) or plain, include_extras=True).get(name, Any)
    except Exception:  # noqa: BLE001 - an annotation may raise anything; then the function counts as not annotated
        return Any


def _awaited_type(hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Awaitable) and args:
        return args[2] if issubclass(origin, Coroutine) and len(args) == 3 else args[0]
    return hint


def split_result(hint: Any) -> tuple[Any, Any]:
    """`Ok[T] | Err[E]` as (T, E); any other annotation as (itself, Any)."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    values: list[Any] = []
    errors: list[Any] = []
    for member in members:
        origin = typing.get_origin(member) or member
        inner = typing.get_args(member)[0] if typing.get_args(member) else Any
        (errors if origin is Err else values).append(inner if origin in (Ok, Err) else member)
    if not values:
        return Any, _union(errors)
    return _union(values), _union(errors) if errors else Any


def _union(members: list[Any]) -> Any:
    return members[0] if len(members) == 1 else typing.Union[tuple(members)]  # noqa: UP007 - made at run time


@dataclass(frozen=True)
class Retry:
    """How often and when a step is tried again. `attempts` includes the first.

    `on` names the exceptions that are retried, or is a function that is called with the exception and says whether. An attempt
    that raises `RetryAfter` is retried whatever `on` says.
    """

    attempts: int = 3
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], object] = Exception
    wait_initial: Duration = "100ms"
    wait_max: Duration = "30s"
    wait_exp_base: float = 2
    wait_jitter: Duration = "1s"

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ValueError(f"Retry(attempts=) must be a whole number of at least 1, not {self.attempts!r}")
        if not self.wait_exp_base >= 1:
            raise ValueError(f"Retry(wait_exp_base=) must be at least 1, not {self.wait_exp_base!r}")
        if _is_async(self.on):
            raise TypeError(f"Retry(on=) takes a plain function, which answers at once, and {self.on!r} is async")
        is_function = callable(self.on) and not isinstance(self.on, type)
        for kind in () if is_function else self.on if isinstance(self.on, tuple) else (self.on,):
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"Retry(on=) takes Exception classes, or a function of the exception, not {kind!r}")
        for name in ("wait_initial", "wait_max", "wait_jitter"):
            seconds(getattr(self, name), what=f"Retry({name}=)")
        if seconds(self.wait_initial) > seconds(self.wait_max):
            raise ValueError(
                f"Retry(wait_initial={self.wait_initial!r}) is longer than wait_max={self.wait_max!r}; raise wait_max too"
            )

    @classmethod
    def of(cls, retry: Retry | int | None) -> Retry:
        """The `Retry` for a `retry=` option: 5 is short for `Retry(attempts=5)`, None means no retry."""
        if retry is None:
            return _ONCE
        return retry if isinstance(retry, Retry) else cls(attempts=retry)

    def wants(self, error: Exception, attempt: int) -> bool:
        """Whether attempt number `attempt`, which failed with `error`, is followed by another. Raises what `on` raises."""
        if attempt >= self.attempts:
            return False
        if isinstance(self.on, type | tuple):
            return isinstance(error, (RetryAfter, self.on))
        return isinstance(error, RetryAfter) or bool(self.on(error))

    def wait_after(self, attempt: int, error: Exception | None = None) -> float:
        """Return the seconds between attempt number `attempt`, which failed with `error`, and the next.

        They are those of `RetryAfter`, or else exponential plus jitter and never more than `wait_max`.
        """
        if isinstance(error, RetryAfter):
            return error.seconds
        most = seconds(self.wait_max)
        try:
            wait = seconds(self.wait_initial) * float(self.wait_exp_base) ** (attempt - 1)
        except OverflowError:
            return most
        return min(most, wait + random.uniform(0, seconds(self.wait_jitter)))  # noqa: S311 - jitter needs no secrecy


_ONCE: Final = Retry(attempts=1)


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """What a step's function may know about itself.

    `idempotency_key` is a text for services that tell repeated requests apart. It is the same for every attempt and every replay,
    and another one when the step was undone and is done again. `undoes` is set in a compensation: the idempotency key of the
    step that it undoes, or the id of the child.
    `is_cancelled` is for a plain function in a thread, which cannot be interrupted: True once its result will be discarded, as
    the attempt timed out, its run was cancelled, lost its lease or was given back at the end of a drain, or the step lost a race.
    In an async function, which is cancelled itself, and in another process it stays False.
    """

    run_id: str
    key: str
    attempt: int
    idempotency_key: str
    undoes: str | None = None
    is_cancelled: bool = False
    # The drive of the run, where it is in this process.
    drive: ref[Any] | None = None

    def emit(self, stream: str, item: Any, *, max_items: int = MAX_STREAM_ITEMS) -> Awaitable[None]:
        """Queue an item for the readers of `run.stream(stream)`, marked with this step and attempt.

        In an async function, await it: it waits while the store does not keep up. In a plain function's thread it blocks for that
        long. Raises `StreamFull`, `StreamEnded`, `ValueNotStorable`, and `StoreCapabilityError` when the store keeps no streams.
        In a process of an executor it is a RuntimeError.
        """
        drive = None if self.drive is None else self.drive()
        if drive is None:
            raise RuntimeError(
                f"{name_step(self.key)} of run {self.run_id!r} cannot emit here: its run is driven in another process, or has "
                "left memory; emit in an async function or in a plain one without executor=, or return the items"
            )
        emitted: Awaitable[None] = drive.emit_in_step(self, stream, item, max_items)
        return emitted


def mark_cancelled(info: StepInfo) -> None:
    """Let the function that runs in a thread see that its result will be discarded."""
    msgspec.structs.force_setattr(info, "is_cancelled", True)  # frozen for all others


def current_step() -> StepInfo:
    """What the running step may know about itself; raises outside a step's function."""
    here = current.get()
    if isinstance(here, StepInfo):
        return here
    raise RuntimeError("current_step() was called outside a step's function; it only works in a function run by ctx.step")


def current_run_id() -> str | None:
    """Return the id of the run in whose body or step's function this is called, or None elsewhere."""
    run_id: str | None = getattr(current.get(), "run_id", None)
    return run_id


def name_caller() -> str:
    """The step and the run in whose function this is called, in words, for a message."""
    here = current.get()
    return f"{name_step(here.key)} of run {here.run_id!r}" if isinstance(here, StepInfo) else "a call"
