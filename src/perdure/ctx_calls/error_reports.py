"""Telling people what a rebuilt error lacks.

There is one log line for each attribute that is not recorded, and one for each class that has a stand-in: thousands of runs may
meet the same.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Final

from perdure.codec.rebuilt_errors import LOST_ADVICE, RebuildReport
from perdure.errors import PerdureWarning, name_step
from perdure.model.logs import LoggedRun, log, run_fields

# What was said in this process: classes, and attributes of classes.
_said: Final[set[tuple[str, str]]] = set()
_MOST_SAID: Final = 10_000


def tell_of_losses(run: LoggedRun, key: str, report: RebuildReport) -> None:
    """Log what the error of this step lacks."""
    whose = name_step(key)
    for name, reason in report.stand_ins.items():
        if _is_new(name, ""):
            text = f"{whose} of run {run.id!r} of workflow {run.workflow!r} failed with {name}, which {reason}"
            if log.hasHandlers():  # otherwise it would be printed twice
                log.warning("StepFailed is raised in place of an error: %s", text, extra=run_fields(run, key=key))
            with contextlib.suppress(PerdureWarning):  # as an error it would hide the step's own
                warnings.warn(text, PerdureWarning, stacklevel=2)
    for name, attributes in report.lost.items():
        for attribute in attributes:
            if _is_new(name, attribute):
                log.warning(
                    "%s of run %r of workflow %r failed with %s, whose %s is not recorded: %s",
                    whose,
                    run.id,
                    run.workflow,
                    name,
                    attribute,
                    LOST_ADVICE,
                    extra=run_fields(run, key=key),
                )


def _is_new(name: str, attribute: str) -> bool:
    if (name, attribute) in _said:
        return False
    if len(_said) >= _MOST_SAID:
        _said.clear()
    _said.add((name, attribute))
    return True
