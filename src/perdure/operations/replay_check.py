"""Whether a stored run fits this code, found out by a replay that executes nothing and writes nothing.

A `ReplayCheck` is a drive without a store that must stop before it has started. Recorded results reach the body as in every
replay, and misfits are found by the same code. Since the run never goes live, no step function is called, no timer or signal is
taken and no cache is asked. When the run would go live, the verdict is known and the body is unloaded. Code of the body between
ctx calls runs, as in every replay.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.codec.outcomes import Hints
from perdure.engine.drive import Drive
from perdure.errors import OnChange, PerdureError, RunDiverged, SnapshotMismatch, StepChanged, name_step
from perdure.model.journal import Entry
from perdure.model.records import Claim, Lease, RunInfo, RunRow, problem_text
from perdure.options import EngineSettings, Options
from perdure.result import Err, Suspended
from perdure.snapshots.consistent_view import View

Verdict: TypeAlias = Literal["fits", "warns", "stops", "unknown"]


class RunCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one run fits the code. `problem` says why it stops, `at` at which key if there is one, or why that is unknown."""

    run_id: str
    workflow: str
    version: int
    verdict: Verdict
    problem: str | None = None
    at: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: RunRow | RunInfo, verdict: Verdict, problem: str | None = None, **fields: Any) -> RunCheck:
        """The verdict on this run."""
        text = None if problem is None else problem_text(problem)
        return cls(run_id=run.id, workflow=run.workflow, version=run.version, verdict=verdict, problem=text, **fields)

    def __str__(self) -> str:
        where = "" if self.at is None else f" at {self.at!r}"
        why = f": {self.reason}" if self.reason else ""
        return f"{self.verdict}: {self.run_id} ({self.workflow}, version {self.version}){where}{why}"

    @property
    def reason(self) -> str:
        """The problem and the warnings, without the id of the run: runs that stop for one reason have the same text."""
        text = "; ".join(text for text in (self.problem, *self.warnings) if text is not None)
        return text.replace(f"run {self.run_id!r}", "the run")


class ReplayCheck(Drive):
    """The check of one run."""

    def __init__(
        self,
        body: Callable[[Drive], Coroutine[Any, Any, Any]],
        hints: Hints,
        claim: Claim,
        settings: EngineSettings,
        options: Options,
        retired: Collection[str],
    ) -> None:
        silent = msgspec.structs.replace(options, on_event=None)
        super().__init__(body, hints, claim, settings, silent, retired=retired)
        # As in a drive that has a store.
        self.is_strict = options.strict is not False
        self.compares_arguments = options.on_changed_arguments != "ignore"
        self.is_check = True
        self._warnings: list[str] = []
        # Why there is no verdict: the body took too long.
        self._unfinished: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def check(self, patience: float) -> RunCheck:
        """The verdict; unknown when for `patience` seconds the body neither moved on in the journal nor came to its end."""
        self._watch(patience)
        try:
            outcome = await self.drive()
        except PerdureError as misfit:
            return self._judge("stops", str(misfit), misfit)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._unfinished is not None:
            return self._judge("unknown", self._unfinished)
        if isinstance(outcome, Err) and self._is_of_body(outcome):
            text = traceback.format_exception_only(outcome.error)[0].strip()  # also of an error that cannot be printed
            return self._judge("stops", f"the body raises an error of its own, and the run would fail: {text}", outcome.error)
        missing = self.calls.cursor.missing_keys()
        if isinstance(outcome, Suspended) and missing and not self.run.cancel_requested:
            self._warnings.append(_not_asked_for(missing))
        return self._judge("warns" if self._warnings else "fits")

    def warn_or_raise(self, choice: OnChange, error: PerdureError, what: str) -> None:  # noqa: ARG002 - it keeps them for the verdict
        if choice == "warn":
            self._warnings.append(error.reason if isinstance(error, SnapshotMismatch) else str(error))
        elif choice == "error":
            raise error

    def note_gone(self, failed: Entry, classes: list[str]) -> None:
        super().note_gone(failed, classes)
        names = ", ".join(classes)
        self._warnings.append(
            f"the error of {name_step(failed.key)} has a class that is not found here, {names}, so `except {names}` does not "
            "match; define it at module level under this name, in a module that this process imports"
        )

    def _go_on_live(self, *, is_spinning: bool) -> bool:
        """The journal is used up. A body that waits for nothing of ours is busy with something of its own: it goes on."""
        if self.calls.cursor.missing and (timers := self.body.timers):  # it goes on when they fire
            self.body.fire(min(timers.values(), key=lambda timer: timer.at))
            return True
        error = None if self.cancellation.is_next else self.calls.find_divergence()
        if error is not None:
            missing = min(self.calls.cursor.missing.values(), key=lambda entry: entry.seq)
            if not self._patience.has(missing, is_spinning=is_spinning):
                self.stop_misfit(error)
            return False
        if self._take_patch():
            return True
        if self.calls.cursor.asked or self.body.timers:
            self.must_stop = True
            self._attend()
        return False

    def _take_patch(self) -> bool:
        """Let a call of `ctx.patched` have the new code, without a record."""
        for call in self.calls.cursor.asked.values():
            if call.kind == "patch":
                self.calls.cursor.withdraw(call)
                call.tell(is_new=True)
                return True
        return False

    def stop_misfit(self, error: PerdureError) -> None:
        self.fail(error)

    def _watch(self, patience: float, before: tuple[int, int] | None = None) -> None:
        """End the check if no recorded result was asked for or delivered since the last look."""
        left = self.calls.cursor.calls_made, len(self.calls.cursor.entries)
        if left != before:
            self._timer = self.loop.call_later(patience, self._watch, patience, left)
        elif not self.is_closed:
            divergence = self._foreseen_divergence()
            self._unfinished = f"its body was busy with something of its own for {patience:g} s"
            if divergence is not None:
                self._unfinished += f"; if it stays like this: {divergence}"
            self.must_stop = True
            self._attend()

    def _foreseen_divergence(self) -> PerdureError | None:
        """Return the error with which the run stops if its body asks for nothing more."""
        cursor = self.calls.cursor
        while (found := cursor.look()).what == "unasked":
            cursor.pass_over()
        return self.calls.find_divergence() if found.call is None else None

    def _is_of_body(self, failed: Err[Any]) -> bool:
        """Whether an exception of the body's own code ended it, and none that is recorded."""
        return isinstance(failed.error, Exception) and failed.step is None and self.calls.failed_keys(failed) is None

    def _judge(self, verdict: Verdict, problem: str | None = None, error: Exception | None = None) -> RunCheck:
        at = error.asked if isinstance(error, RunDiverged) else error.key if isinstance(error, StepChanged) else None
        return RunCheck.of(self.run, verdict, problem, at=at, warnings=tuple(self._warnings))


def _not_asked_for(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:5])) + (" and others" if len(keys) > 5 else "")
    return (
        f"{shown} is recorded and not asked for up to where the run waits, so it stops if it asks for something new after that; "
        f"removed: @workflow(retired={{{keys[0]!r}}})"
    )


def claim_to_check(view: View) -> Claim:
    """The run as if it had been claimed: without a lease, and whatever the number of its attempts."""
    run, entries = msgspec.structs.replace(view.row, attempts=0), list(view.journal[: view.length])
    lease = Lease(run_id=run.id, epoch=run.epoch, token="", until=0)
    inbox = list(view.inbox)
    last = max((signal.seq for signal in inbox), default=0)
    return Claim(lease=lease, run=run, journal=entries, inbox=inbox, inbox_seq=last, item_counts={})
