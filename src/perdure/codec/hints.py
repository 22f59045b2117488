"""Which classes a value may contain: those its annotation reaches, and those the program registered.

Stored data names classes, but a name is only ever looked up here. Nothing is imported and nothing is found by name in a
module, so stored data cannot select code that the program did not select with its annotations.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

from perdure.codec.shapes import can_rebuild, name_of

C = TypeVar("C", bound=type)


class Allowed(NamedTuple):
    """The classes that may be rebuilt, by name and by class."""

    classes: Mapping[str, type]
    names: Mapping[type, str]


def allowed_classes(hint: Any) -> Allowed:
    """The classes that an annotation reaches, through unions, containers, type arguments and fields."""
    try:
        return _by_hint(hint)
    except TypeError:
        return _by_identity(hint)


def register(cls: C) -> C:
    """The class itself, which from now on is rebuilt whatever an annotation says; usable as a decorator."""
    if not isinstance(cls, type) or not can_rebuild(cls):
        raise TypeError(
            f"{cls!r} cannot be registered: perdure rebuilds dataclasses, msgspec Structs, attrs classes, pydantic models, "
            "NamedTuples and Enums"
        )
    known = _registry.setdefault(name_of(cls), cls)
    if known is not cls:
        raise ValueError(f"another class is registered as {name_of(cls)!r} already; give one of them another name")
    return cls


def name_for(hint: Any) -> Callable[[type], str | None]:
    """A function that names a class for storage, or gives None when the class is not allowed."""
    names = allowed_classes(hint).names

    def name(cls: type) -> str | None:
        if (found := names.get(cls)) is not None:
            return found
        # The annotation may contain another class of the name under which this one was registered.
        known = _registered_classes().names.get(cls)
        return known if known is not None and class_for(hint)(known) is cls else None

    return name


def class_for(hint: Any) -> Callable[[str], type | None]:
    """A function that finds an allowed class by its stored name, or gives None."""
    classes = allowed_classes(hint).classes

    def find(name: str) -> type | None:
        if (cls := classes.get(name, _registered_classes().classes.get(name))) is not None:
            return cls
        return _find_moved(classes, name) or _find_moved(_registered_classes().classes, name)

    return find


def _find_moved(classes: Mapping[str, type], name: str) -> type | None:
    """The only one of these classes with this name in another module: `__main__` was imported since, or the class was moved."""
    same = [cls for cls in classes.values() if cls.__qualname__ == name.rpartition(":")[2]]
    return same[0] if len(same) == 1 else None


# Types that conform to themselves, whatever is in them.
BUILTINS: Final[Mapping[str, type]] = MappingProxyType(
    {each.__name__: each for each in (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)}
)


def type_name(hint: Any) -> str | None:
    """What a reader without the annotation can know of it: the name of a builtin type, or of a class whose objects are stored."""
    if not isinstance(hint, type):
        return None
    if BUILTINS.get(hint.__name__) is hint:
        return hint.__name__
    return name_of(hint) if can_rebuild(hint) else None


def fields_of(cls: type) -> dict[str, Any]:
    """The annotations of a class and its bases, resolved; those that cannot be resolved are left out."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation is arbitrary code: a name that exists only for the type checker, or worse
        return dict(_resolvable(cls))


_registry: dict[str, type] = {}


def _registered_classes() -> Allowed:
    # Classes are only ever added, so their number is a valid cache key, even if one is registered while another thread collects.
    return _collect_registered(len(_registry))


@lru_cache(maxsize=2)
def _collect_registered(_count: int) -> Allowed:
    return _collect(list(_registry.values()))


@lru_cache(maxsize=1024)
def _by_hint(hint: Any) -> Allowed:
    return _collect([hint])


_unhashable: dict[int, tuple[Any, Allowed]] = {}


def _by_identity(hint: Any) -> Allowed:
    # The hint is kept alive beside its result, so that its id stays its own. New hints for every call would pile
    # up, hence the limit.
    if (found := _unhashable.get(id(hint))) is not None:
        return found[1]
    if len(_unhashable) >= 256:
        _unhashable.clear()
    allowed = _collect([hint])
    _unhashable[id(hint)] = (hint, allowed)
    return allowed


def _collect(hints: list[Any]) -> Allowed:
    classes: dict[str, type | None] = {}
    seen: dict[int, Any] = {}
    while hints:
        hint = hints.pop()
        if id(hint) in seen:
            continue
        seen[id(hint)] = hint
        if isinstance(hint, type) and get_origin(hint) is None and can_rebuild(hint):
            # Two classes of one name cannot be distinguished in stored data, so neither is allowed.
            classes[name_of(hint)] = hint if classes.get(name_of(hint), hint) is hint else None
        hints.extend(_inner_hints(hint))
    found = {name: cls for name, cls in classes.items() if cls is not None}
    return Allowed(MappingProxyType(found), MappingProxyType({cls: name for name, cls in found.items()}))


def _inner_hints(hint: Any) -> Iterator[Any]:
    """The hints directly inside a hint."""
    if get_origin(hint) is Literal:
        yield from (type(value) for value in get_args(hint) if isinstance(value, Enum))
    elif get_origin(hint) is not None:
        yield get_origin(hint)
        yield from get_args(hint)
    elif isinstance(hint, type):
        yield from _field_hints(hint)
    elif isinstance(hint, list):  # the parameters of a Callable
        yield from hint
    else:
        yield from _alias_targets(hint)


def _alias_targets(hint: Any) -> Iterator[Any]:
    """What a NewType, a type variable, or an alias made by the `type` statement stands for."""
    for attribute in ("__supertype__", "__bound__", "__value__"):
        try:
            yield getattr(hint, attribute, None)
        except Exception:  # noqa: BLE001, S112 - an alias is evaluated when it is read, and may name something that does not exist
            continue
    yield from getattr(hint, "__constraints__", ())


def _field_hints(cls: type) -> Iterator[Any]:
    if typing.is_typeddict(cls) or can_rebuild(cls):
        yield from fields_of(cls).values()
        # pydantic resolves names that get_type_hints cannot see, and its generic models only show their arguments here.
        yield from (field.annotation for field in getattr(cls, "__pydantic_fields__", {}).values())


def _resolvable(cls: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules.get(base.__module__, typing))
        for name, annotation in _annotations(base).items():
            one = SimpleNamespace(__annotations__={name: annotation})
            try:
                yield from typing.get_type_hints(one, scope, dict(vars(base)), include_extras=True).items()
            except Exception:  # noqa: BLE001, S112 - as in fields_of
                continue


def _annotations(cls: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return dict(vars(cls).get("__annotations__", {}))
