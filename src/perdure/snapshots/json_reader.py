"""Plain JSON from outside: read without trust, and every fault told with its place.

A document is text, or a tree of dicts and lists that somebody else still holds. Either way it is walked once, without
recursion: the walk makes a copy of its own, notes each part that is no JSON, and ends where a hostile document would go on.
What a parser would pass over (a repeated key, NaN, a number with too many digits) is left in the tree as a mark, because the
parser does not know the path and the walk does.

Depth counts as it does in the codec: a tag (`{"$class": [name, {…}]}`) is one level, however many JSON needs for it, so
whatever a run may record can also stand in a snapshot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

from perdure.codec.scalars import is_plain_int
from perdure.errors import FormatProblem

MAX_BYTES: Final = 64 * 2**20
# Of one value, as in the codec. What a document puts around its values comes on top.
MAX_DEPTH: Final = 200

Path: TypeAlias = tuple[str | int, ...]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MAX_DIGITS: Final = 640
# How many levels of JSON directly below a tag belong to the tag.
_BELOW_TAG: Final = {"$class": 2, "$dict": 2}
_SCALARS: Final = frozenset({type(None), bool, str})


class Problems:
    """What is wrong with one document, in the order found; of two things about one place, the first."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def add(self, path: Path, reason: str) -> None:
        self._found.setdefault(shown_path(path), reason)

    def extend(self, problems: Iterable[FormatProblem]) -> None:
        for path, reason in problems:
            self._found.setdefault(path, reason)

    def __bool__(self) -> bool:
        return bool(self._found)

    def listed(self) -> tuple[FormatProblem, ...]:
        return tuple(FormatProblem(path, reason) for path, reason in self._found.items())


class _Odd:
    """Stands in the tree where the text had something that Python reads, but that is no JSON value."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Repeating(dict[str, Any]):
    """An object in which keys stood more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.repeated = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def shown_path(path: Path) -> str:
    """The path as people write it: `$.steps["user:1"].cause`."""
    return "$" + "".join(map(_shown_part, path))


