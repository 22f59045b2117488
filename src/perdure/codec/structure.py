"""Whether stored bytes could be a value, when the classes in them are not known yet.

Every tag is read except those of classes and enums. A unique object stands in for each of these, and the fields inside it are
checked on their own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.codec.losses import tag_of
from perdure.codec.untagging import Untagger
from perdure.codec.values import Codec, refuse_repeated_keys


def check_structure(codec: Codec, data: bytes) -> None:
    """Raise `ValueError` if no reader could read these bytes, whatever classes it knows."""
    if len(data) > codec.max_bytes:
        raise ValueError(f"the data is longer than {codec.max_bytes:,} bytes (max_bytes)")
    try:
        refuse_repeated_keys(data)
        trees = [msgspec.json.decode(data)]
        while trees:
            Untagger(_no_class, codec.max_depth).value(_split_off_objects(trees.pop(), trees))
    except RecursionError as error:
        raise ValueError("the data is nested too deeply to be read") from error
    except Exception as error:  # what a malformed tree makes a constructor raise is as various as the constructors
        raise ValueError(f"the data cannot be read: {error}") from error


def _no_class(_: str) -> None:
    return None


def _split_off_objects(tree: Any, inside: list[Any]) -> Any:
    """The tree with a unique object in place of each class instance and enum member; their fields go to `inside`."""
    if type(tree) is list:
        return [_split_off_objects(part, inside) for part in tree]
    if type(tree) is not dict:
        return tree
    match tag_of(tree):
        case "$class":
            inside.extend(_fields(tree["$class"]))
            return object()
        case "$enum":
            _check_member(tree["$enum"])
            return object()
    return {key: _split_off_objects(part, inside) for key, part in tree.items()}


def _fields(content: Any) -> list[Any]:
    match content:
        case [str(), dict() as fields]:
            return list(fields.values())
        case [str(), dict() as fields, dict() as state]:
            return [*fields.values(), *state.values()]
    raise ValueError("an object is malformed")


def _check_member(content: Any) -> None:
    match content:
        case [str(), str() | int()]:
            return
    raise ValueError("a member of an enum is malformed")
