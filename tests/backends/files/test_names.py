from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.backends.files import FilesStore
from perdure.backends.files.disk import namespace_name, run_name
from perdure.errors import SnapshotCorrupt
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import new_run

IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300)
SAFE = re.compile(r"[a-z]-[a-z0-9_-]{0,200}")


@given(IDS)
def test_a_name_is_safe_on_every_file_system(run_id: str) -> None:
    for name in (run_name(run_id), namespace_name(run_id)):
        assert SAFE.fullmatch(name)
        assert len(name) <= 140


@given(IDS, IDS)
def test_ids_that_differ_have_names_that_differ(one: str, other: str) -> None:
    assert (run_name(one) == run_name(other)) == (one == other)


def test_names_differ_also_where_case_does_not_count() -> None:
    names = {run_name(name).casefold() for name in NAMES}
    assert len(names) == len(NAMES)


@pytest.mark.parametrize("run_id", ["..", ".", "../../x", "/etc/passwd", "con", "NUL", "a/b", "a\\b", "C:x", "x" * 1024, "~"])
def test_no_id_leaves_its_place(tmp_path: Path, run_id: str) -> None:
    store = FilesStore(tmp_path / "a" / "b", prefix=run_id[:255])
    asyncio.run(store.create(new_run(run_id)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [namespace_name(run_id[:255])]
    runs = tmp_path / "a" / "b" / namespace_name(run_id[:255]) / "runs"
    assert [path.name for path in runs.iterdir()] == [run_name(run_id)]


def test_a_log_in_the_wrong_directory_is_not_taken_for_another_run(path: Path, store: FilesStore) -> None:
    asyncio.run(store.create(new_run("x" * 1024)))
    asyncio.run(store.close())
    runs = path / namespace_name("") / "runs"
    (runs / run_name("x" * 1024)).rename(runs / run_name("y" * 1024))
    again = FilesStore(path)
    with pytest.raises(SnapshotCorrupt):
        asyncio.run(again.get("y" * 1024))
    assert asyncio.run(again.get("x" * 1024)) is None
