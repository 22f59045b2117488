"""What must hold when every run of a trial has ended."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.fuzz.process import MAIN
from tests.fuzz.programs import Program
from tests.fuzz.world import Attempt, World


def violations(program: Program, world: World, inboxes: dict[str, set[int]]) -> list[str]:
    """Return what was wrong, in sentences. `inboxes` has the seqs that were never consumed, by run."""
    return [
        *world.wrong,
        *_ends(program, world),
        *_traces(program, world),
        *_signals(program, world, inboxes),
        *_compensations(world),
    ]


def compared(world: World) -> int:
    """Return how many entries of traces were compared with those of an earlier attempt."""
    return sum(
        min(len(earlier.trace), len(later.trace))
        for attempts in world.attempts.values()
        for earlier, later in itertools.pairwise(attempts)
    )


def _ends(program: Program, world: World) -> Iterator[str]:
    allowed = {"completed"}
    # A child that fails and is never awaited fails its parent. What would await it may have been cancelled.
    leaves_child = any(node.kind == "start_child" for node in program.tree.all())
    # A gather in a scope of anyio, whose last branch swallows the cancellation, lets it out of the scope: on plain asyncio, too.
    has_scopes = any(node.kind in ("cancel_scope", "anyio_group", "move_on_after", "fail_after") for node in program.tree.all())
    allowed |= {"failed"} if program.raises or program.deadline is not None or leaves_child or has_scopes else set()
    allowed |= {"cancelled"} if program.cancel_after is not None or program.cancels_itself else set()
    status = world.ended.get(MAIN, "not ended")
    if status not in allowed:
        yield f"the run is {status}, and may be {' or '.join(sorted(allowed))}"
    for run_id, each in world.ended.items():
        if each == "dead":
            yield f"run {run_id!r} is dead"


def _traces(program: Program, world: World) -> Iterator[str]:
    """Compare attempts in order; of bodies with I/O of their own those that are complete, and only by what is in them."""
    noted = sum(len(attempt.trace) for attempts in world.attempts.values() for attempt in attempts)
    if not noted and not program.is_cut_short:
        yield "no attempt has a trace: there is nothing to compare"
    for (run_id, round_), attempts in world.attempts.items():
        for earlier, later in _pairs(attempts):
            name = f"run {run_id!r}, round {round_}: {earlier} and {later}"
            before, now = earlier.trace, later.trace
            if program.has_own_io:
                if earlier.is_complete and later.is_complete and not _is_cut_short(program, earlier, later):
                    yield from _other_things(name, before, now)
                continue
            yield from _difference(name, before, now)
            if earlier.is_complete and later.is_complete and len(now) != len(before):
                yield f"{name} are complete, and have traces of {len(before)} and {len(now)}"


def _is_cut_short(program: Program, *attempts: Attempt) -> bool:
    return program.is_cut_short or any(attempt.was_cancelled for attempt in attempts)


def _pairs(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Attempt]]:
    """Yield each attempt with the longest one before it."""
    longest: Attempt | None = None
    for attempt in attempts:
        if longest is not None:
            yield longest, attempt
        if longest is None or len(attempt.trace) >= len(longest.trace):
            longest = attempt


def _difference(name: str, earlier: Sequence[Any], later: Sequence[Any]) -> Iterator[str]:
    for number, (before, now) in enumerate(zip(earlier, later, strict=False)):
        if before != now:
            around = slice(max(0, number - 2), number + 3)
            yield f"{name} differ at {number}:\n  was {list(earlier[around])}\n  now {list(later[around])}"
            return


def _other_things(name: str, earlier: Iterable[Any], later: Iterable[Any]) -> Iterator[str]:
    before, now = Counter(map(repr, earlier)), Counter(map(repr, later))
    if before != now:
        yield f"{name} have other things:\n  only before: {list(before - now)[:3]}\n  only now: {list(now - before)[:3]}"


def _signals(program: Program, world: World, inboxes: dict[str, set[int]]) -> Iterator[str]:
    for run_id, sent in world.sent.items():
        consumed = [seq for seq in world.consumed[run_id] if seq in sent]
        left = inboxes.get(run_id, set()) & sent.keys()
        if lost := sent.keys() - set(consumed) - left:
            yield f"signals of run {run_id!r} are neither consumed nor left: {[sent[seq] for seq in sorted(lost)]}"
        if again := left.intersection(consumed):
            yield f"signals of run {run_id!r} were consumed and are left: {[sent[seq] for seq in sorted(again)]}"
        for name in {name for name, _ in sent.values()}:
            order = [seq for seq in consumed if sent[seq][0] == name]
            if order != sorted(order):
                yield f"signals {name!r} of run {run_id!r} were taken in the order {[sent[seq][1] for seq in order]}"
            if order and any(seq < order[-1] for seq in left if sent[seq][0] == name):
                yield f"a signal {name!r} of run {run_id!r} was passed over: {order} were taken, {sorted(left)} are left"
        yield from _seen_signals(program, world, run_id, Counter(sent[seq] for seq in consumed))


def _seen_signals(program: Program, world: World, run_id: str, taken: Counter[tuple[str, str]]) -> Iterator[str]:
    """A body has seen what was taken for it, each signal once."""
    seen: Counter[tuple[str, str]] = Counter()
    leaves_tasks = False  # which may be given a signal that nobody sees
    for (owner, _), attempts in world.attempts.items():
        if owner == run_id and attempts:
            longest = max(attempts, key=lambda attempt: len(attempt.trace))
            leaves_tasks = leaves_tasks or longest.leaves_tasks
            seen.update((each[2], each[3]) for each in longest.trace if each[1:2] == ("got",) and each[3] != "late")
    if extra := seen - taken:
        yield f"run {run_id!r} saw signals that were not taken for it, or twice: {sorted(extra)}"
    is_whole = world.ended.get(run_id) == "completed" and not program.is_cut_short and not leaves_tasks
    if is_whole and (unseen := taken - seen):
        yield f"signals were taken for run {run_id!r}, which never saw them: {sorted(unseen)}"


def _compensations(world: World) -> Iterator[str]:
    for name, effect in world.effects.items():
        if not effect.is_compensated:
            continue
        is_undone, status = name in world.undone, world.ended.get(effect.run_id)
        if status == "completed" and is_undone:
            yield f"step {effect.key!r} of run {effect.run_id!r}, which completed, was undone"
        if status in {"failed", "cancelled"} and not is_undone:
            yield f"step {effect.key!r} of run {effect.run_id!r}, which {status}, was not undone"
    for run_id, begun in world.begun.items():
        # One that was never called may be undone all the same: its intent was recorded, and the process died.
        called = [world.effects[name] for name in world.undone if name in world.effects]
        undone = [effect.key for effect in called if effect.run_id == run_id]
        order = [key for key in begun if key in undone]
        if undone != order[::-1]:
            yield f"run {run_id!r} began {order} in this order, and undid {undone}"
