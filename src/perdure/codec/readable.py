"""Stored values as people and other programs read them: plain JSON without the tags of the codec.

It is for `describe`, `show`, lists and pages. The way back needs the tags: whatever is stored or moved keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import msgspec

from perdure.codec.losses import LOST, tag_of
from perdure.codec.scalars import read_str, read_timedelta


def readable(tree: Any) -> Any:
    """Return the tree without tags: an object as its fields, a time as ISO text. A tag that is not understood stays."""
    if type(tree) is list:
        return [readable(part) for part in tree]
    if type(tree) is not dict:
        return tree
    tag = tag_of(tree)
    if tag is None:
        return {key[1:] if key[:1] == "$" else key: readable(part) for key, part in tree.items()}
    try:
        return _READERS[tag](tree[tag])
    except (KeyError, TypeError, ValueError, IndexError):
        return tree


def _object(content: Any) -> dict[str, Any]:
    _, *parts = content
    return {name: readable(value) for part in parts for name, value in part.items()}


def _pairs(content: Any) -> Any:
    pairs = [(readable(key), readable(value)) for key, value in content]
    named = {key if isinstance(key, str) else msgspec.json.encode(key).decode(): value for key, value in pairs}
    return named if len(named) == len(pairs) else [list(pair) for pair in pairs]


def _instant(content: Any) -> str:
    text = content["iso"] if isinstance(content, dict) else content
    return f"{text}[{content['zone']}]" if isinstance(content, dict) and "zone" in content else str(text)


def _length(content: Any) -> str:
    length = read_timedelta(content)
    return str(length) if length >= timedelta() else f"-{-length}"


def _text(content: Any) -> str:
    return read_str(content).encode("utf-8", "backslashreplace").decode()


def _same(content: Any) -> Any:
    return content


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$class": _object,
    "$dict": _pairs,
    "$enum": lambda content: content[1],
    "$tuple": readable,
    "$set": readable,
    "$frozenset": readable,
    "$datetime": _instant,
    "$time": _instant,
    "$timedelta": _length,
    "$str": _text,
    "$path": lambda content: content[1],
    "$date": _same,
    "$int": _same,
    "$float": _same,
    "$bytes": _same,
    "$bytearray": _same,
    "$decimal": _same,
    "$uuid": _same,
    "$unset": _same,
    LOST: lambda _: None,
}
