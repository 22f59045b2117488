"""A document that is no snapshot is refused with everything that is wrong with it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import dump_error, load_error
from perdure.errors import FormatProblem, SnapshotError, SnapshotFormatError
from perdure.snapshots import json_reader
from perdure.snapshots.json_reader import MAX_BYTES, MAX_PROBLEMS
from perdure.snapshots.parts import Execution, StepResult
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.snapshot import (
    Snapshot,
    assert_valid_snapshot,
    looks_like_snapshot,
    merge_snapshots,
    validate_snapshot,
)
from tests.snapshots.documents import COMPLETED, FAILED, JSON, LOSSY, all_snapshots


def _errors(value: Any) -> dict[str, str]:
    return dict(validate_snapshot(value).errors)


def _with(document: dict[str, Any], *path: Any, put: Any) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    inner: Any = changed
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = put
    return changed


@pytest.mark.parametrize("document", all_snapshots().values(), ids=all_snapshots())
def test_a_valid_snapshot_is_valid_as_dict_text_bytes_and_object(document: dict[str, Any]) -> None:
    read = Snapshot.from_dict(document)
    for form in (document, json.dumps(document), json.dumps(document).encode(), read):
        validation = validate_snapshot(form)
        assert (validation.valid, validation.snapshot, validation.errors) == (True, read, ())
        assert assert_valid_snapshot(form) == read
    assert looks_like_snapshot(document)
    assert looks_like_snapshot(read)


def test_all_errors_are_told_each_with_its_path() -> None:
    document = {
        "formatVersion": "1",
        "workflowName": None,
        "steps": {
            "a b": {"ok": "yes"},
            "c": {"ok": False, "cause": {"type": "error", "name": 1, "cause": {"type": "thrown"}}, "meta": {"origin": "?"}},
            "d": [],
            "e": {"ok": True},
            "f": {"ok": False, "error": 1},
        },
        "execution": {"status": "done", "completedAt": "yesterday", "currentStepId": 1},
        "metadata": [],
        "warnings": [{"type": "lossy_value", "stepId": 1}, None],
    }
    assert _errors(document) == {
        "$.formatVersion": 'must be the integer 1, not the text "1"',
        "$.workflowName": "must be text, not null",
        '$.steps["a b"].ok': 'must be true or false, not the text "yes"',
        "$.steps.c.error": "is missing",
        "$.steps.c.cause.name": "must be text, not the number 1",
        "$.steps.c.cause.message": "is missing",
        "$.steps.c.cause.cause.stringRepresentation": "is missing",
        "$.steps.c.meta.origin": 'must be one of "result", "throw", not the text "?"',
        "$.steps.d": "must be an object, not a list",
        "$.steps.e.value": "is missing",
        "$.steps.f.cause": "is missing",
        "$.execution.status": 'must be one of "running", "completed", "failed", not the text "done"',
        "$.execution.lastUpdated": "is missing",
        "$.execution.completedAt": (
            'must be an instant with its offset, such as "2026-01-31T12:00:00.000Z", not the text "yesterday"'
        ),
        "$.execution.currentStepId": "must be text, not the number 1",
        "$.metadata": "must be an object, not a list",
        "$.warnings[0].stepId": "must be text, not the number 1",
        "$.warnings[0].path": "is missing",
        "$.warnings[0].reason": "is missing",
        "$.warnings[1]": "must be an object, not null",
    }


@pytest.mark.parametrize("version", [True, "1", 1.0, 0, -1, None, [1]])
def test_only_the_integer_1_is_the_format_version(version: Any) -> None:
    assert _errors(_with(COMPLETED, "formatVersion", put=version))["$.formatVersion"].startswith("must be the integer 1, not ")


def test_a_newer_version_is_told_as_such_and_nothing_else_is_judged() -> None:
    assert _errors({"formatVersion": 2, "steps": []}) == {
        "$.formatVersion": "says snapshot format version 2, which a newer perdure wrote; this one reads version 1"
    }


@pytest.mark.parametrize(
    "instant",
    ["2026-01-01T00:00:00", "2026-01-01", "2026-13-01T00:00:00Z", "20260101T000000Z", "+275760-09-13T00:00:00.000Z", "", "٢" * 4],
)
def test_an_instant_must_be_complete(instant: str) -> None:
    assert "$.execution.lastUpdated" in _errors(_with(COMPLETED, "execution", "lastUpdated", put=instant))


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800", "k" * 1025])
def test_a_key_that_no_run_could_record_is_refused(key: str) -> None:
    (error,) = validate_snapshot(_with(COMPLETED, "steps", key, put={"ok": True, "value": 1})).errors
    assert "is no key" in error.reason
    assert error.path.isascii()
    assert len(error.path) < 200


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ("", "$", "no JSON at offset 0"),
        ('{"formatVersion":1', "$", "no JSON at offset 18"),
        ("{} {}", "$", "no JSON at offset 3"),
        ("\ufeff{}", "$", "no JSON at offset 0"),
        (b'{"a":"\xff"}', "$", "no UTF-8 at offset 6"),
        ('{"a":{"b":1,"c":2,"b":1}}', "$.a.b", "stands twice"),
        ('{"a":1,"\\u0061":2}', "$.a", "stands twice"),
        ('{"a":[NaN]}', "$.a[0]", "NaN"),
        ('{"a":[0,-Infinity]}', "$.a[1]", "-Infinity"),
        ('{"a":1e999}', "$.a", "no finite number"),
        ('{"a":' + "9" * 5000 + "}", "$.a", "5000 digits"),
        ("[" * 100_000, "$", "nested more than 200 deep at offset 200"),
        ('{"[[":' * 100_000 + "]" * 5, "$", "nested more than 200 deep at offset 1200"),
        ("[" * 400 + "]" * 400, "$" + "[0]" * 203, "nested more than 200 deep"),
        (" " * (MAX_BYTES + 1), "$", "larger than 64 MiB"),
    ],
    ids=lambda part: repr(part)[:30],
)
def test_bad_text_is_told_with_a_path_or_an_offset(text: str | bytes, path: str, reason: str) -> None:
    assert reason in _errors(text)[path]
    with pytest.raises(SnapshotFormatError):
        assert_valid_snapshot(text)


def test_a_document_that_contains_itself_or_multiplies_is_refused() -> None:
    circular = _with(COMPLETED, "metadata", put={})
    circular["metadata"]["me"] = circular
    assert _errors(circular) == {"$.metadata.me": "contains itself"}
    text = "x" * 2**16
    many: Any = [text] * 64
    assert "larger than 64 MiB" in str(_errors(_with(COMPLETED, "metadata", put={"a": [many] * 64})))


@pytest.mark.parametrize("part", [(1,), {1}, b"x", object(), float("nan"), 10**5000, type("Text", (str,), {})("x")], ids=type)
def test_a_part_that_is_no_json_is_told_with_its_path_only_once(part: Any) -> None:
    assert list(_errors(_with(COMPLETED, "workflowName", put=part))) == ["$.workflowName"]


def test_a_key_that_is_no_text_is_refused() -> None:
    assert _errors(_with(COMPLETED, "metadata", put={1: 2})) == {'$.metadata["<int>"]': "is a key that is no text"}


def test_a_snapshot_made_by_hand_is_judged_like_any_other() -> None:
    execution = Execution(status="running", last_updated=Snapshot.from_dict(COMPLETED).execution.last_updated)
    made = Snapshot(steps={"": StepResult(ok=True)}, execution=execution)
    assert list(_errors(made)) == ['$.steps[""]']
    assert list(_errors(Snapshot(steps={"a": StepResult(ok=True, value=object())}, execution=execution))) == ["$.steps.a.value"]


def test_the_error_lists_path_and_reason() -> None:
    with pytest.raises(SnapshotError) as caught:
        assert_valid_snapshot(_with(_with(FAILED, "steps", "threw", put=1), "execution", put=[]))
    assert str(caught.value) == (
        "the snapshot cannot be read: "
        "$.steps.threw must be an object, not the number 1; $.execution must be an object, not a list"
    )
    with pytest.raises(SnapshotFormatError, match=r"; and 30 more$"):
        assert_valid_snapshot(_with(COMPLETED, "steps", put=dict.fromkeys(map(str, range(50)))))


def test_the_error_survives_being_recorded_and_pickled() -> None:
    error = SnapshotFormatError([FormatProblem("$.a", "is missing")], "the state")
    for again in (load_error(dump_error(error), "key"), pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own bytes
        assert type(again) is SnapshotFormatError
        assert again.errors == error.errors == (FormatProblem("$.a", "is missing"),)
        assert str(again) == str(error) == "the state cannot be read: $.a is missing"


@given(JSON | st.binary() | st.text() | st.builds(object))
def test_anything_at_all_is_judged_without_an_exception(value: Any) -> None:
    validation = validate_snapshot(value)
    assert not validation.valid
    assert validation.errors[0].path.startswith("$")
    assert not looks_like_snapshot(value)


def test_the_outline_of_a_snapshot_is_enough_to_look_like_one() -> None:
    assert looks_like_snapshot({"formatVersion": 9, "steps": {}, "execution": {}})
    assert not looks_like_snapshot(json.dumps(LOSSY))
    assert not looks_like_snapshot({"formatVersion": True, "steps": {}, "execution": {}})


def _lists_in_lists(levels: int) -> Any:
    """A few lists that stand for 2**levels."""
    value: Any = ["a part"]
    for _ in range(levels):
        value = [value, value]
    return value


def _objects_in_objects(levels: int) -> Any:
    value: Any = {"a": "part"}
    for _ in range(levels):
        value = {"x": value, "y": [value]}
    return value


def _step(value: Any) -> StepResult:
    return StepResult(ok=True, value=value)


SHARED_PARTS: dict[str, Callable[[Any], object]] = {
    "assert_valid_snapshot": lambda value: assert_valid_snapshot(_with(COMPLETED, "metadata", put={}) | {"extra": value}),
    "from_dict": lambda value: Snapshot.from_dict({**COMPLETED, "metadata": {"x": value}}),
    "to_dict": lambda value: Snapshot(steps={"a": _step(value)}, execution=assert_valid_snapshot(COMPLETED).execution).to_dict(),
    "merge_snapshots": lambda value: merge_snapshots(COMPLETED, {**COMPLETED, "metadata": {"x": value}}),
    "parse_state": lambda value: parse_state({"version": 1, "entries": {"a": {"result": {"ok": True, "value": value}}}}),
    "dump_state": lambda value: dump_state(ResumeState({"a": _step(value)})),
    "dump_state with metadata": lambda value: dump_state(ResumeState(), x=value),
}


@pytest.mark.parametrize("make", [_lists_in_lists, _objects_in_objects])
@pytest.mark.parametrize("read", SHARED_PARTS.values(), ids=SHARED_PARTS)
def test_a_few_parts_that_stand_for_a_huge_document_are_refused_before_they_are_copied(
    read: Callable[[Any], object], make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = 0
    walk = json_reader._Copier._part

    def count_parts(copier: Any, part: Any) -> Any:
        nonlocal walked
        walked += 1
        assert walked < 100_000, "the walk does not stop"
        return walk(copier, part)

    monkeypatch.setattr(json_reader._Copier, "_part", count_parts)
    monkeypatch.setattr(json_reader, "MAX_REPEATED_PARTS", 10_000)
    with pytest.raises(
        SnapshotFormatError, match="is where parts that stand in several places make the document 10,000 parts larger"
    ):
        read(make(60))
    assert walked < 25_000


def test_a_part_that_stands_in_several_places_becomes_as_many_copies() -> None:
    shared = {"list": list(range(100))}
    read = Snapshot.from_dict({**COMPLETED, "metadata": {"x": [shared] * 50}}).to_dict()["metadata"]["x"]
    assert read == [shared] * 50
    assert len({id(each["list"]) for each in read}) == 50


def test_the_walk_ends_where_a_document_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "MAX_BYTES", 1 << 20)
    errors = _errors({**COMPLETED, "metadata": {"x": [0] * (1 << 21)}})
    assert [reason for path, reason in errors.items() if path.startswith("$.metadata")] == [
        "is where the document has grown larger than 1 MiB"
    ]


def test_of_a_million_problems_the_first_thousand_are_listed() -> None:
    errors = validate_snapshot({**COMPLETED, "metadata": {"x": [float("nan")] * 1_000_000}}).errors
    assert len(errors) == MAX_PROBLEMS + 1
    assert errors[0] == FormatProblem("$.metadata.x[0]", "is no finite number")
    assert errors[-1] == FormatProblem("$", "has more problems than the 1,000 that are listed")
