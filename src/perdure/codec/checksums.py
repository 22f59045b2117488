"""Checksums of a step's arguments: whether a replay calls it with others.

    four bytes                  the sum of the arguments
    four bytes + four bytes     before it, where there are objects of the user's classes, the sum of those classes' fields

Code moves on while a run sleeps: a class gets a field with a default, and every object of it has another sum. So two sums are
compared only when the classes had the same fields. The classes are found where they are cheap to find: among the arguments, in
the first containers inside them, and in the annotations of the classes found.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import Struct
from typing import Any, Final
from zlib import crc32

from perdure.codec.hints import allowed_classes
from perdure.codec.shapes import shape_of

_SUM_BYTES: Final = 4
four_bytes = Struct(">I").pack
# How many containers are looked into.
_MAX_CONTAINERS: Final = 32
_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset})


def pack_checksum(total: int, types: Iterable[type]) -> bytes:
    """The checksum of arguments with this sum, in which these types were found."""
    classes = frozenset(cls for cls in types if cls.__module__ != "builtins")
    return (_sum_of_fields(classes) if classes else b"") + four_bytes(total)


def have_changed(recorded: bytes | None, current: bytes | None) -> bool:
    """Whether two checksums prove other arguments. Without both, or if the fields of a class changed, nothing is proved."""
    if recorded is None or current is None or recorded == current:
        return False
    return recorded[:-_SUM_BYTES] == current[:-_SUM_BYTES]


def find_types(args: tuple[Any, ...]) -> set[type]:
    """The types of the arguments, and of the parts of the first containers in them."""
    found: set[type] = set()
    waiting: list[Any] = [args]
    for container in waiting:
        parts = container.values() if type(container) is dict else container
        types = set(map(type, parts))
        found |= types
        if not types.isdisjoint(_CONTAINERS) and len(waiting) < _MAX_CONTAINERS:
            room = _MAX_CONTAINERS - len(waiting)
            waiting += [part for part in parts if type(part) in _CONTAINERS][:room]
    return found


@lru_cache(maxsize=1024)
def _sum_of_fields(classes: frozenset[type]) -> bytes:
    """The sum of the names of the classes, of those that their annotations reach, and of their fields; nothing for scalars."""
    reached = {name: known for cls in classes for name, known in allowed_classes(cls).classes.items()}
    fields = {name: shape.names for name, cls in reached.items() if (shape := shape_of(cls)) is not None}
    text = ";".join(f"{name}({','.join(names)})" for name, names in sorted(fields.items()))
    return four_bytes(crc32(text.encode("utf-8", "surrogatepass"))) if fields else b""
