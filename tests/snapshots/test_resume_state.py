"""Resume state reads the same from every shape, and what is written is read back."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import SnapshotFormatError
from perdure.events import is_step_complete
from perdure.snapshots.parts import StepResult
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.snapshot import Snapshot
from tests.snapshots.documents import COMPLETED, DOCUMENTS, ENTRIES, FAILED, JSON, PAIRS, all_states, fixtures

NO_CAUSE = {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"}


def _entry(**entry: Any) -> dict[str, Any]:
    return {"version": 1, "entries": {"a": entry}}


@pytest.mark.parametrize("document", all_states().values(), ids=all_states())
def test_every_shape_is_read_and_written_and_read_again(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    state = parse_state(document)
    assert state.steps
    assert parse_state(json.dumps(document)) == parse_state(json.dumps(document).encode()) == state
    assert parse_state(dump_state(state)) == state
    assert document == before


@pytest.mark.parametrize("document", all_states().values(), ids=all_states())
def test_helpers_take_every_shape_that_run_takes(document: dict[str, Any]) -> None:
    state = parse_state(document)
    for shape in (document, json.dumps(document), json.dumps(document).encode()):
        assert dump_state(shape, note=1) == dump_state(state, note=1)
        for key, step in state.steps.items():
            assert is_step_complete(shape, key) is step.ok
        assert not is_step_complete(shape, "nowhere")


@pytest.mark.parametrize("document", [{}, {"version": 7}, {"steps": {}}, [], 3, "no JSON"])
def test_helpers_refuse_what_is_no_state(document: Any) -> None:
    with pytest.raises(SnapshotFormatError):
        dump_state(document)
    with pytest.raises(SnapshotFormatError):
        is_step_complete(document, "a")


@pytest.mark.parametrize("document", [ENTRIES, *fixtures("resume-state-v1*.json").values()])
def test_the_version_1_form_is_written_as_it_was_read(document: dict[str, Any]) -> None:
    assert json.loads(dump_state(parse_state(document))) == document


@given(DOCUMENTS, st.dictionaries(st.text(max_size=5), JSON, max_size=2))
def test_any_steps_survive_the_version_1_form(document: dict[str, Any], metadata: dict[str, Any]) -> None:
    snapshot = Snapshot.from_dict(document)
    state = parse_state(dump_state(snapshot, **metadata))
    assert {key: step.tree() for key, step in state.steps.items()} == document["steps"]
    assert list(state.steps) == list(document["steps"])
    assert state.metadata == {**document.get("metadata", {}), **metadata}


def test_causes_of_the_version_1_form_are_those_of_a_snapshot() -> None:
    steps = parse_state(ENTRIES).steps
    error = {"type": "error", "name": "DbError", "message": "no row", "stack": "at db"}
    assert steps["none"] == StepResult(ok=False, error="NOPE", cause=NO_CAUSE, meta={"origin": "result"})
    assert steps["returned"].cause == error
    assert steps["returned"].meta == {"origin": "result", "resultCause": error}
    assert steps["value"].cause == {
        "type": "thrown",
        "originalType": "object",
        "value": [1, {"a": None}],
        "stringRepresentation": "[object Array]",
    }


def test_what_was_thrown_is_the_cause_of_a_step_that_threw() -> None:
    steps = parse_state(ENTRIES).steps
    assert steps["threw"].cause == {"type": "error", "name": "E", "message": "m"}
    assert steps["threw"].meta == {"origin": "throw"}
    thrown = {"type": "thrown", "originalType": "string", "value": "boom", "stringRepresentation": "boom"}
    assert steps["threw other"].cause == thrown
    assert steps["threw other"].meta == {"origin": "throw", "resultCause": NO_CAUSE}


def test_a_failure_of_a_snapshot_is_written_in_the_words_of_version_1() -> None:
    entries = json.loads(dump_state(Snapshot.from_dict(FAILED)))["entries"]
    assert entries["returned"] == {
        "result": {
            "ok": False,
            "error": "NOT_FOUND",
            "cause": {
                "type": "error",
                "errorName": "Error",
                "errorMessage": "no row",
                "errorStack": "Error: no row\n    at lookup",
                "cause": {"type": "error", "name": "Error", "message": "db"},
            },
        },
        "meta": {"origin": "result"},
    }
    assert entries["threw"]["meta"]["thrown"] == {"type": "value", "value": "() => 1", "truncated": True}
    assert entries["threw"]["stepResult"] == FAILED["steps"]["threw"]


def test_a_value_that_javascript_left_out_is_null() -> None:
    assert parse_state(_entry(result={"ok": True})).steps["a"] == StepResult(ok=True)
    assert parse_state(_entry(result={"ok": False})).steps["a"] == StepResult(ok=False)
    assert parse_state(PAIRS).steps["void"] == StepResult(ok=True)


def test_fields_whose_names_mean_something_elsewhere_do_no_harm() -> None:
    assert parse_state(dump_state(parse_state({**PAIRS, "version": 7, "entries": 8}))) == parse_state(PAIRS)
    state = parse_state(_entry(result={"ok": False, "error": 1, "meta": 5}))
    assert state.steps["a"].extra == {"entry": {"resultMeta": 5}}
    assert Snapshot.from_dict(state.to_snapshot().to_dict()).steps == state.steps


def test_metadata_is_added_to_the_states_own_and_comes_back() -> None:
    state = ResumeState({"a": StepResult(ok=True, value=1)}, {"x": 1, "y": 1})
    assert parse_state(dump_state(state, y=2, state=3)).metadata == {"x": 1, "y": 2, "state": 3}
    assert json.loads(dump_state(ResumeState())) == {"version": 1, "entries": {}}


def test_the_text_is_ascii_so_that_it_arrives_anywhere() -> None:
    text = dump_state(ResumeState({"ä": StepResult(ok=True, value="\ud800\0€")}))
    assert text.isascii()
    assert parse_state(text).steps["ä"].value == "\ud800\0€"


def test_what_is_no_json_is_not_written() -> None:
    with pytest.raises(SnapshotFormatError, match=r"the resume state cannot be read: \$.metadata.at is a datetime"):
        dump_state(ResumeState(), at=datetime.now(UTC))
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(SnapshotFormatError, match="contains itself"):
        dump_state(ResumeState({"a": StepResult(ok=True, value=circular)}))


@pytest.mark.parametrize(
    ("document", "path", "reason"),
    [
        ({}, "$", "no state of any known shape"),
        ([], "$", "must be an object"),
        ("", "$", "no JSON at offset 0"),
        ('{"version":1,"entries":{"a":1,"a":2}}', "$.entries.a", "twice"),
        ({"version": 1}, "$.entries", "missing"),
        ({"version": 2}, "$.version", "newer"),
        ({"version": True, "entries": {}}, "$.version", "must be the integer 1"),
        ({"version": 1, "entries": {}, "metadata": []}, "$.metadata", "must be an object"),
        ({"version": 1, "entries": {"": {}}}, '$.entries[""]', "is no key"),
        (_entry(), "$.entries.a.result", "missing"),
        (_entry(result={}), "$.entries.a.result.ok", "missing"),
        (_entry(result={"ok": False, "cause": 1}), "$.entries.a.result.cause", "must be an object"),
        (_entry(result={"ok": False, "cause": {"type": "thrown"}}), "$.entries.a.result.cause.type", "must be one of"),
        (_entry(result={"ok": False, "cause": {"type": "error"}}), "$.entries.a.result.cause.errorName", "missing"),
        (
            _entry(result={"ok": False, "cause": {"type": "error", "errorName": "", "errorMessage": "", "cause": 1}}),
            "$.entries.a.result.cause.cause",
            "must be an object",
        ),
        (_entry(result={"ok": False}, meta={"origin": "throw"}), "$.entries.a.meta.thrown", "missing"),
        (_entry(result={"ok": False}, meta={}), "$.entries.a.meta.origin", "missing"),
        (_entry(result={"ok": True}, stepResult={"ok": True}), "$.entries.a.stepResult.value", "missing"),
        ({"kind": "Other", "steps": []}, "$.kind", 'must be one of "ResumeState"'),
        ({"kind": "ResumeState", "steps": {}}, "$.steps", "must be a list"),
        ({"kind": "ResumeState", "steps": [["a"]]}, "$.steps[0]", "a key and its result"),
        ({"kind": "ResumeState", "steps": [["a", {"ok": True}]] * 2}, "$.steps[1][0]", "earlier step"),
        ({"kind": "ResumeState", "steps": [["a", {"ok": False}]]}, "$.steps[0][1].cause", "missing"),
        ({"formatVersion": 1, "steps": {}}, "$.execution", "missing"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_corrupt_state_is_told_with_its_path(document: Any, path: str, reason: str) -> None:
    with pytest.raises(SnapshotFormatError) as caught:
        parse_state(document)
    assert reason in dict(caught.value.errors)[path]


def test_a_step_is_complete_only_when_it_is_recorded_as_a_success() -> None:
    for state in (Snapshot.from_dict(FAILED), parse_state(ENTRIES), None):
        assert not is_step_complete(state, "returned")
        assert not is_step_complete(state, "nowhere")
    assert is_step_complete(parse_state(ENTRIES), "user:1")
    assert is_step_complete(Snapshot.from_dict(COMPLETED), "user:1")


def test_a_state_becomes_a_snapshot_and_back() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    state = parse_state(ENTRIES)
    snapshot = state.to_snapshot(last_updated=at, workflow_name="w")
    assert Snapshot.from_dict(snapshot.to_dict()) == snapshot
    assert snapshot.to_dict()["execution"] == {
        "status": "running",
        "lastUpdated": "2026-01-01T00:00:00.000Z",
        "currentStepId": "unknown",
    }
    assert ResumeState.from_snapshot(snapshot) == replace(state, extra={})
    assert state.to_snapshot(status="failed", last_updated=at).execution.completed_at == at
    assert ResumeState().to_snapshot().execution.current_step_id is None
