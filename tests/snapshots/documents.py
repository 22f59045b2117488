"""Documents of every readable shape, as other libraries write them, and those beside the repository, if there are any."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

FIXTURES: Final = Path(__file__).parent / "fixtures"

COMPLETED: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "workflowName": "feed",
    "steps": {"user:1": {"ok": True, "value": {"id": "1", "name": "Ada"}}, "posts:1": {"ok": True, "value": [{"id": "p1"}]}},
    "execution": {
        "status": "completed",
        "lastUpdated": "2026-11-15T07:30:12.073Z",
        "completedAt": "2026-11-15T08:30:12.073+01:00",
    },
    "metadata": {"workflowId": "wf-123", "definitionHash": "v1:abc", "input": {"$datetime": "2026-01-01"}},
}
RUNNING: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "steps": {"one": {"ok": True, "value": 1}, "10": {"ok": True, "value": 1.0}, "2": {"ok": True, "value": None}},
    "execution": {"status": "running", "lastUpdated": "2026-11-15T07:30:12+00:00", "currentStepId": "2"},
}
FAILED: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "workflowName": "lookup",
    "steps": {
        "returned": {
            "ok": False,
            "error": "NOT_FOUND",
            "cause": {
                "type": "error",
                "name": "Error",
                "message": "no row",
                "stack": "Error: no row\n    at lookup",
                "cause": {"type": "error", "name": "Error", "message": "db"},
            },
            "meta": {"origin": "result"},
        },
        "threw": {
            "ok": False,
            "error": "UNEXPECTED_ERROR",
            "cause": {"type": "thrown", "originalType": "function", "stringRepresentation": "() => 1", "truncated": True},
            "meta": {"origin": "throw"},
        },
        "bare": {"ok": False, "error": None, "cause": {"type": "thrown", "value": 7, "stringRepresentation": "seven"}},
    },
    "execution": {"status": "failed", "lastUpdated": "2026-11-15T07:30Z", "completedAt": "2026-11-15T07:30:12.123456Z"},
}
LOSSY: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "steps": {"fn": {"ok": True, "value": None}},
    "execution": {"status": "completed", "lastUpdated": "2026-11-15T07:30:12.078Z"},
    "metadata": {},
    "warnings": [{"type": "lossy_value", "stepId": "fn", "path": "value", "reason": "non-json"}],
}
# With fields at every level that no version knows yet, and text that is hard to keep.
UNKNOWN: Final[dict[str, Any]] = {
    "formatVersion": 1,
    "steps": {
        "a": {"ok": True, "value": "\ud800\0", "took": 1.5, "error": "left over"},
        "b": {
            "ok": False,
            "error": {"code": 1},
            "cause": {
                "type": "error",
                "name": "E",
                "message": "",
                "code": 7,
                "cause": {"type": "thrown", "stringRepresentation": ""},
            },
            "meta": {"origin": "throw", "attempt": 3},
            "value": "left over",
        },
    },
    "execution": {"status": "running", "lastUpdated": "2026-11-15T07:30:12.078Z", "host": "ada"},
    "warnings": [],
    "signature": {"by": ["ada", None]},
}
SNAPSHOTS: Final = {"completed": COMPLETED, "running": RUNNING, "failed": FAILED, "lossy": LOSSY, "unknown": UNKNOWN}

ENTRIES: Final[dict[str, Any]] = {
    "version": 1,
    "entries": {
        "user:1": {"result": {"ok": True, "value": {"id": "1"}}},
        "none": {"result": {"ok": False, "error": "NOPE", "cause": {"type": "undefined"}}, "meta": {"origin": "result"}},
        "returned": {
            "result": {
                "ok": False,
                "error": "NO_ROW",
                "cause": {"type": "error", "errorName": "DbError", "errorMessage": "no row", "errorStack": "at db"},
            },
            "meta": {
                "origin": "result",
                "resultCause": {"type": "error", "errorName": "DbError", "errorMessage": "no row", "errorStack": "at db"},
            },
        },
        "value": {"result": {"ok": False, "error": "BAD", "cause": {"type": "value", "value": [1, {"a": None}]}}},
        "threw": {
            "result": {
                "ok": False,
                "error": "UNEXPECTED_ERROR",
                "cause": {"type": "error", "errorName": "E", "errorMessage": "m"},
            },
            "meta": {"origin": "throw", "thrown": {"type": "error", "errorName": "E", "errorMessage": "m"}},
        },
        "threw other": {
            "result": {"ok": False, "error": "UNEXPECTED_ERROR", "cause": {"type": "undefined"}},
            "meta": {"origin": "throw", "thrown": {"type": "value", "value": "boom"}},
        },
        "unknown": {"result": {"ok": True, "value": 1, "took": 2}, "meta": {"origin": "result"}, "cachedAt": 17},
    },
    "metadata": {"workflowId": "wf-123", "timestamp": 1_700_000_000_000},
    "signature": "x",
}
PAIRS: Final[dict[str, Any]] = {
    "kind": "ResumeState",
    "steps": [
        ["user:1", {"ok": True, "value": {"id": "1"}}],
        ["void", {"ok": True}],
        [
            "no",
            {
                "ok": False,
                "error": "NOPE",
                "cause": {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"},
                "meta": {"origin": "result"},
            },
        ],
    ],
}
STATES: Final = {"entries": ENTRIES, "pairs": PAIRS, **SNAPSHOTS}


def fixtures(pattern: str) -> dict[str, dict[str, Any]]:
    """Documents that the TypeScript library wrote, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FIXTURES.glob(pattern))}


