"""Each pattern, with its worker killed at every store call: another takes over, nothing is lost, and what was done stays done.

`make test` tries some of the calls, `PERDURE_CHAOS=1` all of them. `pytest -s` prints how many, and by verb.
"""

from __future__ import annotations

import pkgutil
import signal
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from tests.backends import patterns
from tests.backends.conftest import Start
from tests.backends.pattern_jobs import KillPoint, Place, take_over, work_until_killed
from tests.backends.patterns import EffectLedger, Kind, LedgerLine
from tests.backends.places import new_name, with_options
from tests.backends.processes import Child
from tests.backends.registry import POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL

PATTERNS: Final = sorted(module.name for module in pkgutil.iter_modules(patterns.__path__))
# Every how many-th call is tried where a campaign is shortened.
STRIDE: Final = 1 if IS_FULL else 13
# The number of calls depends on how the processes take turns, so one run-through that was not killed may have been a short one.
UNKILLED: Final = 2 if IS_FULL else 1


@on(SQLITE, POSTGRES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.timeout(1800 if IS_FULL else 300)
def test_a_worker_may_be_killed_at_any_store_call(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, pattern: str, after: bool, record_property: Any
) -> None:
    campaign = Campaign(dsn, start, tmp_path, pattern)
    killed_at = Counter[str]()
    for run in (*campaign.runs, "") if IS_FULL else ("",):
        # Few: the other process may take most of the calls, and a worker that makes fewer than these is not killed.
        unkilled, n = 0, 0 if IS_FULL or not after else STRIDE // 4
        while unkilled < UNKILLED:
            verb = campaign.run_through(KillPoint(n, run, after))
            if verb is None:
                unkilled += 1
            else:
                killed_at[verb] += 1
            n += STRIDE if verb else 1
    points = f"{killed_at.total()} kill points: {', '.join(f'{verb} {n}' for verb, n in killed_at.most_common())}"
    print(f"\n{pattern} on {backend}, killed {'after' if after else 'before'} a call: {points}")
    record_property("kill_points", points)
    assert killed_at, "no worker was killed"
    campaign.end()


class Campaign:
    """Run-throughs of one pattern. The first is undisturbed, and all others must come to the same."""

    def __init__(self, dsn: str, start: Start, directory: Path, pattern: str) -> None:
        self._dsn = dsn
        self._start = start
        self._directory = directory
        self._pattern = pattern
        self._optional: frozenset[str] = getattr(import_module(f"{patterns.__name__}.{pattern}"), "OPTIONAL", frozenset())
        self._survivor = start(take_over, pattern)
        place, is_alive = self._run(None)
        assert is_alive
        self._ends = self._survivor.receive()
        self._effects = self._effects_of(check_effects(lines_in(place)))
        assert self._effects, f"pattern {pattern} has no effects"

    @property
    def runs(self) -> list[str]:
        """The ids of all runs of the pattern."""
        return sorted(self._ends)

    def run_through(self, dies_at: KillPoint) -> str | None:
        """Kill the worker at this call and check what the other one makes of it. The verb, or None if there were fewer calls."""
        place, is_alive = self._run(dies_at)
        try:
            ends = self._survivor.receive()
            lines = lines_in(place)
            assert ends == self._ends
            effects = self._effects_of(check_effects(lines))
            assert not self._effects - effects, "effects were lost"
            assert not effects - self._effects, "there were other effects"
        except AssertionError as failure:
            history = "\n".join(f"  {line}" for line in lines_in(place))
            raise AssertionError(f"killed {dies_at}: {failure}\n{history}") from failure
        return None if is_alive else next(line.key for line in lines if line.kind == "killed")

    def end(self) -> None:
        self._survivor.send(None)
        self._survivor.wait_for_exit()

    def _run(self, dies_at: KillPoint | None) -> tuple[Place, bool]:
        """One run-through; whether its worker lived to see the end."""
        place = Place(with_options(self._dsn, f"prefix={new_name()}"), self._directory / new_name())
        self._survivor.send(place)
        assert self._survivor.receive() == "ready"
        mortal = self._start(work_until_killed, self._pattern, place, dies_at)
        is_alive = ended_well(mortal)
        self._survivor.send("take over")
        return place, is_alive

    def _effects_of(self, lines: list[LedgerLine]) -> set[tuple[str, str, str]]:
        return {(line.run, line.key, line.what) for line in lines if line.key not in self._optional}


def ended_well(mortal: Child) -> bool:
    """Whether the process came to its end; False when it was killed."""
    code = mortal.exit_code()
    if code not in (0, -signal.SIGKILL):
        mortal.receive()  # raises what it failed with
    assert code in (0, -signal.SIGKILL), f"the worker ended with {code}"
    mortal.kill()
    return code == 0


def lines_in(place: Place) -> list[LedgerLine]:
    ledger = EffectLedger(place.ledger, "test")
    try:
        return ledger.lines()
    finally:
        ledger.close()


def check_effects(lines: list[LedgerLine]) -> list[LedgerLine]:
    """The effects. No process had one twice, and none came after the step's result had reached its body or the store.

    An idempotency key tells the generations of a run apart: in a new one, its steps run again.
    """
    done: dict[str, LedgerLine] = {}
    had: set[LedgerLine] = set()
    keys: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        place = line.run, line.key
        if line.kind == "effect":
            assert line.idempotency_key not in done, f"{line} after {done[line.idempotency_key]}"
            assert line not in had, f"{line} came twice in one process"
            had.add(line)
            keys.setdefault(place, set()).add(line.idempotency_key)
        elif line.kind in ("returned", "recorded", "failed"):
            done.update(dict.fromkeys(keys.get(place, ()), line))
        elif line.kind == "reopened":
            had = {each for each in had if each.run != line.run}
            done = {key: each for key, each in done.items() if not (each.run == line.run and each.kind == "failed")}
    return [line for line in lines if line.kind == "effect"]


def test_the_check_of_effects_finds_what_ran_again() -> None:
    effect = LedgerLine("mortal", "effect", "r", "a", "a", 1, "r/a")
    again = effect._replace(process="survivor")
    check_effects([effect, again])  # it was in flight when its process was killed
    check_effects([effect, LedgerLine("mortal", "failed", "r", "a"), LedgerLine("survivor", "reopened", "r"), again])
    new_generation = again._replace(idempotency_key="r/a/1")
    check_effects([effect, LedgerLine("mortal", "recorded", "r", "a"), new_generation])
    ends: tuple[Kind, ...] = ("returned", "recorded", "failed")
    for kind in ends:
        with pytest.raises(AssertionError, match=f"after.*{kind}"):
            check_effects([effect, LedgerLine("mortal", kind, "r", "a"), again])
    with pytest.raises(AssertionError, match="twice in one process"):
        check_effects([effect, effect])
