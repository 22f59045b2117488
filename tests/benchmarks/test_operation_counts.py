"""Nothing gets dearer unseen: what a step and a run cost in operations, which a busy machine cannot change, against a baseline.

`make baseline` writes the baseline anew. It is in the repository, so that a change of costs is read like any other change.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks import operations
from benchmarks.operations import Costs

ROOT: Final = Path(__file__).parent.parent.parent
# Dearer by more than this fails. A fifth of an operation is always allowed, so that a cost of none has some room too.
DEARER: Final = 1.03
# Cheaper by more than this fails as well: a baseline that is far above lets the next change give it all away again.
CHEAPER: Final = 0.9
ROOM: Final = 0.2
# For a version of Python that has no baseline, against the nearest that has one. Only calls differ, by some per cent.
FOREIGN: Final = (1.15, 0.85)


def complaints(
    found: dict[str, Costs], baseline: dict[str, Costs], dearer: float = DEARER, cheaper: float = CHEAPER
) -> list[str]:
    """What is dearer, far cheaper, new or gone."""
    if found.keys() != baseline.keys():
        return [f"the work that is counted has changed: {sorted(found.keys() ^ baseline.keys())}"]
    names = [(work, name) for work in found for name in sorted(found[work].keys() | baseline[work].keys())]
    costs = [(work, name, found[work].get(name, 0.0), baseline[work].get(name, 0.0)) for work, name in names]
    return [
        f"{work}: {name} {before:g} -> {now:g}"
        for work, name, now, before in costs
        if now > before * dearer + ROOM or now < before * cheaper - ROOM
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, Costs]:
    """In a process of its own: the guards that tests run under would be counted as well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks.operations"], cwd=ROOT, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=dict[str, Costs])


def test_a_step_and_a_run_cost_what_the_baseline_says(found: dict[str, Costs]) -> None:
    baselines = operations.read_baseline()
    assert baselines, "there is no baseline: make baseline"
    known = min(baselines, key=lambda version: abs(_minor(version) - sys.version_info.minor))
    tolerances = (DEARER, CHEAPER) if known == operations.version() else FOREIGN
    changed = complaints(found, baselines[known], *tolerances)
    assert not changed, "costs have changed; find out why, or write them down with `make baseline`:\n" + "\n".join(changed)


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def test_one_more_statement_for_each_step_is_seen(found: dict[str, Costs]) -> None:
    dearer = {work: dict(costs) for work, costs in found.items()}
    dearer["step on SQLite"]["statements"] += 1
    before = found["step on SQLite"]["statements"]
    assert complaints(found, found) == []
    assert complaints(dearer, found) == [f"step on SQLite: statements {before:g} -> {before + 1:g}"]
    assert complaints(found, dearer) == [f"step on SQLite: statements {before + 1:g} -> {before:g}"]


def test_a_cost_that_was_none_is_seen(found: dict[str, Costs]) -> None:
    dearer = {work: dict(costs) for work, costs in found.items()}
    dearer["step on SQLite"]["tasks"] = 1.0
    assert complaints(dearer, found) == ["step on SQLite: tasks 0 -> 1"]


def test_work_that_is_no_longer_counted_is_seen(found: dict[str, Costs]) -> None:
    fewer = {work: costs for work, costs in found.items() if work != "step on SQLite"}
    assert complaints(fewer, found) == ["the work that is counted has changed: ['step on SQLite']"]


def test_a_durable_step_is_one_commit_and_no_task_and_a_replayed_one_asks_the_store_nothing(found: dict[str, Costs]) -> None:
    assert (found["step on SQLite"]["transactions"], found["step on SQLite"]["tasks"]) == (1, 0)
    assert found["step on SQLite, on disk"]["commits"] == 1
    # Its creation, its record and its end: what returned is recorded, so the last record cannot wait for the end.
    assert found["one-step run on SQLite"]["transactions"] == 3
    assert (found["replayed step on SQLite"]["statements"], found["replayed step on SQLite"]["tasks"]) == (0, 0)
