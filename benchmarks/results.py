"""What a run of the benchmarks found: all samples with what they were made on, as JSON, and the figures that follow from them."""

from __future__ import annotations

import statistics
from typing import Final, NamedTuple

import msgspec

from benchmarks.bars import Bar, Measure
from benchmarks.work import Answer, Failure, Sample, Work
from benchmarks.workloads import Side, Workload


class Taken(msgspec.Struct):
    """What one side did and answered, an answer for each round."""

    contender: str
    work: Work
    answers: list[Answer]

    @property
    def samples(self) -> list[Sample | None]:
        """The answers; None where it failed."""
        return [None if isinstance(answer, Failure) else answer for answer in self.answers]


class Measured(msgspec.Struct):
    """A workload's sides in their order."""

    name: str
    measured: str
    sides: dict[str, Taken]


class Results(msgspec.Struct):
    """Everything. `machine`, `versions` and `settings` say what the figures are worth."""

    date: str
    commit: str
    rounds: int
    quick: bool
    machine: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, str]
    workloads: dict[str, Measured]

    def add(self, workload: Workload, label: str, side: Side, answer: Answer) -> None:
        """Keep an answer."""
        measured = self.workloads.setdefault(workload.name, Measured(workload.name, workload.measured, {}))
        measured.sides.setdefault(label, Taken(side.contender, side.work, [])).answers.append(answer)

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(workload, side, reason) of everything that went wrong, once each."""
        found = (
            (name, label, answer.reason)
            for name, measured in self.workloads.items()
            for label, taken in measured.sides.items()
            for answer in taken.answers
            if isinstance(answer, Failure)
        )
        return list(dict.fromkeys(found))


class Spread(NamedTuple):
    """Of the rounds' figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        """None where no round has a figure."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


_MEASURES: Final = {
    "rate": lambda sample: sample.operations / sample.seconds,
    "time": lambda sample: sample.seconds / sample.operations,
    "CPU": lambda sample: sample.cpu_seconds / sample.operations,
    "bytes written": lambda sample: sample.bytes_written / sample.operations,
    "bytes stored": lambda sample: sample.bytes_stored / sample.operations,
    "commits": lambda sample: sample.commits / sample.operations,
}


def figures(taken: Taken, measure: Measure) -> Spread | None:
    """A measure per operation, over the rounds."""
    return Spread.of([_MEASURES[measure](sample) for sample in taken.samples if sample is not None])


def ratios(subject: Taken, other: Taken, measure: Measure, other_measure: Measure | None = None) -> Spread | None:
    """Round by round, because a busy moment of the machine hits both sides of a round and not both of two."""
    return Spread.of(
        [
            _MEASURES[measure](ours) / divisor
            for ours, theirs in zip(subject.samples, other.samples, strict=False)
            if ours is not None and theirs is not None and (divisor := _MEASURES[other_measure or measure](theirs))
        ]
    )


def reached(results: Results, bar: Bar) -> Spread | None:
    """The ratio that a bar is about; None when a side of it was not measured."""
    sides = [
        measured.sides.get(label)
        for name, label in (bar.subject, bar.other)
        if (measured := results.workloads.get(name)) is not None
    ]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return ratios(sides[0], sides[1], bar.measure, bar.other_measure)
