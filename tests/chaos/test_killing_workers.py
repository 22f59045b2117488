"""Real processes, killed with SIGKILL at random moments of their work."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.campaign import times

HERE = Path(__file__).parent
CHAINS = {f"{name}{n}": (name, n) for name in "abc" for n in range(4)}


class Worker:
    """A worker process of one generation: the time between two kills."""

    def __init__(self, directory: Path, generation: int, runs: int) -> None:
        command = [sys.executable, str(HERE / "ledger_worker.py"), "work.db", "ledger", str(generation), str(runs)]
        self.process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.process.communicate()[1]

    def kill(self) -> str:
        """SIGKILL; what it wrote on standard error until then."""
        self.process.kill()
        errors: str = self.process.communicate()[1]
        return errors

    def finish(self) -> None:
        out, err = self.process.communicate(timeout=120)
        assert out.endswith("done\n"), f"exit code {self.process.returncode}: {err}"


def ledger_of(directory: Path) -> list[tuple[int, str, str]]:
    lines = (directory / "ledger").read_text().splitlines()
    return [(int(generation), run, step) for generation, run, step in (line.split(" ") for line in lines)]


def test_no_kill_loses_repeats_or_strands_anything(tmp_path: Path) -> None:
    kills, generation = times(500), 0
    rng = random.Random(kills)
    batch = hits = 0
    while generation < kills:
        # A fresh directory now and then, so that kills hit all stages of the work, set-up included.
        directory = tmp_path / str(batch)
        directory.mkdir()
        for _ in range(min(10, kills - generation)):
            generation += 1
            worker = Worker(directory, generation, runs=12)
            if rng.random() < 0.8:
                worker.wait_until_ready()
            time.sleep(rng.random() * 0.12)
            worker.kill()
        last = Worker(directory, generation + 1, runs=12)
        last.wait_until_ready()
        last.finish()
        check(directory)
        hits += interrupted(directory)
        batch += 1
    assert hits > kills / 5, "the kills missed the work, so nothing was shown"


def check(directory: Path) -> None:
    database = sqlite3.connect(directory / "work.db")
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    unfinished = database.execute("SELECT id, status FROM perdure_runs WHERE status != 'completed'").fetchall()
    assert unfinished == [], "stuck runs"
    twice = database.execute(
        "SELECT run_id, key FROM perdure_steps WHERE phase = 'close' GROUP BY run_id, key HAVING count(*) > 1"
    ).fetchall()
    assert twice == [], "recorded twice"
    database.close()
    check_ledger(ledger_of(directory))


def interrupted(directory: Path) -> int:
    """How many steps were in flight at a kill and ran again."""
    return sum(len(set(generations)) - 1 for generations in by_step(directory).values())


def by_step(directory: Path) -> dict[tuple[str, str], list[int]]:
    generations: dict[tuple[str, str], list[int]] = defaultdict(list)
    for generation, run, step in ledger_of(directory):
        generations[run, step].append(generation)
    return generations


def check_ledger(ledger: list[tuple[int, str, str]]) -> None:
    in_one_generation = Counter(ledger)
    assert max(in_one_generation.values()) == 1, "a step ran twice between two kills"
    # Once a later step of the same chain has run, the earlier one was acknowledged and must never run again.
    furthest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    for generation, run, step in ledger:
        if step in CHAINS:
            chain, n = CHAINS[step]
            assert n >= furthest[run, chain], f"{run} ran {step} again in generation {generation} after it was acknowledged"
            assert n <= furthest[run, chain] + 1, f"{run} skipped a step before {step}"
            furthest[run, chain] = n
    assert set(furthest.values()) == {3}


def test_the_ledger_check_notices_a_lost_acknowledged_step() -> None:
    good = [(1, "run0", f"{name}{n}") for name in "abc" for n in range(4)]
    check_ledger(good)
    for bad in ([*good, (2, "run0", "a1")], [good[1], *good], [*good, good[-1]]):
        try:
            check_ledger(bad)
        except AssertionError:
            continue
        raise AssertionError(f"not noticed: {bad}")
