"""The command line put together, and how its errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Final

from cyclopts import App, CycloptsError, UnusedCliTokensError

from perdure.cli import (
    app_commands,
    approval_commands,
    change_commands,
    queue_commands,
    run_commands,
    schedule_commands,
    store_commands,
)
from perdure.cli.options import DONE, FAILED, INTERRUPTED, WRONG_USAGE, CommandFailed, UsageError
from perdure.cli.output import print_error
from perdure.errors import PerdureError

# What cannot be done: the store refuses or cannot be reached, a workflow is not registered, a file or a driver is missing.
_FAILURES: Final = (CommandFailed, PerdureError, LookupError, OSError, ImportError)
# The library refuses an argument with ValueError or TypeError.
_MISUSES: Final = (UsageError, ValueError, TypeError)
_OPTIONS_WITHOUT_COMMAND: Final = frozenset({"--help", "-h", "--version"})
_HELP: Final = "perdure --help shows the commands, perdure COMMAND --help the options of one"


def make_app() -> App:
    """The command line with all commands."""
    app = App(
        "perdure",
        help="Operate durable workflows: list, inspect and change their runs, and work on them.",
        help_format="plaintext",
        version=lambda: version("perdure"),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for commands in (
        run_commands,
        approval_commands,
        change_commands,
        app_commands,
        store_commands,
        schedule_commands,
        queue_commands,
    ):
        commands.add_commands(app)
    return app


def run_command(arguments: Sequence[str]) -> int:
    """Run one command, and give its exit code. Errors are printed without a traceback."""
    if arguments and arguments[0].startswith("-") and arguments[0].partition("=")[0] not in _OPTIONS_WITHOUT_COMMAND:
        print_error(f"the command comes first, then its options: perdure COMMAND {arguments[0]} ...\n{_HELP}")
        return WRONG_USAGE
    return _with_messages(lambda: make_app()(list(arguments)))


def _with_messages(command: Callable[[], object]) -> int:
    try:
        code = command()
        sys.stdout.flush()
    except CycloptsError as wrong:
        print_error(f"{_usage_text(wrong)}\n{_HELP}")
        return WRONG_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `perdure runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except _FAILURES as failure:
        print_error(_text(failure))
        return FAILED
    except _MISUSES as misuse:
        print_error(_text(misuse))
        return WRONG_USAGE
    return code if isinstance(code, int) else DONE


def _usage_text(wrong: CycloptsError) -> str:
    if isinstance(wrong, UnusedCliTokensError):
        return f"too many arguments: {' '.join(wrong.unused_tokens or ())}"
    return str(wrong)


def _text(error: BaseException) -> str:
    if isinstance(error, KeyError):  # whose text is the repr of its key
        return str(error.args[0]) if error.args else "KeyError"
    return str(error) or type(error).__name__
