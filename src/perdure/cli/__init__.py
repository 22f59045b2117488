"""The command `perdure`: what an operator does with runs, by the verbs of the library.

`app` puts the commands together and turns errors into exit codes; the modules `*_commands` have one function for each command.
Needs the extra `cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_NEEDED: Final = frozenset({"cyclopts", "rich"})


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command: 0 when it did what was asked for, 1 when not, 2 for wrong arguments, 130 after Ctrl-C."""
    try:
        from perdure.cli.app import run_command
    except ModuleNotFoundError as missing:
        if missing.name not in _NEEDED:
            raise
        sys.stderr.write("perdure: the command line needs cyclopts and rich: pip install 'perdure[cli]'\n")
        return 1
    return run_command(sys.argv[1:] if arguments is None else arguments)
