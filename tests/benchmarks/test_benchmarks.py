"""The benchmarks still run, and say what they measured. Peers are only in the environment of `make bench`, and not here."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks import page, processes
from benchmarks.bars import BARS, Bar
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.measuring import Plan
from benchmarks.meters import SqliteMeter
from benchmarks.places import fill_sqlite
from benchmarks.programs.flows import steps
from benchmarks.results import Results, Spread, Taken, figures, ratios, reached
from benchmarks.tables import tables
from benchmarks.work import Failure, Order, Sample, Work
from benchmarks.workloads import WORKLOADS
from perdure import stores
from tests.servers.process import ServerMissing

ROOT: Final = Path(__file__).parent.parent.parent
# Every program, and every way of using one: on PostgreSQL some workloads stand for those that differ in their size only.
ONLY: Final = (
    "*SQLite", "steps without a store", "import*", "one run of 1,000 steps, PostgreSQL", "one run of 500 steps beside*PostgreSQL",
    "1,000 steps at once*PostgreSQL", "written by one run*PostgreSQL", "queued*SQLite, 2 workers", "from start*PostgreSQL",
)  # fmt: skip
PLAN: Final = Plan(rounds=1, only=ONLY, quick=True, peers=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What needs no peers, as small as can be, by the command itself."""
    samples = tmp_path_factory.mktemp("benchmarks") / "samples.json"
    only = [word for pattern in ONLY for word in ("--only", pattern)]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--without-peers", "--rounds", "1", "--json", str(samples), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    if ServerMissing.__name__ in done.stderr:
        raise ServerMissing(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(samples.read_bytes(), type=Results)
    assert done.stdout == tables(found) + "\n"
    return found


def test_every_side_has_a_sample(results: Results) -> None:
    expected = {workload.name: list(workload.sides) for workload in PLAN.workloads()}
    taken = {name: measured.sides for name, measured in results.workloads.items()}
    assert {name: list(sides) for name, sides in taken.items()} == expected
    assert all(len(side.samples) == 1 for sides in taken.values() for side in sides.values())
    assert not results.failures


def test_rounds_are_interleaved_and_counts_are_taken_once(tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    patterns = ["--only", "one run of 1,000 steps, SQLite", "--only", "written by one run of 1,000 steps, SQLite"]
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--without-peers",
        "--rounds",
        "3",
        "--json",
        str(samples),
        *patterns,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = msgspec.json.decode(samples.read_bytes(), type=Results)
    assert found.rounds == 3
    assert [len(side.samples) for measured in found.workloads.values() for side in measured.sides.values()] == [3, 3, 1, 1]
    said = [line.partition(": ")[2] for line in done.stderr.splitlines() if ": " in line]
    timed, counted = found.workloads
    assert said == [timed, counted, timed, timed]


def test_times_and_counts_are_of_what_was_done(results: Results) -> None:
    timed = [side for measured in results.workloads.values() if measured.measured == "time" for side in measured.sides.values()]
    assert all(
        sample and sample.seconds > 0 and sample.operations == taken.work.operations
        for taken in timed
        for sample in taken.samples
    )
    for store, floor in (("SQLite", "plain sqlite3"), ("PostgreSQL", "plain asyncpg")):
        sides = results.workloads[f"written by one run of 1,000 steps, {store}"].sides
        assert figures(sides[floor], "commits") == Spread(1, 1, 1)
        # A run of five steps has two commits more, for its beginning and its end.
        assert figures(sides[f"perdure on {store}"], "commits") == Spread(1.4, 1.4, 1.4)


async def test_a_place_with_stored_runs_really_has_them(tmp_path: Path) -> None:
    path = tmp_path / "filled.db"
    await steps.run(2, 20, id="run", store=f"sqlite:///{path}")
    await asyncio.to_thread(fill_sqlite, str(path), 30)
    store = stores.sqlite(path)
    runs = await store.list(limit=100)
    last = await store.load("run-30")
    await store.close()
    assert len(runs) == 31
    assert {run.status for run in runs} == {"completed"}
    assert last is not None
    assert len(last.steps) == 2


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.promise)
def test_a_bar_is_about_sides_that_are_measured(bar: Bar) -> None:
    sides = {(workload.name, label) for workload in WORKLOADS for label in workload.sides}
    assert {bar.subject, bar.other} <= sides
    assert (bar.at_least is None) != (bar.at_most is None)


def test_workloads_and_promises_have_names_of_their_own() -> None:
    for names in ([workload.name for workload in WORKLOADS], [bar.promise for bar in BARS]):
        assert len(set(names)) == len(names)


def _taken(*seconds: float) -> Taken:
    return Taken("somebody", Work(steps=10), [Sample(10, each, each / 2) for each in seconds])


def test_a_ratio_is_taken_within_its_round() -> None:
    ours, theirs = _taken(1, 10, 4), _taken(5, 2, 4)
    assert ratios(ours, theirs, "rate") == Spread(1.0, 0.2, 5.0)
    assert ratios(ours, theirs, "CPU", "time") == Spread(0.5, 0.1, 2.5)


def test_a_round_in_which_one_side_failed_has_no_ratio() -> None:
    ours, theirs = _taken(1, 10), _taken(2, 5)
    theirs.answers[0] = Failure("it rained")
    assert ratios(ours, theirs, "rate") == Spread(0.5, 0.5, 0.5)
    assert ratios(ours, Taken("nobody", Work(), []), "rate") is None


def test_a_bar_is_met_on_its_right_side() -> None:
    at_least = Bar("", "rate", ("", ""), ("", ""), at_least=0.7)
    at_most = Bar("", "rate", ("", ""), ("", ""), at_most=1.3)
    assert [at_least.is_met_by(ratio) for ratio in (0.69, 0.7, 5)] == [False, True, True]
    assert [at_most.is_met_by(ratio) for ratio in (0.1, 1.3, 1.31)] == [True, True, False]


def test_the_table_says_which_bars_are_not_met(results: Results) -> None:
    name, label = BARS[0].subject
    slow = msgspec.json.decode(msgspec.json.encode(results), type=Results)
    taken = slow.workloads[name].sides[label]
    taken.answers[:] = [Sample(taken.work.operations, 1e6, 1e6) for _ in taken.answers]
    spread = reached(slow, BARS[0])
    assert spread is not None
    assert not BARS[0].is_met_by(spread.median)
    (row,) = [line for line in tables(slow).splitlines() if BARS[0].promise in line]
    assert row.endswith("**not met** |")


def test_a_failure_is_in_the_table(results: Results) -> None:
    name, label = BARS[0].subject
    failed = msgspec.json.decode(msgspec.json.encode(results), type=Results)
    failed.workloads[name].sides[label].answers[:] = [Failure("it rained")]
    assert f"- {name}, {label}: it rained" in tables(failed)
    assert failed.failures == [(name, label, "it rained")]


async def test_a_contender_that_breaks_gives_a_failure_and_the_next_order_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "broken", Contender("benchmarks.programs.no_such_program", "nowhere"))
    asked = processes.Processes()
    try:
        broken = await asked.ask("broken", Order(Work()))
        cannot = await asked.ask("bare await", Order(Work(shape="replay")))
        served = await asked.ask("bare await", Order(Work(steps=10)))
    finally:
        await asked.end()
    assert isinstance(broken, Failure)
    assert "no_such_program" in broken.reason
    assert cannot == Failure("NotImplementedError")
    assert isinstance(served, Sample)
    assert served.operations == 10


