"""A Python value to the JSON tree that is stored; `untagging` is the way back.

    plain JSON        itself; a dict key that begins with "$" gets one more
    everything else   an object with one key that begins with "$":  {"$datetime": "2024-01-31T12:00:00+00:00"}

    $tuple $set $frozenset   [item, …]               $dict        [[key, value], …] when a key is no text
    $class   [name, {field: value}, {more}?]         $enum        [name, member name, or the number of a Flag]
    $int     hexadecimal, past 640 digits            $float       nan, inf, -inf
    $str     base64, when it has lone surrogates     $bytes $bytearray   base64
    $datetime $time   ISO, or {iso, zone | offset + name | pydantic, fold}     $date   ISO
    $timedelta [days, seconds, microseconds]   $decimal $uuid   text   $path [kind, text]   $unset   null
    $lost    non-json, circular or encode-failed: a part that could not be stored, which reads as None (`losses`)

No key that a user stores can be taken for a tag, because theirs never begin with a single "$". Every type is matched
exactly: a subclass of a builtin is refused, since it would come back as the builtin. Depth counts the user's containers
and objects, not the JSON ones.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Final, NamedTuple, NoReturn
from uuid import UUID

import msgspec

from perdure.codec import scalars
from perdure.codec.losses import LOST, Loss, LossReason, ValuePath, render
from perdure.codec.shapes import PATHS, Shape, name_of, shape_of
from perdure.errors import ValueNotStorable
from perdure.model.logs import is_of_caller

# From this many bytes on, walked containers are remembered.
_MANY = 16 * 1024
# A value can refer to one part that is lost a million times, and each occurrence is a loss with a path of its own.
_MOST_LOSSES = 10_000
# What to annotate, by the root of a value's path.
_ANNOTATED: Final = {
    "input": "annotate the workflow's parameter with it, or ",
    "value": "annotate the return type of the step or workflow with it, pass returns=, or ",
}
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class NotAwaited(ValueNotStorable):
    """A part of a value has to be awaited first."""


class _WalkedContainer(NamedTuple):
    """A container that was walked. It is kept alive so that its id stays its own."""

    value: Any
    tree: Any
    depth: int
    size: int


class Tagger:
    """Turns one value into its tree. With `losses`, a part that cannot be stored becomes `$lost` and is noted there."""

    __slots__ = ("canonical", "done", "limit", "losses", "max_depth", "name_for", "open", "room", "unawaited")

    def __init__(
        self,
        name_for: Callable[[type], str | None],
        max_depth: int,
        *,
        room: int = sys.maxsize,
        losses: list[Loss] | None = None,
        canonical: bool = False,
        unawaited: list[Any] | None = None,
    ) -> None:
        self.name_for = name_for
        self.max_depth = max_depth
        self.losses = losses
        self.canonical = canonical
        # Where awaitables are put, if it is to find them and not to raise.
        self.unawaited = unawaited
        self.limit = room
        # How many more bytes fit if the rest takes as few as possible. It stops a value that refers to one list a billion times,
        # or is huge, before its tree fills the memory.
        self.room = room
        # The containers around the current part by id, with the room there was before each: their number is the depth, and
        # meeting one of them again is a cycle.
        self.open: dict[int, int] = {}
        # In large values, the containers that were walked already: each is walked once, however often it occurs.
        self.done: dict[int, _WalkedContainer] = {}

    def tag(self, value: Any, path: ValuePath) -> Any:
        """The tree of a value; the caller encodes it."""
        return _BY_TYPE.get(type(value), Tagger._other)(self, value, path)

    def refuse(self, path: ValuePath, reason: str, loss: LossReason = "non-json") -> Any:
        """Raise, or note the loss and return what takes the place of the part."""
        if self.losses is None:
            raise ValueNotStorable(render(path), reason)
        if len(self.losses) >= _MOST_LOSSES:
            raise ValueNotStorable(render(path), f"{reason}, and so it is with {_MOST_LOSSES:,} other parts of the value")
        self.losses.append(Loss(render(path), loss))
        return {LOST: loss}

    def _enter(self, value: Any, size: int, path: ValuePath) -> Any:
        """None when the parts of a container are to be walked, otherwise the tree that takes its place."""
        if id(value) in self.open:
            return self.refuse(path, "circular: it contains itself", "circular")
        if len(self.open) >= self.max_depth:
            raise ValueNotStorable(render(path), f"it is nested more than {self.max_depth} deep (max_depth)")
        # Reused only at the same depth or above: deeper, something in it might exceed the limit.
        if self.done and (done := self.done.get(id(value))) is not None and len(self.open) <= done.depth:
            self._spend(done.size, path)
            return done.tree
        self.open[id(value)] = self.room
        self.room -= size
        if self.room < 0:
            self._too_large(path)
        return None

    def _leave(self, value: Any, tree: Any) -> Any:
        before = self.open.pop(id(value))
        # A loss must be noted for each occurrence, so with losses every occurrence is walked.
        if self.limit - self.room > _MANY and not self.losses:
            self.done[id(value)] = _WalkedContainer(value, tree, len(self.open), before - self.room)
        return tree

    def _spend(self, size: int, path: ValuePath) -> None:
        """Count bytes that will be written at least, on top of the one that the container has counted for each of its parts."""
        self.room -= size
        if self.room < 0:
            self._too_large(path)

    def _too_large(self, path: ValuePath) -> NoReturn:
        raise ValueNotStorable(render(path), f"with it the value takes {limit_text(self.limit)}")

    def _items(self, value: Any, path: ValuePath) -> Any:
        if (instead := self._enter(value, 2 * len(value), path)) is not None:
            return instead
        get, other = _BY_TYPE.get, Tagger._other
        tree = []
        for index, item in enumerate(value):
            tree.append(get(type(item), other)(self, item, (path, "[", index)))
        return self._leave(value, tree)

    def _tuple(self, value: tuple[Any, ...], path: ValuePath) -> Any:
        items = self._items(value, path)
        return {"$tuple": items} if type(items) is list else items

    def _set(self, value: Any, path: ValuePath) -> Any:
        before = self._count()
        items = self._items(value, path)
        # Elements that became None would be one; a set without some of its elements is another set.
        if lost := self._lost_since(before):
            return lost
        return {f"${type(value).__name__}": sorted(items, key=_encode_sorted) if self.canonical else items}

    def _count(self) -> int:
        return 0 if self.losses is None else len(self.losses)

    def _lost_since(self, before: int) -> Any:
        """The tree that replaces a container in which something was lost, with the first reason; None when nothing was lost."""
        return {LOST: self.losses[before].reason} if self.losses is not None and len(self.losses) > before else None

    def _dict(self, value: dict[Any, Any], path: ValuePath) -> Any:
        for key in value:
            if type(key) is not str or not scalars.is_text(key):
                return self._pairs(value, path)
        if (instead := self._enter(value, 5 * len(value) + sum(map(len, value)), path)) is not None:
            return instead
        get, other = _BY_TYPE.get, Tagger._other
        tree = {}
        for key, item in value.items():
            escaped = "$" + key if key[:1] == "$" else key
            tree[escaped] = get(type(item), other)(self, item, (path, "[", key))
        return self._leave(value, tree)

    def _pairs(self, value: dict[Any, Any], path: ValuePath) -> Any:
        if (instead := self._enter(value, 6 * len(value), path)) is not None:
            return instead
        before = self._count()
        keys = [self.tag(key, (path, "key", key)) for key in value]
        # As with a set: keys that became None would be one.
        lost = self._lost_since(before)
        pairs = [] if lost else [(key, self.tag(item, (path, "[", key))) for key, item in zip(keys, value.values(), strict=True)]
        if self.canonical:
            pairs.sort(key=lambda pair: _encode_sorted(pair[0]))
        return self._leave(value, lost or {"$dict": pairs})

    def _int(self, value: int, path: ValuePath) -> Any:
        if scalars.is_plain_int(value):
            return value
        self._spend(value.bit_length() // 4, path)
        return {"$int": hex(value)}

    def _float(self, value: float, _path: ValuePath) -> Any:
        return value if value - value == 0 else {"$float": repr(value)}

    def _str(self, value: str, path: ValuePath) -> Any:
        self.room -= len(value)
        if self.room < 0:
            self._too_large(path)
        return value if scalars.is_text(value) else {"$str": scalars.write_str(value)}

    def _bytes(self, value: bytes | bytearray, path: ValuePath) -> Any:
        self._spend(len(value), path)
        return {f"${type(value).__name__}": scalars.write_bytes(value)}

    def _decimal(self, value: Decimal, path: ValuePath) -> Any:
        text = scalars.write_decimal(value)
        self._spend(len(text), path)
        return {"$decimal": text}

    def _moment(self, value: datetime | time, path: ValuePath) -> Any:
        content = scalars.write_moment(value)
        if content is None:
            zone = name_of(type(value.tzinfo))
            return self.refuse(path, f"its time zone, a {zone}, could not be rebuilt; use datetime.UTC or a zoneinfo.ZoneInfo")
        return {f"${type(value).__name__}": content}

    def _other(self, value: Any, path: ValuePath) -> Any:
        cls: Any = type(value)
        kind = cls.__name__
        if kind in PATHS and cls is getattr(sys.modules.get("pathlib"), kind, None):
            return self._path(value, path)
        shape = shape_of(cls)
        if shape is None and not issubclass(cls, Enum):
            if inspect.isawaitable(value):
                return self._unawaited(value, path)
            return self.refuse(path, _unsupported_reason(cls))
        name = self.name_for(cls)
        if name is None:
            return self.refuse(path, _not_allowed_reason(cls, path))
        return self._enum(value, name, path) if shape is None else self._object(value, shape, name, path)

    def _unawaited(self, value: Any, path: ValuePath) -> Any:
        """Refuse it, also where losses are allowed: the code is wrong, and None would hide it."""
        if self.unawaited is None:
            raise NotAwaited(render(path), _unawaited_reason(value))
        self.unawaited.append(value)
        return None

    def _path(self, value: Any, path: ValuePath) -> Any:
        text = str(value)
        if type(value)(text) != value:
            return self.refuse(path, f"its text, {text[:80]!r}, names another path")
        return {"$path": [type(value).__name__, self._str(text, path)]}

    def _enum(self, value: Enum, name: str, path: ValuePath) -> Any:
        cls = type(value)
        if value._name_ is not None and cls.__members__.get(value._name_) is value:
            return {"$enum": [name, value._name_]}
        if issubclass(cls, Flag) and type(value._value_) is int and cls(value._value_) is value:
            return {"$enum": [name, value._value_]}
        return self.refuse(path, f"it is no member of the enum {name}", "encode-failed")

    def _object(self, value: Any, shape: Shape, name: str, path: ValuePath) -> Any:
        try:
            fields, state = shape.read(value)
        except Exception as error:  # noqa: BLE001 - a descriptor or property of the user's class
            return self.refuse(path, f"reading it raised {type(error).__name__}", "encode-failed")
        if not all(type(key) is str and scalars.is_text(key) for key in state):
            return self.refuse(path, "the name of one of its attributes is no text")
        if (instead := self._enter(value, 5 * (len(fields) + len(state)), path)) is not None:
            return instead
        get, other = _BY_TYPE.get, Tagger._other
        tree: list[Any] = [name]
        for part in (fields, state) if state else (fields,):
            tree.append(tagged := {})
            for key, item in part.items():
                tagged[key] = get(type(item), other)(self, item, (path, ".", key))
        return self._leave(value, {"$class": tree})


def limit_text(limit: int) -> str:
    return f"more than the limit of {limit:,} bytes (max_bytes); store a reference to it"


def _unsupported_reason(cls: type) -> str:
    base = next((base for base in cls.__mro__[1:-1] if base in _BY_TYPE), None)
    if base is not None:
        return f"{name_of(cls)} is a subclass of {base.__name__} and would come back as a plain {base.__name__}; convert it first"
    return f"values of type {name_of(cls)} have no stored form; return plain data, a dataclass, or another kind of record"


def _not_allowed_reason(cls: type, path: ValuePath) -> str:
    while not isinstance(path, str):
        path = path[0]
    advice = _ANNOTATED.get(path, "")
    what = f"class {name_of(cls)} is not in the annotation, so it could not be rebuilt"
    return f"{what}; {advice}register the class (perdure.register)"


def _unawaited_reason(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    what = f"a {type(value).__name__}" if name is None else f"the coroutine of {name}()"
    if inspect.iscoroutine(value) and is_of_caller(value.cr_code.co_filename):
        what = "what a call such as ctx.step(...) gives before it is awaited"
    return f"it is {what}: an `await` is missing before it"


def _unset(_tagger: Tagger, _value: Any, _path: ValuePath) -> Any:
    return {"$unset": None}


def _itself(_tagger: Tagger, value: Any, _path: ValuePath) -> Any:
    return value


def _as_text(tag: str, write: Callable[[Any], Any]) -> Callable[[Tagger, Any, ValuePath], Any]:
    return lambda _tagger, value, _path: {tag: write(value)}


_BY_TYPE: dict[type, Callable[[Tagger, Any, ValuePath], Any]] = {
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
    bytes: Tagger._bytes,
    bytearray: Tagger._bytes,
    datetime: Tagger._moment,
    time: Tagger._moment,
    date: _as_text("$date", date.isoformat),
    timedelta: _as_text("$timedelta", scalars.write_timedelta),
    Decimal: Tagger._decimal,
    UUID: _as_text("$uuid", str),
    msgspec.UnsetType: _unset,
}
