"""A Python value to the JSON tree that is stored; `untagging` is the way back.

    plain JSON        itself; a dict key that begins with "$" gets one more
    everything else   an object with one key that begins with "$":  {"$datetime": "2024-01-31T12:00:00+00:00"}

    $tuple $set $frozenset   [item, …]               $dict        [[key, value], …] when a key is no text
    $class   [name, {field: value}, {more}?]         $enum        [name, member name, or the number of a Flag]
    $int     hexadecimal, past 640 digits            $float       nan, inf, -inf
    $str     base64, when it has lone surrogates     $bytes $bytearray   base64
    $datetime $time   ISO, or {iso, zone | offset + name, fold}          $date   ISO
    $timedelta [days, seconds, microseconds]   $decimal $uuid   text   $path [kind, text]   $unset   null

No key that a user stores can be taken for a tag, because theirs never begin with a single "$". Every type is matched
exactly: a subclass of a builtin is refused, since it would come back as the builtin. Depth counts the user's containers
and objects, not the JSON ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Literal, TypeAlias
from uuid import UUID

import msgspec

from perdure.codec import scalars
from perdure.codec.shapes import PATHS, Shape, name_of, shape_of
from perdure.errors import ValueNotStorable

Why: TypeAlias = Literal["non-json", "circular", "encode-failed"]
# A path is a linked list of (path before, kind of step, where), so that walking makes no strings; its root is a name.
Path: TypeAlias = Any
_sorted = msgspec.json.Encoder(order="deterministic").encode


class Loss(msgspec.Struct, frozen=True):
    """One part of a value that could not be stored and became null."""

    path: str
    reason: Why


class Tagger:
    """Turns one value into its tree. With `losses`, a part that cannot be stored becomes None and is noted there."""

    __slots__ = ("canonical", "losses", "max_depth", "name_for", "open", "room")

    def __init__(
        self,
        name_for: Callable[[type], str | None],
        max_depth: int,
        *,
        room: int = sys.maxsize,
        losses: list[Loss] | None = None,
        canonical: bool = False,
    ) -> None:
        self.name_for = name_for
        self.max_depth = max_depth
        self.losses = losses
        self.canonical = canonical
        # How many more parts fit: each takes a byte at least, so a value that refers to one list a billion times is stopped.
        self.room = room
        # The containers around the current part, by id: how deep it is, and what would be a cycle.
        self.open: set[int] = set()

    def tag(self, value: Any, path: Path) -> Any:
        """The tree of a value; the caller encodes it."""
        return _BY_TYPE.get(type(value), Tagger._other)(self, value, path)

    def refuse(self, path: Path, reason: str, why: Why = "non-json") -> None:
        """Raise, or note the loss so that the caller puts None in this place."""
        if self.losses is None:
            raise ValueNotStorable(_render(path), reason)
        self.losses.append(Loss(_render(path), why))

    def _enter(self, value: Any, size: int, path: Path) -> bool:
        if id(value) in self.open:
            self.refuse(path, "circular: it contains itself", "circular")
            return False
        if len(self.open) >= self.max_depth:
            raise ValueNotStorable(_render(path), f"it is nested more than {self.max_depth} deep (max_depth)")
        self.room -= size
        if self.room < 0:
            raise ValueNotStorable(_render(path), "with it the value has more parts than max_bytes has bytes")
        self.open.add(id(value))
        return True

    def _items(self, value: Any, path: Path) -> list[Any] | None:
        if not self._enter(value, len(value), path):
            return None
        get, other = _BY_TYPE.get, Tagger._other
        tree = []
        for index, item in enumerate(value):
            tree.append(get(type(item), other)(self, item, (path, "[", index)))
        self.open.discard(id(value))
        return tree

    def _tuple(self, value: tuple[Any, ...], path: Path) -> Any:
        items = self._items(value, path)
        return None if items is None else {"$tuple": items}

    def _set(self, value: Any, path: Path) -> Any:
        before = self._lost()
        items = self._items(value, path)
        # Elements that became None would be one; a set without some of its elements is another set.
        if items is None or self._lost() > before:
            return None
        return {f"${type(value).__name__}": sorted(items, key=_sorted) if self.canonical else items}

    def _lost(self) -> int:
        return 0 if self.losses is None else len(self.losses)

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        for key in value:
            if type(key) is not str or not scalars.is_text(key):
                return self._pairs(value, path)
        if not self._enter(value, len(value), path):
            return None
        get, other = _BY_TYPE.get, Tagger._other
        tree = {}
        for key, item in value.items():
            escaped = "$" + key if key[:1] == "$" else key
            tree[escaped] = get(type(item), other)(self, item, (path, "[", key))
        self.open.discard(id(value))
        return tree

    def _pairs(self, value: dict[Any, Any], path: Path) -> Any:
        if not self._enter(value, len(value), path):
            return None
        before = self._lost()
        keys = [self.tag(key, (path, "key", key)) for key in value]
        # As with a set: keys that became None would be one.
        lossless = self._lost() == before
        items = [self.tag(item, (path, "[", key)) for key, item in value.items()] if lossless else []
        self.open.discard(id(value))
        pairs = list(zip(keys, items, strict=lossless))
        if self.canonical:
            pairs.sort(key=lambda pair: _sorted(pair[0]))
        return {"$dict": pairs} if lossless else None

    def _int(self, value: int, _path: Path) -> Any:
        return value if scalars.is_plain_int(value) else {"$int": hex(value)}

    def _float(self, value: float, _path: Path) -> Any:
        return value if value - value == 0 else {"$float": repr(value)}

    def _str(self, value: str, _path: Path) -> Any:
        return value if scalars.is_text(value) else {"$str": scalars.write_str(value)}

    def _moment(self, value: datetime | time, path: Path) -> Any:
        content = scalars.write_moment(value)
        if content is None:
            zone = name_of(type(value.tzinfo))
            return self.refuse(path, f"its time zone is a {zone}; use datetime.timezone or zoneinfo.ZoneInfo")
        return {f"${type(value).__name__}": content}

    def _other(self, value: Any, path: Path) -> Any:
        cls: Any = type(value)
        kind = cls.__name__
        if kind in PATHS and cls is getattr(sys.modules.get("pathlib"), kind, None):
            return {"$path": [kind, self._str(str(value), path)]}
        shape = shape_of(cls)
        if shape is None and not isinstance(value, Enum):
            return self.refuse(path, _unsupported(cls))
        name = self.name_for(cls)
        if name is None:
            return self.refuse(path, _not_allowed(cls))
        return self._enum(value, name, path) if shape is None else self._object(value, shape, name, path)

    def _enum(self, value: Enum, name: str, path: Path) -> Any:
        cls = type(value)
        if value._name_ is not None and cls.__members__.get(value._name_) is value:
            return {"$enum": [name, value._name_]}
        if isinstance(value, Flag) and type(value._value_) is int and cls(value._value_) is value:
            return {"$enum": [name, value._value_]}
        return self.refuse(path, f"it is no member of the enum {name}", "encode-failed")

    def _object(self, value: Any, shape: Shape, name: str, path: Path) -> Any:
        try:
            fields, state = shape.read(value)
        except Exception as error:  # noqa: BLE001 - a descriptor or property of the user's class
            return self.refuse(path, f"reading it raised {type(error).__name__}", "encode-failed")
        if not self._enter(value, len(fields) + len(state), path):
            return None
        get, other = _BY_TYPE.get, Tagger._other
        tree: list[Any] = [name]
        for part in (fields, state) if state else (fields,):
            tree.append(tagged := {})
            for key, item in part.items():
                tagged[key] = get(type(item), other)(self, item, (path, ".", key))
        self.open.discard(id(value))
        return {"$class": tree}


def _unsupported(cls: type) -> str:
    base = next((base for base in cls.__mro__[1:-1] if base in _BY_TYPE), None)
    if base is not None:
        return f"{name_of(cls)} is a subclass of {base.__name__} and would come back as a plain {base.__name__}; convert it first"
    return f"values of type {name_of(cls)} have no stored form; return plain data, a dataclass, or another kind of record"


def _not_allowed(cls: type) -> str:
    return (
        f"class {name_of(cls)} is not in the annotation, so it could not be rebuilt; annotate the step's return type with it, "
        "pass returns=, or register the class (perdure.register)"
    )


def _render(path: Path) -> str:
    steps: list[str] = []
    while not isinstance(path, str):
        path, kind, where = path
        if kind == ".":
            steps.append(f".{where}")
        else:
            steps.append(f"[{_quoted(where)}]" if kind == "[" else f".key({_quoted(where)})")
    return path + "".join(reversed(steps))


def _quoted(key: Any) -> str:
    if type(key) is str and scalars.is_text(key):
        return msgspec.json.encode(key[:80]).decode()
    try:
        return ascii(key)[:80]
    except Exception:  # noqa: BLE001 - a key is a user's object, and so is its repr
        return f"a {type(key).__name__}"


def _unset(_tagger: Tagger, _value: Any, _path: Path) -> Any:
    return {"$unset": None}


def _itself(_tagger: Tagger, value: Any, _path: Path) -> Any:
    return value


def _as_text(tag: str, write: Callable[[Any], Any]) -> Callable[[Tagger, Any, Path], Any]:
    return lambda _tagger, value, _path: {tag: write(value)}


_BY_TYPE: dict[type, Callable[[Tagger, Any, Path], Any]] = {
    type(None): _itself,
    bool: _itself,
    int: Tagger._int,
    float: Tagger._float,
    str: Tagger._str,
    list: Tagger._items,
    dict: Tagger._dict,
    tuple: Tagger._tuple,
    set: Tagger._set,
    frozenset: Tagger._set,
    bytes: _as_text("$bytes", scalars.write_bytes),
    bytearray: _as_text("$bytearray", scalars.write_bytes),
    datetime: Tagger._moment,
    time: Tagger._moment,
    date: _as_text("$date", date.isoformat),
    timedelta: _as_text("$timedelta", scalars.write_timedelta),
    Decimal: _as_text("$decimal", str),
    UUID: _as_text("$uuid", str),
    msgspec.UnsetType: _unset,
}
