"""Checking a value from outside against an annotation: a workflow's argument, a signal's payload.

Callers in Python pass the right objects, and those go through untouched, down to the identity of the list. Callers over HTTP
pass plain JSON, which is converted where the annotation says so: an object to the dataclass, a list to the tuple, an ISO string
to the datetime. Nothing else is converted: no "1" to 1, no 1 to "1".

A class is built by its own constructor here, not by its shape, because data from outside has not been validated yet. Parts of
an annotation that cannot be checked (a type variable, a protocol, a callable) are not checked.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from functools import lru_cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin
from uuid import UUID

import msgspec

from perdure.codec.hints import fields_of
from perdure.codec.shapes import error_text, is_pydantic, shape_of
from perdure.codec.untagging import refuse_collisions

# What msgspec converts from JSON: a float from an integer, the others from text. Not bytes: text that happens to be base64 is
# more often a caller's mistake.
_FROM_JSON = frozenset({float, datetime, date, time, timedelta, Decimal, UUID})
_WRAPPERS = tuple(
    getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar") if hasattr(typing, name)
)
_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS = frozenset({*_SEQUENCES, dict})
_SCALARS = frozenset({bool, int, float, str, bytes})
_NOTHING: Any = object()


def conform(value: Any, hint: Any, path: str) -> Any:
    """The value as `hint` describes it; the value itself when it is that already. `ValueError` when it does not fit."""
    if type(value) is hint and hint in _SCALARS:
        return value  # the common case
    try:
        return _Check().value(value, hint, path)
    except RecursionError as error:
        raise ValueError(f"{path}: it is nested too deeply to be checked, or contains itself") from error


class _Check:
    """Checks one value with all its parts."""

    __slots__ = ("unions",)

    def __init__(self) -> None:
        # The result, or the refusal, of each part checked against each union. An arm of a union may have the same union in its
        # fields; without this memory the time would double with every level.
        self.unions: dict[Any, tuple[Any, Any, str | None]] = {}

    def value(self, value: Any, hint: Any, path: str) -> Any:
        origin = get_origin(hint)
        if origin is None:
            return self._plain(value, hint, path)
        if origin is Annotated:
            return self._annotated(value, hint, path)
        if origin is Union or origin is types.UnionType:
            return self._union(value, hint, path)
        if origin is Literal:
            return _conform_literal(value, hint, path)
        if origin in _WRAPPERS:
            return self.value(value, get_args(hint)[0], path)
        if not isinstance(origin, type) or origin in {type, collections.abc.Callable}:
            return value
        return self._generic(value, hint, origin, path)

    def _plain(self, value: Any, hint: Any, path: str) -> Any:
        """Against a hint without type arguments."""
        if hint is None or hint is types.NoneType:
            return value if value is None else _mismatch(value, "None", path)
        if not isinstance(hint, type) and (behind := _alias_target(hint)) is not _NOTHING:
            return self.value(value, behind, path)
        if not isinstance(hint, type) or hint is object or hint is Any or getattr(hint, "_is_protocol", False):
            return value
        if typing.is_typeddict(hint):
            return self._typed_dict(value, hint, path)
        return value if isinstance(value, hint) else self._convert(value, hint, {}, path)

    def _annotated(self, value: Any, hint: Any, path: str) -> Any:
        inner, *metadata = get_args(hint)
        result = self.value(value, inner, path)
        for constraint in metadata:
            if isinstance(constraint, msgspec.Meta):
                _check_by_msgspec(result, Annotated[type(result), constraint], path)
        return result

    def _union(self, value: Any, hint: Any, path: str) -> Any:
        if type(value) not in _CONTAINERS:
            return self._arm(value, hint, path)
        # The arms in their order: `A | B` equals `B | A`. The hint is kept alive, so that its id stays its own.
        arms = get_args(hint)
        key = (id(value), arms if _is_hashable(arms) else id(hint))
        if key not in self.unions:
            try:
                self.unions[key] = (hint, self._arm(value, hint, path), None)
            except ValueError as error:
                self.unions[key] = (hint, None, str(error))
        _, result, reason = self.unions[key]
        if reason is not None:
            raise ValueError(reason)
        return result

    def _arm(self, value: Any, hint: Any, path: str) -> Any:
        """The value itself if it already fits an arm, otherwise converted to the first arm that takes it."""
        converted: list[Any] = []
        reasons: list[str] = []
        for arm in get_args(hint):
            try:
                result = self.value(value, arm, path)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if result is value:
                return value
            converted.append(result)
        if converted:
            return converted[0]
        # The arm that got furthest is most likely the one that was meant.
        reached = max(reasons, key=lambda reason: len(reason.split(": ")[0]))
        if reached.startswith(f"{path}: expected "):
            return _mismatch(value, _name(hint), path)
        raise ValueError(reached)

    def _generic(self, value: Any, hint: Any, origin: type, path: str) -> Any:
        arguments = get_args(hint)
        if origin is tuple and hint is not typing.Tuple:  # noqa: UP006  (the bare alias, which a user may have written)
            return self._tuple(value, arguments, path)
        if issubclass(origin, collections.abc.Mapping):
            return self._mapping(value, origin, arguments, path)
        if _is_abstract_or_builtin(origin):
            return self._items(value, hint, origin, arguments, path)
        if isinstance(value, origin) or getattr(origin, "_is_protocol", False):
            return value
        return self._convert(value, origin, dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False)), path)

    def _items(self, value: Any, hint: Any, origin: Any, arguments: tuple[Any, ...], path: str) -> Any:
        if not isinstance(value, origin) and not (type(value) is list and origin in (set, frozenset, collections.abc.Set)):
            return _mismatch(value, _name(hint), path)
        if type(value) not in _SEQUENCES or len(arguments) != 1:
            return value  # a generator or an object of a user's class must not be iterated here
        items = [self.value(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, origin):
            return _same_or_new(value, items, type(value))
        return _guard(lambda: (frozenset if origin is frozenset else set)(refuse_collisions(items)), path)

    def _tuple(self, value: Any, arguments: tuple[Any, ...], path: str) -> Any:
        if not isinstance(value, tuple) and type(value) is not list:
            return _mismatch(value, "tuple", path)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if any(get_origin(argument) is typing.Unpack for argument in arguments) or type(value) not in {tuple, list}:
            return value if isinstance(value, tuple) else tuple(value)
        if len(arguments) != len(value):
            raise ValueError(f"{path}: expected a tuple of {len(arguments)}, got {len(value)} items")
        items = [self.value(item, arguments[index], f"{path}[{index}]") for index, item in enumerate(value)]
        return _same_or_new(value, items, tuple)

    def _mapping(self, value: Any, origin: type, arguments: tuple[Any, ...], path: str) -> Any:
        if not isinstance(value, origin):
            return _mismatch(value, origin.__name__, path)
        if type(value) is not dict or len(arguments) != 2:
            return value
        key_hint, item_hint = arguments
        pairs = [
            (self._key(key, key_hint, path), self.value(item, item_hint, f"{path}[{key!r:.80}]")) for key, item in value.items()
        ]
        if all(key is old and item is value[old] for (key, item), old in zip(pairs, value, strict=True)):
            return value
        _guard(lambda: refuse_collisions([key for key, _ in pairs]), path)
        result = _guard(lambda: dict(pairs), path)
        if len(result) < len(pairs):
            raise ValueError(f"{path}: two keys are the same once they are what the annotation says")
        return result

    def _key(self, key: Any, hint: Any, path: str) -> Any:
        try:
            return self.value(key, hint, f"{path}.key({key!r:.80})")
        except ValueError:
            # JSON has text for keys only, so here, and only here, the text of a number is the number.
            if type(key) is not str or hint not in (int, float, bool):
                raise
            return _by_msgspec(key, hint, f"{path}.key({key!r:.80})", strict=False)

    def _typed_dict(self, value: Any, hint: Any, path: str) -> Any:
        if type(value) is not dict:
            return _mismatch(value, hint.__name__, path)
        if missing := sorted(hint.__required_keys__ - value.keys()):
            raise ValueError(f"{path}: {hint.__name__} needs {', '.join(map(repr, missing))}")
        fields = fields_of(hint)
        items = {key: self.value(item, fields.get(key, Any), f'{path}["{key}"]') for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items

    def _convert(self, value: Any, cls: Any, arguments: dict[Any, Any], path: str) -> Any:
        """An instance of `cls` from its plain JSON."""
        if is_pydantic(cls):
            return _guard(lambda: cls.model_validate(value), path)
        if issubclass(cls, Enum):
            return _member(value, cls, path)
        shape = shape_of(cls)
        if shape is not None and type(value) is dict:
            return self._from_dict(value, cls, arguments, path)
        if shape is not None and issubclass(cls, tuple) and type(value) is list:
            if len(value) > len(shape.names):
                raise ValueError(f"{path}: {cls.__name__} has {len(shape.names)} fields, got {len(value)} items")
            return self._from_dict(dict(zip(shape.names, value, strict=False)), cls, arguments, path)
        if issubclass(cls, getattr(sys.modules.get("pathlib"), "PurePath", ())) and type(value) is str:
            return _guard(lambda: cls(value), path)
        return _from_scalar(value, cls, path) if cls in _FROM_JSON else _mismatch(value, cls.__name__, path)

    def _from_dict(self, value: dict[Any, Any], cls: Any, arguments: dict[Any, Any], path: str) -> Any:
        is_struct = issubclass(cls, msgspec.Struct)
        if is_struct:
            value = _without_tag(value, cls, path)
        parameters = _parameters(cls)
        given = {}
        for key, item in value.items():
            # A renamed field has another parameter, which would be given to the constructor unchecked.
            if is_struct and key not in parameters:
                raise ValueError(f"{path}: {cls.__name__} has no field {key!r:.80}")
            name, hint = parameters.get(key, (key, Any))
            given[name] = self.value(item, _substitute(hint, arguments), f"{path}.{key}")
        return _guard(lambda: cls(**given), path)


def _alias_target(hint: Any) -> Any:
    """What a NewType, or an alias made by the `type` statement, stands for; `Any` when that cannot be resolved."""
    try:
        return getattr(hint, "__supertype__", getattr(hint, "__value__", _NOTHING))
    except Exception:  # noqa: BLE001 - an alias is evaluated when it is read, and may name something that does not exist
        return Any


def _is_hashable(arms: tuple[Any, ...]) -> bool:
    try:
        hash(arms)
    except TypeError:
        return False
    return True


def _check_by_msgspec(value: Any, hint: Any, path: str) -> None:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    except TypeError:  # a constraint on a type that msgspec does not constrain
        return


def _conform_literal(value: Any, hint: Any, path: str) -> Any:
    for choice in get_args(hint):
        if type(choice) is type(value) and choice == value:
            return value
        if isinstance(choice, Enum) and type(choice.value) is type(value) and choice.value == value:
            return choice
    return _mismatch(value, _name(hint), path)


def _is_abstract_or_builtin(origin: type) -> bool:
    return origin in _SEQUENCES or (origin.__module__ == "collections.abc" and issubclass(origin, collections.abc.Iterable))


def _member(value: Any, cls: Any, path: str) -> Any:
    """The member of an enum with this value."""
    for member in cls:
        if type(member.value) is type(value) and member.value == value:
            return member
    if issubclass(cls, Flag) and type(value) is int:
        flags = _guard(lambda: cls(value), path)
        if flags.value == value:  # the first releases of 3.11 drop bits they do not know
            return flags
    raise ValueError(f"{path}: {value!r:.80} is no value of {cls.__name__}")


def _from_scalar(value: Any, cls: Any, path: str) -> Any:
    result = _by_msgspec(value, cls, path)
    if cls is float and result != value:
        raise ValueError(f"{path}: no float is exactly {value!r:.80}")
    return result


@lru_cache(maxsize=1024)
def _parameters(cls: Any) -> dict[Any, tuple[str, Any]]:
    """For each key that data from outside may use: the constructor's parameter, and its annotation."""
    hints = fields_of(cls)
    if issubclass(cls, msgspec.Struct):
        pairs = zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True)
        return {key: (name, hints.get(name, Any)) for key, name in pairs}
    if hasattr(cls, "__attrs_attrs__"):
        return {field.alias: (field.alias, hints.get(field.name, Any)) for field in cls.__attrs_attrs__}
    return {name: (name, hint.type if isinstance(hint, dataclasses.InitVar) else hint) for name, hint in hints.items()}


