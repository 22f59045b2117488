"""Schedules: two processes race through the night of a daylight-saving change, and one of them is killed at a store call."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from tests.backends.conftest import Start
from tests.backends.ledger import lines_of
from tests.backends.places import new_name, with_options
from tests.backends.processes import Child
from tests.backends.registry import MONGO, MYSQL, POSTGRES, REDIS, SQLITE, Backend, on
from tests.backends.scheduling_jobs import HOURS, Night, pass_nights
from tests.campaign import IS_FULL

# The days before which clocks go forward and back in Berlin, when the night's first run is, and when 02:30 is: it does not
# exist in March, and exists twice in October.
NIGHTS: Final = {
    "2026-03-28": (datetime(2026, 3, 28, 20, 30, tzinfo=UTC), "2026-03-29T01:00:00Z"),
    "2026-10-24": (datetime(2026, 10, 24, 19, 30, tzinfo=UTC), "2026-10-25T00:30:00Z"),
}
# Every how many-th call is tried where a campaign is shortened.
STRIDE: Final = 1 if IS_FULL else 12
# How many calls a worker makes depends on who wins: the calls are over when it has lived through so many nights in a row.
NIGHTS_SURVIVED: Final = 5 if IS_FULL else 1


@on(*((SQLITE, POSTGRES, MYSQL, MONGO, REDIS) if IS_FULL else (SQLITE, POSTGRES)))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("day", NIGHTS)
def test_each_instant_has_one_run_at_whichever_store_call_a_worker_is_killed(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, day: str, after: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    survivor = start(pass_nights, 1, None, False)
    stride = STRIDE if IS_FULL or backend is SQLITE else STRIDE * 4
    killed = survived = 0
    for dies_at in range(0, 2000, stride):
        night = Night(with_options(dsn, f"prefix={new_name()}"), day, tmp_path / str(dies_at))
        survivor.send(night)
        assert survivor.receive() == "ready"
        mortal = start(pass_nights, 2, dies_at, after)
        mortal.send(night)
        is_alive = pass_hours(survivor, mortal)
        runs = survivor.receive()
        what = f"killed {'after' if after else 'before'} call {dies_at}"
        assert runs == dict.fromkeys(runs_of(day), "completed"), what
        lines = lines_of(night.ledger)
        written = Counter(line.run for line in lines)
        assert written.keys() == runs.keys(), what
        assert max(Counter((line.run, line.generation) for line in lines).values()) == 1, what
        survived = survived + 1 if is_alive else 0
        if is_alive:
            assert max(written.values()) == 1
            mortal.wait_for_exit()
        else:
            killed += 1
            mortal.kill()
        if survived == NIGHTS_SURVIVED:
            break
    else:
        pytest.fail("there were more calls than were tried")
    with capsys.disabled():
        print(f"\n{backend}: a worker was killed {'after' if after else 'before'} {killed} store calls of the night of {day}")
    survivor.send(None)
    survivor.wait_for_exit()


def runs_of(day: str) -> list[str]:
    """The runs that the night of this day has."""
    first, daily = NIGHTS[day]
    hours = (first + timedelta(hours=n) for n in range(HOURS))
    return [*(f"hourly:{hour:%Y-%m-%dT%H:%M:%SZ}" for hour in hours), f"daily:{daily}"]


def pass_hours(survivor: Child, mortal: Child) -> bool:
    """Let both pass the night, hour by hour at the same time. Whether the mortal one lives."""
    is_alive = answers(mortal)
    for _ in range(HOURS):
        survivor.send("an hour")
        if is_alive:
            mortal.send("an hour")
            is_alive = answers(mortal)
        assert survivor.receive() == "swept"
    survivor.send("the end")
    if is_alive:
        mortal.send("the end")
        mortal.send(None)
    return is_alive


def answers(child: Child) -> bool:
    """Whether the process lives, and has done what it was told."""
    try:
        return child.receive() in ("ready", "swept")
    except AssertionError:
        if child.exit_code() != -signal.SIGKILL:
            raise
        return False
