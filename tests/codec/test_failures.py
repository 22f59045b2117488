"""An exception is recorded whatever it is, and comes back as its own class where that class is known."""

from __future__ import annotations

import errno
import inspect
import json
import subprocess
import sys
import traceback
import tracemalloc
import types
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import errors
from perdure.codec import dump_error, load_error
from perdure.errors import PerdureError, RunConflict, StepFailed, StepTimeout, StepTraceback


class Plain(Exception):
    pass


class Rich(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail
        self.lock = object()

    class Inner(Exception):
        pass


class NewNeedsArguments(Exception):
    def __new__(cls, one: int, two: int) -> Self:
        return super().__new__(cls, one, two)


class Slotted(Exception):
    __slots__ = ("empty", "why")

    def __init__(self, why: str) -> None:
        self.why = why


class Evil(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Huge(Exception):
    def __str__(self) -> str:
        return "x" * 100_000_000


class Mixed(Plain, KeyError, OSError):
    pass


class Properties(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, excs: list[Exception]) -> Self:
        return super().__new__(cls, "own", excs)


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def _again(error: BaseException) -> Exception:
    return load_error(dump_error(error), "key")


def _decode_failed() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")


@pytest.mark.parametrize(
    "error",
    [
        Plain("a", 1, None, 1.5, [1], (2,)),
        Plain(),
        ValueError("x"),
        KeyError("k"),
        FileNotFoundError(errno.ENOENT, "No such file", "there"),
        OSError("just text"),
        _decode_failed(),
        StopAsyncIteration(),
        ImportError("no", name="n", path="p"),
        SyntaxError("bad", ("file", 1, 2, "text")),
        RunConflict("r", "other input"),
        StepTimeout("k", 1.5),
        StepFailed("k", {"a": 1}),
        NewNeedsArguments(1, 2),
        Rich(7, detail="d"),
        Rich.Inner("x"),
        Mixed("x"),
        Slotted("because"),
        msgspec.ValidationError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_its_own_class_with_arguments_and_text(error: Exception) -> None:
    again = _again(_raised(error))
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)


def test_what_builtin_exceptions_hold_beside_their_arguments_is_kept() -> None:
    missing, failed = _again(FileNotFoundError(2, "No such file", "there")), _again(_decode_failed())
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.filename) == (2, "there")
    assert isinstance(failed, UnicodeDecodeError)
    assert (failed.object, failed.reason) == (b"\xff", "invalid")


def test_attributes_are_kept_as_far_as_they_are_plain_values() -> None:
    again = _again(Rich(7, detail="d"))
    (note,) = vars(again).pop("__notes__")
    assert vars(again) == {"code": 7, "detail": "d"}
    assert note.startswith("not recorded, so not here: lock (object); in the step's function take from it what you need")
    slotted = _again(Slotted("because"))
    assert isinstance(slotted, Slotted)
    assert slotted.why == "because"


def test_the_constructor_is_not_called() -> None:
    calls: list[str] = []

    class Counting(Exception):
        def __new__(cls, *_: object) -> Self:
            calls.append("new")
            return super().__new__(cls)

        def __init__(self, *_: object) -> None:
            calls.append("init")

    module = types.ModuleType("counting")
    Counting.__module__, Counting.__qualname__ = "counting", "Counting"
    module.Counting = Counting  # type: ignore[attr-defined]
    sys.modules["counting"] = module
    try:
        error = Counting("x")
        calls.clear()
        assert type(_again(error)) is Counting
        assert calls == []
    finally:
        del sys.modules["counting"]


def test_a_local_class_comes_back_as_step_failed_with_type_and_message() -> None:
    class Local(Exception):
        pass

    again = _again(Local("x"))
    assert type(again) is StepFailed
    assert again.key == "key"
    assert str(again).endswith("Local: x")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_what_is_no_exception_comes_back_as_step_failed(error: BaseException) -> None:
    assert type(_again(error)) is StepFailed


def test_arguments_that_are_objects_leave_the_message() -> None:
    error = Plain("look", object())
    again = _again(error)
    assert type(again) is Plain
    assert again.args == (str(error),)
    assert again.__notes__[0].startswith("not recorded, so not here: args (str, object); ")


def test_notes_and_causes_are_restored() -> None:
    error = Plain("top")
    error.add_note("first")
    error.add_note("second")
    error.__cause__ = cause = KeyError("k")
    cause.__context__ = ValueError("deep")
    again = _again(error)
    assert again.__notes__ == ["first", "second"]
    assert isinstance(again.__cause__, KeyError)
    assert again.__suppress_context__
    assert isinstance(again.__cause__.__context__, ValueError)
    assert not again.__cause__.__suppress_context__


def test_a_cause_of_unknown_class_is_a_step_failed_too() -> None:
    class Local(Exception):
        pass

    error = Plain("top")
    error.__cause__ = Local("why")
    cause = _again(error).__cause__
    assert type(cause) is StepFailed
    assert "why" in str(cause)


def test_raise_from_none_stays_without_context() -> None:
    try:
        try:
            raise KeyError("k")
        except KeyError:
            raise Plain("x") from None
    except Plain as error:
        again = _again(error)
    assert isinstance(again.__cause__, StepTraceback)
    assert again.__suppress_context__
    assert "KeyError" not in "".join(traceback.format_exception(again))


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second = Plain("1"), Plain("2")
    first.__cause__, second.__cause__ = second, first
    again = _again(first)
    assert str(again.__cause__) == "2"
    assert again.__cause__ is not None
    assert again.__cause__.__cause__ is None


def test_a_long_chain_is_cut() -> None:
    error = Plain("0")
    for number in range(1, 5_000):
        outer = Plain(str(number))
        outer.__cause__ = error
        error = outer
    length, link = 0, _again(error).__cause__
    while link is not None:
        length, link = length + 1, link.__cause__
    assert length == 10


def test_a_group_comes_back_with_its_children() -> None:
    group = ExceptionGroup("both", [Plain("a"), ExceptionGroup("inner", [ValueError("b")])])
    again = _again(group)
    assert isinstance(again, ExceptionGroup)
    assert again.message == "both"
    assert [type(child) for child in again.exceptions] == [Plain, ExceptionGroup]
    own = _again(OwnGroup([Plain("x")]))
    assert type(own) is OwnGroup
    assert isinstance(own.exceptions[0], Plain)


def test_a_wide_group_is_cut_and_stays_a_group() -> None:
    again = _again(ExceptionGroup("many", [Plain(str(number)) for number in range(10_000)]))
    assert isinstance(again, ExceptionGroup)
    assert len(again.exceptions) < 200


def test_a_str_that_raises_or_is_huge_does_not_stop_the_recording() -> None:
    assert "__str__ raised RuntimeError" in json.loads(dump_error(Evil()))["message"]
    assert type(_again(Evil())) is Evil
    assert len(dump_error(_raised(Huge()))) < 100_000
    assert len(dump_error(_raised(Plain("y" * 10_000_000)))) < 100_000
    assert type(_again(Properties())) is Properties


def test_lone_surrogates_in_a_message_are_recorded() -> None:
    again = _again(Plain("\ud800"))
    assert again.args == ("\ud800",)


def test_the_traceback_is_kept_as_text_and_bounded() -> None:
    text = json.loads(dump_error(_raised(Plain("here"))))["traceback"]
    assert "_raised" in text
    assert "raise error" in text
    assert text.endswith("Plain: here\n")

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            raise Plain("bottom")

    with pytest.raises(Plain) as caught:
        deep(500)
    text = json.loads(dump_error(caught.value))["traceback"]
    assert len(text) < 21_000
    assert 'raise Plain("bottom")' in text


def test_the_record_names_the_class_and_is_plain_json() -> None:
    record = json.loads(dump_error(Rich(7, detail="d")))
    assert record["module"] == Rich.__module__
    assert record["qualname"] == "Rich"
    assert record["message"] == "code 7"
    assert record["args"] == ["code 7"]


def _planted(module: str, qualname: str, **more: Any) -> bytes:
    return msgspec.json.encode({"module": module, "qualname": qualname, "message": "m", **more})


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("os", "system"),
        ("os", "path.join"),
        ("antigravity", "Error"),
        ("builtins", "dict"),
        ("builtins", "KeyboardInterrupt"),
        ("builtins", "Exception.__subclasses__"),
        ("perdure.errors", "asyncio.CancelledError"),
        ("", ""),
        ("builtins", "x.<locals>.y"),
    ],
)
def test_a_planted_name_neither_imports_nor_calls(module: str, qualname: str) -> None:
    before = set(sys.modules)
    assert type(load_error(_planted(module, qualname, args=["exit 1"]), "k")) is StepFailed
    assert set(sys.modules) == before


