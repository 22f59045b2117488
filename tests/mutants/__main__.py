"""Break one guard of perdure at a time, and see that its tests fail: `make mutants`, or `make mutants ONLY="S10 P4"` for some.

A mutant counts as caught if its tests pass with the guard, at least one of them, and fail without it. The tests import a copy of
the source in which the guard is broken, and so do all processes that they start; the working tree is not touched.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.mutants.table import ROOT, SOURCE, Mutant, gone, mutants

# Seconds for the tests of a mutant. Without their guard some wait forever.
LIMIT: Final = 120.0
# Exit codes of pytest.
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5

CAUGHT: Final = "caught"
CAUGHT_BY_TIMEOUT: Final = "caught (timeout)"
EQUIVALENT: Final = "equivalent"
GOOD: Final = frozenset({CAUGHT, CAUGHT_BY_TIMEOUT, EQUIVALENT})


def main(only: Sequence[str]) -> int:
    """Try these mutants, or all, and print a table. Return 1 if one survived or could not be tried."""
    chosen = _choose(only)
    print("| mutant | promise | tests | result | s |\n|---|---|---|---|---|")
    results = [_try_and_print(mutant) for mutant in chosen]
    if not only:
        for guard in gone():
            print(f"| {guard.id} | {guard.promise} | {guard.reason} | gone | |")
    kinds = [result.partition(":")[0] for result in results]
    print(f"\n{len(results)} mutants:", ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    return int(not GOOD.issuperset(results))


def _choose(only: Sequence[str]) -> list[Mutant]:
    known = {mutant.id: mutant for mutant in mutants()}
    unknown = [wanted for wanted in only if wanted not in known]
    if unknown:
        sys.exit(f"there is no mutant {', '.join(unknown)}; the tables have {' '.join(known)}")
    return [known[wanted] for wanted in only] or list(known.values())


def _try_and_print(mutant: Mutant) -> str:
    began = time.monotonic()
    result = _try(mutant)
    what = mutant.equivalent or " ".join(mutant.tests)
    print(f"| {mutant.id} | {mutant.promise} | {what} | {result} | {time.monotonic() - began:.1f} |", flush=True)
    return result


def _try(mutant: Mutant) -> str:
    """Return what becomes of it."""
    places = mutant.places()
    if places != 1:
        return f"NO LONGER APPLIES: its text stands {places} times in {mutant.file}"
    if mutant.equivalent:
        return EQUIVALENT
    unbroken = _unbroken(mutant.tests)
    if unbroken:
        return unbroken
    with tempfile.TemporaryDirectory(prefix="perdure-mutant-") as directory:
        copy = Path(directory) / "src"
        shutil.copytree(SOURCE, copy)
        path = mutant.path(copy)
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        code, said = _run_tests(mutant.tests, copy)
    if code is None:
        return CAUGHT_BY_TIMEOUT
    if code == _PASSED:
        return "SURVIVED"
    return CAUGHT if code == _FAILED else f"NOT TRIED, pytest ended with {code}: {_last_line(said)}"


@functools.cache
def _unbroken(tests: tuple[str, ...]) -> str:
    """Return why these tests say nothing about a mutant; an empty text if they pass without one."""
    code, said = _run_tests(tests, SOURCE)
    if code not in (_PASSED, _NO_TESTS):
        return f"NOT TRIED, its tests fail without it: {_last_line(said)}"
    return "" if re.search(r"\b[1-9]\d* passed", said) else f"NOT TRIED, no test ran: {_last_line(said)}"


def _run_tests(tests: Sequence[str], source: Path) -> tuple[int | None, str]:
    """Return the exit code of pytest with perdure from this directory, None if it took too long, and what it said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    if tests[0].startswith("tests/contract/"):
        environment["PERDURE_CHAOS"] = "1"  # otherwise the one case that is wanted may be left out
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes and servers that its tests have started
        said, _ = process.communicate()
        return None, said
    return process.returncode, said


def _last_line(said: str) -> str:
    return ([line for line in said.splitlines() if line.strip()] or ["it said nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
