"""Rebuilding an exception from its record.

It is an instance of the recorded class if this process has that class under its name: no code of the class runs, memory is
allocated by the nearest builtin base, then `args` and attributes are set. Otherwise a stand-in takes its place: a `StepFailed`
that is also an instance of the nearest recorded base that is there, so that `except` clauses for that base still match.

What a rebuilt error lacks is in its notes, and in a `RebuildReport`. Where it was raised is text: the innermost error of its
chain has a `StepTraceback` as its cause. Each call makes a new instance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from perdure.codec.error_classes import CLASS_VARS, find_class, full_name, is_base_exception, members_of, mro_of, shows_none
from perdure.codec.failures import (
    FOLLOWS_FROM_CAUSE,
    MAX_DEPTH,
    STANDS_FOR,
    STOOD_FOR,
    ErrorRecord,
    Linked,
    get_builtin,
    set_builtin,
)
from perdure.codec.hints import class_for
from perdure.codec.shapes import error_text
from perdure.codec.untagging import Untagger
from perdure.codec.values import refuse_repeated_keys
from perdure.errors import StepFailed, StepTraceback

_decoder = msgspec.json.Decoder(ErrorRecord)
_FOLLOWS_FROM_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


class RebuildReport(msgspec.Struct):
    """What an error that was rebuilt lacks, with the members of a group. Causes are for people, and only have notes."""

    # Classes that have a stand-in, with the reason.
    stand_ins: dict[str, str] = {}
    # Those of them that were found when the error was recorded, and are not found now.
    gone: list[str] = []
    # Attributes that are not recorded: by class.
    lost: dict[str, list[str]] = {}


def load_error(data: bytes, key: str, modules: Sequence[str] = (), report: RebuildReport | None = None) -> Exception:
    """Return the exception that `dump_error` has recorded, as its own class or as a stand-in with the step `key`.

    A class that is not found in its own module is looked for in `modules`. `ValueError` when the data is not what `dump_error`
    wrote.
    """
    try:
        refuse_repeated_keys(data)
        rebuilder = _Rebuilder(key, modules, RebuildReport() if report is None else report)
        return rebuilder.rebuild_whole(_decoder.decode(data))
    except MemoryError:  # no fault of the data
        raise
    except Exception as error:  # RecursionError, or whatever a malformed tree makes a constructor raise
        raise ValueError(f"the recorded error cannot be read: {error_text(error)}") from error


class _Rebuilder:
    """Rebuilds one exception with its causes, contexts and members."""

    def __init__(self, key: str, modules: Sequence[str], report: RebuildReport) -> None:
        self.key = key
        self.modules = modules
        self.report = report

    def rebuild_whole(self, recorded: ErrorRecord) -> Exception:
        """Return the error, with the text of its traceback as the cause of the innermost error of its chain."""
        error = self._rebuild(recorded)
        self._report(recorded, error)
        if text := _traceback_of_chain(recorded):
            innermost: BaseException = error
            while (link := _shown_link(innermost)) is not None:
                innermost = link
            suppresses = get_builtin(innermost, "__suppress_context__")
            set_builtin(innermost, "__cause__", StepTraceback(text))
            set_builtin(innermost, "__suppress_context__", suppresses)
        return error

    def _rebuild(self, recorded: ErrorRecord) -> Exception:
        untagger = Untagger(class_for(Any), MAX_DEPTH)
        args = None if recorded.args is None else [untagger.value(tree) for tree in recorded.args]
        attributes = {name: untagger.value(tree) for name, tree in recorded.attributes.items()}
        cause = None if recorded.cause is None else self._rebuild(recorded.cause)
        context = cause if recorded.context is None else self._rebuild(recorded.context)
        links: dict[Linked, Exception | None] = {"cause": cause, "context": context}
        for number, nested in recorded.error_args.items():
            if args is not None and 0 <= number < len(args):
                args[number] = self._rebuild_nested(nested, links)
        attributes |= {name: self._rebuild_nested(nested, links) for name, nested in recorded.errors.items()}
        if recorded.group is not None:
            args = [recorded.group, [self.rebuild_whole(child) for child in recorded.children]]
        error = self._instance(recorded, [recorded.message] if args is None else args, attributes)
        if notes := [*recorded.notes, *(note for note in self._notes(recorded, error) if note not in recorded.notes)]:
            get_builtin(error, "__dict__")["__notes__"] = notes
        set_builtin(error, "__cause__", cause)
        set_builtin(error, "__context__", context)
        set_builtin(error, "__suppress_context__", recorded.suppress_context)
        return error

    def _rebuild_nested(self, nested: ErrorRecord | Linked, links: dict[Linked, Exception | None]) -> Exception | None:
        return self._rebuild(nested) if isinstance(nested, ErrorRecord) else links[nested]

    def _instance(self, recorded: ErrorRecord, args: list[Any], attributes: dict[str, Any]) -> Exception:
        """Return a new instance of the recorded class, or a stand-in when there is none, or the record does not suit it."""
        cls = find_class(recorded.module, recorded.qualname, self.modules)
        if cls is not None and (error := _sound_instance(cls, args, attributes)) is not None:
            return error
        return self._stand_in(recorded, args, attributes)

    def _report(self, recorded: ErrorRecord, error: Exception) -> None:
        name = full_name(recorded.module, recorded.qualname)
        if STOOD_FOR in get_builtin(error, "__dict__"):
            self.report.stand_ins[name] = self._reason(recorded)
            if recorded.was_found and find_class(recorded.module, recorded.qualname, self.modules) is None:
                self.report.gone.append(name)
        if recorded.lost:
            self.report.lost[name] = list(recorded.lost)

    def _stand_in(self, recorded: ErrorRecord, args: list[Any], attributes: dict[str, Any]) -> StepFailed:
        own_args = (recorded.key or self.key, full_name(recorded.module, recorded.qualname), recorded.message)
        base: Any  # mypy does not take `type[Exception]` for hashable
        for base in self._bases(recorded):
            made_from = args if issubclass(base, BaseExceptionGroup) else []
            error = None if (cls := _stand_in_class(base)) is None else _sound_instance(cls, made_from, attributes)
            if isinstance(error, StepFailed):
                break
        else:
            error = StepFailed(*own_args)
            _set_attributes(error, attributes)
        set_builtin(error, "args", own_args)
        get_builtin(error, "__dict__")[STOOD_FOR] = msgspec.structs.replace(recorded, key=own_args[0])
        return error

    def _bases(self, recorded: ErrorRecord) -> Iterator[type[Exception]]:
        """The recorded bases that this process has, the nearest first."""
        for name in recorded.bases:
            module, _, qualname = name.partition(":")
            if (found := find_class(module, qualname, self.modules)) is not None:
                yield found

    def _notes(self, recorded: ErrorRecord, error: Exception) -> Iterator[str]:
        """What the error lacks, and what to do."""
        if STOOD_FOR in get_builtin(error, "__dict__"):
            yield f"{STANDS_FOR}{full_name(recorded.module, recorded.qualname)}, which {self._reason(recorded)}"
        if recorded.lost:
            shown = ", ".join(f"{attribute} ({kind})" for attribute, kind in recorded.lost.items())
            yield f"not recorded, so not here: {shown}; {LOST_ADVICE}"

    def _reason(self, recorded: ErrorRecord) -> str:
        """Why there is a stand-in, and what to do."""
        if is_base_exception(recorded.module, recorded.qualname):
            return "is no `Exception`, so it is not raised again"
        if find_class(recorded.module, recorded.qualname, self.modules) is not None:
            return "cannot be rebuilt from its record; in the step's function raise an error of your own instead"
        what = "is defined in a function" if "<locals>" in recorded.qualname else "was not found here"
        return f"{what}; define it at module level, in a module that this process imports"


LOST_ADVICE: Final = (
    "in the step's function take from it what you need, and raise an error of your own with plain attributes, or return a value"
)


def _traceback_of_chain(recorded: ErrorRecord) -> str:
    """The tracebacks of an error and of what it came from, as Python prints them."""
    text, link = recorded.traceback, recorded.cause
    follows = FOLLOWS_FROM_CAUSE
    if link is None and not recorded.suppress_context:
        link, follows = recorded.context, _FOLLOWS_FROM_CONTEXT
    before = "" if link is None else _traceback_of_chain(link)
    return follows.join(part for part in (before, text) if part)


def _shown_link(error: BaseException) -> BaseException | None:
    """What Python shows before this error."""
    cause: BaseException | None = get_builtin(error, "__cause__")
    if cause is None and not get_builtin(error, "__suppress_context__"):
        cause = get_builtin(error, "__context__")
    return cause


@lru_cache(maxsize=256)
def _stand_in_class(base: Any) -> type[StepFailed] | None:
    """A `StepFailed` that is also an instance of this class; None if making one would run code of the class, or cannot be."""
    if type(base) is not type or any("__init_subclass__" in CLASS_VARS["__dict__"].__get__(cls) for cls in mro_of(base)[:-1]):
        return None
    if issubclass(StepFailed, base):
        return StepFailed
    bases = (base,) if issubclass(base, StepFailed) else (StepFailed, base)
    try:
        made: type[StepFailed] = type("StepFailed", bases, {"__module__": StepFailed.__module__, "__doc__": StepFailed.__doc__})
    except TypeError:  # its memory is laid out in another way, or it allows no subclass
        return None
    return made


def _sound_instance(cls: type[Exception], args: Sequence[Any], attributes: dict[str, Any]) -> Exception | None:
    """A new instance of this class; None when it cannot be allocated, or would not be safe to use."""
    error = _allocate(cls, tuple(args))
    if error is None:
        return None
    _set_attributes(error, attributes)
    return error if _is_sound(error) else None


def _allocate(cls: type[Exception], args: tuple[Any, ...]) -> Exception | None:
    # Only builtin code runs here. It gives OSError its errno and UnicodeError its fields from the arguments, which no
    # assignment could; arguments that do not suit it are left out.
    bases = (base for base in mro_of(cls) if CLASS_VARS["__module__"].__get__(base) == "builtins")
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
    set_builtin(error, "args", args)


def _set_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    members = members_of(type(error))
    for name, value in attributes.items():
        if (member := members.get(name)) is None:
            get_builtin(error, "__dict__")[name] = value
        elif value is not None or not shows_none(member):
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
            members = members_of(cls)
            held = ((members[name].__get__(error), kind) for name, kind in types.items())
            return members["start"].__get__(error) >= 0 and all(value is None or type(value) is kind for value, kind in held)
    return True
