"""What a lossy dump could not store: the reason, the path, and how to find both in stored bytes.

In the tree a lost part is `{"$lost": reason}`, so the bytes alone show what is missing; in a value it is None. A set or dict that
would lose an element or a key is lost as a whole.

A path reads like Python: `value["a"][0].field`. Keys stand in it as their JSON, so `value[7]`, `value[null]` and
`value[{"$tuple":[1,2]}]`: the value and its bytes give the same path, and no user's `__repr__` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

LossReason: TypeAlias = Literal["non-json", "circular", "encode-failed"]
# A path is a linked list of (path before, kind of step, where), so that walking makes no strings; its root is a name.
ValuePath: TypeAlias = Any
LOST: Final = "$lost"
_REASONS = frozenset(get_args(LossReason))
_SEQUENCES = frozenset({None, "$tuple", "$set", "$frozenset"})


class Loss(msgspec.Struct, frozen=True):
    """One part of a value that could not be stored and became null."""

    path: str
    reason: LossReason


def tree_of(data: bytes) -> tuple[Any, list[Loss]]:
    """The JSON of stored bytes, with null for each part that was lost, and those losses; other tags stay as they are.

    `ValueError` when the bytes are no JSON, or a loss is malformed. The content of other tags is not checked.
    """
    try:
        whole = [msgspec.json.decode(data)]
    except Exception as error:
        raise ValueError(f"the data is no JSON: {error}") from error
    losses: list[Loss] = []
    # A writer other than ours may have escaped any character of the tag.
    places: list[Any] = [(whole, 0, "value")] if b'"$lost"' in data or b"\\u" in data else []
    while places:
        holder, at, path = places.pop()
        if (tag := tag_of(part := holder[at])) == LOST:
            losses.append(Loss(render(path), read_reason(part[LOST])))
            holder[at] = None
        else:
            places.extend(reversed([*_inside(part, tag, path)]))
    return whole[0], losses


def tag_of(tree: Any) -> str | None:
    """The tag of a tree that is a tag's object; a user's key that begins with "$" has two of them."""
    if type(tree) is not dict or len(tree) != 1:
        return None
    (key,) = tree
    return key if key[:1] == "$" and key[1:2] != "$" else None


def read_reason(content: Any) -> LossReason:
    if type(content) is not str or content not in _REASONS:
        raise ValueError("the reason of a loss is malformed")
    return content  # type: ignore[return-value]


def _inside(tree: Any, tag: str | None, path: ValuePath) -> Iterator[tuple[Any, Any, ValuePath]]:
    """The values directly inside a tree: the container, the index or key in it, and the path."""
    content = tree if tag is None else tree[tag]
    if type(content) is list:
        if tag == "$dict":
            yield from ((pair, 1, (path, "[", pair[0])) for pair in content if type(pair) is list and len(pair) == 2)
        elif tag == "$class":
            parts = (part for part in content[1:] if type(part) is dict)
            yield from ((part, name, (path, ".", name)) for part in parts for name in part)
        elif tag in _SEQUENCES:
            yield from ((content, index, (path, "[", index)) for index in range(len(content)))
    elif tag is None and type(content) is dict:
        yield from ((content, key, (path, "[", key[1:] if key[:1] == "$" else key)) for key in content)


def render(path: ValuePath) -> str:
    """The text of a path."""
    steps: list[str] = []
    while not isinstance(path, str):
        path, kind, where = path
        if kind == ".":
            steps.append(f".{where}")
        else:
            steps.append(f"[{_key_text(where)}]" if kind == "[" else f".key({_unstorable_key_text(where)})")
    return path + "".join(reversed(steps))


def _key_text(key: Any) -> str:
    """A key's tree, or an index, as JSON; cut where it is long."""
    return msgspec.json.encode(key[:80]).decode() if type(key) is str else msgspec.json.encode(key).decode()[:80]


def _unstorable_key_text(key: Any) -> str:
    """A key that has no JSON, because a part of it cannot be stored."""
    try:
        return ascii(key)[:80]
    except Exception:  # noqa: BLE001 - a key is a user's object, and so is its repr
        return f"a {type(key).__name__}"
