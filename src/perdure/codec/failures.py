"""Recording an exception as JSON; `rebuilt_errors` is the way back.

An exception is recorded as data: the names of its class and of that class's bases, its message, its arguments and attributes as
far as they are plain values, objects of registered classes or exceptions themselves, its traceback as text, its notes, what
caused it, and the members of a group.

Recording must not fail, because it happens while another error is being handled: Python's own attributes of an exception are
read and written past the user's class, its `__str__` is guarded, every length and their sum is bounded, and a chain that leads
back to itself ends there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from perdure.codec.error_classes import CLASS_VARS, find_class, full_name, members_of, mro_of, shows_none
from perdure.codec.hints import class_for, name_for
from perdure.codec.scalars import is_text
from perdure.codec.tagging import Tagger
from perdure.codec.untagging import Untagger
from perdure.codec.values import encode_bounded
from perdure.errors import StepFailed, StepTraceback
from perdure.model.logs import is_of_caller, users_traceback

_MAX_MESSAGE = 10_000
_MAX_TRACEBACK = 20_000
_MAX_FRAMES = 100
_MAX_CHAIN = 10
_MAX_ERRORS = 100
_MAX_BASES = 20
_MAX_LOST = 20
_MAX_VALUE = 64 * 1024
MAX_DEPTH: Final = 50
# Of one record with its whole chain, in characters; JSON takes up to six bytes for one. Past it messages are still recorded.
_MAX_RECORD = 1_000_000
_MIN_TEXT = 200
_LONGEST_LINE = 200
# Python's own descriptors of exceptions, which a user's class cannot override.
_EXCEPTION_VARS = vars(BaseException)
# Bases that tell an `except` clause nothing.
_GENERAL = frozenset({Exception, BaseException, BaseExceptionGroup, object})
# The causes by which process pools show where an exception was raised in their process: those of concurrent.futures and loky,
# and that of multiprocessing.
_REMOTE_TRACEBACKS = frozenset({"_RemoteTraceback", "RemoteTraceback"})
# Where a stand-in keeps the record that it stands for, in its `__dict__`.
STOOD_FOR: Final = "_perdure_record"
# How the note begins that says so.
STANDS_FOR: Final = "this stands for "

# An attribute that is the error's own cause or context is not recorded twice.
Linked: TypeAlias = Literal["cause", "context"]


class ErrorRecord(msgspec.Struct, omit_defaults=True):
    """One exception as it is stored. `args` is None when they cannot be stored; `group` is the message of a group."""

    # First, in this order: lists of runs read them from the beginning of an outcome.
    module: str
    qualname: str
    message: str
    # The names of the bases that an `except` clause may name, `module:qualname`, in the order of method resolution.
    bases: list[str] = []
    # Whether this process could find the class by its name.
    was_found: bool = False
    args: list[Any] | None = None
    attributes: dict[str, Any] = {}
    # Arguments, by number, and attributes that are exceptions.
    error_args: dict[int, ErrorRecord | Linked] = {}
    errors: dict[str, ErrorRecord | Linked] = {}
    # What could not be stored: attributes, or "args", with the name of their type.
    lost: dict[str, str] = {}
    traceback: str = ""
    notes: list[str] = []
    cause: ErrorRecord | None = None
    context: ErrorRecord | None = None
    suppress_context: bool = False
    group: str | None = None
    children: list[ErrorRecord] = []
    # Of a stand-in that was recorded again: the step whose error it is.
    key: str = ""


_encode = msgspec.json.Encoder().encode


def dump_error(error: BaseException) -> bytes:
    """Return the exception as JSON; never raises."""
    try:
        return _encode(_ExceptionRecorder().record(error, 0))
    except Exception:  # noqa: BLE001 - the stack may be used up; no failure in here may hide the error
        return _encode(_ExceptionRecorder().describe(error))


def line_of(error: BaseException) -> str:
    """Return the error in one line: its class, its message, and where the user's code raised it; never raises."""
    name, message = CLASS_VARS["__qualname__"].__get__(type(error)), _message(error)
    line = one_line(f"{name}: {message}" if message else name)
    last = get_builtin(error, "__traceback__")
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_of_caller(last.tb_frame.f_code.co_filename):
        return line
    return f"{line} ({Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno})"


