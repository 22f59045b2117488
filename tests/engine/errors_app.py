"""A program whose steps raise errors of many libraries, and whose workflow function notes what it sees of them.

Run as a script it begins the runs, with its own classes in `__main__`; imported by another process it replays them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import httpx
import msgspec
import pydantic
import redis
import requests
import sqlalchemy.exc

from perdure import Context, Err, RetryAfter, Runtime, StepFailed, StepTimeout, StepTraceback, Workflow, register, stores

if TYPE_CHECKING or __name__ != "__main__":
    from tests.engine.errors_after_move import Moved
else:
    from tests.engine.errors_before_move import Moved


class Declined(Exception):
    """An error of the program's own."""

    def __init__(self, reason: str, *, cents: int) -> None:
        super().__init__(reason)
        self.cents = cents


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Outer:
    class Inner(LookupError):
        pass


class OwnGroup(ExceptionGroup[Exception]):
    """A group of the program's own."""


@register
@dataclass
class Receipt:
    number: int


class WithReceipt(Exception):
    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt)
        self.receipt = receipt
        self.lock = object()
        self.why = ValueError("nested")


class Model(pydantic.BaseModel):
    number: int


def reply(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://bank.example/pay"), text="no")


def fail(error: BaseException) -> NoReturn:
    raise error


def httpx_status() -> None:
    reply(402).raise_for_status()


def httpx_connect() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there", request=request)

    with httpx.Client(transport=httpx.MockTransport(handle)) as client:
        client.get("https://bank.example/")


def httpx_json() -> None:
    reply(200).json()


def requests_status() -> None:
    response = requests.Response()
    response.status_code, response.url, response.reason = 402, "https://bank.example/", "Payment Required"
    response.raise_for_status()


def requests_connect() -> None:
    requests.get("http://127.0.0.1:9/", timeout=5)


def requests_json() -> None:
    response = requests.Response()
    response._content = b"no"
    response.json()


def sqlalchemy_integrity() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE t (k INTEGER PRIMARY KEY)")
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
    finally:
        engine.dispose()


def sqlite_integrity() -> None:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO t VALUES (1), (1)")
    finally:
        connection.close()


def postgres_unique() -> None:
    fields = {"S": "ERROR", "C": "23505", "M": "duplicate key", "t": "orders", "n": "orders_pkey"}
    raise asyncpg.PostgresError.new(fields, "INSERT INTO orders")


def pydantic_validation() -> None:
    Model.model_validate({"number": "many"})


def chained() -> None:
    try:
        try:
            int("many")
        except ValueError as error:
            raise KeyError("number") from error
    except KeyError as error:
        error.add_note("look at the form")
        raise Declined("no number", cents=5) from error


def in_context() -> None:
    try:
        int("many")
    except ValueError:
        raise Declined("no number", cents=5)  # noqa: B904 - that is what is tested


def from_none() -> None:
    try:
        int("many")
    except ValueError:
        raise Declined("no number", cents=5) from None


def grouped() -> None:
    inner = ExceptionGroup("inner", [httpx.ReadTimeout("late"), ValueError("b")])
    raise ExceptionGroup("outer", [Declined("no", cents=1), inner])


def base_group() -> None:
    raise BaseExceptionGroup("mixed", [Declined("no", cents=1), asyncio.CancelledError("stopped")])


def local() -> None:
    class Local(httpx.HTTPError):
        pass

    raise Local("defined in a function")


def attribute() -> None:
    object().missing  # type: ignore[attr-defined] # noqa: B018 - it raises


def called_process() -> None:
    subprocess.run(["false"], check=True)


# What raises, and the classes that an `except` clause may name: each of them matches, on every run.
CASES: dict[str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...]]] = {
    "ValueError": (lambda: int("many"), ValueError),
    "KeyError": (lambda: dict[str, int]()["k"], KeyError),
    "ZeroDivisionError": (lambda: 1 // 0, ZeroDivisionError),
    "AttributeError": (attribute, AttributeError),
    "FileNotFoundError": (lambda: open("/nowhere/at/all"), FileNotFoundError),  # noqa: PTH123, SIM115 - it raises
    "ConnectionResetError": (lambda: fail(ConnectionResetError(104, "reset")), ConnectionResetError),
    "TimeoutError": (lambda: fail(TimeoutError("late")), TimeoutError),
    "UnicodeDecodeError": (b"\xff".decode, UnicodeDecodeError),
    "ImportError": (lambda: __import__("no_such_module"), ModuleNotFoundError),
    "JSONDecodeError": (lambda: json.loads("no"), json.JSONDecodeError),
    "CalledProcessError": (called_process, subprocess.CalledProcessError),
    "sqlite3.IntegrityError": (sqlite_integrity, sqlite3.IntegrityError),
    "asyncio.QueueEmpty": (lambda: asyncio.Queue[int]().get_nowait(), asyncio.QueueEmpty),
    "asyncio.CancelledError": (lambda: fail(asyncio.CancelledError("nobody asked")), StepFailed),
    "httpx.HTTPStatusError": (httpx_status, httpx.HTTPStatusError),
    "httpx.ConnectError": (httpx_connect, httpx.ConnectError),
    "httpx.ReadTimeout": (lambda: fail(httpx.ReadTimeout("late")), httpx.TimeoutException),
    "httpx.InvalidURL": (lambda: httpx.URL("https://\0"), httpx.InvalidURL),
    "httpx, json": (httpx_json, json.JSONDecodeError),
    "requests.HTTPError": (requests_status, requests.HTTPError),
    "requests.ConnectionError": (requests_connect, requests.ConnectionError),
    "requests.JSONDecodeError": (requests_json, requests.JSONDecodeError),
    "requests.MissingSchema": (lambda: requests.get("bank.example", timeout=1), requests.exceptions.MissingSchema),
    "sqlalchemy.IntegrityError": (sqlalchemy_integrity, sqlalchemy.exc.IntegrityError),
    "sqlalchemy.NoResultFound": (lambda: fail(sqlalchemy.exc.NoResultFound("none")), sqlalchemy.exc.InvalidRequestError),
    "sqlalchemy.ArgumentError": (lambda: sqlalchemy.create_engine("no url"), sqlalchemy.exc.ArgumentError),
    "asyncpg.UniqueViolationError": (postgres_unique, asyncpg.UniqueViolationError),
    "asyncpg.InterfaceError": (lambda: fail(asyncpg.InterfaceError("closed", hint="open it")), asyncpg.InterfaceError),
    "redis.ConnectionError": (lambda: fail(redis.ConnectionError("refused")), redis.ConnectionError),
    "redis.ResponseError": (lambda: fail(redis.ResponseError("WRONGTYPE")), redis.ResponseError),
    "redis.LockError": (lambda: fail(redis.exceptions.LockError("not owned", lock_name="a")), redis.exceptions.LockError),
    "pydantic.ValidationError": (pydantic_validation, (ValueError, StepFailed)),
    "pydantic.PydanticUserError": (
        lambda: fail(pydantic.PydanticUserError("no", code="class-not-fully-defined")),
        pydantic.PydanticUserError,
    ),
    "msgspec.ValidationError": (lambda: msgspec.json.decode(b"1", type=str), msgspec.ValidationError),
    "StepTimeout": (lambda: fail(StepTimeout("charge", 1.5)), StepTimeout),
    "RetryAfter": (lambda: fail(RetryAfter("30s")), RetryAfter),
    "of __main__": (lambda: fail(Declined("no", cents=500)), Declined),
    "moved": (lambda: fail(Moved(7)), Moved),
    "in a class": (lambda: fail(Outer.Inner("no")), Outer.Inner),
    "slots": (lambda: fail(Slotted(7)), Slotted),
    "frozen dataclass": (lambda: fail(Frozen(7)), Frozen),
    "attributes": (lambda: fail(WithReceipt(Receipt(7))), WithReceipt),
    "local": (local, (httpx.HTTPError, StepFailed)),
    "cause and notes": (chained, Declined),
    "context": (in_context, Declined),
    "from None": (from_none, Declined),
    "ExceptionGroup": (grouped, ExceptionGroup),
    "BaseExceptionGroup": (base_group, ExceptionGroup),
    "own group": (lambda: fail(OwnGroup("own", [ValueError("a")])), OwnGroup),
    "returned": (lambda: Err(Declined("no", cents=500)), StepFailed),
}


def clauses() -> dict[str, type[BaseException]]:
    """The classes that an `except` clause of this program may name."""
    named = [cls for case in CASES for cls in clauses_of(case)]
    return {name_of(base): base for cls in named for base in cls.__mro__[:-1] if issubclass(base, BaseException)}


def clauses_of(case: str) -> tuple[type[Exception], ...]:
    """The classes that match in this case."""
    classes = CASES[case][1]
    return classes if isinstance(classes, tuple) else (classes,)


def name_of(cls: type) -> str:
    """The name of a class, which is the same in the program and where it is imported."""
    is_own = cls.__module__ == __name__ or "errors_" in cls.__module__
    return cls.__qualname__ if is_own else f"{cls.__module__}.{cls.__qualname__}"


def seen(error: BaseException | None) -> Any:
    """What a workflow function can see of this error, as JSON."""
    if error is None:
        return None
    if isinstance(error, StepTraceback):
        return str(error)
    members = {
        name: getattr(error, name) for name in ("errno", "filename", "name", "object", "value", "code") if hasattr(error, name)
    }
    held = {name: value for name, value in vars(error).items() if name != "_perdure_record"}
    return {
        "type": type(error).__qualname__,
        "args": repr(error.args),
        "str": str(error),
        "attributes": {
            name: seen(value) if isinstance(value, BaseException) else repr(value)
            for name, value in sorted((members | held).items())
        },
        "cause": seen(error.__cause__),
        "context": seen(error.__context__),
        "suppresses context": error.__suppress_context__,
        "members": [seen(member) for member in error.exceptions] if isinstance(error, BaseExceptionGroup) else [],
        "matches": sorted(name for name, clause in CLAUSES.items() if isinstance(error, clause)),
    }


CLAUSES = clauses()
FIRST: dict[str, Any] = {}


async def risky(case: str) -> Any:
    return CASES[case][0]()


async def handle(ctx: Context, case: str) -> Any:
    try:
        await ctx.step(risky, case)
    except CASES[case][1] as error:
        found = FIRST[case] = seen(error)
    await ctx.wait_for_signal("go")
    return found


FLOW = Workflow("handle", handle)


async def begin(path: str) -> Any:
    """Run every case up to its wait; what the function saw."""
    async with Runtime(stores.sqlite(path), [FLOW], concurrency=0, unload_grace=0) as runtime:
        for case in CASES:
            await runtime.run(FLOW, case, id=case)
            await runtime.signal(case, "go")
    return FIRST


async def replay(path: str) -> Any:
    """Replay every case to its end; what the function saw."""
    async with Runtime(stores.sqlite(path), [FLOW], concurrency=0, on_definition_change="error") as runtime:
        outcomes = await runtime.sweep(limit=len(CASES))
    return {case: outcomes[case].unwrap() for case in CASES}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(begin(sys.argv[1]))))
