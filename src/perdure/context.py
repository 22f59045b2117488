"""`Context`: what a workflow's body uses to do anything durable.

Everything here is recorded under a key, and a replay gets the same again. A Context only passes calls on to its drive; its own
state is the names of its scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    overload,
)

import msgspec

from perdure.aio.own_tasks import current
from perdure.body.body_queue import BodyQueue
from perdure.ctx_calls.children import Child, ChildCall, child_call, is_workflow, run_child
from perdure.ctx_calls.compensation import closing_of
from perdure.ctx_calls.fan_out import MapPolicy, OnError, run_map, run_race
from perdure.ctx_calls.step_calls import StepCall, replay_step, run_step
from perdure.ctx_calls.transactions import DEFAULT_TIMEOUT, StepTransaction, TransactionAttempts
from perdure.ctx_calls.waits import (
    MISSING,
    ApprovalRequest,
    TimeLimit,
    is_patched,
    sleep,
    wait_for_approval,
    wait_for_signal,
)
from perdure.engine.drive import Drive
from perdure.engine.streams import emit_in_body, end_stream
from perdure.model.approvals import check_assignees, check_signal_name, default_key
from perdure.model.durations import MAX_INSTANT, Duration, instant, microseconds, moment
from perdure.model.ids import check_id
from perdure.model.records import check_positive
from perdure.model.stream_items import MAX_STREAM_ITEMS
from perdure.options import StoredOptions
from perdure.result import Approved, Err, Expired, Ok, Rejected
from perdure.stepspec import Retry, StepDefaults, StepOptions, StepPlan, StepSpec, is_mock, spec_of

if TYPE_CHECKING:
    # Known to checkers without being installed: a bare `Context` is `Context[Any]`.
    from typing_extensions import TypeVar as TypeVarWithDefault

    D = TypeVarWithDefault("D", default=Any)
else:
    D = TypeVar("D")


T = TypeVar("T")
U = TypeVar("U")
I = TypeVar("I")  # noqa: E741 - an item
Ts = TypeVarTuple("Ts")

Result: TypeAlias = Ok[T] | Err[Any]
Racer: TypeAlias = Coroutine[Any, Any, T]


class ChildOptions(StoredOptions, total=False):
    """Options of `ctx.child`: the key under which the child is recorded, what undoes it, and what is stored with its run."""

    key: str
    compensate: Callable[[Any], Any] | None


class StartChildOptions(ChildOptions, total=False):
    """Options of `ctx.start_child`. A detached child goes on when its parent has ended, and is not cancelled with it."""

    detached: bool


class _EachOptions(StepDefaults, total=False):
    """The options of a step, with a key made from each item, and how many may run at once. The last four are for children."""

    key: Callable[[Any], str]
    concurrency: int
    queue: str
    priority: int
    deadline: Duration | datetime
    metadata: dict[str, Any]


class MapOptions(_EachOptions, total=False):
    """Options of `ctx.map` when the first error cancels the rest."""

    on_error: Literal["raise"]


class CollectOptions(_EachOptions, total=False):
    """Options of `ctx.map` when errors are results."""

    on_error: Required[Literal["collect"]]


class ToleratingOptions(_EachOptions, total=False):
    """Options of `ctx.map` when so many errors are results, and one more is raised."""

    max_failures: Required[int]


class EnoughOptions(_EachOptions, total=False):
    """Options of `ctx.map` when so many results are enough, and the rest is cancelled."""

    enough: Required[int]


class TransactionOptions(TypedDict, total=False):
    """Options of `ctx.transaction`."""

    key: str
    retry: Retry | int | None
    timeout: Duration | None
    returns: Any


class Context(Generic[D]):
    """The durable side of a body. Valid while that body runs; a call after that raises."""

    __slots__ = ("_drive", "_scope")

    def __init__(self, drive: Drive, scope: tuple[str, ...] = ()) -> None:
        self._drive = drive
        self._scope = scope

    @property
    def run_id(self) -> str:
        """The id of this run."""
        return self._drive.run.id

    @property
    def scheduled_at(self) -> datetime | None:
        """The instant for which the run was started, by a schedule, `start_at=` or `delay=`; None if it was started at once."""
        start_at = self._drive.run.start_at
        return None if start_at is None else moment(start_at)

    @property
    def deps(self) -> D:
        """What was passed as `deps=`; a mapping's items are also attributes."""
        deps = self._drive.options.deps
        return cast("D", _Attributes(deps) if isinstance(deps, Mapping) else deps)

    @property
    def is_replaying(self) -> bool:
        """Whether recorded results are still being handed over: for logging, never for decisions."""
        return self._drive.is_replaying

    def idempotency_key(self, key: str) -> str:
        """Return what `current_step().idempotency_key` is in the step with this key: the same for every attempt and replay.

        In a compensation, use `current_step().undoes`. It is also right for a step that was renamed with `aliases=`.
        """
        return self._drive.idempotency_keys.of(self._key(key))

    async def continue_as(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Start this run over with these arguments, under its id and with an empty journal: nothing after this call runs.

        The store does that in one transition when the body has ended, `finally` blocks included. Signals that were not received,
        streams and progress go on; compensations are forgotten. Raises `InvalidInput`, and `ChildrenOpen` while a child of this
        run has not ended; then nothing has changed.
        """
        self._drive.start_over(args, kwargs)

    def scope(self, name: str) -> Context[D]:
        """A Context whose keys are its own, for helpers that are called more than once."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"a scope's name is a non-empty str, not {name!r}")
        return Context(self._drive, (*self._scope, name))

    @overload
    async def step(
        self,
        fn: Callable[[Unpack[Ts]], Awaitable[Result[T]] | Result[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StepOptions],
    ) -> T: ...
    @overload
    async def step(self, fn: Callable[[Unpack[Ts]], Awaitable[T]], /, *args: Unpack[Ts], **options: Unpack[StepOptions]) -> T: ...
    @overload
    async def step(self, fn: Callable[[Unpack[Ts]], T], /, *args: Unpack[Ts], **options: Unpack[StepOptions]) -> T: ...
    @overload
    async def step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], Awaitable[Result[T]] | Result[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StepOptions],
    ) -> T: ...
    @overload
    async def step(
        self, name: str, fn: Callable[[Unpack[Ts]], Awaitable[T]], /, *args: Unpack[Ts], **options: Unpack[StepOptions]
    ) -> T: ...
    @overload
    async def step(self, name: str, fn: Callable[[Unpack[Ts]], T], /, *args: Unpack[Ts], **options: Unpack[StepOptions]) -> T: ...
    async def step(self, *call: Any, key: str | None = None, **options: Any) -> Any:  # type: ignore[misc]  # mypy holds ** against required arguments
        """What `fn(*args)` gives, run once and recorded; on a replay the recorded result, or the recorded error raised.

        `fn` is async or plain (then it runs in a thread, or where `executor=` says). The key defaults to the name, which defaults
        to the function's, or for a lambda to the key; one key is used once in a run. `retry=`, `timeout=` (for each attempt),
        `at_most_once=True`, `returns=` (the type to rebuild, when `fn` is not annotated), `compensate=` (called with the result
        when the run fails or is cancelled later), and, where there is a cache, `ttl=` and `cache=False` are options; `@step(...)`
        can set them too. A cache shares only steps with `key=`.
        """
        name, fn, args = _split_name(call)
        spec, drive = spec_of(fn), self._drive
        plan = spec.plan_with(options) if options else spec.plan
        if name is None:
            name = _step_name(spec, fn, key)
        if drive.calls.cursor.entries and not (
            self._scope or plan.aliases or plan.compensate or drive.caching or drive.publisher.subscribers
        ):
            entry = drive.calls.take_next(name if key is None else key, "step")
            if entry is not None:
                return replay_step(drive, entry, plan, args)
        aliases = plan.aliases if key is None or "aliases" in options else ()
        return await run_step(drive, self._step_call(name, fn, args, key, plan, aliases))

    @overload
    async def child(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Result[T]]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[ChildOptions],
    ) -> T: ...
    @overload
    async def child(
        self, workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], /, *args: Unpack[Ts], **options: Unpack[ChildOptions]
    ) -> T: ...
    async def child(self, workflow: Any, /, *args: Any, key: str | None = None, **options: Any) -> Any:  # type: ignore[misc]  # mypy holds ** against required arguments
        """What a run of `workflow` gives that is started here and belongs to this run; its error is raised.

        The key defaults to the workflow's name, and the id of the run to `parent/key`. A cancelled child raises `RunCancelled`, a
        dead one `RunDead`. Options that are stored with a run hold for the child (`id=`, `queue=`, `priority=`, ...); queue and
        priority default to those of this run. A child whose wait is cancelled is cancelled too.
        """
        return await run_child(self._drive, self._child_call(workflow, args, self._child_key(workflow, key), options))

    @overload
    def start_child(
        self,
        workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, Result[T]]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[StartChildOptions],
    ) -> Child[T]: ...
    @overload
    def start_child(
        self, workflow: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], /, *args: Unpack[Ts], **options: Unpack[StartChildOptions]
    ) -> Child[T]: ...
    def start_child(  # type: ignore[misc]  # mypy holds ** against required arguments
        self, workflow: Any, /, *args: Any, key: str | None = None, detached: bool = False, **options: Any
    ) -> Child[Any]:
        """As `ctx.child`, without waiting: a handle that can be awaited, and cancelled. It has the child's `id`.

        A child that was not awaited is awaited at the end of the body, and its error fails this run. When this run fails or is
        cancelled, the child is cancelled. A `detached` one is left alone.
        """
        call = self._child_call(workflow, args, self._child_key(workflow, key), options, detached=detached)
        return Child(self._drive, call)

    def _child_call(
        self, workflow: Any, args: tuple[Any, ...], key: str, options: dict[str, Any], *, detached: bool = False
    ) -> ChildCall:
        call = child_call(workflow, args, {}, key, options, detached=detached)
        if call.plan.compensate is not None:
            closing_of(self._drive).add(call)
        return call

    def _child_key(self, workflow: Any, key: str | None) -> str:
        return self._key(getattr(workflow, "name", "") or "child" if key is None else key)

    @overload
    async def transaction(
        self,
        fn: Callable[[StepTransaction, Unpack[Ts]], Awaitable[Result[T]] | Result[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[TransactionOptions],
    ) -> T: ...
    @overload
    async def transaction(
        self,
        fn: Callable[[StepTransaction, Unpack[Ts]], Awaitable[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[TransactionOptions],
    ) -> T: ...
    @overload
    async def transaction(
        self, fn: Callable[[StepTransaction, Unpack[Ts]], T], /, *args: Unpack[Ts], **options: Unpack[TransactionOptions]
    ) -> T: ...
    @overload
    async def transaction(
        self,
        name: str,
        fn: Callable[[StepTransaction, Unpack[Ts]], Awaitable[Result[T]] | Result[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[TransactionOptions],
    ) -> T: ...
    @overload
    async def transaction(
        self,
        name: str,
        fn: Callable[[StepTransaction, Unpack[Ts]], Awaitable[T]],
        /,
        *args: Unpack[Ts],
        **options: Unpack[TransactionOptions],
    ) -> T: ...
    @overload
    async def transaction(
        self,
        name: str,
        fn: Callable[[StepTransaction, Unpack[Ts]], T],
        /,
        *args: Unpack[Ts],
        **options: Unpack[TransactionOptions],
    ) -> T: ...
    async def transaction(self, *call: Any, key: str | None = None, **options: Any) -> Any:  # type: ignore[misc]  # mypy holds ** against required arguments
        """What `fn(transaction, *args)` gives. What it writes through `transaction` and the record of the step commit together.

        It is a step in every other way, with `key=`, `retry=`, `returns=` and `timeout=` (5 seconds unless it is given). `fn` is
        async and uses `await transaction.execute(sql, values)` or the driver's own `transaction.connection`; on SQLite it may be
        plain, and is then called in the thread of that connection. What it raises is rolled back, and so is an `Err` that it
        returns. Raises `StoreCapabilityError` on a store without transactions.
        """
        name, fn, args = _split_name(call)
        spec = spec_of(fn)
        return await run_step(self._drive, self._transaction_call(name or _step_name(spec, fn, key), fn, args, key, options))

    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[Result[T]] | Result[T]], items: Iterable[I], /, **options: Unpack[MapOptions]
    ) -> list[T]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[Result[T]] | Result[T]], items: Iterable[I], /, **options: Unpack[CollectOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[Result[T]] | Result[T]], items: Iterable[I], /, **options: Unpack[ToleratingOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[Result[T]] | Result[T]], items: Iterable[I], /, **options: Unpack[EnoughOptions]
    ) -> list[Result[T] | None]: ...
    @overload
    async def map(self, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[MapOptions]) -> list[T]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[CollectOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[ToleratingOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[EnoughOptions]
    ) -> list[Result[T] | None]: ...
    @overload
    async def map(self, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[MapOptions]) -> list[T]: ...
    @overload
    async def map(self, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[CollectOptions]) -> list[Result[T]]: ...
    @overload
    async def map(self, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[ToleratingOptions]) -> list[Result[T]]: ...
    @overload
    async def map(
        self, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[EnoughOptions]
    ) -> list[Result[T] | None]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], Awaitable[Result[T]] | Result[T]], items: Iterable[I], /, **options: Unpack[MapOptions]
    ) -> list[T]: ...
    @overload
    async def map(
        self,
        name: str,
        fn: Callable[[I], Awaitable[Result[T]] | Result[T]],
        items: Iterable[I],
        /,
        **options: Unpack[CollectOptions],
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self,
        name: str,
        fn: Callable[[I], Awaitable[Result[T]] | Result[T]],
        items: Iterable[I],
        /,
        **options: Unpack[ToleratingOptions],
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self,
        name: str,
        fn: Callable[[I], Awaitable[Result[T]] | Result[T]],
        items: Iterable[I],
        /,
        **options: Unpack[EnoughOptions],
    ) -> list[Result[T] | None]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[MapOptions]
    ) -> list[T]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[CollectOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[ToleratingOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], /, **options: Unpack[EnoughOptions]
    ) -> list[Result[T] | None]: ...
    @overload
    async def map(self, name: str, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[MapOptions]) -> list[T]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[CollectOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[ToleratingOptions]
    ) -> list[Result[T]]: ...
    @overload
    async def map(
        self, name: str, fn: Callable[[I], T], items: Iterable[I], /, **options: Unpack[EnoughOptions]
    ) -> list[Result[T] | None]: ...
    async def map(
        self,
        *call: Any,
        on_error: OnError = "raise",
        max_failures: int | None = None,
        enough: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """`fn(item)` as a step for every item, at most `concurrency` at a time, results in the order of the items.

        Items are keyed `name[i]`, or by `key(item)`, and must come from the input or from a step. A workflow as `fn` starts a
        child for every item, all at once unless `concurrency=` is given, with `queue=`, `priority=`, `deadline=` and `metadata=`.

        The first error cancels the rest and is raised. With `on_error="collect"` the list holds `Ok` and `Err` instead;
        `max_failures=2` does so for two errors and raises the third. With `enough=5` the map returns when five items have
        succeeded, and cancels the rest: the list holds `Ok`, `Err`, and None where an item had not ended.
        """
        name, fn, items = _split_map_call(call)
        policy = MapPolicy.of(len(items), on_error, max_failures, enough)
        has_children = is_workflow(fn)
        concurrency = check_positive(options.pop("concurrency", max(1, len(items)) if has_children else 32), "concurrency")
        key = options.pop("key", None)
        if key is not None and not callable(key):
            raise TypeError(f"key= of ctx.map is a function that makes a key from an item, not {key!r}")
        each, former = self._map_children(name, fn, key, options) if has_children else self._map_steps(name, fn, key, options)
        self._drive.calls.check_place(name)
        with contextlib.suppress(Exception):  # what `key` raises for an item is raised by that item's call
            self._drive.calls.cursor.expect(lambda: map(self._key, _map_keys((name, *former), items, key)))
        return await run_map(items, each, concurrency, policy)

    def _map_steps(
        self, name: str, fn: Any, key: Callable[[Any], str] | None, options: dict[str, Any]
    ) -> tuple[Callable[[int, Any], Awaitable[Any]], tuple[str, ...]]:
        """What makes a step of an item, and the former names of the step."""
        spec = spec_of(fn)
        plan = spec.plan_with(options) if options else spec.plan

        async def each(index: int, item: Any) -> Any:
            if key is not None:
                return await run_step(self._drive, self._step_call(name, fn, (item,), key(item), plan))
            aliases = tuple(f"{alias}[{index}]" for alias in plan.aliases)
            call = self._step_call(name, fn, (item,), f"{name}[{index}]", plan, aliases, may_share=False)
            return await run_step(self._drive, call)

        return each, plan.aliases

    def _map_children(
        self, name: str, workflow: Any, key: Callable[[Any], str] | None, options: dict[str, Any]
    ) -> tuple[Callable[[int, Any], Awaitable[Any]], tuple[str, ...]]:
        """What makes a child of an item. Children have no former names."""
        if "id" in options:
            raise TypeError("id= is for one child; the children of ctx.map have ids made from their keys: pass key=")

        async def each(index: int, item: Any) -> Any:
            item_key = self._key(f"{name}[{index}]" if key is None else key(item))
            return await run_child(self._drive, self._child_call(workflow, (item,), item_key, options))

        return each, ()

    @overload
    async def race(self, a: Racer[T], b: Racer[U], /, *, key: str | None = None) -> T | U: ...
    @overload
    async def race(self, *racers: Racer[T], key: str | None = None) -> T: ...
    @overload
    async def race(self, *racers: Racer[T], wins: int, key: str | None = None) -> list[T]: ...
    @overload
    async def race(self, name: str, a: Racer[T], b: Racer[U], /, *, key: str | None = None) -> T | U: ...
    @overload
    async def race(self, name: str, /, *racers: Racer[T], key: str | None = None) -> T: ...
    @overload
    async def race(self, name: str, /, *racers: Racer[T], wins: int, key: str | None = None) -> list[T]: ...
    async def race(self, *call: Any, wins: int | None = None, key: str | None = None) -> Any:
        """What the first of these coroutines to end gives, or raises; the others are cancelled.

        With `wins=2` it waits for two, and gives a list of what they gave, in the order in which they ended; an error of one of
        them is raised.

        `await ctx.race(ctx.wait_for_signal("paid"), remind_every_day(ctx))`
        """
        name, racers = (call[0], call[1:]) if call and isinstance(call[0], str) else ("race", call)
        if not racers or not all(asyncio.iscoroutine(racer) for racer in racers):
            raise TypeError("ctx.race takes coroutines: ctx.race(ctx.step(a), ctx.step(b))")
        if wins is not None and not (type(wins) is int and 1 <= wins <= len(racers)):
            for racer in racers:
                racer.close()
            raise ValueError(f"wins={wins!r} of a race between {len(racers)}; one at least can win, and at most all of them")
        calls, recorded_key = self._drive.calls, self._key(name if key is None else key)
        try:
            await calls.admitted()
            calls.use(recorded_key, "race")
        except BaseException:
            for racer in racers:
                racer.close()
            raise
        try:
            values = await run_race(racers, wins or 1)
        except asyncio.CancelledError:
            calls.free(recorded_key)
            raise
        return values[0] if wins is None else values

    async def sleep(self, name: str, duration: Duration, *, key: str | None = None) -> None:
        """Return when `duration` has passed since the first time this was reached, whatever happened meanwhile."""
        length = microseconds(duration)
        await sleep(self._drive, self._key(name if key is None else key), name, lambda: self._drive.clock.now() + length)

    async def sleep_until(
        self, name: str, at: datetime | None = None, *, cron: str | None = None, tz: str | None = None, key: str | None = None
    ) -> None:
        """Return when the (aware) datetime `at`, as it was the first time this was reached, has come.

        With `cron="0 9 * * 1-5"` instead, when it next comes to pass in the time zone `tz`, or UTC.
        """
        if (at is None) == (cron is None):
            raise TypeError("sleep_until takes a datetime or cron=, one of them")
        if at is not None:
            if tz is not None:
                raise TypeError("tz= is for cron=; a datetime has its own time zone")
            known = instant(at, what="sleep_until")
            deadline: Callable[[], int] = lambda: known  # noqa: E731
        else:
            from perdure.model.recurrence import recurrence  # imported only if there is a cron expression

            now = self._drive.clock.now
            when = recurrence(cron, None, tz, now())
            deadline = lambda: when.after(now()) or MAX_INSTANT  # noqa: E731
        await sleep(self._drive, self._key(name if key is None else key), name, deadline)

    @overload
    async def wait_for_signal(
        self, name: str, *, key: str | None = None, timeout: Duration | None = None, returns: type[T]
    ) -> T: ...
    @overload
    async def wait_for_signal(
        self, name: str, *, key: str | None = None, timeout: Duration, default: U, returns: type[T]
    ) -> T | U: ...
    @overload
    async def wait_for_signal(
        self, name: str, *, key: str | None = None, timeout: Duration | None = None, returns: Any = ...
    ) -> Any: ...
    @overload
    async def wait_for_signal(
        self, name: str, *, key: str | None = None, timeout: Duration, default: Any, returns: Any = ...
    ) -> Any: ...
    async def wait_for_signal(
        self,
        name: str,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
        default: Any = MISSING,
        returns: Any = Any,
    ) -> Any:
        """The payload of the next signal called `name`: also one that came before this wait. `returns=` is its type.

        With `timeout=`, `TimeoutError` is raised when none came in time, or `default` returned.
        """
        check_signal_name(name)
        if default is not MISSING and timeout is None:
            raise ValueError("default= is what a time-out gives, so it needs timeout=")
        deadline: Callable[[], int] | None = None
        if timeout is not None:
            length = microseconds(timeout, what="timeout")
            deadline = lambda: min(self._drive.clock.now() + length, MAX_INSTANT)  # noqa: E731
        return await wait_for_signal(self._drive, self._key(name if key is None else key), name, deadline, default, returns)

    @overload
    async def approve(
        self,
        name: str,
        payload: T,
        *,
        key: str | None = None,
        expires_in: Duration | None = None,
        assignees: Collection[str] = (),
    ) -> Approved[T] | Rejected | Expired: ...
    @overload
    async def approve(
        self,
        name: str,
        payload: Any = None,
        *,
        key: str | None = None,
        expires_in: Duration | None = None,
        assignees: Collection[str] = (),
        returns: type[T],
    ) -> Approved[T] | Rejected | Expired: ...
    @overload
    async def approve(
        self,
        name: str,
        payload: Any = None,
        *,
        key: str | None = None,
        expires_in: Duration | None = None,
        assignees: Collection[str] = (),
        returns: Any = ...,
    ) -> Approved[Any] | Rejected | Expired: ...
    async def approve(
        self,
        name: str,
        payload: Any = None,
        *,
        key: str | None = None,
        expires_in: Duration | None = None,
        assignees: Collection[str] = (),
        returns: Any = MISSING,
    ) -> Any:
        """What a person decides: `Approved` with the payload, which may have been edited, `Rejected`, or `Expired`.

        Decided by `runtime.approve` and `runtime.reject`, or through a link with an approval token, and only once. With
        `assignees`, only these people may decide. `returns=` is the type of the payload, also when it was edited; by default that
        of `payload`. With `expires_in`, the approval expires when no decision came in time. The key defaults to `approve:NAME`:
        the step that is approved may have the name itself.
        """
        check_id(name, "an approval's name")
        deadline: Callable[[], int] | None = None
        if expires_in is not None:
            length = microseconds(expires_in, what="expires_in")
            deadline = lambda: min(self._drive.clock.now() + length, MAX_INSTANT)  # noqa: E731
        hint = returns if returns is not MISSING else Any if payload is None else type(payload)
        request = ApprovalRequest(payload, check_assignees(assignees), hint)
        return await wait_for_approval(self._drive, self._key(default_key(name) if key is None else key), name, deadline, request)

    def timeout(self, name: str, duration: Duration, *, key: str | None = None) -> TimeLimit:
        """`async with ctx.timeout("review", "2d"):` cancels the block and raises `TimeoutError` when the time is up."""
        length = microseconds(duration, what="timeout")
        return TimeLimit(self._drive, self._key(name if key is None else key), name, lambda: self._drive.clock.now() + length)

    async def patched(self, name: str) -> bool:
        """Whether this run takes the new code: `if await ctx.patched("fraud-check"):` around steps that were inserted.

        False for a run whose journal is already past this point, True for all others. True is recorded, so a run decides once;
        asked again under the same name, it gives the same.
        """
        check_id(name, "a patch's name")
        return await is_patched(self._drive, self._key(f"patched:{name}"), name)

    def set_progress(self, value: Any) -> None:
        """Show how far the run has come: any value that can be stored, which `run.progress()` gives, also after the end.

        The last value counts. Setting it often is cheap: it is written a few times a second at most, and before the run suspends
        or ends. Nothing is recorded, so it may be called in a step's function too, also in its thread. Raises
        `StoreCapabilityError` when the store keeps no progress.
        """
        self._drive.set_progress(value)

    async def emit(self, stream: str, item: Any, *, max_items: int = MAX_STREAM_ITEMS) -> None:
        """Queue an item for the readers of `run.stream(stream)`: any value that can be stored, of at most 1 MiB.

        It is sent with the next record or within 50 ms; the call waits only while the store does not keep up. A replay emits
        nothing twice: the body's items are counted in each stream, so code that is changed should not emit more or fewer of them
        before what is recorded. In a step's function use `current_step().emit`. Raises `StreamFull` when the stream has
        `max_items`, `StreamEnded`, `ValueNotStorable`, and `StoreCapabilityError` when the store keeps no streams. Without a
        store nothing is kept, since nothing could read it.
        """
        await emit_in_body(self._drive, stream, item, max_items)

    async def end_stream(self, stream: str) -> None:
        """End a stream: its readers stop there, and nothing more can be emitted to it. The end of the run ends every stream."""
        await end_stream(self._drive, stream)

    def now(self) -> datetime:
        """The time of the last recorded result that reached the body: the same on every replay."""
        return moment(self._drive.calls.cursor.last_at)

    def uuid4(self, *, key: str | None = None) -> uuid.UUID:
        """A random-looking UUID, the same on every replay. Numbered in this scope; `key=` makes it independent of order."""
        return uuid.UUID(bytes=self._derive("uuid4", key, 16), version=4)

    def random(self, *, key: str | None = None) -> float:
        """A random-looking number from 0.0 up to 1.0, the same on every replay. Numbered in this scope, or by `key=`."""
        return int.from_bytes(self._derive("random", key, 7), "big") / (1 << 56)

    def _derive(self, what: str, key: str | None, size: int) -> bytes:
        here = current.get()
        if not isinstance(here, BodyQueue):
            raise RuntimeError(f"ctx.{what}() belongs in the body of a workflow; in a step use the standard library")
        self._drive.calls.check_place(what)
        if key is None:
            number = self._drive.calls.counters.get((self._scope, what), 0)
            self._drive.calls.counters[self._scope, what] = number + 1
            label = f"#{number}"
        else:
            label = f"={escape(check_id(key, 'a key'))}"
        text = "/".join([what, *map(escape, self._scope), label])
        return hashlib.blake2b(text.encode(), key=self._drive.run.seed, digest_size=size).digest()

    def _key(self, key: str) -> str:
        """The key as it is recorded."""
        if not self._scope and (check_id(key, "a step's key")[0] not in "/%" or self._drive.calls.is_foreign(key)):
            return key  # an imported snapshot of another library has its keys as they are written, without our escapes
        return full_key(self._scope, key)

    def _step_call(
        self,
        name: str,
        fn: Any,
        args: tuple[Any, ...],
        key: str | None,
        plan: StepPlan,
        aliases: tuple[str, ...] = (),
        *,
        may_share: bool = True,
    ) -> StepCall:
        recorded_key = self._key(name if key is None else key)
        names: tuple[str, ...] = ()
        if aliases:
            names = (*map(self._key, aliases), recorded_key)
            if not self._drive.calls.cursor.is_known(recorded_key):
                recorded_key = self._drive.calls.find_former_key(names) or recorded_key
        # The user's key names the value for other runs. A name, or an item's number, says nothing about the arguments.
        caching = self._drive.caching if key is not None and may_share and plan.may_cache else None
        if key is not None:
            check_id(name, "a step's name")
        call = StepCall(recorded_key, name, fn, args, plan, caching, names)
        if plan.compensate is not None and not self._drive.calls.is_in_use(recorded_key):
            closing_of(self._drive).add(call)
        return call

    def _transaction_call(
        self, name: str, fn: Any, args: tuple[Any, ...], key: str | None, options: Mapping[str, Any]
    ) -> StepCall:
        if other := options.keys() - TransactionOptions.__annotations__.keys():
            raise TypeError(f"ctx.transaction takes key, retry, timeout and returns, not {', '.join(sorted(other))}")
        plan = spec_of(fn).plan_with(options)
        if plan.executor is not None:
            raise TypeError(f"{name!r} runs in the thread or on the loop of its connection, so it cannot have an executor=")
        if plan.compensate is not None:
            raise TypeError(f"{name!r} is rolled back when it fails; to undo it later, use a step with compensate= beside it")
        timeout = DEFAULT_TIMEOUT if plan.timeout is None else plan.timeout
        # Committed together with its record it runs exactly once, so there is no intent to record.
        plan = msgspec.structs.replace(plan, is_bare=False, at_most_once=False, timeout=timeout)
        aliases = plan.aliases if key is None else ()
        call = self._step_call(name, fn, args, key, plan, aliases, may_share=False)
        return msgspec.structs.replace(call, attempts=TransactionAttempts)


class _Attributes(Mapping[str, Any]):
    """A mapping whose items are attributes as well."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = items

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(
                f"deps has no {name!r}; it has {', '.join(sorted(map(str, self._items))) or 'nothing'}"
            ) from None


def _split_name(call: tuple[Any, ...]) -> tuple[str | None, Any, tuple[Any, ...]]:
    """A call's positional arguments as (name or None, function, the rest)."""
    if call and isinstance(call[0], str):
        if len(call) == 1:
            raise TypeError(f"ctx.step({call[0]!r}) has a name but no function")
        return call[0], call[1], call[2:]
    if not call:
        raise TypeError("ctx.step takes a function and its arguments")
    return None, call[0], call[1:]


def _split_map_call(call: tuple[Any, ...]) -> tuple[str, Any, list[Any]]:
    """The positional arguments of ctx.map as (name, function, items)."""
    name, fn, rest = _split_name(call)
    if len(rest) != 1 or not isinstance(rest[0], Iterable):
        raise TypeError("ctx.map takes a function and the items: ctx.map(fn, items) or ctx.map(name, fn, items)")
    if name is None:
        name = fn.name if is_workflow(fn) else _step_name(spec_of(fn), fn)
    return str(name), fn, list(rest[0])


def _map_keys(names: tuple[str, ...], items: list[Any], key: Callable[[Any], str] | None) -> list[str]:
    """The keys under which the items of a map are recorded."""
    if key is not None:
        return [key(item) for item in items]
    return [f"{name}[{index}]" for name in names for index in range(len(items))]


def _step_name(spec: StepSpec, fn: Any, key: str | None = None) -> str:
    """The name under which a step is recorded that was called without one: the function's, or else its key."""
    name = key if spec.name is None else spec.name
    if name is None and is_mock(fn):
        raise TypeError(
            f"{fn!r} has no name to be recorded under; give it one, as in Mock(name='charge'), or pass key= to ctx.step"
        )
    if name is None:
        raise TypeError(
            f"{fn!r} has no name to be recorded under; pass one before it: ctx.step('charge', lambda: ...), "
            "or a key: ctx.step(lambda: ..., key='user:1')"
        )
    return name


def escape(part: str) -> str:
    """`part` without slashes, so that parts can be joined by them."""
    return part.replace("%", "%25").replace("/", "%2F")


def full_key(scope: tuple[str, ...], key: object) -> str:
    """The key as it is recorded."""
    text = check_id(key, "a step's key")
    if not scope:
        return text if text[0] not in "/%" else check_id(escape(text), "a step's key")
    return check_id("/" + "/".join(escape(part) for part in (*scope, text)), "a step's key with its scope")
