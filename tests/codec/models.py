"""Classes of every kind that the codec rebuilds, for the tests."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import msgspec
import pydantic

T = TypeVar("T")
made: list[str] = []


class Color(enum.Enum):
    RED = object()  # a value that has no stored form: members are stored by name
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Tone(enum.StrEnum):
    SOFT = enum.auto()


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Item:
    sku: str
    price: Decimal = Decimal(0)


@dataclass
class Order:
    id: int
    items: list[Item]
    color: Color | None = None
    note: str = field(default="", init=False)

    def __post_init__(self) -> None:
        made.append("Order")
        self.note += "!"


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    next: str | None = None


@dataclass
class Derived(Item):
    at: datetime | None = None


@dataclass
class WithExtras:
    seed: InitVar[int]
    base: int = 0

    def __post_init__(self, seed: int) -> None:
        self.grown = seed * 2

    @cached_property
    def expensive(self) -> int:
        return self.base


@dataclass
class Unresolvable:
    inner: Item
    other: Missing  # type: ignore[name-defined]  # noqa: F821 - the point of the test


class Account(msgspec.Struct, frozen=True, rename="camel", tag=True):
    user_id: int
    roles: tuple[str, ...] = ()


class Counter(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        self.n += 1


class Place(NamedTuple):
    lat: float
    tags: set[str]
    name: str = "nowhere"


@attrs.define(frozen=True, cache_hash=True)
class Box:
    _size: int
    inside: Item | None = None


@attrs.define(slots=False)
class Crate:
    n: int
    double: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        made.append("Crate")
        self.double = self.n * 2


class User(pydantic.BaseModel):
    name: str
    nick: str | None = None
    tags: set[str] = set()
    price: Decimal = Decimal("1.0")
    _secret: int = pydantic.PrivateAttr(default=1)


class Loose(pydantic.BaseModel, extra="allow", frozen=True):
    a: int


class Wrapped(pydantic.BaseModel, Generic[T]):
    value: T


class Shape(TypedDict):
    point: Point
    sides: int


ALL: Any = (
    Order | Item | Point | Page[Item] | Derived | WithExtras | Account | Counter | Place | Box | Crate | User | Loose
    | Wrapped[Item] | Level | Tone | Access | Color
)  # fmt: skip


def fields(value: Any) -> dict[str, Any]:
    """The instance attributes of a dataclass instance."""
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
