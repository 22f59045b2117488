"""The random programs of `tests/fuzz`, in worker processes that are killed: every attempt goes the same way on real stores too."""

from __future__ import annotations

from typing import Final

import pytest

from tests.backends.registry import POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL
from tests.fuzz.killed import TOGETHER, run_killed
from tests.fuzz.test_fuzz import PROFILE

# Those of the first tests of tests/fuzz have smaller seeds.
FIRST: Final = 1_000_000
PROGRAMS: Final = 1_000 if IS_FULL else TOGETHER


@on(SQLITE, POSTGRES)
@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, 10 * TOGETHER))
def test_every_attempt_goes_the_same_way_however_often_workers_are_killed(
    backend: Backend, dsn: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_killed(range(first, min(first + 10 * TOGETHER, FIRST + PROGRAMS)), dsn, PROFILE)
    with capsys.disabled():
        print(f"\n{backend}: {report}")
    assert not report.failures, "\n\n".join(map(str, report.failures))