def test_a_module_that_imports_on_attribute_access_is_not_asked() -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    sys.modules["lazy_module"] = Lazy("lazy_module")
    try:
        assert type(load_error(_planted("lazy_module", "Error"), "k")) is StepFailed
    finally:
        del sys.modules["lazy_module"]


def test_planted_attributes_do_not_reach_what_python_keeps_in_an_exception() -> None:
    attributes = {"__class__": "x", "__traceback__": 1, "args": [1], "__cause__": 2, "filename": "f"}
    error = load_error(_planted("builtins", "OSError", args=["a"], attributes=attributes), "k")
    assert type(error) is OSError
    assert (error.args, error.__cause__, error.__traceback__) == (("a",), None, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"module":1,"qualname":"x","message":"m"}',
        b'{"module":"a","module":"b","qualname":"x","message":"m"}',
        _planted("builtins", "ValueError", args=[{"$future": 1}]),
        _planted("builtins", "ValueError", args=[{"$class": ["os:system", {}]}]),
        _planted("builtins", "ValueError", args=3),
        b'{"module":"a","qualname":"b","message":"m","cause":' * 5_000 + b"null" + b"}" * 5_000,
        b"\xff",
    ],
    ids=lambda data: repr(data)[:40],
)
def test_a_corrupt_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="recorded error cannot be read"):
        load_error(data, "k")


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()))
def test_any_plain_arguments_come_back(args: list[Any]) -> None:
    assert _again(Plain(*args)).args == tuple(args)


