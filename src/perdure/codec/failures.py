"""Exceptions to JSON and back.

An exception is recorded as data: the name of its class, its message, its arguments and attributes as far as they are plain
values, its traceback as text, its notes, what caused it, and the members of a group. It is rebuilt as an instance of the
same class if that class is loaded in this process under that name and is an `Exception`; a name never imports anything,
never reaches a function, and no code of the class runs: memory is allocated by the nearest builtin base, then `args`
and attributes are set. Otherwise it comes back as `StepFailed`, which carries type name and message.

Recording must not fail, because it happens while another error is being handled: Python's own attributes of an exception are
read and written past the user's class, its `__str__` is guarded, every length and their sum is bounded, and a chain that leads
back to itself ends there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MemberDescriptorType, ModuleType
from typing import Any

import msgspec

from perdure.codec.scalars import is_text
from perdure.codec.shapes import error_text
from perdure.codec.tagging import Tagger
from perdure.codec.untagging import Untagger
from perdure.codec.values import encode_bounded, refuse_repeated_keys
from perdure.errors import StepFailed
from perdure.model.logs import is_of_caller, users_traceback

_MAX_MESSAGE = 10_000
_MAX_TRACEBACK = 20_000
_MAX_FRAMES = 100
_MAX_CHAIN = 10
_MAX_ERRORS = 100
_MAX_VALUE = 64 * 1024
_MAX_DEPTH = 50
# Of one record with its whole chain, in characters; JSON takes up to six bytes for one. Past it messages are still recorded.
_MAX_RECORD = 1_000_000
_MIN_TEXT = 200
_LONGEST_LINE = 200
# Python's own descriptors of exceptions and classes, which a user's class cannot override.
_EXCEPTION_VARS = vars(BaseException)
_CLASS_VARS = vars(type)


class _ExceptionRecord(msgspec.Struct, omit_defaults=True):
    """One exception as it is stored. `args` is None when they are no plain values; `group` is the message of a group."""

    module: str
    qualname: str
    message: str
    args: list[Any] | None = None
    attributes: dict[str, Any] = {}
    traceback: str = ""
    notes: list[str] = []
    cause: _ExceptionRecord | None = None
    context: _ExceptionRecord | None = None
    suppress_context: bool = False
    group: str | None = None
    children: list[_ExceptionRecord] = []


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_ExceptionRecord)


def dump_error(error: BaseException) -> bytes:
    """The exception as JSON; never raises."""
    try:
        return _encode(_ExceptionRecorder().record(error, 0))
    except Exception:  # noqa: BLE001 - the stack may be used up; no failure in here may hide the error
        return _encode(_ExceptionRecorder().describe(error))


def line_of(error: BaseException) -> str:
    """Return the error in one line: its class, its message, and where the user's code raised it; never raises."""
    name, message = _CLASS_VARS["__qualname__"].__get__(type(error)), _message(error)
    line = one_line(f"{name}: {message}" if message else name)
    last = _get_builtin(error, "__traceback__")
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_of_caller(last.tb_frame.f_code.co_filename):
        return line
    return f"{line} ({Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno})"


