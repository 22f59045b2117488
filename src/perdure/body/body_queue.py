"""The ready queue of one body, on the event loop of its host.

Each body has its own queue of ready callbacks. The body rests when that queue is empty: exactly then, whatever its tasks,
futures, locks and libraries do. Entries reach a body only at rest (`BodyOwner.rest`), so a replay that delivers the same entries
in the same order takes the same path.

The loop object stays that of the host: locks, clients and connections of the process work in a body as they do elsewhere. While
bodies are in memory six methods of the loop object are replaced (`_LoopMethods`). Each looks which body the context belongs to
and serves that body, or calls the original with exactly what it was given. Steps, listeners and everything of the engine run
outside the context of a body. The pump, which empties the queue, is one callback of the host, never inside a task.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import time
import traceback
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, Protocol

from perdure.aio.own_tasks import current
from perdure.aio.task_order import TaskCreator
from perdure.body.asyncio_internals import (
    GatheringFuture,
    TaskStep,
    callbacks_of,
    do_not_log_destruction,
    is_about_to_be_cancelled,
    is_time_limit,
    owner_of,
    waited_for,
)
from perdure.model.durations import MICROSECOND
from perdure.model.logs import log
from perdure.stepspec import StepInfo

# A body that never rests (a loop around sleep(0)) counts as resting after so many turns.
TURNS: Final = 200
# After so many seconds the pump lets the host have its turn. It looks at the clock after so many callbacks.
SLICE: Final = 0.005
_LOOK_EVERY: Final = 64
# How long, at least, the pump leaves the loop to the host before it resumes a body that does not rest.
SHORTEST_PAUSE: Final = 0.001
# A slice that took so many seconds is logged: one callback of the body has kept all other runs from going on.
_LONG: Final = 1.0
# How much of a task's hash is the number of its creation; the rest is the run's.
_NUMBER_BITS: Final = 32
_METHODS: Final = ("call_soon", "call_soon_threadsafe", "create_task", "call_later", "call_at", "time")

_perf: Final = time.perf_counter
_current_task: Final = asyncio.current_task


class Handle(list[Any]):
    """A callback in the queue: its context, the function and the arguments. A list, since none is made faster."""

    __slots__ = ()

    def cancel(self) -> None:
        self[:] = (None, None, None)

    def cancelled(self) -> bool:
        return self[0] is None

    def __repr__(self) -> str:
        return "<Handle cancelled>" if self[0] is None else f"<Handle {self[1]!r}>"

    def __hash__(self) -> int:  # type: ignore[override]  # a list has none
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _TracedHandle(Handle):
    """In asyncio's debug mode: it knows where it was made."""

    __slots__ = ("source",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        super().__init__(parts)
        self.source = traceback.extract_stack(sys._getframe(2), limit=10)  # noqa: SLF001 - documented

    def __repr__(self) -> str:
        where = self.source[-1]
        return f"{super().__repr__()[:-1]} made at {where.filename}:{where.lineno}>"


class BodyTimer(events.TimerHandle):
    """A sleep or a time limit of asyncio in a body: that it is over is an entry of the journal, under the name of its instant."""

    __slots__ = ("armed", "at", "body", "fires_at", "name", "set_at")

    def __init__(self, body: BodyQueue, when: float, at: int, name: str, callback: Any, args: Any, context: Any) -> None:
        super().__init__(when, callback, args, body.loop, context)
        self.body = body
        # Its instant in microseconds, as the body sees it, when it fires, and when it was set.
        self.at = self.fires_at = at
        self.set_at = body.now
        self.name = name
        # What will fire it, once the run is live.
        self.armed: Any = None

    @property
    def waiter(self) -> object:
        """Return the future that it resolves, or the task that it cancels. Who waits for that has no own wait."""
        args: Any = self._args
        return args[0] if args else None

    def cancel(self) -> None:
        if not self.cancelled():
            self.body.timers.pop(self.name, None)
            self.disarm()
        events.Handle.cancel(self)  # it is in no heap of the loop

    def disarm(self) -> None:
        """Fire no more."""
        if self.armed is not None:
            self.armed.cancel()
            self.armed = None


class BodyTask(asyncio.Task[Any]):
    """A task of a body. It hashes by the number of its creation, so that sets of tasks iterate alike on every replay."""

    def __init__(self, body: BodyQueue, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self.body = body
        self.number = number
        # The task that has made it while it was unwinding, when the body left memory.
        self.cleans_up_for: asyncio.Task[Any] | None = None
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it. From outside the body (Ctrl-C, a time limit of the host) that means that the body has to leave memory."""
        body = self.body
        # Without a store the functions of steps run in this task, and set time limits of their own.
        is_by_body = body.has_steps if isinstance(current.get(), StepInfo) else body.is_pumping
        if is_by_body or body.is_closing or body.is_over or self.done():
            return super().cancel(msg)
        body.is_interrupted = True
        body.schedule()
        return True


class JoinFuture(asyncio.Future[None]):
    """A future that waits for other tasks of the body, so that nothing but the body can resolve it."""


class _FirstTurn:
    """Stands in for a body in the context of a step while its task is made: the first turn of the task lands here."""

    __slots__ = ("handle", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.handle: Any = None


class BodyOwner(Protocol):
    """The drive, as its body sees it."""

    def rest(self, *, is_spinning: bool) -> bool:
        """The body rests, or spins: let something reach it. Return whether to ask again once it has dealt with that."""
        ...


class BodyQueue(TaskCreator):
    """The ready callbacks of one body, its tasks and its timers."""

    __slots__ = (
        "__weakref__",
        "_count",
        "_foreign",
        "_instants",
        "_left_of_turn",
        "_methods",
        "_new_handle",
        "_owner",
        "_seen",
        "_turns",
        "callback",
        "context",
        "drive",
        "has_steps",
        "interrupt",
        "is_closing",
        "is_idle",
        "is_interrupted",
        "is_over",
        "is_pumping",
        "loop",
        "now",
        "ready",
        "run_id",
        "tasks",
        "time_offset",
        "timer",
        "timers",
        "timers_made",
        "unarmed",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, owner: BodyOwner, run_id: str, seed: bytes, began_at: int, now: int
    ) -> None:
        super().__init__(int.from_bytes(seed[:4], "big") << _NUMBER_BITS)
        self.loop = loop
        self.run_id = run_id
        self._owner: BodyOwner | None = owner
        # The drive, for calls of other workflows in the body, which become children.
        self.drive: Any = owner
        self._methods = methods = _methods_of(loop)
        methods.enter()
        self._new_handle: Callable[[tuple[Any, ...]], Handle] = _TracedHandle if loop.get_debug() else Handle
        self.ready: deque[Handle] = deque()
        self.tasks: set[BodyTask] = set()
        # Tasks that the body made without the loop, by `asyncio.Task(...)`.
        self._foreign: list[weakref.ref[asyncio.Task[Any]]] = []
        # The instant of the last delivered entry, in microseconds, and what the time of the loop is at instant 0.
        self.now = began_at
        self.time_offset = methods.time() - now / MICROSECOND
        # Timers that are set, by name; those that nothing will fire yet; and how many there were of each instant, and in all.
        self.timers: dict[str, BodyTimer] = {}
        self.unarmed: list[BodyTimer] = []
        self._instants: dict[int, int] = {}
        self.timers_made = 0
        # The callback that the pump calls just now; inside that of a timer, the timer.
        self.callback: Any = None
        self.timer: BodyTimer | None = None
        # How many tasks were made, how many turns the queue has had since the last rest, and what is left of the present one.
        self._count = self._turns = self._left_of_turn = 0
        self.is_idle = True
        self.is_pumping = False
        # Whether functions of steps run in tasks of the body.
        self.has_steps = False
        # Whether the body leaves memory or has ended: what its tasks still do is cleaning up.
        self.is_closing = False
        self.is_over = False
        # Whether a task of the body was cancelled from outside, and what a callback has raised to end the process.
        self.is_interrupted = False
        self.interrupt: BaseException | None = None
        # The context of the engine: nothing that is called in it belongs to the body.
        self.context = contextvars.copy_context()
        self.context.run(current.set, None)

    # The queue.

    def schedule(self) -> None:
        """Let the pump run soon."""
        if self.is_idle and not self.is_over:
            self.is_idle = False
            self._methods.call_soon(self._pump, context=self.context)

    def pump_now(self) -> None:
        """Run the pump now, which saves a turn of the loop, where no task runs; otherwise soon."""
        if self.is_pumping or self.is_over or _current_task(self.loop) is not None:
            self.schedule()
        else:
            self.context.copy().run(self._pump)

    def enqueue(self, handle: Handle) -> None:
        """Put a callback into the queue; on the host's when the body is over. Called by the host."""
        if not self.is_over:
            self.ready.append(handle)
            self.schedule()
        elif handle[0] is not None:
            self._methods.call_soon(handle[1], *handle[2], context=handle[0])

    def is_alone(self) -> bool:
        """Return whether the running task would leave the body at rest if it waited now.

        That is so if nothing else is ready, the pump itself has called the task (a task that was started eagerly has another one
        below it), and the task is not about to be cancelled.
        """
        if self.ready or self.callback is None:
            return False
        task = _current_task(self.loop)
        return task is not None and owner_of(self.callback) is task and not is_about_to_be_cancelled(task)

    def _pump(self) -> None:  # noqa: C901, PLR0912, PLR0915 - the one loop that all code of a body passes
        if self.is_over or self.is_pumping:
            return
        ready, popleft, owner = self.ready, self.ready.popleft, self._owner
        turns, left, calls, again, is_spinning, began = self._turns, self._left_of_turn, 0, False, False, _perf()
        end = began + SLICE
        self.is_pumping, self.is_idle, self._turns, self._left_of_turn = True, False, 0, 0
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        try:
            while owner is not None:
                while ready:
                    turn, left = left or len(ready), 0
                    for done in range(1, turn + 1):
                        context, callback, args = handle = popleft()
                        if context is not None:
                            self.callback = callback
                            try:
                                context.run(callback, *args)
                            except (SystemExit, KeyboardInterrupt):
                                raise
                            except BaseException as error:  # noqa: BLE001 - as the loop does with a callback
                                self._report(handle, error)
                        calls += 1
                        if not calls % _LOOK_EVERY and _perf() > end:
                            again, self._turns, self._left_of_turn = True, turns, turn - done
                            return
                    turns += 1
                    if turns >= TURNS:
                        break
                self.callback = None
                again = owner.rest(is_spinning=bool(ready))
                if self._owner is None:  # the body is over
                    return
                if turns >= TURNS:
                    is_spinning = not again
                    return
                turns = 0
                if not again and not ready:
                    return
                calls += 1
                if not calls % 8 and _perf() > end:
                    return
        except (SystemExit, KeyboardInterrupt) as interrupt:
            self.interrupt, again = interrupt, True
            if isinstance(interrupt, KeyboardInterrupt):
                raise
        except Exception as error:  # noqa: BLE001 - a defect of the engine must not leave a run that nothing moves
            self.interrupt, again = error, True
        finally:
            sys.set_asyncgen_hooks(*hooks)
            self.callback = None
            self.is_pumping, self.is_idle = False, True
            seconds = _perf() - began
            if is_spinning and ready and not self.is_over:  # as anyio does while it cancels a scope: it gets half of the time
                self._methods.call_later(max(seconds, SHORTEST_PAUSE), self.schedule, context=self.context)
            elif again or ready:
                self.schedule()
            if seconds > _LONG:
                log.warning("the workflow function of run %r has kept the event loop busy for %.1f s", self.run_id, seconds)

    def _report(self, handle: Handle, error: BaseException) -> None:
        what = f"a callback in the workflow function of run {self.run_id!r}: {handle!r}"
        self.loop.call_exception_handler({"message": f"Exception in {what}", "exception": error})

    # Its tasks.

    def start(self, coro: Coroutine[Any, Any, Any], name: str) -> BodyTask:
        """Run this as the first task of the body, in a copy of the present context."""
        context = contextvars.copy_context()
        context.run(current.set, self)
        return self._new_task(coro, self.number, loop=self.loop, name=name, context=context)

    def create_task(self, coro: Coroutine[Any, Any, Any], options: dict[str, Any]) -> BodyTask:
        """Make a task of the body, as the loop does."""
        self._count += 1
        task = self._new_task(self.next_to_start(coro), self.number + self._count, loop=self.loop, **options)
        if self.is_closing:
            creator = _current_task(self.loop)
            is_unwinding = creator is not None and (creator.cancelling() or getattr(creator, "cleans_up_for", None))
            task.cleans_up_for = creator if is_unwinding else None
        return task

    def _new_task(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> BodyTask:
        task = BodyTask(self, number, coro, **options)
        do_not_log_destruction(task)
        if not task.done():  # one that was started eagerly may have ended
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard, context=self.context)
        return task

    def note_foreign(self, task: object) -> None:
        """A task takes its first turn in the body that the body has made without the loop."""
        if not isinstance(task, asyncio.Task) or isinstance(task, BodyTask):
            return
        if all(known() is not task for known in self._foreign):
            self._foreign.append(weakref.ref(task))

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended, in the order of their creation."""
        foreign = [task for task in (known() for known in self._foreign) if task is not None and not task.done()]
        return [*sorted((task for task in self.tasks if not task.done()), key=lambda task: task.number), *foreign]

    def has_own_waits(self, known: Collection[int]) -> bool:
        """Return whether a task waits for what the host may resolve at any time.

        That is anything but these futures (by id), a task of the body, a `gather`, and a sleep of asyncio.
        """
        asleep = {id(timer.waiter) for timer in self.timers.values()}
        foreign = [task for task in (known() for known in self._foreign) if task is not None and not task.done()]
        for task in (*self.tasks, *foreign):
            waited = waited_for(task)
            if waited is None or isinstance(waited, JoinFuture | BodyTask | GatheringFuture):
                continue
            if id(waited) in known or id(waited) in asleep:
                continue
            if any(waited is other() for other in self._foreign):
                continue
            return True
        return False

    def wake_without(self, task: asyncio.Task[Any]) -> bool:
        """Cancel a task of the body, but not a task of the host that it waits for. False if it waits for none."""
        waited = waited_for(task)
        if not isinstance(waited, asyncio.Task) or isinstance(waited, BodyTask):
            return False
        if any(waited is other() for other in self._foreign):
            return False
        for callback, context in callbacks_of(waited):
            if owner_of(callback) is task:
                waited.remove_done_callback(callback)
                dead: asyncio.Future[None] = asyncio.Future(loop=self.loop)
                dead.cancel()
                self.enqueue(Handle((context, callback, (dead,))))
                return True
        return False

    def run_first_turn(self, coro: Coroutine[Any, Any, Any], context: contextvars.Context) -> asyncio.Task[Any]:
        """Make a task of the host in this context, and run its first turn now, at rest. A task factory of the host makes it.

        The context names what catches the turn while the task is made: no attribute is replaced meanwhile, since a garbage
        collection may call `call_soon` for something else.
        """
        if self.loop.get_task_factory() is not None:
            context.run(current.set, None)
            made: asyncio.Task[Any] = self._methods.create_task(coro, context=context)
            return made
        caught = _FirstTurn(self.loop)
        context.run(current.set, caught)
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self.loop, context=context)
        context.run(current.set, None)
        context.run(caught.handle)
        return task

    # Its timers.

    def time(self) -> float:
        """The time of the last delivered entry, on the scale of the loop's clock."""
        return self.now / MICROSECOND + float(self.time_offset)

    def call_at(self, when: float, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> Any:
        """Call back at this time: by an entry of the journal, if a task of the body has set a sleep or a time limit."""
        length = when - self.time()
        is_ours = self.timer is not None or _current_task(self.loop) is not None
        if self.is_closing or not is_ours or not is_time_limit(callback):
            handle = self._new_handle((context or contextvars.copy_context(), callback, args))
            return self.call_later(max(0.0, length), self.enqueue, handle)
        at = self.now + max(0, round(length * MICROSECOND))
        same = self._instants[at] = self._instants.get(at, 0) + 1
        timer = BodyTimer(self, when, at, f"{at}" if same == 1 else f"{at}:{same}", callback, args, context)
        self.timers[timer.name] = timer
        self.timers_made += 1
        self.unarmed.append(timer)
        return timer

    def fire(self, timer: BodyTimer) -> None:
        """Put the callback of a timer, whose entry is delivered now, into the queue."""
        self.timers.pop(timer.name, None)
        timer.disarm()
        self.ready.append(self._handle_of(timer))

    def was_set(self, name: str) -> bool:
        """Return whether the body has set the timer of this name, and cancelled it or let it fire."""
        at, _, number = name.partition(":")
        return at.isdigit() and self._instants.get(int(at), 0) >= int(number or 1) and name not in self.timers

    def enqueue_later(self, timer: BodyTimer) -> None:
        """Let the host fire a timer whose run leaves memory: nothing is recorded any more."""
        self.timers.pop(timer.name, None)
        timer.armed = self.call_later(max(0.0, timer.when() - self.time()), self.enqueue, self._handle_of(timer))

    def _handle_of(self, timer: BodyTimer) -> Handle:
        return Handle((timer._context, self._run_timer, (timer,)))  # type: ignore[attr-defined]  # noqa: SLF001

    def _run_timer(self, timer: BodyTimer) -> None:
        """Call back. A timer that is set meanwhile is an entry too: time limits set themselves again."""
        if timer.cancelled():  # since it was put into the queue
            return
        self.timer = timer
        try:
            timer._callback(*timer._args)  # type: ignore[attr-defined]  # noqa: SLF001
        finally:
            self.timer = None

    # Its host.

    def on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the loop for the engine. Loops call their own methods, so no body may be seen meanwhile."""
        token = current.set(None)
        try:
            return function(*args)
        finally:
            current.reset(token)

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call the engine back, outside the body."""
        timer: asyncio.TimerHandle = self.on_host(
            partial(self._methods.call_later, context=self.context), seconds, callback, *args
        )
        return timer

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that the body has dropped: in the body, if that still runs."""
        if self.is_pumping and not self.is_over and current.get() is self:
            self.create_task(generator.aclose(), {})
        else:
            self._methods.call_soon_threadsafe(self._close_on_host, generator, context=self.context)

    def _close_on_host(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._methods.create_task(generator.aclose())

    def end(self) -> None:
        """The body is over: what is still in its queue, and what its context schedules later, is the host's."""
        if self.is_over:
            return
        self.is_over = self.is_closing = True
        for timer in list(self.timers.values()):
            timer.cancel()
        self._methods.leave()
        while self.ready:
            self.enqueue(self.ready.popleft())
        self._owner = self.drive = None


class _LoopMethods:
    """The six methods of one loop object that look for a body, while there is one. The bodies of a loop share them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bodies = 0
        self.originals = {name: getattr(loop, name) for name in _METHODS}
        self.call_soon = self.originals["call_soon"]
        self.call_soon_threadsafe = self.originals["call_soon_threadsafe"]
        self.create_task = self.originals["create_task"]
        self.call_later = self.originals["call_later"]
        self.time = self.originals["time"]
        self._replaced = _replacements(loop, self.originals)

    def enter(self) -> None:
        """One more body is in memory."""
        if self._bodies == 0:
            vars(self._loop).update(self._replaced)
        self._bodies += 1

    def leave(self) -> None:
        """One body less. With the last one the loop is as it was, but for methods that somebody else has replaced since."""
        self._bodies -= 1
        if self._bodies == 0:
            for name, method in self._replaced.items():
                if vars(self._loop).get(name) is method:
                    delattr(self._loop, name)


def _replacements(  # noqa: C901 - six small functions
    loop: asyncio.AbstractEventLoop, originals: dict[str, Any]
) -> dict[str, Any]:
    """Return the methods that look for a body. Those that find none call the original with exactly what they were given."""
    soon, threadsafe, create, later, at, clock = (originals[name] for name in _METHODS)
    present, copy, step = current.get, contextvars.copy_context, TaskStep

    def call_soon(callback: Any, *args: Any, context: Any = None) -> Any:
        body = present() if context is None else context.get(current)
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            handle = body._new_handle((copy() if context is None else context, callback, args))  # noqa: SLF001
            body.ready.append(handle)
            if type(callback) is step:
                body.note_foreign(getattr(callback, "__self__", None))
            if body.is_idle:
                body.schedule()
            return handle
        if type(body) is _FirstTurn and type(callback) is step:
            body.handle = callback
            return None
        return soon(callback, *args, context=context)

    def call_soon_threadsafe(callback: Any, *args: Any, context: Any = None) -> Any:
        body = present() if context is None else context.get(current)
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            handle = body._new_handle((copy() if context is None else context, callback, args))  # noqa: SLF001
            threadsafe(body.enqueue, handle, context=body.context)
            return handle
        return threadsafe(callback, *args, context=context)

    def create_task(coro: Any, **options: Any) -> Any:
        context = options.get("context")
        body = present() if context is None else context.get(current)
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            return body.create_task(coro, options)
        return create(coro, **options)

    def call_at(when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        body = present() if context is None else context.get(current)
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            return body.call_at(when, callback, args, context)
        return at(when, callback, *args, context=context)

    def call_later(delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        body = present() if context is None else context.get(current)
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            return body.call_at(body.time() + delay, callback, args, context)
        return later(delay, callback, *args, context=context)

    def time() -> float:
        body = present()
        if type(body) is BodyQueue and body.loop is loop and not body.is_over:
            return body.time()
        return clock()  # type: ignore[no-any-return]

    return dict(zip(_METHODS, (call_soon, call_soon_threadsafe, create_task, call_later, call_at, time), strict=True))


def _check(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError if a body cannot be run on this loop."""
    kind = f"{type(loop).__module__}.{type(loop).__qualname__}"
    if getattr(loop, "_nest_patched", False):
        raise RuntimeError(
            f"the event loop {kind} was patched by nest_asyncio, so that it can run inside itself; a workflow function cannot be "
            "run on it: run the workflow in another thread, with wf.run_sync or runtime.sync, or leave nest_asyncio.apply() out"
        )
    seen: list[Any] = []
    try:
        vars(loop)["call_soon"] = lambda callback, *_, context=None: seen.append(callback)  # noqa: ARG005 - as it is called
    except TypeError as reason:
        raise RuntimeError(
            f"the event loop {kind} takes no attributes, which perdure needs to run a workflow function"
        ) from reason
    try:
        future: asyncio.Future[None] = asyncio.Future(loop=loop)
        future.add_done_callback(lambda _: None)
        future.set_result(None)
    finally:
        del vars(loop)["call_soon"]
    if not seen:
        raise RuntimeError(
            f"the futures of the event loop {kind} do not use its call_soon, which perdure needs: use asyncio or uvloop"
        )


# Where a loop keeps its methods. A dictionary by loop would keep every loop alive, since the methods refer to it.
_ATTRIBUTE: Final = "_perdure_methods"


def _methods_of(loop: asyncio.AbstractEventLoop) -> _LoopMethods:
    found: _LoopMethods | None = getattr(loop, _ATTRIBUTE, None)
    if found is None:
        _check(loop)
        found = _LoopMethods(loop)
        setattr(loop, _ATTRIBUTE, found)
    return found