def test_an_error_of_perdure_says_the_same_after_its_return() -> None:
    error = RunConflict("r1", "another input")
    again = _again(error)
    assert isinstance(again, PerdureError)
    assert str(again) == str(error)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Shadowed(Exception):
    """Whatever Python keeps in an exception, this class has something else under the name."""

    @property
    def _nothing(self) -> Any:
        raise RuntimeError

    __cause__ = __context__ = __suppress_context__ = __notes__ = args = __dict__ = _nothing


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in {"__module__", "__qualname__", "__name__"}:
            raise RuntimeError
        return super().__getattribute__(name)


class OfNamelessClass(Exception, metaclass=Nameless):
    pass


def test_an_exception_that_forbids_assignment_comes_back_with_its_cause_and_notes() -> None:
    error = Frozen(7)
    BaseException.__setattr__(error, "__cause__", Plain("why"))
    BaseException.__setattr__(error, "__notes__", ["a note"])
    again = _again(error)
    assert again == error
    assert (type(again.__cause__), again.__notes__, again.__suppress_context__) == (Plain, ["a note"], True)


def test_what_a_class_puts_in_place_of_what_python_keeps_is_not_asked() -> None:
    error = Shadowed("a", 1)
    BaseException.__dict__["__cause__"].__set__(error, Plain("why"))
    again = _again(_raised(error))
    assert type(again) is Shadowed
    assert BaseException.__dict__["args"].__get__(again) == ("a", 1)
    assert type(BaseException.__dict__["__cause__"].__get__(again)) is Plain
    assert "_raised" in json.loads(dump_error(error))["traceback"]


def test_a_metaclass_does_not_stop_the_recording() -> None:
    assert json.loads(dump_error(OfNamelessClass("x")))["qualname"] == "OfNamelessClass"
    assert type(_again(OfNamelessClass("x"))) is OfNamelessClass


def test_many_arguments_are_left_out_and_the_message_stays() -> None:
    data = dump_error(Plain(*range(2_000_000)))
    assert len(data) < 100_000
    assert load_error(data, "k").args[0].startswith("(0, 1, 2, ")


def _loaded(number: int) -> Exception:
    error = Plain("\0" * 10_000 + str(number), *["\0" * 10_000] * 6)
    error.__notes__ = ["\0" * 10_000] * 50
    vars(error).update({f"attribute{index}": "x" * 60_000 for index in range(200)})
    return error


def test_a_record_is_bounded_as_a_whole_and_keeps_every_message() -> None:
    data = dump_error(ExceptionGroup("many", [_loaded(number) for number in range(200)]))
    assert len(data) < 8 * 2**20
    again = load_error(data, "k")
    assert isinstance(again, ExceptionGroup)
    assert len(again.exceptions) == 99
    assert all(child["message"] for child in json.loads(data)["children"])
    first = again.exceptions[0]
    assert vars(first)["attribute0"] == "x" * 60_000


def test_a_huge_attribute_is_left_out_before_it_is_written() -> None:
    error = Plain("x")
    shared: Any = ["y"]
    for _ in range(60):
        shared = [shared, shared]
    vars(error).update(code=7, blob=b"x" * 50_000_000, shared=shared, many=["z" * 100_000] * 1_000_000)
    tracemalloc.start()
    try:
        data = dump_error(error)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    again = load_error(data, "k")
    assert vars(again) == {"code": 7, "__notes__": again.__notes__}
    assert again.__notes__[0].startswith("not recorded, so not here: blob (bytes), shared (list), many (list); ")


