"""Finding the class of a recorded exception by its name.

A name never imports anything and never reaches a function: dicts of modules and classes are read directly, because their own
`__getattr__` could import, or run anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import MemberDescriptorType, ModuleType
from typing import Any, Final

# Python's own descriptors of classes, which a user's class cannot override.
CLASS_VARS: Final = vars(type)


def find_class(module: str, qualname: str, modules: Iterable[str] = ()) -> type[Exception] | None:
    """Return the loaded exception class of this name, from its module or the first of `modules` that has the qualified name.

    A class that is defined in a function (`pay.<locals>.Declined`) is never found: `pay` is no class.
    """
    for name in (module, *modules):
        if (found := _class_in(name, qualname)) is not None and issubclass(found, Exception):
            return found
    return None


def is_base_exception(module: str, qualname: str) -> bool:
    """Whether this is the name of a class such as `asyncio.CancelledError`, which is no `Exception`."""
    found = _class_in(module, qualname)
    return found is not None and issubclass(found, BaseException) and not issubclass(found, Exception)


def _class_in(module: str, qualname: str) -> type | None:
    found: Any = sys.modules.get(module)
    if not isinstance(found, ModuleType):
        return None
    scope: Any = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = scope.get(name)
        if not isinstance(found, type):
            return None
        scope = CLASS_VARS["__dict__"].__get__(found)
    return found if isinstance(found, type) else None


def mro_of(cls: type) -> tuple[type, ...]:
    """Return the class and its bases in the order of method resolution."""
    mro: tuple[type, ...] = CLASS_VARS["__mro__"].__get__(cls)
    return mro


def full_name(module: str, qualname: str) -> str:
    """Return the name of a class as messages show it."""
    return qualname if module == "builtins" else f"{module}.{qualname}"


def members_of(cls: type) -> dict[str, MemberDescriptorType]:
    """Return the members of builtin classes (`OSError.filename`) and the slots of a class."""
    return {
        name: held
        for base in reversed(mro_of(cls))
        for name, held in CLASS_VARS["__dict__"].__get__(base).items()
        if isinstance(held, MemberDescriptorType) and not name.startswith("__")
    }


def shows_none(member: MemberDescriptorType) -> bool:
    """Whether an empty member reads as None, as those of builtin classes do; then None is never written to it."""
    return bool(CLASS_VARS["__module__"].__get__(member.__objclass__) == "builtins")
