"""What outlives the processes of a trial: what the store has accepted, what step functions did, and what was seen to be wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.model.journal import Entry


@dataclass
class Effect:
    """How often the function of one step was called, by processes that were alive."""

    run_id: str
    key: str
    calls: int = 0
    # Whether the step has a compensation that is still in force.
    is_compensated: bool = False


@dataclass
class World:
    """Everything that a crash does not undo. `rng` is for durations: it need not give the same on a replay."""

    rng: random.Random
    # The keys of results that the store has accepted, by run, and how many entries each run's journal has.
    recorded: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    lengths: dict[str, int] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    # Signals by run and inbox seq, with name and text; and the seqs that were consumed, in that order.
    sent: dict[str, dict[int, tuple[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    consumed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # Keys of steps and children by their first open entries, in that order.
    begun: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    effects: dict[str, Effect] = field(default_factory=dict)
    # Idempotency keys of steps that were undone, in that order, and how often.
    undone: Counter[str] = field(default_factory=Counter)
    # Every attempt, in order, by run and round.
    attempts: dict[tuple[str, int], list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def accept(self, run_id: str, entries: Sequence[Entry], consume: Sequence[int] = ()) -> None:
        """Note what the store has accepted."""
        for entry in entries:
            if entry.phase == "close":
                self.recorded[run_id].add(entry.key)
            elif entry.phase == "open" and entry.key not in self.begun[run_id]:
                self.begun[run_id].append(entry.key)
            self.lengths[run_id] = max(self.lengths.get(run_id, 0), entry.seq)
        consumed = self.consumed[run_id]
        consumed += [seq for seq in consume if seq not in consumed]

    def start_over(self, run_id: str) -> None:
        """Note that the run has an empty journal again, and has forgotten how to undo what it did."""
        self.recorded[run_id].clear()
        self.begun[run_id].clear()
        self.lengths[run_id] = 0
        for effect in self.effects.values():
            if effect.run_id == run_id:
                effect.is_compensated = False

    def end(self, run_id: str, status: str) -> None:
        self.ended[run_id] = status
        self.changed.set()

    @property
    def has_ended(self) -> bool:
        """Return whether every run that was created has ended."""
        return bool(self.created) and self.created <= self.ended.keys()

    def is_recorded(self, run_id: str, key: str) -> bool:
        return key in self.recorded[run_id]


class Attempt:
    """What one attempt at a run showed: its trace, and where its branches are."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.trace: list[tuple[Any, ...]] = []
        self.is_open = True
        # Whether the workflow function came to its end.
        self.is_complete = False
        # The nodes that run now, by their places.
        self.running: dict[str, str] = {}
        # Numbers in the order in which branches ask: part of keys and of the trace.
        self.asked = 0
        self.was_cancelled = False

    def close(self) -> None:
        """Note nothing any more: what the body does while it leaves memory depends on when that is."""
        self.is_open = False

    def __str__(self) -> str:
        return f"attempt {self.number}{'' if self.is_complete else ' (not complete)'}"
