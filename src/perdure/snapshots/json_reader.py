"""Reads plain JSON from outside without trusting it, and reports every problem with its path.

A document is text, or a tree of dicts and lists that the caller may still change. Either way it is walked once, without
recursion: the walk makes a copy, notes each part that is no JSON, and stops at limits on size and depth. A tree may refer to one
part many times, and then a small one stands for a huge document: such repetitions have a limit of their own, which is checked
before a part is copied again.
What a parser would accept silently (a repeated key, NaN, a number with too many digits) stays in the tree as a marker object,
because the parser does not know the path and the walk does.

Depth counts as it does in the codec: a tag (`{"$class": [name, {…}]}`) is one level, however many JSON needs for it, so
everything that a run may record fits into a snapshot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

from perdure.codec.scalars import is_plain_int
from perdure.errors import FormatProblem

MAX_BYTES: Final = 64 * 2**20
# Of one value, as in the codec. The levels that a document puts around its values come on top.
MAX_DEPTH: Final = 200
# How many parts may be copies of parts that the tree contains elsewhere. Text has no such parts, and a program few or small ones.
MAX_REPEATED_PARTS: Final = 1_000_000
# Further problems than these are not listed.
MAX_PROBLEMS: Final = 1000

JsonPath: TypeAlias = tuple[str | int, ...]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MAX_DIGITS: Final = 640
# A container with fewer parts than this is copied again without counting: that costs less than to remember it.
_FEW_PARTS: Final = 16
# How many levels of JSON directly below a tag belong to the tag.
_BELOW_TAG: Final = {"$class": 2, "$dict": 2}
_SCALARS: Final = frozenset({type(None), bool, str})


class Problems:
    """What is wrong with one document, in the order found. Of two problems with one path only the first is kept.

    A document may have as many problems as it has parts, so only the first `MAX_PROBLEMS` are kept.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._has_more = False

    @property
    def is_full(self) -> bool:
        """Whether no further problem is kept."""
        return len(self._found) >= MAX_PROBLEMS

    def add(self, path: JsonPath, reason: str) -> None:
        if self.is_full:
            self._has_more = True
        else:
            self._found.setdefault(format_path(path), reason)

    def extend(self, problems: Iterable[FormatProblem]) -> None:
        for path, reason in problems:
            self._found.setdefault(path, reason)

    def __bool__(self) -> bool:
        return bool(self._found)

    def errors(self) -> tuple[FormatProblem, ...]:
        found = [FormatProblem(path, reason) for path, reason in self._found.items()]
        if self._has_more:
            found.append(FormatProblem("$", f"has more problems than the {len(found):,} that are listed"))
        return tuple(found)


class _NotJson:
    """Marks in the tree what Python's parser accepts but JSON does not allow."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _RepeatedKeys(dict[str, Any]):
    """An object in which a key occurs more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.repeated = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def format_path(path: JsonPath) -> str:
    """The path as text: `$.steps["user:1"].cause`."""
    return "$" + "".join(map(_format_part, path))


