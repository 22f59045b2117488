"""Exceptions to JSON and back.

An exception is recorded as data: the name of its class, its message, its arguments and attributes as far as they are plain
values, its traceback as text, its notes, what caused it, and the members of a group. It is rebuilt as an instance of the
same class if that class is loaded in this process under that name and is an `Exception`; a name never imports anything,
never reaches a function, and no code of the class runs: memory is allocated by the nearest builtin base, then `args`
and attributes are set. Otherwise it comes back as `StepFailed`, which carries type name and message.

Recording must not fail, because it happens while something else has failed already: every call into the user's class is
guarded, every length bounded, and a chain that leads back to itself ends there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import MemberDescriptorType, ModuleType
from typing import Any

import msgspec

from perdure.codec.tagging import Tagger
from perdure.codec.untagging import Untagger
from perdure.codec.values import refuse_repeated_keys
from perdure.errors import StepFailed

_MAX_MESSAGE = 10_000
_MAX_TRACEBACK = 20_000
_MAX_FRAMES = 100
_MAX_CHAIN = 10
_MAX_ERRORS = 100
_MAX_VALUE = 64 * 1024
_MAX_DEPTH = 50


class _Recorded(msgspec.Struct, omit_defaults=True):
    """One exception as it is stored. `args` is None when they are no plain values; `group` is the message of a group."""

    module: str
    qualname: str
    message: str
    args: list[Any] | None = None
    attributes: dict[str, Any] = {}
    traceback: str = ""
    notes: list[str] = []
    cause: _Recorded | None = None
    context: _Recorded | None = None
    suppress_context: bool = False
    group: str | None = None
    children: list[_Recorded] = []


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Recorded)


def dump_error(error: BaseException) -> bytes:
    """The exception as JSON; never raises."""
    try:
        return _encode(_Recorder().record(error, 0))
    except Exception:  # noqa: BLE001 - a class that has replaced what every exception has, such as __cause__
        cls = type(error)
        return _encode(_Recorded(_text(cls.__module__, 1_000), _text(cls.__qualname__, 1_000), _message(error)))


def load_error(data: bytes, key: str) -> Exception:
    """The exception as its own class if this process has it, otherwise as `StepFailed` of the step `key`.

    `ValueError` when the data is not what `dump_error` wrote.
    """
    try:
        refuse_repeated_keys(data)
        return _rebuilt(_decoder.decode(data), key)
    except Exception as error:  # RecursionError, or whatever a malformed tree makes a constructor raise
        raise ValueError(f"the recorded error cannot be read: {error}") from error


def rebuildable(error: BaseException) -> bool:
    """Whether a replay would raise this very class, rather than `StepFailed`."""
    return type(load_error(dump_error(error), "")) is type(error)


class _Recorder:
    """Records one exception with everything it leads to, within one budget."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.left = _MAX_ERRORS

    def record(self, error: BaseException, depth: int) -> _Recorded:
        self.open.add(id(error))
        self.left -= 1
        cls = type(error)
        recorded = _Recorded(_text(cls.__module__, 1_000), _text(cls.__qualname__, 1_000), _message(error))
        recorded.args = _plain_args(error)
        recorded.attributes = _plain_attributes(error)
        recorded.traceback = _traceback(error, recorded)
        recorded.notes = _notes(error)
        recorded.cause = self._linked(error.__cause__, depth)
        recorded.context = self._linked(error.__context__, depth) if error.__context__ is not error.__cause__ else None
        recorded.suppress_context = error.__suppress_context__
        if isinstance(error, BaseExceptionGroup):
            recorded.group = _text(BaseExceptionGroup.message.__get__(error), _MAX_MESSAGE)
            found = (self._linked(child, depth) for child in BaseExceptionGroup.exceptions.__get__(error))
            recorded.children = [child for child in found if child is not None]
        self.open.discard(id(error))
        return recorded

    def _linked(self, error: BaseException | None, depth: int) -> _Recorded | None:
        if error is None or id(error) in self.open or depth >= _MAX_CHAIN or self.left <= 0:
            return None
        return self.record(error, depth + 1)


def _message(error: BaseException) -> str:
    try:
        return _text(str(error), _MAX_MESSAGE)
    except Exception as failure:  # noqa: BLE001 - it is the user's __str__
        return f"<no message: its __str__ raised {_text(type(failure).__name__, 100)}>"


def _text(value: Any, limit: int) -> str:
    """At most `limit` characters that can stand in JSON; a lone surrogate becomes its escape."""
    shown = str.__str__(value) if isinstance(value, str) else "<unknown>"
    shown = str.__getitem__(shown, slice(0, limit)) + ("… (cut)" if len(shown) > limit else "")
    return shown.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    """The tree of a value without classes; raises for any other, and for one that is too long to keep beside an error."""
    tree = Tagger(_no_class, _MAX_DEPTH, room=_MAX_VALUE).tag(value, "error")
    if len(_encode(tree)) > _MAX_VALUE:
        raise ValueError("too long")
    return tree


