"""What outlives the processes of a trial: what the store has accepted, what step functions did, what bodies showed.

Everything comes here as an event, so that a process which is killed can leave its events in a file, and another world can be
made of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.model.journal import Entry

# The place of an attempt: its run, how often that had started over, and its number there.
Place = tuple[str, int, int]


@dataclass
class Effect:
    """How often the function of one step was called, by processes that were alive."""

    run_id: str
    key: str
    calls: int = 0
    # Whether the step has a compensation that is still in force.
    is_compensated: bool = False


@dataclass
class Attempt:
    """What one attempt at a run showed: its trace, and which nodes run."""

    number: int
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    # Whether the workflow function came to its end; whether it was cancelled then, and whether tasks of it were still running.
    is_complete: bool = False
    was_cancelled: bool = False
    leaves_tasks: bool = False
    # The nodes that run now, by their places.
    running: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"attempt {self.number}{'' if self.is_complete else ' (not complete)'}"


@dataclass
class World:
    """Everything that a crash does not undo. `rng` is for durations: it need not give the same on a replay."""

    rng: random.Random
    created: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    # The keys of results that the store has accepted, by run, and the highest seq of each run's journal.
    recorded: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    lengths: dict[str, int] = field(default_factory=dict)
    # How often each run has started over.
    rounds: Counter[str] = field(default_factory=Counter)
    # Keys of steps and children by their first open entries, in that order.
    begun: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # Signals by run and inbox seq, with name and text; and the seqs that were consumed, in that order.
    sent: dict[str, dict[int, tuple[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    consumed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # Steps by their idempotency keys, and how often each was undone, in the order of that.
    effects: dict[str, Effect] = field(default_factory=dict)
    undone: Counter[str] = field(default_factory=Counter)
    # Every attempt, in order, by run and round.
    attempts: dict[tuple[str, int], list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, event: str, *what: Any) -> None:
        """Take in an event."""
        getattr(self, f"on_{event}")(*what)

    def accept(self, run_id: str, entries: Sequence[Entry], consume: Sequence[int] = ()) -> None:
        """Take in what the store has accepted."""
        if entries or consume:
            self.tell("accepted", run_id, [(entry.seq, entry.key, entry.phase) for entry in entries], list(consume))

    @property
    def has_ended(self) -> bool:
        """Return whether every run that was created has ended."""
        return bool(self.created) and self.created <= self.ended.keys()

    def on_created(self, run_id: str) -> None:
        self.created.add(run_id)

    def on_ended(self, run_id: str, status: str) -> None:
        self.ended[run_id] = status
        self.changed.set()

    def on_accepted(self, run_id: str, entries: Sequence[tuple[int, str, str]], consume: Sequence[int]) -> None:
        for seq, key, phase in entries:
            if phase == "close":
                self.recorded[run_id].add(key)
            elif phase == "open" and key not in self.begun[run_id]:
                self.begun[run_id].append(key)
            self.lengths[run_id] = max(self.lengths.get(run_id, 0), seq)
        consumed = self.consumed[run_id]
        consumed += [seq for seq in consume if seq not in consumed]

    def on_started_over(self, run_id: str) -> None:
        """Forget the journal, and that what was done can be undone."""
        self.rounds[run_id] += 1
        self.recorded[run_id].clear()
        self.begun[run_id].clear()
        self.lengths[run_id] = 0
        for effect in self.effects.values():
            if effect.run_id == run_id:
                effect.is_compensated = False

    def on_sent(self, run_id: str, seq: int, name: str, text: str) -> None:
        self.sent[run_id].setdefault(seq, (name, text))

    def on_called(self, name: str, run_id: str, key: str, *flags: bool) -> None:
        """Take in a call of a step's function. The flags: it may be called once at most, and it has a compensation."""
        at_most_once, is_compensated = flags
        effect = self.effects.setdefault(name, Effect(run_id, key))
        effect.calls += 1
        effect.is_compensated = effect.is_compensated or is_compensated
        if key in self.recorded[run_id]:
            self.on_wrong(f"step {key!r} of run {run_id!r} ran again after its result was recorded")
        if at_most_once and effect.calls > 1:
            self.on_wrong(f"step {key!r} of run {run_id!r} may run once at most, and ran {effect.calls} times")

    def on_undone(self, name: str) -> None:
        self.undone[name] += 1

    def on_attempt(self, run_id: str, round_: int, number: int) -> None:
        attempts = self.attempts[run_id, round_]
        assert number == len(attempts)
        attempts.append(Attempt(number))

    def on_note(self, place: Place, what: Sequence[Any]) -> None:
        self.attempt_at(place).trace.append(tuple(what))

    def on_complete(self, place: Place, *flags: bool) -> None:
        """Take in that the workflow function has ended. The flags: it was cancelled, and it leaves tasks behind."""
        attempt = self.attempt_at(place)
        attempt.is_complete, (attempt.was_cancelled, attempt.leaves_tasks) = True, flags

    def attempt_at(self, place: Place) -> Attempt:
        run_id, round_, number = place
        return self.attempts[run_id, round_][number]

    def on_wrong(self, what: str) -> None:
        self.wrong.append(what)
        self.changed.set()