def one_line(text: str) -> str:
    """Return the text in one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


class _ExceptionRecorder:
    """Records one exception with its causes, contexts and members, within one budget."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.left = _MAX_ERRORS
        self.room = _MAX_RECORD

    def record(self, error: BaseException, depth: int) -> ErrorRecord:
        self.open.add(id(error))
        self.left -= 1
        stood_for = _stood_for(error)
        recorded = self.describe(error) if stood_for is None else msgspec.structs.replace(stood_for)
        recorded.traceback = self._traceback(error, recorded)
        recorded.notes = self._notes(error, is_stand_in=stood_for is not None)
        cause, context = _cause_of(error), get_builtin(error, "__context__")
        recorded.cause = self._record_linked(cause, depth)
        recorded.context = self._record_linked(context, depth) if context is not cause else None
        recorded.suppress_context = get_builtin(error, "__suppress_context__")
        if stood_for is None:
            linked: dict[int, Linked] = {id(context): "context", id(cause): "cause"}
            self._record_args(error, recorded, linked, depth)
            self._record_attributes(error, recorded, linked, depth)
        if issubclass(type(error), BaseExceptionGroup):
            recorded.group = self._text(BaseExceptionGroup.message.__get__(error), _MAX_MESSAGE)
            found = (self._record_linked(child, depth) for child in BaseExceptionGroup.exceptions.__get__(error))
            recorded.children = [child for child in found if child is not None]
        self.open.discard(id(error))
        return recorded

    def describe(self, error: BaseException) -> ErrorRecord:
        """Return the class, its bases and the message, which every exception has."""
        cls: type = type(error)
        if issubclass(cls, BaseExceptionGroup) and not issubclass(cls, Exception):
            cls = ExceptionGroup  # its members that are no `Exception` come back as stand-ins
        module, qualname = self._name(cls)
        bases = [base for base in mro_of(cls)[1:] if issubclass(base, BaseException) and base not in _GENERAL]
        return ErrorRecord(
            module,
            qualname,
            self._text(_message(error), _MAX_MESSAGE),
            [":".join(self._name(base)) for base in bases[:_MAX_BASES]],
            find_class(module, qualname) is not None,
        )

    def _name(self, cls: type) -> tuple[str, str]:
        module, qualname = (self._text(CLASS_VARS[name].__get__(cls), 1_000) for name in ("__module__", "__qualname__"))
        return module, qualname

    def _record_linked(self, error: BaseException | None, depth: int) -> ErrorRecord | None:
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
        """The tree of a value, with objects of registered classes; raises for any other value, and for one that is too long."""
        limit = min(_MAX_VALUE, self.room)
        tree = Tagger(name_for(Any), MAX_DEPTH, room=limit).tag(value, "error")
        data = encode_bounded(tree, limit)
        if data is None or len(data) > limit:
            raise ValueError("too long")
        if b'"$class' in data:  # which may refuse to be rebuilt
            Untagger(class_for(Any), MAX_DEPTH).value(msgspec.json.decode(data))
        self.room -= len(data)
        return tree

    def _record_args(self, error: BaseException, recorded: ErrorRecord, linked: dict[int, Linked], depth: int) -> None:
        """Record the arguments; if one of them cannot be stored, none, since their places would not be right."""
        args: tuple[Any, ...] = get_builtin(error, "args")
        if issubclass(type(error), BaseExceptionGroup):
            return  # they are its message and its members
        try:
            recorded.args = list(self._plain([None if _is_error(value) else value for value in args]))
        except Exception:  # noqa: BLE001 - arguments may be anything
            recorded.lost["args"] = ", ".join(map(self._type_name, args[:5]))
            return
        for number, value in enumerate(args):
            if _is_error(value) and (nested := linked.get(id(value)) or self._record_linked(value, depth)) is not None:
                recorded.error_args[number] = nested

    def _record_attributes(self, error: BaseException, recorded: ErrorRecord, linked: dict[int, Linked], depth: int) -> None:
        for name, value in _attributes(error):
            if not (type(name) is str and is_text(name) and len(name) <= min(1_000, self.room)):
                continue  # the error is still worth recording without it
            self.room -= len(name)
            if _is_error(value):
                if (nested := linked.get(id(value)) or self._record_linked(value, depth)) is not None:
                    recorded.errors[name] = nested
                continue
            try:
                recorded.attributes[name] = self._plain(value)
            except Exception:  # noqa: BLE001 - a lock, a response
                if len(recorded.lost) < _MAX_LOST:
                    recorded.lost[name] = self._type_name(value)

    def _type_name(self, value: Any) -> str:
        return full_name(*self._name(type(value)))

    def _notes(self, error: BaseException, *, is_stand_in: bool) -> list[str]:
        found = get_builtin(error, "__dict__").get("__notes__")
        if type(found) is not list:
            return []
        notes = [self._text(note, _MAX_MESSAGE) for note in found[:50] if self.room > 0]
        # Where the class is found, that note would not be true.
        return [note for note in notes if not note.startswith(STANDS_FOR)] if is_stand_in else notes

    def _traceback(self, error: BaseException, recorded: ErrorRecord) -> str:
        """The text of where it was raised: before that, where it was raised in a step, if it was recorded before."""
        earlier = _earlier_traceback(get_builtin(error, "__cause__"))
        own = "" if earlier and _is_remote(get_builtin(error, "__cause__")) else _traceback(error, recorded)
        both = FOLLOWS_FROM_CAUSE.join(text for text in (earlier, own) if text)
        return self._text(both if len(both) <= _MAX_TRACEBACK else earlier or own, _MAX_TRACEBACK)