def _format_part(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if len(part) <= 80 and _NAME.fullmatch(part) else f"[{_quote(part)}]"


def _quote(text: str) -> str:
    return json.dumps(text if len(text) <= 80 else text[:77] + "...")


def describe(value: Any) -> str:
    """A part of a tree in a few words, for an error message."""
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
            return f"the text {_quote(value)}"
        case int() | float() if isinstance(value, float) or is_plain_int(value):
            return f"the number {str(value)[:40]}"
    return f"a {type(value).__name__}"


def read_text(text: str | bytes, problems: Problems) -> Any:
    """The tree of a JSON text, for `copy_json` to walk; None, and a problem, when it is no JSON."""
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
    return tree if len(tree) == len(pairs) else _RepeatedKeys(pairs)


def _constant(name: str) -> _NotJson:
    return _NotJson(f"is {name}, which is no JSON")


def _integer(digits: str) -> Any:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return _NotJson(f"is a number of {len(digits)} digits; at most {_MAX_DIGITS} are read")


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
    """A tree that `copy_json` made, as ASCII text, which every medium can hold, lone surrogates included."""
    return json.dumps(tree, separators=(",", ":"))


def copy_json(tree: Any, problems: Problems, *, around: int) -> Any:
    """A copy that shares nothing with `tree`, with None for each part that is no plain JSON.

    `around` is how many levels the document puts around its values.
    """
    return _Copier(problems, MAX_DEPTH + around).copy(tree)


class _OpenContainer:
    """A container whose parts are being copied. `begins_at` is how many parts the walk had copied before it."""

    __slots__ = ("begins_at", "copy", "depth", "key", "of_tag", "parts", "source")

    def __init__(self, source: Any, depth: int, of_tag: int, begins_at: int) -> None:
        self.begins_at = begins_at
        self.source = source
        self.copy: Any = [] if type(source) is list else {}
        self.parts: Iterator[tuple[Any, Any]] = enumerate(source) if type(source) is list else iter(source.items())
        self.depth = depth
        # How many levels directly below this one belong to a tag and do not count.
        self.of_tag = of_tag
        self.key: Any = None

    def add(self, part: Any) -> None:
        if type(self.copy) is list:
            self.copy.append(part)
        else:
            self.copy[self.key] = part


class _Copier:
    def __init__(self, problems: Problems, max_depth: int) -> None:
        self.problems = problems
        self.max_depth = max_depth
        # The containers around the current part, outermost first.
        self.open: list[_OpenContainer] = []
        self.ids: set[int] = set()
        # Each part takes at least one byte of text.
        self.room = MAX_BYTES
        # How many parts were copied, and, of the larger containers that are complete, how many each has: by id, as the tree is
        # there until the walk has ended.
        self.copied = 0
        self.sizes: dict[int, int] = {}
        self.repeats_left = MAX_REPEATED_PARTS
        self.is_over = False

    def copy(self, tree: Any) -> Any:
        result = self._part(tree)
        while self.open and not self.is_over:
            inner = self.open[-1]
            if not self._next_part(inner):
                self._close(self.open.pop())
        return result

    def _close(self, inner: _OpenContainer) -> None:
        self.ids.discard(id(inner.source))
        size = self.copied - inner.begins_at
        if size >= _FEW_PARTS:
            self.sizes[id(inner.source)] = size

    def _next_part(self, inner: _OpenContainer) -> bool:
        for key, part in inner.parts:
            inner.key = key
            if type(inner.copy) is dict and type(key) is not str:
                inner.key = f"<{type(key).__name__}>"
                self._problem("is a key that is no text")
                continue
            inner.add(self._part(part))
            if self.open[-1] is not inner or self.is_over:
                return True
        return False

    def _part(self, part: Any) -> Any:
        """The copy of a part; the copy of a container is still empty, and open."""
        kind = type(part)
        self.copied += 1
        self.room -= len(part) if kind is str else 1
        if self.room < 0:
            return self._end(f"is where the document has grown larger than {MAX_BYTES // 2**20} MiB")
        if kind in _SCALARS or (kind is int and is_plain_int(part)):
            return part
        if kind is float:
            return part if part - part == 0 else self._problem("is no finite number")
        return self._container(part) if kind in {dict, list, _RepeatedKeys} else self._problem(_refusal(part))

    def _container(self, part: Any) -> Any:
        outer = self.open[-1] if self.open else None
        tag = _tag_of(part)
        in_tag = outer is not None and outer.of_tag > 0 and tag is None
        depth = (outer.depth if outer else 0) + (not in_tag)
        if id(part) in self.ids:
            return self._problem("contains itself")
        if depth > self.max_depth:
            return self._problem(f"is nested more than {MAX_DEPTH} deep")
        self.repeats_left -= self.sizes.get(id(part), 0)
        if self.repeats_left < 0:
            return self._end(f"is where parts that stand in several places make the document {MAX_REPEATED_PARTS:,} parts larger")
        of_tag = _BELOW_TAG.get(tag, 1) if tag else outer.of_tag - 1 if outer and in_tag else 0
        self.ids.add(id(part))
        self.open.append(inner := _OpenContainer(part, depth, of_tag, self.copied))
        for key in part.repeated if type(part) is _RepeatedKeys else ():
            inner.key = key
            self._problem("stands twice in its object")
        return inner.copy

    def _end(self, reason: str) -> None:
        """Note the problem, and walk no further."""
        self._problem(reason)
        self.is_over = True

    def _problem(self, reason: str) -> None:
        if self.problems.is_full:  # a path is not made for nothing
            self.is_over = True
        self.problems.add(tuple(inner.key for inner in self.open), reason)


def _tag_of(part: Any) -> str | None:
    if type(part) is list or len(part) != 1:
        return None
    (key,) = part
    return key if type(key) is str and key[:1] == "$" and key[1:2] != "$" else None


def _refusal(part: Any) -> str:
    if type(part) is _NotJson:
        return part.reason
    if type(part) is int:
        return f"is a number of more than {_MAX_DIGITS} digits"
    return f"is a {type(part).__name__}, which plain JSON has no form for"