def test_an_attribute_whose_name_is_no_text_is_left_out_and_not_renamed() -> None:
    error = Plain("x")
    vars(error).update({"fine": 1})
    vars(error).update({1: 1, "\ud800": 2, None: 3})  # type: ignore[dict-item]
    assert vars(_again(error)) == {"fine": 1}


@pytest.mark.parametrize(
    ("qualname", "args", "attributes"),
    [
        ("UnicodeDecodeError", ["utf-8", {"$bytes": "eA=="}, -(10**9), -(10**9) + 1, "r"], {}),
        ("UnicodeDecodeError", ["utf-8", {"$bytes": "eA=="}, 0, 1, "r"], {"start": -(10**9), "end": -(10**9) + 1}),
        ("UnicodeDecodeError", ["utf-8", {"$bytes": "eA=="}, 0, 1, "r"], {"object": 5}),
        ("UnicodeDecodeError", ["utf-8", {"$bytes": "eA=="}, 0, 1, "r"], {"object": None, "reason": None}),
        ("UnicodeDecodeError", [], {"object": "text", "start": 0, "end": 1}),
        ("UnicodeEncodeError", ["utf-8", "x", -(10**9), -(10**9) + 1, "r"], {}),
        ("UnicodeEncodeError", ["utf-8", "x", 0, 1, "r"], {"object": {"$bytes": "eA=="}, "encoding": 1}),
        ("UnicodeTranslateError", ["x", -(10**9), -(10**9) + 1, "r"], {}),
        ("UnicodeTranslateError", ["x", 0, 1, "r"], {"object": 5, "reason": 6}),
    ],
    ids=str,
)
def test_a_planted_unicode_error_does_not_read_memory_that_it_must_not(qualname: str, args: Any, attributes: Any) -> None:
    data = _planted("builtins", qualname, args=args, attributes=attributes)
    program = f"from perdure.codec import load_error; print(repr(str(load_error({data!r}, 'k'))))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_unicode_error_keeps_what_changed_after_it_was_made() -> None:
    error = _decode_failed()
    error.object, error.start, error.end, error.reason = b"abc", 1, 2, "another"
    again = _again(error)
    assert isinstance(again, UnicodeDecodeError)
    assert (again.object, again.start, again.end, again.reason, str(again)) == (b"abc", 1, 2, "another", str(error))


def test_a_unicode_error_about_more_than_can_be_kept_stays_one() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        (b"x" * 1_000_000 + b"\xff").decode()
    again = _again(caught.value)
    assert type(again) is UnicodeDecodeError
    assert "position 1000000" in again.args[0]


class Empty(Exception):
    def __len__(self) -> int:
        return 0


class Dubious(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError


@pytest.mark.parametrize("error", [Empty("x"), Dubious("x")], ids=lambda error: type(error).__name__)
def test_an_exception_that_is_not_true_comes_back_as_itself(error: Exception) -> None:
    assert type(_again(error)) is type(error)


def test_a_slot_that_holds_none_is_not_empty_when_it_comes_back() -> None:
    error = Slotted("because")
    error.why = None  # type: ignore[assignment]
    again = _again(error)
    assert getattr(again, "why", "empty") is None
    assert not hasattr(again, "empty")


class Pretender:
    @property
    def __class__(self) -> Any:
        return str

    @__class__.setter
    def __class__(self, _value: Any) -> None: ...


def test_a_note_that_only_claims_to_be_text_does_not_spoil_the_record() -> None:
    error = _raised(Plain("x"))
    error.__notes__ = [Pretender(), "fine"]  # type: ignore[list-item]
    record = json.loads(dump_error(error))
    assert record["notes"] == ["<unknown>", "fine"]
    assert "_raised" in record["traceback"]


EXAMPLES = {"seconds": 2.5, "wait": 2.5, "epoch": 3, "attempts": 3, "limit": 3, "errors": [("$.steps", "is missing")]}


KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PerdureError)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_repr_of_every_error_of_perdure_shows_its_sentence(kind: type[PerdureError]) -> None:
    parameters = [] if kind.__init__ is Exception.__init__ else list(inspect.signature(kind).parameters)
    error = kind(*(EXAMPLES.get(name, f"the {name}") for name in parameters if name not in ("args", "kwargs")))
    assert repr(error) == f"{kind.__name__}({str(error)!r})"
    assert repr(load_error(dump_error(error), "key")) == repr(error)


def test_an_error_without_a_sentence_still_has_a_repr() -> None:
    error = RunConflict.__new__(RunConflict, "only one")
    assert repr(error) == "RunConflict('only one')"
