"""Random programs, killed and unloaded at random places and resumed until they end: every attempt goes the same way."""

from __future__ import annotations

import random
from typing import Final

import pytest

from tests.campaign import IS_FULL
from tests.fuzz.campaign import Settings, run, try_programs
from tests.fuzz.judge import violations
from tests.fuzz.programs import CONSTRUCTS, aimed_program, available, random_program
from tests.fuzz.world import World

AIMED: Final = (
    "one_at_a_time",
    "cancelled_in_step",
    "emit_beside_call",
    "patch_given_up",
    "short_scopes",
    "spinning",
    "limit_after_io",
    "child_given_up",
)
# The seeds of a thorough campaign, and how many go into one test.
THOROUGH: Final = 100_000
TOGETHER: Final = 1_000


def test_every_attempt_of_a_random_program_goes_the_same_way() -> None:
    report = run(range(60), Settings(side_by_side=16))
    assert report.is_clean, str(report)


def test_so_it_does_on_sqlite() -> None:
    report = run(range(150, 170), Settings(store="sqlite", side_by_side=16))
    assert report.is_clean, str(report)


def test_so_it_does_wherever_the_process_is_lost() -> None:
    report = run(range(190, 200), Settings(rounds=None, side_by_side=16))
    assert report.is_clean, str(report)


@pytest.mark.parametrize("kind", [kind for kind in AIMED if CONSTRUCTS[kind].needs <= available("memory") | {"own"}])
def test_so_does_a_program_that_is_aimed_at_one_rule(kind: str) -> None:
    programs = [aimed_program(seed, kind, available("memory")) for seed in range(40 if IS_FULL else 4)]
    report = try_programs(programs, Settings(rounds=None))
    assert report.is_clean, str(report)


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(0, THOROUGH, TOGETHER))
def test_a_thorough_campaign_finds_nothing(first: int) -> None:
    number = first // TOGETHER
    store, loop = ("memory", "memory", "sqlite")[number % 3], ("asyncio", "uvloop", "asyncio", "debug")[number % 4]
    report = run(range(first, first + TOGETHER), Settings(store=store, loop=loop, side_by_side=16))  # type: ignore[arg-type]  # words of the literal types
    assert report.is_clean, str(report)


def test_a_run_that_showed_nothing_is_refused() -> None:
    program = random_program(0, available("memory"))
    world = World(random.Random(0), created={"main"}, ended={"main": "completed"})
    assert violations(program, world, {}) == ["no attempt has a trace: there is nothing to compare"]


def test_the_same_seed_makes_the_same_program() -> None:
    haves = available("sqlite")
    assert str(random_program(7, haves)) == str(random_program(7, haves))