def one_line(text: str) -> str:
    """Return the text in one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def load_error(data: bytes, key: str) -> Exception:
    """The exception as its own class if this process has it, otherwise as `StepFailed` of the step `key`.

    `ValueError` when the data is not what `dump_error` wrote.
    """
    try:
        refuse_repeated_keys(data)
        return _rebuild(_decoder.decode(data), key)
    except MemoryError:  # no fault of the data
        raise
    except Exception as error:  # RecursionError, or whatever a malformed tree makes a constructor raise
        raise ValueError(f"the recorded error cannot be read: {error_text(error)}") from error


def is_rebuildable(error: BaseException) -> bool:
    """Whether a replay would raise this very class, rather than `StepFailed`."""
    return type(load_error(dump_error(error), "")) is type(error)


class _ExceptionRecorder:
    """Records one exception with its causes, contexts and members, within one budget."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.left = _MAX_ERRORS
        self.room = _MAX_RECORD

    def record(self, error: BaseException, depth: int) -> _ExceptionRecord:
        self.open.add(id(error))
        self.left -= 1
        recorded = self.describe(error)
        recorded.args = self._args(error)
        recorded.attributes = self._attributes(error)
        recorded.traceback = self._text(_traceback(error, recorded), _MAX_TRACEBACK)
        recorded.notes = self._notes(error)
        cause, context = _get_builtin(error, "__cause__"), _get_builtin(error, "__context__")
        recorded.cause = self._record_linked(cause, depth)
        recorded.context = self._record_linked(context, depth) if context is not cause else None
        recorded.suppress_context = _get_builtin(error, "__suppress_context__")
        if issubclass(type(error), BaseExceptionGroup):
            recorded.group = self._text(BaseExceptionGroup.message.__get__(error), _MAX_MESSAGE)
            found = (self._record_linked(child, depth) for child in BaseExceptionGroup.exceptions.__get__(error))
            recorded.children = [child for child in found if child is not None]
        self.open.discard(id(error))
        return recorded

    def describe(self, error: BaseException) -> _ExceptionRecord:
        """The class and the message, which every exception has."""
        module, qualname = (self._text(_CLASS_VARS[name].__get__(type(error)), 1_000) for name in ("__module__", "__qualname__"))
        return _ExceptionRecord(module, qualname, self._text(_message(error), _MAX_MESSAGE))

    def _record_linked(self, error: BaseException | None, depth: int) -> _ExceptionRecord | None:
        if error is None or id(error) in self.open or depth >= _MAX_CHAIN or self.left <= 0:
            return None
        return self.record(error, depth + 1)

    def _text(self, value: Any, limit: int) -> str:
        """At most `limit` characters that can stand in JSON; a lone surrogate becomes its escape."""
        limit = min(limit, max(self.room, _MIN_TEXT))
        shown = str.__str__(value) if issubclass(type(value), str) else "<unknown>"
        shown = shown[:limit] + ("… (cut)" if len(shown) > limit else "")
        self.room -= len(shown)
        return shown.encode("utf-8", "backslashreplace").decode()

    def _plain(self, value: Any) -> Any:
        """The tree of a value without classes; raises for any other value, and for one that is too long."""
        limit = min(_MAX_VALUE, self.room)
        tree = Tagger(_no_class, _MAX_DEPTH, room=limit).tag(value, "error")
        data = encode_bounded(tree, limit)
        if data is None or len(data) > limit:
            raise ValueError("too long")
        self.room -= len(data)
        return tree

    def _args(self, error: BaseException) -> list[Any] | None:
        try:
            return list(self._plain(list(_get_builtin(error, "args"))))
        except Exception:  # noqa: BLE001 - arguments may be anything
            return None

    def _attributes(self, error: BaseException) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in _attributes(error):
            # A lock, a response, a name that is no text: the error is still worth recording without it.
            with contextlib.suppress(Exception):
                if type(name) is str and is_text(name) and len(name) <= min(1_000, self.room):
                    kept[name] = self._plain(value)
                    self.room -= len(name)
        return kept

    def _notes(self, error: BaseException) -> list[str]:
        notes = _get_builtin(error, "__dict__").get("__notes__")
        return [self._text(note, _MAX_MESSAGE) for note in notes[:50] if self.room > 0] if type(notes) is list else []


def _get_builtin(error: BaseException, name: str) -> Any:
    return _EXCEPTION_VARS[name].__get__(error)


def _set_builtin(error: BaseException, name: str, value: Any) -> None:
    _EXCEPTION_VARS[name].__set__(error, value)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - it is the user's __str__
        return f"<no message: its __str__ raised {_CLASS_VARS['__name__'].__get__(type(failure))}>"


def _no_class(_: Any) -> None:
    return None


def _attributes(error: BaseException) -> Iterator[tuple[Any, Any]]:
    """The exception's attributes: the members of builtin classes (`OSError.filename`), slots, and its `__dict__`."""
    for name, member in _members(type(error)).items():
        with contextlib.suppress(AttributeError):  # a slot that was never filled
            if (value := member.__get__(error)) is not None or not _shows_none(member):
                yield name, value
    yield from ((name, value) for name, value in list(_get_builtin(error, "__dict__").items())[:200] if name != "__notes__")


def _members(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: held
        for base in reversed(_CLASS_VARS["__mro__"].__get__(cls))
        for name, held in _CLASS_VARS["__dict__"].__get__(base).items()
        if isinstance(held, MemberDescriptorType) and not name.startswith("__")
    }


def _shows_none(member: MemberDescriptorType) -> bool:
    """Whether an empty member reads as None, as those of builtin classes do; then None is never written to it."""
    return bool(_CLASS_VARS["__module__"].__get__(member.__objclass__) == "builtins")


