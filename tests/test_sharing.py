from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sharing import LONGEST_FIRST, MONGO, longest_first, unit_of

ROOT = Path(__file__).parent.parent


def test_files_that_come_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if name != MONGO and not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/engine/test_steps.py::test_one", "tests/engine/test_steps.py"),
        ("tests/engine/test_steps.py::TestSome::test_one[a::b]", "tests/engine/test_steps.py"),
        ("tests/backends/test_ids.py::test_one[postgres]", "tests/backends/test_ids.py"),
        ("tests/backends/test_ids.py::test_one[mongo]", MONGO),
        ("tests/kv/test_dsns.py::test_one[MongoPlace]", MONGO),
        ("tests/backends/mongo/test_fence.py::test_one", MONGO),
        ("tests/contract/test_mongo.py::test_one", MONGO),
    ],
)
def test_a_file_stays_together_and_so_does_what_needs_mongodb(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit


def test_long_files_come_first_and_the_others_keep_their_order() -> None:
    nodeids = ["tests/a.py::test_2", "tests/a.py::test_1", f"{LONGEST_FIRST[2]}::test", f"{LONGEST_FIRST[1]}::test", "x[mongo]"]
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]
    longest_first(items)
    assert [item.nodeid for item in items] == [*reversed(nodeids[2:]), *nodeids[:2]]
