"""The orders that a contender gets, and its answers. Both cross a pipe as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

Shape = Literal["runs", "fan out", "replay", "import", "prepare", "queued", "first step"]
# A result of a step is a short sentence unless the work says otherwise.
RESULT_BYTES = 20


class Work(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one sample is taken of.

    - runs: `runs` runs of `steps` steps that follow one another, `at_once` runs at the same time, wave after wave
    - fan out: one run whose steps are all started at once
    - replay: a run of `steps` steps that is whole is driven again, so that every step answers from what is recorded
    - import: `statement` in a fresh interpreter
    - queued: `runs` one-step runs that are queued before, worked on by so many `workers`, each a process of its own
    - first step: `runs` one-step runs, queued one after the other for one worker: from the call until the step begins
    - prepare: nothing but what comes before any work, which leaves a finished run behind
    """

    shape: Shape = "runs"
    runs: int = 1
    steps: int = 1
    at_once: int = 1
    # How long a step's result is.
    size: int = RESULT_BYTES
    # How many finished runs the store has before.
    stored: int = 0
    statement: str = ""
    workers: int = 1

    @property
    def operations(self) -> int:
        """What a rate counts: steps. Of imports there is one, which is the median of the runs."""
        return 1 if self.shape == "import" else self.runs * self.steps

    @property
    def waves(self) -> list[int]:
        """How many runs there are in each wave."""
        return [min(self.at_once, self.runs - before) for before in range(0, self.runs, self.at_once)]

    def small(self) -> Work:
        """The same at a size that only shows that it works."""
        few = min(self.runs, 3)
        at_once, steps, stored = min(self.at_once, few), min(self.steps, 5), min(self.stored, 20)
        workers = min(self.workers, 2)
        return msgspec.structs.replace(self, runs=few, at_once=at_once, steps=steps, stored=stored, workers=workers)


class Order(msgspec.Struct, frozen=True):
    """Do this work at that place: the path of an SQLite file, a DSN of PostgreSQL, or nowhere.

    With `counted`, what is written is counted instead of timed: counting is exact, and disturbs the clock.
    """

    work: Work
    place: str = ""
    counted: bool = False


class Sample(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What one side needed once. Of a counted sample the times say nothing."""

    operations: int
    seconds: float
    cpu_seconds: float
    commits: int = 0
    bytes_written: int = 0
    bytes_stored: int = 0
    resident_bytes: int = 0


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The contender could not do it, and this is why."""

    reason: str


Answer = Sample | Failure