def _without_tag(value: dict[Any, Any], cls: Any, path: str) -> dict[Any, Any]:
    config = cls.__struct_config__
    if config.tag is None or config.tag_field not in value:
        return value
    if value[config.tag_field] != config.tag:
        raise ValueError(f"{path}: {config.tag_field} is {value[config.tag_field]!r:.80}, not {config.tag!r}")
    return {key: item for key, item in value.items() if key != config.tag_field}


def _substitute(hint: Any, arguments: dict[Any, Any]) -> Any:
    """A field's hint with the type variables of its class filled in, as `Page[User]` says."""
    if not arguments:
        return hint
    if isinstance(hint, TypeVar):
        return arguments.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(arguments.get(parameter, parameter) for parameter in parameters)] if parameters else hint


def _by_msgspec(value: Any, hint: Any, path: str, *, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    except TypeError:  # msgspec knows no such type
        return _mismatch(value, _name(hint), path)


def _same_or_new(value: Any, items: list[Any], make: Callable[[Iterable[Any]], Any]) -> Any:
    """The value itself when no item changed and its type is right, so that a correct value keeps its identity."""
    if type(value) is make and all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return make(items)


def _guard(make: Callable[[], Any], path: str) -> Any:
    """What `make` returns; an exception of a user's constructor or validator becomes a ValueError with the path."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"{path}: {error_text(error)}") from error


def _mismatch(value: Any, expected: str, path: str) -> NoReturn:
    raise ValueError(f"{path}: expected {expected}, got {_kind(value)}")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