def _no_class(_: Any) -> None:
    return None


def _plain_args(error: BaseException) -> list[Any] | None:
    try:
        return [_plain(argument) for argument in error.args]
    except Exception:  # noqa: BLE001 - `args` may be a property of the class, and hold anything
        return None


def _plain_attributes(error: BaseException) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in _attributes(error):
        try:
            kept[name] = _plain(value)
            _encode(kept)
        except Exception:  # noqa: BLE001 - a lock, a response, a name that is no text: the error is still worth recording without it
            kept.pop(name, None)
    return kept


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What the exception holds: the members of builtin classes (`OSError.filename`), slots, and its `__dict__`."""
    for name, member in _members(type(error)).items():
        with contextlib.suppress(AttributeError):  # a slot that was never filled
            if (value := member.__get__(error)) is not None:
                yield name, value
    yield from ((name, value) for name, value in list(vars(error).items())[:200] if name != "__notes__")


def _members(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: held
        for base in reversed(cls.__mro__)
        for name, held in vars(base).items()
        if isinstance(held, MemberDescriptorType) and not name.startswith("__")
    }


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [_text(note, _MAX_MESSAGE) for note in notes[:50]] if isinstance(notes, list) else []


def _traceback(error: BaseException, recorded: _Recorded) -> str:
    """The text of the traceback; its end, where the error was raised, is what a limit leaves."""
    try:
        from traceback import extract_tb

        frames = "".join(extract_tb(error.__traceback__, limit=-_MAX_FRAMES).format())
    except Exception:  # noqa: BLE001 - source lines come from loaders and caches that are not ours
        frames = ""
    last = f"{_type_name(recorded)}: {recorded.message[:1_000]}\n"
    return _text("Traceback (most recent call last):\n" + frames[-(_MAX_TRACEBACK - 5_000) :] + last, _MAX_TRACEBACK)


def _type_name(recorded: _Recorded) -> str:
    return recorded.qualname if recorded.module == "builtins" else f"{recorded.module}.{recorded.qualname}"


def _rebuilt(recorded: _Recorded, key: str) -> Exception:
    error = _instance(recorded, key) or StepFailed(key, _type_name(recorded), recorded.message)
    if recorded.notes:
        error.__notes__ = list(recorded.notes)
    if recorded.cause is not None:
        error.__cause__ = _rebuilt(recorded.cause, key)
    if recorded.context is not None:
        error.__context__ = _rebuilt(recorded.context, key)
    elif recorded.cause is not None:
        error.__context__ = error.__cause__
    error.__suppress_context__ = recorded.suppress_context
    return error


def _instance(recorded: _Recorded, key: str) -> Exception | None:
    """A new instance of the recorded class, or None when there is no such class or it cannot be made from the record."""
    untagger = Untagger(_no_class, _MAX_DEPTH)
    args = None if recorded.args is None else tuple(untagger.value(tree) for tree in recorded.args)
    attributes = {name: untagger.value(tree) for name, tree in recorded.attributes.items()}
    cls = _loaded_class(recorded.module, recorded.qualname)
    if cls is None:
        return None
    if issubclass(cls, BaseExceptionGroup):
        args = (recorded.group or "", [_rebuilt(child, key) for child in recorded.children])
    error = _allocated(cls, (recorded.message,) if args is None else args)
    if error is not None:
        _set_attributes(error, attributes)
    return error


def _loaded_class(module: str, qualname: str) -> type[Exception] | None:
    # The dicts are read directly: a module's or a class's own __getattr__ could import, or run anything else.
    found: Any = sys.modules.get(module)
    if not isinstance(found, ModuleType):
        return None
    scope: Any = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = scope.get(name)
        if not isinstance(found, type):
            return None
        scope = type.__dict__["__dict__"].__get__(found)
    return found if issubclass(found, Exception) else None


def _allocated(cls: type[Exception], args: tuple[Any, ...]) -> Exception | None:
    # Only builtin code runs here. It gives OSError its errno and UnicodeError its fields from the arguments, which no
    # assignment could; where arguments do not suit it, the exception goes without.
    for base in (base for base in cls.__mro__ if base.__module__ == "builtins" and issubclass(base, Exception)):
        for made_from in (args, ()):
            try:
                error: Exception = base.__new__(cls, *made_from)
            except Exception:  # noqa: BLE001, S112 - not the base that allocates this class, or arguments it does not take
                continue
            _initialised(base, error, args)
            return error
    return None


def _initialised(base: type[Exception], error: Exception, args: tuple[Any, ...]) -> None:
    with contextlib.suppress(Exception):  # arguments that do not suit the base
        base.__init__(error, *args)
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]


def _set_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    members = _members(type(error))
    for name, value in attributes.items():
        if (member := members.get(name)) is None:
            vars(error)[name] = value
            continue
        with contextlib.suppress(Exception):  # read-only, or of another type than in the process that recorded it
            member.__set__(error, value)
