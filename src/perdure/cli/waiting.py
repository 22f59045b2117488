"""What a run waits for, in words: for a line of `perdure runs` and for `perdure show`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Protocol

from perdure.cli.output import counted, in_utc
from perdure.operations.describe_run import StepDescription
from perdure.result import WaitingFor


class WaitingRun(Protocol):
    """A run, as far as it says what it waits for."""

    @property
    def waiting_for(self) -> tuple[WaitingFor, ...]: ...
    @property
    def wake_at(self) -> datetime | None: ...


def what_it_waits_for(run: WaitingRun, steps: Iterable[StepDescription]) -> str:
    """Return what a run that no worker holds waits for, also the steps among these that are tried again."""
    if run.wake_at is not None and run.wake_at <= datetime.now(UTC):
        return f"due since {in_utc(run.wake_at)} UTC: a worker may go on with it"
    tried_again = retries(steps)
    if tried_again and not run.waiting_for:
        return "; ".join(tried_again)
    things = " or ".join(map(str, run.waiting_for))
    until = "" if run.wake_at is None else f"until {in_utc(run.wake_at)} UTC"
    waits = " ".join(part for part in ("waits", f"for {things}" if things else "", until) if part)
    return "; ".join([waits, *tried_again])


def retries(steps: Iterable[StepDescription]) -> list[str]:
    """Return which of these steps are tried again, and why."""
    return [_retry(step) for step in steps if step.status == "retrying"]


def _retry(step: StepDescription) -> str:
    what = f"{'the compensation of ' if step.kind == 'compensation' else 'step '}{step.key!r}"
    why = "" if step.error is None else f": {step.error.type}: {step.error.message}"
    return f"tries {what} again at {in_utc(step.until)} UTC, after {counted(step.attempts, 'failed attempt')}{why}"