FOLLOWS_FROM_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"


def get_builtin(error: BaseException, name: str) -> Any:
    """Read what Python keeps in an exception, past the user's class."""
    return _EXCEPTION_VARS[name].__get__(error)


def set_builtin(error: BaseException, name: str, value: Any) -> None:
    """Write what Python keeps in an exception, past the user's class."""
    _EXCEPTION_VARS[name].__set__(error, value)


def _stood_for(error: BaseException) -> ErrorRecord | None:
    """The record for which this error is a stand-in. It is recorded again as what it stands for."""
    found = get_builtin(error, "__dict__").get(STOOD_FOR) if issubclass(type(error), StepFailed) else None
    return found if type(found) is ErrorRecord else None


def _cause_of(error: BaseException) -> BaseException | None:
    """The cause, unless it only shows where the error was raised."""
    cause: BaseException | None = get_builtin(error, "__cause__")
    return None if cause is None or _earlier_traceback(cause) else cause


def _earlier_traceback(cause: BaseException | None) -> str:
    """The text of a traceback that came as a cause: from a record, or from another process."""
    if cause is None:
        return ""
    if type(cause) is StepTraceback:
        return cause.text
    if _is_remote(cause):
        text = get_builtin(cause, "__dict__").get("tb")
        return text.strip('\n"') + "\n" if type(text) is str else ""
    return ""


def _is_remote(cause: BaseException) -> bool:
    return CLASS_VARS["__qualname__"].__get__(type(cause)) in _REMOTE_TRACEBACKS


def _is_error(value: Any) -> bool:
    return issubclass(type(value), BaseException)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - it is the user's __str__
        return f"<no message: its __str__ raised {CLASS_VARS['__name__'].__get__(type(failure))}>"


def _attributes(error: BaseException) -> Iterator[tuple[Any, Any]]:
    """The exception's attributes: the members of builtin classes (`OSError.filename`), slots, and its `__dict__`."""
    for name, member in members_of(type(error)).items():
        if member in _NO_ATTRIBUTES:
            continue
        with contextlib.suppress(AttributeError):  # a slot that was never filled
            if (value := member.__get__(error)) is not None or not shows_none(member):
                yield name, value
    held = list(get_builtin(error, "__dict__").items())[:200]
    yield from ((name, value) for name, value in held if name not in ("__notes__", STOOD_FOR))


# The object without the attribute, which Python keeps for its suggestions ("Did you mean"), and what is recorded of every group.
_NO_ATTRIBUTES = (vars(AttributeError)["obj"], vars(BaseExceptionGroup)["message"], vars(BaseExceptionGroup)["exceptions"])


def _traceback(error: BaseException, recorded: ErrorRecord) -> str:
    """The text of the traceback, from the user's code on; empty for an error that was never raised, such as a deadline's.

    A limit cuts its beginning, because the error was raised at its end.
    """
    try:
        from traceback import extract_tb

        frames = "".join(extract_tb(users_traceback(get_builtin(error, "__traceback__")), limit=-_MAX_FRAMES).format())
    except Exception:  # noqa: BLE001 - source lines come from loaders and caches that are not ours
        frames = ""
    if not frames:
        return ""
    last = f"{full_name(recorded.module, recorded.qualname)}: {recorded.message[:1_000]}\n"
    return "Traceback (most recent call last):\n" + frames[-(_MAX_TRACEBACK - 5_000) :] + last
