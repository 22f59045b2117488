"""`ResumeStateCollector`: a listener that always has the whole state of the run it listens to."""

from __future__ import annotations

from perdure.events import Event
from perdure.resume import ResumeState
from perdure.stateview import View


class ResumeStateCollector:
    """Pass `handle_event` as `on_event=`, or to `run.subscribe`, and save `resume_state()` as often as you like.

    What the run had recorded before it was driven here is part of it from the first event on, so that saving again never loses
    anything. One collector is for one run; of several, it knows the one it heard of last.
    """

    def __init__(self) -> None:
        self._view: View | None = None

    def handle_event(self, event: Event) -> None:
        """Take note of what is recorded by now."""
        self._view = event.view

    def resume_state(self) -> ResumeState:
        """The results of all steps that are recorded; empty before the first event."""
        return ResumeState() if self._view is None else self._view.resume_state()
