"""A broken document is refused with a path or read in full: nothing else ever happens."""

from __future__ import annotations

import inspect
import json
import sys
from random import Random
from typing import Any

import pytest

from perdure.errors import SnapshotFormatError
from perdure.snapshots.resume_state import dump_state, parse_state
from perdure.snapshots.snapshot import Snapshot, assert_valid_snapshot, looks_like_snapshot, validate_snapshot
from tests.campaign import times
from tests.snapshots.documents import all_snapshots, all_states
from tests.snapshots.mutations import mutated


def _is_told(error: SnapshotFormatError) -> bool:
    text = str(error)
    return (
        bool(error.errors) and all(problem.path[0] == "$" and problem.reason for problem in error.errors) and text.isprintable()
    )


def _check_snapshot(document: Any) -> bool:
    """Whether it was read; a failed assertion if it was neither read in full nor refused properly."""
    looks_like_snapshot(document)
    try:
        read = assert_valid_snapshot(document)
    except SnapshotFormatError as error:
        assert _is_told(error)  # noqa: PT017 - most of these are errors, some are other snapshots
        assert validate_snapshot(document).errors == error.errors  # noqa: PT017 - as above
        return False
    tree = json.loads(document) if isinstance(document, str | bytes) else document
    assert read.to_dict() == tree
    assert Snapshot.from_dict(read.to_dict()) == read
    return True


def _check_state(document: Any) -> bool:
    try:
        state = parse_state(document)
    except SnapshotFormatError as error:
        assert _is_told(error)  # noqa: PT017 - as above
        return False
    assert parse_state(dump_state(state)) == state
    try:
        tree = state.to_snapshot().to_dict()
    except SnapshotFormatError as error:
        # A snapshot has fewer levels around some unknown fields, so the deepest of them do not fit.
        assert "nested more than 200 deep" in str(error)  # noqa: PT017 - as above
        return True
    assert Snapshot.from_dict(tree).steps == state.steps
    return True


def _campaign(documents: dict[str, dict[str, Any]], check: Any) -> set[bool]:
    originals = list(documents.values())
    return {check(mutated(originals[seed % len(originals)], Random(seed))) for seed in range(times(10_000))}


def test_a_mutated_snapshot_is_refused_with_a_path_or_read_in_full() -> None:
    assert _campaign(all_snapshots(), _check_snapshot) == {True, False}


def test_a_mutated_state_is_refused_with_a_path_or_read_in_full() -> None:
    assert _campaign(all_states(), _check_state) == {True, False}


@pytest.mark.parametrize("document", all_states().values(), ids=all_states())
def test_every_truncation_is_refused(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for length in range(len(text)):
        for cut in (text[:length], text[:length].encode()):
            with pytest.raises(SnapshotFormatError, match=r"\$ is no JSON at offset \d+"):
                parse_state(cut)


def test_a_nearly_full_stack_is_a_reason_like_any_other() -> None:
    deep = '{"formatVersion":1,"steps":{},"execution":' + "[" * 150 + "]" * 150 + "}"

    def read_below(frames: int) -> None:
        if frames:
            read_below(frames - 1)
            return
        with pytest.raises(SnapshotFormatError):
            assert_valid_snapshot(deep)

    read_below(sys.getrecursionlimit() - len(inspect.stack(0)) - 100)
