"""The JSON tree that was stored back to the Python value; `tagging` describes the tree.

Nothing here trusts its input. A class is found among the allowed ones or not at all, every scalar is checked to be what
would have been written, and every failure is an exception that `Codec.load` turns into a `ValueError`.

Call chains are kept short: 200 levels must fit into Python's stack beside the caller's frames.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, time
from enum import Enum, Flag
from typing import Any, TypeVar

import msgspec

from perdure.codec import scalars
from perdure.codec.losses import LOST, read_reason
from perdure.codec.shapes import PATHS, name_of, shape_of

# So many keys are compared with each other in some milliseconds, and no data has that many by chance.
_MOST_COLLISIONS = 1000


class Untagger:
    """Turns a decoded tree into the value it stands for. The tree is used up: plain containers are filled in place."""

    __slots__ = ("class_for", "max_depth")

    def __init__(self, class_for: Callable[[str], type | None], max_depth: int) -> None:
        self.class_for = class_for
        self.max_depth = max_depth

    def value(self, tree: Any, depth: int = 0) -> Any:
        """The value of a tree; any exception means that the tree is not one that `Tagger` makes."""
        if type(tree) is list:
            return self._items(tree, depth)
        if type(tree) is not dict:
            return tree
        for key in tree:
            if key[:1] == "$":
                if len(tree) == 1 and key[1:2] != "$":
                    return _builder(key)(self, tree[key], depth)
                tree = _unescape(tree)
                break
        return self._fields(tree, depth)

    def _deeper(self, depth: int) -> int:
        if depth >= self.max_depth:
            raise ValueError(f"it is nested more than {self.max_depth} deep")
        return depth + 1

    def _items(self, tree: Any, depth: int) -> list[Any]:
        depth = self._deeper(depth)
        items: list[Any] = _check_type(list, tree)
        for index, item in enumerate(items):
            if type(item) is dict or type(item) is list:
                items[index] = self.value(item, depth)
        return items

    def _fields(self, tree: Any, depth: int) -> dict[str, Any]:
        depth = self._deeper(depth)
        fields: dict[str, Any] = _check_type(dict, tree)
        for key, item in fields.items():
            if type(item) is dict or type(item) is list:
                fields[key] = self.value(item, depth)
        return fields

    def _tuple(self, content: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(content, depth))

    def _set(self, content: Any, depth: int) -> set[Any]:
        return _check_unique(set(refuse_collisions(self._items(content, depth))), content)

    def _frozenset(self, content: Any, depth: int) -> frozenset[Any]:
        return _check_unique(frozenset(refuse_collisions(self._items(content, depth))), content)

    def _dict(self, content: Any, depth: int) -> dict[Any, Any]:
        depth = self._deeper(depth)
        keys, items = [], []
        for pair in _check_type(list, content):
            key, item = _check_type(list, pair)
            keys.append(self.value(key, depth))
            items.append(self.value(item, depth))
        return _check_unique(dict(zip(refuse_collisions(keys), items, strict=True)), content)

    def _class(self, content: Any, depth: int) -> Any:
        name, fields, *state = _check_type(list, content)
        cls = self._allowed_class(name)
        shape = shape_of(cls)
        if shape is None or len(state) > 1:
            raise ValueError(f"an object of {name_of(cls)} is malformed")
        return shape.build(self._fields(fields, depth), self._fields(state[0], depth) if state else {})

    def _enum(self, content: Any, _depth: int) -> Any:
        name, member = _check_type(list, content)
        cls: Any = self._allowed_class(name)
        if type(member) is str and issubclass(cls, Enum) and member in cls.__members__:
            return cls.__members__[member]
        # The first releases of 3.11 drop bits they do not know.
        if type(member) is int and issubclass(cls, Flag) and (flags := cls(member)).value == member:
            return flags
        raise ValueError(f"{name_of(cls)} has no member {str(member)[:80]!r}")

    def _allowed_class(self, name: Any) -> type:
        cls = self.class_for(scalars.text(name))
        if cls is None:
            raise ValueError(f"class {name[:200]!r} is neither in the annotation nor registered")
        return cls

    def _path(self, content: Any, depth: int) -> Any:
        import pathlib

        kind, where = _check_type(list, content)
        if kind not in PATHS:
            raise ValueError("a path is malformed")
        return getattr(pathlib, kind)(scalars.text(self.value(where, depth)))


def _builder(tag: str) -> Callable[[Untagger, Any, int], Any]:
    if (build := _BUILD.get(tag)) is None:
        raise ValueError(f"{tag[:40]!r} is no tag that this version of perdure knows")
    return build


def _check_type(kind: type, content: Any) -> Any:
    if type(content) is not kind:
        raise ValueError(f"a tag that must hold a {kind.__name__} holds a {type(content).__name__}")
    return content


def _unescape(tree: dict[str, Any]) -> dict[str, Any]:
    """A user's dict with its original keys; a tag among other keys is refused, because `Tagger` never writes one."""
    plain = {}
    for key, item in tree.items():
        if key[:1] == "$" and key[1:2] != "$":
            raise ValueError(f"the tag {key[:40]!r} stands among other keys")
        plain[key[1:] if key[:1] == "$" else key] = item
    return plain