def _traceback(error: BaseException, recorded: _ExceptionRecord) -> str:
    """The text of the traceback, from the user's code on; empty for an error that was never raised, such as a deadline's.

    A limit cuts its beginning, because the error was raised at its end.
    """
    try:
        from traceback import extract_tb

        frames = "".join(extract_tb(users_traceback(_get_builtin(error, "__traceback__")), limit=-_MAX_FRAMES).format())
    except Exception:  # noqa: BLE001 - source lines come from loaders and caches that are not ours
        frames = ""
    if not frames:
        return ""
    last = f"{_type_name(recorded)}: {recorded.message[:1_000]}\n"
    return "Traceback (most recent call last):\n" + frames[-(_MAX_TRACEBACK - 5_000) :] + last


def _type_name(recorded: _ExceptionRecord) -> str:
    return recorded.qualname if recorded.module == "builtins" else f"{recorded.module}.{recorded.qualname}"


def _rebuild(recorded: _ExceptionRecord, key: str) -> Exception:
    error = _instance(recorded, key)
    if error is None:
        error = StepFailed(key, _type_name(recorded), recorded.message)
    if recorded.notes:
        _get_builtin(error, "__dict__")["__notes__"] = list(recorded.notes)
    cause = None if recorded.cause is None else _rebuild(recorded.cause, key)
    _set_builtin(error, "__cause__", cause)
    _set_builtin(error, "__context__", cause if recorded.context is None else _rebuild(recorded.context, key))
    _set_builtin(error, "__suppress_context__", recorded.suppress_context)
    return error


def _instance(recorded: _ExceptionRecord, key: str) -> Exception | None:
    """A new instance of the recorded class; None when there is no such class, or the record does not suit it."""
    untagger = Untagger(_no_class, _MAX_DEPTH)
    args = None if recorded.args is None else tuple(untagger.value(tree) for tree in recorded.args)
    attributes = {name: untagger.value(tree) for name, tree in recorded.attributes.items()}
    cls = _loaded_class(recorded.module, recorded.qualname)
    if cls is None:
        return None
    if issubclass(cls, BaseExceptionGroup):
        args = (recorded.group or "", [_rebuild(child, key) for child in recorded.children])
    error = _allocate(cls, (recorded.message,) if args is None else args)
    if error is not None:
        _set_attributes(error, attributes)
    return error if error is not None and _is_sound(error) else None


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


def _allocate(cls: type[Exception], args: tuple[Any, ...]) -> Exception | None:
    # Only builtin code runs here. It gives OSError its errno and UnicodeError its fields from the arguments, which no
    # assignment could; arguments that do not suit it are left out.
    bases = (base for base in _CLASS_VARS["__mro__"].__get__(cls) if _CLASS_VARS["__module__"].__get__(base) == "builtins")
    for base in (base for base in bases if issubclass(base, Exception)):
        for made_from in (args, ()):
            try:
                error: Exception = base.__new__(cls, *made_from)
            except Exception:  # noqa: BLE001, S112 - not the base that allocates this class, or arguments it does not take
                continue
            _initialise(base, error, args)
            return error
    return None


def _initialise(base: type[Exception], error: Exception, args: tuple[Any, ...]) -> None:
    with contextlib.suppress(Exception):  # arguments that do not suit the base
        base.__init__(error, *args)
    _set_builtin(error, "args", args)


def _set_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    members = _members(type(error))
    for name, value in attributes.items():
        if (member := members.get(name)) is None:
            _get_builtin(error, "__dict__")[name] = value
        elif value is not None or not _shows_none(member):
            with contextlib.suppress(Exception):  # read-only, or of another type than in the process that recorded it
                member.__set__(error, value)


_TYPES: dict[type, dict[str, type]] = {
    UnicodeDecodeError: {"encoding": str, "object": bytes, "reason": str},
    UnicodeEncodeError: {"encoding": str, "object": str, "reason": str},
    UnicodeTranslateError: {"object": str, "reason": str},
}


def _is_sound(error: Exception) -> bool:
    """Whether the fields of a UnicodeError are empty or of the types that CPython assumes, unchecked, when it formats the error.

    It reads `object` at the offset `start`, so a wrong `start` would read any memory.
    """
    for cls, types in _TYPES.items():
        if issubclass(type(error), cls):
            members = _members(cls)
            held = ((members[name].__get__(error), kind) for name, kind in types.items())
            return members["start"].__get__(error) >= 0 and all(value is None or type(value) is kind for value, kind in held)
    return True