def _shown_part(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if len(part) <= 80 and _NAME.fullmatch(part) else f"[{_quoted(part)}]"


def _quoted(text: str) -> str:
    return json.dumps(text if len(text) <= 80 else text[:77] + "...")


def described(value: Any) -> str:
    """A part of a tree, in a few words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f"the text {_quoted(value)}"
        case int() | float() if isinstance(value, float) or is_plain_int(value):
            return f"the number {str(value)[:40]}"
    return f"a {type(value).__name__}"


def read_text(text: str | bytes, problems: Problems) -> Any:
    """The tree of a JSON text, to be walked by `own_copy`; None and a problem when it is no JSON."""
    if len(text) > MAX_BYTES:
        return problems.add((), f"is larger than {MAX_BYTES // 2**20} MiB")
    try:
        return _load(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        problems.add((), f"is no UTF-8 at offset {error.start}")
    except json.JSONDecodeError as error:
        problems.add((), f"is no JSON at offset {error.pos}: {error.msg}")
    except RecursionError:
        problems.add((), _where_too_deep(text if isinstance(text, str) else text.decode()))
    return None


def _load(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    return tree if len(tree) == len(pairs) else _Repeating(pairs)


def _constant(name: str) -> _Odd:
    return _Odd(f"is {name}, which is no JSON")


def _integer(digits: str) -> Any:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return _Odd(f"is a number of {len(digits)} digits; at most {_MAX_DIGITS} are read")


def _where_too_deep(text: str) -> str:
    depth = 0
    for found in _NESTING.finditer(text):
        bracket = found[0]
        if bracket in "[{":
            depth += 1
        elif bracket in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} deep at offset {found.start()}"
    return "is nested too deeply for the stack that is left"


def write_text(tree: Any) -> str:
    """A tree that `own_copy` made, as ASCII text: it arrives wherever text can be kept, lone surrogates and all."""
    return json.dumps(tree, separators=(",", ":"))


def own_copy(tree: Any, problems: Problems, *, around: int) -> Any:
    """A copy that shares nothing with `tree`, with None for each part that is no plain JSON.

    `around` is how many levels the document puts around its values.
    """
    return _Walk(problems, MAX_DEPTH + around).copy(tree)


class _Open:
    """A container whose parts are being copied."""

    __slots__ = ("copy", "depth", "key", "of_tag", "parts", "source")

    def __init__(self, source: Any, depth: int, of_tag: int) -> None:
        self.source = source
        self.copy: Any = [] if type(source) is list else {}
        self.parts: Iterator[tuple[Any, Any]] = enumerate(source) if type(source) is list else iter(source.items())
        self.depth = depth
        # How many levels directly below belong to a tag and do not count.
        self.of_tag = of_tag
        self.key: Any = None

    def take(self, part: Any) -> None:
        if type(self.copy) is list:
            self.copy.append(part)
        else:
            self.copy[self.key] = part


class _Walk:
    def __init__(self, problems: Problems, max_depth: int) -> None:
        self.problems = problems
        self.max_depth = max_depth
        # The containers around the current part, outermost first.
        self.open: list[_Open] = []
        self.ids: set[int] = set()
        # As text each part takes a byte at least, so a tree that refers to one list a billion times is stopped.
        self.room = MAX_BYTES

    def copy(self, tree: Any) -> Any:
        result = self._part(tree)
        while self.open:
            inner = self.open[-1]
            if not self._next_part(inner):
                self.open.pop()
                self.ids.discard(id(inner.source))
        return result

    def _next_part(self, inner: _Open) -> bool:
        for key, part in inner.parts:
            inner.key = key
            if type(inner.copy) is dict and type(key) is not str:
                inner.key = f"<{type(key).__name__}>"
                self._problem("is a key that is no text")
                continue
            inner.take(self._part(part))
            if self.open[-1] is not inner:
                return True
        return False

    def _part(self, part: Any) -> Any:
        """The copy of a part; that of a container is empty yet, and open."""
        kind = type(part)
        self.room -= len(part) if kind is str else 1
        if self.room < 0:
            return self._problem(f"is where the document has grown larger than {MAX_BYTES // 2**20} MiB")
        if kind in _SCALARS or (kind is int and is_plain_int(part)):
            return part
        if kind is float:
            return part if part - part == 0 else self._problem("is no finite number")
        return self._container(part) if kind in {dict, list, _Repeating} else self._problem(_why_not(part))

    def _container(self, part: Any) -> Any:
        outer = self.open[-1] if self.open else None
        tag = _tag_of(part)
        in_tag = outer is not None and outer.of_tag > 0 and tag is None
        depth = (outer.depth if outer else 0) + (not in_tag)
        if id(part) in self.ids:
            return self._problem("contains itself")
        if depth > self.max_depth:
            return self._problem(f"is nested more than {MAX_DEPTH} deep")
        of_tag = _BELOW_TAG.get(tag, 1) if tag else outer.of_tag - 1 if outer and in_tag else 0
        self.ids.add(id(part))
        self.open.append(inner := _Open(part, depth, of_tag))
        for key in part.repeated if type(part) is _Repeating else ():
            inner.key = key
            self._problem("stands twice in its object")
        return inner.copy

    def _problem(self, reason: str) -> None:
        self.problems.add(tuple(inner.key for inner in self.open), reason)


def _tag_of(part: Any) -> str | None:
    if type(part) is list or len(part) != 1:
        return None
    (key,) = part
    return key if type(key) is str and key[:1] == "$" and key[1:2] != "$" else None


def _why_not(part: Any) -> str:
    if type(part) is _Odd:
        return part.reason
    if type(part) is int:
        return f"is a number of more than {_MAX_DIGITS} digits"
    return f"is a {type(part).__name__}, which plain JSON has no form for"
