"""What must hold when every run has ended: the provider's book against what the runs say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.model.records import RunInfo
from tests.sagas.provider import Event


class Violation(NamedTuple):
    """What went wrong, in a word by which it is known, and in a sentence."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Ended:
    """How a run ended."""

    info: RunInfo
    # What it gave, if it completed: things, each with the key under which it was paid for.
    receipts: list[tuple[str, str]] = field(default_factory=list)
    # The steps that it says were not undone.
    not_undone: set[str] = field(default_factory=set)
    # What its error says.
    error: str = ""
    # How often it has started over.
    again: int = 0
    parent_id: str | None = None
    parent_key: str = ""
    # What names the things of a child.
    place: str = ""
    # Whether an operator retried this run itself.
    was_retried: bool = False
    # Whether an operator asked that nothing is undone.
    is_abandoned: bool = False
    # The run whose charges this one may refund, since it took over.
    takes_over: str | None = None


@dataclass
class _Charge:
    event: Event
    refunds: list[Event] = field(default_factory=list)


class Judge:
    """Goes through the book, in order, and then through the runs."""

    def __init__(self, book: Sequence[Event], runs: dict[str, Ended]) -> None:
        self._book = book
        self._runs = runs
        self._charges: dict[str, _Charge] = {}
        self._by_thing: dict[str, list[_Charge]] = defaultdict(list)
        # What each key was used for.
        self._uses: dict[str, tuple[str, str]] = {}
        # What was being undone since each charge: the things of steps and of children.
        self._undone: list[str] = []
        # Whether each child had a compensation when it was called, by the run that called it and its place.
        self._children: dict[tuple[str, str], set[bool]] = defaultdict(set)
        # The charges that are recorded for sure.
        self._got = set[tuple[str, str]]()

    def violations(self) -> list[Violation]:
        found = [violation for event in self._book for violation in self._read(event)]
        return list(dict.fromkeys([*found, *self._in_the_end()]))

    def _read(self, event: Event) -> Iterator[Violation]:
        if event.kind == "undoing":
            self._undone.append(event.thing)
        elif event.kind == "child":
            self._children[event.run, event.thing].add(event.asked)
        elif event.kind == "got":
            self._got.add((event.thing, event.key))
        elif event.kind == "charge":
            yield from self._used(event.key, ("charge", event.thing))
            yield from self._charged(event)
        elif event.kind == "refund":
            yield from self._used(event.key, ("refund", event.of))
            yield from self._refunded(event)

    def _used(self, key: str, use: tuple[str, str]) -> Iterator[Violation]:
        known = self._uses.setdefault(key, use)
        if known != use:
            yield Violation("key used twice", f"{key!r} is the key of the {' of '.join(known)} and of the {' of '.join(use)}")

    def _charged(self, event: Event) -> Iterator[Violation]:
        known = self._charges.get(event.key)
        if known is None:
            for other in self._by_thing[event.thing]:
                if not other.refunds and self._must_stay_alone(other, event):
                    yield Violation(
                        "charged again", f"{event.thing!r} was charged under {other.event.key!r} and again under {event.key!r}"
                    )
            charge = self._charges[event.key] = _Charge(event)
            self._by_thing[event.thing].append(charge)
        elif known.refunds and known.event.thing == event.thing:
            yield Violation("refunded key", f"{event.thing!r} was charged under {event.key!r}, which had been refunded")

    def _refunded(self, event: Event) -> Iterator[Violation]:
        charge = self._charges.get(event.of)
        if charge is None:
            if not event.in_doubt:
                yield Violation("refund of nothing", f"{event.run!r} refunded {event.of!r}, which was never charged")
            return
        if event.key not in {refund.key for refund in charge.refunds}:
            if charge.refunds:
                keys = sorted({charge.refunds[0].key, event.key})
                yield Violation("refunded twice", f"{event.of!r} was refunded under {keys}")
            charge.refunds.append(event)
        if event.run != charge.event.run and not self._may_refund(event.run, charge.event.run):
            yield Violation(
                "another's refund", f"{event.run!r} refunded what {charge.event.run!r} had charged under {event.of!r}"
            )

    def _must_stay_alone(self, earlier: _Charge, event: Event) -> bool:
        """Whether this thing must not be charged again. What is in doubt and has no compensation may be."""
        is_known = earlier.event.asked or (earlier.event.thing, earlier.event.key) in self._got
        return is_known and not self._is_of_undone_child(earlier, event)

    def _is_of_undone_child(self, earlier: _Charge, event: Event) -> bool:
        """Whether this is another run of a child that was undone. What it had charged and not given back is its own business."""
        return earlier.event.run != event.run and any(
            event.thing.startswith((f"{thing}.", f"{thing}[")) for thing in self._undone
        )

    def _may_refund(self, run_id: str, charged_by: str) -> bool:
        """Whether the run is a parent, or a fork that took over, perhaps from another one."""
        original: str | None = run_id
        while original is not None:
            if original == charged_by or self._is_ancestor(original, charged_by):
                return True
            run = self._runs.get(original)
            original = None if run is None else run.takes_over
        return False

    def _is_ancestor(self, run_id: str, child_id: str) -> bool:
        child = self._runs.get(child_id)
        while child is not None and child.parent_id is not None:
            if child.parent_id == run_id:
                return True
            child = self._runs.get(child.parent_id)
        return False

    def _in_the_end(self) -> Iterator[Violation]:
        for charge in self._charges.values():
            if charge.event.asked and not charge.refunds:
                yield from self._kept(charge.event)
        for run in self._runs.values():
            if run.info.status == "completed":
                for thing, key in run.receipts:
                    yield from self._in_force(run, thing, key)
                yield from self._child_kept(run)

    def _in_force(self, run: Ended, thing: str, key: str) -> Iterator[Violation]:
        """A result that its run has completed with stands for a charge. What a fork has copied belongs to its original."""
        charge = self._charges.get(key)
        if charge is None:
            yield Violation(
                "result of nothing", f"run {run.info.id!r} completed with {thing!r} under {key!r}, which was not charged"
            )
            return
        is_own = charge.event.run == run.info.id or self._is_ancestor(run.info.id, charge.event.run)
        wrong = [
            refund for refund in charge.refunds if not self._is_ancestor(refund.run, run.info.id) and not self._took(refund.run)
        ]
        if is_own and wrong:
            text = f"run {run.info.id!r} completed with {thing!r} under {key!r}, which {wrong[0].run!r} refunded"
            yield Violation("refunded in force", text)

    def _took(self, run_id: str) -> bool:
        run = self._runs.get(run_id)
        return run is not None and run.takes_over is not None

    def _kept(self, event: Event) -> Iterator[Violation]:
        """A charge that was not refunded, though its step has a compensation."""
        run = self._runs.get(event.run)
        if run is None:
            yield Violation("lost run", f"{event.key!r} was charged by run {event.run!r}, which is not there")
            return
        status = run.info.status
        if status == "completed" or _again_of(event.thing) < run.again:
            return
        if status in ("failed", "cancelled", "dead") and not self._is_said(run, event.step):
            late = "late" if "DeadlineExceeded" in run.error else status
            yield Violation("not undone", f"run {event.run!r} ended as {late}; {event.thing!r} is charged under {event.key!r}")

    def _child_kept(self, child: Ended) -> Iterator[Violation]:
        """A child that completed, has a compensation in every version of the code, and whose parent ended badly after it."""
        parent = self._runs.get(child.parent_id or "")
        if parent is None or parent.info.status not in ("failed", "cancelled") or child.info.updated_at > parent.info.updated_at:
            return
        if child.was_retried or _again_of(child.place) < parent.again:  # the parent has another outcome of it, or starts over
            return
        if self._children[parent.info.id, child.place] != {True} or self._is_said(parent, child.parent_key):
            return
        for thing, key in child.receipts:
            charge = self._charges.get(key)
            if charge is not None and charge.event.run == child.info.id and not charge.refunds:
                yield Violation("child not undone", f"run {parent.info.id!r} ended; its child {child.info.id!r} keeps {thing!r}")

    def _is_said(self, run: Ended, key: str) -> bool:
        """Whether the run says that this was not undone, and may do so."""
        may_stay = run.info.status == "dead" or f"{key}: " in run.error or self._is_abandoned(run)
        return may_stay and key in run.not_undone

    def _is_abandoned(self, run: Ended | None) -> bool:
        """Whether nothing was to be undone in this run, or in one of its parents."""
        while run is not None and not run.is_abandoned:
            run = self._runs.get(run.parent_id) if run.parent_id is not None else None
        return run is not None


def _again_of(thing: str) -> int:
    """In which round of its run this is paid for."""
    number = thing.partition("#")[2].partition(".")[0]
    return int(number) if number.isdigit() else 0
