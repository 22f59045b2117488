"""Commands that need the program itself, by `module:name` of its Runtime: start, worker, check."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from datetime import UTC, datetime
from types import FrameType
from typing import Annotated, Any, Final, Literal, TextIO, TypeAlias

import msgspec
from cyclopts import App, Parameter

from perdure.cli.options import INTERRUPTED, CommandFailed, JsonOption, call_runtime, check_dsn, load_runtime, parse_json
from perdure.cli.output import print_error, print_json, print_text, report, safe_json
from perdure.errors import StepNotStopped
from perdure.model.logs import printable
from perdure.runtime import Runtime

_DEFAULT: Final = JsonOption()
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
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


def worker(
    app: str,
    /,
    *,
    concurrency: Annotated[
        int | None, Parameter(help="How many runs are driven at a time. Default: as the program says.")
    ] = None,
    queue: Annotated[
        list[str] | None,
        Parameter(
            negative=(), help="Take only runs of this queue; may be repeated. It replaces the only_queues= of the program."
        ),
    ] = None,
    store: Annotated[str | None, Parameter(help="DSN of the store. Default: that of the program.")] = None,
    log_level: Annotated[
        LogLevel | None, Parameter(help="The least severe log records that are shown. Default: info, or as the program says.")
    ] = None,
    options: JsonOption = _DEFAULT,
) -> None:
    """Drive runs until SIGTERM or Ctrl-C.

    Then running steps end, and the runs are given back; a second Ctrl-C ends at once. The exit code is 3 if a step ignores its
    cancellation and still runs. Log records go to stderr, with --json to stdout as lines of JSON.

    Parameters
    ----------
    app
        The program: module:name of its Runtime, such as app:runtime.
    """
    runtime = load_runtime(app)
    runtime.configure(store=check_dsn(store), concurrency=concurrency, only_queues=queue)
    _refuse_memory(runtime, app, "it would find no runs")
    if not logging.getLogger().handlers:  # the program may have set up logging itself
        _log_to(sys.stdout if options.json else sys.stderr, _JsonLines() if options.json else _TextLines())
    if log_level is not None:
        logging.getLogger("perdure").setLevel(log_level.upper())
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end_at_once)
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


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process, whatever it does: the second Ctrl-C of a worker, whose first one is handled by the worker."""
    os.write(sys.stderr.fileno(), b"perdure: ended at once; the runs are taken over when their leases end\n")
    os._exit(INTERRUPTED)


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
        print_json({"fits": bool(found), "checked": len(found.results), "reasons": found.reasons, "runs": found.results})
    else:
        print_text(str(found))
    return 0 if found else 1


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
        return safe_json(msgspec.json.encode(line, enc_hook=str))