def test_a_contender_ends_with_whoever_gave_it_orders() -> None:
    command = [sys.executable, "-m", "benchmarks.worker", "benchmarks.programs.bare_await"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            worker.communicate(msgspec.json.encode(Order(Work(steps=10_000_000_000))) + b"\n", timeout=60)
        finally:
            worker.kill()
    assert worker.returncode == 0


async def test_a_contender_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT_SECONDS", 0.1)
    asked = processes.Processes()
    assert await asked.ask("bare await", Order(Work(steps=10_000_000_000))) == Failure("gave no answer in 0.1 seconds")
    await asked.end()


@pytest.mark.parametrize("commits", [0, 1, 300])
def test_commits_are_counted_from_the_log(tmp_path: Path, commits: int) -> None:
    path = str(tmp_path / "rows.db")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY, value TEXT)")
    meter = SqliteMeter(path)
    asyncio.run(meter.start())
    for n in range(commits):
        connection.execute("INSERT INTO rows VALUES (?, ?)", (n, "x" * 6000))
    written = asyncio.run(meter.stop())
    connection.close()
    assert written.commits == commits
    # A row takes two pages, of which the first may be there already.
    assert written.bytes_stored >= 4096 * commits
    assert written.bytes_written >= written.bytes_stored


def test_figures_go_between_the_marks_and_replace_those_before(results: Results) -> None:
    empty = f"# A page\n\n{page.BEGIN}\n{page.END}\n\nThe end.\n"
    once = page.with_figures(empty, results)
    assert once.startswith("# A page\n")
    assert once.endswith("The end.\n")
    assert all(name[1:] in once for name in results.workloads)
    assert page.with_figures(once, results) == once
    with pytest.raises(ValueError, match="needs the lines"):
        page.with_figures("# A page", results)


def test_the_page_shows_the_samples_that_are_kept_beside_it() -> None:
    written = page.PAGE.read_text()
    kept = msgspec.json.decode(page.SAMPLES.read_bytes(), type=Results)
    assert page.with_figures(written, kept) == written
    assert not kept.quick


def test_the_latency_of_signals_and_cancels_is_a_table() -> None:
    command = [sys.executable, "-m", "benchmarks.latency", "--quick", "sqlite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[4:]]
    assert [(row[0], row[1]) for row in rows] == [("| sqlite", "signal"), ("| sqlite", "cancel")]
    assert all(0 < int(row[2].replace(",", "")) < 10_000 for row in rows)


@pytest.mark.parametrize("kind", ["SQLite", "PostgreSQL"])
def test_the_listing_has_a_time_for_each_filter(kind: str) -> None:
    command = [sys.executable, "-m", "benchmarks.listing", "--runs", "3000", "--only", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if ServerMissing.__name__ in done.stderr:
        raise ServerMissing(done.stderr.splitlines()[-1])
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7
    assert all(0 < float(row.split("|")[2]) < 100 for row in rows)