def refuse_collisions(keys: list[Any]) -> list[Any]:
    """The keys of a dict or the elements of a set. Raises `ValueError` when many of them have the same hash.

    Each of n such keys is compared with all before it. Only the hashes of text and bytes differ from process to process: integers
    that differ by a multiple of 2**61 - 1 have the same, so anyone can make a short document that takes minutes to read.
    """
    if len(keys) > _MOST_COLLISIONS and len(keys) - len(set(map(hash, keys))) > _MOST_COLLISIONS:
        first: dict[int, Any] = {}
        # A key that stands there twice is found by one comparison.
        collisions = sum(1 for key in keys if first.setdefault(hash(key), key) != key)
        if collisions > _MOST_COLLISIONS:
            raise ValueError(f"{collisions:,} of its {len(keys):,} keys have the same hash as another; {_MOST_COLLISIONS:,} may")
    return keys


U = TypeVar("U", set[Any], frozenset[Any], dict[Any, Any])


def _check_unique(result: U, content: list[Any]) -> U:
    if len(result) != len(content):
        raise ValueError(f"a {type(result).__name__} holds something twice")
    return result


def _read_unset(content: Any) -> Any:
    if content is not None:
        raise ValueError("an unset value holds something")
    return msgspec.UNSET


def _read_lost(content: Any) -> None:
    read_reason(content)


def _scalar(read: Callable[[Any], Any]) -> Callable[[Untagger, Any, int], Any]:
    return lambda _untagger, content, _depth: read(content)


_BUILD: dict[str, Callable[[Untagger, Any, int], Any]] = {
    "$tuple": Untagger._tuple,
    "$set": Untagger._set,
    "$frozenset": Untagger._frozenset,
    "$dict": Untagger._dict,
    "$class": Untagger._class,
    "$enum": Untagger._enum,
    "$path": Untagger._path,
    "$int": _scalar(scalars.read_int),
    "$float": _scalar(scalars.read_float),
    "$str": _scalar(scalars.read_str),
    "$bytes": _scalar(scalars.read_bytes),
    "$bytearray": _scalar(lambda content: bytearray(scalars.read_bytes(content))),
    "$datetime": _scalar(lambda content: scalars.read_moment(content, datetime.fromisoformat)),
    "$time": _scalar(lambda content: scalars.read_moment(content, time.fromisoformat)),
    "$date": _scalar(scalars.read_date),
    "$timedelta": _scalar(scalars.read_timedelta),
    "$decimal": _scalar(scalars.read_decimal),
    "$uuid": _scalar(scalars.read_uuid),
    "$unset": _scalar(_read_unset),
    LOST: _scalar(_read_lost),
}
