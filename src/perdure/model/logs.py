"""The logger of the package, the fields of its records, and what people are shown of texts and tracebacks of others.

Every record of `logging.getLogger("perdure")` has the attributes in `FIELDS`, None where one does not apply, so that a formatter
may name them. Its traceback begins in the user's code. docs/logging.md has the table of messages, and a test compares it with the
code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

FIELDS: Final = ("run_id", "workflow", "key", "attempt", "worker")

log: Final = logging.getLogger("perdure")


class LoggedRun(Protocol):
    """What a record says of a run: its row."""

    @property
    def id(self) -> str: ...
    @property
    def workflow(self) -> str: ...
    @property
    def attempts(self) -> int: ...


def run_fields(run: LoggedRun, *, key: str | None = None, worker: str | None = None) -> dict[str, Any]:
    """`extra=` for a record about this run."""
    return {"run_id": run.id, "workflow": run.workflow, "key": key, "attempt": run.attempts, "worker": worker}


def printable(text: str) -> str:
    """The text with escapes in place of characters that act upon a terminal or are invisible; line breaks and tabs stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape", "replace").decode() for char in text
    )


# Where the code lies that calls a user's code: perdure, and what of Python's own library it does that with.
_CALLERS: Final = (
    str(Path(__file__).parents[1]) + "/",
    str(Path(asyncio.__file__).parent) + "/",
    str(Path(concurrent.futures.__file__).parents[1]) + "/",
    threading.__file__,
)


def users_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code on, or all of it. The exception keeps its own."""
    first = trace
    while first is not None and is_of_caller(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return trace if first is None else first


def is_of_caller(filename: str) -> bool:
    """Return whether this is code of perdure's, or of the library with which it calls a user's code."""
    return filename.startswith(_CALLERS)


def _complete(record: logging.LogRecord) -> bool:
    for name in FIELDS:
        record.__dict__.setdefault(name, None)
    if record.exc_info is not None and record.exc_info[0] is not None:
        kind, error, trace = record.exc_info
        record.exc_info = kind, error, users_traceback(trace)
    return True


log.addFilter(_complete)
