"""A step's result as an entry of a version 1 resume state, and back.

    {"result": {"ok": true, "value"}}                                    "value" is left out where it was undefined
    {"result": {"ok": false, "error", "cause"}, "meta": {"origin": "result", "resultCause"?}}
    {"result": {"ok": false, "error", "cause"}, "meta": {"origin": "throw", "thrown"}}

    a cause there                                               the same in a snapshot
    {"type": "undefined"}                                       thrown, original type undefined
    {"type": "error", "errorName", "errorMessage", "errorStack"}  error, with name, message, stack
    {"type": "value", "value"}                                  thrown, with its value

The cause of a step that threw is what it threw; if its result has another cause, that one stays in `meta` as `resultCause`.
A result that these shapes cannot hold in full is also written as it would be in a snapshot, under `stepResult`. Other libraries
ignore that field; here it takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from perdure.snapshots.json_reader import JsonPath, Problems
from perdure.snapshots.parts import NO_CAUSE, StepResult
from perdure.snapshots.validation import Fields, check_cause, check_step_key, read_step

# Fields of an entry that this version does not know are kept in `StepResult.extra` under this name. A "meta" inside the result
# is kept there too, because in a snapshot that name is taken.
_OF_ENTRY: Final = "entry"


def write_entry(step: StepResult) -> dict[str, Any]:
    """The entry of a result; it shares its parts."""
    entry = _write_plain_entry(step)
    if step.ok and not step.extra:
        return entry
    problems = Problems()
    is_complete = read_entry("key", entry, (), problems) == step and not problems
    return entry if is_complete else {**entry, "stepResult": step.tree()}


def _write_plain_entry(step: StepResult) -> dict[str, Any]:
    extra = dict(step.extra)
    around = extra.pop(_OF_ENTRY) if isinstance(extra.get(_OF_ENTRY), dict) else {}
    if step.ok:
        result = {**extra, "ok": True, "value": step.value}
        return {**around, "result": result, **({} if step.meta is None else {"meta": step.meta})}
    meta = dict(step.meta or {})
    cause = result_cause = _write_cause(step.cause or NO_CAUSE)
    if meta.get("origin") == "throw":
        result_cause = _write_cause(meta.pop("resultCause")) if "resultCause" in meta else cause
        meta["thrown"] = cause
    elif "resultCause" in meta:
        meta["resultCause"] = _write_cause(meta["resultCause"])
    result = {**extra, "ok": False, "error": step.error, "cause": result_cause}
    return {**around, "result": result, **({} if step.meta is None else {"meta": meta})}


def _write_cause(cause: Any) -> dict[str, Any]:
    """A snapshot's cause in the shape of an entry."""
    if not isinstance(cause, Mapping):
        return {"type": "value", "value": cause}
    rest = dict(cause)
    if rest.pop("type", None) == "error":
        known = {"errorName": rest.pop("name", ""), "errorMessage": rest.pop("message", "")}
        stack = {"errorStack": rest.pop("stack")} if "stack" in rest else {}
        return {"type": "error", **rest, **known, **stack}
    kind, text = rest.pop("originalType", None), rest.pop("stringRepresentation", None)
    if "value" not in rest and kind == "undefined":
        return {**rest, "type": "undefined"}
    return {**rest, "type": "value", "value": rest.get("value", text)}


def read_entry(key: Any, tree: Any, path: JsonPath, problems: Problems) -> StepResult | None:
    """The result in an entry; None when there is a problem."""
    fields = Fields.of(tree, path, problems)
    if fields is None:
        check_step_key(key, path, problems)
        return None
    if (whole := fields.mapping("stepResult", optional=True)) is not None:
        return read_step(key, whole, (*path, "stepResult"), problems)
    check_step_key(key, path, problems)
    result, meta = fields.mapping("result"), fields.mapping("meta", optional=True)
    if result is None:
        return None
    return _read_result(result, meta, fields.rest(), path, problems)


def _read_result(
    tree: dict[str, Any], meta: dict[str, Any] | None, of_entry: dict[str, Any], path: JsonPath, problems: Problems
) -> StepResult | None:
    fields = Fields(tree, (*path, "result"), problems)
    ok = fields.flag("ok")
    if ok is None:
        return None
    if ok:
        return StepResult(ok=True, value=fields.value("value", optional=True), meta=meta, extra=_extra(fields.rest(), of_entry))
    error = fields.value("error", optional=True)
    tree_of_cause = fields.value("cause", optional=True)
    cause = None if tree_of_cause is None else _read_cause(tree_of_cause, (*path, "result", "cause"), problems)
    if meta is not None:
        cause, meta = _read_meta(meta, cause, (*path, "meta"), problems)
    return StepResult(ok=False, error=error, cause=cause, meta=meta, extra=_extra(fields.rest(), of_entry))


def _extra(of_result: dict[str, Any], of_entry: dict[str, Any]) -> dict[str, Any]:
    if "meta" in of_result:
        of_entry["resultMeta"] = of_result.pop("meta")
    return {**of_result, _OF_ENTRY: of_entry} if of_entry else of_result


def _read_meta(
    tree: dict[str, Any], cause: dict[str, Any] | None, path: JsonPath, problems: Problems
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The cause and the meta of a failure."""
    fields = Fields(tree, path, problems)
    origin = fields.choice("origin", "result", "throw")
    of_result = fields.mapping("resultCause", optional=True)
    meta = {"origin": origin}
    if of_result is not None:
        meta["resultCause"] = _read_cause(of_result, (*path, "resultCause"), problems)
    if origin == "throw" and (thrown := fields.mapping("thrown")) is not None:
        result_cause, cause = cause, _read_cause(thrown, (*path, "thrown"), problems)
        if result_cause is not None and result_cause != cause:
            meta["resultCause"] = result_cause
    return cause, {**fields.rest(), **meta}


def _read_cause(tree: Any, path: JsonPath, problems: Problems) -> dict[str, Any] | None:
    """An entry's cause in the shape of a snapshot."""
    fields = Fields.of(tree, path, problems)
    kind = None if fields is None else fields.choice("type", "undefined", "error", "value")
    if fields is None or kind is None:
        return None
    known = _read_error(fields) if kind == "error" else _read_value(fields) if kind == "value" else dict(NO_CAUSE)
    if known is None:
        return None
    cause = {**fields.rest(), **known}
    # A field that is unknown in an entry may have a meaning in a snapshot, such as the cause of the cause, so it is checked.
    check_cause(cause, path, problems)
    return cause


def _read_error(fields: Fields) -> dict[str, Any] | None:
    name, message, stack = fields.text("errorName"), fields.text("errorMessage"), fields.text("errorStack", optional=True)
    if name is None or message is None:
        return None
    return {"type": "error", "name": name, "message": message, **({} if stack is None else {"stack": stack})}


def _read_value(fields: Fields) -> dict[str, Any]:
    """A cause that is a value, described as JavaScript would describe it."""
    value = fields.value("value", optional=True)
    kinds = {str: "string", bool: "boolean", int: "number", float: "number"}
    return {
        "type": "thrown",
        "originalType": kinds.get(type(value), "object"),
        "value": value,
        "stringRepresentation": _javascript_text(value),
    }


def _javascript_text(value: Any) -> str:
    if isinstance(value, dict | list):
        return "[object Object]" if isinstance(value, dict) else "[object Array]"
    return value if isinstance(value, str) else json.dumps(value)
