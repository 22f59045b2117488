"""What a rebuilt error is when its class is gone or was moved, what its attributes are, and where its traceback is."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest

from perdure import StepTraceback, register
from perdure.codec import dump_error, load_error
from perdure.codec.rebuilt_errors import RebuildReport
from perdure.errors import PerdureError, StepFailed

CALLS: list[str] = []


class Base(ConnectionError):
    """A base that stays when a class of it is gone."""

    def __init__(self, *_: object) -> None:
        CALLS.append("init")

    def __str__(self) -> str:
        return "of the base"


class Watched(Exception):
    """A base that would see every class that is made of it."""

    def __init_subclass__(cls) -> None:
        CALLS.append(cls.__name__)


class Meta(type):
    pass


class OfMeta(Exception, metaclass=Meta):
    pass


class Sized(OSError):
    __slots__ = ("size",)


@register
@dataclass
class Receipt:
    number: int


@contextmanager
def module(name: str, **classes: type) -> Iterator[ModuleType]:
    """A module that is there for a while, with these classes of its own."""
    made = sys.modules[name] = ModuleType(name)
    for key, cls in classes.items():
        cls.__module__, cls.__qualname__ = name, key
        setattr(made, key, cls)
    try:
        yield made
    finally:
        del sys.modules[name]


def recorded(base: type[Exception], *args: Any, **attributes: Any) -> bytes:
    """The record of an error whose class is gone."""
    with module("shop", Declined=type("Declined", (base,), {})) as shop:
        error: Exception = shop.Declined(*args)
        vars(error).update(attributes)
        return dump_error(error)


@pytest.mark.parametrize("base", [ConnectionError, Base, Sized, LookupError, UnicodeError, PerdureError, ExceptionGroup])
def test_a_stand_in_is_an_instance_of_the_nearest_base_that_is_there(base: type[Exception]) -> None:
    args = ("g", [ValueError("member")]) if base is ExceptionGroup else ("no",)
    data = recorded(base, *args, code=7)
    CALLS.clear()
    error = load_error(data, "charge")
    assert isinstance(error, StepFailed)
    assert isinstance(error, base)
    assert CALLS == []
    assert (error.key, error.error, error.was_returned) == ("charge", "shop.Declined", False)
    assert str(error).startswith("step 'charge' failed: shop.Declined: ")
    assert error.code == 7  # type: ignore[attr-defined]
    (note,) = error.__notes__
    assert note.startswith("this stands for shop.Declined, which was not found here; define it at module level, in a module that")
    if isinstance(error, ExceptionGroup):
        assert [repr(member) for member in error.exceptions] == ["ValueError('member')"]


@pytest.mark.parametrize("base", [Watched, OfMeta])
def test_a_base_whose_code_would_run_is_passed_over(base: type[Exception]) -> None:
    data = recorded(base, "no")
    CALLS.clear()
    error = load_error(data, "charge")
    assert type(error) is StepFailed
    assert CALLS == []


def test_the_nearest_base_may_be_gone_too() -> None:
    with module("shelf", Middle=type("Middle", (KeyError,), {})) as shelf:
        data = recorded(shelf.Middle, "no")
    assert isinstance(load_error(data, "charge"), KeyError)


def test_a_class_is_looked_for_in_the_modules_of_the_step_and_of_the_workflow() -> None:
    data = recorded(Exception, "no")
    with module("flows", Declined=type("Declined", (Exception,), {})) as flows, module("steps"):
        assert type(load_error(data, "k", ("steps", "flows"))) is flows.Declined
        assert isinstance(load_error(data, "k", ("steps",)), StepFailed)
        with module("shop", Declined=type("Declined", (Exception,), {})) as shop:
            assert type(load_error(data, "k", ("steps", "flows"))) is shop.Declined


def test_a_planted_name_reaches_nothing_but_exception_classes_of_these_modules() -> None:
    for qualname in ("sys", "Any", "Receipt", "recorded", "CALLS.append", "Base.__init__"):
        data = json.dumps(
            {"module": "gone", "qualname": qualname, "message": "m", "bases": [f"{__name__}:{qualname}", "no colon"]}
        )
        assert type(load_error(data.encode(), "k", (__name__,))) is StepFailed


def test_a_stand_in_is_recorded_as_what_it_stands_for() -> None:
    first = load_error(recorded(Base, "no", code=7), "charge")
    first.add_note("of the function")
    again = load_error(dump_error(first), "another key")
    assert isinstance(again, StepFailed)
    assert isinstance(again, Base)
    assert (again.args, str(again)) == (first.args, str(first))
    with module("shop", Declined=type("Declined", (Base,), {})) as shop:
        found = load_error(dump_error(first), "another key")
        assert type(found) is shop.Declined
        assert (found.args, vars(found)) == ((), {"code": 7, "__notes__": ["of the function"]})


def test_the_report_says_what_is_lacking_and_whether_it_was_there() -> None:
    report = RebuildReport()
    load_error(recorded(Base, "no", lock=object()), "charge", (), report)
    assert report.gone == ["shop.Declined"]
    assert report.lost == {"shop.Declined": ["lock"]}

    class Local(Exception):
        pass

    report = RebuildReport()
    load_error(dump_error(ExceptionGroup("g", [Local("no")])), "charge", (), report)
    assert (report.gone, len(report.stand_ins)) == ([], 1)


def test_causes_are_not_reported() -> None:
    class Local(Exception):
        pass

    error, report = ValueError("x"), RebuildReport()
    error.__cause__ = Local("no")
    load_error(dump_error(error), "charge", (), report)
    assert (report.gone, report.stand_ins, report.lost) == ([], {}, {})


def test_objects_of_registered_classes_and_errors_are_kept_as_attributes_and_arguments() -> None:
    error = ValueError(Receipt(7), KeyError("inner"))
    error.receipt, error.orig = Receipt(8), OSError(2, "No such file", "there")  # type: ignore[attr-defined]
    error.__cause__ = error.args[1]
    again: Any = load_error(dump_error(error), "k")
    assert (again.args[0], again.receipt) == (Receipt(7), Receipt(8))
    assert (type(again.orig), again.orig.errno) == (FileNotFoundError, 2)
    assert again.args[1] is again.__cause__
    assert repr(again.__cause__) == "KeyError('inner')"
    assert not hasattr(again, "__notes__")


@register
class Once(msgspec.Struct):
    """It can be made once."""

    made: ClassVar[list[int]] = []

    def __post_init__(self) -> None:
        if self.made:
            raise RuntimeError("made before")
        self.made.append(1)


def test_an_object_that_cannot_be_rebuilt_is_left_out_before_it_is_recorded() -> None:
    error = ValueError("x")
    error.once = Once()  # type: ignore[attr-defined]
    again = load_error(dump_error(error), "k")
    assert not hasattr(again, "once")
    assert f"once ({__name__}.Once)" in again.__notes__[0]


def test_what_is_not_kept_is_named_once() -> None:
    error = ValueError("x")
    error.lock, error.page = object(), sys  # type: ignore[attr-defined]
    again = load_error(dump_error(error), "k")
    (note,) = again.__notes__
    assert note.startswith("not recorded, so not here: lock (object), page (module); in the step's function take from it")
    assert load_error(dump_error(again), "k").__notes__ == [note]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def fail_twice() -> None:
    try:
        int("many")
    except ValueError as error:
        raise KeyError("number") from error


def test_the_traceback_is_the_cause_of_the_innermost_error() -> None:
    with pytest.raises(KeyError) as caught:
        fail_twice()
    first, second = (load_error(dump_error(caught.value), "k") for _ in range(2))
    innermost = first.__cause__
    assert isinstance(innermost, ValueError)
    assert isinstance(innermost.__cause__, StepTraceback)
    assert innermost.__suppress_context__ is False
    assert innermost.__cause__ is not second.__cause__
    text = innermost.__cause__.text
    places = [text.index(each) for each in ('int("many")', "direct cause of the following", 'raise KeyError("number")')]
    assert places == sorted(places)
    assert "StepTraceback" in "".join(traceback.format_exception(first))


def test_the_context_of_an_error_stays_visible() -> None:
    def fail() -> None:
        try:
            int("many")
        except ValueError:
            raise KeyError("number")  # noqa: B904 - that is what is tested

    with pytest.raises(KeyError) as caught:
        fail()
    again = load_error(dump_error(caught.value), "k")
    assert (again.__cause__, again.__suppress_context__) == (None, False)
    assert isinstance(again.__context__, ValueError)
    assert isinstance(again.__context__.__cause__, StepTraceback)
    assert "During handling of the above exception" in again.__context__.__cause__.text


def test_each_member_of_a_group_has_its_traceback() -> None:
    again = load_error(dump_error(raised(ExceptionGroup("g", [raised(ValueError("a")), raised(ValueError("b"))]))), "k")
    assert isinstance(again, ExceptionGroup)
    for each in (again, *again.exceptions):
        assert isinstance(each.__cause__, StepTraceback)
        assert each.__cause__.text.endswith(f"{each!r}".replace("('", ": ").replace("')", "") + "\n") or each is again


def test_a_base_exception_group_comes_back_as_a_group_of_exceptions() -> None:
    group = BaseExceptionGroup("g", [ValueError("a"), KeyboardInterrupt("b"), BaseExceptionGroup("h", [SystemExit(1)])])
    again = load_error(dump_error(group), "k")
    assert type(again) is ExceptionGroup
    value, interrupt, inner = again.exceptions
    assert repr(value) == "ValueError('a')"
    assert isinstance(interrupt, StepFailed)
    assert interrupt.__notes__ == ["this stands for KeyboardInterrupt, which is no `Exception`, so it is not raised again"]
    assert type(inner) is ExceptionGroup
    assert not hasattr(again, "__notes__")


def test_a_traceback_is_recorded_with_what_came_after_it_and_never_as_an_error() -> None:
    error = load_error(dump_error(raised(ValueError("x"))), "k")
    data = dump_error(raised(error))
    assert b"StepTraceback" not in data
    again = load_error(data, "k")
    assert isinstance(again.__cause__, StepTraceback)
    assert again.__cause__.text.count("in raised\n    raise error\n") == 2
    assert again.__cause__.__cause__ is None


def test_an_error_that_was_never_raised_has_no_traceback() -> None:
    assert load_error(dump_error(ValueError("x")), "k").__cause__ is None
