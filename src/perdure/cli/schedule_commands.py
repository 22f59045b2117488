"""Commands on schedules: list, hold, unhold, run, drop."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from perdure.cli.options import JsonOption, StoreOptions, call_runtime, load_runtime
from perdure.cli.output import in_utc, length, print_json_lines, print_table, print_text, report
from perdure.errors import ScheduleNotFound
from perdure.runtime import Runtime
from perdure.worker.schedules import ScheduleInfo

_DEFAULT: Final = StoreOptions()


def add_commands(app: App) -> None:
    """Add `schedules` and the commands under it."""
    schedules = App("schedules", help="List schedules, or change one.")
    schedules.default(list_schedules)
    schedules.command(hold)
    schedules.command(unhold)
    schedules.command(run)
    schedules.command(drop)
    app.command(schedules)


def list_schedules(*, options: StoreOptions = _DEFAULT) -> None:
    """List schedules, or change one."""
    found = options.call(lambda runtime: runtime.schedules())
    if options.json:
        print_json_lines(_document(each) for each in found)
        return
    if not found:
        print_text("no schedules")
        return
    rows = [[each.id, each.workflow, _when(each), each.overlap, each.catch_up, _next(each)] for each in found]
    print_table(("id", "workflow", "when", "overlap", "catch up", "next (UTC)"), rows)


def _when(schedule: ScheduleInfo) -> str:
    if schedule.every is not None:
        return f"every {length(schedule.every.total_seconds())}"
    return f"{schedule.cron} {schedule.tz}"


def _next(schedule: ScheduleInfo) -> str:
    return "on hold" if schedule.held else in_utc(schedule.next_at) or "never"


def _document(schedule: ScheduleInfo) -> dict[str, Any]:
    """The schedule with `every` and `deadline` in seconds."""
    lengths = {"every": schedule.every, "deadline": schedule.deadline}
    in_seconds = {name: None if value is None else value.total_seconds() for name, value in lengths.items()}
    return {**msgspec.structs.asdict(schedule), **in_seconds}


def hold(schedule_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Let a schedule start no run until `unhold`."""
    options.call(lambda runtime: runtime.hold_schedule(schedule_id))
    report(options.json, f"schedule {schedule_id!r} is on hold", {"id": schedule_id, "held": True})


def unhold(schedule_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Undo `hold`; what came meanwhile is not made up for."""
    options.call(lambda runtime: runtime.unhold_schedule(schedule_id))
    report(options.json, f"schedule {schedule_id!r} is not on hold", {"id": schedule_id, "held": False})


def run(
    schedule_id: str,
    /,
    *,
    app: Annotated[str, Parameter(help="The program that has the workflow: module:name of its Runtime, such as app:runtime.")],
    options: JsonOption = JsonOption(),  # noqa: B008 - immutable
) -> None:
    """Start a run of a schedule now; its next instant stays."""
    started = call_runtime(load_runtime(app), lambda runtime: runtime.run_schedule(schedule_id))
    report(options.json, started.id, {"id": started.id, "schedule": schedule_id})


def drop(schedule_id: str, /, *, options: StoreOptions = _DEFAULT) -> None:
    """Remove a schedule; its runs stay."""

    async def remove(runtime: Runtime) -> None:
        if not await runtime.drop_schedule(schedule_id):
            raise ScheduleNotFound(schedule_id)

    options.call(remove)
    report(options.json, f"schedule {schedule_id!r} is dropped; its runs stay", {"id": schedule_id, "dropped": True})
