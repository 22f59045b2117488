"""Taking instances of a user's class apart, and putting them together again without running its constructor.

A shape knows one kind of class: dataclass, attrs, msgspec Struct, pydantic model or NamedTuple. `read` gives the fields,
and a second dict with what an instance holds beside them (attributes set by `__post_init__`, pydantic's private ones).
`build` is given both back, decoded. It sets attributes directly, so `__init__`, `__post_init__` and validators do not run
a second time on what they already produced; only a Struct cannot be made without its `__post_init__`, so there the
recorded fields are set again afterwards.

Code moves on while a run sleeps, so `build` lets a class grow and shrink: a field that is missing gets its default, a
recorded field that the class no longer has is dropped. A missing field without a default is a `ValueError`.

attrs and pydantic are recognised by what they leave on a class; neither is ever imported from here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property, lru_cache
from types import MemberDescriptorType
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import force_setattr

FieldsAndState: TypeAlias = tuple[dict[str, Any], dict[str, Any]]

PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_MISSING: Any = object()
_LEAVE_UNSET: Any = object()
# What typing sets on an instance made as `Page[User](...)`, and the hash that attrs caches, which is wrong in another process.
_NOT_STATE = frozenset({"__orig_class__", "_attrs_cached_hash"})


def name_of(cls: type) -> str:
    """The name under which instances of a class are recorded, `module:Qualified.Name`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def error_text(error: Exception) -> str:
    """The text of an exception; it may be a user's, whose `__str__` raises too."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__


class Shape:
    """How instances of one class are read and built."""

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        self.cls = cls
        self.names = names
        self.known = frozenset(names)

    def read(self, value: Any) -> FieldsAndState:
        """The fields of `value`, and what else it holds; neither is copied."""
        raise NotImplementedError

    def build(self, fields: dict[str, Any], state: dict[str, Any]) -> Any:
        """A new instance that holds exactly these."""
        raise NotImplementedError

    def default(self, _name: str, _instance: Any) -> Any:
        """The default of a field, or `_MISSING`."""
        return _MISSING

    def fit(self, fields: dict[str, Any], instance: Any = None) -> Iterator[tuple[str, Any]]:
        """The recorded fields as the class has them today: defaults filled in, dropped ones left out.

        One at a time, because a default may be computed from the fields before it, as `instance` has them by then.
        """
        for name in self.names:
            value = fields[name] if name in fields else self.default(name, instance)
            if value is _MISSING:
                raise ValueError(f"field {name!r} of {name_of(self.cls)} was not recorded and has no default")
            if value is not _LEAVE_UNSET:
                yield name, value


class _AttributeShape(Shape):
    """dataclass and attrs: an ordinary object whose fields are attributes."""

    def __init__(self, cls: type, names: tuple[str, ...], defaults: dict[str, Callable[[Any], Any]]) -> None:
        super().__init__(cls, names)
        self.defaults = defaults
        self.slots = _slots(cls)
        # Descriptors (slots, or a property under a field's name) are only reached through setattr.
        described = any(hasattr(type(_on_class(cls, name)), "__set__") for name in names)
        self.in_dict = not described and bool(cls.__dictoffset__)
        self.caches_hash = _caches_hash(cls)

    def default(self, name: str, instance: Any) -> Any:
        make = self.defaults.get(name)
        return _MISSING if make is None else make(instance)

    def read(self, value: Any) -> FieldsAndState:
        held = _dict_of(value)
        if self.in_dict and not self.slots and held.keys() == self.known:
            return held, {}
        state = {name: item for name, item in held.items() if name not in self.known and self._is_state(name)}
        for name, slot in self.slots.items():
            if name not in self.known and name not in _NOT_STATE and (item := _in_slot(slot, value)) is not _MISSING:
                state[name] = item
        return self._fields(value, held), state

    def _fields(self, value: Any, held: dict[str, Any]) -> dict[str, Any]:
        if self.in_dict:
            return {name: held[name] for name in self.names if name in held}
        pairs = ((name, self._field(value, name)) for name in self.names)
        return {name: item for name, item in pairs if item is not _MISSING}

    def _field(self, value: Any, name: str) -> Any:
        # An empty slot read with getattr would run the __getattr__ of the class, which may return anything.
        slot = self.slots.get(name)
        return _in_slot(slot, value) if slot is not None and _on_class(self.cls, name) is slot else getattr(value, name, _MISSING)

    def _is_state(self, name: Any) -> bool:
        return name not in _NOT_STATE and not isinstance(_on_class(self.cls, name), cached_property)

    def build(self, fields: dict[str, Any], state: dict[str, Any]) -> Any:
        instance: Any = object.__new__(self.cls)
        if self.in_dict and fields.keys() == self.known:
            instance.__dict__.update(fields)
        elif self.in_dict:
            instance.__dict__.update(self.fit(fields, instance))
        else:
            for name, item in self.fit(fields, instance):
                object.__setattr__(instance, name, item)
        if self.caches_hash:
            object.__setattr__(instance, "_attrs_cached_hash", None)
        return _with_state(instance, state, self.slots)


class _StructShape(Shape):
    def __init__(self, cls: Any) -> None:
        super().__init__(cls, cls.__struct_fields__)
        self.runs_code = hasattr(cls, "__post_init__")

    def read(self, value: Any) -> FieldsAndState:
        pairs = ((name, getattr(value, name, _MISSING)) for name in self.names)
        fields = {name: item for name, item in pairs if item is not _MISSING}
        return fields, _dict_of(value)

    def build(self, fields: dict[str, Any], state: dict[str, Any]) -> Any:
        if fields.keys() != self.known:
            fields = {name: item for name, item in fields.items() if name in self.known}
        instance = self.cls(**fields)
        if self.runs_code:
            for name, item in fields.items():
                force_setattr(instance, name, item)
        return _with_state(instance, state, {})


class _NamedTupleShape(Shape):
    def __init__(self, cls: Any) -> None:
        super().__init__(cls, cls._fields)
        self.defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})

    def default(self, name: str, _instance: Any) -> Any:
        return self.defaults.get(name, _MISSING)

    def read(self, value: Any) -> FieldsAndState:
        return dict(zip(self.names, tuple.__iter__(value), strict=True)), _dict_of(value)

    def build(self, fields: dict[str, Any], state: dict[str, Any]) -> Any:
        return _with_state(tuple.__new__(self.cls, [item for _, item in self.fit(fields)]), state, {})


class _PydanticShape(Shape):
    def __init__(self, cls: Any) -> None:
        super().__init__(cls, tuple(cls.model_fields))
        self.model: Any = cls

    def default(self, name: str, given: Any) -> Any:
        field = self.model.model_fields[name]
        return _MISSING if field.is_required() else _pydantic_default(field, given)

    def read(self, value: Any) -> FieldsAndState:
        held = value.__dict__
        deleted = self.model.__private_attributes__.keys() - (value.__pydantic_private__ or {}).keys()
        unset = sorted(self.known - value.__pydantic_fields_set__) + sorted(deleted)
        parts = (("unset", unset), ("extra", value.__pydantic_extra__), ("private", value.__pydantic_private__))
        return {name: held[name] for name in self.names if name in held}, {name: part for name, part in parts if part}

    def build(self, fields: dict[str, Any], state: dict[str, Any]) -> Any:
        model = self.model
        instance = model.__new__(model)
        unset = set(state.get("unset", ())) | (self.known - fields.keys())
        held: dict[str, Any] = {}
        held.update(self.fit(fields, held))
        for name, part in (
            ("__dict__", held),
            ("__pydantic_fields_set__", set(self.known - unset) | set(state.get("extra", ()))),
            ("__pydantic_extra__", dict(state.get("extra", ())) if model.model_config.get("extra") == "allow" else None),
            ("__pydantic_private__", self._private(dict(state.get("private", ())), unset, held)),
        ):
            object.__setattr__(instance, name, part)
        return instance

    def _private(self, recorded: dict[str, Any], unset: set[str], given: dict[str, Any]) -> dict[str, Any] | None:
        declared = self.model.__private_attributes__
        for name in declared.keys() - recorded.keys() - unset:
            if (item := _pydantic_default(declared[name], given)) is not sys.modules["pydantic_core"].PydanticUndefined:
                recorded[name] = item
        return recorded if declared else None


def _pydantic_default(declared: Any, given: dict[str, Any]) -> Any:
    """The default of a field or private attribute; releases of pydantic differ in the arguments they take."""
    arguments = {"call_default_factory": True, "validated_data": given}
    known = type(declared).get_default.__kwdefaults__ or {}
    return declared.get_default(**{name: value for name, value in arguments.items() if name in known})


@lru_cache(maxsize=4096)
def shape_of(cls: type) -> Shape | None:
    """The shape of a class, or None when its instances cannot be rebuilt from fields."""
    if issubclass(cls, Enum):
        return None
    if issubclass(cls, msgspec.Struct):
        return _StructShape(cls)
    if issubclass(cls, tuple):
        return _NamedTupleShape(cls) if isinstance(getattr(cls, "_fields", None), tuple) else None
    if is_pydantic(cls):
        return _PydanticShape(cls)
    # An object with a builtin inside (a dataclass that is also a dict or an exception) holds more than its fields.
    if cls.__new__ is not object.__new__ and not _is_plain_object(cls):
        return None
    if _on_class(cls, "__dataclass_fields__") is not None:
        return _dataclass_shape(cls)
    return None if _on_class(cls, "__attrs_attrs__") is None else _attrs_shape(cls)


def is_pydantic(cls: type) -> bool:
    """Whether a class is a pydantic model; where there is one, pydantic has been imported."""
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def can_rebuild(cls: Any) -> bool:
    """Whether instances of a class can be stored at all, given that it is allowed."""
    return issubclass(cls, Enum) or shape_of(cls) is not None


def _is_plain_object(cls: type) -> bool:
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def _dataclass_shape(cls: Any) -> Shape:
    fields = dataclasses.fields(cls)
    defaults: dict[str, Callable[[Any], Any]] = {}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _constant(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = _from_factory(field.default_factory)
        elif not field.init:
            defaults[field.name] = _constant(_LEAVE_UNSET)
    return _AttributeShape(cls, tuple(field.name for field in fields), defaults)


def _attrs_shape(cls: Any) -> Shape:
    attr = sys.modules["attr"]
    defaults: dict[str, Callable[[Any], Any]] = {}
    for field in cls.__attrs_attrs__:
        if isinstance(field.default, attr.Factory):
            defaults[field.name] = field.default.factory if field.default.takes_self else _from_factory(field.default.factory)
        elif field.default is not attr.NOTHING:
            defaults[field.name] = _constant(field.default)
        elif not field.init:
            defaults[field.name] = _constant(_LEAVE_UNSET)
    return _AttributeShape(cls, tuple(field.name for field in cls.__attrs_attrs__), defaults)


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _instance: value


def _from_factory(factory: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda _instance: factory()


def _on_class(cls: type, name: Any) -> Any:
    """What a class holds under a name, found without invoking a descriptor."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _dict_of(value: Any) -> dict[str, Any]:
    """The instance's `__dict__`; read only if it has one, because a `__getattr__` might answer instead."""
    return value.__dict__ if type(value).__dictoffset__ else {}


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    pairs = (pair for base in reversed(cls.__mro__) for pair in vars(base).items())
    return {name: held for name, held in pairs if isinstance(held, MemberDescriptorType)}


def _in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _MISSING


def _caches_hash(cls: type) -> bool:
    code = getattr(cls.__hash__, "__code__", None)
    return code is not None and "_attrs_cached_hash" in (*code.co_names, *code.co_consts)


def _with_state(instance: Any, state: dict[str, Any], slots: dict[str, MemberDescriptorType]) -> Any:
    for name, item in state.items():
        if name in slots:
            slots[name].__set__(instance, item)
        else:
            instance.__dict__[name] = item
    return instance
