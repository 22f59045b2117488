"""A snapshot is its JSON: reading and writing changes nothing, and two can be merged."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given

from perdure.errors import SnapshotFormatError
from perdure.snapshots.parts import Execution, LossWarning, StepResult
from perdure.snapshots.snapshot import Snapshot, merge_snapshots
from tests.snapshots.documents import COMPLETED, DOCUMENTS, FAILED, LOSSY, RUNNING, UNKNOWN, all_snapshots

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def _snapshot(**steps: Any) -> Snapshot:
    return Snapshot(
        steps={key: StepResult(ok=True, value=value) for key, value in steps.items()},
        execution=Execution(status="running", last_updated=AT),
    )


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


@pytest.mark.parametrize("document", all_snapshots().values(), ids=all_snapshots())
def test_reading_and_writing_changes_nothing(document: dict[str, Any]) -> None:
    read = Snapshot.from_dict(document)
    written = read.to_dict()
    assert _canonical(written) == _canonical(document)
    assert list(written["steps"]) == list(document["steps"])
    assert Snapshot.from_dict(json.loads(json.dumps(written))) == read


@given(DOCUMENTS)
def test_reading_and_writing_any_snapshot_changes_nothing(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    written = Snapshot.from_dict(document).to_dict()
    assert _canonical(written) == _canonical(document) == _canonical(before)
    assert json.loads(json.dumps(written)) == written


def test_a_step_is_what_its_json_says() -> None:
    steps = Snapshot.from_dict(FAILED).steps
    assert list(steps) == ["returned", "threw", "bare"]
    returned = steps["returned"]
    assert (returned.ok, returned.value, returned.error) == (False, None, "NOT_FOUND")
    assert returned.cause is not None
    assert returned.cause["cause"]["message"] == "db"
    assert returned.meta == {"origin": "result"}
    assert steps["bare"].meta is None


def test_values_are_left_as_they_stand() -> None:
    read = Snapshot.from_dict(COMPLETED)
    assert read.metadata is not None
    assert read.metadata["input"] == {"$datetime": "2026-01-01"}
    assert type(Snapshot.from_dict(RUNNING).steps["10"].value) is float


def test_unknown_fields_are_kept_where_they_stood() -> None:
    read = Snapshot.from_dict(UNKNOWN)
    assert read.extra["signature"] == {"by": ["ada", None]}
    assert read.execution.extra == {"host": "ada"}
    assert read.steps["a"].extra == {"took": 1.5, "error": "left over"}


def test_execution_has_aware_instants() -> None:
    execution = Snapshot.from_dict(COMPLETED).execution
    assert execution.last_updated == execution.completed_at == datetime(2026, 11, 15, 7, 30, 12, 73_000, tzinfo=UTC)
    assert execution.last_updated.utcoffset() == timedelta(0)


def test_a_changed_instant_is_written_anew_and_an_unchanged_one_in_its_own_words() -> None:
    execution = replace(Snapshot.from_dict(COMPLETED).execution, last_updated=AT)
    assert execution.tree()["lastUpdated"] == "2026-01-31T12:00:00.000Z"
    assert execution.tree()["completedAt"] == "2026-11-15T08:30:12.073+01:00"


@pytest.mark.parametrize(
    "at",
    [
        AT + timedelta(microseconds=1),
        AT.astimezone(timezone(timedelta(hours=-5, minutes=-30))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(-timedelta(hours=11, seconds=7))),
    ],
)
def test_every_aware_instant_comes_back(at: datetime) -> None:
    snapshot = Snapshot(steps={}, execution=Execution(status="failed", last_updated=at, completed_at=at))
    assert Snapshot.from_dict(snapshot.to_dict()) == snapshot


def test_an_instant_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"last_updated .* has no time zone"):
        Execution(status="running", last_updated=datetime(2026, 1, 1))  # noqa: DTZ001 - the very thing


def test_a_snapshot_shares_nothing_with_the_dicts_it_came_from_and_turns_into() -> None:
    document = copy.deepcopy(COMPLETED)
    read = Snapshot.from_dict(document)
    document["steps"]["user:1"]["value"]["name"] = "Eve"
    read.to_dict()["steps"]["user:1"]["value"]["name"] = "Eve"
    assert read.to_dict() == COMPLETED


def test_a_snapshot_cannot_be_changed() -> None:
    read: Any = Snapshot.from_dict(LOSSY)
    with pytest.raises(FrozenInstanceError):
        read.workflow_name = "x"
    with pytest.raises(TypeError):
        read.steps["new"] = read.steps["fn"]
    with pytest.raises(TypeError):
        read.metadata["new"] = 1
    with pytest.raises(AttributeError):
        read.warnings.append(None)


def test_a_snapshot_can_be_copied_and_pickled() -> None:
    read = Snapshot.from_dict(UNKNOWN)
    assert copy.deepcopy(read) == read
    assert pickle.loads(pickle.dumps(read)).to_dict() == UNKNOWN  # noqa: S301 - our own bytes


def test_a_failure_without_a_cause_gets_the_one_that_says_so() -> None:
    cause = {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"}
    assert StepResult(ok=False, error="NOPE").cause == cause


def test_what_is_no_json_is_not_written() -> None:
    with pytest.raises(SnapshotFormatError, match=r'\$.steps.at.value\[1\]\["a b"\] is a datetime') as caught:
        _snapshot(at=[1, {"a b": AT}]).to_dict()
    assert caught.value.path == '$.steps.at.value[1]["a b"]'


def test_what_a_run_may_record_can_stand_in_a_snapshot_however_many_levels_its_tags_need() -> None:
    value: Any = 1
    for level in range(200):
        value = [{"$class": ["m:C", {"f": value}]}, {"$tuple": [value]}, {"$dict": [[1, value]]}, [value]][level % 4]
    snapshot = _snapshot(deep=value)
    assert Snapshot.from_dict(snapshot.to_dict()) == snapshot
    with pytest.raises(SnapshotFormatError, match="nested more than 200 deep"):
        _snapshot(deep=[value]).to_dict()


def test_merging_keeps_recorded_order_and_lets_the_delta_win() -> None:
    merged = merge_snapshots(_snapshot(a=1, b=2, c=3), _snapshot(d=4, b=5))
    assert [(key, step.value) for key, step in merged.steps.items()] == [("a", 1), ("b", 5), ("c", 3), ("d", 4)]


def test_merging_takes_dicts_and_texts_as_run_does() -> None:
    base, delta = _snapshot(a=1, b=2), _snapshot(b=3)
    merged = merge_snapshots(base, delta)
    for shape in (Snapshot.to_dict, lambda each: json.dumps(each.to_dict()), lambda each: json.dumps(each.to_dict()).encode()):
        assert merge_snapshots(shape(base), shape(delta)) == merge_snapshots(base, shape(delta)) == merged
    with pytest.raises(SnapshotFormatError, match="formatVersion"):
        merge_snapshots({"steps": {}}, delta)


def test_merging_takes_execution_from_the_delta_and_merges_metadata_one_level() -> None:
    base = replace(_snapshot(), metadata={"a": {"x": 1}, "b": 1}, workflow_name="w", extra={"x": 1, "y": 1})
    delta = replace(_snapshot(), execution=Execution(status="failed", last_updated=AT, completed_at=AT), extra={"y": 2})
    merged = merge_snapshots(base, replace(delta, metadata={"a": {"y": 2}}))
    assert merged.execution == delta.execution
    assert merged.metadata == {"a": {"y": 2}, "b": 1}
    assert merged.workflow_name == "w"
    assert merged.extra == {"x": 1, "y": 2}
    assert merge_snapshots(base, replace(delta, workflow_name="v")).workflow_name == "v"
    assert merge_snapshots(_snapshot(), _snapshot()).metadata is None


def test_merging_drops_warnings_of_steps_that_were_recorded_again() -> None:
    old, kept, new = (LossWarning(step_id=key, path="value", reason="non-json") for key in ("a", "b", "a"))
    base = replace(_snapshot(a=1, b=2), warnings=[old, kept])
    assert merge_snapshots(base, replace(_snapshot(a=3), warnings=[new])).warnings == (kept, new)
    assert merge_snapshots(base, _snapshot(a=3)).warnings == (kept,)


@given(DOCUMENTS)
def test_merging_a_snapshot_with_itself_changes_nothing(document: dict[str, Any]) -> None:
    snapshot = Snapshot.from_dict(document)
    told = [warning for warning in snapshot.warnings if warning.step_id in snapshot.steps]
    snapshot = replace(snapshot, warnings=told, extra={name: kept for name, kept in snapshot.extra.items() if name != "warnings"})
    assert merge_snapshots(snapshot, snapshot).to_dict() == snapshot.to_dict()
