"""The path of one step through perdure on SQLite: `python -m benchmarks.step_path`, and with `--list` its calls in order.

Whoever reads how a step is made durable follows calls from module to module. This script counts them, for a live step and for a
replayed one: the calls of perdure's functions, the modules that these functions are in, and the changes, which are calls of a
function in another module than that of the call before it on the same thread. A coroutine that is resumed counts as a call again,
because a reader comes by it again. Before Python 3.12 a comprehension is a call too. Calls in other libraries, in C
and in the step's own function do not count.

One run of many steps is traced, and driven a second time for the replay. The body marks the trace before each step. Only steps in
the middle are looked at, so that neither the start nor the end of the run counts. Between two marks the event loop does the work
of one step. The writer's thread, which stands for all threads besides the loop's, does the work of one step too, but may be late
with the last of it. Therefore the length of a path is an average over many steps, rounded, and the path itself is what most often
follows a mark. Modules are named by their files, so that they can be moved without touching this script.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import perdure
from benchmarks.programs.flows import work
from benchmarks.work import RESULT_BYTES
from perdure import Context, Workflow, stores, workflow

_PREFIX: Final = f"{Path(perdure.__file__).parent}/"
_STEPS: Final = 120
# The steps that are looked at.
_MIDDLE: Final = slice(20, 101)


class Call(NamedTuple):
    """A call of one of perdure's functions."""

    is_on_loop: bool
    module: str
    function: str


class StepPath(NamedTuple):
    """The calls of one step on one thread, or on all of them, and how many of the calls change the module."""

    calls: Sequence[Call]
    changes: int

    @property
    def modules(self) -> int:
        """How many modules the calls are in."""
        return len({call.module for call in self.calls})


class Trace:
    """The calls of all threads in order, and where in this order the steps of a body begin."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._calls: list[Call] = []
        self._marks: list[int] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Add the call, if it is one of perdure's. This is a profile function, as `sys.setprofile` takes it."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PREFIX):
            module = code.co_filename.removeprefix(_PREFIX).removesuffix(".py")
            self._calls.append(Call(threading.get_ident() == self._loop_thread, module, code.co_qualname))

    def mark(self) -> None:
        """Say that a step begins."""
        self._marks.append(len(self._calls))

    def clear(self) -> None:
        """Forget everything so far."""
        self._calls.clear()
        self._marks.clear()

    def path(self, *, is_on_loop: bool) -> StepPath:
        """The path of a step in the middle, on the loop's thread or on the others."""
        places = [place for place, call in enumerate(self._calls) if call.is_on_loop is is_on_loop]
        starts = [bisect_left(places, mark) for mark in self._marks[_MIDDLE]]
        length = round((starts[-1] - starts[0]) / (len(starts) - 1))
        # Each with the call before it, which says whether the first call changes the module.
        found = Counter(tuple(self._calls[place] for place in places[start - 1 : start + length]) for start in starts)
        calls = found.most_common(1)[0][0]
        return StepPath(calls[1:], sum(before.module != call.module for before, call in pairwise(calls)))


@contextmanager
def _traced(trace: Trace) -> Iterator[None]:
    """Trace this thread, and those that are started meanwhile."""
    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _marking(trace: Trace) -> Workflow[[], None]:
    """A workflow that marks the trace before each of its steps, and leaves memory after the last."""

    @workflow
    async def marked_steps(ctx: Context[Any]) -> None:
        for n in range(_STEPS):
            trace.mark()
            await ctx.step("work", work, n, RESULT_BYTES, key=f"work{n:06}")
        await ctx.wait_for_signal("go")

    return marked_steps


async def _find_paths(path: Path, trace: Trace) -> dict[str, dict[str, StepPath]]:
    """The paths of a live and a replayed step, by thread."""
    store, steps = stores.sqlite(path), _marking(trace)
    try:
        await steps.run(id="run", store=store)
        live = _by_thread(trace)
        await store.signal("run", "go", b"null")
        trace.clear()
        await steps.run(id="run", store=store)
        return {"live step": live, "replayed step": _by_thread(trace)}
    finally:
        await store.close()


def _by_thread(trace: Trace) -> dict[str, StepPath]:
    loop, writer = trace.path(is_on_loop=True), trace.path(is_on_loop=False)
    total = StepPath([*loop.calls, *writer.calls], loop.changes + writer.changes)
    return {"event loop": loop, "writer's thread": writer, "total": total}


def find_paths() -> dict[str, dict[str, StepPath]]:
    """The paths of a live and a replayed step on a new database, by thread."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory, _traced(trace):
        return asyncio.run(_find_paths(Path(directory) / "steps.db", trace))


def _print_table(paths: dict[str, dict[str, StepPath]]) -> None:
    print(f"{'':32}{'calls':>8}{'modules':>8}{'changes':>8}")
    for step, threads in paths.items():
        for thread, path in threads.items():
            print(f"{step + ', ' + thread:32}{len(path.calls):>8}{path.modules:>8}{path.changes:>8}")


def _print_calls(paths: dict[str, dict[str, StepPath]]) -> None:
    for step, threads in paths.items():
        for thread, path in threads.items():
            if thread != "total" and path.calls:
                print(f"\n{step}, {thread}")
                for call in path.calls:
                    print(f"  {call.module:40} {call.function}")


def main() -> None:
    """Print the counts, and with `--list` the calls."""
    paths = find_paths()
    _print_table(paths)
    if "--list" in sys.argv[1:]:
        _print_calls(paths)


if __name__ == "__main__":
    main()
