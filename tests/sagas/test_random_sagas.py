"""Random sagas against a provider's book: charged is refunded or kept, no key means two things, nothing is left in silence."""

from __future__ import annotations

from typing import Final

from tests.campaign import IS_FULL, times
from tests.sagas.judge import Violation
from tests.sagas.known import unknown
from tests.sagas.programs import Program, program_to_repair, random_program
from tests.sagas.shrink import shrunk
from tests.sagas.trials import try_out

PROGRAMS: Final = 6_000 if IS_FULL else 300


def test_what_is_charged_is_refunded_or_kept_whatever_happens_to_the_runs() -> None:
    for seed in range(PROGRAMS):
        program = random_program(seed)
        found = unknown(program, try_out(program)[0])
        assert not found, explained(program, found)


def test_a_bug_that_is_repaired_while_its_run_is_undone_lets_nothing_complete_that_was_refunded() -> None:
    for seed in range(times(1000)):
        program = program_to_repair(seed)
        found = unknown(program, try_out(program)[0])
        assert not found, explained(program, found)


def explained(program: Program, found: list[Violation]) -> str:
    """The program, cut down while it fails in the same way, with what it did."""
    kind = found[0].kind
    small = shrunk(program, lambda candidate: any(each.kind == kind for each in unknown(candidate, try_out(candidate)[0])))
    found, trial = try_out(small)
    return "\n".join([f"seed {program.seed}:", str(small), "what happened:", *trial.log, "what is wrong:", *map(str, found)])
