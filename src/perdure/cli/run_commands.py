"""Commands that look at runs of a store and read their streams, and the one that sends a signal to a run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from cyclopts import App, Parameter
from rich.console import Group
from rich.live import Live

from perdure.cli.options import FilterOptions, StoreOptions, UsageError, parse_json
from perdure.cli.output import (
    console,
    counted,
    in_utc,
    print_error,
    print_json,
    print_json_lines,
    print_table,
    print_text,
    report,
    table_lines,
)
from perdure.cli.show_run import print_run
from perdure.cli.waiting import retries, what_it_waits_for
from perdure.errors import RunNotFound, SnapshotCorrupt
from perdure.model.records import RunInfo
from perdure.operations.describe_run import StepDescription
from perdure.runtime import Runtime
from perdure.worker.stream_reader import PLAIN

_DEFAULT: Final = StoreOptions()
_EVERY_RUN: Final = FilterOptions()
_COLUMNS: Final = ("id", "workflow", "status", "changed (UTC)", "detail")
# How many runs are read at once, to say which of their steps are tried again.
_READ_AT_ONCE: Final = 16
# How often --watch looks, where the store does not wake it, and the least time between two looks.
_WATCH_EVERY: Final = 1.0
_WATCH_PAUSE: Final = 0.25


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    for command in (runs, show, signal, stream):
        app.command(command)


def runs(
    *,
    filters: FilterOptions = _EVERY_RUN,
    limit: Annotated[int, Parameter(help="At most so many.")] = 100,
    stuck: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Only runs with a problem, or due for a minute and not claimed.")
    ] = False,
    watch: Annotated[bool, Parameter(negative=(), show_default=False, help="Go on until Ctrl-C, and show changes.")] = False,
    options: StoreOptions = _DEFAULT,
) -> None:
    """List runs, last changed first."""
    selection = filters.selection()
    if watch and not options.json and not sys.stdout.isatty():
        raise UsageError("--watch draws on a terminal, and stdout is none; use --watch --json for lines")

    async def find(runtime: Runtime) -> list[RunInfo]:
        return await (runtime.stuck_runs if stuck else runtime.list)(limit=limit, **selection)

    if watch:
        options.call(lambda runtime: (_watch_lines if options.json else _watch_table)(runtime, find))
        return
    if options.json:
        found = options.call(find)
        print_json_lines(found)
        return
    found, rows = options.call(lambda runtime: _find_rows(runtime, find))
    if rows:
        print_table(_COLUMNS, rows, moves_last=True)
    else:
        print_text("no runs")
    if len(found) == limit:
        print_error(f"{counted(limit, 'run')} at most {'are' if limit > 1 else 'is'} shown; --limit shows more")


_Find: TypeAlias = Callable[[Runtime], Awaitable[list[RunInfo]]]


async def _find_rows(runtime: Runtime, find: _Find) -> tuple[list[RunInfo], list[list[str]]]:
    """Return the runs, and the cells of their lines."""
    found = await find(runtime)
    return found, await _rows(runtime, found)


async def _rows(runtime: Runtime, found: Sequence[RunInfo]) -> list[list[str]]:
    rows: list[list[str]] = []
    for start in range(0, len(found), _READ_AT_ONCE):
        rows += await asyncio.gather(*(_row(runtime, info) for info in found[start : start + _READ_AT_ONCE]))
    return rows


async def _row(runtime: Runtime, info: RunInfo) -> list[str]:
    workflow = info.workflow if info.version == 1 else f"{info.workflow} v{info.version}"
    return [info.id, workflow, info.status, in_utc(info.updated_at), await _detail(runtime, info)]


async def _detail(runtime: Runtime, info: RunInfo) -> str:
    """Return the problem of the run, its error, or what it waits for. Only the journal says that a step is tried again."""
    if info.problem or info.error or info.status not in ("running", "suspended"):
        return info.problem or info.error or ""
    steps: tuple[StepDescription, ...] = ()
    if info.wake_at is not None:
        with contextlib.suppress(RunNotFound, SnapshotCorrupt):  # deleted meanwhile, or damaged, which `stuck_runs` reports
            steps = (await runtime.describe(info.id)).steps
    return what_it_waits_for(info, steps) if info.status == "suspended" else "; ".join(retries(steps))


async def _watch_table(runtime: Runtime, find: _Find) -> None:
    screen = console()
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            shown = (await find(runtime))[: max(1, screen.height - 2)]
            lines = table_lines(_COLUMNS, await _rows(runtime, shown), screen.width)
            for line in lines:
                line.truncate(screen.width)  # a longer one would take two lines, and the next picture be drawn below
            live.update(Group(*lines), refresh=True)
            await _wait_for_change(runtime)


async def _watch_lines(runtime: Runtime, find: _Find) -> None:
    """A line for each run at first, then for each that has changed."""
    known: dict[str, RunInfo] = {}
    while True:
        found = {info.id: info for info in await find(runtime)}
        print_json_lines(info for info in found.values() if known.get(info.id) != info)
        sys.stdout.flush()
        known = found
        await _wait_for_change(runtime)


async def _wait_for_change(runtime: Runtime) -> None:
    await runtime.store.watch(_WATCH_EVERY)
    await asyncio.sleep(_WATCH_PAUSE)


def show(run_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Show a run: its steps with length, attempts, value or error, and what it waits for."""
    found = options.call(lambda runtime: runtime.describe(run_id))
    if options.json:
        print_json(found)
    else:
        print_run(found)


def signal(
    run_id: str,
    name: str,
    /,
    *,
    payload: Annotated[str, Parameter(help="The payload, as JSON.")] = "null",
    dedupe: Annotated[str | None, Parameter(help="A second signal with the same text is ignored.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Send a signal to a run."""
    value = parse_json(payload, "--payload")
    options.call(lambda runtime: runtime.signal(run_id, name, value, dedupe=dedupe))
    report(options.json, f"sent {name!r} to run {run_id!r}", {"id": run_id, "signal": name})


def stream(
    run_id: str,
    name: str,
    /,
    *,
    start: Annotated[int, Parameter(help="The position of the first item.")] = 0,
    follow: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Go on until the stream ends, and show items as they come.")
    ] = False,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Show the items of a run's stream: the values, or with --json also position, step and attempt."""

    async def show_items(runtime: Runtime) -> None:
        run = await runtime.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        reader = run.stream(name, start=start, timeout=None if follow else 0, returns=PLAIN, details=True)
        with contextlib.suppress(TimeoutError):  # without --follow, when everything that is there was read
            async for item in reader:
                if options.json:
                    print_json(item)
                else:
                    print_text(item.value if isinstance(item.value, str) else msgspec.json.encode(item.value).decode())
                if follow:
                    sys.stdout.flush()

    options.call(show_items)