def all_snapshots() -> dict[str, dict[str, Any]]:
    return copy.deepcopy(SNAPSHOTS) | fixtures("snapshot-*.json")


def all_states() -> dict[str, dict[str, Any]]:
    return copy.deepcopy(STATES) | fixtures("*.json")


TEXT: Final = st.text(max_size=8)
JSON: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS: Final = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
# Names that some version gives a meaning somewhere are in here too: a field may stand where it means nothing.
NAMES: Final = st.sampled_from(["errorName", "thrown", "resultCause", "entry", "result", "stepResult", "took", "$x", ""])
_EXTRA: Final = st.dictionaries(NAMES, JSON, max_size=2)
_OPTIONAL_TEXT: Final = st.none() | TEXT


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    known = st.fixed_dictionaries(required, optional=optional or {})
    return st.tuples(_EXTRA, known).map(lambda parts: parts[0] | parts[1])


_THROWN: Final = _object(
    {"type": st.just("thrown"), "stringRepresentation": TEXT},
    {"originalType": st.sampled_from(["undefined", "number", "x"]), "value": JSON, "truncated": st.booleans()},
)
_CAUSES: Final[st.SearchStrategy[dict[str, Any]]] = st.recursive(
    _THROWN | _object({"type": st.just("error"), "name": TEXT, "message": TEXT}, {"stack": TEXT}),
    lambda inner: _object({"type": st.just("error"), "name": TEXT, "message": TEXT, "cause": inner}, {"stack": TEXT}),
    max_leaves=3,
)
_META: Final = _object({"origin": st.sampled_from(["result", "throw"])})
RESULTS: Final = _object({"ok": st.just(True), "value": JSON}) | _object(
    {"ok": st.just(False), "error": JSON, "cause": _CAUSES}, {"meta": _META}
)
_INSTANTS: Final = st.datetimes().map(lambda at: at.isoformat() + "Z") | st.sampled_from(
    ["2026-01-01T00:00+00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999-11:30"]
)
DOCUMENTS: Final = _object(
    {
        "formatVersion": st.just(1),
        "steps": st.dictionaries(KEYS, RESULTS, max_size=4),
        "execution": _object(
            {"status": st.sampled_from(["running", "completed", "failed"]), "lastUpdated": _INSTANTS},
            {"completedAt": _INSTANTS, "currentStepId": TEXT},
        ),
    },
    {
        "workflowName": TEXT,
        "metadata": st.dictionaries(TEXT, JSON, max_size=3),
        "warnings": st.lists(_object(dict.fromkeys(["type", "stepId", "path", "reason"], TEXT)), max_size=2),
    },
)
