"""The logger of the package, the fields of its records, and text of others made safe to show.

Every record of `logging.getLogger("perdure")` has the attributes in `FIELDS`, None where one does not apply, so that a formatter
may name them. docs/logging.md has the table of messages, and a test compares it with the code.
"""

from __future__ import annotations

import logging
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


def _add_missing_fields(record: logging.LogRecord) -> bool:
    for name in FIELDS:
        record.__dict__.setdefault(name, None)
    return True


log.addFilter(_add_missing_fields)
