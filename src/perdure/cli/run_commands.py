"""Commands on runs of a store: list, watch, show, signal, cancel, retry, fork, hold, unhold, delete, purge."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.live import Live

from perdure.cli.options import CommandFailed, FilterOptions, StoreOptions, UsageError, parse_json
from perdure.cli.output import (
    console,
    in_utc,
    make_table,
    print_json,
    print_json_lines,
    print_table,
    print_text,
    printable,
    report,
)
from perdure.cli.show_run import print_timeline
from perdure.cli.timeline import load_timeline
from perdure.errors import RunNotFound
from perdure.model.records import EndStatus, RunInfo, Status
from perdure.runtime import Runtime

_DEFAULT: Final = StoreOptions()
_EVERY_RUN: Final = FilterOptions()
_COLUMNS: Final = ("id", "workflow", "status", "changed (UTC)", "problem")
# How often --watch looks, where the store does not wake it, and the least time between two looks.
_WATCH_EVERY: Final = 1.0
_WATCH_PAUSE: Final = 0.25


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    for command in (runs, show, signal, cancel, retry, fork, hold, unhold, delete, purge):
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
    timeline = options.call(lambda runtime: load_timeline(runtime.store, run_id))
    if options.json:
        print_json(timeline)
    else:
        print_timeline(timeline)


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


def cancel(run_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Ask a run to stop."""
    options.call(lambda runtime: runtime.cancel(run_id))
    report(options.json, f"run {run_id!r} was asked to stop; a worker ends it", {"id": run_id, "cancel_requested": True})


def retry(run_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Let a failed, cancelled or dead run go on; what succeeded is kept."""
    options.call(lambda runtime: runtime.retry(run_id))
    report(options.json, f"run {run_id!r} is pending again; a worker goes on with it", {"id": run_id, "status": "pending"})


def fork(
    run_id: str,
    /,
    *,
    from_step: Annotated[str, Parameter(name="--from", help="The key of the step that is called anew, as `show` has it.")],
    new_id: Annotated[str | None, Parameter(name="--id", help="The id of the new run. Default: one that is made up.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Start a new run that has what this one recorded before a step, and calls that step anew."""

    async def start(runtime: Runtime) -> str:
        return (await runtime.fork(run_id, from_step=from_step, id=new_id)).id

    forked = options.call(start)
    report(options.json, forked, {"id": forked, "forked_from": run_id})


def hold(run_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Keep a run from being driven until `unhold`."""
    options.call(lambda runtime: runtime.hold(run_id))
    report(options.json, f"run {run_id!r} is on hold", {"id": run_id, "held": True})


def unhold(run_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Undo `hold`."""
    options.call(lambda runtime: runtime.unhold(run_id))
    report(options.json, f"run {run_id!r} is not on hold", {"id": run_id, "held": False})


def delete(
    run_id: str,
    /,
    *,
    yes: Annotated[bool, Parameter(negative=(), show_default=False, help="Do not ask.")] = False,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Remove a run and everything recorded for it."""

    async def find(runtime: Runtime) -> Status:
        run = await runtime.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return await run.status()

    status = options.call(find)
    if not yes:
        _confirm(f"Delete run {run_id!r} ({status}) and everything recorded for it?")
    options.call(lambda runtime: runtime.delete(run_id))
    report(options.json, f"run {run_id!r} is deleted", {"id": run_id, "deleted": True})


def purge(
    *,
    older_than: Annotated[str, Parameter(help="How long ago they ended at least, such as 30d or 12h.")],
    status: Annotated[tuple[EndStatus, ...], Parameter(help="Only runs that ended so; may be repeated.", negative=())] = (),
    workflow: Annotated[str | None, Parameter(help="Only runs of this workflow.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Delete runs that ended long ago."""
    deleted = options.call(lambda runtime: runtime.purge(older_than, status=status or None, workflow=workflow))
    report(options.json, f"deleted {deleted} {'run' if deleted == 1 else 'runs'}", {"deleted": deleted})


def _confirm(question: str) -> None:
    """Ask on the terminal. Raises `CommandFailed` for any answer but yes, and `UsageError` where no one can answer."""
    if not sys.stdin.isatty():
        raise UsageError("this asks before it deletes, and stdin is no terminal; pass --yes")
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("nothing was deleted")
