"""Commands that look at runs of a store and read their streams, and the one that sends a signal to a run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from rich.live import Live

from perdure.cli.options import FilterOptions, StoreOptions, UsageError, parse_json
from perdure.cli.output import (
    console,
    in_utc,
    make_table,
    print_json,
    print_json_lines,
    print_table,
    print_text,
    report,
)
from perdure.cli.show_run import print_run
from perdure.errors import RunNotFound
from perdure.model.records import RunInfo
from perdure.runtime import Runtime
from perdure.worker.stream_reader import PLAIN

_DEFAULT: Final = StoreOptions()
_EVERY_RUN: Final = FilterOptions()
_COLUMNS: Final = ("id", "workflow", "status", "changed (UTC)", "problem")
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
    found = options.call(find)
    if options.json:
        print_json_lines(found)
        return
    if found:
        print_table(_COLUMNS, _rows(found), cut=True)
    else:
        print_text("no runs")
    if len(found) == limit:
        print_text(f"(these are the first {limit}; --limit shows more)")


def _rows(found: Iterable[RunInfo]) -> list[list[str]]:
    return [
        [
            info.id,
            info.workflow if info.version == 1 else f"{info.workflow} v{info.version}",
            info.status,
            in_utc(info.updated_at),
            info.problem or info.error or "",
        ]
        for info in found
    ]


async def _watch_table(runtime: Runtime, find: Callable[[Runtime], Awaitable[list[RunInfo]]]) -> None:
    screen = console()
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            shown = (await find(runtime))[: max(1, screen.height - 2)]
            live.update(make_table(_COLUMNS, _rows(shown), screen.width), refresh=True)
            await _wait_for_change(runtime)


async def _watch_lines(runtime: Runtime, find: Callable[[Runtime], Awaitable[list[RunInfo]]]) -> None:
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
