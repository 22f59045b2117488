"""Ways to break a document: as a tree, and as text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any, Final


def _nested(depth: int) -> Any:
    value: Any = []
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


WRONG: Final[tuple[Callable[[], Any], ...]] = (
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: 2, lambda: -1, lambda: 1.0, lambda: 1e308,
    lambda: float("nan"), lambda: float("inf"), lambda: 10**700, lambda: 10**5000, lambda: "", lambda: "x", lambda: "1",
    lambda: "\ud800", lambda: "a\0b", lambda: "x" * 100_000, lambda: "throw", lambda: "error", lambda: "undefined",
    lambda: "2026-01-01T00:00:00Z", list, dict, lambda: [[]], lambda: [["a", {"ok": True}]], lambda: {"": 1},
    lambda: {"type": "value"}, lambda: {"type": "error", "name": "x"}, lambda: {"$class": 1}, lambda: {"ok": True}, lambda: (1,),
    lambda: {1: 2}, lambda: b"x", object, lambda: _nested(150), lambda: _nested(199), lambda: _nested(300), lambda: _nested(5000),
)  # fmt: skip
NAMES: Final = (
    "formatVersion",
    "version",
    "kind",
    "steps",
    "entries",
    "result",
    "meta",
    "stepResult",
    "cause",
    "ok",
    "",
    "k" * 2000,
)


def mutated(document: Any, random: Random) -> Any:
    """The document with a few parts replaced, removed, added or renamed; now and then as text, which is broken further."""
    document = copy.deepcopy(document)
    for _ in range(random.randint(1, 3)):
        document = _break(document, random)
    if random.random() < 0.5:
        try:
            return _break_text(json.dumps(document), random)
        except (TypeError, ValueError, RecursionError):
            return document
    return document


def _break(document: Any, random: Random) -> Any:
    places = [(None, None), *_places(document)]
    container, key = random.choice(places if random.random() < 0.02 else places[1:] or places)
    if container is None:
        return random.choice(WRONG)()
    match random.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[random.choice(NAMES)] = container.pop(key)
        case 2 if isinstance(container, dict):
            container[random.choice(NAMES)] = random.choice(WRONG)()
        case _:
            container[key] = random.choice(WRONG)()
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys. Not recursive, since some are deep."""
    places: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        container = todo.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        places += [(container, key) for key in keys]
        todo += [container[key] for key in keys]
    return places


def _break_text(text: str, random: Random) -> str | bytes:
    at = random.randrange(len(text))
    match random.randrange(7):
        case 0:
            return text[:at]
        case 1:
            return text.replace("{", '{"ok":true,"ok":true,', 1) if random.random() < 0.5 else _repeated_key(text, random)
        case 2:
            data = bytearray(text.encode())
            data[at] ^= 1 << random.randrange(8)
            return bytes(data)
        case 3:
            return text[:at] + random.choice(["[" * 5000, "NaN", "\ud800", "9" * 700, '"', "{", "}", ","]) + text[at:]
        case 4:
            return text.encode("utf-16")
    return text


def _repeated_key(text: str, random: Random) -> str:
    """The text with one of its own members once more, at the end of the document."""
    members = [f'"{name}":{json.dumps(value)}' for name, value in json.loads(text).items()] if text[0] == "{" else []
    return text[:-1] + "," + random.choice(members) + "}" if members else text
