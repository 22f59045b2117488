"""What a workflow function sees of a handled error is the same on its first run and on a replay in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.errors_app import CASES, clauses_of, name_of

_REPLAY = (
    "import asyncio, json, sys; from tests.engine.errors_app import replay; print(json.dumps(asyncio.run(replay(sys.argv[1]))))"
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What the function saw in each of two processes."""
    path, root = str(tmp_path_factory.mktemp("errors") / "app.db"), Path(__file__).parents[2]
    shown = [
        subprocess.run([sys.executable, *program, path], capture_output=True, text=True, cwd=root, check=False)
        for program in (["-m", "tests.engine.errors_app"], ["-c", _REPLAY])
    ]
    assert [each.returncode for each in shown] == [0, 0], shown[0].stderr[-3000:] + shown[1].stderr[-3000:]
    first, second = (json.loads(each.stdout) for each in shown)
    return first, second


@pytest.mark.parametrize("case", CASES)
def test_a_handled_error_is_the_same_on_a_replay_in_another_process(both: tuple[Any, Any], case: str) -> None:
    first, second = both
    assert first[case] == second[case]
    assert {name_of(cls) for cls in clauses_of(case)} <= {*first[case]["matches"]}
