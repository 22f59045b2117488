"""Commands that need the program itself, by `module:name` of its Runtime: start, worker, check."""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TextIO

import msgspec
from cyclopts import App, Parameter

from perdure.cli.options import CommandFailed, JsonOption, call_runtime, load_runtime, parse_json
from perdure.cli.output import print_error, print_json, print_table, print_text, report
from perdure.errors import StepNotStopped
from perdure.model.logs import printable
from perdure.operations.check_runs import CheckReport
from perdure.operations.replay_check import RunCheck
from perdure.runtime import Runtime

_DEFAULT: Final = JsonOption()
# The exit code of a worker that ends although a step still runs.
NOT_STOPPED: Final = 3
# What every log record has; the rest is what `extra=` gave it.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    for command in (start, worker, check):
        app.command(command)


def start(
    app: str,
    workflow: str,
    /,
    *,
    arguments: Annotated[
        list[str] | None, Parameter(name="--input", negative=(), help="An argument of the workflow, as JSON. Repeat it for more.")
    ] = None,
    run_id: Annotated[str | None, Parameter(name="--id", help="The run's id; the same id and input are the same run.")] = None,
    options: JsonOption = _DEFAULT,
) -> None:
    """Start a run; a worker drives it.

    Parameters
    ----------
    app
        The program: module:name of its Runtime, such as app:runtime.
    workflow
        The workflow's name.
    """
    values = [parse_json(text, "--input") for text in arguments or ()]
    runtime = load_runtime(app)
    _refuse_memory(runtime, app, "the run would be lost")

    async def begin(runtime: Runtime) -> str:
        if run_id is None:
            return (await runtime.start(workflow, *values)).id
        return (await runtime.start(workflow, *values, id=run_id)).id

    started = call_runtime(runtime, begin)
    report(options.json, started, {"id": started})


def worker(app: str, /, *, options: JsonOption = _DEFAULT) -> None:
    """Drive runs until SIGTERM or Ctrl-C.

    Then running steps end, and the runs are given back. The exit code is 3 when a step ignores its cancellation and still runs.
    Log records go to stderr, with --json to stdout as lines of JSON.

    Parameters
    ----------
    app
        The program: module:name of its Runtime, such as app:runtime.
    """
    runtime = load_runtime(app)
    _refuse_memory(runtime, app, "it would find no runs")
    if not logging.getLogger().handlers:  # the program may have set up logging itself
        _log_to(sys.stdout if options.json else sys.stderr, _JsonLines() if options.json else _TextLines())
    call_runtime(runtime, _work)


async def _work(runtime: Runtime) -> None:
    try:
        await runtime.work()
    except StepNotStopped as left:
        await runtime.close()
        print_error(str(left))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(NOT_STOPPED)  # neither the event loop nor threads that the step may have started are waited for


def check(
    app: str,
    /,
    *,
    workflow: Annotated[str | None, Parameter(help="Only runs of this workflow.")] = None,
    prefix: Annotated[str, Parameter(help="Only runs whose id begins so.", show_default=False)] = "",
    limit: Annotated[int | None, Parameter(help="At most so many.")] = None,
    options: JsonOption = _DEFAULT,
) -> int:
    """Check that the stored open runs fit this code.

    No step is called and nothing is written. The exit code is 1 when a run would stop.

    Parameters
    ----------
    app
        The program: module:name of its Runtime, such as app:runtime.
    """
    runtime = load_runtime(app)
    _refuse_memory(runtime, app, "there are no runs to check")
    found = call_runtime(runtime, lambda runtime: runtime.check(workflow=workflow, prefix=prefix, limit=limit))
    if options.json:
        print_json({"fits": bool(found), "checked": len(found.results), "runs": found.results})
    else:
        _print_report(found)
    return 0 if found else 1


def _print_report(found: CheckReport) -> None:
    counts = ", ".join(f"{name} {len(getattr(found, name))}" for name in ("fits", "stops", "unknown", "warns"))
    print_text(f"checked {len(found.results)}: {counts}")
    noted = [*found.stops, *found.unknown, *found.warns]
    if noted:
        rows = [[each.run_id, each.workflow, each.verdict, each.at or "", _why(each)] for each in noted]
        print_table(("id", "workflow", "verdict", "at", "why"), rows)


def _why(found: RunCheck) -> str:
    return "; ".join(text for text in (found.problem, *found.warnings) if text is not None)


def _refuse_memory(runtime: Runtime, app: str, consequence: str) -> None:
    if "shared" not in runtime.store.capabilities:
        raise CommandFailed(
            f"the store of {app} ({type(runtime.store).__name__}) is for one process, so {consequence}; give it a shared one"
        )


def _log_to(stream: TextIO, formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _TextLines(logging.Formatter):
    """Log records for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _JsonLines(logging.Formatter):
    """Log records as JSON, with what `extra=` gave them."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
